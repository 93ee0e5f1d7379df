"""Discrete draws by integer arithmetic: every probability is right to 2^-100 and better.

Probabilities are integers over a power of two, computed on the host with Python's integers and compared
on the device with uniform bits, limb by limb. No float takes part in a choice, so no outcome is lost to
rounding: what is off is the stated total variation distance, which a guarantee adds to its delta.
"""

import functools
import math
from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32, Key, UInt32

from jaxpriv._words import draw_key, words

_GAUSSIAN_BITS = 127  # of the magnitude; the 128th is the sign
_LARGEST_STDDEV = 2.0**16

_LIMB = 16  # bits a limb, in uint32, so that a product of two fits
_WEIGHT_LIMBS = 10
_WEIGHT_BITS = 144  # fractional bits of a weight: weight 1 is 2^144
_UNIFORM_LIMBS = 8  # 128 random bits
_TOTAL_LIMBS = 13  # weight x count (31 bits), summed over up to 2^16 levels
_MOST_LEVELS = 2**16


def discrete_gaussian(
    key: Key[Array, ""], shape: tuple[int, ...] = (), *, stddev: float
) -> Int32[Array, "..."]:
    """Integers with P[x] proportional to exp(-x^2 / (2 stddev^2)), by exact inversion with 128 bits.

    The discrete Gaussian of Canonne, Kamath, Steinke 2020 (arXiv:2004.00010); `stddev` is the parameter
    sigma, which the true standard deviation approaches from below. Total variation distance from the exact
    law at most (16 stddev + 2) 2^-126 a draw, the cut tail included.

    Args:
      stddev: a python float (the table of probabilities is made on the host, once a value), at most 65,536.

    Raises:
      ValueError: `stddev` not positive and finite, or so large that its table would not fit.
    """
    if not (math.isfinite(stddev) and stddev > 0):
        raise ValueError(f"stddev must be positive and finite, got {stddev=}")
    if stddev > _LARGEST_STDDEV:
        raise ValueError(f"stddev must be at most {_LARGEST_STDDEV:.0f}, got {stddev=}; use a coarser scale")
    return _search(key, tuple(shape), jnp.asarray(_gaussian_table(float(stddev))))


@functools.partial(jax.jit, static_argnums=1)
def _search(key, shape, table):
    return gaussian_from_words(words(draw_key(key), shape, 4), table)


def gaussian_from_words(uniform, table):
    """The integer that four uniform words stand for; the top bit of the first is the sign."""
    first, *rest = uniform
    shape = first.shape
    sign, uniform = first >> jnp.uint32(31), (first & jnp.uint32(0x7FFFFFFF), *rest)

    def halve(_, bounds):
        low, high = bounds  # the answer lies in [low, high]
        middle = (low + high) // 2
        at = table[middle]
        is_above = _at_most([at[..., i] for i in range(4)], uniform)
        return jnp.where(is_above & (low < high), middle + 1, low), jnp.where(is_above, high, middle)

    last = len(table) - 1
    start = jnp.zeros(shape, jnp.int32), jnp.full(shape, last, jnp.int32)
    magnitude, _ = lax.fori_loop(0, max(last.bit_length(), 1), halve, start)
    return jnp.where(sign == 1, -magnitude, magnitude)


def _at_most(a, b):
    """a <= b for numbers given as lists of words, most significant first."""
    result = a[-1] <= b[-1]
    for x, y in zip(a[-2::-1], b[-2::-1]):
        result = (x < y) | ((x == y) & result)
    return result


