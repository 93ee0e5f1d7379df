"""Approximate Tukey depth of candidates among a document's sentences, by one-dimensional projections.

A candidate is as deep as its shallowest rank over `p` public directions (Meehan, Mrini, Chaudhuri 2022,
"Sentence-level Privacy for Document Embeddings", section 4.4 and appendix A.1; after Gilad-Bachrach &
Burges 2012). Replacing one sentence moves any depth by at most 1: it is a utility of sensitivity 1.

Counting compares small integers, not floats: on each direction a sentence is above a candidate exactly if
more candidates lie below the sentence than below the candidate, and those two ranks fit in 16 bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

_BLOCK = 16  # sentences whose comparisons are unrolled: enough for whole vector registers, quick to compile
_MOST_16 = 2**15 - 1


class Prepared(NamedTuple):
    """Candidates sorted along every direction: public, made once, shared by all documents.

    directions: the rows that sentences are projected on.
    thresholds: candidates' projections, ascending along each direction.
    ranks: number of candidates strictly below each candidate, int16 while they fit.
    """

    directions: Float[Array, "directions dim"]
    thresholds: Float[Array, "directions candidates"]
    ranks: Int[Array, "directions candidates"]


def prepare(
    candidates: Float[Array, "candidates dim"], directions: Float[Array, "directions dim"]
) -> Prepared:
    """Projects and sorts the candidates, which must be finite.

    Raises:
      ValueError: no direction or no candidate.
    """
    if directions.shape[0] < 1:
        raise ValueError("depth needs at least one direction, got 0; draw some (the paper uses 10 to 100)")
    if candidates.shape[0] < 1:
        raise ValueError("depth needs at least one candidate, got 0")
    projected = _project(directions, candidates)
    thresholds = jnp.sort(projected, axis=1)
    dtype = jnp.int16 if candidates.shape[0] <= _MOST_16 else jnp.int32
    return Prepared(directions, thresholds, jax.vmap(jnp.searchsorted)(thresholds, projected).astype(dtype))


def depth(
    sentences: Float[Array, "sentences dim"],
    candidates: Float[Array, "candidates dim"],
    directions: Float[Array, "directions dim"],
    *,
    where: Bool[Array, " sentences"],
    closed: bool = False,
) -> Int32[Array, " candidates"]:
    """Depth of every candidate among the sentences: an integer that one sentence moves by at most 1.

    With `h_j` the number of sentences strictly above the candidate on direction `j` and `k` sentences,
    `min_j min(h_j, k - h_j)`: from 0 to floor(k / 2). With `closed`, Tukey's closed half-spaces,
    `min_j min(#(>=), #(<=))`: never below the true Tukey depth, at most k (a repeated point may pass k / 2).
    More directions never raise it. With k of 0 or 1 the strict depth is 0 everywhere, so a draw is uniform.

    Rows outside `where` are padding and count nowhere. A sentence whose projection is NaN is above nothing.
    """
    return depth_prepared(prepare(candidates, directions), sentences, where=where, closed=closed)


def depth_prepared(
    prepared: Prepared,
    sentences: Float[Array, "sentences dim"],
    *,
    where: Bool[Array, " sentences"],
    closed: bool = False,
) -> Int32[Array, " candidates"]:
    """`depth` among candidates that `prepare` has sorted; `jax.vmap` or `jax.lax.map` it over documents.

    Memory is one row of counts, whatever the number of directions: never (sentences, directions, candidates).
    """
    projected = _project(prepared.directions, sentences)
    above = _ranks(prepared, projected, where, side="left")
    at_or_above = _ranks(prepared, projected, where, side="right") if closed else above
    # The counts' type follows the padded number of sentences: a wrapped count would break the sensitivity.
    dtype = jnp.int16 if sentences.shape[0] + _BLOCK <= _MOST_16 else jnp.int32
    total = where.sum(dtype=dtype)

    def one_direction(least, inputs):
        strict, weak, ranks = inputs
        higher = _count(strict, ranks, dtype)
        either = _count(weak, ranks, dtype) if closed else higher
        return jnp.minimum(least, jnp.minimum(either, total - higher)), None

    start = jnp.broadcast_to(total, prepared.ranks.shape[1:])
    return lax.scan(one_direction, start, (above, at_or_above, prepared.ranks))[0].astype(jnp.int32)


def _project(directions: Float[Array, "p d"], points: Float[Array, "n d"]) -> Float[Array, "p n"]:
    projected = jnp.einsum("pd,nd->pn", directions, points, precision=lax.Precision.HIGHEST)
    # -0.0 and 0.0 are one value to a comparison, and so they must be to the sort.
    return jnp.where(projected == 0, 0.0, projected)


def _ranks(prepared, projected, where, *, side):
    """Candidates below each sentence [directions, blocks, block]; -1, above nothing, for absent ones."""
    found = jax.vmap(lambda t, x: jnp.searchsorted(t, x, side=side))(prepared.thresholds, projected)
    found = jnp.where(where[None, :] & ~jnp.isnan(projected), found, -1).astype(prepared.ranks.dtype)
    padding = -found.shape[1] % _BLOCK
    found = jnp.pad(found, ((0, 0), (0, padding)), constant_values=-1)
    return found.reshape(found.shape[0], -1, _BLOCK)


def _count(sentence_ranks, candidate_ranks, dtype):
    """Number of sentences above each candidate on one direction."""

    def block(count, ranks):
        for i in range(_BLOCK):
            count = count + (ranks[i] > candidate_ranks).astype(dtype)
        return count, None

    return lax.scan(block, jnp.zeros(candidate_ranks.shape, dtype), sentence_ranks)[0]


def exact_depth_in_plane(
    points: Float[Array, "points 2"], candidates: Float[Array, "candidates 2"]
) -> Int32[Array, " candidates"]:
    """True closed Tukey depth in two dimensions, from cross products alone: O(points^2) a candidate.

    The number of points less the most that an open half-plane through the candidate can hold; exact where
    the products are (integers of moderate size). It is what `depth(..., closed=True)` comes down to.
    """

    def one(candidate):
        x = points - candidate[None]
        away = (x != 0).any(1)
        cross = x[:, None, 0] * x[None, :, 1] - x[:, None, 1] * x[None, :, 0]
        dot = (x[:, None] * x[None]).sum(-1)
        # Points at angles [0, pi) from point i, itself among them whatever a fused product rounds to: an
        # open half-plane that starts just before it.
        itself = jnp.eye(len(x), dtype=bool)
        ahead = (itself | (cross > 0) | ((cross == 0) & (dot > 0))) & away[None, :] & away[:, None]
        return points.shape[0] - ahead.sum(1).max(initial=0)

    return lax.map(one, candidates).astype(jnp.int32)
