"""kNN-MT decoding: an empty store, a perfect one, gates, shadows, fewer entries than K; the Meta-k
network.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import inverted, knn, pq
from tests.trainers.translation.test_model import random_example, tiny
from trainers.common.errors import InputError
from trainers.translation import data, datastore, decode, memory, meta_k, retrieval

K = 4


@pytest.fixture(scope="module")
def setup():
    graphdef, params = tiny(encoder_layers=1, decoder_layers=1)
    rng = np.random.default_rng(0)
    examples = [random_example(rng, 4, 5) for _ in range(12)]
    return graphdef, params, examples, retrieval.all_entries(graphdef, params, examples)


def test_records_are_one_a_target_position(setup):
    _, params, examples, entries = setup
    assert len(entries.values) == sum(len(e.target) + 1 for e in examples)
    for i in (0, 7):
        assert list(entries.values[entries.sentences == i]) == [*examples[i].target, 2]
    none = retrieval.all_entries(setup[0], params, [])
    assert none.keys.shape == (0, 16)


def fixed(store, params, weight, temperature=1.0):
    return retrieval.Weights(params, store, jnp.float32(temperature), weight=jnp.float32(weight))


@pytest.mark.parametrize("blocks", [False, True])
def test_a_memory_of_the_pairs_repeats_them(setup, blocks):
    """With weight near 1 the neighbour at distance 0 decides, so decoding writes the memorised
    translation.
    """
    graphdef, params, examples, entries = setup
    store = knn.build(jnp.asarray(entries.keys), jnp.asarray(entries.values))
    if blocks:
        store = jax.jit(inverted.build)(store)
    stepper = retrieval.stepper(graphdef, retrieval.Retrieval(k=K, mixing="fixed"))
    out = decode.search(stepper, fixed(store, params, 0.999, 0.01), [e.source for e in examples[:4]], rows=4)
    assert [list(h.pieces) for h in out] == [list(e.target) for e in examples[:4]]


def test_gate_and_empty_store_leave_the_model_alone(setup):
    graphdef, params, examples, entries = setup
    sources = [e.source for e in examples[:4]]
    plain = decode.search(decode.plain(graphdef), params, sources, rows=4)
    full = knn.build(jnp.asarray(entries.keys), jnp.asarray(entries.values))
    nothing = knn.build(jnp.zeros((0, 16)), jnp.zeros(0, jnp.int32))
    for store, gate in ((full, 1e-6), (nothing, 1.0)):
        stepper = retrieval.stepper(graphdef, retrieval.Retrieval(k=K, mixing="fixed", gate=gate))
        out = decode.search(stepper, fixed(store, params, 0.9), sources, rows=4)
        assert [list(h.pieces) for h in out] == [list(h.pieces) for h in plain]


def test_fewer_entries_than_k_and_temperatures():
    """Three entries at 0, ln 2, ln 4: 4/7, 2/7, 1/7; no filler reads the last value."""
    log_nmt = jnp.log(jnp.full((1, 10), 0.1))
    keys = jnp.sqrt(jnp.log(jnp.array([[1.0], [2.0], [4.0]])))
    store = knn.build(keys, jnp.array([5, 6, 7]), centre=jnp.zeros(1))
    how = retrieval.Retrieval(k=8, mixing="fixed", candidates=8)
    found = jax.jit(retrieval.find, static_argnums=2)(store, jnp.zeros((1, 1)), how)

    def mixed(temperature):
        weights = retrieval.Weights(None, None, jnp.float32(temperature), weight=jnp.float32(1.0))
        return np.exp(np.asarray(retrieval.mix(log_nmt, found, weights, "fixed")))[0]

    np.testing.assert_allclose(mixed(1.0)[5:8], [4 / 7, 2 / 7, 1 / 7], rtol=1e-5)
    assert mixed(1.0)[:5].max() == 0
    np.testing.assert_allclose(mixed(np.inf)[5:8], [1 / 3] * 3, rtol=1e-5)


@pytest.mark.parametrize("coded", [False, True])
def test_a_shadow_finds_what_the_exact_search_finds(coded):
    rng = np.random.default_rng(3)
    low = rng.normal(size=(600, 4)) @ rng.normal(size=(4, 16))
    keys = jnp.asarray((low + 0.01 * rng.normal(size=low.shape) + 5).astype(np.float32))
    values = jnp.asarray(rng.integers(3, 60, 600).astype(np.int32))
    store = knn.build(keys, values)
    if coded:
        codebook = pq.fit(jax.random.key(0), keys, num_subspaces=8, num_centroids=32, num_iterations=5)
        store = knn.build_coded(codebook, pq.encode(codebook, keys), values)
    how = retrieval.Retrieval(k=K, candidates=64)
    find = jax.jit(retrieval.find, static_argnums=2)
    queries = keys[:40] + 0.01
    exact = find(store, queries, how)
    shadowed = retrieval.with_shadow(store, components=6)
    padded = retrieval.padded(shadowed)
    assert padded.full.values.shape == padded.shadow.values.shape == (640,)
    for some in (shadowed, padded):
        near = find(some, queries, how)
        np.testing.assert_allclose(near.distances, exact.distances, rtol=1e-3, atol=1e-4)
        assert (np.sort(near.ids) == np.sort(exact.ids)).mean() > 0.98
    assert (find(retrieval.padded(store), queries, how).ids == exact.ids).all()


def shuffled(store: datastore.Datastore, order) -> datastore.Datastore:
    return dataclasses.replace(store, keys=store.keys[order], values=store.values[order])


def test_what_blocks_find_does_not_depend_on_the_shuffle(monkeypatch):
    rng = np.random.default_rng(4)
    centres = rng.normal(size=(40, 16))
    keys = (centres[rng.integers(0, 40, 1500)] + 0.3 * rng.normal(size=(1500, 16))).astype(np.float32)
    codebook = pq.fit(
        jax.random.key(0), jnp.asarray(keys), num_subspaces=8, num_centroids=64, num_iterations=3
    )
    facts = datastore.Facts(
        model="m",
        dim=16,
        width=8,
        dtype="uint8",
        coding="pq",
        codebook=datastore.codebook_digest(codebook),
        key="output",
        vocabulary_size=1500,
    )
    codes = datastore.encode(facts, codebook, keys)
    own = datastore.Datastore(
        pathlib.Path("memory"), facts, codes, np.arange(1500, dtype=np.int32), None, codebook
    )
    queries = jnp.asarray(keys[:64] + 0.1)
    how, find = retrieval.Retrieval(k=K, probes=8), jax.jit(retrieval.find, static_argnums=2)
    small = memory.searchable(own, "inverted", components=8)
    assert isinstance(small, knn.CodedStore)  # so few are searched exactly
    exact = find(small, queries, how)
    monkeypatch.setattr(memory, "SMALL", 1000)
    stores = [
        memory.searchable(s, "inverted", components=8) for s in (own, shuffled(own, rng.permutation(1500)))
    ]
    assert all(isinstance(store, inverted.Index) for store in stores)
    first, second = (find(store, queries, how) for store in stores)
    assert first.values.tolist() == second.values.tolist()
    assert first.distances.tolist() == second.distances.tolist()
    both = [len(set(a) & set(b)) / K for a, b in zip(first.values.tolist(), exact.values.tolist())]
    assert np.mean(both) > 0.9


def test_padding_a_store_costs_an_eighth_at_most_and_makes_few_sizes():
    sizes = {}
    for rows in (0, 1, 15, 16, 17, *range(100, 1000, 7)):
        like = knn.Store(
            jax.ShapeDtypeStruct((rows, 2), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            jax.ShapeDtypeStruct((2,), jnp.float32),
        )
        sizes[rows] = jax.eval_shape(retrieval.padded, like).values.shape[0]
    assert all(rows <= size <= max(16, rows * 9 / 8, rows + 16) for rows, size in sizes.items())
    assert len(set(sizes.values())) < 40


def test_refusals():
    for wrong in (
        dict(k=0),
        dict(gate=0.0),
        dict(gate=1.5),
        dict(k=8, candidates=4),
        dict(probes=0),
        dict(mixing="half"),
    ):
        with pytest.raises(ValueError, match=next(iter(reversed(wrong)))):
            retrieval.Retrieval(**wrong)


# The Meta-k network.


@pytest.fixture(scope="module")
def positions(setup):
    graphdef, params, examples, entries = setup
    half = entries.sentences < 8
    store = knn.build(jnp.asarray(entries.keys[half]), jnp.asarray(entries.values[half]))
    how = retrieval.Retrieval(k=K, candidates=16)
    return store, how, meta_k.look(graphdef, params, store, examples, config=how)


def test_loss_over_few_columns_equals_the_whole_vocabulary(setup, positions):
    graphdef, params, examples, _ = setup
    store, how, seen = positions
    meta = knn.init_meta(jax.random.key(1), k=K)
    smoothing, heat = 0.05, jnp.float32(2.0)
    got = jax.jit(functools.partial(meta_k.loss, smoothing=smoothing))(meta, seen, heat)

    def slow():
        total, count = 0.0, 0
        from trainers.translation import batches

        for index, batch in batches.in_order(examples, batch_tokens=1024):
            keys, log_nmt = retrieval.teacher_forced(graphdef, params, batch)
            n = len(index)
            keys, log_nmt = keys[:n].reshape(-1, 16), log_nmt[:n].reshape(-1, 60)
            truth = batch.targets[:n].reshape(-1)
            found = retrieval.find(store, keys, how)
            log_p = knn.adaptive(log_nmt, found, knn.meta_log_probs(meta, found), temperature=heat)
            log_p = np.asarray(log_p)
            for row, y in zip(log_p, truth):
                if y:
                    total -= (1 - smoothing) * row[y] + smoothing * row[2:].mean()
                    count += 1
        return total / count

    assert float(got) == pytest.approx(slow(), rel=1e-4)


def test_training_learns_to_trust_a_good_memory(positions, no_constants):
    _, _, seen = positions
    config = meta_k.MetaKConfig(learning_rate=0.02, max_updates=150, batch_sentences=4)
    with no_constants():
        meta, loss = meta_k.fit(jax.random.key(0), seen, temperature=1.0, config=config)
        temperature, weight = meta_k.tune_fixed(seen)
    start = knn.init_meta(jax.random.key(0), k=K)
    before = float(jax.jit(functools.partial(meta_k.loss, smoothing=0.001))(start, seen, jnp.float32(1.0)))
    assert loss < before
    again, _ = meta_k.fit(jax.random.key(0), seen, temperature=1.0, config=config)
    assert all(np.array_equal(a, b) for a, b in zip(meta, again))
    assert temperature > 0
    assert weight >= 0.5  # two thirds of the questions are in the memory


def test_meta_k_file(tmp_path):
    meta = knn.init_meta(jax.random.key(0), k=K)
    place, notes = tmp_path / "m.npz", []
    meta_k.save(place, meta, 3.5, model="m" * 64, kind="records")
    again, temperature = meta_k.load(place, model="m" * 64, kind="records", notes=notes)
    assert temperature == 3.5
    assert all(np.array_equal(a, b) for a, b in zip(meta, again))
    assert notes == []
    with pytest.raises(
        InputError, match="is for the model mmmmmmmmmmmm, not for xxxxxxxxxxxx; give the network"
    ):
        meta_k.load(place, model="x" * 64, kind="records", notes=notes)
    with pytest.raises(
        InputError, match=r"for memories of records, this one holds cells; give .*cells_meta_k.npz"
    ):
        meta_k.load(place, model="m" * 64, kind="cells", notes=notes)
    # Of a version that wrote neither: taken, and said.
    data.save_params(place, {**meta._asdict(), "temperature": np.float32(3.5)})
    assert meta_k.load(place, model="x" * 64, kind="cells", notes=notes)[1] == 3.5
    assert notes == [f"{place} does not say which model and memory it is for; taken to be these"]


@pytest.mark.parametrize(
    "change",
    [
        {"out_weights": np.zeros((32, 9), np.float32)},
        {"hidden_bias": np.zeros(31, np.float32)},
        {"hidden_weights": np.zeros((7, 32), np.float32)},
        {"hidden_weights": np.full((2 * K, 32), np.nan, np.float32)},
        {"temperature": np.zeros(0, np.float32)},
        {"temperature": np.float32(-1)},
        {"temperature": np.float32(np.inf)},
        {"out_bias": np.zeros(4, "<U3")},
    ],
)
def test_a_damaged_meta_k_file_is_one_line(tmp_path, change):
    arrays = {**knn.init_meta(jax.random.key(0), k=K)._asdict(), "temperature": np.float32(1)}
    data.save_params(tmp_path / "m.npz", {**arrays, **change})
    with pytest.raises(InputError, match="is a damaged Meta-k network"):
        meta_k.load(tmp_path / "m.npz", model="", kind="records", notes=[])
