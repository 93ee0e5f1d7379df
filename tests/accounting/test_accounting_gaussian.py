"""Conversions: exact against 60 digits, CKS against its definition, peers, limits and refusals."""

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import accounting
from accounting import conversions
from tests.oracles import accounting as oracle


def assert_exact(rho, delta, eps):
    """eps is enough, and 1e-9 x eps + 1e-12 less is not: by 60-digit arithmetic."""
    with mp.workdps(60):
        assert oracle.gaussian_delta(eps, rho) <= mp.mpf(delta)
        less = mp.mpf(eps) * (1 - mp.mpf(10) ** -9) - mp.mpf(10) ** -12
        if less >= 0:
            assert oracle.gaussian_delta(less, rho) > mp.mpf(delta)


@pytest.mark.parametrize("seed", range(3))
def test_epsilon_is_never_below_the_truth_and_tight_from_rho_1e_8_to_1e4_and_delta_1e_300_to_0_9999(seed):
    draw = np.random.default_rng(seed)
    for i in range(80):
        rho = 10 ** draw.uniform(-8, 4)
        at_zero = min(math.sqrt(rho / math.pi), 0.99)  # near delta(0) eps itself vanishes
        delta = (
            10 ** draw.uniform(-300, -0.0001),
            10 ** draw.uniform(-12, -0.01),
            1 - 10 ** draw.uniform(-4, -0.1),
            at_zero * (1 - 10 ** draw.uniform(-12, -0.1)),
        )[i % 4]
        assert_exact(rho, delta, accounting.epsilon_from_rho(rho, delta=delta, known="gaussian"))


@pytest.mark.parametrize("rho", [1e-8, 1e-4, 0.25, 79 / 98, 1.86, 100.0, 1e4])
@pytest.mark.parametrize("delta", [1e-300, 1e-20, 1e-10, 1e-5, 0.3, 0.9999])
def test_epsilon_at_the_corners(rho, delta):
    assert_exact(rho, delta, accounting.epsilon_from_rho(rho, delta=delta, known="gaussian"))


def test_published_values():
    for rho, eps in ((0.25, 4.492218), (1.86, 13.688308), (79 / 98, 8.526093)):
        assert accounting.epsilon_from_rho(rho, delta=1e-10, known="gaussian") == pytest.approx(eps, abs=1e-6)
    printed = [accounting.round_up(e) for e in (4.492218, 13.688308, 8.526093)]
    assert printed == ["4.4923", "13.6884", "8.5261"]


def test_large_epsilons_of_little_noise():
    """AC04: nothing overflows, where exp(eps) is beyond float64 too."""
    for z, eps in ((0.1, 91.8173), (0.01, 5425.51)):
        got = accounting.epsilon_from_rho(1 / (2 * z * z), delta=1e-5, known="gaussian")
        assert got == pytest.approx(eps, rel=1e-5)
        run = accounting.TreeAggregation(
            noise_multiplier=z, num_rounds=1, min_separation=1, adjacency="zero-out"
        )
        assert accounting.epsilon(run, delta=1e-5) == pytest.approx(eps, rel=1e-5)
        assert accounting.delta(run, epsilon=got) == pytest.approx(1e-5, rel=1e-5)
        if z == 0.1:
            assert accounting.epsilon(run, delta=1e-5, method="pld") == pytest.approx(eps, rel=1e-4)


@settings(max_examples=60)
@given(st.floats(1e-6, 1e3), st.floats(1e-200, 0.9), st.floats(1.0001, 3))
def test_epsilon_moves_the_right_way_and_delta_inverts_it(rho, delta, factor):
    eps = accounting.epsilon_from_rho(rho, delta=delta, known="gaussian")
    assert accounting.epsilon_from_rho(rho * factor, delta=delta, known="gaussian") >= eps
    assert accounting.epsilon_from_rho(rho, delta=min(delta * factor, 0.99), known="gaussian") <= eps
    assert accounting.epsilon_from_rho(rho, delta=delta, known="zcdp") >= eps * (1 - 1e-12)
    back = accounting.delta_from_rho(rho, epsilon=eps)
    assert back <= delta * (1 + 1e-8)
    if eps > 0:
        assert back >= delta * (1 - 1e-6)


@pytest.mark.parametrize("rho", [1e-6, 0.01, 0.81, 30.0])
@pytest.mark.parametrize("delta", [1e-100, 1e-10, 0.1])
def test_cks_is_the_best_order_of_its_definition(rho, delta):
    best = accounting.epsilon_from_rho(rho, delta=delta, known="zcdp")
    alpha = 1 + np.geomspace(1e-6, 1e9, 200_001)
    grid = alpha * rho + (np.log(1 / delta) + (alpha - 1) * np.log1p(-1 / alpha) - np.log(alpha)) / (
        alpha - 1
    )
    assert best <= max(grid.min(), 0) * (1 + 1e-12)
    assert best == pytest.approx(max(grid.min(), 0), rel=1e-6, abs=1e-9)


