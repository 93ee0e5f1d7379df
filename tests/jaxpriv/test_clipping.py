"""Clipping: the bound holds in float64 whatever comes in, and nothing inside it is touched."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import clipping

jitted = jax.jit(clipping.clip)


def norm64(tree):
    return float(np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in jax.tree.leaves(tree))))


@hypothesis.given(
    x=hnp.arrays(
        np.float32, st.sampled_from([1, 7, 150]), elements=st.floats(width=32, allow_subnormal=False)
    ),
    max_norm=st.floats(2**-20, 2**20, width=32),
)
def test_a_clipped_norm_never_exceeds_its_bound(x, max_norm):
    clipped, info = jitted(jnp.asarray(x), jnp.float32(max_norm))
    assert norm64(clipped) <= max_norm
    assert bool(info.finite) == bool(np.isfinite(x).all())
    if not np.isfinite(x).all():
        assert norm64(clipped) == 0
    elif norm64(x) <= max_norm * (1 - 2**-15):
        np.testing.assert_array_equal(clipped, x)
    elif norm64(x) > 1e-30:
        # Direction kept, and no more taken away than the margin.
        assert norm64(clipped) >= max_norm * (1 - 2**-14)
        unit = np.asarray(x, np.float64) / norm64(x)
        assert np.dot(unit, np.asarray(clipped, np.float64)) >= max_norm * (1 - 2**-13)


@pytest.mark.parametrize(("value", "norm"), [(1e-3, 1.0), (1e-2, 10.0)])
def test_a_million_equal_coordinates(value, norm):
    """A norm of 1.0 in float32, which is slightly above C = 1 in float64, and one of 10 (AC09)."""
    x = jnp.full((1_000_000,), value, jnp.float32)
    clipped, info = jitted(x, 1.0)
    assert norm64(clipped) <= 1.0
    assert norm64(clipped) >= 1 - 2**-14
    np.testing.assert_allclose(info.norm, norm, rtol=2**-16)
    # Inside the ball of radius C (1 - 2^-16): bit for bit.
    inside = x * jnp.float32((1 - 2**-15) / norm)
    np.testing.assert_array_equal(jitted(inside, 1.0)[0], inside)
    assert norm64(inside) > 1 - 2**-14


def test_a_norm_at_the_margin_is_right_for_sixteen_million_coordinates():
    x = jnp.full((2**24 + 17,), 3.0, jnp.float32)
    _, info = jitted(x, 1.0)
    np.testing.assert_allclose(info.norm, norm64(x), rtol=2**-17)


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-20, 1.0, 1e18, 1e30, 3e38])
def test_norms_beyond_float32_squares(scale):
    x = {"a": jnp.full((3, 5), scale, jnp.float32), "b": jnp.asarray([-scale, 0.0], jnp.float32)}
    clipped, info = jitted(x, 1.0)
    assert bool(info.finite)
    if scale <= 1e-20:
        np.testing.assert_array_equal(clipped["a"], x["a"])
    else:
        assert 1 - 2**-14 <= norm64(clipped) <= 1
        np.testing.assert_allclose(clipped["a"], 1 / 4, rtol=1e-4)
    tiny, _ = jitted(x, 1e-30)
    assert norm64(tiny) <= 1e-30 * (1 + 1e-7)  # the bound itself is rounded to float32


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_coordinate_zeroes_the_whole_update(bad):
    """Not just the coordinate, beside live ones (AC08)."""
    x = {"a": jnp.ones((4,)), "b": jnp.asarray([[0.1, bad]])}
    clipped, info = jitted(x, 1.0)
    assert not bool(info.finite)
    assert norm64(clipped) == 0
    assert float(info.norm) == 0


def test_zero_stays_zero_and_norm_is_flat_over_the_tree():
    zero, info = jitted({"a": jnp.zeros(3), "b": jnp.zeros(())}, 1.0)
    assert norm64(zero) == 0
    assert float(info.norm) == 0
    clipped, info = jitted({"a": jnp.asarray([3.0]), "b": jnp.asarray(4.0)}, 1.0)
    np.testing.assert_allclose(info.norm, 5.0)
    np.testing.assert_allclose(clipped["a"], [0.6], rtol=2e-5)
    np.testing.assert_allclose(clipped["b"], 0.8, rtol=2e-5)


def test_half_precision_updates_are_clipped_in_float32():
    clipped, info = jitted(jnp.full((1000,), 1.0, jnp.bfloat16), 1.0)
    assert clipped.dtype == jnp.float32
    assert norm64(clipped) <= 1.0
    np.testing.assert_allclose(info.norm, np.sqrt(1000), rtol=1e-5)


def test_vmap_equals_a_loop_and_jit_equals_eager():
    rng = np.random.default_rng(0)
    x = (
        rng.standard_normal((6, 300)).astype(np.float32)
        * np.array([1e-30, 0, 1, 1e3, 1e25, 1e38], np.float32)[:, None]
    )
    x[4, 3] = np.nan
    mapped, infos = jax.vmap(clipping.clip, (0, None))(jnp.asarray(x), jnp.float32(2.0))
    for row, got, norm in zip(x, mapped, infos.norm, strict=True):
        want, info = jitted(jnp.asarray(row), jnp.float32(2.0))
        np.testing.assert_allclose(got, want, rtol=1e-6)
        np.testing.assert_allclose(norm, info.norm, rtol=1e-6)
    np.testing.assert_allclose(clipping.clip(jnp.asarray(x[3]), jnp.float32(2.0))[0], mapped[3], rtol=1e-6)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_none_is_refused_or_harmless(max_norm):
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        clipping.clip(jnp.ones(3), max_norm)
    clipped, _ = jitted(jnp.ones(3), jnp.float32(max_norm))
    assert norm64(clipped) == 0
