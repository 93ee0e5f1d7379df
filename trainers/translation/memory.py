"""From a memory on disk or at hand to what decoding searches: all of it, its inverted file, a shadow, or FAISS."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Literal

import jax
import numpy as np

from jaxpriv import inverted, pq
from trainers.common.errors import InputError
from trainers.translation import data, datastore, facts, faiss_engine, retrieval

Search = Literal["exact", "inverted", "shadow", "faiss"]
SMALL = 16_384
"""Records that are searched exactly with `inverted`, which is as fast."""
PROBES = 16
"""Cells of an inverted file that a query looks into: 96 % of the 8 nearest of 178,000 records of 192 numbers."""

_invert = jax.jit(inverted.build)


def coded(
    model: data.Model, codebook: pq.Codebook | pq.Projection | None, keys: np.ndarray, values: np.ndarray
) -> datastore.Datastore:
    """The memory of these records, K-encrypted, in the process' own memory."""
    form = facts.facts_of(model, codebook)
    rows = datastore.encode(form, codebook, keys)
    return datastore.Datastore(pathlib.Path("memory"), form, rows, values.astype(np.int32), None, codebook)


def in_order(memory: datastore.Datastore) -> datastore.Datastore:
    """The same records in an order that depends on them alone.

    Of equally near records the first ones are found, so that translations would else depend on the shuffle.
    """
    parts = [np.ascontiguousarray(column).view(np.uint8) for column in (memory.keys, memory.values[:, None])]
    rows = np.concatenate(parts, 1)
    order = np.argsort(rows.view(f"V{rows.shape[1]}")[:, 0]) if len(rows) else np.zeros(0, np.int64)
    weights = None if memory.weights is None else memory.weights[order]
    return dataclasses.replace(memory, keys=memory.keys[order], values=memory.values[order], weights=weights)


def searchable(memory: datastore.Datastore, search: Search, *, components: int, rows: int = 0) -> Any:
    """A memory as `retrieval.find` takes it.

    exact: every record is compared. inverted: those of the blocks nearest to the query, if there are more than `SMALL`.
    shadow: every record in `components` principal components, the nearest ones exactly. faiss: the records of the
    `PROBES` cells nearest to the query; each cell holds about sqrt(records) / 4.
    Rows are padded to few numbers, at least `rows`, so that memories of like size share a compiled program, which takes
    longer to make than to run.
    """
    memory = in_order(memory)
    if search == "faiss":
        lists = max(1, min(int(4 * memory.count**0.5), memory.count // 40))
        built = faiss_engine.build(memory, lists=lists, probes=min(PROBES, lists))
        return retrieval.Faiss(built)
    store = datastore.on_device(memory)
    if search == "shadow":
        if components < 1:
            raise InputError(f"--shadow must be at least 1 with --search shadow, got {components}")
        if memory.count > components:
            return retrieval.padded(retrieval.with_shadow(store, components=components), rows=rows)
    padded = retrieval.padded(store, rows=rows)
    return _invert(padded) if search == "inverted" and max(rows, memory.count) > SMALL else padded
