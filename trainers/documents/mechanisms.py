"""The private steps over many documents: scores, draws and noised means, in chunks of bounded memory.

Every function here is a map over documents: one document's output depends on that document and its key only.
Documents are grouped by padded length, and each group runs in one compiled shape.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpriv import depth, selection, worddp
from trainers.documents.data import Encoded, width_of

ROWS_PER_CALL = 4096  # sentences, padding among them, that one call holds
GROUP = 5  # directions a group: depths for 5, 10, 15, ... directions come out of one pass
_BLOCK = 16


def depth_scores(
    documents: Encoded, prepared: depth.Prepared, *, num_directions: tuple[int, ...]
) -> dict[int, np.ndarray]:
    """Strict depth of every candidate for nested sets of directions: {p: integers [documents, candidates]}.

    Args:
      prepared: candidates sorted along at least max(num_directions) directions.
      num_directions: values of p, multiples of GROUP; p uses the first p directions.
    """
    groups = max(num_directions) // GROUP
    if any(p % GROUP or p < GROUP for p in num_directions) or groups * GROUP > len(prepared.directions):
        raise ValueError(f"numbers of directions must be multiples of {GROUP}, got {num_directions}")
    stacked = jax.tree.map(lambda x: x[: groups * GROUP].reshape(groups, GROUP, *x.shape[1:]), prepared)
    wanted = tuple(p // GROUP - 1 for p in num_directions)
    out = _map_documents(documents, lambda s, w: _depths(s, w, stacked, wanted))
    return {p: out[:, i] for i, p in enumerate(num_directions)}


@functools.partial(jax.jit, static_argnums=3)
def _depths(sentences, where, stacked, wanted):
    def one(inputs):
        each = lax.map(lambda part: depth.depth_prepared(part, inputs[0], where=inputs[1]), stacked)
        return lax.cummin(each)[np.array(wanted)]

    return lax.map(one, (sentences, where))


def bounded_scores(
    documents: Encoded, candidates: np.ndarray, *, low: float, high: float, num_steps: int
) -> np.ndarray:
    """Sum over sentences of clip((<s, f> - low) / (high - low), 0, 1) in steps: integers [documents, candidates].

    Sensitivity `num_steps`: each sentence's score is rounded before it is summed.
    """
    features = jnp.asarray(candidates)
    return _map_documents(documents, lambda s, w: _bounded(s, w, features, low, high, num_steps))


@functools.partial(jax.jit, static_argnums=5)
def _bounded(sentences, where, features, low, high, num_steps):
    def block(total, inputs):
        part, mask = inputs
        products = jnp.matmul(part, features.T, precision=lax.Precision.HIGHEST)
        steps = selection.rounded((products - low) / (high - low), num_steps=num_steps)
        return total + jnp.where(mask[:, None], steps, 0).sum(0), None

    def one(inputs):
        blocks = inputs[0].reshape(-1, _BLOCK, features.shape[1]), inputs[1].reshape(-1, _BLOCK)
        return lax.scan(block, jnp.zeros(len(features), jnp.int32), blocks)[0]

    return lax.map(one, (sentences, where))


def select(
    keys: jax.Array,
    scores: np.ndarray,
    *,
    epsilon: float,
    sensitivity: int,
    max_score: int,
    mechanism: selection.Mechanism,
    chunk: int = 256,
) -> np.ndarray:
    """One candidate's index a document, drawn by `mechanism` with the document's own key."""
    table = selection.weights(epsilon=epsilon, sensitivity=sensitivity, max_score=max_score)
    rows = 1 << (len(table) - 1).bit_length()  # few shapes to compile for many epsilons
    table = np.pad(table, ((0, rows - len(table)), (0, 0)))
    out = np.zeros(len(scores), np.int32)
    for start in range(0, len(scores), chunk):
        part = scores[start : start + chunk]
        missing = chunk - len(part)
        key_rows = np.minimum(np.arange(start, start + chunk), len(scores) - 1)
        drawn = _draw(keys[key_rows], np.pad(part, ((0, missing), (0, 0))), table, mechanism)
        out[start : start + chunk] = np.asarray(drawn)[: len(part)]
    return out


@functools.partial(jax.jit, static_argnums=3)
def _draw(keys, scores, table, mechanism):
    return lax.map(
        lambda x: selection.sample_with(x[0], x[1].astype(jnp.int32), table, mechanism=mechanism),
        (keys, scores),
    )


def noised_means(
    documents: Encoded, keys: jax.Array, axes: np.ndarray, *, max_norm: float, epsilon: float
) -> np.ndarray:
    """`worddp.low_rank_noised` of every document: float32 [documents, axes]."""
    rows = jnp.asarray(axes)
    return _map_documents(documents, lambda s, w, k: _low_rank(s, w, k, rows, max_norm, epsilon), keys)


@jax.jit
def _low_rank(sentences, where, keys, axes, max_norm, epsilon):
    def one(inputs):
        return worddp.low_rank_noised(
            inputs[2], inputs[0], axes, max_norm=max_norm, epsilon=epsilon, where=inputs[1]
        )

    return lax.map(one, (sentences, where, keys))


def truncated_means(
    documents: Encoded, keys: jax.Array, low: np.ndarray, high: np.ndarray, *, epsilon: float
) -> np.ndarray:
    """`worddp.truncated_laplace` of every document: float32 [documents, dim]."""
    box = jnp.asarray(low), jnp.asarray(high)
    return _map_documents(documents, lambda s, w, k: _truncated(s, w, k, *box, epsilon), keys)


@jax.jit
def _truncated(sentences, where, keys, low, high, epsilon):
    def one(inputs):
        return worddp.truncated_laplace(inputs[2], inputs[0], low, high, epsilon=epsilon, where=inputs[1])

    return lax.map(one, (sentences, where, keys))


def _map_documents(documents: Encoded, call: Callable, *per_document: jax.Array) -> np.ndarray:
    """`call(sentences, where, *extras)` a group of documents at a time; rows in the documents' order.

    Whole numbers come back in 16 bits where they fit.
    """
    parts = []
    for rows, width in _groups(documents.counts):
        sentences, where = documents.padded(rows, width)
        found = np.asarray(call(sentences, where, *(extra[rows] for extra in per_document)))
        parts.append((rows, found.astype(np.int16) if _fits(found) else found))
    if not parts:
        raise ValueError("no documents")
    dtype = np.result_type(*{part.dtype for _, part in parts})
    out = np.zeros((len(documents.ids), *parts[0][1].shape[1:]), dtype)
    for rows, found in parts:
        out[rows] = found  # a last, short group repeats a row: the same value twice
    return out


def _fits(values: np.ndarray) -> bool:
    return values.dtype.kind == "i" and values.max(initial=0) < 2**15


def _groups(counts: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Rows and padded width of groups of one shape each: the last of a width is filled up by repetition."""
    widths = np.array([width_of(int(c)) for c in counts])
    for width in np.unique(widths):
        rows = np.flatnonzero(widths == width)
        size = max(1, ROWS_PER_CALL // int(width))
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            yield np.concatenate([part, np.repeat(part[-1:], size - len(part))]), int(width)
