"""kNN-MT at decoding time: the model's distribution mixed with that of a store's neighbours.

`stepper` is a `decode.Stepper`, so greedy and beam search run on it unchanged. Ways to make the search cheap, each
measured in tests/bench/bench_decoding.py: rows that have ended are not searched, rows where the model is sure
(`gate`) are not searched, and of a store only the blocks near the query are (`inverted.Index`), or every entry in a
few principal components first (`Projected`), or the nearest cells by FAISS (`Faiss`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxpriv import inverted, knn, pq
from trainers.translation import batches, decode, faiss_engine
from trainers.translation import model as models


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """How to retrieve and mix; a static part of a stepper."""

    k: int = 8
    """Neighbours a query."""
    mixing: Literal["adaptive", "fixed"] = "adaptive"
    """The Meta-k network decides, or a fixed weight does."""
    gate: float = 1.0
    """The store is asked only where the model's best piece has a probability below this; 1 asks always."""
    candidates: int = 64
    """With a `Projected` store: nearest in projection that are compared exactly."""
    probes: int | None = None
    """With an `inverted.Index`: blocks that a query looks into; as many as suit its size unless given."""

    def __post_init__(self):
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k=}")
        if self.mixing not in ("adaptive", "fixed"):
            raise ValueError(f"mixing must be 'adaptive' or 'fixed', got {self.mixing=}")
        if not 0 < self.gate <= 1:
            raise ValueError(f"gate must be in (0, 1], got {self.gate=}")
        if self.candidates < self.k:
            raise ValueError(f"candidates must be at least {self.k=}, got {self.candidates=}")
        if self.probes is not None and self.probes < 1:
            raise ValueError(f"probes must be at least 1, got {self.probes=}")


class Projected(NamedTuple):
    """A store with a small shadow of itself, for a first pass at a fraction of the cost.

    full: exact or coded entries. shadow: the same entries in the leading principal components, in the same
    order.
    """

    full: knn.Store | knn.CodedStore
    shadow: knn.Store
    projection: pq.Projection


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Faiss:
    """A memory in FAISS's hands, on the host: a constant of the programs that search it."""

    index: faiss_engine.Index


class Weighted(NamedTuple):
    """A store whose entries stand for many: an entry of weight w is nearer by temperature x log w.

    Then the kernel, which divides by the same temperature, multiplies it by w, and the Meta-k network sees what
    the kernel sees. penalties: temperature x log(largest weight / weight), never negative. Entries of equal keys
    stand with the heaviest first, because equal distances come out in order of the rows.
    """

    full: knn.Store
    penalties: Float[Array, " entries"]


class Weights(NamedTuple):
    """What a kNN stepper is given.

    params: of the model. store: `knn.Store`, `knn.CodedStore`, `inverted.Index`, `Projected`, `Faiss` or `Weighted`.
    temperature: of the kernel.
    meta: the Meta-k network, for adaptive mixing. weight: the fixed weight of the store, for fixed mixing.
    """

    params: Any
    store: Any
    temperature: Float[Array, ""]
    meta: knn.MetaK | None = None
    weight: Float[Array, ""] | None = None


