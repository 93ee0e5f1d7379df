"""Tables: no line decides about the others, whatever quotes it holds."""

import pytest

from trainers.common import parallel_text, readers, tables
from trainers.common.errors import InputError


def test_a_line_of_tabs_is_a_record_whatever_quotes_it_holds(tmp_path):
    """Read as CSV, two stray quotes would join all lines between them into one cell."""
    cells = ['5" wide', '"open', '"open"', '"a ""b"" c"', '""', '"', 'x"y"', '"""']
    path = tmp_path / "d.tsv"
    path.write_text("client_id\ttext\n" + "".join(f"c{i}\t{cell}\n" for i, cell in enumerate(cells)))
    read = [row.fields["text"] for row in tables.rows(path) if row.fields]
    assert read == ['5" wide', '"open', "open", 'a "b" c', "", '"', 'x"y"', '"""']
    path.write_text('client_id\ttext\na\t"one\ttwo"\nb\t"x\ty\nc\t"z"\n')
    assert [row.fields and row.fields["text"] for row in tables.rows(path)] == ["one\ttwo", None, "z"]
    path.write_bytes(b"client_id\ttext\na\tb\nc\tx\0y\nd\t\xff\ne\tf\n\ng\th\ti\n")
    problems = [(row.where, row.problem) for row in tables.rows(path) if row.problem]
    assert [where for where, _ in problems] == ["line 3", "line 4", "line 7"]
    assert "NUL" in problems[0][1]
    assert "3 cells, but the header names 2" in problems[2][1]


def test_a_first_line_that_is_somebodys_text_is_not_shown_whole(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text("Patient John Smith lives in Bonn,Patient John Smith lives in Bonn\n")
    with pytest.raises(InputError) as refused:
        list(tables.rows(path))
    assert "Patient John Smith l..." in str(refused.value)
    assert "Bonn" not in str(refused.value)


def test_one_more_pair_never_takes_others_along(tmp_path):
    """The unit of a released histogram is a pair: which are counted depends on no other."""
    lines = ["en\tde", *(f"source {i}\tZiel {i}" for i in range(30))]
    lines[20] = 'size 5"\tFenster 5 Zoll'
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(lines) + "\n")
    before, _ = parallel_text.read_pairs(path)
    path.write_text("\n".join([*lines[:5], '"open the file\töffnen', *lines[5:]]) + "\n")
    after, _ = parallel_text.read_pairs(path)
    assert [p for p in after if p.source != '"open the file'] == before
    assert len(before) == 30

    path = tmp_path / "pairs.csv"
    lines = ["en,de", *(f"source {i},Ziel {i}" for i in range(30))]
    lines[5], lines[20] = '"open the file,Datei', 'size 5",Fenster 5 Zoll'
    path.write_text("\n".join(lines) + "\n")
    for skip in (False, True):
        with pytest.raises(InputError, match="lines 6 to 21: a cell of several lines, which is no sentence"):
            parallel_text.read_pairs(path, skip_bad=skip)


def test_a_comment_of_several_lines_is_no_sentence_and_may_be(tmp_path):
    """Where nothing rests on each pair alone; a line end behind a sentence is none of it."""
    path = tmp_path / "pairs.csv"
    path.write_text('en,de,comment\na,b,"two\nlines"\n"c\n",d,x\n')
    pairs, _ = parallel_text.read_pairs(path)
    assert [(p.source, p.target) for p in pairs] == [("a", "b"), ("c", "d")]
    with pytest.raises(InputError, match="lines 2 to 3: a cell of several lines"):
        parallel_text.read_train(path)


def test_records_of_several_lines_are_told(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text('client_id,text\nc0,a\nc1,"hello\nc2,my secret is four"\nc3,b\n')
    data = readers.read_clients(path)
    assert data.ids == ["c0", "c1", "c3"]
    assert any(line.startswith("1 records of a table span several lines") for line in data.report.lines())


def test_a_quote_without_its_pair_is_no_record_that_can_be_skipped(tmp_path):
    lines = ["client_id,text", *(f"c{i},text {i}" for i in range(30))]
    lines[5] = 'c4,"text 4'
    path = tmp_path / "d.csv"
    path.write_text("\n".join(lines) + "\n")
    for skip in (False, True):
        with pytest.raises(InputError, match=r"lines 6 to 31: not valid CSV .* a quote without its pair"):
            readers.read_clients(path, skip_bad=skip)
