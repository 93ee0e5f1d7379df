"""Selection: exact laws, neighbours within epsilon, draws that follow the laws, audits that bite."""

import decimal
import fractions
import functools
import glob
import math

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxpriv import _exact, depth, selection
from tests.oracles import selection_loops

MECHANISMS = ("exponential", "permute_and_flip")
LAWS = {"exponential": selection.log_probs, "permute_and_flip": selection.permute_and_flip_log_probs}


jitted_laws = {name: jax.jit(one) for name, one in LAWS.items()}


def law(mechanism, scores, epsilon, sensitivity=1):
    """Probabilities in float64."""
    with jax.enable_x64(True):
        arguments = (jnp.asarray(x, jnp.float64) for x in (epsilon, sensitivity))
        epsilon, sensitivity = arguments
        scores = jnp.asarray(scores, jnp.float64)
        return np.exp(np.asarray(jitted_laws[mechanism](scores, epsilon=epsilon, sensitivity=sensitivity)))


@functools.cache
def sampler(mechanism, epsilon, max_score, sensitivity):
    def one(key, scores, where):
        return selection.sample(
            key,
            scores,
            epsilon=epsilon,
            sensitivity=sensitivity,
            max_score=max_score,
            mechanism=mechanism,
            where=where,
        )

    return jax.jit(jax.vmap(one, (0, None, None)))


def draws(mechanism, scores, epsilon, num, *, seed=0, max_score=8, sensitivity=1, where=None):
    """Indices drawn; the scores are padded to 20 so that few shapes are compiled."""
    present = np.arange(20) < len(scores) if where is None else np.pad(where, (0, 20 - len(where)))
    scores = jnp.asarray(np.pad(scores, (0, 20 - len(scores))), jnp.int32)
    keys = jax.random.split(jax.random.key(seed), num)
    return np.asarray(sampler(mechanism, epsilon, max_score, sensitivity)(keys, scores, present))


def test_laws_match_the_reference(shared):
    paths = [p for p in glob.glob(str(shared / "oracle/sentdp/*.npz")) if "em_prob" in np.load(p)]
    assert len(paths) >= 10
    for path in paths:
        case = np.load(path)
        for i, epsilon in enumerate(case["eps"]):
            em, pf = (law(m, case["utility"], float(epsilon)) for m in MECHANISMS)
            np.testing.assert_allclose(em, case["em_prob"][i], rtol=1e-9, atol=1e-300)
            np.testing.assert_allclose(pf, case["pf_prob"][i], rtol=1e-7, atol=1e-15)
            assert em @ case["depth"] <= pf @ case["depth"] + 1e-9


def test_neighbours_of_the_reference(shared):
    for name in ("neighbours_00_k4_m20_p6_d3", "neighbours_02_k12_m25_p20_d48"):
        case = np.load(shared / f"oracle/sentdp/{name}.npz")
        for i, epsilon in enumerate(case["eps"]):
            for mechanism, key in (("exponential", "em_loss"), ("permute_and_flip", "pf_loss")):
                one, two = (law(mechanism, case[u], float(epsilon)) for u in ("utility", "utility2"))
                loss = np.abs(np.log(one) - np.log(two)).max()
                assert loss <= epsilon * (1 + 1e-9)
                assert loss == pytest.approx(case[key][i], rel=1e-6, abs=1e-9)


def test_the_papers_table_of_how_many_deep_candidates_it_takes(shared):
    case = np.load(shared / "oracle/sentdp/table1.npz")
    columns = list(case["columns"])
    for row in case["values"]:
        value = dict(zip(columns, row))
        scores = np.zeros(5000)
        scores[: int(value["b"])] = value["j"]
        for name, mechanism in (("p_em", "exponential"), ("p_pf", "permute_and_flip")):
            got = law(mechanism, scores, value["eps"])[: int(value["b"])].sum()
            assert got == pytest.approx(value[name], rel=1e-6)


@hypothesis.settings(max_examples=40)
@hypothesis.given(hnp.arrays(np.int64, 5, elements=st.integers(-3, 3)), st.floats(0, 6))
def test_laws_match_the_twins(scores, epsilon):
    em, pf = (law(m, scores, epsilon, 2) for m in MECHANISMS)
    np.testing.assert_allclose(em, selection_loops.exponential_law(scores, epsilon, 2), rtol=1e-12)
    np.testing.assert_allclose(pf, selection_loops.permute_and_flip_law(scores, epsilon, 2), rtol=1e-10)