def with_shadow(store: knn.Store | knn.CodedStore, *, components: int) -> Projected:
    """Adds the shadow of a store: its (decoded) keys in their leading principal components.

    Components are fitted on at most 20,000 of the keys. Keys of a store are centred, and so are queries
    before they are projected (`find`).
    """
    if isinstance(store, knn.Store):
        rows, decoded = store.keys, jax.jit(lambda rows: rows.astype(jnp.float32))
    else:
        rows, codebook = store.codes, pq.Codebook(store.centroids)
        decoded = jax.jit(lambda codes: pq.decode(codebook, codes))
    step = max(1, len(rows) // 20_000)
    projection = pq.fit_pca(decoded(rows[::step]), num_components=components)
    parts = [pq.project(projection, decoded(rows[i : i + 16_384])) for i in range(0, len(rows), 16_384)]
    return Projected(store, knn.build(jnp.concatenate(parts), store.values), projection)


def padded(
    store: knn.Store | knn.CodedStore | Projected, *, rows: int = 0
) -> knn.Store | knn.CodedStore | Projected:
    """The store with at least `rows` and up to an eighth more, never retrieved, so that few sizes are compiled for."""
    if isinstance(store, Projected):
        shadow = padded(store.shadow, rows=rows)
        assert isinstance(shadow, knn.Store)
        return store._replace(full=padded(store.full, rows=rows), shadow=shadow)
    rows = max(rows, store.values.shape[0])
    step = 1 << max(rows.bit_length() - 4, 4)
    return knn.pad(store, max(-(-rows // step), 1) * step)


def find(store, queries: Float[Array, "rows dim"], retrieval: Retrieval) -> knn.Neighbors:
    """The k nearest entries: all of them are found in a plain store, most in one that is searched approximately."""
    if isinstance(store, Weighted):
        near = knn.search(store.full, queries, k=retrieval.candidates)
        away = near.distances + store.penalties[jnp.maximum(near.ids, 0)]
        return knn.top(near._replace(distances=away), k=retrieval.k)
    if isinstance(store, inverted.Index):
        return inverted.search(store, queries, k=retrieval.k, probes=retrieval.probes)
    if isinstance(store, Faiss):
        return faiss_engine.search_in_jit(store.index, queries, k=retrieval.k)
    if not isinstance(store, Projected):
        return knn.search(store, queries, k=retrieval.k)
    projected = pq.project(store.projection, queries - store.full.centre[None])
    near = knn.search(store.shadow, projected, k=retrieval.candidates)
    return knn.among(store.full, queries, near.ids, k=retrieval.k)


def mix(log_nmt, neighbors: knn.Neighbors, weights: Weights, mixing: str) -> Float[Array, "rows vocabulary"]:
    """log p(y) of model and store together."""
    if mixing == "adaptive":
        assert weights.meta is not None, "adaptive mixing needs a Meta-k network"
        choice = knn.meta_log_probs(weights.meta, neighbors)
        return knn.adaptive(log_nmt, neighbors, choice, temperature=weights.temperature)
    assert weights.weight is not None, "fixed mixing needs a weight"
    log_knn = knn.to_log_probs(neighbors, vocab_size=log_nmt.shape[-1], temperature=weights.temperature)
    return knn.interpolate(log_nmt, log_knn, weight=weights.weight)


def _sizes(rows: int, gate: float) -> list[int]:
    """Numbers of queries that are compiled for: none, a quarter of the rows, with a gate half of them, all.

    Every size costs a second of compilation and saves less the more there are.
    """
    if rows < 16:
        return [0, rows]
    return [0, rows // 4, *([rows // 2] if gate < 1 else []), rows]


@functools.lru_cache(maxsize=16)
def stepper(graphdef: nnx.GraphDef, retrieval: Retrieval) -> decode.Stepper:
    """kNN-MT as a stepper; its weights are `Weights`.

    Rows that need no neighbours cost no search: the others are moved to the front and the search runs on the
    smallest compiled number of rows that holds them.
    """
    one = decode.plain(graphdef)

    def start(weights: Weights, source, max_length):
        return one.start(weights.params, source, max_length)

    def step(weights: Weights, cache, pieces, position, active):
        model = models.merge(graphdef, weights.params)
        cache, hidden, keys = model.step(cache, pieces, position)
        log_nmt = decode.log_softmax(model.logits(hidden))
        wanted = active & (log_nmt.max(-1) <= np.log(retrieval.gate))
        order = jnp.argsort(~wanted, stable=True)

        def searched(size):
            def run(_):
                if size == 0:
                    return log_nmt
                rows = order[:size]
                found = find(weights.store, keys[rows], retrieval)
                mixed = mix(log_nmt[rows], found, weights, retrieval.mixing)
                return log_nmt.at[rows].set(jnp.where(wanted[rows][:, None], mixed, log_nmt[rows]))

            return run

        sizes = _sizes(log_nmt.shape[0], retrieval.gate)
        branch = jnp.searchsorted(jnp.asarray(sizes), wanted.sum())
        return cache, jax.lax.switch(branch, [searched(s) for s in sizes], None)

    return decode.Stepper(start, step, decode.select_rows)


@functools.partial(jax.jit, static_argnums=0)
def teacher_forced(graphdef, params, batch: batches.Batch):
    """`(keys, log_nmt)` at every target position: `[rows, length, dim]` and `[rows, length, vocabulary]`."""
    model = models.merge(graphdef, params)
    memory = model.encode(batch.source)
    hidden, keys = model.decode(memory, jnp.asarray(batch.source) != models.PAD, batch.inputs)
    logits = model.logits(hidden)
    flat = decode.log_softmax(logits.reshape(-1, logits.shape[-1]))
    return keys, flat.reshape(logits.shape)


@functools.partial(jax.jit, static_argnums=0)
def _keys(graphdef, params, batch: batches.Batch):
    model = models.merge(graphdef, params)
    memory = model.encode(batch.source)
    return model.decode(memory, jnp.asarray(batch.source) != models.PAD, batch.inputs)[1]


class Entries(NamedTuple):
    """Records of a datastore, one a target position, end marks included.

    keys: float32 `[entries, dim]`. values: int32 `[entries]`. sentences: int32 `[entries]`, the pair each is
    from.
    """

    keys: np.ndarray
    values: np.ndarray
    sentences: np.ndarray


def entries(
    graphdef: nnx.GraphDef, params, examples: Sequence[batches.Example], *, batch_tokens: int = 2048
) -> Iterator[Entries]:
    """Teacher-forces private pairs through the model and yields their records, batch by batch."""
    for index, batch in batches.in_order(examples, batch_tokens=batch_tokens):
        keys = np.asarray(_keys(graphdef, params, batch))[: len(index)]
        there = batches.targets_of(index, batch)
        yield Entries(keys[there.real], there.pieces, there.pairs)


def all_entries(graphdef: nnx.GraphDef, params, examples: Sequence[batches.Example]) -> Entries:
    """The records of `entries`, joined; empty arrays without pairs."""
    parts = list(entries(graphdef, params, examples))
    if not parts:
        dim = params["embedding"].shape[1]
        return Entries(np.zeros((0, dim), np.float32), np.zeros(0, np.int32), np.zeros(0, np.int32))
    return Entries(*(np.concatenate(column) for column in zip(*parts)))
