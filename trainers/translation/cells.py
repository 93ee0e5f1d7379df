"""Which (cell, value) buckets a sentence pair fills: a function of that pair alone, to the last bit.

A row of a batched product may differ in its last bits with its place among the rows, and a key on the border of two
cells would then change its cell with the company it is in. So every pair goes through the model by itself, one
row of one compiled shape a length: what one pair more or less changes is that pair's buckets.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpriv import pq
from trainers.common import progress
from trainers.translation import batches, data
from trainers.translation import model as models


class Filled(NamedTuple):
    """The bucket of every target position. cells: uint8 [n, subspaces]. values, sentences: int32 [n]."""

    cells: np.ndarray
    values: np.ndarray
    sentences: np.ndarray


@functools.partial(jax.jit, static_argnums=0)
def _cells(graphdef, params, coarse: pq.Codebook, batch: batches.Batch):
    model = models.merge(graphdef, params)

    def alone(row: batches.Batch):
        one = jax.tree.map(lambda side: side[None], row)
        keys = model.decode(model.encode(one.source), one.source != models.PAD, one.inputs)[1]
        return pq.encode(coarse, keys[0])

    return jax.lax.map(alone, jax.tree.map(jnp.asarray, batch))


def fill(model: data.Model, coarse: pq.Codebook, examples: Sequence[batches.Example]) -> Filled:
    """Returns the buckets of these pairs; `sentences` counts the pairs in their order."""
    width = coarse.centroids.shape[0]
    parts = [Filled(np.zeros((0, width), np.uint8), np.zeros(0, np.int32), np.zeros(0, np.int32))]
    with progress.bar(total=len(examples), what="buckets", unit="pair") as bar:
        for index, batch in batches.in_order(examples, batch_tokens=1024):
            found = np.asarray(_cells(model.graphdef, model.params, coarse, batch))[: len(index)]
            there = batches.targets_of(index, batch)
            parts.append(Filled(found[there.real].astype(np.uint8), there.pieces, there.pairs))
            bar.update(len(index))
    return Filled(*(np.concatenate(column) for column in zip(*parts)))
