"""Samplers: exact laws far into the tails, wrong scales rejected, the same bits in every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p
from scipy import stats

from jaxpriv import _exact, _words, sampling
from tests.oracles import sampling as twin


def p_value(draws, law):
    return stats.kstest(np.asarray(draws, np.float64).ravel(), law.cdf).pvalue


def assert_law(draws, law_of_scale):
    """Accepts scale 1 (a right sampler fails once in 1,000 keys), rejects 3 % either way."""
    assert p_value(draws, law_of_scale(1.0)) > 1e-3
    assert p_value(draws, law_of_scale(0.97)) < 1e-6
    assert p_value(draws, law_of_scale(1.03)) < 1e-6


def test_words_are_threefry_as_jax_has_it():
    k0, k1, x0, x1 = (
        jnp.asarray(np.random.default_rng(i).integers(0, 2**32, 50, np.uint32)) for i in range(4)
    )
    ours, theirs = _words.threefry(k0, k1, x0, x1), threefry2x32_p.bind(k0, k1, x0, x1)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[1], theirs[1])


def test_words_never_repeat_within_a_draw():
    drawn = np.concatenate(
        [np.ravel(w) for w in _words.words(_words.draw_key(jax.random.key(0)), (30, 7, 11), 4)]
    )
    assert len(np.unique(drawn)) == drawn.size  # 9,240 words: a chance collision has probability 1 %
    short = _words.words(_words.draw_key(jax.random.key(0)), (30, 7, 11), 3)
    np.testing.assert_array_equal(np.ravel(short[2]), drawn[4620:6930])


def test_normal_inverts_the_exact_law_at_every_depth():
    rng = np.random.default_rng(0)
    depth = (2.0 ** rng.uniform(0, 31, 20_000)).astype(np.int64) - 1
    high = np.concatenate([rng.integers(0, 2**32, 20_000), depth, 2**31 - 1 - depth, np.zeros(2_000)])
    low = np.concatenate(
        [rng.integers(0, 2**32, 60_000), (2.0 ** rng.uniform(0, 32, 2_000)).astype(np.int64) - 1]
    )
    high, low = high.astype(np.uint32), low.astype(np.uint32)
    ours = np.asarray(jax.jit(sampling.normal_from_words)(high, low), np.float64)
    np.testing.assert_allclose(ours, twin.normal_from_words(high, low), rtol=5e-7, atol=1e-9)


def test_largest_normal_lies_beyond_2_to_minus_64():
    zero = jnp.zeros(1, jnp.uint32)
    largest = float(sampling.normal_from_words(zero, zero)[0])
    assert stats.norm.sf(largest) <= 2.0**-64 * 0.51
    assert float(sampling.normal_from_words(zero + jnp.uint32(2**31), zero)[0]) == -largest
    # JAX's own ends where a deployment's delta of 1e-10 begins to matter.
    assert stats.norm.sf(5.42) > 2.0**-26


def test_normal_follows_its_law_and_no_other():
    draws = sampling.normal(jax.random.key(1), (400_000,))
    assert_law(draws, lambda s: stats.norm(scale=s))
    x = np.asarray(draws, np.float64)
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 4 / np.sqrt(x.size)


def test_normal_tail_counts_match_the_exact_law():
    draw = jax.jit(lambda key: jnp.abs(sampling.normal(key, (4_000_000,))))
    totals = np.zeros(4, int)
    thresholds = np.array([3.0, 4.0, 4.75, 5.2])
    for seed in range(5):
        x = np.asarray(draw(jax.random.key(seed)))
        totals += [(x > t).sum() for t in thresholds]
    for count, threshold in zip(totals, thresholds):
        assert stats.binomtest(int(count), 20_000_000, 2 * stats.norm.sf(threshold)).pvalue > 1e-3


@pytest.mark.parametrize("zeros", [8, 20, 30, 45, 55])
def test_normal_conditioned_far_out_follows_the_exact_tail(zeros):
    """With the leading `zeros` bits of the tail probability 0, what remains is uniform below them."""
    high, low = _words.words(_words.draw_key(jax.random.key(zeros)), (50_000,))
    both = ((np.asarray(high, np.uint64) & np.uint64(0x7FFFFFFF)) << np.uint64(32)) | np.asarray(
        low, np.uint64
    )
    both >>= np.uint64(zeros)
    x = sampling.normal_from_words(
        jnp.asarray((both >> np.uint64(32)).astype(np.uint32)), jnp.asarray(both.astype(np.uint32))
    )
    below = np.exp(stats.norm.logsf(np.asarray(x, np.float64)) + (zeros + 1) * np.log(2))
    assert stats.kstest(below, "uniform").pvalue > 1e-3
    wrong = np.exp(stats.norm.logsf(np.asarray(x, np.float64) * 1.01) + (zeros + 1) * np.log(2))
    assert stats.kstest(wrong, "uniform").pvalue < 1e-6


def test_shorter_types_are_rounded_float32():
    key = jax.random.key(3)
    full, short = sampling.normal(key, (1000,)), sampling.normal(jax.random.key(3), (1000,), jnp.bfloat16)
    assert short.dtype == jnp.bfloat16
    np.testing.assert_array_equal(full.astype(jnp.bfloat16), short)
    for wrong in (jnp.float64, jnp.int32):
        with pytest.raises(ValueError, match="dtype must be float32"):
            sampling.normal(jax.random.key(0), (3,), wrong)


DRAWS = {
    "normal": lambda key: sampling.normal(key, (24, 50)),
    "laplace": lambda key: sampling.laplace(key, (24, 50)),
    "exponential": lambda key: sampling.exponential(key, (24, 50)),
    "gamma": lambda key: sampling.gamma(key, 5, (24, 50)),
    "direction": lambda key: sampling.direction(key, (24, 50)),
    "discrete_gaussian": lambda key: sampling.discrete_gaussian(key, (24, 50), stddev=7.5),
    "categorical_by_level": lambda key: sampling.categorical_by_level(
        key, jnp.array([5, 0, 9, 2]), sampling.level_weights(0.5, 4)
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_same_key_same_bits_eager_jitted_batched_scanned(name):
    draw, seeds = DRAWS[name], range(3)

    def make():
        return jax.random.split(jax.random.key(5), 3)

    eager = np.stack([draw(key) for key in make()])
    np.testing.assert_array_equal(eager, np.stack([jax.jit(draw)(key) for key in make()]))
    np.testing.assert_array_equal(eager, jax.jit(jax.vmap(draw))(make()))
    np.testing.assert_array_equal(eager, jax.lax.scan(lambda c, key: (c, draw(key)), 0, make())[1])
    assert (
        len(np.unique(eager.reshape(len(seeds), -1), axis=0)) == len(seeds) or name == "categorical_by_level"
    )


@pytest.mark.parametrize("name", ["normal", "laplace", "gamma", "discrete_gaussian"])
def test_same_bits_on_one_and_eight_devices(name):
    draw = DRAWS[name]
    alone = jax.jit(draw)(jax.random.key(8))
    mesh = jax.make_mesh((8,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    for spec in (jax.P("clients"), jax.P(None, None)):
        spread = jax.jit(draw, out_shardings=jax.NamedSharding(mesh, spec))(jax.random.key(8))
        assert len(spread.sharding.device_set) == 8
        np.testing.assert_array_equal(alone, spread)


def test_normal_in_a_fused_program_keeps_its_bits():
    """What is done with the noise must not change how it is rounded."""
    key, stddev, shape = jax.random.key(2), 0.37, (3, 333_333)

    @jax.jit
    def used(key, x):
        noise = sampling.normal(key, shape)
        return noise, x + stddev * noise, (noise * noise).sum()

    np.testing.assert_array_equal(sampling.normal(key, shape), used(jax.random.key(2), jnp.ones(shape))[0])


def test_every_leaf_has_a_key_of_its_own():
    like = {"a": jnp.zeros(64), "b": jnp.zeros(64), "c": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)}
    noise = sampling.normal_like(jax.random.key(0), like)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), noise) == {
        "a": ((64,), jnp.float32), "b": ((64,), jnp.float32), "c": ((8, 8), jnp.float32),
    }  # fmt: skip
    flat = np.stack([np.ravel(leaf) for leaf in jax.tree.leaves(noise)])
    assert np.abs(np.corrcoef(flat) - np.eye(3)).max() < 0.5
    # The trap: JAX gives one key the same 64 numbers in both shapes.
    same = jax.random.normal(jax.random.key(0), (64,)) == jax.random.normal(jax.random.key(0), (8, 8)).ravel()
    assert same.all()


def test_noise_on_integers_is_refused():
    with pytest.raises(ValueError, match="floating leaves, got one of int32"):
        sampling.normal_like(jax.random.key(0), {"step": jnp.int32(0)})


def test_exponential_and_laplace_follow_their_laws():
    assert_law(sampling.exponential(jax.random.key(3), (400_000,)), lambda s: stats.expon(scale=s))
    assert_law(sampling.laplace(jax.random.key(4), (400_000,)), lambda s: stats.laplace(scale=s))


def test_exponential_is_exact_at_both_ends():
    ends = jnp.array([0, 0x7FFFFFFF], jnp.uint32)
    far, near = sampling.exponential_from_words(ends, jnp.array([0, 2**31], jnp.uint32))
    assert abs(far - 64 * np.log(2)) < 1e-5
    assert near == pytest.approx(2.0**-32, rel=1e-6)  # -log(1 - q) does not collapse to 0


@pytest.mark.parametrize("num", [1, 3, 50])
def test_gamma_follows_its_law(num):
    draws = np.asarray(sampling.gamma(jax.random.key(num), num, (40_000,)))
    assert p_value(draws, stats.gamma(num)) > 1e-3
    assert p_value(draws, stats.gamma(num, scale=1.05)) < 1e-6
    assert p_value(draws, stats.gamma(num + 1)) < 1e-6
    with pytest.raises(ValueError, match="shape_parameter"):
        sampling.gamma(jax.random.key(0), 0)


@pytest.mark.parametrize("dim", [1, 3, 50])
def test_direction_is_uniform_on_the_sphere(dim):
    draws = np.asarray(sampling.direction(jax.random.key(dim), (20_000, dim)), np.float64)
    np.testing.assert_allclose(np.linalg.norm(draws, axis=1), 1, rtol=1e-6)
    if dim == 1:
        assert abs(draws.mean()) < 4 / np.sqrt(len(draws))
        return
    # A uniform direction along any fixed axis: (1 + x) / 2 is Beta((d - 1) / 2, (d - 1) / 2).
    law = stats.beta((dim - 1) / 2, (dim - 1) / 2)
    oblique = draws @ (np.ones(dim) / np.sqrt(dim))
    for x in (draws[:, 0], draws[:, -1], oblique):
        assert stats.kstest((1 + x) / 2, law.cdf).pvalue > 1e-3
    assert (
        stats.kstest((1 + draws[:, 0]) / 2, stats.beta((dim - 1) * 0.45, (dim - 1) * 0.45).cdf).pvalue < 1e-3
    )
    with pytest.raises(ValueError, match="last axis"):
        sampling.direction(jax.random.key(0), (4, 0))


@pytest.mark.parametrize("stddev", [0.05, 0.4, 1.0, 7.5, 60.0])
def test_discrete_gaussian_thresholds_are_the_exact_law(stddev):
    table = _exact._gaussian_table(stddev)
    values = [sum(int(word) << shift for word, shift in zip(row, (96, 64, 32, 0))) for row in table]
    law = twin.discrete_gaussian_law(stddev, len(values) - 1)
    off = [abs(value - float(0) - p * 2**127) for value, p in zip(values, law)]
    assert max(off) <= 2
    assert values[-1] == 2**127 - 1
    assert values == sorted(values)


def test_discrete_gaussian_follows_its_law_and_no_other():
    draws = np.asarray(sampling.discrete_gaussian(jax.random.key(1), (400_000,), stddev=2.5))
    support = np.arange(-9, 10)
    observed = np.array([(draws == k).sum() for k in support])

    def p(stddev):
        law = np.exp(-(np.arange(-60, 61) ** 2) / (2 * stddev**2))
        law = (law / law.sum())[60 - 9 : 60 + 10]
        return stats.chisquare(observed, law / law.sum() * observed.sum()).pvalue

    assert p(2.5) > 1e-3
    assert p(2.45) < 1e-6
    assert p(2.55) < 1e-6
    assert (draws == 0).sum() < 1.1 * (draws == 1).sum() * np.exp(1 / 12.5)  # zero is not counted twice


def test_discrete_gaussian_ends_of_the_table():
    table = jnp.asarray(_exact._gaussian_table(3.0))

    def words(*w):
        return [jnp.full(1, x, jnp.uint32) for x in w]

    far = 2**32 - 1
    largest = int(_exact.gaussian_from_words(words(2**31 - 1, far, far, far - 1), table)[0])
    assert largest == len(table) - 1  # the outermost integer can be drawn
    assert 2 * stats.norm.sf(largest / 3.0) < 2.0**-120
    assert int(_exact.gaussian_from_words(words(far, far, far, far - 1), table)[0]) == -largest
    assert int(_exact.gaussian_from_words(words(0, 0, 0, 0), table)[0]) == 0


@pytest.mark.parametrize("stddev", [0.0, -1.0, float("nan"), float("inf"), 1e6])
def test_discrete_gaussian_refuses_what_it_cannot_draw(stddev):
    with pytest.raises(ValueError, match="stddev must be"):
        sampling.discrete_gaussian(jax.random.key(0), (3,), stddev=stddev)


def test_categorical_is_the_exact_choice_whatever_the_bits():
    rng = np.random.default_rng(0)
    choose = jax.jit(_exact.level_from_words)
    for _ in range(300):
        num = int(rng.choice([1, 2, 9, 40]))
        counts = rng.integers(0, rng.choice([2, 50, 10**6]), num) * (rng.random(num) < 0.7)
        counts[rng.integers(num)] += 1
        step = float(rng.choice([0.0, 0.05, 0.5, 2.5, 15.0]))
        uniform = int(rng.integers(0, 2**32)) << 96 | int(rng.integers(0, 2**32)) << 32
        uniform >>= int(rng.integers(0, 110))  # small values reach the rarest levels
        words = [jnp.uint32((uniform >> shift) & 0xFFFFFFFF) for shift in (0, 32, 64, 96)]
        weights = sampling.level_weights(step, num)
        expected = twin.level_from_uniform(uniform, counts.tolist(), step)
        assert int(choose(words, jnp.asarray(counts, jnp.int32), weights)) == expected


def test_categorical_draws_a_level_60_nats_below_the_best():
    """Float32 Gumbel-max never draws a gap above 21.1 nats; a probability of e^-60 is kept here."""
    counts, weights = jnp.array([1, 0, 0, 1]), sampling.level_weights(20.0, 4)
    threshold = int(np.exp(-60) * 2.0**128)

    def choose(u):
        return int(
            _exact.level_from_words(
                [jnp.uint32((u >> s) & 0xFFFFFFFF) for s in (0, 32, 64, 96)], counts, weights
            )
        )

    assert choose(0) == choose(int(threshold * 0.999)) == 0
    assert choose(int(threshold * 1.001)) == choose(2**128 - 1) == 3


def test_categorical_follows_its_law_and_no_other():
    counts, step = np.array([4, 0, 3, 1, 2]), 0.4
    weights = sampling.level_weights(step, 5)
    split = jax.random.split(jax.random.key(0), 40_000)
    draws = np.asarray(
        jax.vmap(lambda key: sampling.categorical_by_level(key, jnp.asarray(counts), weights))(split)
    )
    observed = np.bincount(draws, minlength=5)
    assert observed[1] == 0

    def law(s):
        return np.exp(sampling.level_log_probabilities(counts, s))[counts > 0]

    def p(s):
        return stats.chisquare(observed[counts > 0], law(s) * len(draws)).pvalue

    assert p(step) > 1e-3
    assert p(step / 2) < 1e-6
    assert p(step * 2) < 1e-6


def test_reported_probabilities_stay_positive_over_700_nats():
    log_p = sampling.level_log_probabilities(np.array([1] + [0] * 1399 + [1]), 0.5)
    assert log_p[0] == pytest.approx(-700)
    assert np.exp(log_p[0]) > 0
    assert log_p[1] == -np.inf
    assert np.exp(log_p[-1]) == 1
    even = sampling.level_log_probabilities(np.array([1, 2]), 0.0)  # eps = 0 is uniform over members
    np.testing.assert_allclose(np.exp(even), [1 / 3, 2 / 3])


def test_categorical_refusals_and_residual():
    assert sampling.categorical_residual(5001, 10**6) < 2.0**-100
    for step in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="step must be finite"):
            sampling.level_weights(step, 3)
        with pytest.raises(ValueError, match="step must be finite"):
            sampling.level_log_probabilities(np.ones(3), step)
    with pytest.raises(ValueError, match="num_levels"):
        sampling.level_weights(0.5, 2**16 + 1)
    with pytest.raises(ValueError, match="no level has a member"):
        sampling.level_log_probabilities(np.zeros(3), 0.5)
    with pytest.raises(ValueError, match="level_weights"):
        sampling.categorical_by_level(
            jax.random.key(0), jnp.ones(3, jnp.int32), sampling.level_weights(0.5, 4)
        )


def test_more_values_than_counters_are_refused():
    with pytest.raises(ValueError, match=r"2\*\*32"):
        jax.eval_shape(lambda key: sampling.normal(key, (2**20, 2**13)), jax.random.key(0))
