"""Empirical privacy audit of the trainer's own round: thousands of tiny runs with and without one worst-case device.

As tests/jaxpriv/test_audit.py does for the mechanisms alone, but through everything that the trainer puts together:
local SGD, clipping, the sum, the noise on updates and on clip bits, the divisor, the server's step. The adversary knows
all but the noise: at every round it computes from the released parameters what the others' sum is, and what it would be
with the device, and weighs what was released by the likelihood ratio.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from scipy import stats

import accounting
from accounting import strategies
from jaxpriv import noise
from trainers.keyboard import batches, model
from trainers.keyboard import round as rounds

ROUNDS, SEPARATION, GOAL, CLIP, RUNS = 4, 2, 4, 0.1, 3000
SIZES = model.ModelConfig(num_tokens=7, embedding_size=2, hidden_size=2)
SERVER = optax.sgd(1.0)  # a step is the noised mean
LIMITS = {"num_rounds": ROUNDS, "min_separation": SEPARATION, "adjacency": "zero-out"}
# So high a client rate that every update is clipped.
BASE = rounds.RoundConfig(
    report_goal=GOAL,
    client_learning_rate=50.0,
    local_epochs=1,
    clip_norm=CLIP,
    noise_multiplier=0.0,
    adaptive=None,
)


def packed(clients: int) -> batches.RoundBatch:
    rows = [np.array([[5, 1 + i % 3, 2, 6]], np.int32) for i in range(clients)]
    batch = batches.pack_round(
        range(clients), rows, batch_size=1, max_examples=1, chunk_size=GOAL, num_clients=GOAL
    )
    return jax.tree.map(jnp.asarray, batch)


def released(config, mechanism, presence):
    """What RUNS runs released, less what the others' sum explains, and what the device would add: per round
    (updates in units of the clip norm in force, shift of these; bits, shift of these)."""
    step = rounds.make_round(config, SIZES, SERVER, mechanism)
    bare = rounds.make_round(dataclasses.replace(config, noise_multiplier=0.0), SIZES, SERVER, None)
    start, both = model.init_params(SIZES, seed=0), (packed(GOAL - 1), packed(GOAL))

    def one_round(state, present):
        flat = lambda s: ravel_pytree(s.params)[0]
        before, expected, fractions = flat(state), [], []
        for batch in both:
            quiet = state._replace(noise=(), bit_noise=())
            after, info = bare(quiet, batch)
            expected.append(flat(after) - before)
            fractions.append(info.released.fraction)
        batch = jax.tree.map(lambda a, b: jnp.where(present > 0, b, a), *both)
        state, info = step(state, batch)
        unit = info.released.clip_norm
        update, fraction = flat(state) - before, info.released.fraction
        return state, (
            (update - expected[0]) / unit,
            (expected[1] - expected[0]) / unit,
            fraction - fractions[0],
            fractions[1] - fractions[0],
        )

    def one_run(key):
        state = rounds.init(config, start, SERVER, mechanism, key)
        return jax.lax.scan(one_round, state, jnp.asarray(presence, jnp.float32))[1]

    return jax.jit(jax.vmap(one_run))


def mu_lower_bound(config, mechanism, *, update_noise, bit_noise=None):
    """A lower bound on mu (99.9 % for each error rate), the noise of both parts as the adversary knows it."""
    n = noise.matrix(mechanism, ROUNDS)
    whiten = np.linalg.inv(np.linalg.cholesky(n @ n.T))
    device = np.arange(ROUNDS) % SEPARATION == 0
    rates = []
    for presence, seed in ((device, 1), (np.zeros(ROUNDS), 2)):
        found = released(config, mechanism, presence)(jax.random.split(jax.random.key(seed), RUNS))
        seen, shift, bits, bit_shift = (np.asarray(x, np.float64) for x in found)
        pairs = [(seen, device[None, :, None] * shift, update_noise)]
        if bit_noise is not None:
            pairs.append((bits[..., None], (device * bit_shift)[..., None], bit_noise))
        ratio = np.zeros(RUNS)
        for observed, moved, stddev in pairs:
            a, b = (np.einsum("ij,rjd->rid", whiten, x) * GOAL / stddev for x in (observed, moved))
            ratio += (a * b).sum((1, 2)) - (b * b).sum((1, 2)) / 2
        rates.append((ratio > 0).sum())
    power = stats.beta.ppf(0.001, rates[0], RUNS - rates[0] + 1)
    false = stats.beta.ppf(0.999, rates[1] + 1, RUNS - rates[1])
    return float(stats.norm.ppf(power) - stats.norm.ppf(false))


INDEPENDENT = noise.independent()
Z = math.sqrt(2) / 1.5  # two participations: mu = 1.5
SIGMA_B = 0.6 * Z


@functools.cache
def with_bits(share_of_noise: float) -> float:
    """The bound with adaptive clipping, the updates' noise so many times what the account says."""
    applied = share_of_noise * accounting.value_noise_multiplier(Z, count_stddev=SIGMA_B)
    adaptive = rounds.AdaptiveClip(target=0.5, learning_rate=0.2, count_stddev=SIGMA_B)
    config = dataclasses.replace(BASE, noise_multiplier=applied, adaptive=adaptive)
    return mu_lower_bound(config, INDEPENDENT, update_noise=applied, bit_noise=SIGMA_B)


def claimed_with_bits() -> float:
    value = accounting.value_noise_multiplier(Z, count_stddev=SIGMA_B)
    run = accounting.MatrixMechanism(**LIMITS, noise_multiplier=value, strategy=strategies.independent())
    parts = [run, accounting.QuantileEstimation(count_stddev=SIGMA_B, schedule=run)]
    return math.sqrt(2 * accounting.compose(parts, delta=1e-5).rho)


@pytest.mark.slow
def test_updates_and_bits_together_stay_below_the_claim_and_near_it():
    claimed = claimed_with_bits()
    assert claimed == pytest.approx(1.5, rel=1e-9)
    assert 1.25 < with_bits(1.0) < claimed


@pytest.mark.slow
def test_updates_that_do_not_make_up_for_the_bits_are_caught():
    """Noise z in place of z_delta."""
    assert with_bits(Z / accounting.value_noise_multiplier(Z, count_stddev=SIGMA_B)) > claimed_with_bits()


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_tree_noise_on_the_trainers_sum(share):
    """Below the claim and near what there is; with the noise halved it is caught."""
    mechanism = noise.tree_reduced(ROUNDS)
    n = noise.matrix(mechanism, ROUNDS)
    device = (np.arange(ROUNDS) % SEPARATION == 0).astype(float)
    multiplier = math.sqrt(device @ np.linalg.inv(n @ n.T) @ device) / 1.5
    run = accounting.TreeAggregation(**LIMITS, noise_multiplier=multiplier)
    claimed = math.sqrt(2 * accounting.rho(run))
    applied = share * multiplier
    config = dataclasses.replace(BASE, noise_multiplier=applied)
    found = mu_lower_bound(config, mechanism, update_noise=applied)
    assert (1.25 < found < claimed) if share == 1 else (found > claimed)
