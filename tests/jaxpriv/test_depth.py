"""Depth: equal to the loops and the reference, sensitivity 1, the stated bounds, any layout."""

import glob

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import depth
from tests.oracles import selection_loops

jitted = jax.jit(depth.depth, static_argnames="closed")
in_plane = jax.jit(depth.exact_depth_in_plane)


def everything(x):
    return jnp.ones(len(x), bool)


def of(sentences, candidates, directions, closed=False):
    sentences, candidates, directions = (
        jnp.asarray(a, jnp.float32) for a in (sentences, candidates, directions)
    )
    return np.asarray(jitted(sentences, candidates, directions, where=everything(sentences), closed=closed))


def small_integers(*shape):
    return hnp.arrays(np.int64, shape, elements=st.integers(-3, 3))


def test_matches_the_reference(shared):
    paths = sorted(glob.glob(str(shared / "oracle/sentdp/*.npz")))
    cases = [(p, np.load(p)) for p in paths if "table1" not in p and "minilm" not in p]
    assert len(cases) >= 10
    for path, case in cases:
        for closed, name in ((False, "depth"), (True, "depth_closed")):
            assert (of(case["S"], case["F"], case["V"], closed) == case[name]).all(), (path, name)


def test_exact_depth_in_the_plane_and_its_approximation_from_above(shared):
    for name in ("plane_00_k5", "plane_02_k13"):
        case = np.load(shared / f"oracle/sentdp/{name}.npz")
        exact = in_plane(jnp.asarray(case["S"], jnp.float32), jnp.asarray(case["F"], jnp.float32))
        assert (np.asarray(exact) == case["exact_depth"]).all()
        for p, row in zip(case["p_list"][::2], case["approx_depth"][::2]):
            found = of(case["S"], case["F"], case["V_all"][:p])
            assert (found == row).all()
            assert (of(case["S"], case["F"], case["V_all"][:p], closed=True) >= case["exact_depth"]).all()


@hypothesis.given(
    small_integers(6, 2), small_integers(5, 2), small_integers(4, 2), st.integers(1, 6), st.booleans()
)
def test_equals_the_loops_on_ties_and_ignores_padding(sentences, candidates, directions, k, closed):
    where = jnp.arange(6) < k
    padded = jnp.where(where[:, None], jnp.asarray(sentences, jnp.float32), 99.0)
    found = jitted(padded, jnp.float32(candidates), jnp.float32(directions), where=where, closed=closed)
    assert (
        np.asarray(found) == selection_loops.depth(sentences[:k], candidates, directions, closed=closed)
    ).all()


@hypothesis.given(
    small_integers(5, 3),
    small_integers(1, 3),
    small_integers(8, 3),
    small_integers(4, 3),
    st.integers(0, 4),
    st.booleans(),
)
def test_one_sentence_moves_no_depth_by_more_than_one(sentences, other, candidates, directions, row, closed):
    changed = sentences.copy()
    changed[row] = other
    moved = of(sentences, candidates, directions, closed) - of(changed, candidates, directions, closed)
    assert np.abs(moved).max() <= 1


@hypothesis.given(small_integers(7, 2), small_integers(6, 2), small_integers(9, 2))
def test_bounds_and_more_directions_never_raise_it(sentences, candidates, directions):
    strict, closed = (of(sentences, candidates, directions, c) for c in (False, True))
    assert ((strict >= 0) & (strict <= 3) & (strict <= closed)).all()
    assert (of(sentences, candidates, directions[:4]) >= strict).all()
    exact = in_plane(jnp.float32(sentences), jnp.float32(candidates))
    assert (closed >= np.asarray(exact)).all()


def test_strict_counts_break_the_bound_on_ties_and_closed_ones_pass_half():
    """A repeated point: strict depth 0 although the true depth is 3; the closed one says 3 of 3."""
    point = np.ones((3, 2))
    assert of(point, point[:1], np.eye(2)) == 0
    assert of(point, point[:1], np.eye(2), closed=True) == 3
    assert in_plane(jnp.float32(point), jnp.float32(point[:1])) == 3


SQUARE = np.array([(1, 1), (1, -1), (-1, 1), (-1, -1)])


def test_a_candidate_outside_a_square_has_depth_zero():
    """Utility -2, for any directions that (1, 0) is among (AC34)."""
    others = np.random.default_rng(0).normal(size=(99, 2))
    for p in (1, 10, 100):
        for place in {0, p - 1}:
            directions = np.insert(others[: p - 1], place, (1, 0), axis=0)
            found = of(SQUARE, np.array([(2, 2)]), directions)
            assert (found - len(SQUARE) / 2).tolist() == [-2]
    assert in_plane(jnp.float32(SQUARE), jnp.float32([(2, 2)])).tolist() == [0]


