"""Search is exact, its edges carry no mass, and every layout gives the same neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpriv import knn, pq
from tests.oracles import neighbours as twin

LN2 = float(np.log(2))


def random_store(seed, entries, dim, vocab=50, spread=1.0):
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((entries, dim), dtype=np.float32) * spread + 3
    return jnp.asarray(keys), jnp.asarray(rng.integers(0, vocab, entries), jnp.int32)


search = jax.jit(knn.search, static_argnames=("k", "chunk_size"))
build = jax.jit(knn.build)
adaptive = jax.jit(knn.adaptive)
meta_log_probs = jax.jit(knn.meta_log_probs)
to_log_probs = jax.jit(knn.to_log_probs, static_argnames="vocab_size")


@jax.jit
def search_masked(keys, values, mask, queries):
    store = knn.build(keys, values, mask=mask, centre=jnp.zeros(2))
    return knn.search(store, queries, k=12, chunk_size=16)


def as_neighbors(rows, k):
    """Neighbors from lists of (distance, value, row), as the twin returns them."""
    filled = [list(row) + [(np.inf, 0, -1)] * (k - len(row)) for row in rows]

    def take(i, dtype):
        return jnp.asarray([[entry[i] for entry in row] for row in filled], dtype)

    return knn.Neighbors(take(0, jnp.float32), take(1, jnp.int32), take(2, jnp.int32))


def assert_matches(found, expected):
    for row, (distances, values, ids) in enumerate(zip(*map(np.asarray, found))):
        want = expected[row]
        assert ids[: len(want)].tolist() == [i for _, _, i in want]
        assert values[: len(want)].tolist() == [v for _, v, _ in want]
        np.testing.assert_allclose(distances[: len(want)], [d for d, _, _ in want], rtol=2e-5, atol=1e-6)
        assert (ids[len(want) :] == -1).all()
        assert np.isinf(distances[len(want) :]).all()


@pytest.mark.parametrize(
    ("entries", "k", "chunk_size"),
    [
        (1, 1, 4096),
        (3, 8, 4096),
        (16, 4, 16),
        (17, 8, 16),
        (100, 7, 32),
        (1000, 16, 64),
        (1000, 16, 4096),
        (5, 5, 1),
    ],
)
def test_search_is_exact(entries, k, chunk_size):
    keys, values = random_store(entries, entries, 5)
    queries = random_store(1, 3, 5)[0]
    found = search(build(keys, values), queries, k=k, chunk_size=chunk_size)
    assert_matches(found, twin.search(keys, values, queries, k))


@given(st.integers(0, 2**80 - 1), st.integers(0, 10_000))
def test_equal_keys_come_in_order_of_row(present, seed):
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 2, (80, 2)).astype(np.float32)  # many duplicates, exact distances
    values = rng.integers(0, 9, 80).astype(np.int32)
    queries = rng.integers(0, 2, (2, 2)).astype(np.float32)
    mask = np.array([present >> i & 1 for i in range(80)], bool)
    found = search_masked(keys, values, mask, queries)
    expected = twin.search(keys[mask], values[mask], queries, 12)
    rows = np.flatnonzero(mask)
    assert_matches(found, [[(d, v, rows[i]) for d, v, i in row] for row in expected])


@pytest.mark.parametrize("shift", [0.0, 1e4, 1e5, 1e6])
def test_distances_keep_their_digits_far_from_zero(shift):
    """The expanded form has 32 and 96 at 1e4, and -4096 or -262144 beyond (AC42)."""
    keys = jnp.asarray([[0, 0], [3, 4], [10, 0]], jnp.float32) + shift
    found = search(build(keys, jnp.arange(3)), jnp.full((1, 2), shift), k=3)
    assert found.distances.tolist() == [[0, 25, 100]]
    assert found.ids.tolist() == [[0, 1, 2]]


def test_near_equal_large_vectors_are_told_apart():
    """Squared distances 904893.6 and 57.81, the second key the nearest (AC42)."""
    keys = jnp.asarray([[4208292, 2335623.5, 4171305], [4208843.5, 2334869.5, 4171171.5]], jnp.float32)
    query = jnp.asarray([[4208848, 2334863.5, 4171170.2]], jnp.float32)
    found = search(build(keys, jnp.arange(2)), query, k=2)
    assert found.ids.tolist() == [[1, 0]]
    np.testing.assert_allclose(found.distances, [[57.81, 904893.6]], rtol=1e-4)
    # The query's 4171170.2 is 4171170.25 in float32.
    exact = ((np.float64(query) - np.float64(keys)) ** 2).sum(-1)[::-1]
    np.testing.assert_allclose(found.distances[0], exact, rtol=1e-6)


def test_what_the_rounding_of_scores_costs_is_bounded():
    """Small clusters far from their common centre are where float32 scores fail: as the docstring says, no further."""
    rng = np.random.default_rng(0)
    side = rng.choice([-1, 1], (3000, 1))
    for offset, least, most in ((30, 1.0, 1.0), (1e3, 0.5, 0.8), (1e4, 0.0, 0.2)):
        keys = (rng.normal(size=(3000, 32)) + offset * side).astype(np.float32)
        queries = (keys[:50] + 0.1 * rng.normal(size=(50, 32))).astype(np.float32)
        found = search(build(jnp.asarray(keys), jnp.zeros(3000, jnp.int32)), jnp.asarray(queries), k=8)
        true = np.square(np.float64(queries)[:, None] - np.float64(keys)[None]).sum(-1)
        nearest = np.argsort(true, -1)[:, :8]
        excess = np.asarray(found.distances) - np.take_along_axis(true, nearest, -1)
        centre = np.float64(keys).mean(0)
        far = np.linalg.norm(keys - centre, axis=-1).max()
        bound = 2.0**-23 * 35 * (far**2 + 2 * np.linalg.norm(queries - centre, axis=-1) * far)
        assert (excess <= bound[:, None] / 10).all()
        recall = np.mean(
            [len(set(a) & set(b)) / 8 for a, b in zip(np.asarray(found.ids).tolist(), nearest.tolist())]
        )
        assert least <= recall <= most


def test_distances_are_never_negative_and_zero_for_a_stored_key():
    """Rounding may make neither less than 0 (AC42)."""
    keys, values = random_store(0, 300, 64, spread=1000)
    found = search(build(keys, values), keys[:20], k=3)
    assert (found.distances >= 0).all()
    assert (found.distances[:, 0] == 0).all()
    assert found.ids[:, 0].tolist() == list(range(20))


SEVENTHS = [0, 0, 0, 0, 0, 4 / 7, 2 / 7, 1 / 7, 0, 0]  # of values 5, 6, 7 at distances 0, ln 2, ln 4


def test_fewer_neighbours_than_k_carry_no_mass():
    """A filler id of -1 would index the last value and give 7 what is missing (AC41)."""
    neighbors = as_neighbors([[(0.0, 5, 0), (LN2, 6, 1), (2 * LN2, 7, 2)]], 8)
    probs = jnp.exp(to_log_probs(neighbors, vocab_size=10, temperature=1.0))[0]
    np.testing.assert_allclose(probs, SEVENTHS, rtol=1e-6)


def test_search_beyond_the_store_leaves_missing_slots():
    """3 entries, K = 8: alone and mixed by eight neighbours alone (AC41)."""
    keys = jnp.sqrt(jnp.asarray([[0.0], [LN2], [2 * LN2]]))
    found = search(build(keys, jnp.asarray([5, 6, 7])), jnp.zeros((1, 1)), k=8)
    assert found.ids.tolist() == [[0, 1, 2, -1, -1, -1, -1, -1]]
    np.testing.assert_allclose(found.distances[0, :3], [0, LN2, 2 * LN2], atol=1e-6)
    probs = jnp.exp(to_log_probs(found, vocab_size=10, temperature=1.0))[0]
    np.testing.assert_allclose(probs, SEVENTHS, rtol=1e-5)
    all_eight = jnp.log(jnp.asarray([[0.0, 0.0, 0.0, 0.0, 1.0]]))
    uniform = jnp.log(jnp.full((1, 10), 0.1))
    mixed = jnp.exp(adaptive(uniform, found, all_eight, temperature=1.0))[0]
    np.testing.assert_allclose(mixed, SEVENTHS, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("masked", [False, True])
def test_empty_store_gives_the_model(masked):
    """p = p_NMT, the weight of k = 0 is 1 (AC41)."""
    keys = jnp.ones((4 if masked else 0, 2))
    store = build(keys, jnp.zeros(len(keys), jnp.int32), mask=jnp.zeros(len(keys), bool))
    found = search(store, jnp.ones((2, 2)), k=4)
    assert found.ids.tolist() == [[-1] * 4] * 2
    log_nmt = jax.nn.log_softmax(jnp.asarray([[1.0, 2.0, 3.0]] * 2))
    log_knn = to_log_probs(found, vocab_size=3, temperature=10.0)
    assert (knn.interpolate(log_nmt, log_knn, weight=0.7) == log_nmt).all()
    log_choice = meta_log_probs(knn.init_meta(jax.random.key(0), k=4), found)
    assert jnp.exp(log_choice).tolist() == [[1, 0, 0, 0]] * 2
    for choice in (log_choice, jnp.log(jnp.full((2, 4), 0.25))):  # whatever a network says
        assert (adaptive(log_nmt, found, choice, temperature=10.0) == log_nmt).all()


def test_temperature_survives_large_distances_and_infinity():
    """Weights 0.731059, 0.268941, 0 where a plain exp gives 0 / 0; one that is not positive is refused (AC43)."""
    neighbors = as_neighbors([[(1e6, 0, 0), (1e6 + 10, 1, 1), (2e6, 2, 2)]], 3)

    def probs(t):
        return jnp.exp(to_log_probs(neighbors, vocab_size=3, temperature=t))[0]

    np.testing.assert_allclose(probs(10.0), [0.731059, 0.268941, 0], atol=1e-6)
    np.testing.assert_allclose(probs(float("inf")), [1 / 3] * 3, rtol=1e-6)
    for bad in (0, -1, 0.0, float("nan"), np.float32(-1), np.float64(0), jnp.float32(0), 1e-45, np.int32(0)):
        with pytest.raises(ValueError, match="temperature must be positive"):
            knn.to_log_probs(neighbors, vocab_size=3, temperature=bad)
        with pytest.raises(ValueError, match="temperature must be positive"):
            knn.adaptive(jnp.zeros((1, 3)), neighbors, jnp.zeros((1, 3)), temperature=bad)
    # One that is traced cannot be refused: the nearest takes all, and nothing is NaN.
    cold = to_log_probs(neighbors, vocab_size=3, temperature=jnp.float32(-1))
    np.testing.assert_allclose(jnp.exp(cold), [[1, 0, 0]])


@pytest.mark.parametrize("k", [1, 4, 6, 8])
def test_adaptive_mixture_is_the_papers_sum(k):
    rng = np.random.default_rng(k)
    rows = [
        [
            (float(d), int(v), i)
            for i, (d, v) in enumerate(zip(np.sort(rng.random(n)) * 5, rng.integers(0, 6, n)))
        ]
        for n in (k, max(k - 2, 1), 0)
    ]
    log_nmt = jax.nn.log_softmax(jnp.asarray(rng.standard_normal((3, 7)), jnp.float32))
    log_choice = jax.nn.log_softmax(jnp.asarray(rng.standard_normal((3, knn.num_choices(k))), jnp.float32))
    got = jnp.exp(adaptive(log_nmt, as_neighbors(rows, k), log_choice, temperature=2.0))
    assert knn.choices(k) == {1: (0, 1), 4: (0, 1, 2, 4), 6: (0, 1, 2, 4), 8: (0, 1, 2, 4, 8)}[k]
    for i, row in enumerate(rows):
        want = twin.adaptive_probs(np.exp(log_nmt[i]), row, np.exp(log_choice[i]), knn.choices(k), 2.0)
        np.testing.assert_allclose(got[i], want, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(got[i].sum(), 1, rtol=1e-5)


def test_a_farther_neighbour_at_distance_zero_does_not_enter_smaller_k():
    neighbors = as_neighbors([[(0.0, 1, 0), (0.0, 2, 1)]], 2)
    log_choice = jnp.log(jnp.asarray([[0.0, 1.0, 0.0]]))  # one neighbour, certainly
    got = jnp.exp(adaptive(jnp.zeros((1, 3)), neighbors, log_choice, temperature=1.0))
    np.testing.assert_allclose(got, [[0, 1, 0]], atol=1e-6)


def test_features_count_every_token_id_and_fill_missing_slots():
    rows = [[(1.0, 0, 0), (2.0, 4, 1), (3.0, 0, 2)], [(5.0, 0, 0)], []]
    got = knn.features(as_neighbors(rows, 4))
    assert got[0].tolist() == [1, 2, 3, 3, 1, 2, 2, 2]
    assert got[1].tolist() == [5, 5, 5, 5, 1, 1, 1, 1]
    assert got[2].tolist() == [0] * 8
    assert got[0, 4:7].tolist() == twin.distinct_counts([0, 4, 0])


def test_meta_network_starts_near_blind_to_distances_and_can_learn():
    meta = knn.init_meta(jax.random.key(0), k=8)
    assert meta.hidden_weights.shape == (16, 32)
    assert meta.out_weights.shape == (32, 5)

    def scale(w):
        return float(jnp.std(w)) / np.sqrt(2 / (8 + 32))

    assert 0.008 < scale(meta.hidden_weights[:8]) < 0.012
    assert 0.08 < scale(meta.hidden_weights[8:]) < 0.12

    # The only neighbour is right and the model wrong: training must learn not to choose k = 0.
    neighbors = as_neighbors([[(1.0, 1, 0)]], 8)
    log_nmt = jnp.log(jnp.asarray([[0.99, 0.01]]))

    def loss(meta):
        return -adaptive(log_nmt, neighbors, meta_log_probs(meta, neighbors), temperature=10.0)[0, 1]

    before = loss(meta)
    step = jax.jit(lambda meta: jax.tree.map(lambda w, g: w - 0.1 * g, meta, jax.grad(loss)(meta)))
    for _ in range(50):
        meta = step(meta)
    assert np.isfinite(loss(meta))
    assert loss(meta) < before / 3


def test_gradients_are_finite_with_missing_neighbours():
    neighbors = as_neighbors([[(1.0, 1, 0)], []], 4)
    meta = knn.init_meta(jax.random.key(1), k=4)
    log_nmt = jnp.log(jnp.full((2, 3), 1 / 3))

    def loss(m):
        return -adaptive(log_nmt, neighbors, meta_log_probs(m, neighbors), temperature=1.0)[:, 1].sum()

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.grad(loss)(meta)))


def test_interpolation_is_the_weighted_sum():
    log_nmt, log_knn = jnp.log(jnp.asarray([[0.5, 0.5, 0.0]])), jnp.log(jnp.asarray([[0.0, 0.25, 0.75]]))
    for weight in (0.0, 0.3, 1.0):
        want = (1 - weight) * np.exp(log_nmt) + weight * np.exp(log_knn)
        np.testing.assert_allclose(jnp.exp(knn.interpolate(log_nmt, log_knn, weight=weight)), want, atol=1e-6)
    for bad in (1.5, -0.1, np.float32(2), jnp.float32(-1), float("nan")):
        with pytest.raises(ValueError, match="weight must be in"):
            knn.interpolate(log_nmt, log_knn, weight=bad)
    traced = jax.jit(knn.interpolate)(log_nmt, log_knn, weight=jnp.float32(2))
    np.testing.assert_allclose(jnp.exp(traced), jnp.exp(log_knn), atol=1e-6)


def test_values_outside_the_vocabulary_get_nothing():
    neighbors = as_neighbors([[(1.0, 0, 0), (1.0, 9, 1), (1.0, -1, 2)]], 3)
    probs = jnp.exp(to_log_probs(neighbors, vocab_size=3, temperature=1.0))[0]
    np.testing.assert_allclose(probs, [1 / 3, 0, 0], rtol=1e-6)


def test_padded_client_stores_under_vmap_equal_a_loop():
    sizes = (40, 0, 17)
    padded = [random_store(n, 40, 6) for n in range(len(sizes))]
    keys, values = (jnp.stack(a) for a in zip(*padded))
    mask = jnp.arange(40)[None] < jnp.asarray(sizes)[:, None]
    keys = jnp.where(mask[..., None], keys, jnp.nan)  # padding may hold anything
    queries = random_store(9, 5, 6)[0]
    stores = jax.vmap(lambda k, v, m: build(k, v, mask=m))(keys, values, mask)
    together = jax.vmap(lambda s: search(s, queries, k=8, chunk_size=16))(stores)
    for c, size in enumerate(sizes):
        alone = search(build(keys[c, :size], values[c, :size]), queries, k=8)
        assert together.ids[c].tolist() == alone.ids.tolist()
        assert together.values[c].tolist() == alone.values.tolist()
        np.testing.assert_allclose(together.distances[c], alone.distances, rtol=1e-5)


def test_padded_coded_stores_under_vmap_equal_a_loop():
    rng = np.random.default_rng(1)
    codebook = pq.Codebook(jnp.asarray(rng.standard_normal((2, 16, 2)), jnp.float32))
    codes, values = (
        jnp.asarray(rng.integers(0, 16, (3, 30, 2)), jnp.uint8),
        jnp.asarray(rng.integers(0, 9, (3, 30))),
    )
    sizes = (30, 0, 7)
    mask = jnp.arange(30)[None] < jnp.asarray(sizes)[:, None]
    queries = jnp.asarray(rng.standard_normal((2, 4)), jnp.float32)
    together = jax.jit(
        jax.vmap(lambda c, v, m: knn.search(knn.build_coded(codebook, c, v, mask=m), queries, k=5))
    )(codes, values, mask)
    for client, size in enumerate(sizes):
        alone = search(knn.build_coded(codebook, codes[client, :size], values[client, :size]), queries, k=5)
        assert together.ids[client].tolist() == alone.ids.tolist()
        np.testing.assert_allclose(together.distances[client], alone.distances, rtol=1e-5, atol=1e-6)


def test_a_query_that_is_no_number_finds_nothing():
    keys, values = random_store(0, 40, 3)
    found = search(build(keys, values), jnp.asarray([[jnp.nan] * 3, [0.0] * 3]), k=2)
    assert found.ids[0].tolist() == [-1, -1]
    assert (found.ids[1] >= 0).all()


def coded(keys, values):
    codebook = pq.fit(jax.random.key(0), keys, num_subspaces=4, num_centroids=16, num_iterations=5)
    return knn.build_coded(codebook, pq.encode(codebook, keys), values), codebook


def test_search_in_codes_is_exact_for_the_decoded_keys():
    keys, values = random_store(3, 500, 8)
    store, codebook = coded(keys, values)
    queries = random_store(4, 6, 8)[0]
    found = search(store, queries, k=10, chunk_size=64)
    decoded = pq.decode(codebook, store.codes)
    expected = twin.search(decoded, values, queries, 10)
    np.testing.assert_allclose(found.distances, [[d for d, _, _ in row] for row in expected], rtol=1e-4)
    by_table = np.sort(pq.distances(codebook, queries, store.codes))[:, :10]
    np.testing.assert_allclose(found.distances, by_table, rtol=1e-4)


@pytest.mark.parametrize("entries", [64, 61, 5])
@pytest.mark.parametrize("compress", [False, True])
def test_eight_devices_find_what_one_finds(entries, compress):
    keys, values = random_store(entries, max(entries, 16), 8)
    store = coded(keys, values)[0] if compress else build(keys[:entries], values[:entries])
    queries = random_store(4, 6, 8)[0]
    one = search(store, queries, k=9)
    mesh = jax.make_mesh((8,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = knn.shard(knn.pad(store, -(-store.values.shape[0] // 8) * 8), mesh)
    many = jax.jit(lambda s, q: knn.search_sharded(s, q, k=9, mesh=mesh))(spread, queries)
    assert many.ids.tolist() == one.ids.tolist()
    assert many.values.tolist() == one.values.tolist()
    np.testing.assert_allclose(many.distances, one.distances, rtol=1e-6)


def test_parts_merge_to_the_whole():
    keys, values = random_store(5, 90, 4)
    queries = random_store(6, 3, 4)[0]
    centre = keys.mean(0)

    def part(a, b):
        return knn.shift(search(build(keys[a:b], values[a:b], centre=centre), queries, k=12), a)

    merged = knn.merge(knn.merge(part(0, 10), part(10, 80), k=12), part(80, 90), k=12)
    whole = search(build(keys, values, centre=centre), queries, k=12)
    assert merged.ids.tolist() == whole.ids.tolist()
    np.testing.assert_allclose(merged.distances, whole.distances, rtol=1e-6)


@pytest.mark.parametrize("compress", [False, True])
def test_among_given_rows_the_nearest_are_found(compress):
    keys, values = random_store(12, 60, 8)
    keys = keys.at[30:40].set(keys[30])
    store = coded(keys, values)[0] if compress else build(keys, values)
    queries = keys[28:32] + 0.1
    ids = jnp.asarray([[39, 1, 30, -1, 35, 28, 29, -1]] * 3 + [[-1] * 8])
    found = jax.jit(knn.among, static_argnames="k")(store, queries, ids, k=8)
    whole = search(store, queries, k=60)
    for row in range(3):
        given = np.isin(whole.ids[row], ids[row])
        assert found.ids[row].tolist() == [*whole.ids[row][given].tolist(), -1, -1]
        np.testing.assert_allclose(found.distances[row, :6], whole.distances[row][given], rtol=1e-5)
    assert found.ids[3].tolist() == [-1] * 8
    assert np.isinf(found.distances[3]).all()


def test_narrow_keys_are_searched_as_stored():
    keys, values = random_store(7, 200, 8)
    store = build(keys.astype(jnp.bfloat16), values)
    assert store.keys.dtype == jnp.bfloat16
    kept = store.keys.astype(jnp.float32) + store.centre[None]
    queries = random_store(8, 2, 8)[0]
    assert_matches(search(store, queries, k=5), twin.search(kept, values, queries, 5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, q: knn.search(s, q, k=0), "k must be at least 1"),
        (lambda s, q: knn.search(s, q, k=1, chunk_size=0), "chunk_size must be at least 1"),
        (lambda s, q: knn.pad(s, 2), "entries must be at least the store's 3 rows"),
        (lambda s, q: knn.choices(0), "k must be at least 1"),
        (
            lambda s, q: knn.adaptive(
                jnp.zeros((1, 4)), knn.search(s, q, k=4), jnp.zeros((1, 3)), temperature=1.0
            ),
            "log_choice must have 4 columns",
        ),
        (
            lambda s, q: knn.search_sharded(
                s, q, k=1, mesh=jax.make_mesh((8,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
            ),
            "do not divide over 8 devices",
        ),
    ],
)
def test_settings_it_cannot_serve_are_refused(call, message):
    store = knn.build(jnp.ones((3, 2)), jnp.arange(3))
    with pytest.raises(ValueError, match=message):
        call(store, jnp.ones((1, 2)))
