"""Sentences, padding, scores: what a document is, and that no document touches another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxpriv import depth, worddp
from tests.oracles import selection_loops
from tests.trainers.documents.conftest import AWKWARD
from trainers.common.errors import InputError
from trainers.documents import data, evaluate, mechanisms, networks, preparation, public, sentences
from trainers.documents import encoder as encoders


def test_the_awkward_files_are_those_of_the_cases(shared):
    for name, text in AWKWARD.items():
        assert (shared / "cases/files" / name).read_bytes() == text.encode()


def test_sentence_counts_of_the_awkward_files():
    """None, none, one (AC40); the ideographic full stop ends a sentence, and so does the danda (AC39)."""
    counts = [len(sentences.split(text, splitter="sentencex")) for text in AWKWARD.values()]
    assert counts == [0, 0, 1, 13]
    found = sentences.split(AWKWARD["doc_unicode.txt"], splitter="sentencex")
    assert found[4:8] == [
        "\u4eca\u65e5\u306f\u6674\u308c\u3067\u3059\u3002",
        "\u660e\u65e5\u306f\u96e8\u3067\u3057\u3087\u3046\u3002",
        "\u092f\u0939 \u092a\u0939\u0932\u093e \u0935\u093e\u0915\u094d\u092f \u0939\u0948\u0964",
        "\u092f\u0939 \u0926\u0942\u0938\u0930\u093e \u0939\u0948\u0964",
    ]
    assert found.count("caf\u00e9 is open.") == 2  # NFC: both forms are one text
    assert found[12] == "\U0001f600" * 3  # a sentence of emoji counts
    assert len(sentences.split(AWKWARD["doc_unicode.txt"], splitter="lines")) == 1


def test_the_awkward_files_are_encoded_one_row_each_and_drawn_uniformly_where_short(toy_encoder):
    """In order, finite; the composed and the decomposed form alike (AC39); k = 0 and 1 tie everywhere (AC40)."""
    names = ["doc_one.txt", "doc_unicode.txt", "doc_empty.txt", "doc_blank.txt", "doc_one.txt"]
    texts = [AWKWARD[name] for name in names]
    encoder = encoders.SentenceEncoder(toy_encoder)
    documents = data.encode(
        data.Documents([f"{i}" for i in range(5)], texts, [""] * 5), encoder, splitter="sentencex", classes=()
    )
    assert documents.ids == ["0", "1", "2", "3", "4"]
    assert documents.counts.tolist() == [1, 13, 0, 0, 1]
    assert documents.vectors.shape == (15, 32)
    assert np.isfinite(documents.vectors).all()
    assert (documents.vectors[1 + 8] == documents.vectors[1 + 9]).all()
    assert (documents.means[[0, 4]] == encoder.encode(["Only one sentence here."])).all()
    assert (documents.means[2:4] == 0).all()

    directions, away = np.random.default_rng(0).normal(size=(2, 5, 32)).astype(np.float32)
    prepared = depth.prepare(jnp.asarray(documents.means[1] + 0.02 * away), jnp.asarray(directions))
    scores = mechanisms.depth_scores(documents, prepared, num_directions=(5,), devices=1)[5]
    assert scores.shape == (5, 5)
    assert (scores[[0, 2, 3, 4]] == 0).all()
    assert (scores[1] > 0).any()
    drawn = mechanisms.select(
        jax.random.split(jax.random.key(0), 5 * 1000),
        np.repeat(scores, 1000, axis=0),
        epsilon=10.0,
        sensitivity=1,
        max_score=6,
        mechanism="exponential",
        devices=1,
    ).reshape(5, 1000)
    for row in (0, 2, 3, 4):
        assert scipy.stats.chisquare(np.bincount(drawn[row], minlength=5)).pvalue > 1e-3


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


def test_votes_are_rounded_a_sentence_at_a_time_and_summed_for_the_candidates_label():
    rng = np.random.default_rng(5)
    documents = encoded(rng, [0, 1, 7, 40])
    votes, labels = rng.random((48, 2)).astype(np.float32), np.array([1, 0, 0, 1, 1])
    found = mechanisms.vote_scores(documents, votes, labels, num_steps=10)
    for i in range(4):
        own = votes[documents.offsets[i] : documents.offsets[i + 1]]
        assert (found[i] == np.rint(own * 10).sum(0)[labels]).all()
    far = np.zeros((48, 2), np.float32)
    far[0], far[1:8] = (
        (np.nan, 9.0),
        (1.0, 0.0),
    )  # clamped and replaced: no sentence moves a score by more than 10
    assert mechanisms.vote_scores(documents, far, labels, num_steps=10)[1].tolist() == [10, 0, 0, 10, 10]
    long = encoded(rng, [5000])
    assert mechanisms.vote_scores(long, np.ones((5000, 2), np.float32), labels, num_steps=32)[0, 0] == 160_000


def test_noise_of_many_documents_is_the_librarys_and_devices_change_nothing():
    rng = np.random.default_rng(6)
    documents = encoded(rng, [0, 3, 20, 9, 1])

    def keys():
        return jax.random.split(jax.random.key(1), 5)

    axes, low, high = (
        rng.normal(size=(3, 6)).astype(np.float32),
        -np.ones(6, np.float32),
        np.ones(6, np.float32),
    )
    candidates = rng.normal(size=(30, 6)).astype(np.float32)
    prepared = depth.prepare(jnp.asarray(candidates), jnp.asarray(rng.normal(size=(5, 6)), jnp.float32))
    low_rank = mechanisms.clipped_means(documents, axes, max_norm=2.0) + mechanisms.low_rank_noise(
        keys(), documents.counts, 3, max_norm=2.0, epsilon=4.0
    )
    box = mechanisms.truncated_means(documents, low, high) + mechanisms.truncation_noise(
        keys(), documents.counts, low, high, epsilon=4.0
    )
    for i in (0, 2, 4):
        (sentences,), (where,) = map(jnp.asarray, documents.padded([i], 32))
        one = worddp.low_rank_noised(
            keys()[i], sentences, jnp.asarray(axes), max_norm=2.0, epsilon=4.0, where=where
        )
        np.testing.assert_allclose(low_rank[i], one, atol=1e-5)
        one = worddp.truncated_laplace(
            keys()[i], sentences, *map(jnp.asarray, (low, high)), epsilon=4.0, where=where
        )
        np.testing.assert_allclose(box[i], one, rtol=1e-4, atol=1e-5)
    results = []
    for devices in (1, 3, 8):
        depths = mechanisms.depth_scores(documents, prepared, num_directions=(5,), devices=devices)[5]
        drawn = mechanisms.select(
            keys(),
            depths,
            epsilon=2.0,
            sensitivity=1,
            max_score=10,
            mechanism="permute_and_flip",
            devices=devices,
        )
        results.append((depths, drawn))
    for depths, drawn in results[1:]:
        assert (depths == results[0][0]).all()
        assert (drawn == results[0][1]).all()


def test_medoids_are_distinct_documents_nearest_to_the_centres():
    points = np.array([[0, 0], [0.1, 0], [5, 5], [9, 9]], np.float32)
    centres = np.array([[0, 0], [0.02, 0], [6, 6]], np.float32)
    assert public.nearest_distinct(centres, points).tolist() == [0, 1, 2]
    pairs = public.pair_differences(np.random.default_rng(0), points, 50)
    np.testing.assert_allclose(np.linalg.norm(pairs, axis=1), 1, rtol=1e-5)  # never a point with itself


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


@pytest.mark.parametrize(
    ("counts", "words"), [([0, 1, 5, 2, 1], ", of which 3 have fewer than 2 "), ([2, 5], "")]
)
def test_a_comparison_says_how_many_documents_the_paper_would_leave_out(tmp_path, counts, words):
    """Nothing is filtered in silence: own documents of 0 and 1 sentence are measured, and counted (AC33)."""
    facts: dict = {}
    preparation.note(facts, {"test": encoded(np.random.default_rng(0), counts)})
    assert facts["documents"] == {"test": len(counts)}
    assert facts["fewer_than_2_sentences"] == {"test": 3 if words else 0}
    means = {"nonprivate": 90.0, "random": 50.0, "low_rank": {"10": 80.0}}
    result = {"macro_f1": means, "spread": {"low_rank": {"10": 1.0}}}
    said = evaluate.write_report(tmp_path, result, {**facts, "classes": ["a", "b"]})
    assert ("fewer than 2" in said) == bool(words)
    assert f"{len(counts)} test documents (2 classes){words}" in said


def test_a_document_too_long_to_pad_is_refused():
    assert data.width_of(10_000) == 16_384
    with pytest.raises(InputError, match="too long"):
        data.width_of(10**6)


def test_macro_f1_and_random_guess():
    """Truth 0, 0, 1 guessed 0, 0, 0: class 1 counts as 0; shares 0.9 and 0.1 (AC37)."""
    assert networks.macro_f1(np.array([0, 0, 1]), np.array([0, 0, 0]), 2) == pytest.approx(40.0)
    assert networks.random_guess(np.array([0] * 9 + [1]), 2) == pytest.approx(82.0)
    assert networks.macro_f1(np.array([0, 1, 2]), np.array([0, 1, 2]), 3) == pytest.approx(100.0)
