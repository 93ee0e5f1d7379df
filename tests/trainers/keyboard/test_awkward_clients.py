"""Clients in other places, and one with an extreme loss: identity decides, and nothing of one client is released."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainers.keyboard import toy
from tests.trainers.keyboard.test_round import flat
from trainers import cli
from trainers.common import metrics
from trainers.keyboard import corpus
from trainers.keyboard.train import Run


def copied(state):
    """The state, which a round consumes."""
    return jax.tree.map(jnp.array, state)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run, never started, with three clients that have equally many examples, so that their order is their place."""
    folder = tmp_path_factory.mktemp("places")
    # Twelve bits round coarsely: a rounding key that followed the place would be seen.
    config = toy.config(
        folder, report_goal=2, rounds=3, min_separation=1, secure_aggregation="secagg", secagg_bits=12
    )
    run = Run(config, corpus.load(config), folder / "run")
    sizes = [len(rows) for rows in run.data.train]
    a, b, c = next(
        [i for i, n in enumerate(sizes) if n == size][:3] for size in sizes if sizes.count(size) > 2
    )
    return run, (a, b, c)


def test_data_and_keys_follow_the_client_whatever_its_place(three):
    """Places filled as (a, b), (b, a), (c, a) give what the same cohorts give in another order (AC24)."""
    run, (a, b, c) = three

    def after(*cohorts):
        state = run.start()
        for cohort in cohorts:
            state, _ = run.advance(state, list(cohort))
        return flat(state.round.params)

    one = after((a, b), (b, a), (c, a))
    assert np.linalg.norm(after((b, a), (a, b), (a, c)) - one) <= 1e-6 * np.linalg.norm(one)
    for other in (((a, b), (b, a), (c, b)), ((a, c), (b, a), (b, a))):  # whose turn it is does matter
        assert np.linalg.norm(after(*other) - one) > 1e-4 * np.linalg.norm(one)


def test_timers_follow_the_client_whatever_its_place(three):
    run, _ = three
    state, count, last = run.start(), np.zeros(24, int), np.full(24, -1)
    for t in range(3):
        state, reporters, failed = run.next_cohort(state, t)
        assert not failed
        count[reporters] += 1
        last[reporters] = t
        np.testing.assert_array_equal(np.asarray(state.devices.count), count)
        np.testing.assert_array_equal(np.asarray(state.devices.last)[count > 0], last[count > 0])
        np.testing.assert_array_equal(np.asarray(state.devices.ready)[count > 0], last[count > 0] + 1)


NUMBER = re.compile(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?")


def numbers(text: str) -> np.ndarray:
    return np.array([float(found) for found in NUMBER.findall(text)])


def near(some: np.ndarray, those: np.ndarray) -> bool:
    """Whether any of `some` is one of `those` but for rounding."""
    return bool((np.abs(some[:, None] - those[None]) <= 1e-5 * np.abs(those[None])).any())


def test_no_norm_loss_or_text_of_a_client_is_released(tmp_path, capsys):
    """A client whose text is "zqx zqx zqx" and whose loss is extreme (AC59)."""
    config = toy.config(tmp_path, client_learning_rate=60.0, max_examples=16)
    rows = [json.loads(line) for line in (tmp_path / "clients.jsonl").read_text().splitlines()]
    rows[0]["text"] = (["zqx zqx zqx"] * 4 + ["we we we"] * 4) * 2  # each batch unlearns the one before
    (tmp_path / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["keyboard", *toy.argv(config)]) == 0
    said = capsys.readouterr()
    folder = pathlib.Path(config.run_dir)

    # Again, each client of each round also by itself.
    run = Run(config, corpus.load(config), folder)
    state, losses, norms, rare = run.start(), [], [], None
    for t in range(config.rounds):
        state, reporters, _ = run.next_cohort(state, t)
        for i in reporters:
            _, alone = run.advance(copied(state), [i])
            norms.append(float(alone.operator.norm))
            losses.append(float(alone.operator.metrics["loss"]) / float(alone.operator.metrics["batches"]))
            rare = losses[-1] if i == 0 else rare
        state, _ = run.advance(state, reporters)
    assert rare == max(losses) > 10 * np.median(losses)

    private = np.array([*losses, *norms])
    operator = metrics.read(folder / "operator.jsonl")
    private = np.append(private, [row[name] for row in operator for name in ("training_loss", "mean_norm")])
    assert all(row["covered_by_guarantee"] is False for row in operator)
    assert near(numbers((folder / "operator.jsonl").read_text()), private)  # the search finds what is there
    labelled = {"operator.jsonl", "timing.jsonl", "ngram.json", "participation.jsonl", "manifest.json"}
    released = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    assert labelled <= released.keys()
    for name, text in (released | {"standard output": said.out, "standard error": said.err}).items():
        assert toy.RARE not in text, name
        assert name in labelled or not near(numbers(text), private), name
    for path in (folder / "checkpoints").rglob("*"):
        assert not path.is_file() or toy.RARE.encode() not in path.read_bytes(), path
