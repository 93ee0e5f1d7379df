"""Blocks hold every entry once; probing all of them is the exact search, probing few finds most of its neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import inverted, knn, pq

build = jax.jit(inverted.build, static_argnames=("components", "num_cells", "block_size"))
search = jax.jit(inverted.search, static_argnames=("k", "probes", "candidates"))
exact = jax.jit(knn.search, static_argnames="k")
DIM, ROWS = 16, 2000


def clusters(seed, rows=ROWS, shift=0.0):
    """Keys around centres of their own, and queries beside some of them."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(rows // 25, DIM))
    keys = centres[rng.integers(0, len(centres), rows)] + 0.3 * rng.normal(size=(rows, DIM))
    queries = keys[rng.permutation(rows)[:64]] + 0.2 * rng.normal(size=(64, DIM))
    values = rng.integers(0, 99, rows).astype(np.int32)
    as_float = [jnp.asarray((a + shift).astype(np.float32)) for a in (keys, queries)]
    return as_float[0], jnp.asarray(values), as_float[1]


def store_of(keys, values, *, coded=False, rows=2048, mask=None):
    """Of one size, so that one program serves most tests."""
    if coded:
        codebook = pq.fit(jax.random.key(0), keys, num_subspaces=8, num_centroids=64, num_iterations=3)
        return knn.pad(knn.build_coded(codebook, pq.encode(codebook, keys), values), rows)
    return knn.pad(knn.build(keys, values, mask=mask), rows)


def recall(found, truth):
    return np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.ids.tolist(), truth.ids.tolist())])


@pytest.mark.parametrize("coded", [False, True])
def test_probing_every_block_is_the_exact_search(coded):
    keys, values, queries = clusters(0)
    store = store_of(keys, values, coded=coded)
    index = build(store, block_size=16)
    found = search(index, queries, k=8, probes=10**6, candidates=ROWS)
    truth = exact(store, queries, k=8)
    assert found.ids.tolist() == truth.ids.tolist()
    assert found.values.tolist() == truth.values.tolist()
    np.testing.assert_allclose(found.distances, truth.distances, rtol=1e-5)


def test_every_entry_is_in_one_block_of_like_ones():
    keys, values, _ = clusters(1)
    mask = np.arange(ROWS) % 7 != 0
    index = build(store_of(keys, values, mask=jnp.asarray(mask)), block_size=16)
    ids = np.asarray(index.ids)
    assert sorted(ids[ids >= 0].tolist()) == np.flatnonzero(mask).tolist()
    assert (np.isfinite(index.norms) == (ids >= 0)).all()
    assert (np.isfinite(index.offsets) == (ids >= 0).any(1)).all()
    vectors = np.asarray(keys)
    full = [vectors[row[row >= 0]] for row in ids if (row >= 0).any()]
    spread = sum(np.square(block - block.mean(0)).sum() for block in full)
    assert spread < 0.25 * np.square(vectors[mask] - vectors[mask].mean(0)).sum()


@pytest.mark.parametrize("shift", [0.0, 1e3])
def test_few_probes_find_most_neighbours(shift):
    keys, values, queries = clusters(2, shift=shift)
    far = keys.at[0].add(1e4)  # one entry far out must not coarsen all others
    store = store_of(far, values)
    index = build(store, block_size=16)
    truth = exact(store, queries, k=8)
    found = search(index, queries, k=8, probes=16)  # an eighth of the entries at most
    assert recall(found, truth) > 0.95
    assert recall(search(index, queries, k=8, probes=1), truth) < 0.9
    same = np.asarray(found.ids) == np.asarray(truth.ids)
    np.testing.assert_allclose(
        np.asarray(found.distances)[same], np.asarray(truth.distances)[same], rtol=1e-4
    )
    assert (np.diff(found.distances) >= 0).all()


def test_thousands_of_equal_keys_come_in_order_of_row():
    keys, values, _ = clusters(3)
    keys = keys.at[100:1600].set(keys[100])
    index = build(store_of(keys, values), block_size=16)
    found = search(index, keys[100:102], k=8, probes=16)
    assert (found.distances == 0).all()
    assert (np.diff(found.ids) > 0).all()
    assert set(found.ids.ravel().tolist()) <= set(range(100, 1600))
    assert found.values.tolist() == values[found.ids].tolist()


def test_the_same_store_gives_the_same_index():
    keys, values, _ = clusters(4)
    store = store_of(keys, values)
    once, twice = build(store, block_size=16), build(store, block_size=16)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(twice)))


