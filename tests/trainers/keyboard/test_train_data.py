"""The data a run is given: other columns, empty files, clients' text where public text is asked for."""

import dataclasses
import json

import numpy as np

from tests.trainers.keyboard import toy
from tests.trainers.keyboard.test_train import one_line
from trainers import cli
from trainers.common import metrics
from trainers.keyboard import corpus, session


def test_an_empty_data_file_is_named(tmp_path, capsys):
    (tmp_path / "nothing.jsonl").touch()
    config = toy.config(tmp_path, data=str(tmp_path / "nothing.jsonl"))
    assert cli.main(["keyboard", *toy.argv(config)]) == 2
    assert "nothing.jsonl is empty" in one_line(capsys)


def test_columns_of_other_names_can_be_given(tmp_path, capsys):
    config = toy.config(tmp_path)
    renamed = (
        (tmp_path / "clients.jsonl").read_text().replace('"client_id"', '"user"').replace('"text"', '"said"')
    )
    (tmp_path / "other.jsonl").write_text(renamed)
    other = toy.config(tmp_path, data=str(tmp_path / "other.jsonl"))
    assert cli.main(["keyboard", *toy.argv(other)]) == 2
    assert "--client-field" in one_line(capsys)
    given = toy.config(tmp_path, data=str(tmp_path / "other.jsonl"), client_field="user", text_field="said")
    assert corpus.load(given).digests == corpus.load(config).digests


def test_clients_without_a_usable_example_take_part_and_send_zero(tmp_path):
    """Three of four, so that some rounds have nobody with an example."""
    config = toy.config(tmp_path, rounds=4, report_goal=1, evaluate_every=4)
    rows = [json.loads(line) for line in (tmp_path / "clients.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        if row["split"] == "train" and i % 4:
            row["text"] = [[], [""], ["   "]][i % 3]
    (tmp_path / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = corpus.load(config)
    empty = {i for i, examples in zip(data.ids, data.train) if not len(examples)}
    assert len(empty) == 18
    assert len(data.ids) == 24
    result, _ = session.train(config)
    assert np.isfinite(result["perplexity"])
    rounds = metrics.read(tmp_path / "run" / "participation.jsonl")
    operator = metrics.read(tmp_path / "run" / "operator.jsonl")
    for line, seen in zip(rounds, operator, strict=True):
        assert seen["num_empty"] == len(empty & set(line["devices"]))
        assert np.isfinite(seen["training_loss"])
        assert np.isfinite(seen["mean_norm"])
    assert {seen["num_empty"] for seen in operator} == {0, 1}  # nobody at all in some rounds


def test_a_run_killed_before_its_first_checkpoint_starts_anew(tmp_path, capsys):
    config = toy.config(tmp_path, rounds=2)
    session.train(dataclasses.replace(config, resume=True))  # killed before there was a folder
    assert "nothing was written to" in capsys.readouterr().err
    folder = tmp_path / "killed"
    for name in ("ngram.json", "mechanism.json"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes((tmp_path / "run" / name).read_bytes())
    (folder / "ngram.json").write_text('{"top1_words": 99.0}')  # of other data: nothing says whose it is
    again = dataclasses.replace(config, run_dir=str(folder), resume=True)
    assert cli.main(["keyboard", *toy.argv(again)]) == 0
    for name in ("ngram.json", "participation.jsonl", "metrics.jsonl"):
        assert (folder / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    for other in (
        "participation.jsonl",
        "notes.txt",
    ):  # something was released, or it is somebody else's folder
        (folder / "config.json").unlink(missing_ok=True)
        (folder / other).write_text("x")
        assert cli.main(["keyboard", *toy.argv(again)]) == 2
        assert "no config.json" in one_line(capsys)


def test_bad_records_stop_a_run_or_are_skipped_and_told(tmp_path, capsys):
    """What was left out, cut or changed is said, and kept in the manifest (AC25, AC26, AC28)."""
    config = toy.config(tmp_path, rounds=1)
    with open(tmp_path / "clients.jsonl", "ab") as file:
        for text in (
            b'["we see\\u0000 tea"]}\n',
            b'["raw\0nul"]}\n',
            b'["' + b"ab " * 10_000 + b'"]}\n',
            b'["thr',
        ):
            file.write(b'{"client_id": "c1", "split": "train", "text": ' + text)
    assert cli.main(["keyboard", *toy.argv(config)]) == 2
    assert "clients.jsonl, line 34: not valid JSON" in one_line(capsys)
    assert not (tmp_path / "run").exists()
    assert cli.main(["keyboard", *toy.argv(dataclasses.replace(config, skip_bad=True))]) == 0
    said = capsys.readouterr().err
    told = json.loads((tmp_path / "run" / "manifest.json").read_text())["data"]
    assert told[0].startswith("24 clients, ")
    assert told[0].endswith("; splits given by the data")
    for note in (
        "1 examples were cut at the most tokens allowed",
        "1 NUL characters were removed",
        "2 bad records were skipped",
        "skipped: line 34: not valid JSON",
        "skipped: line 36: not valid JSON",
    ):
        assert any(line.startswith(note) for line in told), (note, told)
        assert note in said


def test_clients_text_is_not_taken_as_public(tmp_path, capsys):
    config = toy.config(tmp_path, public=str(tmp_path / "clients.jsonl"), vocabulary="public")
    assert cli.main(["keyboard", *toy.argv(config)]) == 2
    assert "clients' own data" in one_line(capsys)
