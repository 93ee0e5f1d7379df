"""Empirical privacy audit: thousands of small runs with and without one worst-case device.

White box: the adversary knows the strategy, the device's rounds and everything but the noise, and sees the
released increments. The likelihood ratio is linear in them, its threshold is fixed beforehand, and the error
rates (Clopper and Pearson, 99.9 % each) bound mu of Gaussian differential privacy from below: a run whose
claim is rho has mu <= sqrt(2 rho). A bug that weakens the noise or the limits must push the lower bound over
the claim.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import accounting
from accounting import strategies
from jaxpriv import clipping, noise

ROUNDS, SEPARATION, MOST, GOAL, RUNS, CLIP = 8, 3, 3, 4, 4000, 0.7


class Blt:
    theta = np.array([0.9, 0.5])
    omega = np.array([0.1, 0.3])


BANDS = np.array([1.0, 0.5, 0.375])
LIMITS = dict(
    noise_multiplier=1.0,
    num_rounds=ROUNDS,
    min_separation=SEPARATION,
    max_participations=MOST,
    adjacency="zero-out",
)
MATRIX = accounting.MatrixMechanism
MECHANISMS = {
    "independent": (noise.independent(), MATRIX(**LIMITS, strategy=strategies.independent())),
    "tree": (noise.tree(), accounting.TreeAggregation(**LIMITS)),
    "tree, restart": (noise.tree(restarts=(5,)), accounting.TreeAggregation(**LIMITS, restarts=(5,))),
    "tree_reduced": (noise.tree_reduced(ROUNDS), accounting.TreeAggregation(**LIMITS)),
    "blt": (noise.blt(Blt), MATRIX(**LIMITS, strategy=strategies.BLT(Blt.theta, Blt.omega))),
    "banded": (noise.banded(BANDS), MATRIX(**LIMITS, strategy=strategies.Toeplitz(BANDS))),
}


def worst_rounds(precision):
    """The allowed rounds of one device that the released increments show most."""
    allowed = [
        rounds
        for size in range(1, MOST + 1)
        for rounds in itertools.combinations(range(ROUNDS), size)
        if all(b - a >= SEPARATION for a, b in itertools.pairwise(rounds))
    ]
    patterns = np.array([np.isin(np.arange(ROUNDS), rounds) for rounds in allowed], float)
    return patterns[np.argmax(np.einsum("pi,ij,pj->p", patterns, precision, patterns))]


def mu_lower_bound(mechanism, *, noise_multiplier, applied=None, rounds=None, realised_divisor=False):
    """A lower bound on mu from RUNS runs with and as many without the device.

    Args:
      applied: the noise multiplier really applied, if not the claimed one. rounds: of the device, if not the
        worst allowed.
      realised_divisor: divide by the clients that came instead of the report goal.
    """
    n = noise.matrix(mechanism, ROUNDS)
    precision = np.linalg.inv(n @ n.T)
    device = worst_rounds(precision) if rounds is None else rounds
    applied = noise_multiplier if applied is None else applied

    def increments(key, presence):
        """Released means of one run; the device pulls against all others, who push with all they may."""

        def one_round(state, present):
            others, _ = clipping.clip(jnp.full((), 5.0), CLIP)
            update, _ = clipping.clip(jnp.full((), -80.0), CLIP)
            total = (GOAL - 1) * others + present * update
            state, noised = mechanism.step(state, stddev=applied * CLIP)
            count = GOAL - 1 + present if realised_divisor else GOAL
            return state, (total + noised) / count

        return jax.lax.scan(one_round, mechanism.init(key, jnp.zeros(())), presence)[1]

    runs = jax.jit(jax.vmap(increments, (0, None)))
    here = np.asarray(runs(jax.random.split(jax.random.key(1), RUNS), jnp.asarray(device, jnp.float32)))
    away = np.asarray(runs(jax.random.split(jax.random.key(2), RUNS), jnp.zeros(ROUNDS, jnp.float32)))
    # What the adversary expects without the device, and with it.
    base, shift = (GOAL - 1) * CLIP / GOAL, -CLIP / GOAL * device
    if realised_divisor:
        base, shift = CLIP, -2 * CLIP / GOAL * device
    statistic = lambda x: (x - base) @ precision @ shift
    threshold = shift @ precision @ shift / 2
    hits, false_alarms = (statistic(here) > threshold).sum(), (statistic(away) > threshold).sum()
    power = stats.beta.ppf(0.001, hits, RUNS - hits + 1)
    false = stats.beta.ppf(0.999, false_alarms + 1, RUNS - false_alarms)
    return stats.norm.ppf(power) - stats.norm.ppf(false)


def setting(name):
    """`(mechanism, noise multiplier, claimed mu)`, the multiplier such that the audit has mu = 1.5 to find."""
    mechanism, description = MECHANISMS[name]
    n = noise.matrix(mechanism, ROUNDS)
    precision = np.linalg.inv(n @ n.T)
    device = worst_rounds(precision)
    multiplier = math.sqrt(device @ precision @ device) / 1.5
    return mechanism, multiplier, math.sqrt(2 * accounting.rho(description)) / multiplier


def epsilon(mu):
    return accounting.epsilon_from_rho(mu * mu / 2, delta=1e-5, known="gaussian")


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_lower_bound_stays_below_the_claim_and_near_the_truth(name):
    mechanism, multiplier, claimed = setting(name)
    found = mu_lower_bound(mechanism, noise_multiplier=multiplier)
    assert epsilon(found) < epsilon(claimed)
    assert found > 1.25  # of 1.5: the audit sees nearly all that is there


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_weaker_noise_is_caught(name):
    mechanism, multiplier, claimed = setting(name)
    for applied in (multiplier / 2, multiplier / 1000):
        found = mu_lower_bound(mechanism, noise_multiplier=multiplier, applied=applied)
        assert epsilon(found) > epsilon(claimed)


@pytest.mark.slow
def test_a_realised_divisor_is_caught():
    mechanism, multiplier, claimed = setting("independent")
    assert mu_lower_bound(mechanism, noise_multiplier=multiplier, realised_divisor=True) > claimed


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_broken_separation_is_caught(name):
    """The device comes every round."""
    mechanism, multiplier, claimed = setting(name)
    assert mu_lower_bound(mechanism, noise_multiplier=multiplier, rounds=np.ones(ROUNDS)) > claimed


@pytest.mark.slow
@pytest.mark.parametrize("build", [noise.tree, lambda restarts: noise.tree_reduced(ROUNDS, restarts)])
def test_a_separation_forgotten_at_restarts_is_caught(build):
    """Timers that a new tree resets: the device comes in the first round of each tree, four times instead of
    two.

    A single restart would not do: one more participation in a tree of its own adds as little as the right
    children that the account counts and the stream never releases. Here each adds the two nodes above it.
    """
    restarts = (2, 4, 6)
    description = accounting.TreeAggregation(
        noise_multiplier=1.0, num_rounds=ROUNDS, min_separation=4, restarts=restarts, adjacency="zero-out"
    )
    multiplier, claimed = 1.5, math.sqrt(2 * accounting.rho(description)) / 1.5
    first_rounds = np.arange(ROUNDS) % 2 == 0
    kept = first_rounds & (np.arange(ROUNDS) % 4 == 0)
    found = [
        mu_lower_bound(build(restarts), noise_multiplier=multiplier, rounds=rounds.astype(float))
        for rounds in (kept, first_rounds)
    ]
    assert found[0] < claimed < found[1]
