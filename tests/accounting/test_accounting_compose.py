"""Composition, groups, adaptive clipping, secure aggregation, histograms, documents, edge cases."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats

import accounting
from accounting import conversions, strategies


def tree(z=7.0, n=2000, k=6, **more):
    return accounting.TreeAggregation(
        **{
            "noise_multiplier": z,
            "num_rounds": n,
            "rounds_between": 313,
            "max_participations": k,
            "adjacency": "zero-out",
            **more,
        }
    )


def pure(epsilon=2.0, **more):
    return accounting.PureDP(**{"epsilon": epsilon, "adjacency": "replace-one", "unit": "sentence", **more})


def test_what_a_float_does_not_hold_is_not_nothing():
    assert accounting.rho_from_sensitivity(1.0, 1e200) == 5e-324
    assert accounting.rho_from_sensitivity(0.0, 1e200) == 0
    for made in (
        lambda: strategies.Toeplitz(np.array([1e-320, 1.0])),
        lambda: strategies.Dense(np.eye(2) * 1e-320),
    ):
        with pytest.raises(ValueError, match="positive"):
            made()


def test_noise_multipliers_at_their_limits():
    """AC01."""
    assert accounting.rho(tree(0.0)) == math.inf
    assert accounting.epsilon(tree(0.0), delta=1e-10) == math.inf
    assert accounting.rho(tree(math.inf)) == 0
    assert accounting.epsilon(tree(math.inf), delta=1e-10) == 0
    assert accounting.rho(tree(1e-200)) == math.inf
    assert 0 < accounting.rho(tree(1e200)) < 1e-300
    for bad in (math.nan, -1, -1e-9, "7", None, True):
        with pytest.raises(ValueError, match="noise_multiplier must be"):
            tree(bad)


def test_nothing_released_costs_nothing():
    """AC06."""
    for z in (0.0, 7.0, math.inf):
        empty = tree(z, 0)
        assert accounting.squared_sensitivity(empty) == 0
        assert accounting.rho(empty) == 0
        assert accounting.epsilon(empty, delta=1e-10) == 0
        assert accounting.epsilon(empty, delta=0.0) == 0
    nothing = accounting.compose([], delta=1e-6)
    assert (nothing.rho, nothing.epsilon) == (0, 0)
    assert accounting.epsilon(pure(releases=0), delta=0) == 0


def test_participation_fence_posts():
    """AC20 and X24, X30."""
    for n, b, most in ((10, 3, 4), (9, 3, 3), (7, 1, 7), (5, 9, 1)):
        run = accounting.TreeAggregation(
            noise_multiplier=1.0, num_rounds=n, min_separation=b, adjacency="zero-out"
        )
        assert run.participations == most
    with pytest.raises(ValueError, match="min_separation must be a whole number of at least 1, got 0"):
        accounting.TreeAggregation(noise_multiplier=1, num_rounds=5, min_separation=0, adjacency="zero-out")
    eight = {"noise_multiplier": 1.0, "num_rounds": 8, "rounds_between": 3, "max_participations": 5}
    assert accounting.squared_sensitivity(accounting.TreeAggregation(**eight, adjacency="zero-out")) == 10
    indian = {"noise_multiplier": 7.0, "num_rounds": 1290, "max_participations": 6, "adjacency": "zero-out"}
    assert accounting.squared_sensitivity(accounting.TreeAggregation(**indian, rounds_between=170)) == 112
    assert accounting.squared_sensitivity(accounting.TreeAggregation(**indian, min_separation=170)) == 116


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"min_separation": 3}, "exactly one of min_separation"),
        ({"rounds_between": None}, "exactly one of min_separation"),
        ({"rounds_between": -1}, "rounds_between must be"),
        ({"rounds_between": 2.5}, "rounds_between must be"),
        ({"num_rounds": -1}, "num_rounds must be"),
        ({"num_rounds": 1e3}, "num_rounds must be"),
        ({"num_rounds": True}, "num_rounds must be"),
        ({"max_participations": 0}, "max_participations must be"),
        ({"max_participations": 1.5}, "max_participations must be"),
        ({"restarts": (2000,)}, "restarts must be below num_rounds = 2000"),
        ({"restarts": (2001,)}, "restarts must be below num_rounds = 2000"),
        ({"restarts": (5, 5)}, "strictly increasing"),
        ({"restarts": (7, 5)}, "strictly increasing"),
        ({"restarts": (-1,)}, "restarts must be"),
        ({"restarts": 5}, "restarts must be a list"),
        ({"restarts": (1.5,)}, "restarts must be"),
        ({"completion": 1}, "completion must be"),
        ({"adjacency": "zero_out"}, "adjacency must be one of zero-out"),
        ({"adjacency": None}, "adjacency must be one of zero-out"),
        ({"unit": ""}, "unit must name"),
    ],
)
def test_settings_that_are_refused(more, message):
    with pytest.raises(ValueError, match=message):
        tree(**more)


def test_adjacency_has_no_default_and_replacement_costs_four_times():
    with pytest.raises(TypeError, match="adjacency"):
        accounting.TreeAggregation(noise_multiplier=1.0, num_rounds=5, min_separation=1)
    base = accounting.rho(tree())
    assert accounting.rho(tree(adjacency="add-remove")) == base
    assert accounting.rho(tree(adjacency="replace-one")) == 4 * base
    assert accounting.squared_sensitivity(tree(adjacency="replace-one")) == 316


def test_an_empty_first_segment_costs_nothing():
    """X39: a restart before the first round."""
    run = accounting.TreeAggregation(
        noise_multiplier=1.0,
        num_rounds=4,
        min_separation=1,
        max_participations=1,
        restarts=(0,),
        adjacency="zero-out",
    )
    assert accounting.squared_sensitivity(run) == 3


def test_clip_bits_and_updates_together_cost_what_z_costs():
    """AC10."""
    for z, sigma_b, value in ((1, 5, 1.005038), (7, 325, 7.000406), (0.54, 25, 0.540031)):
        found = accounting.value_noise_multiplier(z, count_stddev=sigma_b)
        assert found == pytest.approx(value, abs=1e-6)
        run = tree(found)
        bits = accounting.QuantileEstimation(count_stddev=sigma_b, schedule=run)
        together = accounting.compose([run, bits], delta=1e-10)
        assert together.rho == pytest.approx(accounting.rho(tree(z)), rel=1e-12)
        assert together.epsilon == pytest.approx(accounting.epsilon(tree(z), delta=1e-10), rel=1e-9)


@pytest.mark.parametrize(("z", "sigma_b"), [(1, 0.4), (0.8, 0.4), (2, 1), (7, 3), (math.inf, 5)])
def test_too_little_noise_on_the_bits_is_refused(z, sigma_b):
    """AC10: feasible only where z < 2 sigma_b."""
    with pytest.raises(ValueError, match="below 2 x count_stddev"):
        accounting.value_noise_multiplier(z, count_stddev=sigma_b)


def test_a_near_miss_warns_and_nan_is_refused():
    """AC10: sigma_b = 1.0001 for z = 2 is valid, at 141.432."""
    with pytest.warns(UserWarning, match="raise count_stddev"):
        assert accounting.value_noise_multiplier(2, count_stddev=1.0001) == pytest.approx(141.432, rel=1e-4)
    for z, sigma_b in ((math.nan, 5), (-1, 5), (1, math.nan), (1, 0), (1, -2)):
        with pytest.raises(ValueError, match="must be"):
            accounting.value_noise_multiplier(z, count_stddev=sigma_b)
    assert accounting.value_noise_multiplier(3.0, count_stddev=math.inf) == 3.0
    assert accounting.default_count_stddev(6500) == 325


def test_groups_pay_the_square():
    """AC07: rho 0.25 for one device is 1.0 for two and 2.25 for three."""
    run = accounting.TreeAggregation(
        noise_multiplier=math.sqrt(2), num_rounds=1, min_separation=1, adjacency="zero-out"
    )
    assert accounting.rho(run) == pytest.approx(0.25)
    for size, rho in ((2, 1.0), (3, 2.25)):
        group = accounting.compose([run], delta=1e-10, group_size=size)
        assert group.rho == pytest.approx(rho)
        exact = accounting.epsilon_from_rho(rho, delta=1e-10, known="gaussian")
        assert group.epsilon == pytest.approx(exact, rel=1e-9)
        assert group.unit == f"group of {size} devices"
    assert accounting.compose([pure(2.0)], delta=0, group_size=3).epsilon == 6


def test_several_runs_add_and_unequal_units_or_adjacencies_are_refused():
    both = accounting.compose([tree(), tree(3.0, 500)], delta=1e-10)
    total = accounting.rho(tree()) + accounting.rho(tree(3.0, 500))
    assert both.rho == pytest.approx(total, rel=1e-14)
    assert both.epsilon == accounting.epsilon_from_rho(total, delta=1e-10, known="gaussian")
    with pytest.raises(ValueError, match="unequal adjacency: add-remove, zero-out"):
        accounting.compose([tree(), tree(adjacency="add-remove")], delta=1e-10)
    with pytest.raises(ValueError, match="unequal unit: device, user"):
        accounting.compose([tree(), tree(unit="user")], delta=1e-10)
    with pytest.raises(ValueError, match="unequal unit"):
        accounting.compose([tree(adjacency="replace-one"), pure()], delta=1e-10)


def test_ten_documents_of_the_exponential_mechanism():
    """AC05."""
    assert accounting.rho(pure(bounded_range=True)) == 0.5
    assert accounting.rho(pure()) == 2
    ten = pure(releases=10, bounded_range=True)
    assert accounting.epsilon(ten, delta=0) == 20
    assert accounting.rho(ten) == 5
    together = accounting.compose([pure(bounded_range=True)] * 10, delta=1e-3)
    assert together.rho == 5
    assert together.epsilon <= min(20, accounting.epsilon_from_rho(5, delta=1e-3, known="zcdp"))
    assert accounting.epsilon(pure(releases=10), delta=0) == 20
    assert accounting.delta(ten, epsilon=20) == 0
    with pytest.raises(ValueError, match="total epsilon 20"):
        accounting.delta(ten, epsilon=19)
    with pytest.raises(ValueError, match="PureDP takes 'exact' or 'cks'"):
        accounting.epsilon(ten, delta=1e-6, method="pld")
    with pytest.raises(ValueError, match="no L2 sensitivity"):
        accounting.squared_sensitivity(ten)


def test_pure_releases_compose_at_least_as_well_as_randomized_response():
    """The exact composition of k randomized responses is the true cost; ours is not below it."""
    eps, k, delta = 0.3, 20, 1e-4
    found = accounting.compose([pure(eps, releases=k)], delta=delta).epsilon
    p = math.exp(eps) / (1 + math.exp(eps))
    wins = np.arange(k + 1)
    up, down = scipy.stats.binom.pmf(wins, k, p), scipy.stats.binom.pmf(wins, k, 1 - p)

    def needed(e):
        return np.maximum(up - np.exp(e) * down, 0).sum()

    assert needed(found) <= delta
    assert needed(found - 2e-3) > delta
    assert found < k * eps


def test_gaussian_and_pure_parts_compose_through_plds_below_simple_bounds():
    noise = tree(adjacency="replace-one", unit="sentence", z=20.0)
    both = accounting.compose([noise, pure(0.5)], delta=1e-8)
    alone = accounting.epsilon(noise, delta=1e-8)
    assert alone < both.epsilon <= alone + 0.5
    assert both.epsilon < accounting.epsilon_from_rho(both.rho, delta=1e-8, known="zcdp")
    assert both.known == "mixed"
    assert both.how == "privacy loss distributions (dp-accounting)"
    assert accounting.compose([noise, pure(0.5)], delta=0).epsilon == math.inf


def test_methods_are_ordered():
    exact, pld, cks, rdp = (
        accounting.epsilon(tree(), delta=1e-10, method=m) for m in ("exact", "pld", "cks", "rdp")
    )
    assert exact <= pld * (1 + 1e-9) < cks <= rdp * (1 + 1e-9)
    with pytest.raises(ValueError, match="method must be one of exact, pld, rdp, cks"):
        accounting.epsilon(tree(), delta=1e-10, method="best")
    with pytest.raises(TypeError):
        accounting.epsilon(tree())


def test_document_guarantees():
    assert accounting.document_epsilon(2.0, num_sentences=7, utility="strict_depth") == 6
    for utility in ("closed_depth", "bounded_sum", "low_rank", "truncation"):
        assert accounting.document_epsilon(2.0, num_sentences=7, utility=utility) == 14
    assert accounting.document_epsilon(math.inf, num_sentences=1, utility="strict_depth") == 0
    with pytest.raises(ValueError, match="utility must be one of"):
        accounting.document_epsilon(2.0, num_sentences=7, utility="depth")


def test_an_absent_share_of_noise_is_not_served():
    with pytest.raises(ValueError, match="share of the noise"):
        discrete(adjacency="add-remove")
    stated = accounting.statement(discrete(), delta=1e-6).data["assumptions"]
    assert any("adds its share" in line for line in stated)


def test_only_floating_point_noise_assumes_real_arithmetic():
    tree = accounting.TreeAggregation(
        noise_multiplier=2.0, num_rounds=4, min_separation=2, adjacency="zero-out"
    )
    for parts, said in ((tree, True), ([tree, discrete()], True), (discrete(), False), (pure(1.0), False)):
        stated = accounting.statement(parts, delta=1e-6).data["assumptions"]
        assert any("real arithmetic" in line for line in stated) == said


def discrete(z=2.0, **more):
    return accounting.DistributedDiscreteGaussian(
        **{
            "noise_multiplier": z,
            "num_rounds": 1,
            "min_separation": 1,
            "clip_norm": 1.0,
            "scale": 1.0,
            "dimension": 1,
            "beta": 0.0,
            "min_survivors": 3,
            "max_clients": 3,
            "adjacency": "zero-out",
            **more,
        }
    )


@pytest.mark.parametrize("z", [1.0, 2.0, 3.0])
def test_sums_of_discrete_gaussians_stay_below_the_accounted_zcdp(z):
    """Renyi divergences of the exact law of three shares, shifted by the inflated norm 2, against rho."""
    run = discrete(z)
    assert run.inflation == 2
    share = z**2 / 3
    grid = np.arange(-60, 61)
    law = np.exp(-(grid**2) / (2 * share))
    law /= law.sum()
    total = np.convolve(np.convolve(law, law), law)
    moved = np.roll(total, 2)
    keep = (total > 1e-200) & (moved > 1e-200)
    rho = accounting.rho(run)
    for alpha in (1.5, 2, 4, 10):
        exponent = alpha * np.log(moved[keep]) + (1 - alpha) * np.log(total[keep])
        divergence = np.log(np.exp(exponent).sum()) / (alpha - 1)
        assert divergence <= alpha * rho * (1 + 1e-9)
    # With so much noise the correction vanishes and the continuous value remains.
    assert rho >= 2**2 / z**2 / 2


def test_discrete_shares_are_accounted_as_zcdp_only_and_refuse_what_they_cannot_serve():
    run = discrete(8.0, num_rounds=10, min_separation=5)
    assert accounting.epsilon(run, delta=1e-6) == accounting.epsilon_from_rho(
        accounting.rho(run), delta=1e-6, known="zcdp"
    )
    assert accounting.rho(run) == pytest.approx(2 * accounting.rho(discrete(8.0)))
    assert accounting.rho(discrete(0.0)) == math.inf
    assert accounting.rho(discrete(math.inf)) == 0
    for more, message in (
        ({"restarts": (1,), "num_rounds": 5}, "fresh every round"),
        ({"min_survivors": 4}, "max_clients must be at least"),
        ({"scale": 0}, "scale must be"),
        ({"beta": 1.0}, "beta must be"),
    ):
        with pytest.raises(ValueError, match=message):
            discrete(**more)
    with pytest.raises(ValueError, match="only zCDP is known"):
        accounting.delta(run, epsilon=1.0)


def test_secure_aggregation_refuses_nonsense():
    base = tree()
    good = {"mechanism": base, "clip_norm": 1.0, "scale": 100.0, "dimension": 10, "beta": 0.5}
    assert accounting.rho(accounting.SecureAggregation(**good)) > accounting.rho(base)
    for name, bad in (
        ("clip_norm", 0),
        ("clip_norm", math.inf),
        ("scale", -1),
        ("scale", math.nan),
        ("dimension", 0),
        ("beta", 1),
        ("beta", -0.1),
        ("mechanism", pure()),
    ):
        with pytest.raises(ValueError, match=name):
            accounting.SecureAggregation(**{**good, name: bad})


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_a_thresholded_histogram_of_one_bucket_meets_its_delta_exactly(adjacency):
    """One common bucket and one of one's own: the true delta, by quadrature, is not above the stated one."""
    sigma, tau, eps = 0.8, 3.0, 1.0
    stated = accounting.histogram_delta(
        epsilon=eps, stddev=sigma, threshold=tau, max_buckets=1, adjacency=adjacency
    )
    shown = scipy.stats.norm.sf((tau - 1) / sigma)
    squared = 2 if adjacency == "replace-one" else 1
    gauss = accounting.delta_from_rho(squared / 2 / sigma**2, epsilon=eps)
    assert stated == pytest.approx(gauss + shown, rel=1e-9)
    # An own bucket alone: absent in one run, shown with probability `shown` in the other.
    assert shown <= stated
    # A common bucket alone with counts 5 and 6: everything above the threshold is released as it is.
    x = np.linspace(tau, 20, 400_001)
    one, other = scipy.stats.norm(6, sigma), scipy.stats.norm(5, sigma)
    excess = np.maximum(one.pdf(x) - np.exp(eps) * other.pdf(x), 0)
    true = np.trapezoid(excess, x) + max(one.cdf(tau) - math.exp(eps) * other.cdf(tau), 0)
    assert true <= stated


