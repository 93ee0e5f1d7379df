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
from trainers.keyboard import batches, model, secure_sum
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


def packed(clients: int, empty: int = 0) -> batches.RoundBatch:
    """So many clients with an example, and so many that send the zero vector."""
    rows = [np.array([[5, 1 + i % 3, 2, 6]], np.int32) for i in range(clients)]
    rows += [np.zeros((0, 4), np.int32)] * empty
    batch = batches.pack_round(
        range(len(rows)), rows, batch_size=1, max_examples=1, chunk_size=GOAL, num_clients=GOAL
    )
    return jax.tree.map(jnp.asarray, batch)


def released(config, mechanism):
    """`(keys, presence by round) -> ` what so many runs released, less what the others' sum explains, and what the
    device would add: per round (updates in units of the clip norm in force, shift of these; bits, shift of these)."""
    step = rounds.make_round(config, SIZES, SERVER, mechanism)
    bare = rounds.make_round(
        dataclasses.replace(config, noise_multiplier=0.0, secure=None), SIZES, SERVER, None
    )
    # A device whose message is replaced by zero still adds its share, where noise comes in shares.
    shares = config.secure is not None and config.secure.distributed
    start, both = model.init_params(SIZES, seed=0), (packed(GOAL - 1, empty=int(shares)), packed(GOAL))

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *both)

    def one_round(state, present):
        flat = lambda s: ravel_pytree(s.params)[0]
        before = flat(state)

        def without_noise(batch):
            after, info = bare(state._replace(noise=(), bit_noise=(), rounding=()), batch)
            return flat(after) - before, info.released.fraction

        expected, fractions = jax.lax.map(without_noise, stacked)
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

    def one_run(key, presence):
        state = rounds.init(config, start, SERVER, mechanism, key)
        return jax.lax.scan(one_round, state, presence)[1]

    return jax.jit(jax.vmap(one_run, (0, None)))


def mu_lower_bound(config, mechanism, *, update_noise, bit_noise=None):
    """A lower bound on mu (99.9 % for each error rate), the noise of both parts as the adversary knows it."""
    n = noise.matrix(mechanism, ROUNDS)
    whiten = np.linalg.inv(np.linalg.cholesky(n @ n.T))
    device = np.arange(ROUNDS) % SEPARATION == 0
    rates, run = [], released(config, mechanism)
    for presence, seed in ((device, 1), (np.zeros(ROUNDS), 2)):
        found = run(jax.random.split(jax.random.key(seed), RUNS), jnp.asarray(presence, jnp.float32))
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


DEVICE = (np.arange(ROUNDS) % SEPARATION == 0).astype(float)
BLT = strategies.BLT((0.9, 0.5), (0.3, 0.2))
BANDED = strategies.Toeplitz((1.0, 0.6), "banded")


def served(name: str):
    """`(mechanism, what the accountant is told of it but the noise)`."""
    matrix = lambda strategy, **more: (accounting.MatrixMechanism, {"strategy": strategy, **more})
    half = ROUNDS // 2
    return {
        "tree, restarted": (
            noise.tree_reduced(ROUNDS, (half,)),
            accounting.TreeAggregation,
            {"restarts": (half,)},
        ),
        "tree, completed": (
            noise.tree((half,), True),
            accounting.TreeAggregation,
            {"restarts": (half,), "completion": True},
        ),
        "blt": (noise.blt(BLT), *matrix(BLT)),
        "blt, restarted": (noise.blt(BLT, (half,)), *matrix(BLT, restarts=(half,))),
        "banded": (noise.banded(BANDED), *matrix(BANDED)),
        "independent": (INDEPENDENT, *matrix(strategies.independent())),
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "secure"),
    [
        ("tree, restarted", None),
        ("tree, completed", None),
        ("blt, restarted", None),
        ("banded", None),
        ("blt", "secagg"),
        ("independent", "distributed"),
    ],
)
def test_every_mechanism_on_the_trainers_sum(name, secure):
    """Below the claim, which with shares of the clients counts their correction too, and near what there is: noise a
    quarter too small would be above it."""
    mechanism, described, facts = served(name)
    n = noise.matrix(mechanism, ROUNDS)
    multiplier = math.sqrt(DEVICE @ np.linalg.inv(n @ n.T) @ DEVICE) / 1.5
    run = described(**LIMITS, noise_multiplier=multiplier, **facts)
    config = dataclasses.replace(BASE, noise_multiplier=multiplier)
    if secure is not None:
        config = dataclasses.replace(
            config,
            secure=secure_sum.choose(
                dimension=model.num_params(SIZES),
                bits=20,
                report_goal=GOAL,
                noise_multiplier=multiplier,
                distributed=secure == "distributed",
                seed=3,
            ),
        )
        encoding = config.secure.encoding
        told = {"scale": encoding.scale, "dimension": encoding.dimension, "beta": encoding.beta}
        if secure == "distributed":
            run = accounting.DistributedDiscreteGaussian(
                **LIMITS,
                noise_multiplier=multiplier,
                clip_norm=1.0,
                min_survivors=GOAL,
                max_clients=GOAL,
                **told,
            )
        else:
            run = accounting.SecureAggregation(mechanism=run, clip_norm=1.0, **told)
    claimed = math.sqrt(2 * accounting.rho(run))
    found = mu_lower_bound(config, mechanism, update_noise=multiplier)
    assert 1.25 < found < claimed < 1.25 / 0.75
