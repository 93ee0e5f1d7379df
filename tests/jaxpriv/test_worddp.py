"""Vector noise: twins, exact sensitivities, laws of the noise that reject a wrong scale."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxpriv import worddp
from tests.oracles import worddp_loops

finite = st.floats(-50, 50, width=32)


def test_metric_noise_has_gamma_norms_and_uniform_directions():
    noise = np.asarray(jax.jit(lambda k: worddp.metric_noise(k, (20_000, 5), scale=0.3))(jax.random.key(1)))
    norms = np.linalg.norm(noise, axis=1)

    def p_value(dim, scale):
        return scipy.stats.kstest(norms, scipy.stats.gamma(dim, scale=scale).cdf).pvalue

    assert p_value(5, 0.3) > 1e-3
    assert p_value(5, 0.3 * 1.1) < 1e-6
    assert p_value(5, 0.3 / 1.1) < 1e-6
    assert p_value(4, 0.3) < 1e-6
    # A coordinate of a uniform direction in 5 dimensions: (x + 1) / 2 is Beta(2, 2).
    cosines = noise[:, 2] / norms
    assert scipy.stats.kstest((cosines + 1) / 2, scipy.stats.beta(2, 2).cdf).pvalue > 1e-3


def test_truncated_laplace_has_the_papers_scale_on_each_dimension():
    low, high = jnp.array([-1.0, 0.0, 2.0]), jnp.array([1.0, 0.5, 6.0])
    sentences = jnp.array([[0.3, 0.9, 3.0], [-4.0, 0.1, 5.0]])
    where = jnp.ones(2, bool)
    keys = jax.random.split(jax.random.key(5), 20_000)
    out = jax.jit(
        jax.vmap(lambda k: worddp.truncated_laplace(k, sentences, low, high, epsilon=4.0, where=where))
    )(keys)
    mean = worddp_loops.truncated_mean(np.asarray(sentences), np.asarray(low), np.asarray(high))
    for j, width in enumerate((2.0, 0.5, 4.0)):
        scale = 3 * width / (2 * 4.0)
        noise = np.asarray(out[:, j]) - mean[j]
        assert scipy.stats.kstest(noise, scipy.stats.laplace(scale=scale).cdf).pvalue > 1e-3
        assert scipy.stats.kstest(noise, scipy.stats.laplace(scale=scale * 1.2).cdf).pvalue < 1e-6


def test_low_rank_noise_has_the_stated_scale():
    sentences = jnp.eye(3, 8)
    axes, where = jnp.eye(4, 8), jnp.array([True, True, False])
    keys = jax.random.split(jax.random.key(6), 20_000)
    out = jax.jit(
        jax.vmap(lambda k: worddp.low_rank_noised(k, sentences, axes, max_norm=0.5, epsilon=3.0, where=where))
    )(keys)
    norms = np.linalg.norm(np.asarray(out) - [0.25, 0.25, 0, 0], axis=1)
    scale = 2 * 0.5 / (2 * 3.0)
    assert scipy.stats.kstest(norms, scipy.stats.gamma(4, scale=scale).cdf).pvalue > 1e-3
    assert scipy.stats.kstest(norms, scipy.stats.gamma(4, scale=scale * 1.2).cdf).pvalue < 1e-6


arrays = hnp.arrays(np.float32, (4, 3), elements=finite)
clipped_mean, truncated_mean = jax.jit(worddp.clipped_mean), jax.jit(worddp.truncated_mean)
everything = np.ones(4, bool)


@hypothesis.given(arrays, hnp.arrays(np.float32, 3, elements=st.floats(width=32)), st.integers(0, 3))
def test_sensitivities_hold_for_any_replaced_sentence(sentences, other, row):
    changed = sentences.copy()
    changed[row] = other
    axes = np.float32([[1, 0.5, 0], [0, 1, -1]])
    low, high = np.float32([-1, 0, 2]), np.float32([1, 0.5, 6])
    a, b = (clipped_mean(s, axes, max_norm=2.0, where=everything) for s in (sentences, changed))
    assert np.linalg.norm(a - b) <= 2 * 2.0 / 4 * (1 + 1e-5)
    a, b = (truncated_mean(s, low, high, where=everything) for s in (sentences, changed))
    assert np.abs(a - b).sum() <= (high - low).sum() / 4 * (1 + 1e-5)


def test_sensitivities_are_reached():
    axes = np.float32([[1, 0, 0]])
    far = np.zeros((4, 3), np.float32)
    up, down = far.copy(), far.copy()
    up[0], down[0] = 100, -100
    low, high = -np.ones(3, np.float32), np.ones(3, np.float32)
    a, b = (clipped_mean(s, axes, max_norm=2.0, where=everything) for s in (up, down))
    assert np.linalg.norm(a - b) == pytest.approx(1.0)
    a, b = (truncated_mean(s, low, high, where=everything) for s in (up, down))
    assert np.abs(a - b).sum() == pytest.approx(6 / 4)


@hypothesis.given(arrays)
def test_means_match_the_twins_and_ignore_padding(sentences):
    axes = np.float32([[1, 0.5, 0], [0, 1, -1]])
    low, high = np.float32([-1, 0, 2]), np.float32([1, 0.5, 6])
    padded = np.concatenate([sentences[:3], np.full((1, 3), np.nan, np.float32)])
    where = np.array([True, True, True, False])
    found = clipped_mean(padded, axes, max_norm=2.0, where=where)
    np.testing.assert_allclose(found, worddp_loops.clipped_mean(sentences[:3], axes, 2.0), atol=1e-5)
    found = truncated_mean(padded, low, high, where=where)
    np.testing.assert_allclose(found, worddp_loops.truncated_mean(sentences[:3], low, high), atol=1e-5)


def test_no_sentences_and_broken_ones_give_numbers():
    axes = jnp.eye(2, 3)
    bad = jnp.array([[jnp.nan, 1, 1], [jnp.inf, 0, 0], [3e38, 3e38, 0]])
    for where in (jnp.ones(3, bool), jnp.zeros(3, bool)):
        assert np.isfinite(worddp.clipped_mean(bad, axes, max_norm=1.0, where=where)).all()
        assert np.isfinite(worddp.truncated_mean(bad, -jnp.ones(3), jnp.ones(3), where=where)).all()
        out = worddp.low_rank_noised(jax.random.key(0), bad, axes, max_norm=1.0, epsilon=1.0, where=where)
        assert np.isfinite(out).all()


def test_nearest_word_is_exact_far_from_the_origin():
    rng = np.random.default_rng(4)
    vocabulary, points = rng.normal(size=(40, 6)) + 1000, rng.normal(size=(30, 6)) + 1000
    found = worddp.nearest(jnp.float32(points), jnp.float32(vocabulary), block=7)
    assert (np.asarray(found) == worddp_loops.nearest(np.float32(points), np.float32(vocabulary))).all()
    assert worddp.nearest(jnp.zeros((0, 6)), jnp.float32(vocabulary)).shape == (0,)


def test_replaced_words_stay_within_metric_epsilon():
    """On a line of three words, the law of the replacement moves by at most epsilon times the distance."""
    vocabulary = jnp.array([[0.0], [1.0], [3.0]])
    laws = []
    for i in range(3):
        words = jnp.broadcast_to(vocabulary[i], (40_000, 1))
        out = worddp.replace_words(jax.random.key(i), words, vocabulary, epsilon=1.5)
        laws.append(np.bincount(np.asarray(out), minlength=3) / 40_000)
    # One dimension: Laplace noise; borders at 0.5 and 2.
    exact = [np.diff(scipy.stats.laplace(v, 1 / 1.5).cdf([-np.inf, 0.5, 2, np.inf])) for v in (0, 1, 3)]
    np.testing.assert_allclose(laws, exact, atol=0.01)
    for i, j, distance in ((0, 1, 1), (1, 2, 2), (0, 2, 3)):
        assert np.abs(np.log(np.array(laws[i]) / laws[j])).max() <= 1.5 * distance + 0.2


@pytest.mark.parametrize("epsilon", [0, -1, float("nan"), float("inf")])
def test_refuses_impossible_epsilons(epsilon):
    x, where = jnp.ones((2, 3)), jnp.ones(2, bool)
    with pytest.raises(ValueError, match="epsilon"):
        worddp.replace_words(jax.random.key(0), x, x, epsilon=epsilon)
    with pytest.raises(ValueError, match="epsilon"):
        worddp.low_rank_noised(jax.random.key(0), x, x, max_norm=1.0, epsilon=epsilon, where=where)
    with pytest.raises(ValueError, match="epsilon"):
        worddp.truncated_laplace(jax.random.key(0), x, x[0], x[0], epsilon=epsilon, where=where)
