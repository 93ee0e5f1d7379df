"""The filter keeps the frequent; the noisy histogram has the sensitivity and the noise that it claims."""

import dataclasses
import json
import math
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
import scipy.stats

import accounting
from tests.oracles import release as twin
from trainers.common.errors import InputError
from trainers.translation import release

BUCKETS = range(4)


def arrays(sentences):
    """Records of lists of buckets: cell = bucket, value = 10 x bucket."""
    flat = [(b, s) for s, buckets in enumerate(sentences) for b in buckets]
    buckets = np.array([b for b, _ in flat], np.int64)
    owners = np.array([s for _, s in flat], np.int64)
    return buckets.astype(np.uint8)[:, None], (buckets * 10).astype(np.int32), owners


def counts_of(sentences, max_buckets, unit="sentence"):
    cells, values, owners = arrays(sentences)
    got = release.histogram(cells, values, owners, max_buckets=max_buckets, unit=unit)
    assert (got.values == got.cells[:, 0].astype(int) * 10).all()
    return dict(zip(got.cells[:, 0].tolist(), got.counts.tolist()))


def choice_order():
    """The public order in which buckets are preferred, read off one sentence that holds them all."""
    order = []
    for size in range(1, len(BUCKETS) + 1):
        order += [b for b in counts_of([list(BUCKETS)], size) if b not in order]
    return order


def test_histogram_equals_its_twin():
    order = choice_order()
    choose = lambda buckets: sorted(buckets, key=order.index)
    rng = np.random.default_rng(0)
    for _ in range(20):
        sentences = [rng.integers(0, 4, rng.integers(0, 6)).tolist() for _ in range(rng.integers(0, 8))]
        for r in (1, 2, 4):
            assert counts_of(sentences, r) == twin.histogram(sentences, choose, r)


@pytest.mark.parametrize("r", [1, 2, 3])
def test_sensitivity_by_brute_force(r):
    """All sentences of up to 4 buckets: removing one moves the counts by sqrt(r) at most, exchanging by sqrt(2 r)."""
    rest = [[0, 1, 2, 3], [0, 0, 1], [3]]
    choices = list(twin.all_sentences(BUCKETS, 4))
    with_one = [counts_of([*rest, list(s)], r) for s in choices]
    tables = [Counter(t) for t in with_one]
    without = Counter(counts_of(rest, r))
    removed = max(twin.squared_distance(t, without) for t in tables)
    exchanged = max(twin.squared_distance(a, b) for a in tables for b in tables)
    assert removed == r
    assert exchanged == min(2 * r, 4)  # four buckets only: sets of r = 3 overlap
    for adjacency, factor in (("add-remove", 1), ("replace-one", 2)):
        allowed = accounting.histogram_delta(
            epsilon=1.0, stddev=2.0, threshold=1e6, max_buckets=r, adjacency=adjacency
        )
        gaussian = accounting.delta_from_rho(factor * r / 2 / 4.0, epsilon=1.0)
        assert allowed == pytest.approx(gaussian)


def test_a_client_is_one_unit_if_asked():
    assert counts_of([[0, 1], [1, 2], [1]], 4, unit="client") == {0: 1, 1: 1, 2: 1}
    assert sum(counts_of([[0, 1], [1, 2], [1]], 2, unit="client").values()) == 2


CONFIG = release.ReleaseConfig(
    max_buckets=4, stddev=3.0, threshold=10.0, unit="sentence", adjacency="add-remove"
)


def constant(count, n):
    return release.Histogram(np.zeros((n, 1), np.uint8), np.zeros(n, np.int32), np.full(n, count, np.int64))


def test_noise_is_calibrated():
    n = 20_000
    shown = release.release(jax.random.key(5), constant(1000, n), CONFIG).counts
    assert len(shown) == n
    p = lambda s: scipy.stats.kstest(shown - 1000.0, scipy.stats.norm(scale=s).cdf).pvalue
    assert p(3.0) > 1e-3  # a right sampler fails once in 1,000 keys
    assert p(3.0 * 0.9) < 1e-6
    assert p(3.0 * 1.1) < 1e-6


