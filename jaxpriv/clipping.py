"""Clip one update to an L2 bound that holds in float64, whatever the update contains.

The norm is flat: one number over the whole pytree. Nothing outside the ball leaves this module, which is
what the sensitivity of every sum downstream rests on.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

Scalar = float | Float[Array, ""]

# Float32 sums, scales and products are off by less than this (see `_sum_of_squares`): aiming at
# C (1 - 2^-16) keeps the float64 norm within C.
MARGIN = 2.0**-16
# Terms added one after the other before partial sums are formed; bounds the rounding of a float32 sum.
_BLOCK = 64


class ClipInfo(NamedTuple):
    """What clipping saw of one client. Not released: it is that client's data.

    norm: flat L2 norm before clipping; inf where float32 cannot hold it, 0 if the update is not finite.
    finite: False if any coordinate is NaN or infinite; the clipped update is then the zero vector.
    """

    norm: Float[Array, ""]
    finite: Bool[Array, ""]


def clip(
    update: PyTree[Float[Array, "..."]], max_norm: Scalar
) -> tuple[PyTree[Float[Array, "..."]], ClipInfo]:
    """Scales `update` into the L2 ball of radius `max_norm` and returns `(clipped, info)`.

    The norm of the result, measured in float64, is at most `max_norm`: updates longer than
    `max_norm (1 - 2^-16)` are scaled to that length, shorter ones are returned bit for bit (in float32). An
    update that holds a NaN or an infinity becomes zero as a whole. Norms beyond float32 (coordinates of
    1e30) are computed after rescaling by a power of two. A zero update stays zero.

    Args:
      update: any pytree; leaves are cast to float32 first.
      max_norm: the bound C > 0; a traced value at or below 0, or NaN, gives the zero vector.
    """
    if isinstance(max_norm, (int, float)) and not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm=}")
    update = jax.tree.map(lambda x: x.astype(jnp.float32), update)
    total = _sum_of_squares(update, jnp.float32(1.0))
    # Away from both ends of float32 the plain sum is right; elsewhere (overflow, underflow, NaN, infinity)
    # it is formed again on coordinates brought near 1.
    total, unit, finite = lax.cond(
        (total > 1e-24) & (total < 1e36),
        lambda: (total, jnp.float32(1.0), jnp.bool_(True)),
        lambda: _rescaled(update),
    )
    length = jnp.sqrt(total)  # of update * unit
    bound = jnp.asarray(max_norm, jnp.float32) * jnp.float32(1 - MARGIN)
    norm = jnp.where(finite, length / unit, 0.0)
    keep = finite & (norm <= bound)
    # In two factors, since the coordinates alone or the scale alone may leave float32.
    scale = jnp.where(bound > 0, bound / length, 0.0)
    clipped = jax.tree.map(lambda x: jnp.where(keep, x, jnp.where(finite, x * unit * scale, 0.0)), update)
    return clipped, ClipInfo(norm, finite)


def _rescaled(update):
    """(sum of squares of `update * unit`, the power of two `unit`, whether all coordinates are finite)."""
    leaves = jax.tree.leaves(update)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in leaves]))
    finite = jnp.isfinite(largest)
    _, exponent = jnp.frexp(jnp.where(finite & (largest > 0), largest, 1.0))
    # Within +-126 so that neither 2^e nor 2^-e is subnormal; coordinates then end at 4 at most.
    unit = jnp.ldexp(jnp.float32(1.0), -jnp.clip(exponent, -126, 126))
    return jnp.where(finite, _sum_of_squares(update, unit), 0.0), unit, finite


def _sum_of_squares(update, unit):
    """Sum of `(x * unit)^2` by blocks of blocks: relative error below 63 levels 2^-24, whatever the signs.

    For 2^24 coordinates that is four levels, 1.5e-5 on the sum and 0.75e-5 on the norm: half of MARGIN. One
    running float32 sum over as many equal terms would be off by per cents.
    """
    return sum(
        (_block_sum(jnp.square(x.reshape(-1) * unit)) for x in jax.tree.leaves(update)), jnp.float32(0.0)
    )


def _block_sum(x):
    while x.size > _BLOCK:
        whole = x.size // _BLOCK * _BLOCK
        sums = x[:whole].reshape(-1, _BLOCK).sum(1)
        x = sums if whole == x.size else jnp.concatenate([sums, x[whole:].sum(keepdims=True)])
    return x.sum()
