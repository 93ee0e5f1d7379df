"""The optional engine: probing every cell finds what exact search finds, probing some finds most of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import knn, pq
from trainers.common.errors import InputError
from trainers.translation import datastore, faiss_engine, memory, retrieval


@pytest.fixture(scope="module", params=["none", "pq"])
def store(request, tmp_path_factory):
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((40, 8))
    keys = (centres[rng.integers(0, 40, 2000)] + 0.3 * rng.standard_normal((2000, 8))).astype(np.float32)
    codebook = None
    if request.param == "pq":
        codebook = jax.jit(pq.fit, static_argnames=("num_subspaces", "num_iterations"))(
            jax.random.key(0), jnp.asarray(keys), num_subspaces=4, num_iterations=3
        )
    facts = datastore.Facts(
        model="m",
        dim=8,
        width=4 if codebook else 8,
        dtype="uint8" if codebook else "float32",
        coding=request.param,
        codebook=datastore.codebook_digest(codebook),
        key="output",
        vocabulary_size=2000,
    )
    folder = datastore.create(tmp_path_factory.mktemp("s") / "store", facts, codebook)
    datastore.append(
        folder, facts, keys=datastore.encode(facts, codebook, keys), values=np.arange(2000, dtype=np.int32)
    )
    return datastore.open_store(folder)


def queries():
    return np.random.default_rng(1).standard_normal((6, 8)).astype(np.float32)


def test_probing_every_cell_is_exact(store):
    pytest.importorskip("faiss", reason="FAISS (faiss-cpu) is not installed")
    index = faiss_engine.build(store, lists=20, probes=20)
    found = faiss_engine.search(index, queries(), k=5)
    exact = jax.jit(knn.search, static_argnames="k")(datastore.on_device(store), jnp.asarray(queries()), k=5)
    np.testing.assert_allclose(found.distances, exact.distances, rtol=1e-3, atol=1e-3)
    assert (found.values == found.ids).all()
    inside = jax.jit(lambda q: faiss_engine.search_in_jit(index, q, k=5))(jnp.asarray(queries()))
    assert inside.ids.tolist() == found.ids.tolist()


def test_probing_some_cells_finds_most_and_misses_carry_no_mass(store):
    pytest.importorskip("faiss", reason="FAISS (faiss-cpu) is not installed")
    index = faiss_engine.build(store, lists=40, probes=1)
    found = faiss_engine.search(index, queries(), k=500)
    assert (found.ids == -1).any()
    assert np.isinf(found.distances[found.ids == -1]).all()
    some = faiss_engine.search(faiss_engine.build(store, lists=40, probes=10), queries(), k=5)
    exact = jax.jit(knn.search, static_argnames="k")(datastore.on_device(store), jnp.asarray(queries()), k=5)
    recall = np.mean([len(set(a) & set(b)) / 5 for a, b in zip(some.ids.tolist(), exact.ids.tolist())])
    assert recall > 0.7


def test_decoding_may_search_by_it(store):
    """Seen through the store's own interface, from inside a jitted step."""
    pytest.importorskip("faiss", reason="FAISS (faiss-cpu) is not installed")
    found = {
        how: jax.jit(retrieval.find, static_argnums=2)(
            memory.searchable(store, how, components=8), jnp.asarray(queries()), retrieval.Retrieval(k=5)
        )
        for how in ("faiss", "exact")
    }
    assert found["faiss"].distances.shape == (6, 5)
    near = np.asarray(found["faiss"].ids)[:, 0] == np.asarray(found["exact"].ids)[:, 0]
    assert near.mean() > 0.6


def test_settings_it_cannot_serve_are_refused(store):
    pytest.importorskip("faiss", reason="FAISS (faiss-cpu) is not installed")
    with pytest.raises(ValueError, match="probes must be in"):
        faiss_engine.build(store, lists=4, probes=5)
    with pytest.raises(InputError, match="2000 records cannot fill 3000 cells"):
        faiss_engine.build(store, lists=3000, probes=5)


def test_absence_says_what_to_install(store, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    faiss_engine._faiss.cache_clear()
    with pytest.raises(InputError, match="pip install faiss-cpu"):
        memory.searchable(store, "faiss", components=0)
    faiss_engine._faiss.cache_clear()