def test_ten_of_a_hundred_directions_give_no_less_than_all_and_all_no_less_than_the_truth():
    """Candidates in general position, for which strict and closed counts agree; one direction, ten, all (AC34)."""
    rng = np.random.default_rng(1)
    points, directions = rng.normal(size=(11, 2)), rng.normal(size=(100, 2))
    candidates = 0.7 * rng.normal(size=(60, 2))
    exact = np.asarray(in_plane(jnp.float32(points), jnp.float32(candidates)))
    for closed in (False, True):
        one, ten, all_ = (of(points, candidates, directions[:p], closed) for p in (1, 10, 100))
        assert (one >= ten).all()
        assert (ten >= all_).all()
        assert (all_ >= exact).all()
        assert (ten > all_).any()
    assert exact.max() > 0


def test_documents_of_no_and_of_one_sentence_are_shallow_everywhere():
    """Depth 0 of k = 0 or 1, padded or not: no NaN, all alike (AC33)."""
    candidates, directions = np.random.default_rng(0).normal(size=(2, 5, 3))
    for where in (jnp.zeros(4, bool), jnp.arange(4) == 2):
        found = jitted(jnp.ones((4, 3)), jnp.float32(candidates), jnp.float32(directions), where=where)
        assert (np.asarray(found) == 0).all()
    none = jitted(jnp.ones((0, 3)), jnp.float32(candidates), jnp.float32(directions), where=jnp.ones(0, bool))
    assert (np.asarray(none) == 0).all()


def test_refuses_no_directions_and_no_candidates():
    """p = 0 (AC34)."""
    s, where = jnp.ones((2, 3)), jnp.ones(2, bool)
    with pytest.raises(ValueError, match="direction"):
        depth.depth(s, s, jnp.ones((0, 3)), where=where)
    with pytest.raises(ValueError, match="candidate"):
        depth.depth(s, jnp.ones((0, 3)), s, where=where)


@pytest.mark.parametrize("k", [15, 16, 17, 255, 256, 10_000, 40_000])
def test_counts_never_wrap(k):
    """Half the sentences lie above 0 and half below: a wrapped count would report another depth."""
    sentences = np.where(np.arange(k) % 2, 1.0, -1.0)[:, None]
    assert (of(sentences, np.array([[0.0], [2.0], [-2.0]]), np.ones((1, 1))) == [k // 2, 0, 0]).all()


def test_many_candidates_need_wider_ranks():
    rng = np.random.default_rng(3)
    sentences, candidates = rng.normal(size=(5, 2)), rng.normal(size=(33_000, 2))
    directions = rng.normal(size=(3, 2))
    found = of(sentences, candidates, directions)
    s, f = (np.float32(a) @ np.float32(directions).T for a in (sentences, candidates))
    above = (s[:, None] > f[None]).sum(0)
    assert (found == np.minimum(above, 5 - above).min(1)).all()


def test_signed_zeros_are_one_value_and_nan_is_above_nothing():
    zeros = np.array([[-0.0], [0.0]])
    assert (of(zeros, zeros, np.ones((1, 1))) == 0).all()
    assert (of(zeros, zeros, np.ones((1, 1)), closed=True) == 2).all()
    with_nan = np.array([[1.0], [np.nan], [-1.0]])
    assert of(with_nan, np.zeros((1, 1)), np.ones((1, 1))) == 1


def test_every_layout_gives_the_same_depths():
    rng = np.random.default_rng(5)
    sentences = jnp.float32(rng.normal(size=(16, 12, 8)))
    lengths = rng.integers(0, 13, 16)
    where = jnp.arange(12)[None] < lengths[:, None]
    prepared = depth.prepare(jnp.float32(rng.normal(size=(50, 8))), jnp.float32(rng.normal(size=(9, 8))))

    def one(s, w):
        return depth.depth_prepared(prepared, s, where=w)

    loop = np.stack([one(s, w) for s, w in zip(sentences, where)])
    mapped = jax.jit(lambda s, w: jax.lax.map(lambda x: one(*x), (s, w), batch_size=4))(sentences, where)
    mesh = jax.make_mesh((8,), ("documents",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.NamedSharding(mesh, jax.P("documents"))
    sharded = jax.jit(jax.vmap(one))(jax.device_put(sentences, place), jax.device_put(where, place))
    assert len(sharded.sharding.device_set) == 8
    for other in (jax.vmap(one)(sentences, where), mapped, sharded):
        assert (np.asarray(other) == loop).all()


def test_a_sentences_ranks_do_not_depend_on_its_neighbours():
    """Bitwise: the projections of 15 sentences stay when the 16th becomes anything."""
    rng = np.random.default_rng(8)
    directions, sentences = jnp.float32(rng.normal(size=(50, 384))), rng.normal(size=(16, 384))
    before = depth._project(directions, jnp.float32(sentences))
    sentences[7] = 1e30
    after = depth._project(directions, jnp.float32(sentences))
    kept = np.arange(16) != 7
    assert (np.asarray(before)[:, kept] == np.asarray(after)[:, kept]).all()
