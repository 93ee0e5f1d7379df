"""Completions of several words: equal to a slow, obvious search; their rates counted position by position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainers.keyboard.little import WORDS, log_probs
from trainers.keyboard import compose, predict
from trainers.keyboard.suggest import Suggester


def completion(little, words, threshold, min_words):
    """Word by word: (words shown) after `words`."""
    v, shown, confidence = little.vocabulary, [], 1.0
    for _ in range(compose.LENGTH):
        scores = log_probs(little, [*words, *shown])
        offered = [*range(1, len(WORDS) + 1), v.eos]
        best = max(offered, key=lambda token: scores[token])
        confidence *= np.exp(scores[best])
        if best == v.eos or confidence < threshold:
            break
        shown.append(WORDS[best - 1])
    return shown if len(shown) >= min_words else []


@pytest.mark.parametrize(("threshold", "min_words"), [(0.01, 1), (0.05, 2), (0.3, 1)])
def test_a_completion_is_the_greedy_one_above_the_threshold(little, threshold, min_words):
    suggester, lengths = Suggester(little), set()
    for text in ("", "we ", "the tea ", "sea sea sea ", "bread ? "):
        suggester.read(text)
        got = compose.complete(little, suggester, threshold=threshold, min_words=min_words)
        assert got == completion(little, text.split(), threshold, min_words)
        lengths.add(len(got))
    assert len(lengths) > 1


def beam_completion(little, words, threshold, min_words, beams):
    """Hypotheses as python lists, each scored on the whole text."""
    v, shown = little.vocabulary, []
    kept = [(0.0, [])]
    for length in range(1, compose.LENGTH + 1):
        longer = []
        for score, hypothesis in kept:
            if hypothesis[-1:] == ["<eos>"]:
                longer.append((score, hypothesis))
                continue
            log_prob = log_probs(little, [*words, *hypothesis])
            longer += [(score + log_prob[v.id(w)], [*hypothesis, w]) for w in WORDS]
            longer.append((score + log_prob[v.eos], [*hypothesis, "<eos>"]))
        kept = sorted(longer, key=lambda pair: -pair[0])[:beams]
        score, best = kept[0]
        if best[-1] == "<eos>" or np.exp(score) < threshold:
            break
        shown = best
        assert len(shown) == length
    return shown if len(shown) >= min_words else []


def test_no_threshold_lets_padding_through(little):
    suggester = Suggester(little)
    for text in TEXTS:
        suggester.read(text)
        for beams in (1, 4):
            got = compose.complete(little, suggester, threshold=1e-300, min_words=1, beams=beams)
            assert not any(word.startswith("<") for word in got)


TEXTS = ("", "we ", "the tea ", "sea sea sea ", "bread ? ", "them we ", "then see the ")


@pytest.mark.parametrize("beams", [1, 2, 5])
def test_a_completion_is_that_of_a_beam_search(little, beams):
    suggester, differ = Suggester(little), 0
    for text in TEXTS:
        suggester.read(text)
        for threshold, min_words in ((1e-4, 1), (0.05, 2)):
            options = {"threshold": threshold, "min_words": min_words}
            got = compose.complete(little, suggester, beams=beams, **options)
            assert got == beam_completion(little, text.split(), threshold, min_words, beams)
            differ += got != completion(little, text.split(), threshold, min_words)
    assert (differ > 0) == (beams > 1)


def test_more_hypotheses_than_words_find_the_most_probable_continuation(little):
    """Of two words: all 100 pairs compared."""
    suggester = Suggester(little)
    for text in TEXTS:
        suggester.read(text)
        words = text.split()
        first = np.asarray(log_probs(little, words), np.float64)
        pairs = {
            (a, b): first[little.vocabulary.id(a)]
            + np.asarray(log_probs(little, [*words, a]), np.float64)[little.vocabulary.id(b)]
            for a in WORDS
            for b in WORDS
        }
        best = max(pairs, key=pairs.__getitem__)
        found = predict.continuations(
            little.params,
            suggester.state,
            jnp.asarray(suggester.log_probs)[None],
            cell=little.sizes.cell,
            length=2,
            beams=20,
        )
        confidence = float(found.confidence[0, 1])
        if confidence > 0:  # else the text more probably ends
            assert little.vocabulary.decode(np.asarray(found.words[0, 1])) == list(best)
            assert confidence == pytest.approx(np.exp(pairs[best]), rel=1e-4)


def test_continuations_map_over_texts(little):
    """Rows are texts of their own, and vmap equals a loop."""
    suggester = Suggester(little)
    rows = []
    for text in TEXTS:
        suggester.read(text)
        rows.append((suggester.state, suggester.log_probs))
    state = jax.tree.map(lambda *x: jnp.concatenate(x), *(s for s, _ in rows))
    log_prob = jnp.stack([jnp.asarray(x) for _, x in rows])
    options = {"cell": little.sizes.cell, "length": 3, "beams": 3}
    together = predict.continuations(little.params, state, log_prob, **options)
    for i, (one, scores) in enumerate(rows):
        alone = predict.continuations(little.params, one, jnp.asarray(scores)[None], **options)
        np.testing.assert_array_equal(together.words[i], alone.words[0])
        np.testing.assert_allclose(together.confidence[i], alone.confidence[0], rtol=1e-5)


@pytest.mark.parametrize("beams", [1, 3])
def test_trigger_rate_and_accuracy_are_counted_position_by_position(little, examples, beams):
    thresholds = np.array([0.02, 0.1, 0.3])
    points = compose.measure(
        little.params, examples, little.sizes, thresholds=thresholds, min_words=2, beams=beams
    )
    v = little.vocabulary
    for point in points:
        positions = shown = right = accepted = 0
        for row in examples:
            tokens = row[row != 0]
            for t in range(1, len(tokens)):
                positions += 1
                words = beam_completion(little, v.decode(tokens[1:t]), point.threshold, 2, beams)
                shown += bool(words)
                if words and words == v.decode(tokens[t : t + len(words)]):
                    right += 1
                    accepted += len(words)
        assert point.trigger_rate == pytest.approx(100 * shown / positions)
        assert point.words == pytest.approx(100 * accepted / positions)
        assert np.isnan(point.accuracy) if not shown else point.accuracy == pytest.approx(100 * right / shown)
    assert points[0].trigger_rate > points[-1].trigger_rate


@pytest.mark.parametrize("letters", ["t", "se", "xq"])
@pytest.mark.parametrize("threshold", [0.5, 0.05, 1e-5])
def test_a_completion_of_the_word_being_typed_equals_the_greedy_one(little, letters, threshold):
    suggester = Suggester(little)
    suggester.read("we " + letters)
    found = compose.complete(little, suggester, threshold=threshold, letters=letters)
    expected, product = [], 1.0
    begin = [w for w in WORDS if w.startswith(letters)]
    for place in range(compose.LENGTH if begin else 0):
        p = np.exp(np.float64(log_probs(little, ["we", *expected])))
        of = {w: p[little.vocabulary.id(w)] for w in (begin if place == 0 else WORDS)}
        if place == 0:
            of = {w: q / sum(of.values()) for w, q in of.items()}
        elif p[little.vocabulary.eos] > max(of.values()):
            break
        best = max(of, key=of.__getitem__)
        product *= of[best]
        if product < threshold:
            break
        expected.append(best)
    assert found == (expected if len(expected) >= compose.MIN_WORDS else [])
