"""Sentences, padding, scores: what a document is, and that no document touches another."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import depth
from tests.oracles import selection_loops
from trainers.common.errors import InputError
from trainers.documents import data, mechanisms, networks, sentences


def test_sentence_counts_of_the_awkward_files(shared):
    def count(name):
        return len(sentences.split((shared / "cases/files" / name).read_text(), splitter="sentencex"))

    assert (count("doc_empty.txt"), count("doc_blank.txt"), count("doc_one.txt")) == (0, 0, 1)
    found = sentences.split((shared / "cases/files/doc_unicode.txt").read_text(), splitter="sentencex")
    assert len(found) == 13
    assert "今日は晴れです。" in found  # the ideographic full stop ends a sentence, and so does the danda
    assert found.count("café is open.") == 2  # NFC: both forms are one text
    assert any("😀" in s for s in found)  # a sentence of emoji counts


def test_splitters():
    assert sentences.split("One. Two.\nThree", splitter="lines") == ["One. Two.", "Three"]
    assert sentences.split("A  b.\n\n---\n!!!\n", splitter="lines") == ["A b."]
    with pytest.raises(InputError, match="sentencex"):
        sentences.split("x", splitter="nltk")


def encoded(rng, counts, dim=6, classes=("a", "b")):
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return data.Encoded(
        [f"d{i}" for i in range(len(counts))],
        [""] * len(counts),
        rng.integers(0, len(classes), len(counts)).astype(np.int32),
        classes,
        rng.normal(size=(offsets[-1], dim)).astype(np.float32),
        offsets,
    )


def test_means_and_parts_of_ragged_documents():
    rng = np.random.default_rng(0)
    documents = encoded(rng, [3, 0, 1, 5])
    means = documents.means
    np.testing.assert_allclose(means[0], documents.vectors[:3].mean(0), rtol=1e-5)
    assert (means[1] == 0).all()
    np.testing.assert_allclose(means[3], documents.vectors[4:].mean(0), rtol=1e-5)
    part = documents.take([3, 1])
    assert part.ids == ["d3", "d1"]
    assert (part.vectors == documents.vectors[4:]).all()
    assert (part.counts == [5, 0]).all()


def test_scores_of_documents_of_all_lengths_match_the_loops():
    rng = np.random.default_rng(1)
    documents = encoded(rng, [0, 1, 5, 16, 17, 40])
    candidates, directions = rng.normal(size=(2, 12, 6)).astype(np.float32)[:, :10]
    found = mechanisms.depth_scores(
        documents, depth.prepare(jnp.asarray(candidates), jnp.asarray(directions)), num_directions=(5, 10)
    )
    steps = mechanisms.bounded_scores(documents, candidates, low=-0.5, high=1.5, num_steps=8)
    for i in range(6):
        own = documents.vectors[documents.offsets[i] : documents.offsets[i + 1]]
        for p in (5, 10):
            assert (found[p][i] == selection_loops.depth(own, candidates, directions[:p])).all()
        slow = np.round(np.clip((own @ candidates.T + 0.5) / 2, 0, 1) * 8).sum(0)
        assert np.abs(steps[i] - slow).max(initial=0) <= 1  # one sentence on a rounding edge at most


def test_a_documents_scores_do_not_depend_on_the_others():
    rng = np.random.default_rng(2)
    documents = encoded(rng, [4, 30, 7])
    candidates = rng.normal(size=(9, 6)).astype(np.float32)
    options = {"low": 0.0, "high": 2.0, "num_steps": 16}
    together = mechanisms.bounded_scores(documents, candidates, **options)
    for i in range(3):
        alone = mechanisms.bounded_scores(documents.take([i]), candidates, **options)
        assert (alone[0] == together[i]).all()


def test_one_replaced_sentence_moves_a_bounded_score_by_at_most_its_steps():
    rng = np.random.default_rng(3)
    documents = encoded(rng, [6] * 40)
    candidates = rng.normal(size=(20, 6)).astype(np.float32)
    changed = documents.vectors.copy()
    changed[::6] = rng.normal(size=(40, 6)) * 100
    before, after = (
        mechanisms.bounded_scores(d, candidates, low=-1.0, high=1.0, num_steps=10).astype(int)
        for d in (documents, documents.with_vectors(changed))
    )
    assert np.abs(before - after).max() == 10  # reached, never passed


def test_a_document_too_long_to_pad_is_refused():
    assert data.width_of(10_000) == 16_384
    with pytest.raises(InputError, match="too long"):
        data.width_of(10**6)


def test_macro_f1_and_random_guess():
    assert networks.macro_f1(np.array([0, 0, 1]), np.array([0, 0, 0]), 2) == pytest.approx(40.0)
    assert networks.random_guess(np.array([0] * 9 + [1]), 2) == pytest.approx(82.0)
    assert networks.macro_f1(np.array([0, 1, 2]), np.array([0, 1, 2]), 3) == pytest.approx(100.0)