@hypothesis.given(
    hnp.arrays(np.int64, 7, elements=st.integers(0, 6)),
    hnp.arrays(np.int64, 7, elements=st.integers(-2, 2)),
    st.floats(0.01, 12),
)
def test_neighbouring_utilities_stay_within_epsilon(scores, change, epsilon):
    for mechanism in MECHANISMS:
        one, two = (law(mechanism, s, epsilon, 2) for s in (scores, scores + change))
        assert np.abs(np.log(one) - np.log(two)).max() <= epsilon * (1 + 1e-9)


def test_the_half_is_needed_and_tight():
    """One candidate falls as all others rise: 0.999 epsilon with the half, nearly twice epsilon without."""
    up, down = np.eye(5000)[0], 1 - np.eye(5000)[0]
    loss = [
        np.abs(np.log(law("exponential", up, e)) - np.log(law("exponential", down, e))).max() for e in (1, 2)
    ]
    assert 0.999 < loss[0] <= 1
    assert 1.99 < loss[1] <= 2  # epsilon 1 without the half is epsilon 2 with it


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_draws_follow_the_law_and_not_its_neighbours(mechanism):
    scores = [0, 3, 1, 3, 2, 5, 4, 4, 0, 1]
    counts = np.bincount(draws(mechanism, scores, 1.7, 40_000), minlength=10)

    def p_value(epsilon):
        return scipy.stats.chisquare(counts, law(mechanism, scores, epsilon) * counts.sum()).pvalue

    assert p_value(1.7) > 1e-3
    assert p_value(1.7 * 1.15) < 1e-6
    assert p_value(1.7 / 1.15) < 1e-6
    other = next(m for m in MECHANISMS if m != mechanism)
    assert scipy.stats.chisquare(counts, law(other, scores, 1.7) * counts.sum()).pvalue < 1e-6


@pytest.mark.parametrize(("change", "heads"), [(-1, True), (0, False), (1, False)])
def test_coins_that_agree_in_their_first_32_bits_are_decided_by_the_other_96(monkeypatch, change, heads):
    """Each coin's 128 bits are those of its threshold, and one more or less in the last place."""
    table = selection.weights(epsilon=1.0, sensitivity=1, max_score=1)
    threshold = sum(int(limb) << (16 * i) for i, limb in enumerate(table[1][1:9]))
    bits = threshold + change
    given = [np.uint32(bits >> shift & 0xFFFFFFFF) for shift in (96, 64, 32, 0)]

    def words(key, shape, num=2):
        return [jnp.full(shape, w) for w in (given[1:] if num == 3 else [given[0]] * num)]

    monkeypatch.setattr("jaxpriv.selection.words", words)
    found = selection._flips(jax.random.key(0), jnp.asarray(table), jnp.array([1, 0, 1]))
    assert found.tolist() == [heads, True, heads]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_real_utilities_in_steps_follow_the_law(mechanism):
    """Sensitivity of 10 steps, and scores far below the last level of the table, where weights are nothing."""
    scores = [1212, 1240, 1233, 1238, 2, 1239]
    counts = np.bincount(draws(mechanism, scores, 6.0, 20_000, max_score=1240, sensitivity=10), minlength=6)
    expected = law(mechanism, scores, 6.0, 10)
    assert expected[4] < 1e-100
    assert counts[4] == 0
    assert scipy.stats.chisquare(np.delete(counts, 4), np.delete(expected, 4) * 20_000).pvalue > 1e-3


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_epsilon_zero_is_uniform_masks_hold_and_nothing_is_minus_one(mechanism):
    """Utilities 0, -1, 0 (one more each here) and an epsilon of 0: not the best, but any of the three (AC35)."""
    for scores in ([1, 0, 1], [0, 7, 3]):
        counts = np.bincount(draws(mechanism, scores, 0, 6_000), minlength=3)
        assert scipy.stats.chisquare(counts).pvalue > 1e-3
    where = np.array([True, False, True, True])
    masked = draws(mechanism, [2, 8, 2, 2], 5.0, 6_000, where=where)
    assert scipy.stats.chisquare(np.bincount(masked, minlength=4)[[0, 2, 3]]).pvalue > 1e-3
    assert (draws(mechanism, [2, 8], 5.0, 5, where=np.zeros(2, bool)) == -1).all()
    clamped = draws(mechanism, [50, 8, -3], 5.0, 6_000)  # not wrapped: 50 counts as 8
    assert scipy.stats.chisquare(np.bincount(clamped, minlength=3)[:2]).pvalue > 1e-3


def test_masked_laws():
    where = jnp.array([True, False, True])
    for one in LAWS.values():
        found = np.asarray(one(jnp.array([0.0, 5.0, 0.0]), epsilon=1.0, sensitivity=1, where=where))
        np.testing.assert_allclose(np.exp(found), [0.5, 0, 0.5], rtol=1e-5)


