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
    total, unit, finite = _sum_of_squares(update)
    length = jnp.sqrt(total)  # of update * unit
    bound = jnp.asarray(max_norm, jnp.float32) * jnp.float32(1 - MARGIN)
    norm = jnp.where(finite, length / unit, 0.0)
    keep = finite & (norm <= bound)
    # In two factors, since the coordinates alone or the scale alone may leave float32.
    scale = jnp.where(bound > 0, bound / length, 0.0)
    clipped = jax.tree.map(lambda x: jnp.where(keep, x, jnp.where(finite, x * unit * scale, 0.0)), update)
    return clipped, ClipInfo(norm, finite)


def _sum_of_squares(update):
    """(sum of squares of `update * unit`, the power of two `unit`, whether all coordinates are finite).

    `unit` is 1 unless the plain sum leaves float32 (overflow, underflow, NaN, infinity); then it brings the largest
    coordinate near 1.
    """
    leaves = jax.tree.leaves(update)

    def attempt(carry):
        _, unit, _, tries = carry
        total = _block_sum([jnp.square(x.reshape(-1) * unit) for x in leaves])
        in_range = (total > 1e-24) & (total < 1e36)
        unit, finite = lax.cond(
            in_range | (tries > 0), lambda: (unit, jnp.bool_(True)), lambda: _unit_of_largest(leaves)
        )
        # Not finite: one attempt is enough. In range, or rescaled already: done.
        return total, unit, finite, jnp.where(in_range | ~finite, 2, tries + 1)

    start = (jnp.float32(0.0), jnp.float32(1.0), jnp.bool_(True), jnp.int32(0))
    total, unit, finite, _ = lax.while_loop(lambda carry: carry[3] < 2, attempt, start)
    return total, unit, finite


def _unit_of_largest(leaves):
    """(the power of two that brings the largest coordinate near 1, whether all are finite)."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in leaves]))
    finite = jnp.isfinite(largest)
    _, exponent = jnp.frexp(jnp.where(finite & (largest > 0), largest, 1.0))
    # Within +-126 so that neither 2^e nor 2^-e is subnormal; coordinates then end at 4 at most.
    return jnp.ldexp(jnp.float32(1.0), -jnp.clip(exponent, -126, 126)), finite


def _block_sum(vectors):
    """Sum of all entries (not negative) by blocks of blocks, in float32.

    Relative error below 63 levels 2^-24: for 2^24 entries that is four levels, 1.5e-5 on a sum of squares and
    0.75e-5 on the norm, half of MARGIN. One running float32 sum over as many equal terms would be off by per cents.
    """
    while True:
        sums = []
        for x in vectors:
            whole = x.size // _BLOCK * _BLOCK
            sums += [x[:whole].reshape(-1, _BLOCK).sum(1), x[whole:].sum(keepdims=True)]
        x = jnp.concatenate(sums)
        if x.size <= _BLOCK:
            return x.sum()
        vectors = [x]
