"""Calibration, planning and comparison: targets just met, published ratios, refusals."""

import dataclasses
import math

import pytest

import accounting
from accounting.comparison import REFERENCE


def tree(**more):
    return accounting.TreeAggregation(
        **{
            "noise_multiplier": 7.0,
            "num_rounds": 500,
            "min_separation": 100,
            "adjacency": "zero-out",
            **more,
        }
    )


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 8.0, 300.0])
def test_the_least_noise_just_meets_epsilon(epsilon):
    found = accounting.calibrate(tree(), knob="noise_multiplier", delta=1e-10, epsilon=epsilon)
    assert accounting.epsilon(found, delta=1e-10) <= epsilon
    less = dataclasses.replace(found, noise_multiplier=found.noise_multiplier * (1 - 1e-8))
    assert accounting.epsilon(less, delta=1e-10) > epsilon


def test_the_most_rounds_and_the_least_separation_just_meet_a_target():
    found = accounting.calibrate(
        tree(num_rounds=1000, max_participations=3, restarts=(200, 900)),
        knob="num_rounds",
        delta=1e-10,
        epsilon=5.0,
    )
    assert accounting.epsilon(found, delta=1e-10) <= 5
    more = dataclasses.replace(found, num_rounds=found.num_rounds + 1)
    assert accounting.epsilon(more, delta=1e-10) > 5
    assert found.restarts == tuple(r for r in (200, 900) if r < found.num_rounds)
    found = accounting.calibrate(tree(), knob="min_separation", delta=1e-10, rho=0.4)
    assert accounting.rho(found) <= 0.4
    closer = dataclasses.replace(found, min_separation=found.separation - 1)
    assert accounting.rho(closer) > 0.4


def test_calibration_refuses_what_cannot_be_met():
    calibrate = accounting.calibrate
    for options, message in (
        ({"knob": "noise_multiplier", "rho": 0.0}, "no finite noise_multiplier"),
        ({"knob": "min_separation", "rho": 1e-6}, "no min_separation reaches the target"),
        ({"knob": "noise_multiplier"}, "exactly one target"),
        ({"knob": "noise_multiplier", "epsilon": 1.0, "rho": 1.0}, "exactly one target"),
        ({"knob": "population", "epsilon": 1.0}, "knob must be one of"),
        ({"knob": "noise_multiplier", "epsilon": math.nan}, "epsilon must be"),
        ({"knob": "noise_multiplier", "epsilon": -1.0}, "epsilon must be"),
        ({"knob": "noise_multiplier", "epsilon": 1.0, "delta": 1.0}, "delta must be below 1"),
        ({"knob": "noise_multiplier", "epsilon": 1.0, "delta": 0.0}, "no finite noise_multiplier"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate(tree(), **{"delta": 1e-10, **options})
    assert calibrate(tree(), knob="noise_multiplier", delta=1e-10, epsilon=math.inf).noise_multiplier == 0
    assert (
        calibrate(tree(num_rounds=0), knob="noise_multiplier", delta=1e-10, epsilon=1.0).noise_multiplier == 0
    )
    # (0, delta) is reached with very much noise
    zero = calibrate(tree(), knob="noise_multiplier", delta=1e-10, epsilon=0.0)
    assert accounting.epsilon(zero, delta=1e-10) == 0
    with pytest.raises(ValueError, match="one round already costs"):
        calibrate(tree(), knob="num_rounds", delta=1e-10, epsilon=1e-9)


def test_population_bounds_the_separation():
    assert accounting.max_separation(10**6, 6500) == 153  # 152 rounds strictly between
    assert accounting.max_separation(6500, 6500) == 1
    for population, goal in ((6499, 6500), (0, 1), (10, 0)):
        with pytest.raises(ValueError, match=r"population|report_goal"):
            accounting.max_separation(population, goal)


def test_a_plan_lists_what_reaches_the_target_best_first():
    options = accounting.plan(
        population=10_000,
        report_goals=[50, 100],
        num_rounds=200,
        epsilon=8.0,
        delta=1e-10,
        adjacency="zero-out",
        noise_multipliers=[0.5, 7.0],
    )
    assert len(options) == 2 * 5 * 3
    reaching = [o for o in options if o.meets]
    assert options[: len(reaching)] == reaching
    assert [o.worst_noise for o in reaching] == sorted(o.worst_noise for o in reaching)
    for option in options:
        assert option.meets == (option.epsilon <= 8.0)
        assert option.min_separation == min(10_000 // option.report_goal, 200)
        assert option.noise_per_client == option.noise_multiplier / option.report_goal
    assert options[0].mechanism == "BandMF"
    assert {o.mechanism for o in reaching} == {"tree", "banded square root", "BandMF", "BLT", "independent"}
    for bad in (
        {"epsilon": 0.0},
        {"delta": 0.0},
        {"population": 10},
        {"num_rounds": 0},
        {"mechanisms": ["x"]},
    ):
        with pytest.raises(ValueError):
            accounting.plan(
                **{
                    "population": 1000,
                    "report_goals": [50],
                    "num_rounds": 20,
                    "epsilon": 8.0,
                    "delta": 1e-10,
                    "adjacency": "zero-out",
                    **bad,
                }
            )


def test_comparison_at_2000_314_6_shows_blt_and_bandmf_at_half_the_streaming_trees_noise():
    rows = accounting.compare(
        num_rounds=2000,
        min_separation=314,
        max_participations=6,
        noise_multiplier=7.0,
        delta=1e-10,
        adjacency="zero-out",
    )
    found = {row.mechanism: row for row in rows}
    published = {
        "tree": 1.31,
        "independent": 5.1,
        REFERENCE: 1.0,
        "banded square root": 0.52,
        "BandMF": 0.50,
        "BLT": 0.51,
    }
    for name, ratio in published.items():
        assert found[name].max_ratio == pytest.approx(ratio, abs=0.02), name
    assert found[REFERENCE].rho == pytest.approx(79 / 98, rel=1e-12)
    # The worst prefix noise that the tree has at epsilon 8.53 costs at most the published 3.96 with BandMF.
    assert found["BandMF"].rho < 0.198
    assert found["BandMF"].epsilon < 3.96
    assert all(row.exact for row in rows)


def test_comparison_takes_more_strategies_and_refuses_what_has_no_axis():
    setting = {
        "num_rounds": 40,
        "min_separation": 8,
        "max_participations": None,
        "noise_multiplier": 2.0,
        "delta": 1e-6,
        "adjacency": "replace-one",
    }
    mine = {"mine": accounting.strategies.Toeplitz([1.0, 0.5])}
    rows = accounting.compare(**setting, extra=mine, optimized=False)
    assert {"mine", "tree"} <= {row.mechanism for row in rows}
    assert "BandMF" not in {row.mechanism for row in rows}
    for bad in ({"num_rounds": 0}, {"noise_multiplier": 0.0}, {"noise_multiplier": math.inf}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            accounting.compare(**{**setting, **bad})
