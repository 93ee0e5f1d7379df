"""Codes name the nearest centroids, degenerate data keeps its meaning, distances need no decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import pq
from tests.oracles import neighbours as twin


def vectors(seed, n, dim, shift=0.0):
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((max(n // 20, 1), dim))
    return jnp.asarray(
        centres[rng.integers(0, len(centres), n)] + 0.5 * rng.standard_normal((n, dim)) + shift, jnp.float32
    )


@pytest.mark.parametrize(
    ("dim", "num_subspaces", "num_centroids"), [(8, 4, 16), (6, 2, 7), (32, 1, 3), (4, 4, 256)]
)
def test_encode_picks_the_nearest_centroid(dim, num_subspaces, num_centroids):
    x = vectors(dim, 300, dim)
    codebook = pq.fit(
        jax.random.key(1), x, num_subspaces=num_subspaces, num_centroids=num_centroids, num_iterations=4
    )
    assert codebook.centroids.shape == (num_subspaces, num_centroids, dim // num_subspaces)
    codes = pq.encode(codebook, x)
    assert codes.dtype == jnp.uint8
    assert (codes == twin.pq_encode(codebook.centroids, x)).all()
    assert (pq.decode(codebook, codes) == twin.pq_decode(np.asarray(codebook.centroids), codes)).all()


def test_fit_reaches_the_error_of_a_plain_kmeans():
    x = vectors(0, 2000, 8)
    codebook = pq.fit(jax.random.key(0), x, num_subspaces=2, num_centroids=32, num_iterations=15)
    error = float(jnp.square(pq.decode(codebook, pq.encode(codebook, x)) - x).sum(-1).mean())
    rng = np.random.default_rng(0)
    plain = sum(
        twin.lloyd(part, part[rng.permutation(len(part))[:32]], 15)[1]
        for part in np.split(np.asarray(x), 2, axis=1)
    )
    assert error < 1.05 * plain  # both are local optima from a random start
    few = pq.fit(jax.random.key(0), x, num_subspaces=2, num_centroids=32, num_iterations=0)
    assert error < 0.9 * float(jnp.square(pq.decode(few, pq.encode(few, x)) - x).sum(-1).mean())


def test_fit_is_unmoved_by_a_common_shift():
    """Far from zero the expanded form of the distance would return noise."""
    x = vectors(1, 500, 4)
    error = {}
    for shift in (0.0, 4096.0):
        codebook = pq.fit(jax.random.key(0), x + shift, num_subspaces=2, num_centroids=16)
        error[shift] = float(
            jnp.square(pq.decode(codebook, pq.encode(codebook, x + shift)) - (x + shift)).mean()
        )
    assert error[4096.0] == pytest.approx(error[0.0], rel=0.05)


def test_distances_equal_those_to_decoded_vectors():
    x, queries = vectors(2, 200, 12), vectors(3, 5, 12)
    codebook = pq.fit(jax.random.key(2), x, num_subspaces=3, num_centroids=20)
    codes = pq.encode(codebook, x)
    got = jax.jit(pq.distances)(codebook, queries, codes)
    decoded = np.asarray(pq.decode(codebook, codes), np.float64)
    want = ((np.asarray(queries, np.float64)[:, None] - decoded[None]) ** 2).sum(-1)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_fewer_vectors_than_centroids_is_refused_with_both_numbers():
    """100 vectors, 256 centroids, 4 subspaces; as many centroids as vectors are exact (AC46)."""
    with pytest.raises(ValueError, match=r"100 vectors cannot place 256 centroids.*at most 100"):
        pq.fit(jax.random.key(0), vectors(0, 100, 8), num_subspaces=4)
    x = vectors(0, 100, 8)
    codebook = pq.fit(jax.random.key(0), x, num_subspaces=4, num_centroids=100)
    assert np.isfinite(codebook.centroids).all()
    assert (pq.decode(codebook, pq.encode(codebook, x)) == x).all()


@pytest.mark.parametrize("distinct", [1, 2, 40])
def test_repeated_vectors_are_kept_exactly(distinct):
    """300 copies of one vector, or 150 of each of two, for 256 centroids (AC47)."""
    rng = np.random.default_rng(distinct)
    different = rng.standard_normal((distinct, 8), dtype=np.float32)
    x = jnp.asarray(np.resize(different, (300, 8)))

    def fit():
        return pq.fit(jax.random.key(5), x, num_subspaces=4)

    codebook = fit()
    assert np.isfinite(codebook.centroids).all()
    codes = pq.encode(codebook, x)
    assert (pq.decode(codebook, codes) == x).all()
    assert (pq.encode(fit(), x) == codes).all()


def test_empty_centroids_are_put_to_use():
    """Ten rare vectors among copies of one: a random start misses most of them."""
    x = np.zeros((2000, 2), np.float32)
    x[:10] = np.arange(1, 11)[:, None] * 10
    codebook = pq.fit(jax.random.key(0), jnp.asarray(x), num_subspaces=1, num_centroids=16)
    assert (pq.decode(codebook, pq.encode(codebook, jnp.asarray(x))) == x).all()


def test_large_sets_are_sampled():
    x = vectors(6, 1000, 4)
    full = pq.fit(jax.random.key(0), x, num_subspaces=2, num_centroids=8, max_points=1000)
    part = pq.fit(jax.random.key(0), x, num_subspaces=2, num_centroids=8, max_points=100)

    def error(c):
        return float(jnp.square(pq.decode(c, pq.encode(c, x)) - x).mean())

    assert error(full) < error(part) < 1.5 * error(full)


def test_projection_keeps_the_directions_of_largest_variance():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((400, 6)) * [5, 4, 3, 0.1, 0.1, 0.1] + 100, jnp.float32)
    projection = pq.fit_pca(x, num_components=3)
    np.testing.assert_allclose(projection.components @ projection.components.T, np.eye(3), atol=1e-5)
    codes = pq.project(projection, x)
    assert codes.shape == (400, 3)
    assert float(jnp.square(pq.unproject(projection, codes) - x).sum(-1).mean()) < 0.05
    np.testing.assert_allclose(pq.project(projection, pq.unproject(projection, codes)), codes, atol=1e-3)
    _, singular, _ = np.linalg.svd(np.asarray(x) - np.asarray(x).mean(0))
    np.testing.assert_allclose(jnp.square(codes).sum(0), singular[:3] ** 2, rtol=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_subspaces": 3}, "num_subspaces must divide the dimension 8"),
        ({"num_subspaces": 0}, "num_subspaces must divide"),
        ({"num_subspaces": 2, "num_centroids": 257}, "num_centroids must be in"),
        ({"num_subspaces": 2, "num_centroids": 8, "max_points": 4}, "max_points must be at least"),
    ],
)
def test_settings_it_cannot_serve_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        pq.fit(jax.random.key(0), vectors(0, 300, 8), **settings)
    with pytest.raises(ValueError, match="num_components must be in"):
        pq.fit_pca(vectors(0, 300, 8), num_components=9)
    codebook = pq.Codebook(jnp.zeros((2, 3, 4)))
    with pytest.raises(ValueError, match="do not divide the dimension 9"):
        pq.encode(codebook, vectors(0, 3, 9))