@pytest.mark.parametrize("epsilon", [-1, -1e-9, math.nan, math.inf])
def test_refuses_impossible_epsilons(epsilon):
    """An infinite one too: who wants no privacy takes the argmax (AC35)."""
    scores = jnp.array([0, -1, 0])
    for one in LAWS.values():
        with pytest.raises(ValueError, match="epsilon"):
            one(scores, epsilon=epsilon, sensitivity=1)
    for mechanism in MECHANISMS:
        with pytest.raises(ValueError, match="epsilon must be finite and at least 0"):
            draws(mechanism, [1, 0, 1], epsilon, 1)


def test_refuses_other_impossible_settings():
    with pytest.raises(ValueError, match="sensitivity"):
        selection.log_probs(jnp.zeros(3), epsilon=1.0, sensitivity=0)
    with pytest.raises(ValueError, match="fewer steps"):
        draws("exponential", [0, 1], 1e-4, 1, max_score=10**6)
    with pytest.raises(ValueError, match="num_steps"):
        selection.rounded(jnp.zeros((2, 3)), num_steps=0)


@pytest.mark.parametrize("count", [0, 1])
def test_a_document_of_no_or_of_one_sentence_is_drawn_uniformly_by_depth(count):
    """Whatever the sentence and epsilon: each of 5 candidates has utility -k / 2 and probability 0.2 (AC33)."""
    rng = np.random.default_rng(count)
    sentences, candidates, directions = (jnp.asarray(rng.normal(size=(n, 3)), jnp.float32) for n in (1, 5, 4))
    for some in (directions, *directions[:, None]):  # of one alone the sentence may be above the candidate
        found = depth.depth(sentences, candidates, some, where=jnp.arange(1) < count)
        assert found.tolist() == [0] * 5
    assert (found - count / 2).tolist() == [-0.5 * count] * 5
    for mechanism in MECHANISMS:
        for scores in (found, found - count / 2):
            np.testing.assert_allclose(law(mechanism, scores, 10.0), 0.2, rtol=1e-9)
        counts = np.bincount(draws(mechanism, found, 5.0, 6_000, seed=count), minlength=5)
        assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_zero_epsilon_law_and_far_gaps():
    """Epsilon 0 is a third each (AC35); what is 700 nats behind has a probability still (AC36)."""
    for mechanism in MECHANISMS:
        np.testing.assert_allclose(law(mechanism, [0, -1, 0], 0), 1 / 3, rtol=1e-9)
        found = law(mechanism, [0, -1400], 1.0)
        assert (found > 0).all()
        assert np.log(found[1]) == pytest.approx(-700 if mechanism == "exponential" else -700 - np.log(2))


@hypothesis.given(
    hnp.arrays(np.float32, (5, 4), elements=st.floats(-1, 2, width=32)),
    hnp.arrays(np.float32, 4, elements=st.floats(width=32)),
    st.integers(0, 4),
    st.sampled_from([1, 7, 100]),
)
def test_rounding_each_sentence_first_keeps_the_sensitivity(scores, other, row, num_steps):
    changed = scores.copy()
    changed[row] = other
    before, after = (
        np.asarray(selection.rounded(jnp.asarray(s), num_steps=num_steps)) for s in (scores, changed)
    )
    assert ((before >= 0) & (before <= num_steps)).all()
    assert np.abs(before.sum(0) - after.sum(0)).max() <= num_steps
    assert np.abs(before / num_steps - np.clip(scores, 0, 1)).max() <= 0.5 / num_steps + 1e-6


