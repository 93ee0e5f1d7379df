"""The quantile estimate converges to the quantile, and a client moves it by what the accountant assumes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import quantile


def twin(norms_by_round, *, clip, target, learning_rate, noise):
    """Andrew et al. 2021, algorithm 1, lines on the clip norm, with plain floats."""
    for norms, extra in zip(norms_by_round, noise):
        fraction = (sum(float(n <= clip) for n in norms) + extra) / len(norms)
        clip *= np.exp(-learning_rate * (fraction - target))
        yield clip, fraction


def test_it_equals_its_twin():
    rng = np.random.default_rng(0)
    norms = rng.lognormal(size=(30, 20)).astype(np.float32)
    noise = rng.normal(size=30).astype(np.float32)
    expected = list(twin(norms, clip=0.1, target=0.7, learning_rate=0.2, noise=noise))

    def body(state, inputs):
        below = quantile.bits(inputs[0], jnp.ones(20, bool), state.clip).sum()
        state, fraction = quantile.step(
            state, below, inputs[1], target=0.7, learning_rate=0.2, cohort_size=20
        )
        return state, (state.clip, fraction)

    state, (clips, fractions) = jax.lax.scan(body, quantile.init(0.1), (norms, noise))
    np.testing.assert_allclose(clips, [c for c, _ in expected], rtol=2e-5)
    np.testing.assert_allclose(fractions, [f for _, f in expected], rtol=1e-5, atol=1e-6)
    assert int(state.step) == 30


@pytest.mark.parametrize("target", [0.2, 0.5, 0.9])
def test_it_finds_the_quantile(target):
    norms = jnp.asarray(np.random.default_rng(1).lognormal(size=(400, 200)), jnp.float32)

    def body(state, row):
        below = quantile.bits(row, jnp.ones(200, bool), state.clip).sum()
        return quantile.step(state, below, jnp.float32(0), target=target, learning_rate=0.2, cohort_size=200)

    state, _ = jax.lax.scan(body, quantile.init(0.01), norms)
    assert abs(float((norms <= state.clip).mean()) - target) < 0.03


def test_zeroing_one_message_moves_the_sum_by_half():
    state = quantile.init(1.0)
    for norms in itertools.product([0.5, 1.0, 1.5, float("nan")], repeat=3):
        bits = np.asarray(quantile.bits(jnp.array(norms), jnp.ones(3, bool), state.clip))
        for i in range(3):
            assert abs(bits.sum() - np.delete(bits, i).sum()) == 0.5


def test_absent_clients_send_nothing():
    bits = quantile.bits(jnp.array([0.5, 0.5]), jnp.array([True, False]), 1.0)
    np.testing.assert_array_equal(bits, [0.5, 0.0])


def test_the_divisor_is_the_public_cohort_size():
    below = jnp.float32(5.0)  # ten of twenty announced clients came, all of them within the estimate
    _, fraction = quantile.step(
        quantile.init(1.0), below, jnp.float32(0), target=0.5, learning_rate=0.2, cohort_size=20
    )
    assert float(fraction) == 0.75


def test_the_estimate_stays_a_usable_norm():
    state = quantile.init(1.0)
    for noise in (1e6, -1e6):
        new, _ = quantile.step(
            state, jnp.float32(0), jnp.float32(noise), target=0.5, learning_rate=0.2, cohort_size=10
        )
        assert 0 < float(new.clip) < float("inf")


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), float("inf")])
def test_an_unusable_first_guess_is_refused(clip):
    with pytest.raises(ValueError, match="clip"):
        quantile.init(clip)


def test_an_unusable_target_is_refused():
    with pytest.raises(ValueError, match="target"):
        quantile.step(
            quantile.init(1.0), jnp.float32(0), jnp.float32(0), target=1.0, learning_rate=0.2, cohort_size=3
        )
