"""A memory on disk is whole, says whose it is, refuses what does not belong, and is searched without loading it."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import knn, pq
from trainers.common.errors import InputError
from trainers.translation import datastore

MODEL = "a" * 64


def facts(codebook=None, **changes):
    coding = {pq.Codebook: "pq", pq.Projection: "pca"}.get(type(codebook), "none")
    width = {"pq": 4, "pca": 3, "none": 8}[coding]
    plain = dict(
        model=MODEL,
        dim=8,
        width=width,
        dtype="uint8" if coding == "pq" else "float32",
        coding=coding,
        codebook=datastore.codebook_digest(codebook),
        key="output",
        vocabulary_size=100,
    )
    return datastore.Facts(**{**plain, **changes})


def records(seed, n):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, 8), dtype=np.float32) + 5, rng.integers(0, 100, n).astype(np.int32)


def codebooks():
    keys = jnp.asarray(records(99, 400)[0])
    fit = jax.jit(pq.fit, static_argnames=("num_subspaces", "num_centroids"))
    return {
        "none": None,
        "pq": fit(jax.random.key(0), keys, num_subspaces=4, num_centroids=16),
        "pca": pq.fit_pca(keys, num_components=3),
    }


@pytest.fixture(scope="module")
def all_codebooks():
    return codebooks()


def filled(folder, codebook, *sizes, **changes):
    what = facts(codebook, **changes)
    datastore.create(folder, what, codebook)
    for i, n in enumerate(sizes):
        keys, values = records(i, n)
        datastore.append(folder, what, keys=datastore.encode(what, codebook, keys), values=values)
    return what


@pytest.mark.parametrize("coding", ["none", "pq", "pca"])
def test_streamed_search_finds_what_a_search_of_the_whole_finds(tmp_path, all_codebooks, coding):
    codebook = all_codebooks[coding]
    filled(tmp_path / "s", codebook, 30, 0, 55)
    store = datastore.open_store(tmp_path / "s", model=MODEL)
    assert store.count == 85
    assert not store.keys.flags.writeable
    queries = jnp.asarray(records(7, 5)[0])
    whole = knn.search(datastore.on_device(store), queries, k=6)
    for block_rows in (20, 85, 1000):
        parts = datastore.search(store, queries, k=6, block_rows=block_rows)
        assert parts.ids.tolist() == whole.ids.tolist()
        assert parts.values.tolist() == whole.values.tolist()
        np.testing.assert_allclose(parts.distances, whole.distances, rtol=1e-5)
    decoded = np.asarray(datastore.decode(store.facts, codebook, store.keys), np.float64)
    exact = np.sort(((np.asarray(queries, np.float64)[:, None] - decoded) ** 2).sum(-1))[:, :6]
    np.testing.assert_allclose(whole.distances, exact, rtol=1e-4)


def test_a_memory_of_fewer_records_than_neighbours(tmp_path):
    """None has no neighbour; three have three, at 0, ln 2 and ln 4, and nothing else has mass (AC41)."""
    what = filled(tmp_path / "s", None)
    found = datastore.search(datastore.open_store(tmp_path / "s"), jnp.zeros((2, 8)), k=8)
    assert found.ids.tolist() == [[-1] * 8] * 2
    keys = np.zeros((3, 8), np.float32)
    keys[:, 0] = np.sqrt(np.log([1, 2, 4]))
    datastore.append(tmp_path / "s", what, keys=keys, values=np.array([5, 6, 7]))
    found = datastore.search(datastore.open_store(tmp_path / "s"), jnp.zeros((2, 8)), k=8)
    assert found.ids.tolist() == [[0, 1, 2] + [-1] * 5] * 2
    log_probs = jax.jit(knn.to_log_probs, static_argnames="vocab_size")(found, vocab_size=8, temperature=1.0)
    np.testing.assert_allclose(jnp.exp(log_probs), [[0, 0, 0, 0, 0, 4 / 7, 2 / 7, 1 / 7]] * 2, rtol=1e-5)


def test_a_killed_append_leaves_the_memory_as_it_was(tmp_path, monkeypatch):
    what = filled(tmp_path / "s", None, 10)
    keys, values = records(1, 5)
    monkeypatch.setattr(datastore, "_write_manifest", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        datastore.append(tmp_path / "s", what, keys=keys, values=values)
    monkeypatch.undo()
    assert (datastore.open_store(tmp_path / "s").values == records(0, 10)[1]).all()
    assert datastore.append(tmp_path / "s", what, keys=keys, values=values) == 15
    store = datastore.open_store(tmp_path / "s")
    assert (store.values == np.concatenate([records(0, 10)[1], values])).all()
    assert (store.keys == np.concatenate([records(0, 10)[0], keys])).all()


@pytest.mark.parametrize(
    "change", [{"model": "b" * 64}, {"vocabulary_size": 99}, {"key": "ffn_input"}, {"dtype": "float16"}]
)
def test_records_of_another_kind_are_refused(tmp_path, change):
    filled(tmp_path / "s", None, 3)
    other = facts(**change)
    keys = records(0, 1)[0].astype(other.dtype)
    with pytest.raises(InputError, match=rf"differ in {next(iter(change))}"):
        datastore.append(tmp_path / "s", other, keys=keys, values=np.zeros(1, np.int32))
    with pytest.raises(InputError, match="differ in"):
        datastore.open_store(tmp_path / "s", facts=other)
    assert datastore.open_store(tmp_path / "s").count == 3


def test_another_models_memory_does_not_open(tmp_path):
    filled(tmp_path / "s", None, 3)
    with pytest.raises(InputError, match="holds keys of the model aaaaaaaaaaaa, not of bbbbbbbbbbbb"):
        datastore.open_store(tmp_path / "s", model="b" * 64)


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (np.full((1, 8), np.nan, np.float32), np.zeros(1, np.int32), "not finite"),
        (
            np.zeros((2, 8), np.float32),
            np.array([3, 100]),
            r"1 values \(first: 100\) lie outside the vocabulary",
        ),
        (np.zeros((1, 8), np.float32), np.array([-1]), "outside the vocabulary"),
        (np.zeros((1, 7), np.float32), np.zeros(1, np.int32), r"keys must be \[n, 8\]"),
        (np.zeros((1, 8), np.float64), np.zeros(1, np.int32), "keys must be float32"),
        (np.zeros((1, 8), np.float32), np.zeros(2, np.int32), "values must be integers, one a key"),
    ],
)
def test_bad_records_are_refused_and_nothing_is_written(tmp_path, keys, values, message):
    what = filled(tmp_path / "s", None, 3)
    with pytest.raises(ValueError, match=message):
        datastore.append(tmp_path / "s", what, keys=keys, values=values)
    assert datastore.open_store(tmp_path / "s").count == 3


def damage_short(folder: pathlib.Path):
    (folder / "keys.bin").write_bytes((folder / "keys.bin").read_bytes()[:-1])


def damage_codebook(folder: pathlib.Path):
    other = codebooks()["pq"]
    datastore.save_codebook(folder / "codebook.npz", other._replace(centroids=other.centroids + 1))


def damage_json(folder: pathlib.Path):
    (folder / "manifest.json").write_text("{")


def damage_count(folder: pathlib.Path):
    data = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**data, "count": -1}))


def damage_missing(folder: pathlib.Path):
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_short, "is cut short"),
        (damage_codebook, "codebook is not the one its manifest names"),
        (damage_json, "is damaged"),
        (damage_count, "count -1"),
        (damage_missing, "holds no memory"),
    ],
)
def test_damage_is_named(tmp_path, all_codebooks, damage, message):
    filled(tmp_path / "s", all_codebooks["pq"], 5)
    damage(tmp_path / "s")
    with pytest.raises(InputError, match=message):
        datastore.open_store(tmp_path / "s")


def test_a_memory_is_not_overwritten(tmp_path):
    what = filled(tmp_path / "s", None, 3)
    with pytest.raises(InputError, match="holds a memory already"):
        datastore.create(tmp_path / "s", what)
    with pytest.raises(InputError, match="is not a folder"):
        datastore.open_store(tmp_path / "none")


def test_weights_are_kept_beside_their_records(tmp_path):
    what = facts(weighted=True)
    datastore.create(tmp_path / "s", what)
    keys, values = records(0, 4)
    weights = np.array([1, 2, 4, 8], np.float32)
    datastore.append(tmp_path / "s", what, keys=keys, values=values, weights=weights)
    store = datastore.open_store(tmp_path / "s")
    assert store.weights is not None
    assert store.weights.tolist() == weights.tolist()
    with pytest.raises(ValueError, match="weights must be positive"):
        datastore.append(tmp_path / "s", what, keys=keys, values=values, weights=weights * 0)


def test_encoding_in_parts_equals_encoding_at_once(all_codebooks):
    keys = np.random.default_rng(0).standard_normal((16_384 + 5, 8), dtype=np.float32)
    codebook = all_codebooks["pq"]
    codes = datastore.encode(facts(codebook), codebook, keys)
    assert (codes == np.asarray(jax.jit(pq.encode)(codebook, keys))).all()
    assert datastore.encode(facts(codebook), codebook, keys[:0]).shape == (0, 4)
