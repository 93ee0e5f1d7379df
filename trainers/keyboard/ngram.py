"""Interpolated Kneser-Ney n-grams: the baseline that a neural keyboard model has to beat.

Chen and Goodman 1998 (TR-10-98, sections 3 and 4.1): modified Kneser-Ney, three discounts an order. Lower
orders count the distinct words on the left of an n-gram, or occurrences where nothing can stand on its left.
The model counts words of clients without noise: it is for comparison only, not covered by any guarantee.
"""

from typing import NamedTuple

import numpy as np

from trainers.common.packed import spans
from trainers.common.vocabulary import PAD, Vocabulary


class Level(NamedTuple):
    """The n-grams of one order n, sorted by `keys`: those with the same first n - 1 words are neighbours.

    keys: int64, (index of the first n - 1 words at the order below) * ids + last word.
    suffix: int64, index of the last n - 1 words at the order below.
    prob: float64, interpolated probability of the last word after the others.
    begin: int64 [contexts + 1], where the n-grams of each (n - 1)-gram begin.
    backoff: float64 [contexts], weight of the order below after each (n - 1)-gram; 1 where none follows.
    """

    keys: np.ndarray
    suffix: np.ndarray
    prob: np.ndarray
    begin: np.ndarray
    backoff: np.ndarray


class NGram(NamedTuple):
    """A fitted model. unigram: float64 [ids], 0 for pad and begin. levels: orders 2, 3, ... of the model."""

    vocabulary: Vocabulary
    unigram: np.ndarray
    levels: tuple[Level, ...]

    @property
    def order(self) -> int:
        return len(self.levels) + 1


class Scores(NamedTuple):
    """Percent, but for perplexity; see `evaluate`."""

    top1_words: float
    top3_words: float
    tff_accuracy: float
    perplexity: float


def fit(rows: np.ndarray, *, vocabulary: Vocabulary, order: int = 5) -> NGram:
    """Returns the n-gram model of these examples.

    Args:
      rows: int32 [examples, length], as `Vocabulary.encode` makes them: begin, words, perhaps end, then pad.
    """
    if order < 1:
        raise ValueError(f"order must be at least 1, got {order=}")
    if rows.ndim != 2 or not len(rows):
        raise ValueError(f"rows must be [examples, length] with at least one example, got {rows.shape=}")
    size = vocabulary.size
    real = rows != PAD
    words = rows.astype(np.int64)
    # node[e, t]: index of the n-gram that ends at t, among those of its order; -1 where the row is too short.
    node = np.where(real, words, -1)
    nodes, counts, keys, suffixes = [node], [np.bincount(node[real], minlength=size)], [], []
    for _ in range(2, order + 1):
        longer = np.full_like(node, -1)
        there = real[:, 1:] & (node[:, :-1] >= 0)
        spelled = node[:, :-1][there] * size + words[:, 1:][there]
        unique, first, inverse, count = np.unique(
            spelled, return_index=True, return_inverse=True, return_counts=True
        )
        longer[:, 1:][there] = inverse
        suffixes.append(node[:, 1:][there][first])
        keys.append(unique)
        counts.append(count)
        nodes.append(longer)
        node = longer
    # Continuation counts for all but the highest order; an n-gram that begins a row has nothing on its left.
    for n in range(len(counts) - 1):
        lefts = np.bincount(suffixes[n], minlength=len(counts[n]))
        counts[n] = np.where(lefts > 0, lefts, counts[n])
    predicted = counts[0].astype(np.float64)
    predicted[[PAD, vocabulary.bos]] = 0
    targets = size - 2  # words, out-of-vocabulary and end: what may follow
    kept, share = _discounted(predicted, np.array([0, size]))
    unigram = kept + share[0] / targets
    unigram[[PAD, vocabulary.bos]] = 0
    levels: list[Level] = []
    below = unigram
    contexts = size
    for key, suffix, count in zip(keys, suffixes, counts[1:]):
        begin = np.searchsorted(key, np.arange(contexts + 1) * size)
        kept, backoff = _discounted(count.astype(np.float64), begin)
        prob = kept + np.repeat(backoff, np.diff(begin)) * below[suffix]
        levels.append(Level(key, suffix, prob, begin, backoff))
        below, contexts = prob, len(key)
    return NGram(vocabulary, unigram, tuple(levels))


def probabilities(model: NGram, rows: np.ndarray) -> np.ndarray:
    """float64 [examples, length - 1]: the probability of each target `rows[:, 1:]`; 1 where it is pad."""
    targets = rows[:, 1:].astype(np.int64)
    real = targets != PAD
    contexts = _contexts(model, rows)
    prob = model.unigram[targets]
    for level, context in zip(model.levels, contexts):
        known = real & (context >= 0)
        here, word = context[known], targets[known]
        found = _find(level.keys, here * model.vocabulary.size + word)
        # An n-gram that was seen carries its whole interpolated probability.
        prob[known] = np.where(found >= 0, level.prob[found], level.backoff[here] * prob[known])
    return np.where(real, prob, 1.0)


def predictions(model: NGram, rows: np.ndarray, *, count: int = 3, only_words: bool = True) -> np.ndarray:
    """int64 [examples, length - 1, count]: the likeliest next ids after each position, best first.

    Args:
      only_words: leave out-of-vocabulary and end out of the choice, as a keyboard does.
    """
    best = np.empty((len(rows), rows.shape[1] - 1, count), np.int64)
    for there, context, table in _best(model, _contexts(model, rows), count, only_words):
        best[there] = table[context]
    return best


