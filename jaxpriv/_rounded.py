"""Gaussian noise rounded to integers, exactly: the same law at any standard deviation.

Float32 normals scaled up have gaps: times a large sigma they skip integers, and which ones tells a count from the next.
Here 255 random bits and a sign choose an integer by its exact probabilities. Float64 arithmetic of the host proposes
it; where its error could matter, decimals decide.
"""

import functools
import math
from decimal import Decimal, localcontext
from statistics import NormalDist

import jax
import numpy as np
from jaxtyping import Int64, Key, UInt32

from jaxpriv._words import draw_key, words

LARGEST_STDDEV = 2.0**30
_BITS = 255  # of the tail probability; the 256th bit is the sign
_WORDS = (_BITS + 1) // 32
_SLACK = 1e-12  # of a standard deviation: a thousand times what float64 may be wrong by
_DIGITS = 110


def rounded_normal(
    key: Key[jax.Array, ""], shape: tuple[int, ...] = (), *, stddev: float
) -> Int64[np.ndarray, "..."]:
    """Integers with P[k] = Phi((k + 1/2) / stddev) - Phi((k - 1/2) / stddev), by exact inversion with 255 bits.

    A whole number plus one of these is that number plus continuous Gaussian noise, rounded: the guarantee of the
    Gaussian holds as it stands, for it is post-processing. `rounded_residual` bounds the distance from that law.
    The integers are made on the host (a microsecond each): not for use under jit.

    Args:
      stddev: a python float, in the unit that is rounded to, at most 2^30.

    Raises:
      ValueError: `stddev` not positive, or more than that.
    """
    _check(stddev)
    return rounded_from_words([np.asarray(word) for word in _draw(key, tuple(shape))], float(stddev))


def rounded_residual(stddev: float) -> float:
    """Bounds the total variation distance of one `rounded_normal` from its law.

    Each P[|X| <= k] is right to 2^-255, and beyond 18.5 stddev nothing has a probability of that size.

    >>> rounded_residual(2.0**30) < 2.0**-220
    True
    """
    _check(stddev)
    return (20 * stddev + 4) * 2.0**-_BITS


def rounded_from_words(uniform: list[UInt32[np.ndarray, "..."]], stddev: float) -> Int64[np.ndarray, "..."]:
    """The integers that 256 uniform bits each stand for: a sign, then a tail probability P[|X| > .]."""
    shape = uniform[0].shape
    bits = np.stack([np.asarray(word, np.uint32).reshape(-1) for word in uniform])
    sign = bits[0] >> np.uint32(31)
    bits[0] &= np.uint32(0x7FFFFFFF)
    tail = np.full(bits.shape[1], 2.0 ** -(_BITS + 1))  # the middle of its cell
    for number in reversed(range(_WORDS)):  # the smallest first, so that small tails keep their digits
        tail += bits[number] * 2.0 ** (1 - 32 * (number + 1))
    inverse = NormalDist().inv_cdf
    size = -np.array([inverse(p) for p in (tail / 2).tolist()], np.float64)
    place = size * stddev + 0.5
    whole = np.floor(place)
    near = np.abs(place - np.rint(place)) <= _SLACK * (1 + size) * stddev
    for i in np.flatnonzero(near):
        border = round(float(place[i]))
        exact = functools.reduce(lambda number, word: (number << 32) | int(word), bits[:, i], 0)
        whole[i] = border - (2 * exact + 1 >= _beyond(border, stddev))
    return (np.where(sign == 1, -1, 1) * whole.astype(np.int64)).reshape(shape)


@functools.partial(jax.jit, static_argnums=1)
def _draw(key, shape):
    return words(draw_key(key), shape, _WORDS)


def _beyond(border: int, stddev: float) -> int:
    """2^256 P[|X| >= border], rounded up: 1 - erf((border - 1/2) / (stddev sqrt 2)), by a series of positive terms."""
    with localcontext() as context:
        context.prec = _DIGITS
        square = ((Decimal(border) - Decimal("0.5")) / Decimal(stddev)) ** 2 / 2
        term = 2 * square.sqrt() * (-square).exp() / _pi().sqrt()
        total, number = Decimal(0), 1
        while term > Decimal(10) ** -_DIGITS or number < 2 * square:
            total += term
            term *= 2 * square / (2 * number + 1)
            number += 1
        return math.ceil((1 - total) * 2 ** (_BITS + 1))


@functools.cache
def _pi() -> Decimal:
    """pi by Machin's formula."""

    def inverse_tangent(of: int) -> Decimal:
        term, total, number = Decimal(1) / of, Decimal(0), 1
        while abs(term) > Decimal(10) ** -(_DIGITS + 5):
            total += term / number
            term, number = -term / (of * of), number + 2
        return total

    with localcontext() as context:
        context.prec = _DIGITS + 10
        return 4 * (4 * inverse_tangent(5) - inverse_tangent(239))


def _check(stddev: float) -> None:
    if not 0 < stddev <= LARGEST_STDDEV:
        raise ValueError(f"stddev must be in (0, 2^30], got {stddev=}; use a coarser unit")