@pytest.mark.parametrize("entries", [0, 1, 5])
def test_a_few_entries_are_all_found_and_carry_all_mass(entries):
    keys, values, queries = clusters(5)
    mask = jnp.arange(ROWS) < entries
    store = store_of(keys, values, mask=mask)
    index = build(store, block_size=16)
    found = search(index, queries, k=8, probes=16)
    assert found.ids.tolist() == exact(store, queries, k=8).ids.tolist()
    assert ((found.ids >= 0).sum(1) == entries).all()
    assert np.isinf(found.distances[:, entries:]).all()


def test_padding_changes_neither_cells_nor_neighbours():
    """A memory of a few hundred entries in a store of thousands is cut into as few cells as if it stood alone."""
    keys, values, queries = clusters(6, rows=500)
    alone, padded = (build(store_of(keys, values, rows=rows), block_size=16) for rows in (500, 2048))
    used = [int(np.isfinite(index.offsets).sum()) for index in (alone, padded)]
    assert abs(used[0] - used[1]) <= 4
    for index in (alone, padded):
        assert recall(search(index, queries, k=8, probes=16), exact(index.store, queries, k=8)) > 0.95


def test_stores_under_vmap_equal_a_loop():
    parts = [clusters(seed) for seed in (7, 8)]
    keys, values, queries = (jnp.stack(column) for column in zip(*parts))
    mask = jnp.arange(ROWS)[None] < jnp.asarray([ROWS, 300])[:, None]
    stores = jax.vmap(lambda k, v, m: knn.build(k, v, mask=m))(keys, values, mask)
    built = jax.jit(jax.vmap(lambda s: inverted.build(s, block_size=16)))(stores)
    together = jax.jit(jax.vmap(lambda i, q: inverted.search(i, q, k=8, probes=16)))(built, queries)
    for i in range(2):
        index, many = jax.tree.map(lambda leaf: leaf[i], (built, together))  # noqa: B023 (used at once)
        one = search(index, queries[i], k=8, probes=16)
        assert many.ids.tolist() == one.ids.tolist()
        np.testing.assert_allclose(many.distances, one.distances, rtol=1e-5)
        assert recall(one, exact(index.store, queries[i], k=8)) > 0.9


def test_eight_devices_find_what_one_finds():
    keys, values, queries = clusters(9)
    index = build(store_of(keys, values), block_size=16)
    rows = len(index.ids) // 8 * 8
    assert (index.ids[rows:] == -1).all()  # room for cells that are not full: nothing is lost
    one = search(index, queries, k=8, probes=16)
    mesh = jax.make_mesh((8,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = {
        name: jax.device_put(getattr(index, name)[:rows], jax.NamedSharding(mesh, jax.P("clients")))
        for name in ("means", "offsets", "coarse", "scale", "norms", "ids")
    }
    queries = jax.device_put(queries, jax.NamedSharding(mesh, jax.P()))
    rest = jax.device_put((index.store, index.projection), jax.NamedSharding(mesh, jax.P()))
    many = search(index._replace(**spread, store=rest[0], projection=rest[1]), queries, k=8, probes=16)
    assert many.ids.tolist() == one.ids.tolist()
    np.testing.assert_allclose(many.distances, one.distances, rtol=1e-6)


def test_a_query_that_is_no_number_finds_nothing():
    keys, values, queries = clusters(10)
    index = build(store_of(keys, values), block_size=16)
    found = search(index, queries.at[0].set(jnp.nan), k=8, probes=16)
    assert found.ids[0].tolist() == [-1] * 8
    assert (found.ids[1:] >= 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: inverted.build(i.store, components=17), "components must be in"),
        (lambda i: inverted.build(i.store, num_cells=0), "num_cells must be in"),
        (lambda i: inverted.build(i.store, block_size=0), "block_size must be at least 1"),
        (
            lambda i: inverted.search(i, jnp.zeros((1, DIM)), k=8, candidates=4),
            "candidates must be at least k",
        ),
        (lambda i: inverted.search(i, jnp.zeros((1, DIM)), k=0), "k at least 1"),
        (lambda i: inverted.search(i, jnp.zeros((1, DIM)), k=1, probes=0), "probes must be at least 1"),
    ],
)
def test_settings_it_cannot_serve_are_refused(call, message):
    keys, values, _ = clusters(11)
    index = build(store_of(keys, values), block_size=16)
    with pytest.raises(ValueError, match=message):
        call(index)