def test_threshold_shows_what_it_should():
    """A count of 1 exceeds tau with probability 1 - Phi((tau - 1) / sigma)."""
    n = 200_000
    shown = len(release.release(jax.random.key(6), constant(1, n), CONFIG).counts)
    p = lambda s: scipy.stats.binomtest(shown, n, scipy.stats.norm.sf(9 / s)).pvalue
    assert p(3.0) > 1e-3
    assert p(3.0 * 0.9) < 1e-6
    assert p(3.0 * 1.1) < 1e-6
    assert (release.release(jax.random.key(6), constant(1, n), CONFIG).counts > 10).all()


def test_last_bits_tell_nothing():
    """Every released count lies on one public grid, whatever the true count."""
    for stddev in (0.3, 3.0, 3e5):
        config = dataclasses.replace(CONFIG, stddev=stddev, threshold=2.0)
        shown = release.release(jax.random.key(7), constant(100, 5000), config).counts.astype(np.float64)
        step = release.grid(stddev)
        assert (shown / step == np.round(shown / step)).all()
        assert step == 1 or stddev / 2100 < step < 1  # fine, and counts lie on it


def in_reach(noisy, count):
    """Whether a float32 normal times sigma, rounded to 2^-10 and added to `count`, can give these."""
    z = ((noisy - count) / LARGE.stddev).astype(np.float32)
    ulp = np.spacing(z)
    near = [(z + steps * ulp).astype(np.float64) for steps in range(-2, 3)]
    found = [(count + np.round(x * LARGE.stddev * 1024) / 1024).astype(np.float32) for x in near]
    return np.any([f == noisy for f in found], axis=0)


LARGE = release.ReleaseConfig(
    max_buckets=1, stddev=3e6, threshold=1.5, unit="sentence", adjacency="add-remove"
)


def test_large_noise_does_not_tell_a_count_from_the_next():
    """Float32 normals times a sigma of millions leave gaps, and which values are possible would tell the count."""
    n = 40_000
    share = []
    for count in (1, 2):
        noisy = release.release(jax.random.key(count), constant(count, n), LARGE).counts
        noisy = noisy[(noisy > LARGE.stddev) & (noisy < 1.3 * LARGE.stddev)]
        assert len(noisy) > n / 30
        share.append(in_reach(noisy, 1).mean())
    spread = math.sqrt(2 * share[0] * (1 - share[0]) / (n / 30))
    assert abs(share[0] - share[1]) < 4.5 * spread + 1e-3


@pytest.mark.parametrize("stddev", [0.2, 2450.0, 2.0**30])
def test_noise_of_any_size_is_calibrated(stddev):
    config = dataclasses.replace(CONFIG, stddev=stddev, threshold=1.5)
    shown = release.release(jax.random.key(9), constant(100, 40_000), config).counts.astype(np.float64)
    above = shown[shown > 100 + stddev / 10] - 100  # whatever the threshold hides
    assert len(above) > 15_000

    def p(s):
        return scipy.stats.kstest(above, scipy.stats.truncnorm(stddev / 10 / s, np.inf, scale=s).cdf).pvalue

    assert p(stddev) > 1e-3
    assert p(stddev * 0.9) < 1e-6
    assert p(stddev * 1.1) < 1e-6


@pytest.mark.parametrize("stddev", [0.25, 0.9, 3.0, 40.0, 3000.0])
def test_the_curve_holds_for_what_is_released(stddev):
    """The divergence of the released counts n and n + 1, and of 0 (no bucket) and 1, summed over the grid."""
    step = release.grid(stddev)
    threshold = 1 + 3.3 * stddev

    def law(count, points):
        """P[noisy] at the grid's points; first the probability that nothing is shown."""
        mass = -np.diff(scipy.stats.norm.sf((points - step / 2 - count) / stddev), append=0.0)
        shown = points - step / 2 >= threshold
        hidden = scipy.stats.norm.cdf((points[shown][0] - step / 2 - count) / stddev)
        return np.append(hidden, mass[shown]) if count else np.append(1.0, np.zeros(shown.sum()))

    high = math.ceil(threshold + 10 * stddev)
    for one, other in ((high, high + 1), (high + 1, high), (0, 1), (1, 0)):
        points = one + step * np.arange(-round(12 * stddev / step), round(12 * stddev / step) + 1)
        p, q = law(one, points), law(other, points)
        for epsilon in (0.5 / stddev, 2 / stddev):
            delta = np.maximum(p - math.exp(epsilon) * q, 0).sum()
            claimed = accounting.histogram_delta(
                epsilon=epsilon, stddev=stddev, threshold=threshold, max_buckets=1, adjacency="add-remove"
            )
            own = scipy.stats.norm.sf((threshold - 1) / stddev)
            ideal = {0: max(0.0, 1 - math.exp(epsilon) * (1 - own)), 1: own}.get(one, claimed - own)
            assert delta <= ideal * (1 + 1e-6) + 1e-15
            assert delta >= ideal * 0.97 - 1e-15  # nothing is given away
            assert ideal <= claimed


