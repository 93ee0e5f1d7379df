"""Sharing less: the cost of a filter and of an epsilon, from a finished tiny run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import knn, pq
from tests.trainers.translation.test_cli import corpus, run
from trainers.cli import main
from trainers.translation import private_memory, release, retrieval


def test_a_weight_multiplies_its_entry_in_the_kernel():
    coarse = pq.Codebook(jnp.asarray([[[0.0, 0.0], [1.0, 0.0], [5.0, 5.0]]]))
    cells = np.array([[0], [0], [1], [2]], np.uint8)
    counts = np.array([2.0, 30.0, 9.0, 4.0], np.float32)
    values = np.array([3, 4, 5, 6], np.int32)
    temperature = 0.7
    halves = [release.Histogram(cells[i::2], values[i::2], counts[i::2]) for i in range(2)]
    store = private_memory.weighted_store(coarse, halves, temperature)
    queries = jnp.asarray([[0.2, 0.1], [4.0, 4.0]])
    settings = retrieval.Retrieval(k=4, candidates=8)
    found = jax.jit(lambda q: retrieval.find(store, q, settings))(queries)
    got = np.exp(knn.to_log_probs(found, vocab_size=8, temperature=temperature))
    for query, probs in zip(np.asarray(queries), got):
        away = ((np.asarray(coarse.centroids)[0][cells[:, 0]] - query) ** 2).sum(-1)
        mass = counts * np.exp(-away / temperature)
        want = np.zeros(8)
        want[values] = mass / mass.sum()
        np.testing.assert_allclose(probs, want, rtol=1e-4, atol=1e-7)
    assert (found.distances >= 0).all()
    # Of one cell's buckets the heaviest come first, so that few candidates suffice.
    one = jax.jit(lambda q: retrieval.find(store, q, retrieval.Retrieval(k=1, candidates=1)))(queries)
    assert one.values[0, 0] == 4


def test_nothing_released_is_a_store_without_neighbours():
    coarse = pq.Codebook(jnp.zeros((1, 2, 2)))
    empty = release.Histogram(np.zeros((0, 1), np.uint8), np.zeros(0, np.int32), np.zeros(0, np.float32))
    store = private_memory.weighted_store(coarse, [empty, empty], 1.0)
    found = retrieval.find(store, jnp.zeros((2, 2)), retrieval.Retrieval(k=3, candidates=5))
    assert found.ids.tolist() == [[-1] * 3] * 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("private")
    options = ["train", "--preset", "tiny", "--server", corpus(folder, "server", 200, 0)]
    options += ["--run-dir", str(folder / "run"), "--vocabulary-size", "330", "--batch-tokens", "256"]
    options += ["--test-sentences", "3", "--methods", "p_nmt", "--subspaces", "4", "--json"]
    for i, name in enumerate(("it", "law")):
        options += ["--client", f"{name}={corpus(folder, name, 60, i + 1)}"]
    assert main(["translation", *options]) == 0
    return folder / "run"


@pytest.mark.slow
def test_release_measures_every_way_and_continues(finished, capsys):
    argv = ["release", "--run-dir", finished, "--delta", "1e-4", "--adjacency", "add-remove", "--cells", "4"]
    argv += [
        "--max-buckets",
        "4",
        "--min-sentences",
        "20",
        "--epsilons",
        "2",
        "50",
        "--insecure-noise-seed",
        "3",
    ]
    status, result = run(capsys, *argv)
    assert status == 0
    ways = list(result["bleu"])
    assert ways[:3] == ["nothing (P-NMT)", "all records (FedNN)", "records, value in 20 sentences"]
    assert ways[3:] == ["histogram without noise", "histogram, epsilon 50", "histogram, epsilon 2"]
    count = result["released"]
    assert count["nothing (P-NMT)"] == 0
    assert count["all records (FedNN)"] > count["records, value in 20 sentences"] > 0
    assert count["histogram without noise"] > count["histogram, epsilon 50"] >= count["histogram, epsilon 2"]
    assert count["histogram, epsilon 50"] > 0
    assert result["guarantee"]["histogram, epsilon 2"] == "epsilon: 2 at delta 0.0001"
    assert result["guarantee"]["records, value in 20 sentences"] == "epsilon: none"
    statements = json.loads((finished / "release_privacy.json").read_text())
    assert set(statements) == {"2", "50"}
    assert statements["2"]["simulation"]
    assert 1.99 < statements["2"]["epsilon"] <= 2
    assert (finished / "release.png").stat().st_size > 1000
    text = (finished / "release.md").read_text()
    assert "epsilon: none" in text
    before = (finished / "release.jsonl").read_text()
    assert run(capsys, *argv) == (0, result)
    assert (finished / "release.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adjacency", "add-remove"], "--delta is needed"),
        (["--delta", "1e-4"], "--adjacency is needed"),
        (["--delta", "1e-4", "--adjacency", "add-remove", "--cells", "300"], "--cells must be in"),
        (["--delta", "1e-4", "--adjacency", "add-remove", "--epsilons", "0"], "--epsilons must be positive"),
        (["--delta", "1e-4", "--adjacency", "add-remove", "--min-sentences", "0"], "--min-sentences"),
    ],
)
def test_settings_it_cannot_serve_are_refused_in_one_line(finished, capsys, options, message):
    status, err = run(capsys, "release", "--run-dir", finished, *options)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