def test_limits_and_refusals():
    convert = accounting.epsilon_from_rho
    for known in ("gaussian", "zcdp"):
        assert convert(0.0, delta=1e-10, known=known) == 0
        assert convert(0.0, delta=0.0, known=known) == 0
        assert convert(0.5, delta=0.0, known=known) == math.inf
        assert convert(math.inf, delta=1e-10, known=known) == math.inf
        for rho in (math.nan, -1, -1e-300, "0.5", None, True):
            with pytest.raises(ValueError, match="rho must be"):
                convert(rho, delta=1e-10, known=known)
        for delta in (math.nan, -1e-10, 1, 1.5, math.inf, "x", None):
            with pytest.raises(ValueError, match="delta must be"):
                convert(0.5, delta=delta, known=known)
    with pytest.raises(ValueError, match="known must be one of gaussian, zcdp"):
        convert(0.5, delta=1e-10, known="pld")
    with pytest.raises(TypeError):
        convert(0.5, delta=1e-10)
    with pytest.raises(ValueError, match="epsilon must be"):
        accounting.delta_from_rho(0.5, epsilon=-1)
    for bad in ([0.1, math.nan], [0.1, -1.0]):
        with pytest.raises(ValueError, match="rho must be"):
            accounting.epsilon_curve(bad, 1e-5, known="gaussian")
    for bad in ([0.1, math.nan], [0.1, 1.0], [-0.1]):
        with pytest.raises(ValueError, match="delta must lie"):
            accounting.epsilon_curve(0.5, bad, known="gaussian")
    assert accounting.delta_from_rho(0.0, epsilon=0) == 0
    assert accounting.delta_from_rho(math.inf, epsilon=10) == 1
    assert accounting.delta_from_rho(0.5, epsilon=math.inf) == 0


def test_a_curve_equals_its_points():
    deltas = np.geomspace(1e-250, 0.9, 50)
    for known in ("gaussian", "zcdp"):
        curve = accounting.epsilon_curve(0.8, deltas, known=known)
        assert curve.tolist() == [accounting.epsilon_from_rho(0.8, delta=d, known=known) for d in deltas]


@pytest.mark.parametrize("rho", [0.25, 79 / 98, 1.86])
def test_dp_accounting_pld_agrees_from_above_and_rdp_is_looser(rho):
    exact = accounting.epsilon_from_rho(rho, delta=1e-10, known="gaussian")
    pld = conversions.epsilon_by_peer(rho, delta=1e-10, method="pld")
    rdp = conversions.epsilon_by_peer(rho, delta=1e-10, method="rdp")
    assert exact <= pld * (1 + 1e-9)
    assert pld == pytest.approx(exact, rel=1e-6)
    assert accounting.epsilon_from_rho(rho, delta=1e-10, known="zcdp") <= rdp * (1 + 1e-9)
    assert rdp > pld


def test_dp_accounting_pld_is_wrongly_infinite_at_delta_1e_20_where_the_exact_value_is_9_51():
    assert conversions.epsilon_by_peer(0.5, delta=1e-20, method="pld") == math.inf
    exact = accounting.epsilon_from_rho(0.5, delta=1e-20, known="gaussian")
    assert exact == pytest.approx(9.51093624053, rel=1e-10)


def test_dp_accounting_rdp_wrongly_scores_nan_noise_as_perfect_privacy_and_ours_refuses_it():
    """AC01."""
    from dp_accounting import dp_event
    from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(dp_event.GaussianDpEvent(math.nan))
    assert accountant.get_epsilon(1e-5) == 0
    with pytest.raises(ValueError, match="noise_multiplier must be"):
        accounting.TreeAggregation(
            noise_multiplier=math.nan, num_rounds=1, min_separation=1, adjacency="zero-out"
        )


def test_dp_accounting_rdp_of_one_tree_is_looser_than_exact():
    """AC02: the tree's depth is the bit length; the peer's epsilon at z = 1, delta = 1e-6."""
    for n, peer in ((1, 5.2215), (2, 7.7662), (4, 9.8484), (8, 11.6886), (1024, 21.8387)):
        run = accounting.TreeAggregation(
            noise_multiplier=1.0, num_rounds=n, min_separation=n, adjacency="zero-out"
        )
        assert accounting.epsilon(run, delta=1e-6, method="rdp") == pytest.approx(peer, abs=1e-3)
        assert accounting.epsilon(run, delta=1e-6) < peer
