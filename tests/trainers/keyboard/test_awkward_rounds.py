"""Rounds of clients whose updates or texts are awkward: what enters the sum, what the operator is told."""

import functools
import json
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainers.keyboard import toy
from tests.trainers.keyboard.test_round import flat
from tests.trainers.keyboard.test_train import one_line
from trainers import cli
from trainers.common import metrics
from trainers.common.errors import InputError
from trainers.keyboard import corpus
from trainers.keyboard import round as rounds
from trainers.keyboard.train import Run

HELD_OUT = [{"client_id": split, "text": ["we see tea"], "split": split} for split in ("validation", "test")]


def prepared(folder, records, **changes):
    """A run of one round of all these clients, the server adding their mean as it is."""
    rows = [record | {"split": "train"} for record in records] + HELD_OUT
    (folder / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = dict(
        rounds=1, report_goal=len(records), min_separation=1, mechanism="none", server_cooldown=0
    )
    settings |= dict(server_learning_rate=1.0, server_momentum=0.0, clip="fixed", clip_norm=1.0)
    config = toy.config(folder, **settings | changes)
    return Run(config, corpus.load(config), folder / "run")


def after(run, *clients):
    """`(change of the parameters, what the operator sees)` of a round of these clients."""
    state = run.start()
    before = jax.tree.map(np.array, state.round.params)
    state, info = run.advance(state, list(clients))
    change = jax.tree.map(lambda new, old: np.asarray(new) - old, state.round.params, before)
    return change, info.operator


@pytest.fixture
def sent(monkeypatch):
    """Lets a client of n examples send the n-th of these rows as the first two numbers of its bias."""

    def local_sgd(params, store, span, *, table, **_):
        examples = store.live[span.first, 0]
        update = jax.tree.map(jnp.zeros_like, params)
        update["bias"] = update["bias"].at[:2].set(table[examples - 1])
        return update, {"loss": jnp.float32(1.0), "batches": jnp.float32(1.0)}

    def sends(*table):
        found = functools.partial(local_sgd, table=jnp.asarray(table, jnp.float32))
        monkeypatch.setattr(rounds.client, "local_sgd", found)

    return sends


def test_bad_updates_count_as_zero_are_told_to_the_operator_alone_and_leave_the_noise_as_it_is(
    tmp_path, sent
):
    """Updates [3, 4], [nan, 1], [inf, 0], [0, 0] with C = 1: their sum is [0.6, 0.8] (AC08)."""
    four = [{"client_id": f"c{n}", "text": ["we see tea"] * n} for n in (1, 2, 3, 4)]
    bad = ([3, 4], [np.nan, 1], [np.inf, 0], [0, 0])
    sent(*bad)
    run = prepared(tmp_path, four)
    change, _ = after(run, 0, 1, 2, 3)
    np.testing.assert_allclose(4 * change["bias"][:2], [0.6, 0.8], rtol=2e-5)
    assert np.count_nonzero(flat(change)) == 2

    # With noise: what a round with zeros in the place of the bad ones releases, to the bit.
    noisy = dict(mechanism="independent", noise_multiplier=0.7)
    with_bad, _ = after(prepared(tmp_path, four, **noisy), 0, 1, 2, 3)
    sent([3, 4], [0, 0], [0, 0], [0, 0])
    with_zeros, _ = after(prepared(tmp_path, four, **noisy), 0, 1, 2, 3)
    np.testing.assert_array_equal(flat(with_bad), flat(with_zeros))
    np.testing.assert_allclose(4 * (flat(with_bad) - flat(change)).std(), 0.7, rtol=0.15)

    # All four took part, the operator learns that two were bad, and nothing of it is released.
    run.folder.mkdir()
    run.train(threading.Event())
    (took_part,) = metrics.read(run.folder / "participation.jsonl")
    assert sorted(took_part["devices"]) == ["c1", "c2", "c3", "c4"]
    (operator,) = metrics.read(run.folder / "operator.jsonl")
    assert (operator["num_present"], operator["num_non_finite"], operator["num_clipped"]) == (4, 2, 1)
    assert operator["covered_by_guarantee"] is False
    for line in metrics.read(run.folder / "metrics.jsonl"):
        assert not {"num_non_finite", "num_present", "num_clipped"} & line.keys()


NO_TEXT = [{"client_id": f"u{i + 1}", "text": text} for i, text in enumerate(([], [""], ["   "]))]


def test_clients_without_a_usable_example_send_zero_and_count_in_no_average(tmp_path):
    """Of four known clients u1, u2 and u3 have no example: the loss is that of u4 (AC27)."""
    run = prepared(tmp_path, [*NO_TEXT, {"client_id": "u4", "text": ["a real sentence ."]}])
    assert run.data.ids == ["u1", "u2", "u3", "u4"]
    change, seen = after(run, 0, 1, 2, 3)
    alone, own = after(run, 3)
    assert (int(seen.num_present), int(seen.num_empty), int(seen.num_examples)) == (4, 3, 1)
    assert float(seen.metrics["loss"]) == float(own.metrics["loss"]) > 1
    assert float(seen.metrics["batches"]) == float(own.metrics["batches"]) == 1
    np.testing.assert_array_equal(flat(change), flat(alone))
    assert np.linalg.norm(flat(alone)) > 0
    nothing, seen = after(run, 0, 1, 2)
    assert not flat(nothing).any()
    assert (int(seen.num_empty), float(seen.metrics["loss"]), float(seen.norm)) == (3, 0.0, 0.0)


def test_a_population_without_any_usable_example_is_refused(tmp_path, capsys):
    """All four clients are empty (AC27)."""
    with pytest.raises(InputError, match="no usable example"):
        prepared(tmp_path, [*NO_TEXT, {"client_id": "u4", "text": []}])
    assert cli.main(["keyboard", *toy.argv(toy.config(tmp_path, report_goal=4, rounds=1))]) == 2
    assert "no usable example to train" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_a_client_of_a_million_tokens_weighs_what_one_of_three_does(tmp_path):
    """Its text is cut at the cap, which is logged, and its update has the norm of the other's (AC28)."""
    texts = {"big": "ab " * 1_000_000, "small": "ab ab ab"}
    records = [{"client_id": name, "text": [text]} for name, text in texts.items()]
    run = prepared(tmp_path, records, client_learning_rate=60.0)
    width = run.config.sequence_length + 1
    assert [rows.shape for rows in run.data.train] == [(1, width)] * 2
    assert "1 examples were cut at the most tokens allowed" in run.data.notes
    for client in 0, 1:
        change, seen = after(run, client)
        assert int(seen.num_clipped) == 1
        np.testing.assert_allclose(np.linalg.norm(flat(change)), 1.0 / 2, rtol=3e-5)
