"""What tensorflow-federated gave on the inputs of tests/tff (recorded there, with the command), and what we give.

Differences that are meant: we clip to (1 - 2^-16) C, so that the float64 norm never exceeds C, where TFF clips to C;
TFF keeps the noised fraction of small updates within [0, 1], we do not.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import clipping, cohort, noise, quantile
from tests.tff import inputs
from tests.tff.content import digest
from trainers.common import tff_sqlite

TFF = pathlib.Path(__file__).resolve().parents[2] / "tff"
RECORDED = json.loads((TFF / "recorded.json").read_text(encoding="utf-8"))
# 100,000 repetitions: a variance is known to 0.45 %, a covariance to as much of the two deviations' product.
STDDEVS = 5.5


def averages(round, clip_norm, estimate=None):
    """Average of the clipped updates and sum of the bits of one round, as the trainer computes them.

    The margin by which we clip below C is taken back, so that the rest can be compared closely.
    """
    updates = inputs.updates(round)
    stacked = jax.tree.map(lambda *x: np.stack(x), *updates)
    arranged = cohort.arrange(
        np.arange(inputs.CLIENTS), np.ones(inputs.CLIENTS, int), stacked, chunk_size=inputs.CLIENTS
    )
    sums, _ = cohort.clipped_sum(
        lambda params, data, key: (data, {}),
        jax.tree.map(jnp.zeros_like, updates[0]),
        arranged,
        None,
        max_norm=clip_norm / (1 - clipping.MARGIN),
        estimate=estimate,
    )
    flat = np.concatenate([np.ravel(sums.update[name]) for name in inputs.SHAPES])
    return flat / inputs.CLIENTS, sums.below


def test_averages_of_clipped_updates_without_noise():
    for t, recorded in enumerate(RECORDED["sums"]["averages"]):
        ours, _ = averages(t, inputs.CLIP_NORM)
        np.testing.assert_allclose(ours, recorded, rtol=1e-5, atol=3e-7)
    assert t == inputs.SUM_ROUNDS - 1
    # The recording can tell: another clip norm gives other averages.
    assert not np.allclose(
        averages(0, 1.01 * inputs.CLIP_NORM)[0], RECORDED["sums"]["averages"][0], rtol=1e-3
    )


def test_adaptive_clipping_follows_the_same_norms_and_restarts():
    tff = RECORDED["adaptive"]
    restarts = inputs.restarts(inputs.WARMUP, inputs.PERIOD, inputs.ADAPTIVE_ROUNDS)
    assert restarts == (4, 11, 18)
    mechanism = noise.tree_reduced(inputs.ADAPTIVE_ROUNDS, restarts)
    state = quantile.init(inputs.ADAPTIVE["initial_l2_norm_clip"])
    noise_state = mechanism.init(jax.random.key(0), jnp.float32(0))
    clip = state.clip
    in_force, moved = [inputs.ADAPTIVE["initial_l2_norm_clip"], *tff["clip_after"]], []
    for t in range(inputs.ADAPTIVE_ROUNDS):
        if mechanism.starts_segment(noise_state):
            clip = state.clip
            moved.append(t)
        np.testing.assert_allclose(clip, in_force[t], rtol=1e-5)
        ours, below = averages(t, clip, state.clip)
        np.testing.assert_allclose(ours, tff["averages"][t], rtol=2e-5, atol=3e-7)
        noise_state, _ = mechanism.step(noise_state, stddev=0.0)
        state, _ = quantile.step(
            state,
            below,
            jnp.float32(0),
            target=inputs.ADAPTIVE["target_unclipped_quantile"],
            learning_rate=inputs.ADAPTIVE["clip_learning_rate"],
            cohort_size=inputs.CLIENTS,
        )
        np.testing.assert_allclose(state.clip, tff["estimate_after"][t], rtol=1e-5)
    assert moved == [0, *restarts]
    assert len(set(np.round(in_force, 6))) == 4  # the norm moved at each restart, and nowhere else


def test_the_quantile_estimate_takes_the_same_path():
    state = quantile.init(inputs.QUANTILE["initial_estimate"])
    for t, recorded in enumerate(RECORDED["quantile"]["estimates"]):
        norms = jnp.asarray(inputs.values(t))
        below = quantile.bits(norms, jnp.ones(len(norms), bool), state.clip).sum()
        state, _ = quantile.step(
            state,
            below,
            jnp.float32(0),
            target=inputs.QUANTILE["target_quantile"],
            learning_rate=inputs.QUANTILE["learning_rate"],
            cohort_size=len(norms),
        )
        np.testing.assert_allclose(state.clip, recorded, rtol=2e-5)
    assert t == inputs.QUANTILE_ROUNDS - 1


def far_off(recorded, expected):
    """Largest distance of a sample covariance from the exact one, in its own standard deviations."""
    recorded, variance = np.asarray(recorded), np.diag(expected)
    spread = np.sqrt((np.outer(variance, variance) + expected**2) / inputs.COORDINATES)
    return np.abs((recorded - expected) / spread).max()


@pytest.mark.parametrize("name", ["tree", "tree_reduced"])
def test_the_noise_of_both_trees_has_the_same_covariance_between_rounds(name):
    made = noise.tree() if name == "tree" else noise.tree_reduced(inputs.NOISE_ROUNDS)
    matrix = inputs.NOISE_CLIP * np.asarray(noise.matrix(made, inputs.NOISE_ROUNDS), np.float64)
    recorded = RECORDED["noise"][name]["covariance"]
    assert far_off(recorded, matrix @ matrix.T) < STDDEVS
    other = noise.tree_reduced(inputs.NOISE_ROUNDS) if name == "tree" else noise.tree()
    wrong = inputs.NOISE_CLIP * np.asarray(noise.matrix(other, inputs.NOISE_ROUNDS), np.float64)
    assert far_off(recorded, wrong @ wrong.T) > 20  # the comparison can tell the two apart
    assert far_off(recorded, 1.02**2 * matrix @ matrix.T) > STDDEVS


def test_the_noise_of_the_adaptive_tree_restarts_and_rescales_as_theirs():
    tff = RECORDED["noise"]["adaptive"]
    restarts = inputs.restarts(inputs.NOISE_WARMUP, inputs.NOISE_PERIOD, inputs.NOISE_ROUNDS)
    assert restarts == (5, 13)
    clips = np.asarray(tff["clip_in_force"])
    assert [t for t in range(1, len(clips)) if clips[t] != clips[t - 1]] == list(restarts)
    scale = (inputs.NOISE_MULTIPLIER**-2 - (2 * inputs.COUNT_STDDEV) ** -2) ** -0.5
    matrix = scale * np.asarray(
        noise.matrix(noise.tree_reduced(inputs.NOISE_ROUNDS, restarts), inputs.NOISE_ROUNDS), np.float64
    )
    recorded = tff["covariance_over_clip_squared"]
    assert far_off(recorded, matrix @ matrix.T) < STDDEVS
    late = scale * np.asarray(
        noise.matrix(noise.tree_reduced(inputs.NOISE_ROUNDS, (6, 13)), inputs.NOISE_ROUNDS), np.float64
    )
    assert far_off(recorded, late @ late.T) > 20


def read(path, features):
    """As tests/tff/record.py reads: by split, client, order in the file."""
    found = []
    for row in tff_sqlite.rows(path):
        record = dict(row.fields)
        if record["score"] == []:  # a client without examples
            continue
        found.append(
            {"split": record["split"], "client": record["client_id"], **{f: record[f] for f in features}}
        )
    order = {"train": 0, "validation": 1, "test": 2}
    return sorted(found, key=lambda r: (order[r["split"]], r["client"]))


def test_tff_reads_what_we_write(tmp_path):
    path = tmp_path / "clients.sqlite"
    tff_sqlite.write(path, inputs.client_data())
    recorded = RECORDED["reader"]["ours"]
    ours = read(path, ("tokens", "score", "weight"))
    assert len(ours) == recorded["examples"]
    assert digest(ours) == recorded["digest"]
    counts = tff_sqlite.num_examples(path)
    assert {s: sum(split == s for split, _ in counts) for s in ("train", "test")} == recorded["clients"]


def test_we_read_what_tff_reads(shared):
    path = shared / "data" / "fedtext" / "tff_sample.sqlite"
    recorded = RECORDED["reader"]["sample"]
    ours = read(path, ("tokens", "score", "type"))
    assert len(ours) == recorded["examples"]
    assert digest(ours) == recorded["digest"]
