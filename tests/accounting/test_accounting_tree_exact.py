"""Tree sensitivity equals exhaustive search: single trees, forests with restarts, completion."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import accounting
from accounting import sensitivity, tree
from tests.oracles import accounting as oracle


def exact(trees, b, k, completion):
    return tree.squared_sensitivity(trees, min_separation=b, max_participations=k, completion=completion)


def forests(n):
    """All ways to cut n rounds into trees."""
    for cuts in itertools.product((False, True), repeat=n - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), n]
        yield [b - a for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("completion", [False, True])
def test_every_forest_of_up_to_7_rounds_equals_exhaustive_search(completion):
    for n in range(1, 8):
        for trees in forests(n):
            nodes = oracle.node_matrix(trees, completion=completion)
            for b, k in itertools.product(range(1, n + 1), repeat=2):
                assert exact(trees, b, k, completion) == oracle.worst_case(nodes, b, k), (trees, b, k)


@pytest.mark.parametrize("completion", [False, True])
def test_single_trees_of_8_to_12_rounds_equal_exhaustive_search(completion):
    for n in range(8, 13):
        nodes = oracle.node_matrix([n], completion=completion)
        for b, k in itertools.product(range(1, n + 1), (1, 2, 3, 4, n)):
            if not (b == 1 and k == n):
                assert exact([n], b, k, completion) == oracle.worst_case(nodes, b, k), (n, b, k)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_random_forests_of_up_to_24_rounds_equal_exhaustive_search(data):
    n = data.draw(st.integers(13, 24))
    b = data.draw(st.integers(3, 9))
    k = data.draw(st.integers(1, 5))
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=4)))
    trees = tree.segments(n, cuts)
    completion = data.draw(st.booleans())
    nodes = oracle.node_matrix(trees, completion=completion)
    assert exact(trees, b, k, completion) == oracle.worst_case(nodes, b, k)


@pytest.mark.parametrize("seed", range(12))
def test_longer_runs_with_short_separations_equal_every_choice_of_ends(seed):
    """Where most ways to use a node are dropped because one that fits anywhere beats them."""
    rng = np.random.default_rng(seed)
    n, b = int(rng.integers(30, 75)), int(rng.integers(1, 6))
    trees = tree.segments(n, sorted(rng.choice(np.arange(1, n), seed % 3, replace=False).tolist()))
    full = -(-n // b)
    for k in {full, max(full - 1, 1), int(rng.integers(1, full + 1))}:
        for completion in (False, True):
            expected = oracle.worst_case_by_ends(trees, b, k, completion)
            assert exact(trees, b, k, completion) == expected, (trees, b, k, completion)
    assert oracle.worst_case_by_ends([9], 3, 3, False) == oracle.worst_case(
        oracle.node_matrix([9], completion=False), 3, 3
    )


def test_many_rounds_with_a_short_separation_take_no_time():
    """The values are those of the same search with nothing left out, which took seconds to minutes."""
    assert exact([20_000], 10, 2000, False) == 5_488_055
    assert exact([20_000], 10, 1999, False) == 5_488_045
    assert exact([100_000], 10, 1000, False) == 4_479_096
    assert exact([100_000], 314, 300, False) == 106_801
    assert exact([100_000], 10, 10_000, False) >= exact([100_000], 10, 5000, False)
    assert exact([1_000_000], 10, 100_000, False) > 0


def test_equal_spacing_is_not_the_worst_case_and_158_is_reached():
    """AC03: n = 66, b = 7, k = 8."""
    assert exact([66], 7, 8, False) == 158
    reached = tree.schedule_cost([0, 7, 14, 24, 31, 48, 55, 62], [66])
    assert reached == 158
    equally_spaced = max(
        tree.schedule_cost([first + step * i for i in range(8)], [66])
        for step in range(7, 10)
        for first in range(66 - 7 * step)
    )
    assert equally_spaced == 150
    run = accounting.TreeAggregation(
        noise_multiplier=7.0, num_rounds=66, min_separation=7, max_participations=8, adjacency="zero-out"
    )
    assert accounting.squared_sensitivity(run) == 158
    assert accounting.rho(run) == pytest.approx(1.61224, abs=5e-6)  # 158 / 98


def test_single_participation_costs_the_bit_length_of_n():
    """AC02."""
    for n, nodes in zip((1, 2, 3, 4, 7, 8, 1023, 1024), (1, 2, 2, 3, 3, 4, 10, 11)):
        assert exact([n], n, 1, False) == nodes


def test_completion_of_five_rounds_costs_four():
    """AC12: padded to 8 leaves."""
    assert exact([5], 5, 1, False) == 3
    assert exact([5], 5, 1, True) == 4
    for completion, nodes in ((False, 3), (True, 4)):
        run = accounting.TreeAggregation(
            noise_multiplier=2.0,
            num_rounds=15,
            min_separation=15,
            restarts=(5, 10),
            completion=completion,
            adjacency="zero-out",
        )
        assert accounting.rho(run) == nodes / (2 * 2.0**2)


def test_all_rounds_of_a_large_tree():
    assert exact([4096], 1, 4096, False) == 33550336
    assert exact([100_000], 1, 100_000, False) == sum((100_000 >> level) * 4**level for level in range(17))


@settings(max_examples=60)
@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 12),
    st.sets(st.integers(1, 299), max_size=4),
    st.booleans(),
)
def test_sensitivity_moves_the_right_way(n, b, k, cuts, completion):
    trees = tree.segments(n, sorted(c for c in cuts if c < n))
    here = exact(trees, b, k, completion)
    assert exact(trees, b + 1, k, completion) <= here <= exact(trees, b, k + 1, completion)
    assert exact(trees, b, k, True) >= here
    assert here <= exact([*trees[:-1], trees[-1] + 1], b, k, completion)
    assert here <= sum(exact([t], b, k, completion) for t in trees)


@settings(max_examples=60)
@given(st.data())
def test_no_allowed_schedule_costs_more_and_schedule_costs_match_the_node_matrix(data):
    n = data.draw(st.integers(1, 60))
    b = data.draw(st.integers(1, 12))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(n - 1, 1)), max_size=4)))
    trees = tree.segments(n, [c for c in cuts if c < n])
    completion = data.draw(st.booleans())
    rounds, t = [], data.draw(st.integers(0, n - 1))
    while t < n:
        rounds.append(t)
        t += b + data.draw(st.integers(0, 5))
    cost = tree.schedule_cost(rounds, trees, completion)
    nodes = oracle.node_matrix(trees, completion=completion)
    assert cost == int((nodes[:, rounds].sum(axis=1) ** 2).sum())
    assert cost <= exact(trees, b, len(rounds), completion)


def test_observed_costs_are_the_worst_device_and_restarts_cut_nodes():
    run = accounting.TreeAggregation(
        noise_multiplier=1.0, num_rounds=8, min_separation=1, restarts=(4,), adjacency="replace-one"
    )
    devices, rounds = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 3, 4, 7])
    assert sensitivity.observed(run, devices, rounds).squared == 4 * (2 + 4 + 4)


def test_a_restart_can_raise_and_lower_the_cost():
    assert exact([7], 6, 2, False) == 4
    assert exact([3, 4], 6, 2, False) == 5
    assert exact([8], 8, 1, False) == 4
    assert exact([4, 4], 8, 1, False) == 3
