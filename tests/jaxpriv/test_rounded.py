"""Rounded Gaussian noise: every border between two integers is the exact one, however large the noise."""

import jax
import numpy as np
import pytest
from scipy import stats

from jaxpriv import _rounded, sampling
from tests.oracles import sampling as twin

STDDEVS = [0.05, 0.7, 1234.5, 2450.0, 3.1e6, 2.0**30]


def from_tails(tails, stddev, sign=0):
    rows = [[(tail | sign << 255) >> (32 * (7 - i)) & 0xFFFFFFFF for i in range(8)] for tail in tails]
    return _rounded.rounded_from_words(list(np.array(rows, np.uint32).T), stddev).tolist()


@pytest.mark.parametrize("stddev", STDDEVS)
def test_every_border_is_the_exact_one(stddev):
    """The tail probability at a border and the one below it fall on its two sides, far out too."""
    depths = (0.4, 1.1, 3.7, 9.2, 16.0, 17.0)
    for border in sorted({max(1, round(depth * stddev)) for depth in depths}):
        first = twin.rounded_tail(border, stddev) // 2  # the first whose middle is not below the border
        if first > 0:
            assert from_tails([first - 1, first], stddev) == [border, border - 1]
            assert from_tails([first - 1, first], stddev, sign=1) == [-border, 1 - border]


@pytest.mark.parametrize("stddev", STDDEVS)
def test_any_bits_give_the_integer_of_the_exact_law(stddev):
    rng = np.random.default_rng(1)
    tails = [int.from_bytes(rng.bytes(32), "big") >> int(shift) for shift in rng.integers(1, 250, 100)]
    for tail, whole in zip([0, *tails], from_tails([0, *tails], stddev)):
        assert 2 * tail + 1 >= twin.rounded_tail(whole + 1, stddev)
        assert whole == 0 or 2 * tail + 1 < twin.rounded_tail(whole, stddev)


def test_the_proposal_of_floats_is_what_decimals_decide(monkeypatch):
    drawn = [sampling.rounded_normal(jax.random.key(0), (400,), stddev=s) for s in (0.6, 1500.0)]
    monkeypatch.setattr(_rounded, "_SLACK", 0.05)  # at 1500 every draw is near a border, at 0.6 some
    for before, stddev in zip(drawn, (0.6, 1500.0)):
        assert (sampling.rounded_normal(jax.random.key(0), (400,), stddev=stddev) == before).all()


def test_it_follows_its_law_and_no_other():
    draws = sampling.rounded_normal(jax.random.key(1), (200_000,), stddev=2.5)
    support = np.arange(-9, 10)
    observed = np.array([(draws == k).sum() for k in support])

    def p(stddev):
        law = np.diff(stats.norm.cdf(np.arange(-9.5, 10), scale=stddev))
        return stats.chisquare(observed, law / law.sum() * observed.sum()).pvalue

    assert p(2.5) > 1e-3  # a right sampler fails once in 1,000 keys
    assert p(2.45) < 1e-6
    assert p(2.55) < 1e-6


def test_shapes_and_keys():
    draw = lambda seed, shape: sampling.rounded_normal(jax.random.key(seed), shape, stddev=1e4)
    assert draw(0, ()).shape == ()
    assert draw(0, (0,)).shape == (0,)
    assert draw(0, (3, 4)).dtype == np.int64
    assert (draw(0, (3, 4)) == draw(0, (3, 4))).all()
    assert (draw(0, (3, 4)) != draw(1, (3, 4))).any()
    assert sampling.rounded_residual(2.0**30) < 2.0**-220
    for stddev in (0.0, -1.0, float("nan"), float("inf"), 2.0**31):
        with pytest.raises(ValueError, match="stddev must be"):
            sampling.rounded_normal(jax.random.key(0), (3,), stddev=stddev)
