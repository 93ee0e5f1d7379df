"""Draws whose tails are right; whatever is private draws from here, never from `jax.random`.

`jax.random.normal` inverts a 23-bit uniform, so its float32 values end at 5.42 standard deviations: at
delta = 1e-10 a release that uses it has no right to its claim. Every draw here spends 64 bits or more a
value (`words`), which costs less than JAX's own 32, and is bit-identical for the same key however the
array is sharded, batched or jitted (on one kind of hardware).

Float32 values are rounded; the claims that rest on continuous draws assume real arithmetic, and say so. Where single
noisy counts are published, `rounded_normal` and `discrete_gaussian` draw integers whose law is exact.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key, PyTree

from jaxpriv._exact import (
    categorical_by_level,
    categorical_residual,
    discrete_gaussian,
    level_log_probabilities,
    level_weights,
)
from jaxpriv._rounded import rounded_normal, rounded_residual
from jaxpriv._words import blocks, draw_key, once, words

__all__ = [
    "categorical_by_level",
    "categorical_residual",
    "direction",
    "discrete_gaussian",
    "exponential",
    "gamma",
    "laplace",
    "level_log_probabilities",
    "level_weights",
    "normal",
    "normal_like",
    "rounded_normal",
    "rounded_residual",
]

# With p = P(|X| > x), q = 1 - p and w = -log(p (1 + q)), the ratio x / q is smooth in w. Minimax-like fits in
# float64 over w in [0, 7] (in powers of w - 3.5; relative error 4e-8) and over w in [7, 46.5] (in powers of
# sqrt(w) - 4.75; 7e-8), the form of Giles 2010, "Approximating the erfinv function", carried to p = 2^-64.
_CENTRE = (
    2.4647337410262518, 0.3328469251757367, -0.00949951169221503, -0.000680415277240521,
    0.00022436196634406126, -2.245299439658168e-05, -5.776297338513371e-07, 4.78541048767335e-07,
    -4.715308381626958e-08, -3.437717814684269e-09, 7.662353801198225e-10,
)  # fmt: skip
_TAIL = (
    6.501600956839039, 1.4288123123842533, 8.00330554862616e-05, -0.0004207612445287362,
    0.00014228046728802062, -5.4025208781275334e-05, 1.5562580543750223e-05, 5.587315315575312e-06,
    -1.8145302452887066e-06, -2.1453438789288866e-06, 7.293082407084114e-07,
)  # fmt: skip


def normal(
    key: Key[Array, ""], shape: tuple[int, ...] = (), dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "..."]:
    """Standard normals, exact in the tails down to 2^-64 in probability.

    A sign and 63 bits of the two-sided tail probability are inverted: every event of probability 2^-64 or
    more has its mass, and the largest value is 9.155 (P[X > 9.155] = 2^-65). Relative error of a value 5e-7.

    Args:
      dtype: float32, or a shorter float type to which the float32 value is rounded.
    """
    return _normal(key, tuple(shape), _float_type(dtype))


def normal_like(key: Key[Array, ""], tree: PyTree) -> PyTree[Float[Array, "..."]]:
    """Independent float32 standard normals in the shape of `tree`, every leaf with a key of its own.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s of floating type; only shapes are read.

    Raises:
      ValueError: a leaf that is not of floating type.
    """
    return _each_leaf(key, tree, normal)


def fused_normal_like(key: Key[Array, ""], tree: PyTree) -> PyTree[Float[Array, "..."]]:
    """The bits of `normal_like`, for one consumer: XLA may draw again for every other use (`_words.once`)."""
    return _each_leaf(key, tree, lambda key, shape: normal_from_words(*words(draw_key(key), tuple(shape))))


def _each_leaf(key, tree, draw):
    leaves, treedef = jax.tree.flatten(tree)
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"noise goes on floating leaves, got one of {leaf.dtype} and shape {leaf.shape}")
    if not leaves:
        return tree
    split = jax.random.split(key, len(leaves))
    return treedef.unflatten([draw(split[i], leaf.shape) for i, leaf in enumerate(leaves)])


def exponential(key: Key[Array, ""], shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
    """Standard exponentials, exact in the upper tail down to 2^-63 in probability (up to 44.4)."""
    return _exponential(key, tuple(shape))


def laplace(key: Key[Array, ""], shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
    """Standard Laplace draws (scale 1, standard deviation sqrt 2), each tail exact down to 2^-64."""
    return _laplace(key, tuple(shape))


def gamma(key: Key[Array, ""], shape_parameter: int, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
    """Gamma(shape_parameter, 1) draws for an integer shape parameter: a sum of that many exponentials.

    Exact but for float32 rounding (relative 1e-6); the cost grows with `shape_parameter`.

    Raises:
      ValueError: `shape_parameter` below 1.
    """
    if shape_parameter < 1:
        raise ValueError(f"shape_parameter must be a positive integer, got {shape_parameter=}")
    return _gamma(key, shape_parameter, tuple(shape))


def direction(key: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Unit vectors along the last axis of `shape`, uniform on the sphere.

    Raises:
      ValueError: no last axis, or one of length 0.
    """
    if not shape or shape[-1] < 1:
        raise ValueError(f"a direction needs a last axis of at least one dimension, got {shape=}")
    vector = normal(key, shape)
    norm = jnp.sqrt((vector * vector).sum(-1, keepdims=True))
    # Never taken in practice: at most 2^-31 in probability for one dimension, where any sign serves.
    first = jnp.zeros(shape[-1]).at[0].set(1.0)
    return jnp.where(
        norm > 0, vector / jnp.where(norm > 0, norm, 1.0), first.reshape((1,) * (len(shape) - 1) + (-1,))
    )


