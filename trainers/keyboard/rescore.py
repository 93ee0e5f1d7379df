"""Re-ranking of noisy typing (on-the-fly rescoring): where the fingers fell, and what the model expects.

Taps are simulated: each letter's tap falls around its key's centre with a Gaussian error (`tap_stddev` key widths in
both directions). A candidate word, of as many letters as there were taps, is scored

    log p(taps | word) + weight * log p(word | text so far)

and the best is committed. The word-modified ratio is the share of committed words that were not the intended ones and
so have to be modified by hand. Beside it: taps alone, and taps with the rank of the word in the (public) vocabulary
in place of the model. All is measured on held-out text, which no guarantee covers.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from trainers.keyboard import batches, model
from trainers.keyboard.model import ModelConfig, Params
from trainers.keyboard.suggest import beginning_with

ROWS_OF_KEYS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
TAP_STDDEV = 0.5
WEIGHTS = (0.25, 0.5, 0.75, 1.0, 1.5)
SPEED = 36.2  # words a minute on phones, mean of 37,370 people (Palin et al. 2019)
_BATCH = 64

# Centres in key widths; each row of a phone keyboard starts half a key further right, the last one and a half.
KEYS = {
    letter: (column + shift, float(row))
    for row, (letters, shift) in enumerate(zip(ROWS_OF_KEYS, (0.0, 0.5, 1.5), strict=True))
    for column, letter in enumerate(letters)
}


class Words(NamedTuple):
    """The vocabulary's words that can be tapped (letters a to z only), by length.

    token: length -> token ids. centre: length -> key centres `[words, length, 2]`.
    """

    token: dict[int, Int[np.ndarray, " words"]]
    centre: dict[int, Float[np.ndarray, "words length 2"]]


def tappable(words: tuple[str, ...]) -> Words:
    """Groups the words by length; word i of the vocabulary is token i + 1."""
    by_length: dict[int, list[int]] = {}
    for i, word in enumerate(words):
        if all(letter in KEYS for letter in word):
            by_length.setdefault(len(word), []).append(i)
    token = {n: np.array(ids) + 1 for n, ids in by_length.items()}
    centre = {n: np.array([[KEYS[c] for c in words[i]] for i in ids]) for n, ids in by_length.items()}
    return Words(token, centre)


def spatial_scores(
    taps: Float[np.ndarray, "rows length 2"], centres: Float[np.ndarray, "words length 2"], stddev: float
) -> Float[np.ndarray, "rows words"]:
    """log p(taps | word) in nats, up to a constant of the row's length."""
    a, b = taps.reshape(len(taps), -1), centres.reshape(len(centres), -1)
    return (a @ b.T - 0.5 * (b * b).sum(1) - 0.5 * (a * a).sum(1)[:, None]) / stddev**2


class Cases(NamedTuple):
    """Held-out words to be typed. target: token ids. log_probs: of every token, given the words before."""

    target: Int[np.ndarray, " cases"]
    log_probs: Float[np.ndarray, "cases tokens"]


def cases(
    params: Params,
    examples: Int[np.ndarray, "examples width"],
    sizes: ModelConfig,
    words: Words,
    *,
    most: int,
) -> Cases:
    """The first `most` tappable words of `examples`, each with what the model expects there."""
    known = np.zeros(sizes.num_tokens, bool)
    for ids in words.token.values():
        known[ids] = True
    targets, expected, found = [], [], 0
    for part in batches.blocks(examples, _BATCH):
        scores = np.asarray(model.logits(params, jnp.asarray(part[:, :-1].T), cell=sizes.cell))
        keep = known[part[:, 1:].T]
        scores = scores[keep]
        scores = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
        targets.append(part[:, 1:].T[keep])
        expected.append(scores)
        found += int(keep.sum())
        if found >= most:
            break
    if not found:
        raise ValueError("no held-out word consists of the letters a to z; rescoring cannot be measured")
    return Cases(np.concatenate(targets)[:most], np.concatenate(expected)[:most])


def committed(
    held_out: Cases, words: Words, *, prior: Float[np.ndarray, "cases tokens"], stddev: float, seed: int
) -> Int[np.ndarray, " cases"]:
    """The word that the keyboard commits in each case: the best of taps and `prior` (nats, already weighted).

    The taps depend on `seed` and the intended word's place in the list alone.
    """
    rng = np.random.default_rng(seed)
    out = np.zeros(len(held_out.target), np.int64)
    for length in sorted(words.token):
        token, centre = words.token[length], words.centre[length]
        rows = np.flatnonzero(np.isin(held_out.target, token))
        place = {int(t): i for i, t in enumerate(token)}
        intended = np.array([place[int(t)] for t in held_out.target[rows]], np.int64)
        noise = rng.normal(0.0, stddev, (len(rows), length, 2))
        if not len(rows):
            continue
        scores = spatial_scores(centre[intended] + noise, centre, stddev) + prior[np.ix_(rows, token)]
        out[rows] = token[scores.argmax(1)]
    return out