def evaluate(model: NGram, rows: np.ndarray) -> Scores:
    """Scores next-word predictions, as neural models are scored.

    Accuracies count targets that are words of the vocabulary: top-1 and top-3 with special tokens banned from
    the prediction ("words"), and with the likeliest of all ids (`tff_accuracy`, TensorFlow Federated's
    accuracy_no_oov_or_eos). Perplexity is over all targets but pad, out-of-vocabulary and end included.
    """
    targets = rows[:, 1:]
    real = targets != PAD
    in_vocabulary = real & (targets <= len(model.vocabulary))
    if not in_vocabulary.any():
        raise ValueError("rows hold no target that is a word of the vocabulary; nothing to score")
    words = predictions(model, rows)[in_vocabulary] == targets[in_vocabulary][:, None]
    likeliest = predictions(model, rows, count=1, only_words=False)[in_vocabulary][:, 0]
    log_prob = np.log(probabilities(model, rows)[real])
    return Scores(
        100 * float(words[:, 0].mean()),
        100 * float(words.any(1).mean()),
        100 * float((likeliest == targets[in_vocabulary]).mean()),
        float(np.exp(-log_prob.mean())),
    )


def _discounted(counts: np.ndarray, begin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of the discounted counts, and of what was taken off, in each group of `begin`."""
    n1, n2, n3, n4 = (np.count_nonzero(counts == c) for c in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2) if n1 else 0.5
    # Chen and Goodman, equation 26; kept inside (0, count] where a small corpus lacks a class.
    raw = [1 - 2 * y * n2 / max(n1, 1), 2 - 3 * y * n3 / max(n2, 1), 3 - 4 * y * n4 / max(n3, 1)]
    d1, d2, d3 = (float(np.clip(d, 0.1, c)) for d, c in zip(raw, (0.95, 1.95, 2.95)))
    discount = np.select([counts == 0, counts == 1, counts == 2], [0.0, d1, d2], d3)
    total = _group_sums(counts, begin)
    off = _group_sums(discount, begin)
    with np.errstate(invalid="ignore", divide="ignore"):
        backoff = np.where(total > 0, off / total, 1.0)
        share = (counts - discount) / np.repeat(total, np.diff(begin))
    return share, backoff


def _group_sums(values: np.ndarray, begin: np.ndarray) -> np.ndarray:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return sums[begin[1:]] - sums[begin[:-1]]


def _find(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Positions of `wanted` in sorted `keys`, -1 where absent."""
    if not len(keys):
        return np.full(wanted.shape, -1)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, at, -1)


def _contexts(model: NGram, rows: np.ndarray) -> list[np.ndarray]:
    """For orders 2, 3, ...: index of the words before each target at the order below, -1 where never seen."""
    words = rows.astype(np.int64)
    node = np.where(words[:, :-1] != PAD, words[:, :-1], -1)
    contexts = [node]
    for level in model.levels[:-1]:
        longer = np.full_like(node, -1)
        before = node[:, :-1]
        known = (before >= 0) & (words[:, 1:-1] != PAD)
        longer[:, 1:][known] = _find(
            level.keys, before[known] * model.vocabulary.size + words[:, 1:-1][known]
        )
        contexts.append(longer)
        node = longer
    return contexts


def _best(model: NGram, contexts: list[np.ndarray], count: int, only_words: bool):
    """Yields, order by order, positions, the row of each in a table, and that table of likeliest ids.

    After a context, a word that never followed it ranks as the order below ranks it: the best are among the
    words that followed and the best of the order below.
    """
    size = model.vocabulary.size
    banned = np.zeros(size, bool)
    banned[list(model.vocabulary.specials) if only_words else [PAD, model.vocabulary.bos]] = True
    unigram = np.where(banned, -1.0, model.unigram)
    top = np.argsort(-unigram, kind="stable")[:count]
    table, prob = top[None], unigram[top][None]
    row = np.zeros(contexts[0].shape, np.int64)  # of each position, in the table of the order below
    yield np.ones(row.shape, bool), row.ravel(), table
    for level, context in zip(model.levels, contexts):
        there = context >= 0
        needed, first, inverse = np.unique(context[there], return_index=True, return_inverse=True)
        below = row[there][first]  # the same position's shorter context is known too
        inherited, inherited_prob = table[below], prob[below] * level.backoff[needed][:, None]
        seen = _find(level.keys, needed[:, None] * size + inherited) >= 0
        inherited_prob = np.where(seen, -1.0, inherited_prob)
        followers = level.begin[needed + 1] - level.begin[needed]
        own = spans(level.begin[needed], followers)
        word = level.keys[own] % size
        owner = np.concatenate(
            [np.repeat(np.arange(len(needed)), n) for n in (followers, np.full(len(needed), count))]
        )
        candidate = np.concatenate([word, inherited.ravel()])
        likely = np.concatenate([np.where(banned[word], -1.0, level.prob[own]), inherited_prob.ravel()])
        ranked = np.lexsort((candidate, -likely, owner))
        starts = np.searchsorted(owner[ranked], np.arange(len(needed)))
        chosen = ranked[starts[:, None] + np.arange(count)]
        table, prob = candidate[chosen], likely[chosen]
        row = np.zeros(context.shape, np.int64)
        row[there] = inverse
        yield there, inverse, table