def _float_type(dtype):
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 4:
        raise ValueError(f"dtype must be float32 or a shorter float type, got {dtype}")
    return dtype


def _tail_probability(high, low):
    """63 uniform bits as `(p, 1 - p)`, each with float32's relative precision near 0; p is never 0."""
    top = (high & jnp.uint32(0x7FFFFFFF)).astype(jnp.int32)  # signed: quicker to convert than uint32
    rest = low.astype(jnp.float32)
    p = top.astype(jnp.float32) * jnp.float32(2.0**-31) + (rest + 0.5) * jnp.float32(2.0**-63)
    below = (jnp.int32(0x7FFFFFFF) - top).astype(jnp.float32) + (1.0 - rest * jnp.float32(2.0**-32))
    return p, below * jnp.float32(2.0**-31)


def _with_sign(magnitude, high):
    sign = high & jnp.uint32(0x80000000)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(magnitude, jnp.uint32) | sign, jnp.float32)


def _polynomial(coefficients, x):
    total = jnp.float32(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * x + jnp.float32(coefficient)
    return total


def normal_from_words(high, low):
    """The float32 normal that 64 uniform bits stand for; top bit of `high` is the sign."""
    p, q = _tail_probability(high, low)
    w = -jnp.log(p * (1.0 + q))
    ratio = jnp.where(
        w < 7.0, _polynomial(_CENTRE, w - 3.5), _polynomial(_TAIL, jnp.sqrt(jnp.maximum(w, 0.0)) - 4.75)
    )
    return _with_sign(q * ratio, high)


def exponential_from_words(high, low):
    """-log of a 63-bit uniform; the top bit of `high` is not read."""
    p, q = _tail_probability(high, low)
    return jnp.where(p < 0.5, -jnp.log(p), -jnp.log1p(-jnp.minimum(q, 0.5)))


# Jitted here, against the custom of this package: op by op the roundings differ from the fused ones,
# and the same key has to give the same bits everywhere.
@partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    key = draw_key(key)
    return once(key[0], lambda key: normal_from_words(*words(key, shape)).astype(dtype), key)


@partial(jax.jit, static_argnums=1)
def _exponential(key, shape):
    key = draw_key(key)
    return once(key[0], lambda key: exponential_from_words(*words(key, shape)), key)


@partial(jax.jit, static_argnums=1)
def _laplace(key, shape):
    def draw(key):
        high, low = words(key, shape)
        return _with_sign(exponential_from_words(high, low), high)

    key = draw_key(key)
    return once(key[0], draw, key)


@partial(jax.jit, static_argnums=(1, 2))
def _gamma(key, num, shape):
    block = blocks(draw_key(key), shape)

    def add(i, total):
        return total + exponential_from_words(*block(i))

    return lax.fori_loop(0, num, add, jnp.zeros(shape, jnp.float32))
