"""Search a large store approximately: look only into the blocks of entries nearest to a query.

Inverted lists (Jégou, Douze and Schmid 2011, "Product quantization for nearest neighbor search", section IV):
k-means puts like entries into cells. Here a cell is cut into blocks of at most `block_size` entries, each with a
mean of its own, so that all shapes are static; and what is scanned is a coarse copy of the entries, their leading
principal components in one byte each. The best of the scan are compared exactly.

Nothing here is private: an index holds what its store holds.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from jaxpriv import knn, pq

SAMPLE = 32  # entries a cell that k-means sees
ITERATIONS = 4  # of k-means; more find no more
TILE = 512  # vectors compared with all centroids at a time
GROUP = 16  # components summed at a time: longer sums of gathers spill registers


class Index(NamedTuple):
    """A store and its entries in blocks of like ones.

    projection: to the components; of centred keys.
    means: of each block's entries. offsets: squared norm of each mean; inf where a block is empty.
    coarse: entries minus their block's mean, in units of the block's `scale`; entries along the last axis, along which
      processors work.
    norms: what the scan adds to the distance between query and mean; inf where a slot is empty.
    ids: rows of the store; -1 where a slot is empty.
    """

    store: knn.Store | knn.CodedStore
    projection: pq.Projection
    means: Float[Array, "*stores blocks components"]
    offsets: Float[Array, "*stores blocks"]
    coarse: Int8[Array, "*stores blocks components block_size"]
    scale: Float[Array, "*stores blocks"]
    norms: Float[Array, "*stores blocks block_size"]
    ids: Int[Array, "*stores blocks block_size"]


def build(
    store: knn.Store | knn.CodedStore,
    *,
    components: int | None = None,
    num_cells: int | None = None,
    block_size: int = 64,
) -> Index:
    """Sorts the entries of a store into blocks; the same for the same store.

    Jit it, and vmap it over stores of one size: padding rows land in no block. Takes some
    2 x num_cells x entries x components multiply-adds: 4 s on one core for 590,000 keys of 192 numbers.

    Args:
      components: of the coarse copy; half of the dimension unless given.
      num_cells: of k-means; unless given, 3 sqrt(entries), and in small stores as many as get 40 entries each. Of a
        padded store only the real entries count.
      block_size: most entries a block. Cells are cut across the direction in which they are longest.
    """
    rows, dim = store.values.shape[-1], store.centre.shape[-1]
    components = max(1, dim // 2) if components is None else components
    real = jnp.isfinite(store.offsets)
    count = real.sum()
    if num_cells is None:
        num_cells = max(1, int(min(3 * rows**0.5, rows / 40)))
        used = jnp.clip(jnp.minimum(3 * jnp.sqrt(count), count / 40).astype(jnp.int32), 1, num_cells)
    else:
        used = jnp.int32(num_cells)
    if not 1 <= components <= min(dim, rows):
        raise ValueError(f"components must be in [1, {min(dim, rows)}], got {components=}")
    if not 1 <= num_cells <= rows:
        raise ValueError(f"num_cells must be in [1, {rows}], got {num_cells=}")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size=}")
    order = jnp.argsort(~real, stable=True)

    def sample(size):
        """Rows of so many real entries, evenly spread."""
        return order[_spread(min(size, rows), count)]

    projection = pq.fit_pca(knn.take(store, sample(20_000)), num_components=components)

    def coarsen(row):
        return pq.project(projection, knn.take(store, row[None]))[0]

    vectors = jax.lax.map(coarsen, jnp.arange(rows), batch_size=4096)
    points = vectors[sample(SAMPLE * num_cells)]
    nearest = functools.partial(_nearest, used=used)
    centroids = points[jnp.minimum(jnp.arange(num_cells) * (len(points) // used), len(points) - 1)]
    centroids = jax.lax.fori_loop(0, ITERATIONS, lambda _, c: pq.lloyd(points.T, c, nearest), centroids)
    cells = jnp.where(real, nearest(vectors.T, centroids)[0], num_cells)
    ids = _blocks(vectors, centroids, cells, block_size)

    def block(ids):
        """Mean, coarse entries and what goes with them."""
        present = ids >= 0
        members = jnp.where(present[:, None], vectors[jnp.maximum(ids, 0)], 0)
        mean = members.sum(0) / jnp.maximum(present.sum(), 1)
        away = jnp.where(present[:, None], members - mean[None], 0)
        scale = jnp.maximum(jnp.abs(away).max(), 1e-30) / 127
        coarse = jnp.round(away / scale)
        norms = jnp.square(scale * coarse).sum(-1) + 2 * scale * (coarse * mean[None]).sum(-1)
        offset = jnp.where(present.any(), jnp.square(mean).sum(), jnp.inf)
        return mean, offset, coarse.T.astype(jnp.int8), scale, jnp.where(present, norms, jnp.inf)

    means, offsets, coarse, scale, norms = jax.lax.map(block, ids, batch_size=256)
    return Index(store, projection, means, offsets, coarse, scale, norms, ids)


def search(
    index: Index,
    queries: Float[Array, "batch dim"],
    *,
    k: int,
    probes: int | None = None,
    candidates: int | None = None,
) -> knn.Neighbors:
    """Returns the k nearest entries of the `probes` nearest blocks, by exact distance among the `candidates`
    nearest by the coarse copy.

    As `knn.search` with all blocks and entries as candidates, whose number is 4 k unless given; that of probes is
    then 3/4 sqrt(blocks), and at least 32. Works under jit, vmap over stores and queries, and with blocks or queries
    spread over devices.
    """
    candidates = 4 * k if candidates is None else candidates
    if not 1 <= k <= candidates:
        raise ValueError(f"candidates must be at least k, and k at least 1, got {k=} and {candidates=}")
    num_blocks, components, block_size = index.coarse.shape
    probes = max(32, round(0.75 * num_blocks**0.5)) if probes is None else probes
    if probes < 1:
        raise ValueError(f"probes must be at least 1, got {probes=}")
    batch, probes = queries.shape[0], min(probes, num_blocks)
    centred = queries.astype(jnp.float32) - index.store.centre[None]
    centred = pq.project(index.projection, centred)
    products = jnp.matmul(centred, index.means.T, precision=jax.lax.Precision.HIGHEST)
    near, blocks = jax.lax.top_k(2 * products - index.offsets[None], probes)

    def scan(inputs):
        """Scores of the entries in a query's blocks: squared distances, but for the query's norm."""
        query, near, blocks = inputs
        products = jnp.zeros((probes, block_size))
        # A gather for each component, which a CPU fuses into sums along the entries of a block; gathering whole
        # blocks first copies them number by number, twenty times slower.
        for first in range(0, components, GROUP):
            part = range(first, min(first + GROUP, components))
            products += sum(query[c] * _pick(index.coarse, blocks, c) for c in part)
        return index.norms[blocks] - near[:, None] - 2 * index.scale[blocks][:, None] * products

    # In a loop, whose results the compiler must store as they are; it would fold the next line's reshape into the
    # sums, which then leave the blocks' order and run four times slower.
    scores = jax.lax.map(scan, (centred, near, blocks), batch_size=4)
    _, best = jax.lax.top_k(-scores.reshape(batch, -1), min(candidates, probes * block_size))
    chosen = jnp.take_along_axis(blocks, best // block_size, -1)
    return knn.among(index.store, queries, index.ids[chosen, best % block_size], k=k)


def _pick(coarse: Array, blocks: Array, component: int) -> Array:
    return coarse.at[blocks, component].get(mode="promise_in_bounds").astype(jnp.float32)


def _spread(size: int, count: Array) -> Int[Array, " size"]:
    """So many of the numbers below `count`, evenly spread, in order; 0 if there are none."""
    return jnp.linspace(0, jnp.maximum(count - 1, 0), size).astype(jnp.int32)


def _nearest(
    points: Float[Array, "dim n"], centroids: Float[Array, "centroids dim"], used: Int[Array, ""]
) -> tuple[Int[Array, " n"], Float[Array, " n"]]:
    """Index of, and squared distance to, the nearest of the first `used` centroids, by matrix products over some
    points at a time.

    Two reductions in place of an argmin, which a CPU does not vectorise. Of long vectors a rounding error may name
    the second nearest, which is as good.
    """
    num_centroids, n = len(centroids), points.shape[1]
    numbers = jnp.arange(num_centroids, dtype=jnp.int32)[:, None]
    offsets = jnp.where(numbers < used, jnp.square(centroids).sum(-1, keepdims=True), jnp.inf)

    def tile(points):
        scores = offsets - 2 * jnp.matmul(centroids, points, precision=jax.lax.Precision.HIGHEST)
        best = scores.min(0)
        first = jnp.where(scores == best[None], numbers, num_centroids - 1).min(0)
        return first, jnp.maximum(best + jnp.square(points).sum(0), 0)

    tiles = jnp.pad(points, ((0, 0), (0, -n % TILE))).reshape(points.shape[0], -1, TILE)
    index, error = jax.lax.map(tile, tiles.transpose(1, 0, 2))
    return index.reshape(-1)[:n], error.reshape(-1)[:n]


def _blocks(
    vectors: Float[Array, "rows components"],
    centroids: Float[Array, "cells components"],
    cells: Int[Array, " rows"],
    block_size: int,
) -> Int[Array, "blocks block_size"]:
    """Rows by block, -1 where a block is not full; a cell of `len(centroids)` is none.

    A cell's rows are sorted along its longest direction (a step of power iteration from the component of largest
    variance) and cut into as few blocks as hold them, of equal size.
    """
    rows, num_cells = len(cells), len(centroids)
    away = vectors - centroids[jnp.minimum(cells, num_cells - 1)]

    def by_cell(a):
        return jnp.zeros((num_cells + 1, *a.shape[1:]), a.dtype).at[cells].add(a)

    longest = jnp.argmax(by_cell(jnp.square(away)), -1)
    lead = jnp.take_along_axis(away, longest[cells][:, None], 1)
    along = (away * by_cell(away * lead)[cells]).sum(-1)
    order = jnp.lexsort((along, cells))
    cells = cells[order]
    count = by_cell(jnp.ones(rows, jnp.int32))[:num_cells]
    parts = -(-count // block_size)
    first_row, first_block = jnp.cumsum(count) - count, jnp.cumsum(parts) - parts
    most = -(-count // jnp.maximum(parts, 1))
    real, cells = cells < num_cells, jnp.minimum(cells, num_cells - 1)
    rank = jnp.arange(rows, dtype=jnp.int32) - first_row[cells]
    size = jnp.maximum(most[cells], 1)
    place = (first_block[cells] + rank // size) * block_size + rank % size
    num_blocks = rows // block_size + num_cells
    slots = jnp.full(num_blocks * block_size, -1, jnp.int32)
    place = jnp.where(real, place, len(slots))
    return slots.at[place].set(order.astype(jnp.int32), mode="drop").reshape(num_blocks, block_size)