def test_same_key_same_release_and_other_key_other():
    one = release.release(jax.random.key(1), constant(50, 100), CONFIG)
    two = release.release(jax.random.key(1), constant(50, 100), CONFIG)
    other = release.release(jax.random.key(2), constant(50, 100), CONFIG)
    assert (one.counts == two.counts).all()
    assert not np.array_equal(one.counts, other.counts)


def test_nothing_is_released_of_nothing():
    empty = release.histogram(
        np.zeros((0, 2), np.uint8),
        np.zeros(0, np.int32),
        np.zeros(0, np.int32),
        max_buckets=3,
        unit="sentence",
    )
    assert empty.cells.shape == (0, 2)
    assert release.release(jax.random.key(0), empty, CONFIG).counts.shape == (0,)


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_guarantee_follows_the_formula(adjacency):
    config = dataclasses.replace(CONFIG, adjacency=adjacency, stddev=5.0, threshold=30.0)
    epsilon = release.epsilon(config, delta=1e-5)
    squared = 4 * (2 if adjacency == "replace-one" else 1)
    mu = math.sqrt(squared) / 5.0
    phi = scipy.stats.norm.cdf
    gaussian = phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)
    shown = 1 - phi(29 / 5.0) ** 4
    assert gaussian + shown == pytest.approx(1e-5, rel=1e-6)
    statement = release.statement(config, delta=1e-5)
    assert statement.data["epsilon"] == epsilon
    assert f"({accounting.round_up(epsilon)}, 1e-05)-differential privacy" in statement.sentence
    assert accounting.round_up(epsilon) in statement.markdown()
    assert ", 1.00000499e-05)-differ" in release.statement(config, delta=1.00000499e-5).sentence


def test_calibration_spends_what_it_may():
    config = release.calibrate(
        epsilon=4.0, delta=1e-6, max_buckets=8, unit="sentence", adjacency="add-remove"
    )
    assert 3.999 < release.epsilon(config, delta=1e-6) <= 4.0
    assert config.threshold > 1
    smaller = release.calibrate(
        epsilon=1.0, delta=1e-6, max_buckets=8, unit="sentence", adjacency="add-remove"
    )
    assert smaller.stddev > config.stddev
    with pytest.raises(ValueError, match="epsilon must be positive"):
        release.calibrate(epsilon=0, delta=1e-6, max_buckets=8, unit="sentence", adjacency="add-remove")


def test_a_delta_that_the_threshold_exceeds_is_refused():
    low = dataclasses.replace(CONFIG, threshold=2.0)
    assert release.epsilon(low, delta=1e-5) == math.inf
    with pytest.raises(ValueError, match="raise the threshold, the noise or delta"):
        release.statement(low, delta=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stddev": 0.0}, "stddev must be positive"),
        ({"stddev": float("nan")}, "stddev must be positive"),
        ({"threshold": 1.0}, "threshold must be more than 1"),
        ({"stddev": 2.0**31}, "at most 2"),
        ({"max_buckets": 0}, "max_buckets must be an integer in"),
        ({"max_buckets": 10**400}, "max_buckets must be an integer in"),
        ({"adjacency": "swap"}, "adjacency must be"),
        ({"unit": "word"}, "unit must be"),
    ],
)
def test_settings_it_cannot_serve_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_a_joint_statement_is_the_weakest_of_all_computed_anew():
    made = [
        release.calibrate(epsilon=e, delta=d, max_buckets=4, unit="sentence", adjacency="add-remove")
        for e, d in ((2.0, 1e-6), (1.0, 1e-4))
    ]
    said = [release.as_json(c, delta=d) for c, d in zip(made, (1e-6, 1e-4))]
    joint = release.joint_statement(json.loads(json.dumps(said)))
    assert joint.data["epsilon"] == release.epsilon(made[0], delta=1e-6)
    assert joint.data["delta"] == 1e-4
    assert "the server passed them on" in joint.data["assumptions"][-1]
    for wrong in (
        [],
        [None, *said],
        [{}],
        [{**said[0], "stddev": "x"}],
        [said[0], {**said[1], "unit": "client"}],
    ):
        with pytest.raises(ValueError, match=r"client"):
            release.joint_statement(wrong)


