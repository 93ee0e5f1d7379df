"""The attacks find what is there to be found, and nothing where nothing is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpriv import pq
from trainers.translation import attack


def text_of(pieces):
    return [" ".join(f"w{p}" for p in row) for row in pieces]


def test_windows_are_the_pieces_before_and_stay_in_their_sentence():
    values = np.array([5, 6, 7, 8, 9], np.int32)
    sentences = np.array([0, 0, 0, 1, 1])
    got = attack.windows(values, sentences, length=2)
    assert got.tolist() == [[0, 0], [0, 5], [5, 6], [0, 0], [0, 8]]
    assert attack.windows(values[:0], sentences[:0], length=3).shape == (0, 3)
    assert attack.windows(values[:1], sentences[:1], length=3).tolist() == [[0, 0, 0]]


def revealing(seed, n, noise, length=2, vocabulary=12, dim=24):
    """Keys that are a linear code of the hidden pieces plus noise."""
    rng = np.random.default_rng(seed)
    codes = np.random.default_rng(0).standard_normal((length, vocabulary, dim))
    texts = rng.integers(1, vocabulary, (n, length)).astype(np.int32)
    keys = sum(codes[i, texts[:, i]] for i in range(length)) + noise * rng.standard_normal((n, dim))
    return keys.astype(np.float32), texts


@pytest.mark.parametrize("noise", [0.1, 100.0])
def test_reconstruction_finds_text_that_keys_reveal_and_only_that(noise, no_constants):
    keys, texts = revealing(1, 2000, noise)
    theirs, truth = revealing(2, 300, noise)
    with no_constants():
        model = attack.fit_inverse(
            jax.random.key(0), keys, texts, vocabulary_size=12, hidden=64, code=16, steps=300, batch_size=64
        )
    got = attack.reconstruct(model, theirs, truth, texts, text_of)
    if noise < 1:
        assert got.f1 > 90
        assert got.recall > 90
        assert got.f1 > got.baseline_f1 + 50
    else:
        assert got.f1 < got.baseline_f1 + 10
    assert len(got.samples) == 5
    assert got.samples[0][0] == text_of(truth[:1])[0]


def test_overlap_counts_pieces_as_multisets():
    guesses = np.array([[3, 3, 4], [5, 0, 0]])
    texts = np.array([[3, 4, 4], [6, 7, 0]])
    precision, recall, f1 = attack.overlap(guesses, texts)
    assert precision == pytest.approx(100 * 2 / 4)
    assert recall == pytest.approx(100 * 2 / 5)
    assert f1 == pytest.approx(100 * 4 / 9)
    assert attack.overlap(guesses * 0, texts) == (0, 0, 0)


def test_exact_codes_give_members_away():
    """The guesser has model and codebook: everyone's sentences are found, strangers' are not."""
    rng = np.random.default_rng(0)
    codebook = pq.Codebook(jnp.asarray(rng.standard_normal((4, 256, 2)), jnp.float32))
    keys = rng.integers(0, 256, (400, 4), np.uint8)
    values = rng.integers(0, 50, 400).astype(np.int32)
    sentences = np.repeat(np.arange(40), 10)
    inside = sentences < 20
    take = lambda mask: (keys[mask], values[mask], sentences[mask])
    memory_order = rng.permutation(np.flatnonzero(inside))
    got = attack.membership(
        keys[memory_order],
        values[memory_order],
        take(inside),
        take(~inside),
        lambda k: pq.decode(codebook, k),
    )
    assert got.members_found == 100
    assert got.others_found == 0
    assert got.auc == 1
    half = attack.membership(
        keys[inside][5:], values[inside][5:], take(inside), take(~inside), lambda k: pq.decode(codebook, k)
    )
    assert half.members_found == 95  # one sentence lost records
    same = attack.membership(keys, values, take(inside), take(~inside), lambda k: pq.decode(codebook, k))
    assert same.auc == 0.5
    with pytest.raises(ValueError, match="at least one sentence"):
        attack.membership(keys, values, take(inside), take(sentences < 0), lambda k: pq.decode(codebook, k))


def test_equal_codes_of_another_value_are_no_match():
    codebook = pq.Codebook(jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 2)), jnp.float32))
    keys, one = np.array([[2]], np.uint8), np.zeros(1, np.int64)
    decode = lambda k: pq.decode(codebook, k)
    got = attack.membership(
        keys, np.array([7]), (keys, np.array([7]), one), (keys, np.array([8]), one), decode
    )
    assert (got.members_found, got.others_found) == (100, 0)
    assert got.auc == 0.5  # the distance sees keys alone


def test_auc_counts_pairs():
    assert attack.auc(np.array([3.0, 2.0]), np.array([1.0, 2.0])) == pytest.approx(3.5 / 4)
    assert attack.auc(np.array([1.0]), np.array([2.0])) == 0


def test_rare_values_are_counted_over_sentences_and_clients():
    one = (np.array([1, 1, 2, 3]), np.array([0, 0, 0, 1]))  # 1 twice in one sentence, 2 and 3 once
    two = (np.array([2, 4, 4]), np.array([0, 0, 1]))
    first, second, none = attack.rare_values([one, two, (np.zeros(0, int), np.zeros(0, int))])
    assert first == (
        2,
        2,
        3,
    )  # 1 and 3 in one sentence and nowhere else, in three records; 2 is the other's too
    assert second == (0, 1, 0)  # 4 in two of its sentences
    assert none == (0, 0, 0)
    assert attack.rare_values([]) == []


def test_an_attacker_without_records_is_refused():
    with pytest.raises(ValueError, match="needs records of its own"):
        attack.fit_inverse(
            jax.random.key(0), np.zeros((0, 3), np.float32), np.zeros((0, 2), np.int32), vocabulary_size=5
        )
    model = attack.fit_inverse(
        jax.random.key(0),
        np.ones((1, 3), np.float32),
        np.ones((1, 2), np.int32),
        vocabulary_size=5,
        steps=1,
        hidden=4,
        code=2,
    )
    with pytest.raises(ValueError, match="no record with hidden text"):
        attack.reconstruct(
            model, np.ones((1, 3), np.float32), np.zeros((1, 2), np.int32), np.ones((1, 2), int), text_of
        )
