"""Matrix mechanisms: sensitivities against enumeration and jax_privacy, errors against dense algebra."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import accounting
from accounting import errors, optimize, sensitivity, strategies
from tests.oracles import accounting as oracle


def run(strategy, n, b, k=None, **more):
    return accounting.MatrixMechanism(
        **{
            "noise_multiplier": 1.0,
            "num_rounds": n,
            "min_separation": b,
            "max_participations": k,
            "strategy": strategy,
            "adjacency": "zero-out",
            **more,
        }
    )


CLOSED = {
    "independent": lambda n: strategies.independent(),
    "prefix": strategies.prefix,
    "square root": strategies.square_root,
    "banded square root": lambda n: strategies.banded_square_root(3),
    "banded inverse square root": lambda n: strategies.banded_inverse_square_root(n, 3),
    "blt": lambda n: strategies.rational_blt(n, 3),
}


@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms_equal_exhaustive_search(name):
    for n in (1, 2, 5, 9, 12):
        strategy = CLOSED[name](n)
        matrix = oracle.toeplitz(strategy.column(n))
        for b, k in itertools.product((1, 2, 3, 5, n), (1, 2, 4)):
            found = accounting.sensitivity_of(run(strategy, n, b, k))
            assert found.exact
            assert found.squared == pytest.approx(oracle.worst_case(matrix, b, k), rel=1e-12)


@settings(max_examples=60)
@given(st.data())
def test_other_toeplitz_strategies_are_bounded_from_above_and_said_so(data):
    n = data.draw(st.integers(2, 9))
    entry = st.floats(-1, 1, allow_nan=False)
    column = np.array([1.0, *data.draw(st.lists(entry, min_size=n - 1, max_size=n - 1))])
    b, k = data.draw(st.integers(1, n)), data.draw(st.integers(1, 4))
    found = sensitivity.toeplitz(column, b, k)
    true = oracle.worst_case_signed(oracle.toeplitz(column), b, k)
    assert found.squared >= true * (1 - 1e-12)
    if found.exact:
        assert found.squared == pytest.approx(true, rel=1e-9)
    else:
        assert "upper bound" in found.how


@settings(max_examples=60)
@given(st.data())
def test_dense_strategies_are_exact_or_bounded(data):
    n = data.draw(st.integers(1, 7))
    bands = data.draw(st.integers(1, n))
    draw = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    matrix = np.tril(np.triu(draw.normal(size=(n, n)), 1 - bands))
    np.fill_diagonal(matrix, np.abs(matrix.diagonal()) + 0.1)
    b, k = data.draw(st.integers(1, n)), data.draw(st.integers(1, 4))
    found = accounting.sensitivity_of(run(strategies.Dense(matrix), n, b, k))
    true = oracle.worst_case_signed(matrix, b, k)
    assert found.squared >= true * (1 - 1e-12)
    assert found.exact == (found.how.startswith("exact"))
    if found.exact:
        assert found.squared == pytest.approx(true, rel=1e-9)


def test_restarts_bound_the_block_diagonal_strategy_from_above():
    strategy = strategies.square_root(12)
    for restarts, b, k in itertools.product(((4,), (3, 8), (1, 2, 3)), (1, 2, 4, 7), (1, 2, 3)):
        blocks = np.zeros((12, 12))
        for start, stop in itertools.pairwise([0, *restarts, 12]):
            blocks[start:stop, start:stop] = oracle.toeplitz(strategy.column(stop - start))
        found = accounting.sensitivity_of(run(strategy, 12, b, k, restarts=restarts))
        true = oracle.worst_case(blocks, b, k)
        assert found.squared >= true * (1 - 1e-12)
        assert found.exact == (k == 1 or b >= 12)
        if found.exact:
            assert found.squared == pytest.approx(true)


def test_observed_costs_equal_the_matrix_product():
    devices = np.array([0, 0, 0, 1, 1, 2])
    rounds = np.array([0, 3, 9, 4, 5, 11])
    for strategy, restarts in (
        (strategies.square_root(12), ()),
        (strategies.square_root(12), (5,)),
        (strategies.Dense(oracle.toeplitz(strategies.square_root(12).column(12))), ()),
    ):
        column = strategies.square_root(12).column(12)
        matrix = np.zeros((12, 12))
        for start, stop in itertools.pairwise([0, *restarts, 12]):
            matrix[start:stop, start:stop] = oracle.toeplitz(column[: stop - start])
        true = max(float((matrix[:, rounds[devices == d]].sum(axis=1) ** 2).sum()) for d in range(3))
        found = sensitivity.observed(run(strategy, 12, 1, restarts=restarts), devices, rounds)
        assert found.exact
        assert found.squared == pytest.approx(true, rel=1e-12)


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("restarts", [(), (4, 9)])
def test_prefix_errors_equal_dense_algebra(name, restarts):
    n = 13
    strategy = CLOSED[name](n)
    matrix = np.zeros((n, n))
    for start, stop in itertools.pairwise([0, *restarts, n]):
        matrix[start:stop, start:stop] = oracle.toeplitz(strategy.column(stop - start))
    variances = oracle.prefix_variances(matrix)
    found = errors.prefix_error(run(strategy, n, 1, restarts=restarts))
    np.testing.assert_allclose(found.each**2, variances, rtol=1e-10)
    assert found.max == pytest.approx(math.sqrt(variances.max()))
    assert found.rms == pytest.approx(math.sqrt(variances.mean()))
    if not restarts:
        dense = errors.prefix_error(run(strategies.Dense(matrix), n, 1))
        np.testing.assert_allclose(dense.each, found.each, rtol=1e-10)


@pytest.mark.parametrize("estimator", ["plain", "honaker", "least_squares"])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 13, 22])
def test_tree_prefix_errors_equal_dense_least_squares(n, estimator):
    tree = accounting.TreeAggregation(
        noise_multiplier=1.0, num_rounds=n, min_separation=1, adjacency="zero-out"
    )
    found = errors.prefix_error(tree, estimator=estimator)
    np.testing.assert_allclose(found.each**2, oracle.tree_prefix_variances(n, estimator), rtol=1e-9)


def test_noise_of_closed_trees_is_kept_at_restarts():
    """AC12, with every node's noise set to 1 and a restart after every 5 rounds: without and with completion."""
    common = {
        "noise_multiplier": 1.0,
        "num_rounds": 16,
        "min_separation": 1,
        "restarts": (5, 10, 15),
        "adjacency": "zero-out",
    }
    kept = errors.prefix_error(accounting.TreeAggregation(**common), estimator="plain")
    assert (kept.each**2).round().tolist()[:15] == [1, 1, 2, 1, 2, 3, 3, 4, 3, 4, 5, 5, 6, 5, 6]
    completed = errors.prefix_error(accounting.TreeAggregation(**common, completion=True), estimator="plain")
    assert (completed.each**2).round().tolist()[:15] == [1, 1, 2, 1, 1, 2, 2, 3, 2, 2, 3, 3, 4, 3, 3]


