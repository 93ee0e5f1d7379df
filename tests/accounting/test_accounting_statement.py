"""Statements of mechanisms: conditions named, numbers rounded up, every kind valid under the schema."""

import math

import numpy as np
import pytest

import accounting
from tests.accounting_runs import valid


def test_a_statement_names_its_conditions_and_more_noise_means_less_epsilon():
    """AC58."""
    found = []
    for z in (7.0, 8.0):
        run = accounting.TreeAggregation(
            noise_multiplier=z,
            num_rounds=2000,
            rounds_between=313,
            max_participations=6,
            restarts=(128,),
            adjacency="zero-out",
        )
        said = accounting.statement(run, delta=1e-10, clip_norm=5.0, report_goal=6500)
        valid(said)
        words = said.markdown()
        for needle in (
            "device",
            "zero-out",
            f"| Noise multiplier z | {z} |",
            "| Clip norm C | 5 |",
            "| Rounds | 2000 |",
            "b = 314 (313 rounds strictly between)",
            "at most 6",
            "| Restarts after rounds | 128 |",
            "zCDP rho",
            "at delta = 1e-10",
            "hyperparameter tuning",
            "several devices of one user",
            "pretraining",
            "evaluation metrics",
            "deviates",
            "no amplification",
        ):
            assert needle in words, needle
        assert "all intermediate models" in words
        found.append(said.data["epsilon"])
    assert found[1] < found[0]


def test_at_delta_0_gaussian_noise_is_said_to_bound_rho_alone():
    tree = accounting.TreeAggregation(
        noise_multiplier=2.0, num_rounds=5, min_separation=5, adjacency="zero-out"
    )
    said = accounting.statement(tree, delta=0.0)
    valid(said)
    assert "0.3750-zCDP" in said.sentence
    assert "no finite epsilon at delta = 0" in said.sentence
    assert "no noise" not in said.sentence


def test_statements_of_other_mechanisms_are_valid():
    tree = accounting.TreeAggregation(
        noise_multiplier=0.0, num_rounds=5, min_separation=1, adjacency="zero-out"
    )
    infinite = valid(accounting.statement(tree, delta=1e-6))
    assert infinite["epsilon"] == "inf"
    assert infinite["sentence"].startswith("No finite guarantee")
    for mechanism in (
        accounting.MatrixMechanism(
            noise_multiplier=1.0,
            num_rounds=9,
            min_separation=2,
            strategy=accounting.strategies.rational_blt(9, 2),
            adjacency="zero-out",
        ),
        accounting.MatrixMechanism(
            noise_multiplier=1.0,
            num_rounds=3,
            min_separation=2,
            strategy=accounting.strategies.Dense(np.eye(3)),
            adjacency="replace-one",
        ),
        accounting.DistributedDiscreteGaussian(
            noise_multiplier=4.0,
            num_rounds=3,
            min_separation=1,
            clip_norm=1.0,
            scale=100.0,
            dimension=10,
            beta=0.5,
            min_survivors=5,
            max_clients=6,
            adjacency="zero-out",
        ),
    ):
        said = accounting.statement(mechanism, delta=1e-6)
        valid(said)
        assert said.sentence in said.markdown()
    document = accounting.PureDP(epsilon=5.0, adjacency="replace-one", unit="sentence")
    said = accounting.statement(document, delta=0.0)
    assert valid(said)["epsilon"] == 5
    assert said.sentence.startswith("Each sentence has 5.0000-differential privacy")
    nothing = accounting.no_guarantee(unit="sentence pair", reasons=["codes are compression"])
    assert valid(nothing)["epsilon"] is None
    with pytest.raises(ValueError, match="reasons must say"):
        accounting.no_guarantee(unit="device", reasons=[])


def test_printed_numbers_are_rounded_up_never_down():
    draw = np.random.default_rng(0)
    for value in [*(10 ** draw.uniform(-12, 6, 300)).tolist(), 0.81, 8.0, 1e-300, 123456.0]:
        text = accounting.round_up(value)
        assert float(text) >= value * (1 - 1e-15)
        assert float(text) <= max(value + 1.0001e-4, value * 1.1)
    assert accounting.round_up(0.81) == "0.8100"
    assert accounting.round_up(math.inf) == "inf"
    assert accounting.round_up(0.0) == "0"


@pytest.mark.parametrize("delta", [1e-10, 1.2345641e-5, 1.00000499e-5, 0.001, np.float64(1 / 3)])
def test_a_delta_is_quoted_as_it_is(delta):
    """Cut to six digits it would promise more than was computed."""
    run = accounting.TreeAggregation(
        noise_multiplier=1.0, num_rounds=1, min_separation=1, max_participations=1, adjacency="zero-out"
    )
    assert f", {float(delta)!r})-differential" in accounting.statement(run, delta=delta).sentence
    assert accounting.in_full(0.0) == "0"
