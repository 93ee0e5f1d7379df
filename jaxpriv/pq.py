"""Compress vectors to a few bytes each, so that distances to them stay computable.

Product quantization (Jégou, Douze and Schmid 2011, "Product quantization for nearest neighbor search"): the
vector is cut into subspaces and each part replaced by the index of its nearest centroid. Principal
components, the other distortion that federated nearest-neighbour translation names, stand beside it.

Compression, not secrecy: codebook and encoder are deterministic and shared, so anyone who holds them can
encode a guess and compare. The privacy guarantee of a code is "epsilon: none".
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt8

MAX_CENTROIDS = 256  # a code is one byte


class Codebook(NamedTuple):
    """centroids: one table a subspace; the subspaces are consecutive slices of the vector."""

    centroids: Float[Array, "subspaces centroids subdim"]


class Projection(NamedTuple):
    """mean: what is subtracted; components: orthonormal rows, most variance first."""

    mean: Float[Array, " dim"]
    components: Float[Array, "components dim"]


def fit(
    key: Key[Array, ""],
    vectors: Float[Array, "n dim"],
    *,
    num_subspaces: int,
    num_centroids: int = MAX_CENTROIDS,
    num_iterations: int = 25,
    max_points: int = 65_536,
) -> Codebook:
    """Fits one k-means a subspace (Lloyd's iterations from a random sample), on at most `max_points` of the
    vectors.

    A centroid that loses all its points moves to a point far from its own centroid, so none is wasted while
    errors remain; all centroids stay finite for finite vectors. Same key, same codebook.

    Raises ValueError if there are fewer vectors than centroids, or the subspaces do not divide the dimension.
    """
    n, dim = vectors.shape
    if num_subspaces < 1 or dim % num_subspaces:
        raise ValueError(f"num_subspaces must divide the dimension {dim}, got {num_subspaces=}")
    if not 1 <= num_centroids <= MAX_CENTROIDS:
        raise ValueError(f"num_centroids must be in [1, {MAX_CENTROIDS}], got {num_centroids=}")
    if n < num_centroids:
        raise ValueError(
            f"{n} vectors cannot place {num_centroids} centroids: give more or ask for at most {n}"
        )
    if max_points < num_centroids:
        raise ValueError(f"max_points must be at least {num_centroids=}, got {max_points=}")
    sample_key, start_key = jax.random.split(key)
    if n > max_points:
        vectors = vectors[jax.random.choice(sample_key, n, (max_points,), replace=False)]
    parts = _parts(vectors.astype(jnp.float32), num_subspaces)

    def subspace(inputs):
        key, points = inputs
        start = points[:, jax.random.choice(key, points.shape[1], (num_centroids,), replace=False)].T
        return jax.lax.fori_loop(0, num_iterations, lambda _, c: lloyd(points, c, _nearest), start)

    return Codebook(jax.lax.map(subspace, (jax.random.split(start_key, num_subspaces), parts)))


def encode(codebook: Codebook, vectors: Float[Array, "n dim"]) -> UInt8[Array, "n subspaces"]:
    """Returns the index of the nearest centroid in every subspace; the lowest of equally near ones."""
    parts = _parts(vectors.astype(jnp.float32), codebook.centroids.shape[0])
    codes = jax.lax.map(lambda a: _nearest(*a)[0].astype(jnp.uint8), (parts, codebook.centroids))
    return codes.T


def decode(codebook: Codebook, codes: UInt8[Array, "*batch subspaces"]) -> Float[Array, "*batch dim"]:
    """Returns the centroids that the codes name: the vector as it can still be known."""
    num_subspaces, num_centroids, subdim = codebook.centroids.shape
    rows = codes.astype(jnp.int32) + (jnp.arange(num_subspaces, dtype=jnp.int32) * num_centroids).reshape(
        (1,) * (codes.ndim - 1) + (-1,)
    )
    flat = codebook.centroids.reshape(num_subspaces * num_centroids, subdim)
    return flat[rows].reshape(*codes.shape[:-1], num_subspaces * subdim)


def distances(
    codebook: Codebook, queries: Float[Array, "batch dim"], codes: UInt8[Array, "n subspaces"]
) -> Float[Array, "batch n"]:
    """Returns squared distances from queries to decoded vectors: one table lookup a subspace (asymmetric)."""
    return jax.lax.map(lambda table: lookup(table, codes), tables(codebook, queries))


def tables(
    codebook: Codebook, queries: Float[Array, "batch dim"]
) -> Float[Array, "batch subspaces centroids"]:
    """Returns the squared distance of every query part to every centroid of its subspace."""
    parts = queries.astype(jnp.float32).reshape(queries.shape[0], codebook.centroids.shape[0], 1, -1)
    return jnp.square(parts - codebook.centroids[None]).sum(-1)


def lookup(
    table: Float[Array, "subspaces centroids"], codes: UInt8[Array, "n subspaces"]
) -> Float[Array, " n"]:
    """Returns, for every code, the sum over subspaces of the entries that it names."""
    num_subspaces, num_centroids = table.shape
    first = jnp.arange(num_subspaces, dtype=jnp.int32) * num_centroids
    flat, ones = table.reshape(-1), jnp.ones(num_subspaces, table.dtype)

    def one(code):
        # A product with ones sums faster than `sum` on CPU; in tiles, so that what is looked up stays in cache.
        return jnp.matmul(flat[code.astype(jnp.int32) + first], ones, precision=jax.lax.Precision.HIGHEST)

    return jax.lax.map(one, codes, batch_size=4096)


def fit_pca(vectors: Float[Array, "n dim"], *, num_components: int) -> Projection:
    """Fits the directions of largest variance, from the covariance matrix of the vectors."""
    n, dim = vectors.shape
    if not 1 <= num_components <= min(n, dim):
        raise ValueError(f"num_components must be in [1, {min(n, dim)}], got {num_components=}")
    vectors = vectors.astype(jnp.float32)
    mean = vectors.mean(0)
    mean += (vectors - mean[None]).mean(
        0
    )  # the mean of large values rounds, the mean of what remains hardly does
    centred = vectors - mean[None]
    _, directions = jnp.linalg.eigh(jnp.matmul(centred.T, centred, precision=jax.lax.Precision.HIGHEST) / n)
    return Projection(mean, directions[:, ::-1].T[:num_components])


def project(projection: Projection, vectors: Float[Array, "n dim"]) -> Float[Array, "n components"]:
    """Returns the coordinates along the components. Projecting what was `unproject`ed changes nothing."""
    return jnp.matmul(
        vectors.astype(jnp.float32) - projection.mean[None],
        projection.components.T,
        precision=jax.lax.Precision.HIGHEST,
    )


def unproject(projection: Projection, codes: Float[Array, "n components"]) -> Float[Array, "n dim"]:
    """Returns the vectors nearest to the originals that the coordinates allow."""
    return (
        jnp.matmul(codes, projection.components, precision=jax.lax.Precision.HIGHEST) + projection.mean[None]
    )


def lloyd(
    points: Float[Array, "dim n"],
    centroids: Float[Array, "centroids dim"],
    nearest: Callable[[Array, Array], tuple[Int[Array, " n"], Float[Array, " n"]]],
) -> Float[Array, "centroids dim"]:
    """Moves every centroid to the mean of its points; those without any go where the error is largest.

    One of Lloyd's iterations. `nearest(points, centroids)` gives the index of, and squared distance to, the
    nearest centroid. Needs at least as many points as centroids.
    """
    num_centroids = centroids.shape[0]
    index, error = nearest(points, centroids)
    count = jnp.zeros(num_centroids).at[index].add(1)
    # Mean of differences from the old centroid: copies of one vector average to that vector, to the last bit.
    away = points - centroids.T[:, index]
    moved = jax.lax.map(lambda row: jnp.zeros(num_centroids).at[index].add(row), away).T
    moved = centroids + moved / jnp.maximum(count, 1)[:, None]
    farthest_error, farthest = jax.lax.top_k(error, num_centroids)
    empty = count == 0
    spare = jnp.cumsum(empty) - 1  # the r-th empty centroid takes the r-th farthest point
    take = empty & (farthest_error[spare] > 0)
    return jnp.where(take[:, None], points[:, farthest[spare]].T, moved)


def _parts(vectors: Array, num_subspaces: int) -> Array:
    """[n, dim] -> [subspaces, subdim, n]: the long axis last, where the processor's vectors run along it."""
    n, dim = vectors.shape
    if dim % num_subspaces:
        raise ValueError(f"the codebook's {num_subspaces} subspaces do not divide the dimension {dim}")
    return vectors.T.reshape(num_subspaces, dim // num_subspaces, n)


def _nearest(
    points: Float[Array, "subdim n"], centroids: Array
) -> tuple[Int[Array, " n"], Float[Array, " n"]]:
    """Index of, and squared distance to, the nearest centroid.

    Written as a loop over centroids of element-wise work on all points: many times faster on CPU than
    argmin over a matrix of distances, direct differences lose no digits, and the matrix is never stored.
    """
    subdim, n = points.shape
    group = max(1, 16 // subdim)

    def step(first, carry):
        best, index = carry
        for j in range(group):
            number = first * group + j
            centroid = centroids[jnp.minimum(number, centroids.shape[0] - 1)]
            distance = sum(jnp.square(points[i] - centroid[i]) for i in range(subdim))
            index = jnp.where(distance < best, number, index)
            best = jnp.minimum(distance, best)
        return best, index

    start = (jnp.full(n, jnp.inf), jnp.zeros(n, jnp.int32))
    best, index = jax.lax.fori_loop(0, -(-centroids.shape[0] // group), step, start)
    return index, best
