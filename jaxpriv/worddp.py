"""Noise on vectors of text: words under metric DP, truncated means with Laplace, low-rank means with L2 noise.

The baselines of Meehan, Mrini, Chaudhuri 2022 (appendix A.3), and a mean in a few public directions, which
needs noise for those alone. All three are continuous: their guarantees assume real arithmetic, since
float32 noise leaves gaps between the values that it can reach.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, Key

from jaxpriv import sampling

Scalar = float | int | Float[Array, ""]


def metric_noise(key: Key[Array, ""], shape: tuple[int, int], *, scale: Scalar) -> Float[Array, "points dim"]:
    """Vectors with density proportional to exp(-||z||_2 / scale): direction uniform, norm Gamma(dim, scale).

    Added to a point it makes points at distance r distinguishable by at most r / scale (nats), whatever
    else is known: metric DP (Feyisetan et al. 2019, arXiv:1910.08902). The mean norm is dim * scale.
    """
    _positive("scale", scale)
    key_norm, key_direction = jax.random.split(key)
    norm = scale * sampling.gamma(key_norm, shape[1], (shape[0],))
    return sampling.direction(key_direction, shape) * norm[:, None]


def replace_words(
    key: Key[Array, ""],
    words: Float[Array, "words dim"],
    vocabulary: Float[Array, "vocabulary dim"],
    *,
    epsilon: Scalar,
) -> Int32[Array, " words"]:
    """Each word's vector gets noise of density exp(-epsilon ||z||) and becomes the nearest vocabulary row.

    Guarantee: metric DP for each word, epsilon per unit of distance in this word space. That is weaker than
    SentDP, and means nothing without the space's name and its distances. Choosing the nearest word is
    post-processing.
    """
    _positive("epsilon", epsilon)
    num_words, dim = words.shape
    noised = words + metric_noise(key, (num_words, dim), scale=1 / epsilon)
    return nearest(noised, vocabulary)


def nearest(
    points: Float[Array, "points dim"], vocabulary: Float[Array, "vocabulary dim"], *, block: int = 256
) -> Int32[Array, " points"]:
    """The row of `vocabulary` nearest to each point in L2; `block` rows of distances are held at a time."""
    centre = vocabulary.mean(0)  # distances by expansion keep their digits near the origin
    rows = vocabulary - centre[None]
    half = (rows * rows).sum(1) / 2
    padding = -points.shape[0] % block
    blocks = jnp.pad(points - centre[None], ((0, padding), (0, 0))).reshape(-1, block, points.shape[1])
    found = lax.map(
        lambda x: jnp.argmin(half[None] - jnp.matmul(x, rows.T, precision=lax.Precision.HIGHEST), axis=1),
        blocks,
    )
    return found.reshape(-1)[: points.shape[0]].astype(jnp.int32)


def truncated_mean(
    sentences: Float[Array, "sentences dim"],
    low: Float[Array, " dim"],
    high: Float[Array, " dim"],
    *,
    where: Bool[Array, " sentences"],
) -> Float[Array, " dim"]:
    """Mean of the sentences clamped to [low, high]: replacing one moves it by at most sum(high - low) / k in L1.

    NaN counts as the box's middle. With no sentence it is the middle of the box.
    """
    middle = (low + high) / 2
    clamped = jnp.clip(jnp.where(jnp.isnan(sentences), middle[None], sentences), low[None], high[None])
    return _mean(clamped - middle[None], where) + middle


def truncated_laplace(
    key: Key[Array, ""],
    sentences: Float[Array, "sentences dim"],
    low: Float[Array, " dim"],
    high: Float[Array, " dim"],
    *,
    epsilon: Scalar,
    where: Bool[Array, " sentences"],
) -> Float[Array, " dim"]:
    """`truncated_mean` plus Laplace noise of scale dim (high - low) / (k epsilon): epsilon-SentDP.

    The baseline after Li & Clifton 2021. Each dimension spends epsilon / dim; the number k of sentences is
    public. Assumes real arithmetic.
    """
    noise = truncation_noise(key, low, high, num_sentences=_count(where), epsilon=epsilon)
    return truncated_mean(sentences, low, high, where=where) + noise


def truncation_noise(
    key: Key[Array, ""],
    low: Float[Array, " dim"],
    high: Float[Array, " dim"],
    *,
    num_sentences: Int[Array, ""] | int,
    epsilon: Scalar,
) -> Float[Array, " dim"]:
    """What `truncated_laplace` adds to a `truncated_mean` of `num_sentences` sentences (none counts as one)."""
    _positive("epsilon", epsilon)
    scale = low.shape[0] * (high - low) / (jnp.maximum(num_sentences, 1) * epsilon)
    return scale * sampling.laplace(key, low.shape)


def clipped_mean(
    sentences: Float[Array, "sentences dim"],
    axes: Float[Array, "axes dim"],
    *,
    max_norm: Scalar,
    where: Bool[Array, " sentences"],
) -> Float[Array, " axes"]:
    """Mean of the sentences' coordinates on `axes`, each clipped to L2 norm `max_norm`.

    Replacing one sentence moves it by at most 2 max_norm / k in L2. Sentences with NaN or infinite
    coordinates count as zero, as does a document without sentences.
    """
    projected = jnp.matmul(sentences, axes.T, precision=lax.Precision.HIGHEST)
    norm = jnp.sqrt((projected * projected).sum(1, keepdims=True))
    finite = jnp.isfinite(norm)
    scale = jnp.minimum(1.0, max_norm / jnp.where(finite & (norm > 0), norm, 1.0))
    return _mean(jnp.where(finite, projected, 0.0) * scale, where)


def low_rank_noised(
    key: Key[Array, ""],
    sentences: Float[Array, "sentences dim"],
    axes: Float[Array, "axes dim"],
    *,
    max_norm: Scalar,
    epsilon: Scalar,
    where: Bool[Array, " sentences"],
) -> Float[Array, " axes"]:
    """`clipped_mean` plus noise of density exp(-epsilon k ||z|| / (2 max_norm)): epsilon-SentDP.

    The noise's mean norm is 2 axes max_norm / (k epsilon): it grows with the number of axes, not with the
    embedding's length. The number k of sentences is public. Assumes real arithmetic.
    """
    noise = low_rank_noise(
        key, axes.shape[0], max_norm=max_norm, num_sentences=_count(where), epsilon=epsilon
    )
    return clipped_mean(sentences, axes, max_norm=max_norm, where=where) + noise


def low_rank_noise(
    key: Key[Array, ""],
    num_axes: int,
    *,
    max_norm: Scalar,
    num_sentences: Int[Array, ""] | int,
    epsilon: Scalar,
) -> Float[Array, " axes"]:
    """What `low_rank_noised` adds to a `clipped_mean` of `num_sentences` sentences (none counts as one)."""
    _positive("epsilon", epsilon)
    _positive("max_norm", max_norm)
    scale = 2 * max_norm / (jnp.maximum(num_sentences, 1) * epsilon)
    return metric_noise(key, (1, num_axes), scale=scale)[0]


def _count(where):
    return jnp.maximum(where.sum(), 1)


def _mean(values, where):
    return jnp.where(where[:, None], values, 0.0).sum(0) / _count(where)


def _positive(name, value):
    if isinstance(value, (int, float)) and not 0 < value < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {value}")
