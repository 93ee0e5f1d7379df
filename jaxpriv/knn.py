"""Search a memory of (key, value) pairs and let its neighbours vote on the next token.

The nearest-neighbour translation of Khandelwal et al. (2021, arXiv:2010.00710) and its adaptive form (Zheng
et al. 2021, arXiv:2105.13022), as federated nearest-neighbour translation uses them. Distances are squared
Euclidean.

Nothing here is private: a store holds what it was given.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from jaxpriv import pq

Scalar = float | int | np.floating | np.integer | Float[Array, ""] | Int[Array, ""]

BLOCK_SIZE = 16  # entries whose best score stands for all of them in the first pass
_TINY = float(np.finfo(np.float32).tiny)
SPARE_BLOCKS = 4  # blocks searched beyond the k best, so that a rounding error in a score drops no neighbour


class Store(NamedTuple):
    """Uncompressed entries, centred.

    keys: the keys minus `centre`; float32, or a narrower type to save memory.
    values: token ids.
    offsets: squared norm of each centred key; inf marks padding, which is never retrieved.
    centre: subtracted from keys and queries, so that a common shift costs no digits.
    """

    keys: Float[Array, "*stores entries dim"]
    values: Int[Array, "*stores entries"]
    offsets: Float[Array, "*stores entries"]
    centre: Float[Array, "*stores dim"]


class CodedStore(NamedTuple):
    """Product-quantized entries: what leaves a client.

    codes: one byte a subspace.
    centroids: the codebook minus `centre`.
    """

    codes: UInt8[Array, "*stores entries subspaces"]
    values: Int[Array, "*stores entries"]
    offsets: Float[Array, "*stores entries"]
    centre: Float[Array, "*stores dim"]
    centroids: Float[Array, "*stores subspaces centroids subdim"]


class Neighbors(NamedTuple):
    """The nearest entries, nearest first; equal distances in order of id.

    distances: squared Euclidean, never negative; inf where the store had fewer entries than k.
    values: token ids (0 at missing slots, which carry no mass).
    ids: rows of the store; -1 at missing slots.
    """

    distances: Float[Array, "*batch k"]
    values: Int[Array, "*batch k"]
    ids: Int[Array, "*batch k"]


def build(
    keys: Float[Array, "entries dim"],
    values: Int[Array, " entries"],
    *,
    mask: Bool[Array, " entries"] | None = None,
    centre: Float[Array, " dim"] | None = None,
) -> Store:
    """Makes a searchable store; entries where `mask` is False are never retrieved.

    `centre` is the mean of the real keys unless given; any vector near the keys will do. Stores of several
    clients, padded to one length, may be built and searched under `vmap`. Keys must be finite and of one scale:
    beside one that is 10^8 times as long the others are no longer told apart in float32.
    """
    real = jnp.ones(keys.shape[:1], bool) if mask is None else mask
    clean = jnp.where(real[:, None], keys, 0)
    if centre is None:
        # In two steps: the mean of large keys rounds, the mean of what remains hardly does.
        count = jnp.maximum(real.sum(), 1).astype(jnp.float32)
        centre = clean.sum(0, dtype=jnp.float32) / count
        centre += jnp.where(real[:, None], clean - centre[None], 0).sum(0, dtype=jnp.float32) / count
    centred = jnp.where(real[:, None], clean - centre[None], 0).astype(keys.dtype)
    offsets = jnp.where(real, jnp.sum(jnp.square(centred.astype(jnp.float32)), -1), jnp.inf)
    return Store(centred, values, offsets, centre.astype(jnp.float32))


def build_coded(
    codebook: pq.Codebook,
    codes: UInt8[Array, "entries subspaces"],
    values: Int[Array, " entries"],
    *,
    mask: Bool[Array, " entries"] | None = None,
) -> CodedStore:
    """Makes a searchable store of codes: distances run from the query to the decoded key (asymmetric, Jégou
    2011).

    For PCA codes use `build` on `pq.decode`.
    """
    centre = codebook.centroids.mean(1)
    centroids = codebook.centroids - centre[:, None]
    norms = jnp.square(centroids).sum(-1)
    offsets = pq.lookup(norms, codes)
    if mask is not None:
        offsets = jnp.where(mask, offsets, jnp.inf)
    return CodedStore(codes, values, offsets, centre.reshape(-1), centroids)


def search(
    store: Store | CodedStore,
    queries: Float[Array, "batch dim"],
    *,
    k: int,
    chunk_size: int = 4096,
) -> Neighbors:
    """Returns the k nearest entries of every query (for a coded store: nearest decoded entries), up to float32 scores.

    First pass: |x|^2 - 2qx by matrix products over `chunk_size` entries at a time, keeping only the best
    score of every block of 16 entries. Second pass: the k + 4 best blocks, by direct differences of centred
    keys, whose rounding error goes with the distance and not with the square of the norms.

    What the rounding of scores can cost: the i-th distance returned exceeds the true i-th smallest by at most
    2^-23 (dim + 3) r^2, where r^2 = max |x|^2 + 2 |q| |x|, norms from the centre (measured: a fiftieth of that). So
    the search is exact where neighbours are told apart by more, as a model's keys are, or no more than k + 4 blocks
    tie to that precision. It is not for clusters that are small and lie far from their common centre: of two, each
    of standard deviation 1, at +-30 the search loses nothing; at +-1,000 a third of the 8 nearest in 32 dimensions,
    three quarters in 192. Search such a store cluster by cluster, each with its own centre, and `merge`.

    Memory beside the store: batch x entries / 16 floats; a store larger than memory is searched in parts
    whose results `merge` joins. Works under jit, and under vmap over stores of one size. `k` may exceed the
    store.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k=}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size=}")
    batch, entries = queries.shape[0], store.values.shape[-1]
    if entries == 0:
        return _missing(batch, k)
    queries = queries.astype(jnp.float32) - store.centre[None]
    chunk = max(chunk_size // BLOCK_SIZE, 1) * BLOCK_SIZE
    store = _pad(store, -entries % BLOCK_SIZE if entries < chunk else 0)
    rows = store.values.shape[-1]
    chunk = min(rows, chunk)
    blocks = chunk // BLOCK_SIZE
    num_chunks = -(-rows // chunk)

    def first_pass(_, index):
        # The last chunk ends with the store, so it may start before its turn: rows seen already are masked.
        start = jnp.minimum(index * chunk, rows - chunk)
        keys, offsets = _slice(store, start, chunk)
        offsets = jnp.where(start + jnp.arange(chunk) >= index * chunk, offsets, jnp.inf)
        scores = offsets[:, None] - 2 * jnp.matmul(keys, queries.T, precision=jax.lax.Precision.HIGHEST)
        return None, scores.reshape(blocks, BLOCK_SIZE, batch).min(1)

    _, best = jax.lax.scan(first_pass, None, jnp.arange(num_chunks, dtype=jnp.int32))
    best = best.reshape(num_chunks * blocks, batch).T
    _, chosen = jax.lax.top_k(-best, min(k + SPARE_BLOCKS, best.shape[1]))
    chosen = jnp.sort(chosen, -1).astype(jnp.int32)  # by id, so that equal distances come out in order of id

    turn = chosen // blocks * chunk
    first = jnp.minimum(turn, rows - chunk) + chosen % blocks * BLOCK_SIZE
    ids = first[..., None] + jnp.arange(BLOCK_SIZE, dtype=jnp.int32)[None, None]
    fresh = (ids >= turn[..., None]).reshape(batch, -1)
    ids = ids.reshape(batch, -1)

    def second_pass(query, ids, fresh):
        distances = jnp.square(query[None] - take(store, ids)).sum(-1)
        real = fresh & jnp.isfinite(store.offsets[ids]) & ~jnp.isnan(distances)
        return jnp.where(real, distances, jnp.inf)

    distances = jax.lax.map(lambda a: second_pass(*a), (queries, ids, fresh), batch_size=32)
    values = store.values[ids]
    return top(Neighbors(distances, values, jnp.where(jnp.isfinite(distances), ids, -1)), k=k)


def among(
    store: Store | CodedStore,
    queries: Float[Array, "batch dim"],
    ids: Int[Array, "batch candidates"],
    *,
    k: int,
) -> Neighbors:
    """Returns the exact k nearest of the rows `ids` of each query, none twice; -1 stands for no row.

    The second pass of searches whose first is approximate. Distances are those of `search`.
    """
    ids = jnp.sort(ids, -1)  # so that equal distances come out in order of id
    rows = jnp.maximum(ids, 0)
    queries = queries.astype(jnp.float32) - store.centre[None]
    distances = jnp.square(queries[:, None] - take(store, rows)).sum(-1)
    real = (ids >= 0) & jnp.isfinite(store.offsets[rows]) & ~jnp.isnan(distances)
    return top(Neighbors(jnp.where(real, distances, jnp.inf), store.values[rows], ids), k=k)


def take(store: Store | CodedStore, ids: Int[Array, "*batch"]) -> Float[Array, "*batch dim"]:
    """Returns the (decoded) keys of these rows, minus the centre."""
    if isinstance(store, CodedStore):
        return pq.decode(pq.Codebook(store.centroids), store.codes[ids])
    return store.keys[ids].astype(jnp.float32)


def top(candidates: Neighbors, *, k: int) -> Neighbors:
    """Keeps the k nearest candidates, the earlier of equal ones; fills up with missing slots."""
    batch, width = candidates.distances.shape
    if width < k:
        fill = _missing(batch, k - width)
        candidates = Neighbors(*(jnp.concatenate([a, b], -1) for a, b in zip(candidates, fill)))
    _, order = jax.lax.top_k(-candidates.distances, k)
    distances, values, ids = (jnp.take_along_axis(a, order, -1) for a in candidates)
    found = jnp.isfinite(distances)
    return Neighbors(distances, jnp.where(found, values, 0), jnp.where(found, ids, -1))


def merge(first: Neighbors, second: Neighbors, *, k: int) -> Neighbors:
    """Joins the neighbours of two parts of a store; the first part's win ties. Ids are kept: see `shift`."""
    return top(Neighbors(*(jnp.concatenate([a, b], -1) for a, b in zip(first, second))), k=k)


def shift(neighbors: Neighbors, start: Scalar) -> Neighbors:
    """Moves ids by the row at which this part of the store starts; missing slots stay -1."""
    return neighbors._replace(ids=jnp.where(neighbors.ids >= 0, neighbors.ids + start, -1))


def pad(store: Store | CodedStore, entries: int) -> Store | CodedStore:
    """Pads one store to `entries` rows that are never retrieved."""
    have = store.values.shape[0]
    if entries < have:
        raise ValueError(f"entries must be at least the store's {have} rows, got {entries=}")
    return _pad(store, entries - have)


def search_sharded(
    store: Store | CodedStore,
    queries: Float[Array, "batch dim"],
    *,
    k: int,
    mesh: jax.sharding.Mesh,
    axis: str = "clients",
    chunk_size: int = 4096,
) -> Neighbors:
    """Returns what `search` returns, from a store whose rows are spread over the devices of a mesh axis.

    Every device searches its rows; the k best of each are gathered and merged. `pad` the store to a
    multiple of the number of devices and place it with `shard`. Queries are replicated.
    """
    devices = mesh.shape[axis]
    entries = store.values.shape[0]
    if entries % devices:
        raise ValueError(f"{entries} rows do not divide over {devices} devices: use knn.pad first")
    specs = _row_specs(store, axis)

    def local(store, queries):
        found = search(store, queries, k=k, chunk_size=chunk_size)
        found = shift(found, jax.lax.axis_index(axis) * (entries // devices))
        gathered = jax.lax.all_gather(found, axis, axis=1, tiled=True)
        return top(gathered, k=k)

    spread = jax.shard_map(local, mesh=mesh, in_specs=(specs, jax.P()), out_specs=jax.P(), check_vma=False)
    return spread(store, queries)


def shard(store: Store | CodedStore, mesh: jax.sharding.Mesh, axis: str = "clients") -> Store | CodedStore:
    """Places a store's rows over the devices of a mesh axis; codebook and centre go to all of them."""
    specs = _row_specs(store, axis)
    return jax.device_put(store, jax.tree.map(lambda s: jax.NamedSharding(mesh, s), specs))


def to_log_probs(
    neighbors: Neighbors,
    *,
    vocab_size: int,
    temperature: Scalar,
) -> Float[Array, "batch vocab"]:
    """Returns log p_kNN(y), with p(y) proportional to the sum over neighbours of value y of exp(-distance /
    T).

    A token that no neighbour has gets -inf; without any neighbour the whole row is -inf. T = inf weighs all
    retrieved neighbours alike; a traced one that is not positive counts as the smallest normal float32. Values outside
    the vocabulary are dropped, and their mass with them: stores should refuse them.
    """
    log_share = _log_normalize(_energies(neighbors, temperature))
    return _scatter(log_share, neighbors.values, vocab_size)


def interpolate(
    log_nmt: Float[Array, "batch vocab"], log_knn: Float[Array, "batch vocab"], *, weight: Scalar
) -> Float[Array, "batch vocab"]:
    """Returns log((1 - weight) p_NMT + weight p_kNN); where there was no neighbour, log p_NMT (Khandelwal
    2021).

    `weight` (the papers' lambda) is in [0, 1]; a traced one is clipped to it.
    """
    if _is_known(weight) and not 0 <= float(weight) <= 1:
        raise ValueError(f"weight must be in [0, 1], got {weight=}")
    found = jnp.any(log_knn > -jnp.inf, -1, keepdims=True)
    weight = jnp.clip(jnp.asarray(weight, jnp.float32), 0, 1)
    mixed = _log_add(jnp.log1p(-weight) + log_nmt, jnp.log(weight) + log_knn)
    return jnp.where(found, mixed, log_nmt)


def num_choices(k: int) -> int:
    """How many neighbour counts the adaptive mixture chooses from: S = {0} and the powers of two up to k."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k=}")
    return 1 + k.bit_length()


def choices(k: int) -> tuple[int, ...]:
    """Returns S, in the order of the Meta-k network's outputs: 0, 1, 2, 4, ... up to k."""
    return (0, *(2**i for i in range(num_choices(k) - 1)))


def adaptive(
    log_nmt: Float[Array, "batch vocab"],
    neighbors: Neighbors,
    log_choice: Float[Array, "batch choices"],
    *,
    temperature: Scalar,
) -> Float[Array, "batch vocab"]:
    """Returns log p(y) = log(p(0) p_NMT(y) + sum over k in S, k > 0, of p(k) p_kNN_k(y)) (Zheng et al.
    2021, eq. 6).

    `log_choice` is log p(k) over `choices(K)`. p_kNN_k uses the k nearest only: farther ones are masked
    with -inf, so that one at distance 0 cannot slip through. Missing neighbours carry no mass; with none at
    all, p = p_NMT.
    """
    num_neighbors = neighbors.distances.shape[-1]
    if log_choice.shape[-1] != num_choices(num_neighbors):
        raise ValueError(
            f"log_choice must have {num_choices(num_neighbors)} columns for {num_neighbors} neighbours, "
            f"got {log_choice.shape[-1]}"
        )
    energies = _energies(neighbors, temperature)[:, None]
    sizes = jnp.asarray(choices(num_neighbors)[1:])
    near = (jnp.arange(num_neighbors)[None] < sizes[:, None])[None]
    log_share = _log_normalize(jnp.where(near, energies, -jnp.inf))
    log_mass = _log_sum(log_choice[:, 1:, None] + log_share, 1)
    found = jnp.any(neighbors.ids >= 0, -1, keepdims=True)
    kept = log_nmt + jnp.where(found, log_choice[:, :1], 0)
    # Only the neighbours' tokens need the sum; logaddexp over a vocabulary costs as much as a decoding step.
    total, columns = _by_value(log_mass, neighbors.values, log_nmt.shape[-1])
    near = jnp.take_along_axis(kept, neighbors.values, -1, mode="clip")
    rows = jnp.arange(kept.shape[0])[:, None]
    return kept.at[rows, columns].set(_log_add(near, total), mode="drop")


class MetaK(NamedTuple):
    """Weights of the Meta-k network: 2K features, a tanh layer, logits over `choices(K)`."""

    hidden_weights: Float[Array, "features hidden"]
    hidden_bias: Float[Array, " hidden"]
    out_weights: Float[Array, "hidden choices"]
    out_bias: Float[Array, " choices"]


def init_meta(key: Key[Array, ""], *, k: int, hidden: int = 32) -> MetaK:
    """Draws a Meta-k network, public weights.

    Distances, which are large, start with smaller weights (gain 0.01) than counts (gain 0.1).
    """
    first, second, third = jax.random.split(key, 3)
    xavier = functools.partial(jax.nn.initializers.variance_scaling, mode="fan_avg", distribution="normal")
    return MetaK(
        jnp.concatenate([xavier(0.01**2)(first, (k, hidden)), xavier(0.1**2)(second, (k, hidden))]),
        jnp.zeros(hidden),
        xavier(1.0)(third, (hidden, num_choices(k))),
        jnp.zeros(num_choices(k)),
    )


def meta_log_probs(meta: MetaK, neighbors: Neighbors) -> Float[Array, "batch choices"]:
    """Returns log p(k) over `choices(K)`, from distances and distinct counts; without a neighbour p(0) is 1."""
    hidden = jnp.tanh(features(neighbors) @ meta.hidden_weights + meta.hidden_bias[None])
    log_choice = jax.nn.log_softmax(hidden @ meta.out_weights + meta.out_bias[None], -1)
    none = jnp.where(jnp.arange(log_choice.shape[-1]) == 0, 0.0, -jnp.inf)
    return jnp.where(jnp.any(neighbors.ids >= 0, -1, keepdims=True), log_choice, none[None])


def features(neighbors: Neighbors) -> Float[Array, "batch features"]:
    """Returns [d_1 .. d_K ; c_1 .. c_K], c_i the number of distinct values among the first i.

    Every token id counts, 0 too. A missing slot repeats the largest distance present (0 if none) and adds
    no value.
    """
    found = neighbors.ids >= 0
    present = jnp.where(found, neighbors.distances, 0)
    distances = jnp.where(found, present, present.max(-1, keepdims=True))
    new = _first_of_value(neighbors.values, found)
    return jnp.concatenate([distances, jnp.cumsum(new, -1).astype(jnp.float32)], -1)


def _is_known(number: Scalar) -> bool:
    """Whether a number can be checked: python's, numpy's or an array's that no transformation traces."""
    return not isinstance(number, core.Tracer)


def _energies(neighbors: Neighbors, temperature: Scalar) -> Array:
    # Below float32's smallest normal number a device may read 0.
    if _is_known(temperature) and not float(temperature) >= _TINY:
        raise ValueError(f"temperature must be positive, at least {_TINY:.3g}, got {temperature=}")
    found = neighbors.ids >= 0
    # Relative to the nearest, so that T = inf (0 x large) and large distances keep their digits.
    nearest = jnp.min(neighbors.distances, -1, keepdims=True, initial=jnp.inf)
    excess = jnp.where(found, neighbors.distances - jnp.where(jnp.isfinite(nearest), nearest, 0), 0)
    return jnp.where(found, -excess / jnp.maximum(temperature, _TINY), -jnp.inf)


def _first_of_value(values: Array, counts: Array) -> Array:
    """True at the first slot of each distinct value among those that count."""
    same = values[:, :, None] == values[:, None, :]
    earlier = jnp.tri(values.shape[-1], k=-1, dtype=bool)[None] & counts[:, None, :]
    return counts & ~jnp.any(same & earlier, -1)


def _by_value(log_mass: Array, values: Array, vocab_size: int) -> tuple[Array, Array]:
    """`(log of the summed mass of each slot's value, column to write it to)`.

    The column is the value where it occurs first and `vocab_size` elsewhere: no index twice.
    """
    same = values[:, :, None] == values[:, None, :]
    total = _log_sum(jnp.where(same, log_mass[:, None, :], -jnp.inf), -1)
    write = _first_of_value(values, jnp.isfinite(log_mass)) & (values >= 0)
    return total, jnp.where(write, values, vocab_size)


def _scatter(log_mass: Array, values: Array, vocab_size: int) -> Array:
    """Log of the summed mass of each value, -inf where there is none."""
    total, columns = _by_value(log_mass, values, vocab_size)
    out = jnp.full((values.shape[0], vocab_size), -jnp.inf)
    return out.at[jnp.arange(values.shape[0])[:, None], columns].set(total, mode="drop")


def _log_normalize(x: Array) -> Array:
    """log_softmax over the last axis; where everything is -inf it stays so. Gradients are finite."""
    some = jnp.any(x > -jnp.inf, -1, keepdims=True)
    return jnp.where(x > -jnp.inf, jax.nn.log_softmax(jnp.where(some, x, 0), -1), -jnp.inf)


def _log_sum(x: Array, axis: int) -> Array:
    """logsumexp whose gradients are finite where everything is -inf."""
    some = jnp.any(x > -jnp.inf, axis, keepdims=True)
    total = jax.nn.logsumexp(jnp.where(some, x, 0), axis)
    return jnp.where(jnp.squeeze(some, axis), total, -jnp.inf)


def _log_add(x: Array, y: Array) -> Array:
    """logaddexp whose gradients are finite where y is -inf."""
    some = y > -jnp.inf
    return jnp.where(some, jnp.logaddexp(x, jnp.where(some, y, 0)), x)


def _missing(batch: int, k: int) -> Neighbors:
    shape = (batch, k)
    return Neighbors(jnp.full(shape, jnp.inf), jnp.zeros(shape, jnp.int32), jnp.full(shape, -1, jnp.int32))


def _pad(store, rows: int):
    if not rows:
        return store

    def widen(a, fill):
        return jnp.pad(a, [(0, rows)] + [(0, 0)] * (a.ndim - 1), constant_values=fill)

    data = {name: widen(getattr(store, name), 0) for name in ("keys", "codes") if hasattr(store, name)}
    return store._replace(values=widen(store.values, 0), offsets=widen(store.offsets, np.inf), **data)


def _slice(store, start, size: int) -> tuple[Array, Array]:
    def cut(a):
        return jax.lax.dynamic_slice_in_dim(a, start, size)

    if isinstance(store, CodedStore):
        keys = pq.decode(pq.Codebook(store.centroids), cut(store.codes))
    else:
        keys = cut(store.keys).astype(jnp.float32)
    return keys, cut(store.offsets)


def _row_specs(store, axis: str):
    rows = ("keys", "codes", "values", "offsets")
    return type(store)(*(jax.P(axis) if name in rows else jax.P() for name in store._fields))
