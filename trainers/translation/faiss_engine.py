"""FAISS as an engine for large memories on CPU, where an inverted file pays: only cells near the query are searched.

Optional: `pip install faiss-cpu`. Approximate (a neighbour in a cell that was not probed is missed), where
`knn.search` compares every record; the device path needs none of it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import knn, pq
from trainers.common.errors import InputError
from trainers.translation import datastore
from trainers.translation.datastore import Datastore

# The wheel's own 128,000 (queries x dimension, it seems) keeps BLAS off for batches of a decoding step, where exact
# search and the coarse quantizer are then 3 to 10 times slower.
BLAS_THRESHOLD = 20


class Index(NamedTuple):
    """An inverted file over a memory's decoded keys. index: FAISS's. values: one a record."""

    index: Any
    values: np.ndarray


@functools.cache
def _faiss():
    try:
        faiss = importlib.import_module("faiss")  # optional, so a type checker need not find it
    except ImportError as error:
        raise InputError(
            "the engine 'faiss' needs FAISS: pip install faiss-cpu, or use exact search"
        ) from error
    faiss.cvar.distance_compute_blas_threshold = BLAS_THRESHOLD
    return faiss


def build(store: Datastore, *, lists: int, probes: int, train_rows: int = 200_000, seed: int = 0) -> Index:
    """Sorts a memory into `lists` cells, of which the nearest `probes` are searched; codes stay codes.

    PQ codes are searched with the memory's own codebook, other keys as floats. Rule of thumb: lists about
    4 sqrt(records). With probes = lists the search is exhaustive.
    """
    faiss = _faiss()
    if not 1 <= probes <= lists:
        raise ValueError(f"probes must be in [1, {lists}], got {probes=}")
    if store.count < lists:
        raise InputError(f"{store.count} records cannot fill {lists} cells; ask for fewer, or search exactly")
    dim = store.facts.dim
    quantizer = faiss.IndexFlatL2(dim)
    if isinstance(store.codebook, pq.Codebook):
        subspaces, centroids, _ = store.codebook.centroids.shape
        if centroids != pq.MAX_CENTROIDS:
            raise InputError(
                f"FAISS needs {pq.MAX_CENTROIDS} centroids a subspace, the codebook has {centroids}"
            )
        index = faiss.IndexIVFPQ(quantizer, dim, lists, subspaces, 8)
        index.by_residual = False
        table = np.ascontiguousarray(store.codebook.centroids, np.float32)
        faiss.copy_array_to_vector(table.ravel(), index.pq.centroids)
    else:
        index = faiss.IndexIVFFlat(quantizer, dim, lists)
    clusters = faiss.Kmeans(dim, lists, niter=10, seed=seed)
    step = max(1, store.count // train_rows)
    clusters.train(_decoded(store, slice(0, None, step)))
    quantizer.add(clusters.centroids)
    index.is_trained = True
    for start in range(0, store.count, 65_536):
        index.add(_decoded(store, slice(start, start + 65_536)))
    index.nprobe = probes
    return Index(index, np.asarray(store.values))


def _decoded(store: Datastore, rows: slice) -> np.ndarray:
    keys = np.ascontiguousarray(store.keys[rows])
    return np.ascontiguousarray(datastore.decode(store.facts, store.codebook, keys), np.float32)


def search(index: Index, queries: np.ndarray, *, k: int) -> knn.Neighbors:
    """The k nearest records in the probed cells, as `knn.search` returns them."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k=}")
    distances, ids, values = _search(index, k, queries)
    return knn.Neighbors(jnp.asarray(distances), jnp.asarray(values), jnp.asarray(ids))


def search_in_jit(index: Index, queries: jax.Array, *, k: int) -> knn.Neighbors:
    """`search` from inside a jitted step, by a callback to the host."""
    shape = (queries.shape[0], k)
    like = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32, jnp.int32)]
    distances, ids, values = jax.pure_callback(functools.partial(_search, index, k), like, queries)
    return knn.Neighbors(distances, values, ids)


def _search(index: Index, k: int, queries) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    distances, ids = index.index.search(np.ascontiguousarray(queries, np.float32), k)
    found = ids >= 0
    # FAISS expands the square where BLAS serves it, and may return a small negative number.
    distances = np.where(found, np.maximum(distances, 0), np.inf).astype(np.float32)
    values = np.where(found, index.values[np.maximum(ids, 0)], 0) if len(index.values) else np.zeros_like(ids)
    return distances, np.where(found, ids, -1).astype(np.int32), values.astype(np.int32)
