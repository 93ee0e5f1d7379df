"""The n-gram baseline: a slow twin written from the paper, distributions that sum to one, known scores."""

import collections

import numpy as np
import pytest

from trainers.common import readers
from trainers.common.vocabulary import Vocabulary
from trainers.keyboard import ngram

WORDS = ("a", "b", "c", "d", "e", "f")


def corpus(seed=0, examples=150):
    """Sentences in which words follow each other with a preference, so that counts of 1 to 4 all occur."""
    rng = np.random.default_rng(seed)
    vocabulary = Vocabulary(WORDS, "public")
    texts = []
    for _ in range(examples):
        word, text = "a", []
        for _ in range(rng.integers(1, 8)):
            text.append(word)
            word = WORDS[min(5, (WORDS.index(word) + rng.geometric(0.5)) % 6)] if rng.random() > 0.05 else "z"
            word = "a" if word == "z" and rng.random() < 0.5 else word
            if word == "z":
                text.append("z")
                word = "c"
        texts.append(text)
    return vocabulary, vocabulary.encode(texts, 6)


class SlowKneserNey:
    """Modified Kneser-Ney by dictionaries, as Chen and Goodman write it."""

    def __init__(self, rows, vocabulary, order):
        self.order, self.vocabulary = order, vocabulary
        raw = [collections.Counter() for _ in range(order + 1)]
        lefts = [collections.defaultdict(set) for _ in range(order + 1)]
        for row in rows.tolist():
            row = [i for i in row if i]
            for n in range(1, order + 1):
                for t in range(n - 1, len(row)):
                    gram = tuple(row[t - n + 1 : t + 1])
                    raw[n][gram] += 1
                    if t >= n:
                        lefts[n][gram].add(row[t - n])
        self.count = [None] + [
            {g: c if n == order else len(lefts[n][g]) or c for g, c in raw[n].items()}
            for n in range(1, order + 1)
        ]
        self.count[1].pop((vocabulary.bos,), None)
        self.discount = [None]
        for n in range(1, order + 1):
            n1, n2, n3, n4 = (sum(c == k for c in self.count[n].values()) for k in (1, 2, 3, 4))
            y = n1 / (n1 + 2 * n2) if n1 else 0.5
            d = [1 - 2 * y * n2 / max(n1, 1), 2 - 3 * y * n3 / max(n2, 1), 3 - 4 * y * n4 / max(n3, 1)]
            self.discount.append([0.0] + [min(max(v, 0.1), k + 0.95) for k, v in enumerate(d)])

    def prob(self, history, word):
        history = tuple(history)[-(self.order - 1) :] if self.order > 1 else ()
        lower = self.prob(history[1:], word) if history else 1 / (self.vocabulary.size - 2)
        n = len(history) + 1
        after = {g: c for g, c in self.count[n].items() if g[:-1] == history}
        total = sum(after.values())
        if not total:
            return lower
        own = after.get((*history, word), 0)
        taken = sum(self.discount[n][min(c, 3)] for c in after.values())
        return (own - self.discount[n][min(own, 3)]) / total + taken / total * lower


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_equals_the_slow_twin_on_unseen_text(order):
    vocabulary, rows = corpus()
    _, fresh = corpus(seed=1, examples=25)
    model = ngram.fit(rows, vocabulary=vocabulary, order=order)
    slow = SlowKneserNey(rows, vocabulary, order)
    got = ngram.probabilities(model, fresh)
    words = ngram.predictions(model, fresh)
    likeliest = ngram.predictions(model, fresh, count=1, only_words=False)
    for e, row in enumerate(fresh.tolist()):
        for t in range(len(row) - 1):
            if not row[t + 1]:
                continue
            law = np.array([slow.prob(row[: t + 1], w) for w in range(vocabulary.size)])
            law[[0, vocabulary.bos]] = 0
            assert law.sum() == pytest.approx(1, abs=1e-12)
            assert got[e, t] == pytest.approx(law[row[t + 1]], rel=1e-12)
            # By probability, not by id: ties may fall either way.
            np.testing.assert_allclose(law[words[e, t]], np.sort(law[1:7])[::-1][:3], rtol=1e-12)
            assert law[likeliest[e, t, 0]] == pytest.approx(law.max(), rel=1e-12)


def test_scores_count_as_stated():
    vocabulary = Vocabulary(("a", "b"), "public")
    # After "a" always "b"; the second word of a test example is out of the vocabulary.
    model = ngram.fit(vocabulary.encode([["a", "b"]] * 50, 3), vocabulary=vocabulary)
    rows = vocabulary.encode([["a", "b"], ["a", "zebra"]], 3)
    scores = ngram.evaluate(model, rows)
    assert scores.top1_words == 100  # a, b, a: the word out of the vocabulary and the ends are not counted
    assert scores.tff_accuracy == 100
    prob = ngram.probabilities(model, rows)
    assert scores.perplexity == pytest.approx(np.exp(-np.log(prob).sum() / 6))  # they are counted here
    assert (prob[rows[:, 1:] == 0] == 1).all()


def test_refuses_nothing_to_score():
    vocabulary = Vocabulary(("a", "b"), "public")
    model = ngram.fit(vocabulary.encode([["a", "b"]], 3), vocabulary=vocabulary)
    with pytest.raises(ValueError, match="no target"):
        ngram.evaluate(model, vocabulary.encode([["x", "y"]], 3))
    with pytest.raises(ValueError, match="order"):
        ngram.fit(vocabulary.encode([["a"]], 3), vocabulary=vocabulary, order=0)


def test_reaches_the_published_scores(shared):
    folder = shared / "data" / "fedtext"
    vocabulary = Vocabulary.from_tsv(folder / "vocab_train_clients.tsv", 4000)
    everything = {"max_examples_per_client": 10**9}
    train, test = (
        readers.read_clients(folder / "irc_federated.parquet", split=s, **everything)
        for s in ("train", "test")
    )
    assert test.num_clients == 1266
    rows, fresh = vocabulary.encode(train.tokens, 20), vocabulary.encode(test.tokens, 20)
    for order, (top1, top3, perplexity) in {
        1: (3.7, 9.7, 322),
        2: (14.4, 26.4, 102),
        5: (19.2, 32.1, 82),
    }.items():
        scores = ngram.evaluate(ngram.fit(rows, vocabulary=vocabulary, order=order), fresh)
        assert scores.top1_words == pytest.approx(top1, abs=0.15)
        assert scores.top3_words == pytest.approx(top3, abs=0.15)
        # Three discounts an order rather than one: a little under the recorded perplexity.
        assert 0.97 * perplexity < scores.perplexity < 1.005 * perplexity
    assert scores.tff_accuracy == pytest.approx(16.8, abs=0.1)
