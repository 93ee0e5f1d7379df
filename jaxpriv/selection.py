"""Private choice of one candidate by its utility: exponential mechanism and permute-and-flip.

Both draw an outcome that a replaced sentence makes at most e^eps more or less likely when no utility moves by
more than `sensitivity` (McSherry & Talwar 2007; McKenna & Sheldon 2020, arXiv:2010.12603: never worse in
expectation). Neither adds Gumbel noise: its float32 values end 21 nats apart, and what is never drawn on one
of two neighbours breaks pure eps. Utilities are integers, weights are exact to 2^-144, and 128 random bits
decide each choice; `residual` states the total variation distance that is left, below 2^-100.

Real-valued utilities become integers a sentence at a time (`rounded`), before they are summed: then the sum's
sensitivity is exactly the number of steps, which rounding a float sum would not keep.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, Key, UInt32

from jaxpriv import _exact, sampling
from jaxpriv._words import draw_key, words

Scalar = float | int | Float[Array, ""]
Mechanism = Literal["exponential", "permute_and_flip"]

_MOST_LEVELS = 2**16
_NEGLIGIBLE = 145 * math.log(2)  # nats: a weight this far below the best rounds to 0 of 2^-144
_MOST_CANDIDATES = 2**16 - 1


def rounded(
    scores: Float[Array, "*sentences candidates"], *, num_steps: int
) -> Int32[Array, "*sentences candidates"]:
    """Each score in [0, 1] as a whole number of steps, 0 to `num_steps`; others are clamped, NaN is 0.

    Sum over a document's sentences in int32: the sum is a utility of sensitivity exactly `num_steps`.
    """
    if not 1 <= num_steps <= 2**15:
        raise ValueError(f"num_steps must be from 1 to {2**15}, got {num_steps=}")
    scores = jnp.where(jnp.isnan(scores), 0.0, scores)
    return jnp.round(jnp.clip(scores, 0.0, 1.0) * num_steps).astype(jnp.int32)


def log_probs(
    scores: Int[Array, " candidates"] | Float[Array, " candidates"],
    *,
    epsilon: Scalar,
    sensitivity: Scalar,
    where: Bool[Array, " candidates"] | None = None,
) -> Float[Array, " candidates"]:
    """The exponential mechanism's law: log of P[i] proportional to exp(epsilon scores[i] / (2 sensitivity)).

    Finite for any gap between utilities (exp of it is positive for gaps up to 700 nats in float64, 87 in
    float32); -inf outside `where`. The half in the exponent is needed: without it a pair of
    neighbours reaches 2 epsilon.

    Raises:
      ValueError: epsilon negative, NaN or infinite; a sensitivity that is not positive. Epsilon 0 is uniform.
    """
    logits = _scaled(scores, epsilon, sensitivity, where)
    return logits - jax.nn.logsumexp(logits)


def permute_and_flip_log_probs(
    scores: Int[Array, " candidates"] | Float[Array, " candidates"],
    *,
    epsilon: Scalar,
    sensitivity: Scalar,
    where: Bool[Array, " candidates"] | None = None,
) -> Float[Array, " candidates"]:
    """Permute-and-flip's exact law: P[i] = q_i int_0^1 prod_(l != i) (1 - q_l z) dz.

    Here q_i = exp(epsilon (scores[i] - max scores) / (2 sensitivity)) is the probability that i is accepted.

    The integral is a Gauss-Legendre sum over panels that halve towards 0, where the product varies with a
    scale as small as 1 / candidates: relative error 1e-12 in float64.
    """
    logits = _scaled(scores, epsilon, sensitivity, where)
    logits = logits - logits.max()
    nodes, log_weights = (jnp.asarray(a, logits.dtype) for a in _nodes())

    def at_node(z):
        factors = jnp.log1p(-jnp.exp(logits) * z)
        return factors.sum() - factors

    products = jax.lax.map(at_node, nodes)  # [nodes, candidates]
    return logits + jax.nn.logsumexp(products + log_weights[:, None], axis=0)


def sample(
    key: Key[Array, ""],
    scores: Int[Array, " candidates"],
    *,
    epsilon: float | int,
    sensitivity: int,
    max_score: int,
    mechanism: Mechanism,
    where: Bool[Array, " candidates"] | None = None,
) -> Int32[Array, ""]:
    """Draws the index of one candidate by the chosen mechanism; -1 if `where` is empty.

    Guarantee: epsilon-DP with respect to any change of the data that moves no score by more than
    `sensitivity`, up to the total variation distance `residual(...)`. Candidates with equal scores are
    equally likely, whatever the data.

    Args:
      key: from the operating system's entropy, one for each release; never a public seed.
      scores: integers in 0..max_score; others are clamped, which keeps the sensitivity.
      epsilon: python float; its table of weights is made once on the host.
      sensitivity: most that one score moves between neighbours, in the units of `scores`.
      max_score: python int bounding the scores, the same for all data of one size.

    Raises:
      ValueError: an epsilon or sensitivity that `log_probs` refuses; an epsilon so small for so many steps
        that a table of 65,536 levels would cut weights above 2^-144.
    """
    present = jnp.ones(scores.shape[0], bool) if where is None else where
    scores = jnp.clip(scores, 0, max_score)
    table = weights(epsilon=epsilon, sensitivity=sensitivity, max_score=max_score)
    return sample_with(key, scores, table, mechanism=mechanism, where=present)


def weights(*, epsilon: float | int, sensitivity: int, max_score: int) -> UInt32[np.ndarray, "levels limbs"]:
    """The table of exact weights that `sample` draws with: made on the host, shared by all documents.

    Row g weighs a score g below the best; rows end where weights round to 0 of 2^-144.

    Raises:
      ValueError: as `sample`.
    """
    _check(epsilon, sensitivity)
    step = epsilon / (2 * sensitivity)
    levels = max_score + 1
    if step > _NEGLIGIBLE / _MOST_LEVELS:
        levels = min(levels, math.ceil(_NEGLIGIBLE / step) + 1)
    if levels > _MOST_LEVELS:
        least = least_epsilon(sensitivity=sensitivity, max_score=max_score)
        raise ValueError(
            f"epsilon must be at least {least:.6g} for scores up to {max_score} of sensitivity {sensitivity}, got "
            f"{epsilon=} (its table would pass {_MOST_LEVELS} levels); raise it, or round scores to fewer steps"
        )
    return sampling.level_weights(step, levels)


def least_epsilon(*, sensitivity: int, max_score: int) -> float:
    """The smallest epsilon above 0 whose table `weights` makes: 0 where any will do, as many levels as scores.

    >>> least_epsilon(sensitivity=32, max_score=32 * 2000)
    0.0
    """
    if max_score < _MOST_LEVELS:
        return 0.0
    return 2 * sensitivity * _NEGLIGIBLE / (_MOST_LEVELS - 1)


def sample_with(
    key: Key[Array, ""],
    scores: Int[Array, " candidates"],
    table: UInt32[Array | np.ndarray, "levels limbs"],
    *,
    mechanism: Mechanism,
    where: Bool[Array, " candidates"] | None = None,
) -> Int32[Array, ""]:
    """`sample` with a table from `weights`, which may be traced and may end in rows of zeros.

    The table must have a row for every gap between two scores whose weight is not nothing.
    """
    num_candidates, num_levels = scores.shape[0], table.shape[0]
    if not 1 <= num_candidates <= _MOST_CANDIDATES:
        raise ValueError(f"between 1 and {_MOST_CANDIDATES} candidates, got {num_candidates}")
    present = jnp.ones(num_candidates, bool) if where is None else where
    best = jnp.where(present, scores, jnp.iinfo(scores.dtype).min).max()
    # Levels count from the best candidate down; those beyond the table's last row have weight 0 there.
    gap = jnp.where(present, jnp.minimum(best - scores, num_levels - 1), 0).astype(jnp.int32)
    key_choice, key_member = jax.random.split(key)
    if mechanism == "exponential":
        level_of = num_levels - 1 - gap
        counts = jnp.zeros(num_levels, jnp.int32).at[level_of].add(present.astype(jnp.int32))
        level = sampling.categorical_by_level(key_choice, counts, table)
        chosen = present & (level_of == level)
    elif mechanism == "permute_and_flip":
        # In a random order the first success wins: each successful flip is equally likely to come first.
        chosen = present & _flips(key_choice, jnp.asarray(table), gap)
    else:
        raise ValueError(f"mechanism must be exponential or permute_and_flip, got {mechanism!r}")
    return _uniform_member(key_member, chosen)


def residual(num_candidates: int, *, max_score: int) -> float:
    """Bounds the total variation distance between `sample` and its exact law.

    Of the level: `categorical_residual`. Of the member drawn from a level or from the heads: 2^-128 each, because a
    128-bit uniform is spread over them. Of permute-and-flip's coins: each threshold is off by at most 2^-128 for
    its 128 bits and 2^-145 for its weight, so all coins together by at most 2^-127 a candidate. It is an upper
    bound for both mechanisms at once, hence loose for either: the exponential mechanism tosses no coins,
    permute-and-flip draws no level, and what is allowed for a coin is twice that.

    The delta of a release is 1 + e^epsilon times this: both neighbours' laws are off by it.

    >>> residual(5000, max_score=2**15) < 2.0**-100
    True
    """
    levels = min(max_score + 1, _MOST_LEVELS)
    level = sampling.categorical_residual(levels, num_candidates)
    return level + num_candidates * 2.0**-126 + num_candidates * 2.0**-128


def _flips(key, table, gap):
    """One coin a candidate, heads with probability `table[gap]` to 128 bits; always heads at gap 0.

    The first 32 bits decide all but one coin in 2^32; the other 96 are drawn only where some coin needs them.
    """
    key_first, key_rest = jax.random.split(key)
    num = gap.shape[0]
    # 2^144 is weight 1: limbs 1 to 8 are the 128 leading fractional bits, and limb 9 is set for certainty.
    threshold = [table[:, 2 * i + 1] | (table[:, 2 * i + 2] << jnp.uint32(16)) for i in (3, 2, 1, 0)]
    first = jnp.concatenate(words(draw_key(key_first), (-(-num // 2),), 2))[:num]
    heads = first < threshold[0][gap]
    undecided = first == threshold[0][gap]
    rest = draw_key(key_rest)

    def decide():
        below = ~_exact._at_most([t[gap] for t in threshold[1:]], words(rest, (num,), 3))
        return heads | (undecided & below)

    return (table[:, 9] > 0)[gap] | lax.cond(undecided.any(), decide, lambda: heads)


def _uniform_member(key, chosen):
    """The index of one of the true entries of `chosen`, uniformly to 2^-128 each; -1 if there is none."""
    running = jnp.cumsum(chosen.astype(jnp.int32))
    total = running[-1].astype(jnp.uint32)
    # floor(total * U) for a uniform U of 128 bits, limb by limb: total is below 2^16.
    carry = jnp.uint32(0)
    for word in words(draw_key(key), (), 4):
        for limb in (word & jnp.uint32(0xFFFF), word >> jnp.uint32(16)):
            carry = (limb * total + carry) >> jnp.uint32(16)
    position = jnp.searchsorted(running, carry.astype(jnp.int32), side="right").astype(jnp.int32)
    return jnp.where(total > 0, position, -1)


def _check(epsilon, sensitivity):
    if isinstance(epsilon, (int, float)) and not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(
            f"epsilon must be finite and at least 0, got {epsilon=}; without privacy take the argmax"
        )
    if isinstance(sensitivity, (int, float)) and not (math.isfinite(sensitivity) and sensitivity > 0):
        raise ValueError(f"sensitivity must be positive and finite, got {sensitivity=}")


def _scaled(scores, epsilon, sensitivity, where):
    _check(epsilon, sensitivity)
    scores = scores.astype(jnp.result_type(float))
    logits = epsilon * scores / (2 * sensitivity)
    return logits if where is None else jnp.where(where, logits, -jnp.inf)


def _nodes() -> tuple[np.ndarray, np.ndarray]:
    """Points and log-weights of a composite Gauss-Legendre rule on (0, 1), panels [2^-(i + 1), 2^-i]."""
    x, w = np.polynomial.legendre.leggauss(16)
    ends = np.append(2.0 ** -np.arange(24), 0.0)
    half = (ends[:-1] - ends[1:])[:, None] / 2
    return (ends[1:, None] + half * (1 + x)).ravel(), np.log(half * w).ravel()
