"""The private steps over many documents: scores, draws and noised means, in chunks of bounded memory.

Every function here is a map over documents: one document's output depends on that document and its key only.
Documents are grouped by padded length; each group runs in one compiled shape, spread over `devices` (None: all
that this process has). The numbers do not depend on how many they are.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxpriv import depth, selection, worddp
from trainers.documents.data import Encoded, width_of

ROWS_PER_CALL = 8192  # sentences, padding among them, that one call holds
GROUP = 5  # directions a group: depths for 5, 10, 15, ... directions come out of one pass
_BLOCK = 16
_CHUNK = 1024  # documents of one call that draws


def depth_scores(
    documents: Encoded,
    prepared: depth.Prepared,
    *,
    num_directions: tuple[int, ...],
    devices: int | None = None,
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
    out = _map_documents(documents, lambda s, w, mesh: _depths(s, w, stacked, wanted, mesh), devices)
    return {p: out[:, i] for i, p in enumerate(num_directions)}


@functools.partial(jax.jit, static_argnums=(3, 4))
def _depths(sentences, where, stacked, wanted, mesh):
    def one(sentences, where):
        each = lax.map(lambda part: depth.depth_prepared(part, sentences, where=where), stacked)
        return _narrow(lax.cummin(each)[np.array(wanted)], sentences.shape[0])

    return _spread(one, mesh, sentences, where)


def bounded_scores(
    documents: Encoded,
    candidates: np.ndarray,
    *,
    low: float,
    high: float,
    num_steps: int,
    devices: int | None = None,
) -> np.ndarray:
    """Sum over sentences of clip((<s, f> - low) / (high - low), 0, 1) in steps: integers [documents, candidates].

    Sensitivity `num_steps`: each sentence's score is rounded before it is summed.
    """
    features = jnp.asarray(candidates)
    return _map_documents(
        documents, lambda s, w, mesh: _bounded(s, w, features, low, high, num_steps, mesh), devices
    )


@functools.partial(jax.jit, static_argnums=(5, 6))
def _bounded(sentences, where, features, low, high, num_steps, mesh):
    def block(total, inputs):
        part, mask = inputs
        products = jnp.matmul(part, features.T, precision=lax.Precision.HIGHEST)
        steps = selection.rounded((products - low) / (high - low), num_steps=num_steps)
        return total + jnp.where(mask[:, None], steps, 0).sum(0), None

    def one(sentences, where):
        blocks = sentences.reshape(-1, _BLOCK, features.shape[1]), where.reshape(-1, _BLOCK)
        total = lax.scan(block, jnp.zeros(len(features), jnp.int32), blocks)[0]
        return _narrow(total, num_steps * sentences.shape[0])

    return _spread(one, mesh, sentences, where)


def vote_scores(documents: Encoded, votes: np.ndarray, labels: np.ndarray, *, num_steps: int) -> np.ndarray:
    """Sum over sentences of the votes for a candidate's label, in steps: integers [documents, candidates].

    Sensitivity `num_steps`: each sentence's vote is rounded before it is summed.

    Args:
      votes: of each sentence for each class, from 0 to 1. labels: of the candidates.
    """
    steps = np.asarray(_rounded(votes, num_steps))
    sums = documents.sums(steps)
    return sums.astype(np.int16 if sums.max(initial=0) < 2**15 else np.int32)[:, labels]


_rounded = jax.jit(lambda votes, steps: selection.rounded(votes, num_steps=steps), static_argnums=1)


def select(
    keys: jax.Array,
    scores: np.ndarray,
    *,
    epsilon: float,
    sensitivity: int,
    max_score: int,
    mechanism: selection.Mechanism,
    devices: int | None = None,
) -> np.ndarray:
    """One candidate's index a document, drawn by `mechanism` with the document's own key."""
    table = selection.weights(epsilon=epsilon, sensitivity=sensitivity, max_score=max_score)
    rows = 1 << (len(table) - 1).bit_length()  # few shapes to compile for many epsilons
    table = np.pad(table, ((0, rows - len(table)), (0, 0)))
    mesh = _mesh(devices)
    num_devices = 1 if mesh is None else mesh.size
    chunk = -(-_CHUNK // num_devices) * num_devices
    return _in_chunks(lambda k, s: _draw(k, s, table, mechanism, mesh), keys, scores, chunk=chunk)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _draw(keys, scores, table, mechanism, mesh):
    def one(key, scores):
        return selection.sample_with(key, scores.astype(jnp.int32), table, mechanism=mechanism)

    return _spread(one, mesh, keys, scores)


def clipped_means(
    documents: Encoded, axes: np.ndarray, *, max_norm: float, devices: int | None = None
) -> np.ndarray:
    """`worddp.clipped_mean` of every document: float32 [documents, axes], not private before its noise."""
    rows = jnp.asarray(axes)
    return _map_documents(documents, lambda s, w, mesh: _clipped(s, w, rows, max_norm, mesh), devices)


@functools.partial(jax.jit, static_argnums=4)
def _clipped(sentences, where, axes, max_norm, mesh):
    def one(sentences, where):
        return worddp.clipped_mean(sentences, axes, max_norm=max_norm, where=where)

    return _spread(one, mesh, sentences, where)


def low_rank_noise(
    keys: jax.Array, counts: np.ndarray, num_axes: int, *, max_norm: float, epsilon: float
) -> np.ndarray:
    """`worddp.low_rank_noise` for documents of `counts` sentences: float32 [documents, axes]."""
    return _in_chunks(lambda k, c: _low_rank(k, c, num_axes, max_norm, epsilon), keys, counts)


@functools.partial(jax.jit, static_argnums=2)
def _low_rank(keys, counts, num_axes, max_norm, epsilon):
    def one(key, count):
        return worddp.low_rank_noise(key, num_axes, max_norm=max_norm, num_sentences=count, epsilon=epsilon)

    return jax.vmap(one)(keys, counts)


def truncated_means(
    documents: Encoded, low: np.ndarray, high: np.ndarray, *, devices: int | None = None
) -> np.ndarray:
    """`worddp.truncated_mean` of every document: float32 [documents, dim], not private before its noise."""
    box = jnp.asarray(low), jnp.asarray(high)
    return _map_documents(documents, lambda s, w, mesh: _truncated(s, w, *box, mesh), devices)


@functools.partial(jax.jit, static_argnums=4)
def _truncated(sentences, where, low, high, mesh):
    def one(sentences, where):
        return worddp.truncated_mean(sentences, low, high, where=where)

    return _spread(one, mesh, sentences, where)


def truncation_noise(
    keys: jax.Array, counts: np.ndarray, low: np.ndarray, high: np.ndarray, *, epsilon: float
) -> np.ndarray:
    """`worddp.truncation_noise` for documents of `counts` sentences: float32 [documents, dim]."""
    return _in_chunks(lambda k, c: _laplace(k, c, low, high, epsilon), keys, counts)


@jax.jit
def _laplace(keys, counts, low, high, epsilon):
    def one(key, count):
        return worddp.truncation_noise(key, low, high, num_sentences=count, epsilon=epsilon)

    return jax.vmap(one)(keys, counts)


def _narrow(scores, most):
    """16 bits where `most`, a bound that the padded shape gives, fits: half the memory for the same integers."""
    return scores.astype(jnp.int16) if most < 2**15 else scores


@functools.cache
def _mesh(devices: int | None) -> Mesh | None:
    """The `documents` axis over the first `devices` devices of this process; None for one device."""
    local = jax.local_devices()[:devices]
    if len(local) == 1:
        return None
    return jax.make_mesh((len(local),), ("documents",), axis_types=(AxisType.Auto,), devices=local)


def _spread(one: Callable, mesh: Mesh | None, *arrays: jax.Array) -> jax.Array:
    """`one` of each row, in turn on every device; rows must spread evenly. No gradient passes here."""

    def share(*arrays):
        return lax.map(lambda rows: one(*rows), arrays)

    if mesh is None:
        return share(*arrays)
    spec = PartitionSpec("documents")
    return jax.shard_map(share, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(*arrays)


def _in_chunks(call: Callable, keys: jax.Array, rows: np.ndarray, *, chunk: int = _CHUNK) -> np.ndarray:
    """`call(keys, rows)` on parts of one fixed shape; the last part is filled up with its own last row."""
    parts = []
    for start in range(0, len(rows), chunk):
        chosen = np.minimum(np.arange(start, start + chunk), len(rows) - 1)
        parts.append(np.asarray(call(keys[chosen], rows[chosen]))[: len(rows) - start])
    if not parts:
        raise ValueError("no documents")
    return np.concatenate(parts)


def _map_documents(documents: Encoded, call: Callable, devices: int | None) -> np.ndarray:
    """`call(sentences, where, mesh)` a group of documents at a time; rows in the documents' order."""
    mesh = _mesh(devices)
    out: np.ndarray | None = None
    for rows, width in _groups(documents.counts, 1 if mesh is None else mesh.size):
        found = np.asarray(call(*documents.padded(rows, width), mesh))
        if out is None:
            out = np.zeros((len(documents.ids), *found.shape[1:]), found.dtype)
        elif found.dtype.itemsize > out.dtype.itemsize:
            out = out.astype(found.dtype)
        out[rows] = found  # a last, short group repeats a row: the same value twice
    if out is None:
        raise ValueError("no documents")
    return out


def _groups(counts: np.ndarray, num_devices: int) -> Iterator[tuple[np.ndarray, int]]:
    """Rows and padded width of groups of one shape each: the last of a width is filled up by repetition."""
    widths = np.array([width_of(int(c)) for c in counts])
    for width in np.unique(widths):
        rows = np.flatnonzero(widths == width)
        size = max(1, ROWS_PER_CALL // int(width) // num_devices) * num_devices
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            yield np.concatenate([part, np.repeat(part[-1:], size - len(part))]), int(width)