def test_what_no_release_serves_is_refused():
    assert release.lost(stddev=3e3, max_buckets=16) < 1e-24
    few: dict[str, Any] = dict(delta=1e-18, max_buckets=16, unit="sentence", adjacency="add-remove")
    config = release.calibrate(epsilon=1.0, **few)
    assert 0.999 < release.epsilon(config, delta=1e-18) <= 1
    with pytest.raises(InputError, match="no noise reaches"):
        release.calibrate(epsilon=1e-9, **few)
    for delta in (0.0, 1e-19, 0.01, 0.999, math.nan, math.inf):
        with pytest.raises(InputError, match="--delta must be in"):
            release.check(1.0, delta, 4)
    for buckets in (0, 10**400):
        with pytest.raises(InputError, match="--max-buckets must be in"):
            release.check(1.0, 1e-6, buckets)
    for epsilon in (0.0, 101.0, math.nan):
        with pytest.raises(InputError, match="--epsilon must be"):
            release.check(epsilon, 1e-6, 4, option="--epsilon")


def test_a_client_cannot_claim_a_guarantee_that_promises_nothing():
    """Whatever stands in an upload's header ends in a ValueError of one line, or in a true statement."""
    made = release.calibrate(epsilon=2.0, delta=1e-6, max_buckets=4, unit="sentence", adjacency="add-remove")
    said = json.loads(json.dumps(release.as_json(made, delta=1e-6)))
    with pytest.raises(ValueError, match=r"it must be in \[1e-18, 0.01\)"):
        release.joint_statement([said, {**said, "delta": 0.999}])
    strange = [10**400, -(10**400), math.inf, math.nan, -1, 0, 1e300, 1e-320, "x", "1", None, [], {}, True]
    for name in said:
        for value in strange:
            data, refusal = None, ""
            try:
                data = release.joint_statement([said, {**said, name: value}]).data
            except ValueError as error:
                refusal = str(error)
            if data is None:
                assert 0 < len(refusal) < 400
                assert "\n" not in refusal
            else:
                assert 0 < data["epsilon"] <= 100
                assert data["delta"] < 0.01


def test_the_statement_says_what_a_unit_and_a_key_are():
    text = release.statement(CONFIG_OF_TEXT, delta=1e-5).markdown()
    assert "every occurrence is one of its own" in text
    assert "computational" in text


CONFIG_OF_TEXT = release.ReleaseConfig(
    max_buckets=4, stddev=5.0, threshold=40.0, unit="sentence", adjacency="add-remove"
)


def test_filter_keeps_what_is_frequent_at_home():
    _, values, owners = arrays([[0, 1, 1, 1], [0, 2], [0, 1]])
    keep = lambda q: release.frequent(values, owners, min_sentences=q)
    assert keep(1).all()
    # Bucket 0 in three sentences, 1 in two (its repetitions in one sentence count once), 2 in one.
    assert values[keep(2)].tolist() == [0, 10, 10, 10, 0, 0, 10]
    assert values[keep(3)].tolist() == [0, 0, 0]
    assert not keep(4).any()
    assert release.frequent(np.zeros(0, np.int32), np.zeros(0, np.int32), min_sentences=1).shape == (0,)
    with pytest.raises(ValueError, match="min_sentences must be at least 1"):
        keep(0)


def test_encryption_and_codes_state_no_epsilon():
    statement = release.no_statement()
    assert "epsilon: none" in statement.sentence
    for word in ("quantization", "encryption", "shuffling"):
        assert word in statement.sentence