def test_jax_privacy_sensitivities_agree():
    import jax
    from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        for n, b, k in ((60, 7, 4), (100, 30, 2), (33, 1, 33)):
            for strategy in (strategies.square_root(n), strategies.rational_blt(n, 3)):
                peer = toeplitz.minsep_sensitivity_squared(
                    np.asarray(strategy.column(n)), min_sep=b, max_participations=k, n=n
                )
                ours = accounting.squared_sensitivity(run(strategy, n, b, k))
                assert ours == pytest.approx(float(peer), rel=1e-12)
        ours = strategies.rational_blt(40, 2)
        peer = buffered_toeplitz.BufferedToeplitz.build(
            buf_decay=ours.theta.tolist(), output_scale=ours.omega.tolist()
        )
        np.testing.assert_allclose(ours.column(40), peer.toeplitz_coefs(40), rtol=1e-12)
        loss = buffered_toeplitz.LossFn.build_min_sep(
            n=40, error="max", min_sep=8, max_participations=4
        ).loss(peer)
        mine = run(ours, 40, 8, 4)
        squared = accounting.squared_sensitivity(mine) * errors.prefix_error(mine).max ** 2
        assert squared == pytest.approx(float(loss), rel=1e-9)


def test_jax_privacy_minsep_without_n_wrongly_takes_the_bands_for_the_rounds():
    import jax
    from jax_privacy.matrix_factorization import toeplitz

    column = strategies.banded_square_root(4).coefficients
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        without = float(toeplitz.minsep_sensitivity_squared(column, min_sep=4, max_participations=3))
        right = float(toeplitz.minsep_sensitivity_squared(column, min_sep=4, max_participations=3, n=20))
    ours = accounting.squared_sensitivity(run(strategies.Toeplitz(column), 20, 4, 3))
    assert ours == pytest.approx(right, rel=1e-12)
    assert without < ours / 2
    with pytest.raises(TypeError, match="num_rounds"):
        accounting.MatrixMechanism(
            noise_multiplier=1.0,
            min_separation=4,
            strategy=strategies.independent(),
            adjacency="zero-out",
        )


