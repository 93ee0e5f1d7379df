"""Inline completion (Smart Compose): the next words in grey, shown only where the model is confident enough."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from trainers.keyboard import batches, model, predict
from trainers.keyboard.released import Released
from trainers.keyboard.suggest import Suggester

LENGTH = 4
MIN_WORDS = 2
THRESHOLD = 0.1
_ROWS = 64


class Point(NamedTuple):
    """One threshold's trade-off, in percent.

    trigger_rate: positions at which a completion is shown. accuracy: shown completions that are word for word what
    came next (NaN where none is shown). words: words accepted for every 100 words of text.
    """

    threshold: float
    trigger_rate: float
    accuracy: float
    words: float


def complete(
    released: Released,
    suggester: Suggester,
    *,
    threshold: float,
    min_words: int = MIN_WORDS,
    letters: str = "",
) -> list[str]:
    """The completion shown after the text of `suggester`: the longest whose probability is at least `threshold`;
    empty where fewer than `min_words` words reach it.

    While a word is being typed, its `letters` are given: the first word is the most probable one that begins so, with
    its probability among the words of the vocabulary that do.
    """
    state, first, known = suggester.state, [], 1.0
    if letters:
        first = suggester.suggest(letters, count=1)
        if not first:
            return []
        token = released.vocabulary.id(first[0])
        among = suggester.log_probs[suggester.starting_with(letters) + 1]
        known = float(np.exp(suggester.log_probs[token] - np.logaddexp.reduce(among)))
        if known < threshold:
            return []
        state, _ = suggester.advance(state, token)
    words, confidence = predict.continuations(
        released.params, state, cell=released.sizes.cell, length=LENGTH - len(first)
    )
    count = int((known * np.asarray(confidence[0]) >= threshold).sum())
    words = first + released.vocabulary.decode(np.asarray(words[0])[:count])
    return words if len(words) >= min_words else []


def measure(
    params: model.Params,
    examples: Int[np.ndarray, "examples width"],
    sizes: model.ModelConfig,
    *,
    thresholds: Float[np.ndarray, " thresholds"],
    min_words: int = MIN_WORDS,
) -> list[Point]:
    """The curve over thresholds on held-out text: a completion is tried before every word of every example."""
    shown = np.zeros(len(thresholds))
    right, accepted = np.zeros_like(shown), np.zeros_like(shown)
    positions = 0
    for part in batches.blocks(examples, _ROWS):
        words, confidence = (np.asarray(x) for x in _continuations(params, jnp.asarray(part.T), sizes.cell))
        # What really came: `following[t, row, j]` is the word j + 1 places after input t; 0 past the example's end.
        padded = np.concatenate([part.T, np.zeros((LENGTH, _ROWS), np.int32)])
        steps = part.shape[1] - 1
        following = np.stack([padded[1 + j : 1 + j + steps] for j in range(LENGTH)], -1)
        counted = following[..., 0] != model.PAD
        positions += int(counted.sum())
        matching = np.cumprod((words == following) & (words != model.PAD), -1).sum(-1)
        for i, threshold in enumerate(thresholds):
            count = (confidence >= threshold).sum(-1)
            offered = counted & (count >= min_words)
            exact = offered & (matching >= count)
            shown[i] += offered.sum()
            right[i] += exact.sum()
            accepted[i] += count[exact].sum()
    rows = zip(thresholds, shown, right, accepted, strict=True)
    return [
        Point(float(t), _percent(s, positions), _percent(r, s), _percent(a, positions)) for t, s, r, a in rows
    ]


def _percent(part: float, whole: float) -> float:
    return float(100 * part / whole) if whole else float("nan")


def _continuations(params, tokens, cell):
    """Continuations at every position of a batch: `[time - 1, rows, LENGTH]` words and confidences."""
    states = predict.states(params, tokens[:-1], cell=cell)
    steps, rows, hidden = states.hidden.shape
    flat = jax.tree.map(lambda x: x.reshape(steps * rows, hidden), states)
    found = predict.continuations(params, flat, cell=cell, length=LENGTH)
    return jax.tree.map(lambda x: x.reshape(steps, rows, LENGTH), found)