@functools.lru_cache(maxsize=32)
def _gaussian_table(stddev: float) -> np.ndarray:
    """floor(2^127 P[|X| <= k]) for k = 0, 1, ..., as four 32-bit words; the last entry is 2^127 - 1."""
    precision = 2 * _GAUSSIAN_BITS
    # exp(-k^2/2s^2) by the recurrence of its ratios, exp(-(2k + 1)/2s^2): two integer products an entry.
    with localcontext() as context:
        context.prec = 100
        exponent = 1 / (2 * Decimal(stddev) ** 2)
        ratio = int((-exponent).exp() * 2**precision)
        decay = int((-2 * exponent).exp() * 2**precision)
    weight, weights = 1 << precision, []
    while weight >> (precision - _GAUSSIAN_BITS - 20):
        weights.append(weight)
        weight = weight * ratio >> precision
        ratio = ratio * decay >> precision
    total = 2 * sum(weights) - weights[0]
    running, rows = -weights[0], []
    for weight in weights:
        running += 2 * weight
        rows.append((running << _GAUSSIAN_BITS) // total)
        if rows[-1] >= (1 << _GAUSSIAN_BITS) - 1:
            break
    rows[-1] = (1 << _GAUSSIAN_BITS) - 1
    return np.array([[(row >> shift) & 0xFFFFFFFF for shift in (96, 64, 32, 0)] for row in rows], np.uint32)


def level_weights(step: float, num_levels: int) -> UInt32[np.ndarray, "levels limbs"]:
    """exp(-step * gap) for gap = 0, 1, ..., num_levels - 1, rounded to 2^-144, for `categorical_by_level`.

    Args:
      step: what one level is worth, in nats (eps / 2 for the exponential mechanism and integer utilities).

    Raises:
      ValueError: a step that is negative or not finite, or more than 65,536 levels.
    """
    if not (math.isfinite(step) and step >= 0):
        raise ValueError(f"step must be finite and not negative, got {step=}")
    if not 1 <= num_levels <= _MOST_LEVELS:
        raise ValueError(f"num_levels must be from 1 to {_MOST_LEVELS}, got {num_levels=}")
    return _level_weights(float(step), num_levels).copy()


@functools.lru_cache(maxsize=64)
def _level_weights(step: float, num_levels: int) -> np.ndarray:
    precision = 2 * _WEIGHT_BITS
    with localcontext() as context:
        context.prec = 120
        ratio = int((-Decimal(step)).exp() * 2**precision)
    rows, weight = np.zeros((num_levels, _WEIGHT_LIMBS), np.uint32), 1 << precision
    for row in rows:
        rounded = (weight + (1 << (precision - _WEIGHT_BITS - 1))) >> (precision - _WEIGHT_BITS)
        if rounded == 0:
            break
        row[:] = [(rounded >> (_LIMB * limb)) & 0xFFFF for limb in range(_WEIGHT_LIMBS)]
        weight = weight * ratio >> precision
    return rows


def categorical_by_level(
    key: Key[Array, ""], counts: Int[Array, " levels"], weights: UInt32[Array | np.ndarray, "rows limbs"]
) -> Int32[Array, ""]:
    """Draws a level with P[j] proportional to `counts[j] * exp(step * j)`, in integers throughout.

    The exponential mechanism over few utility values: draw the level here, then one of its `counts[j]`
    members uniformly. Gumbel-max in float32 never draws a gap above 21 nats; here every outcome whose
    probability exceeds 2^-112 or so keeps its mass, and `categorical_residual` bounds the rest.

    Args:
      counts: members of each level, non-negative, fewer than 2^31 in all. All zero: level 0.
      weights: `level_weights(step, levels)`; row g weighs the level g below the best that has members.
    """
    num_levels = counts.shape[0]
    if weights.shape != (num_levels, _WEIGHT_LIMBS):
        raise ValueError(f"weights must be level_weights(step, {num_levels}), got shape {weights.shape}")
    return _categorical(key, counts, jnp.asarray(weights))


@jax.jit
def _categorical(key, counts, weights):
    return level_from_words(words(draw_key(key), (), _UNIFORM_LIMBS // 2), counts, weights)


def level_from_words(uniform, counts, weights):
    """The level that 128 uniform bits (four words, the least significant first) stand for."""
    num_levels = counts.shape[0]
    level = jnp.arange(num_levels)
    best = jnp.max(jnp.where(counts > 0, level, 0))
    weight = weights[jnp.clip(best - level, 0, num_levels - 1)]
    mass = _multiply(
        [weight[:, i] for i in range(_WEIGHT_LIMBS)], _limbs(counts.astype(jnp.uint32), 2), _TOTAL_LIMBS
    )
    # At most 2^16 limbs of at most 2^16 - 1 each: the sums fit in uint32, and carries move afterwards.
    running = _carry([jnp.cumsum(limb) for limb in mass])
    total = [limb[-1] for limb in running]
    uniform = [half for word in uniform for half in _limbs(word, 2)]
    point = _multiply(total, uniform, _TOTAL_LIMBS + _UNIFORM_LIMBS)[
        _UNIFORM_LIMBS:
    ]  # floor(total * U), U in [0, 1)
    passed = _at_most(running[::-1], [jnp.broadcast_to(limb, (num_levels,)) for limb in point[::-1]])
    return jnp.minimum(passed.sum(), best).astype(jnp.int32)


def _limbs(word, num):
    return [(word >> jnp.uint32(_LIMB * i)) & jnp.uint32(0xFFFF) for i in range(num)]


def _multiply(a, b, num_limbs):
    """The product of two numbers of 16-bit limbs, least significant first."""
    columns = [jnp.uint32(0)] * (num_limbs + 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product = x * y
            if i + j < num_limbs:
                columns[i + j] = columns[i + j] + (product & jnp.uint32(0xFFFF))
                columns[i + j + 1] = columns[i + j + 1] + (product >> jnp.uint32(_LIMB))
    return _carry(columns[:num_limbs])


def _carry(columns):
    carry, out = jnp.uint32(0), []
    for column in columns:
        # column + carry could pass 2^32 when column is near it, so the halves are added apart.
        low = (column & jnp.uint32(0xFFFF)) + (carry & jnp.uint32(0xFFFF))
        out.append(low & jnp.uint32(0xFFFF))
        carry = (column >> jnp.uint32(_LIMB)) + (carry >> jnp.uint32(_LIMB)) + (low >> jnp.uint32(_LIMB))
    return out


def categorical_residual(num_levels: int, num_members: int) -> float:
    """Bounds the total variation distance of `categorical_by_level` from its exact law: below 2^-100.

    Half a unit of 2^-144 a member in the weights (over a total of at least 1, twice for the normalisation),
    and one unit of the 128-bit uniform at each boundary between levels.

    >>> categorical_residual(10, 5000) < 2.0**-100
    True
    """
    return num_members * 2.0**-144 + num_levels * 2.0**-128


def level_log_probabilities(counts: np.ndarray, step: float) -> Float[np.ndarray, " levels"]:
    """Log-probabilities of the levels, in float64 on the host: finite for every level that has members.

    Their exponentials are positive for gaps up to 700 nats; -inf where `counts` is 0.

    Raises:
      ValueError: no members at all, or a step that is negative or not finite.
    """
    if not (math.isfinite(step) and step >= 0):
        raise ValueError(f"step must be finite and not negative, got {step=}")
    counts = np.asarray(counts, np.float64)
    if not (counts > 0).any():
        raise ValueError("no level has a member: nothing to choose from")
    with np.errstate(divide="ignore"):
        logits = np.log(counts) + step * np.arange(len(counts))
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())