def word_modified_ratio(
    held_out: Cases, words: Words, *, prior: Float[np.ndarray, "cases tokens"], stddev: float, seed: int
) -> float:
    """Percent of committed words that are not the intended ones."""
    chosen = committed(held_out, words, prior=prior, stddev=stddev, seed=seed)
    return float(100 * (chosen != held_out.target).mean())


class Rescoring(NamedTuple):
    """Word-modified ratios in percent. weight: of the model, the best of `WEIGHTS` on the tuning cases."""

    taps: float
    taps_and_rank: float
    taps_and_model: float
    weight: float


def measure(tuning: Cases, test: Cases, words: Words, *, stddev: float, seed: int) -> Rescoring:
    """Tunes the model's weight on `tuning` and measures on `test`, with the same taps for every decoder."""
    options = {"stddev": stddev, "seed": seed}
    ratios = [
        word_modified_ratio(tuning, words, prior=w * tuning.log_probs, stddev=stddev, seed=seed + 1)
        for w in WEIGHTS
    ]
    weight = WEIGHTS[int(np.argmin(ratios))]
    rank = -np.log(np.maximum(np.arange(test.log_probs.shape[1]), 1.0))  # Zipf: the i-th word has odds 1 / i
    return Rescoring(
        taps=word_modified_ratio(test, words, prior=np.zeros_like(test.log_probs), **options),
        taps_and_rank=word_modified_ratio(
            test, words, prior=np.broadcast_to(rank, test.log_probs.shape), **options
        ),
        taps_and_model=word_modified_ratio(test, words, prior=weight * test.log_probs, **options),
        weight=weight,
    )


def candidates(
    typed: str,
    words: Words,
    vocabulary: tuple[str, ...],
    log_probs: Float[np.ndarray, " tokens"],
    *,
    stddev: float,
    weight: float,
    count: int = 3,
) -> list[tuple[str, float]]:
    """The best words for letters tapped in the middle of their keys, with their scores in nats, best first.

    What cannot be tapped, or has a length that no word has, comes back alone with score 0.
    """
    if not typed or len(typed) not in words.token or any(letter not in KEYS for letter in typed):
        return [(typed, 0.0)]
    token, centre = words.token[len(typed)], words.centre[len(typed)]
    taps = np.array([[KEYS[letter] for letter in typed]])
    scores = spatial_scores(taps, centre, stddev)[0] + weight * log_probs[token]
    best = np.lexsort((token, -scores))[:count]
    return [(vocabulary[token[i] - 1], float(scores[i])) for i in best]


class Speed(NamedTuple):
    """Keystrokes of an ideal user who takes the intended word as soon as it is among the three offered.

    picked_rate: percent of words offered before their first letter. keystrokes: per word without and with
    suggestions, the blank included. words_per_minute: at the speed of people without suggestions (36.2) and
    proportionally faster; an upper bound, since looking at suggestions takes time.
    """

    picked_rate: float
    keystrokes_plain: float
    keystrokes: float
    words_per_minute: float


def speed(held_out: Cases, vocabulary: tuple[str, ...], *, offered: int = 3) -> Speed:
    """Counts the keystrokes of every case: letters until the word is offered, then one to take it."""
    order = sorted(range(len(vocabulary)), key=vocabulary.__getitem__)
    names = [vocabulary[i] for i in order]
    token = np.array(order) + 1
    total = plain = picked = 0
    ranges: dict[str, slice] = {}
    for target, log_probs in zip(held_out.target, held_out.log_probs, strict=True):
        word, scores = vocabulary[target - 1], log_probs[token]
        plain += len(word) + 1
        cost = len(word) + 1
        for typed in range(len(word)):
            if word[:typed] not in ranges:
                ranges[word[:typed]] = beginning_with(names, word[:typed])
            offers = ranges[word[:typed]]
            # Ties go to the smaller id, as in suggestions.
            own = log_probs[target]
            ahead = scores[offers] > own
            ties = (scores[offers] == own) & (token[offers] < target)
            if int(ahead.sum() + ties.sum()) < offered:
                cost = min(cost, typed + 1)
                picked += typed == 0
                break
        total += cost
    count = len(held_out.target)
    return Speed(100 * picked / count, plain / count, total / count, SPEED * plain / total)
