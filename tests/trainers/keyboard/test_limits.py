"""Sizes that nothing could hold, and files of a run that say something else: one line, and nothing is made."""

import dataclasses
import json
import math

import pytest

from tests.trainers.keyboard import toy
from tests.trainers.keyboard.test_train import one_line
from trainers import cli
from trainers.common import manifest
from trainers.common.errors import InputError
from trainers.keyboard import checks, corpus, model, session

HUGE = 10**9


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"over_selection": 1e308}, "--over-selection"),
        ({"sequence_length": HUGE}, "--sequence-length must be at most 256"),
        ({"chunk_size": HUGE}, "--chunk-size"),
        ({"batch_size": HUGE}, "--batch-size"),
        ({"hidden_size": HUGE}, "--hidden-size"),
        ({"embedding_size": HUGE}, "--embedding-size"),
        ({"max_examples": 10**30}, "--max-examples"),
        ({"local_epochs": HUGE}, "--local-epochs"),
        ({"secagg_bits": HUGE}, "--secagg-bits must be at most 32"),
        ({"deployment_population": 10**400}, "--deployment-population"),
        ({"devices": HUGE}, "--devices"),
        ({"pretrain_epochs": 1e300}, "--pretrain-epochs 1e+300"),
        ({"pretrain_batch_size": HUGE}, "--pretrain-batch-size"),
        # Each may be served, all of them cannot.
        ({"chunk_size": 2**20, "batch_size": 2**20}, "GiB of memory and this machine has"),
        ({"hidden_size": 2**17, "embedding_size": 2**17, "chunk_size": 2**20}, "GiB of memory"),
        ({"pretrain_batch_size": 2**20, "hidden_size": 2**17}, "GiB of memory"),
    ],
)
def test_sizes_that_nothing_holds_are_refused_before_anything_is_made(tmp_path, capsys, changes, says):
    config = toy.config(tmp_path)
    if any(name.startswith("pretrain") for name in changes):
        (tmp_path / "public.txt").write_text("we see tea\n" * 4)
        changes = {"pretrain_data": str(tmp_path / "public.txt")} | changes
    made = set(tmp_path.iterdir())
    assert cli.main(["keyboard", *toy.argv(dataclasses.replace(config, **changes))]) == 2
    assert says in one_line(capsys)
    assert set(tmp_path.iterdir()) | {tmp_path / "public.txt"} == made | {tmp_path / "public.txt"}


def test_what_fits_is_not_refused(tmp_path, monkeypatch):
    """The bound is of what is certainly needed: the presets' own sizes are far below it."""
    config = toy.config(tmp_path)
    sizes = model.ModelConfig(num_tokens=10_004, embedding_size=96, hidden_size=670)
    dimension = model.num_params(sizes)
    large = dataclasses.replace(config, chunk_size=64, batch_size=16, sequence_length=20)
    needed = 4 * 67 * dimension + 4 * (64 * 16 * 20 * 8 * 670 + 512 * 16 * 20)
    for there, refused in ((needed, False), (needed - 1, True), (math.inf, False)):
        monkeypatch.setattr(checks, "memory", lambda there=there: there)
        try:
            checks.require_memory(large, sizes, dimension)
            assert not refused
        except InputError:
            assert refused


def test_running_out_of_memory_ends_in_one_line(monkeypatch, capsys):
    from trainers.keyboard import cli as keyboard

    for error in (MemoryError("Unable to allocate 7 TiB"), RuntimeError("RESOURCE_EXHAUSTED: 7 TiB")):

        def full(argv, error=error):
            raise error

        monkeypatch.setattr(keyboard, "main", full)
        assert cli.main(["keyboard", "train"]) == 2
        assert "not enough memory" in one_line(capsys)
    text = "RESOURCE_EXHAUSTED: Error writing: No space left on device"
    for error in (RuntimeError(text), ValueError(text), OSError(28, "No space left on device")):

        def full(argv, error=error):
            raise error

        monkeypatch.setattr(keyboard, "main", full)
        assert cli.main(["keyboard", "train"]) == 2
        said = one_line(capsys)
        assert "the disk is full" in said
        assert "make room, then the same command with --resume goes on" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "x"),
        ("hidden_size", 0),
        ("hidden_size", True),
        ("rounds", 2.5),
        ("mechanism", "magic"),
        ("restarts", [1, "2"]),
        ("clip_norm", None),
        ("run_dir", 3),
    ],
)
def test_a_config_of_wrong_values_is_named(tmp_path, capsys, name, value):
    config = toy.config(tmp_path)
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps(manifest.config_dict(config)))
    assert session.model_of(tmp_path / "run")[2] == config
    path.write_text(json.dumps(manifest.config_dict(config) | {name: value}))
    for command in ("evaluate", "export", "suggest"):
        assert cli.main(["keyboard", command, "--run-dir", str(tmp_path / "run")]) == 2
        said = one_line(capsys)
        assert str(path) in said
        assert name.replace("_", "-") in said or name in said


@pytest.mark.parametrize(
    "content",
    ["{}", "{bad", "[]", '{"top1_words": 1, "top3_words": 2, "tff_accuracy": "x", "perplexity": 3}'],
)
def test_a_damaged_file_of_ngram_scores_is_named(tmp_path, capsys, content):
    config = toy.config(tmp_path, resume=True)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(manifest.config_dict(config)))
    (folder / "ngram.json").write_text(content)
    assert cli.main(["keyboard", *toy.argv(config)]) == 2
    assert f"{folder / 'ngram.json'} is damaged" in one_line(capsys)
    (folder / "ngram.json").unlink()
    assert session.saved_ngram(folder) is None
    counted = session.ngram_scores(corpus.load(config), folder, config.evaluation_examples)
    assert session.saved_ngram(folder) == {"covered_by_guarantee": False} | counted
