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


def test_clients_text_is_not_taken_as_public(tmp_path, capsys):
    config = toy.config(tmp_path, public=str(tmp_path / "clients.jsonl"), vocabulary="public")
    assert cli.main(["keyboard", *toy.argv(config)]) == 2
    assert "clients' own data" in one_line(capsys)