def test_banded_strategies_of_jax_privacy_are_matched_or_beaten(shared):
    """The achievable noise ratios of the reference table: BandMF by rms error, BLT by worst error."""
    import csv

    with (shared / "oracle" / "accounting" / "mf_sensitivity.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    seen = 0
    for row in rows:
        n, b, k = (int(row[c]) for c in ("n", "min_sep_b", "max_part_k"))
        setting = {"num_rounds": n, "min_separation": b, "max_participations": k}
        if row["mechanism"] == "bandmf_toeplitz":
            bands = int(row["detail"].split("bands=")[1].split(",")[0])
            found = run(optimize.banded(**setting, bands=bands, objective="rms"), n, b, k)
            value = errors.prefix_error(found).rms
            # The reference counts sqrt(k) |c|; ours ends columns at the last round.
            worth = math.sqrt(k) * math.sqrt((found.strategy.coefficients**2).sum()) * value
            peer = float(row["sens"]) * float(row["rms_err_unit"])
            assert worth >= math.sqrt(accounting.squared_sensitivity(found)) * value * (1 - 1e-12)
        elif row["mechanism"] == "blt":
            found = run(optimize.blt(**setting), n, b, k)
            worth = math.sqrt(accounting.squared_sensitivity(found)) * errors.prefix_error(found).max
            peer = float(row["loss_max"])
        else:
            continue
        seen += 1
        assert worth <= peer * 1.01, row["case"]
    assert seen >= 3


def test_banded_more_than_b_is_never_scored_by_column_norms():
    """X51: more bands than b is a bound, not sqrt(k) times the largest column norm."""
    column = np.array([1.0, 0.9, 0.1, 0.8])
    found = sensitivity.toeplitz(np.concatenate([column, np.zeros(4)]), 2, 4)
    assert not found.exact
    assert found.squared > 4 * float(column @ column)


def test_strategies_refuse_what_has_no_inverse_or_is_not_a_number():
    for bad in ([], [0.0, 1.0], [-1.0], [1.0, math.nan], [1.0, math.inf], [[1.0]], "abc"):
        with pytest.raises(ValueError, match="coefficients must"):
            strategies.Toeplitz(bad)
    for theta, omega in (([1.0], [0.1]), ([0.5], [0.1, 0.2]), ([math.nan], [0.1]), ([], [])):
        with pytest.raises(ValueError, match=r"theta|omega"):
            strategies.BLT(theta, omega)
    for matrix in ([[1.0, 1.0], [0.0, 1.0]], [[0.0]], [[1.0, 0.0]]):
        with pytest.raises(ValueError, match="matrix must"):
            strategies.Dense(matrix)
    with pytest.raises(ValueError, match="Dense strategy has 2 rows, fewer than num_rounds = 3"):
        run(strategies.Dense(np.eye(2)), 3, 1)
    with pytest.raises(ValueError, match="takes no restarts"):
        run(strategies.Dense(np.eye(3)), 3, 1, restarts=(1,))
    with pytest.raises(ValueError, match="strategy must come from"):
        run(np.ones(3), 3, 1)
    for make in (
        lambda: strategies.square_root(0),
        lambda: strategies.banded_square_root(0),
        lambda: strategies.rational_blt(5, 0),
        lambda: optimize.blt(num_rounds=0, min_separation=1, max_participations=1),
        lambda: optimize.banded(num_rounds=5, min_separation=2, max_participations=1, bands=3),
    ):
        with pytest.raises(ValueError):
            make()