def test_histogram_epsilon_inverts_delta_and_threshold_spends_its_share():
    setting = {"stddev": 4.0, "max_buckets": 3, "adjacency": "add-remove"}
    tau = accounting.histogram_threshold(delta=1e-6, **setting)
    shown = -np.expm1(3 * scipy.stats.norm.logcdf((tau - 1) / 4.0))
    assert shown == pytest.approx(5e-7, rel=1e-6)
    assert shown <= 5e-7
    eps = accounting.histogram_epsilon(delta=1e-6, threshold=tau, **setting)
    assert accounting.histogram_delta(epsilon=eps, threshold=tau, **setting) <= 1e-6
    assert accounting.histogram_delta(epsilon=eps * 0.999, threshold=tau, **setting) > 1e-6
    assert accounting.histogram_epsilon(delta=1e-9, threshold=tau, **setting) == math.inf
    assert accounting.histogram_delta(epsilon=1, threshold=5, **{**setting, "stddev": 0.0}) == 1
    for name, bad in (("threshold", 1.0), ("threshold", math.nan), ("stddev", -1), ("max_buckets", 0)):
        with pytest.raises(ValueError, match=name):
            accounting.histogram_delta(**{"epsilon": 1.0, "threshold": 5.0, **setting, name: bad})


def test_pure_to_zcdp():
    assert conversions.pure_to_rho(2.0) == 2
    assert conversions.pure_to_rho(2.0, bounded_range=True) == 0.5
    assert conversions.pure_to_rho(math.inf) == math.inf
    with pytest.raises(ValueError, match="epsilon must be"):
        conversions.pure_to_rho(-1)


def test_mechanisms_are_values():
    assert tree() == tree()
    assert hash(tree()) == hash(tree())
    assert dataclasses.replace(tree(), noise_multiplier=3.0) == tree(3.0)
    strategy = accounting.strategies.square_root(5)
    assert strategy == accounting.strategies.square_root(5)
    assert strategy != accounting.strategies.square_root(6)
    assert hash(strategy) == hash(accounting.strategies.square_root(5))
