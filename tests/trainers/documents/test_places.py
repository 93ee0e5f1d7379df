"""A release writes over nothing of its user's, and spends nothing where it cannot write."""

import json
import shutil
import threading

import pytest

from tests.trainers.documents.test_commands import run
from trainers.common import statements
from trainers.documents import ledger
from trainers.documents import release as command

TEXT = "The ship was in the harbour. The captain."


@pytest.fixture
def release(capsys, fitted, tmp_path):
    """Runs a release of `private.jsonl` with these options instead; status and standard error."""
    (tmp_path / "private.jsonl").write_text(json.dumps({"id": "A", "text": TEXT}) + "\n")

    def call(**options):
        given = {
            "run-dir": fitted,
            "data": tmp_path / "private.jsonl",
            "output": tmp_path / "o.parquet",
            "ledger": tmp_path / "ledger.json",
            "epsilon": 10,
            "method": "bounded_sum",
        } | options
        words = [word for k, v in given.items() for word in ((f"--{k}",) if v is True else (f"--{k}", v))]
        status, lines, err = run(capsys, "release", *words, "--json")
        return status, (json.loads(lines[-1]) if status == 0 else err)

    return call


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("data", "output", "ledger"),
    [
        ("private.jsonl", "private.jsonl", "ledger.json"),
        ("private.jsonl", "link.jsonl", "ledger.json"),
        ("letters", "letters/sub/a.txt", "ledger.json"),
        ("x.privacy.json", "x", "ledger.json"),
        ("private.jsonl", "z", "z.privacy.json"),
        ("private.jsonl", "ledger.json", "ledger.json"),
        ("private.jsonl", "ledger.json.lock", "ledger.json"),
        ("private.jsonl", "RUN/fit.json", "ledger.json"),
        ("private.jsonl", "RUN/../fit/documents.npz", "ledger.json"),
        ("private.jsonl", "RUN/ledger.json", "ledger.json"),
    ],
)
def test_nothing_is_written_over_documents_ledger_or_fit(release, fitted, tmp_path, data, output, ledger):
    (tmp_path / "letters" / "sub").mkdir(parents=True)
    (tmp_path / "letters" / "sub" / "a.txt").write_text(TEXT)
    (tmp_path / "x.privacy.json").write_text(json.dumps([{"id": "A", "text": TEXT}]))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "private.jsonl")
    (tmp_path / "RUN").symlink_to(fitted)
    before = contents(tmp_path), contents(fitted)
    status, err = release(data=tmp_path / data, output=tmp_path / output, ledger=tmp_path / ledger)
    assert status == 2
    assert "would overwrite" in err
    assert len(err.splitlines()) == 1
    assert (contents(tmp_path), contents(fitted)) == before


@pytest.mark.parametrize(
    "closed", ["o.parquet", "o.parquet.privacy.json", "o.parquet.privacy.md", "ledger.json"]
)
def test_a_release_that_cannot_write_spends_nothing(release, tmp_path, closed):
    (tmp_path / closed).mkdir()
    status, err = release()
    assert status == 2
    assert closed in err
    assert "folder" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "ledger.json").is_file()


def test_a_ledger_that_cannot_be_made_is_one_line(release, tmp_path):
    status, err = release(ledger=tmp_path / "private.jsonl" / "ledger.json")
    assert status == 2
    assert "--ledger" in err
    assert not (tmp_path / "o.parquet").exists()


def test_names_that_meet_in_a_third_document_add_what_all_spent(release, tmp_path):
    for name, text in (("A", TEXT), ("B", TEXT), ("A", f"{TEXT} A wave.")):
        (tmp_path / "private.jsonl").write_text(json.dumps({"id": name, "text": text}) + "\n")
        status, result = release(**{"allow-repeats": True})
        assert status == 0
    assert result["guarantee"]["epsilon"] == 30


def test_documents_without_sentences_spend_nothing(release, tmp_path):
    def write(*texts):
        rows = [{"id": f"{i}", "text": text} for i, text in enumerate(texts)]
        (tmp_path / "private.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("", " ", "---", TEXT)
    for _ in range(2):
        status, result = release(ledger=tmp_path / "ledger.json")
        if status == 0:
            assert result["guarantee"]["epsilon"] == 10
            (only,) = documents = json.loads((tmp_path / "ledger.json").read_text())["documents"]
            assert len(only["releases"]) == 1
            write("", " ", "---")
    assert (status, result["without_sentences"], result["repeated"]) == (0, 3, 0)
    assert result["guarantee"]["epsilon"] == 10
    assert json.loads((tmp_path / "ledger.json").read_text())["documents"] == documents


def test_the_same_sentences_twice_in_one_call_are_a_repeat(release, tmp_path):
    rows = [{"id": "a", "text": TEXT}, {"id": "b", "text": TEXT.replace(". ", ".\n\n---\n\n")}]
    (tmp_path / "private.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, err = release()
    assert status == 2
    assert "'b'" in err
    assert not (tmp_path / "o.parquet").exists()
    status, result = release(**{"allow-repeats": True})
    assert (status, result["guarantee"]["epsilon"]) == (0, 20)


def test_a_variant_that_the_method_lacks_is_one_line(release, fitted, tmp_path):
    folder = shutil.copytree(fitted, tmp_path / "fit")
    record = json.loads((folder / "fit.json").read_text())
    record["choices"]["bounded_sum"]["10"]["overall"] = "magic"
    (folder / "fit.json").write_text(json.dumps(record))
    status, err = release(**{"run-dir": folder})
    assert status == 2
    assert "no variant 'magic'" in err
    assert not (tmp_path / "ledger.json").exists()


def test_documents_advise_no_option_that_they_lack(release, tmp_path):
    (tmp_path / "private.jsonl").write_text('{"text": "One."}\n{"text": null}\n')
    status, err = release()
    assert status == 2
    assert "line 2" in err
    assert "--skip-bad" not in err


@pytest.mark.parametrize("stop", ["statement", "output"])
def test_a_release_that_is_stopped_has_been_paid_for_and_stated_first(release, tmp_path, monkeypatch, stop):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(*((statements, "write") if stop == "statement" else (command, "write")), killed)
    assert release()[0] == 130
    monkeypatch.undo()
    assert (tmp_path / "o.parquet.privacy.json").exists() == (stop == "output")
    assert not (tmp_path / "o.parquet").exists()
    status, err = release()
    assert (status, "released before" in err) == (2, True)


def test_a_second_release_waits_for_the_ledger_and_sees_the_first(tmp_path):
    path, entered = tmp_path / "ledger.json", threading.Event()

    def second():
        with ledger.opened(path) as book:
            entered.set()
            book.add("b", "Two.", ledger.Entry(2.0, "m"))
            book.write()

    thread = threading.Thread(target=second)
    with ledger.opened(path) as book:
        thread.start()
        assert not entered.wait(0.3)
        book.add("a", "One.", ledger.Entry(1.0, "m"))
        book.write()
    thread.join(10)
    read = ledger.Ledger(path)
    assert [e.epsilon for e in (*read.spent("a", "One."), *read.spent("b", "Two."))] == [1.0, 2.0]


def test_folders_are_read_whole(release, tmp_path):
    folder = tmp_path / "letters"
    (folder / "dir.txt").mkdir(parents=True)
    (folder / "dir.txt" / "a.txt").write_text(TEXT, encoding="utf-8-sig")
    (folder / "b.TXT").write_text("The judge was in the court. A verdict.")
    status, result = release(data=folder)
    assert (status, result["documents"]) == (0, 2)