def test_sampling_is_the_same_in_every_layout():
    rng = np.random.default_rng(2)
    scores = jnp.asarray(rng.integers(0, 9, (16, 40)), jnp.int32)
    mesh = jax.make_mesh((8,), ("documents",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.NamedSharding(mesh, jax.P("documents"))
    for mechanism in MECHANISMS:

        def one(key, s, mechanism=mechanism):
            return selection.sample(key, s, epsilon=2.0, sensitivity=1, max_score=8, mechanism=mechanism)

        def keys():
            return jax.random.split(jax.random.key(4), 16)

        one_by_one = jax.jit(one)
        loop = np.stack([one_by_one(k, s) for k, s in zip(keys(), scores)])
        for got in (
            jax.jit(lambda k, s, f=one: jax.lax.map(lambda x: f(*x), (k, s)))(keys(), scores),
            jax.jit(jax.vmap(one))(jax.device_put(keys(), place), jax.device_put(scores, place)),
        ):
            assert (np.asarray(got) == loop).all()


# --- Audits: tell two neighbours apart from what is released ---


def measured_loss(one, two, num_outcomes):
    """The largest log ratio that the counts prove (Clopper-Pearson, 1e-4 for all outcomes together)."""
    level = 1e-4 / (4 * num_outcomes)
    a, b = (np.bincount(x, minlength=num_outcomes) for x in (one, two))
    low = [scipy.stats.beta.ppf(level, c, len(one) - c + 1) if c else 0.0 for c in a]
    high = [scipy.stats.beta.ppf(1 - level, c + 1, len(two) - c) if c < len(two) else 1.0 for c in b]
    with np.errstate(divide="ignore"):
        return np.log(np.array(low) / np.array(high)).max()


def audit(release, epsilon=1.0):
    """Whether the draws on a worst pair (20 candidates, utilities moved by 1) contradict epsilon."""
    up = np.eye(20, dtype=int)[0]
    one, two = release(up), release(1 - up)
    return max(measured_loss(one, two, 20), measured_loss(two, one, 20)) > epsilon


def test_audit_passes_the_mechanisms_and_catches_a_missing_half():
    for mechanism in MECHANISMS:
        assert not audit(lambda u, m=mechanism: draws(m, u, 1.0, 20_000, seed=int(u[0])))
    assert audit(lambda u: draws("exponential", u, 2.0, 20_000, seed=int(u[0])))


def test_audit_catches_ties_broken_by_the_data():
    """The level is drawn rightly; its member is the one nearest to the data instead of any one."""

    def by_data(u):
        index = draws("exponential", u, 1.0, 20_000, seed=int(u[0]))
        nearest = 3 if u[0] else 7
        return np.where(np.asarray(u)[index] == np.asarray(u)[nearest], nearest, index)

    assert audit(by_data)


def reachable(sampler_at_extremes, scores):
    return {int(i) for extreme in ("least", "most") for i in sampler_at_extremes(scores, extreme)}


def test_audit_of_the_support_catches_float32_gumbel(monkeypatch):
    """Neighbours must share every outcome. Extreme random words reach all of ours, not all of Gumbel's (AC36).

    Epsilon 22 on two candidates 1 or 2 apart: 11 and 22 nats; float32 Gumbels span 21.1.
    """
    near, far = [1, 0], [2, 0]

    most = -np.log(-np.log(np.float32(1) - np.finfo(np.float32).epsneg))
    least = -np.log(-np.log(np.finfo(np.float32).tiny))
    assert (round(float(least), 2), round(float(most), 2)) == (-4.47, 16.64)
    assert 21.1 < most - least < 21.12

    def gumbel(scores, extreme):
        noise = [most, least] if extreme == "most" else [least, most]
        return [np.argmax(11 * np.array(scores) + noise)]

    def ours(scores, extreme):
        word = 0xFFFFFFFF if extreme == "most" else 0
        for module in ("jaxpriv.selection", "jaxpriv._exact"):
            monkeypatch.setattr(
                f"{module}.words", lambda key, shape, num=2: [jnp.full(shape, word, jnp.uint32)] * num
            )
        for cached in (sampler.cache_clear, jax.clear_caches):
            cached()
        return draws("exponential", scores, 22.0, 1)

    assert reachable(gumbel, near) == {0, 1}
    assert reachable(gumbel, far) == {0}
    assert reachable(ours, near) == reachable(ours, far) == {0, 1}
    monkeypatch.undo()
    for cached in (sampler.cache_clear, jax.clear_caches):
        cached()


def test_a_far_level_is_drawn_with_its_probability_to_128_bits():
    """Two candidates 22 nats apart: of 2^128 words as many choose the lesser as its law says (AC36)."""
    table = selection.weights(epsilon=22.0, sensitivity=1, max_score=2)  # 2 apart: 22 nats
    exact = fractions.Fraction(decimal.Decimal(-22).exp(decimal.Context(prec=80)))
    weight = sum(int(limb) << (16 * i) for i, limb in enumerate(table[2]))
    assert abs(weight - exact * 2**144) <= fractions.Fraction(1, 2)
    least = -(-weight * 2**128 // (2**144 + weight))  # the first word that chooses the better one
    assert abs(fractions.Fraction(least, 2**128) - exact / (1 + exact)) < fractions.Fraction(1, 2**127)
    words = [0, least - 1, least, 2**128 - 1]
    uniform = [jnp.asarray([w >> shift & 0xFFFFFFFF for w in words], jnp.uint32) for shift in (0, 32, 64, 96)]
    level = jax.jit(jax.vmap(_exact.level_from_words, (0, None, None)))
    assert level(uniform, jnp.array([1, 0, 1]), jnp.asarray(table)).tolist() == [0, 0, 2, 2]
    assert selection.residual(2, max_score=2) < 2.0**-100


def test_residual_is_a_delta_below_two_to_the_minus_hundred():
    """What 128 bits leave is stated (AC36)."""
    assert 0 < selection.residual(65_535, max_score=10**7) < 2.0**-100
