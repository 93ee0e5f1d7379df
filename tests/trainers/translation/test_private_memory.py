"""Sharing less: the cost of a filter and of an epsilon, from a finished tiny run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import knn, pq
from tests.trainers.translation.test_cli import run
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
def finished(small_run):
    return small_run


RELEASE = "--delta 1e-4 --adjacency add-remove --cells 4 --max-buckets 4 --min-sentences 20 --epsilons 2 50"


@pytest.fixture(scope="module")
def measured(finished):
    """The run after a first `release`, which also fits the cells."""
    argv = ["release", "--run-dir", str(finished), *RELEASE.split(), "--insecure-noise-seed", "3"]
    assert main(["translation", *argv]) == 0
    return finished, argv


@pytest.mark.slow
def test_release_measures_every_way_and_continues(measured, capsys):
    finished, argv = measured
    before = (finished / "release.jsonl").read_text()
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
    assert result["guarantee"]["histogram, epsilon 2"].startswith(
        "Simulation: the noise comes from a public seed"
    )
    assert result["guarantee"]["histogram, epsilon 2"].endswith("epsilon: 2 at delta 0.0001")
    assert result["guarantee"]["records, value in 20 sentences"] == "epsilon: none"
    statements = json.loads((finished / "release_privacy.json").read_text())
    assert set(statements) == {"2", "50"}
    assert statements["2"]["simulation"]
    assert 1.99 < statements["2"]["epsilon"] <= 2
    assert (finished / "release.png").stat().st_size > 1000
    text = (finished / "release.md").read_text()
    assert "epsilon: none" in text
    assert (
        text.count(
            "- Simulation: the noise comes from a public seed, and nothing is guaranteed. Each sentence"
        )
        == 2
    )
    assert (finished / "release.jsonl").read_text() == before  # the second call measured nothing anew
    private = [json.loads(line) for line in (finished.parent / "law.train.jsonl").read_text().splitlines()]
    for path in finished.glob("release*"):
        assert not any(row[side].encode() in path.read_bytes() for row in private for side in ("en", "de"))


@pytest.mark.slow
def test_a_noisy_histogram_is_shared_like_a_memory(measured, capsys, tmp_path):
    """store --epsilon, a weighted round, share, shuffle, open, translate: through the same files."""
    public, folder = measured[0] / "public", measured[0].parent
    cells, model = ["--codebook", public / "cells.npz"], ["--model", public]
    for name in ("it", "law"):
        run(capsys, "keygen", "--name", name, "--out", tmp_path)
        status, made = run(
            capsys, "store", *model, *cells, "--data", folder / f"{name}.train.jsonl", "--out", tmp_path / name,
            "--epsilon", "30", "--delta", "1e-3", "--adjacency", "add-remove", "--max-buckets", "4",
        )  # fmt: skip
        assert status == 0
        assert made["records"] > 0
        assert "differential privacy" in made["guarantee"]
        assert json.loads((tmp_path / name / "privacy.json").read_text())["delta"] == 1e-3
    people = ["--members", tmp_path / "it.public.json", tmp_path / "law.public.json"]
    place, secret = ["--round", tmp_path / "round.json"], ["--secret", tmp_path / "law.secret.json"]
    assert run(capsys, "keygen", *place, *secret, *people, *model, *cells, "--weighted")[0] == 0
    told = []
    for name in ("it", "law"):
        own = ["--secret", tmp_path / f"{name}.secret.json", "--store", tmp_path / name]
        told.append(run(capsys, "share", *place, *own, *people, "--out", tmp_path / f"{name}.up"))
    both = ["--uploads", tmp_path / "it.up", tmp_path / "law.up"]
    told.append(run(capsys, "shuffle", *place, *both, "--out", tmp_path / "all"))
    joint = ["--shuffled", tmp_path / "all", "--out", tmp_path / "joint"]
    told.append(run(capsys, "open", *place, *secret, *people, *cells, *joint))
    assert [status for status, _ in told] == [0] * 4
    sentence = json.loads((tmp_path / "it" / "privacy.json").read_text())["sentence"]
    assert {out["guarantee"] for _, out in told} == {sentence}
    assert json.loads((tmp_path / "joint" / "privacy.json").read_text())["sentence"] == sentence
    assert main(["account", "report", str(tmp_path / "joint")]) == 0
    assert sentence in capsys.readouterr().out
    # A histogram whose making is not told has no guarantee that could be passed on.
    (tmp_path / "it" / "release.json").unlink()
    own = ["--secret", tmp_path / "it.secret.json", "--store", tmp_path / "it"]
    assert (
        "none that can be stated"
        in run(capsys, "share", *place, *own, *people, "--out", tmp_path / "up")[1]["guarantee"]
    )
    (tmp_path / "text").write_text("house garden\n\n", encoding="utf-8")
    asked = ["--input", tmp_path / "text", "--store", tmp_path / "joint"]
    status, said = run(capsys, "translate", *model, *asked)
    assert status == 0
    assert len(said["translations"]) == 2
    # The network of single records weighs other distances.
    status, said = run(capsys, "translate", *model, *asked, "--meta", public / "meta_k.npz")
    assert status == 2
    assert "for memories of records, this one holds cells" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epsilon", "1"], "--delta is needed"),
        (["--epsilon", "1", "--delta", "1e-4"], "--adjacency is needed"),
        (["--epsilon", "-1", "--delta", "1e-4", "--adjacency", "add-remove"], "--epsilon must be positive"),
        (["--epsilon", "1", "--delta", "1e-4", "--adjacency", "add-remove"], "--codebook of cells"),
        (["--min-sentences", "0"], "--min-sentences must be at least 1"),
    ],
)
def test_a_store_that_cannot_be_is_refused_before_anything_is_written(
    finished, capsys, tmp_path, options, message
):
    data = finished.parent / "it.train.jsonl"
    out = tmp_path / "out"
    status, err = run(capsys, "store", "--model", finished / "public", "--data", data, "--out", out, *options)
    assert status == 2
    assert message in err
    assert not out.exists()


def test_opted_out_pairs_and_rare_values_stay_out(finished, capsys, tmp_path):
    data = finished.parent / "it.train.jsonl"
    first = json.loads(data.read_text().splitlines()[0])["en"]
    (tmp_path / "no").write_text(f" {first} \nnot in the text\n", encoding="utf-8")
    store = ["store", "--model", finished / "public", "--data", data]
    _, everything = run(capsys, *store, "--out", tmp_path / "all")
    _, some = run(capsys, *store, "--out", tmp_path / "some", "--opt-out", tmp_path / "no")
    assert some["left_out"] >= 1
    assert some["pairs"] == everything["pairs"] - some["left_out"]
    assert some["records"] < everything["records"]
    _, frequent = run(capsys, *store, "--out", tmp_path / "frequent", "--min-sentences", "20")
    kept = np.fromfile(tmp_path / "frequent" / "values.bin", "<i4")
    whole = np.fromfile(tmp_path / "all" / "values.bin", "<i4")
    assert 0 < frequent["records"] == len(kept) < len(whole)
    assert 2 in kept  # the end mark is in every sentence


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
