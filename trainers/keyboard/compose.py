"""Inline completion (Smart Compose): the next words in grey, shown only where the model is confident enough."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Int

from trainers.keyboard import batches, model, predict
from trainers.keyboard.features_config import BEAMS
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
    beams: int = BEAMS,
) -> list[str]:
    """The completion shown after the text of `suggester`: the longest whose probability is at least `threshold`;
    empty where fewer than `min_words` words reach it.

    While a word is being typed, its `letters` are given: the first word is one that begins so, with its probability
    among the words of the vocabulary that do.

    Args:
      beams: hypotheses that the search keeps; 1 takes the most probable word again and again.
    """
    log_probs = suggester.log_probs
    if letters:
        among = suggester.starting_with(letters) + 1
        if not len(among):
            return []
        only = np.full_like(log_probs, -np.inf)
        only[among] = log_probs[among] - np.logaddexp.reduce(log_probs[among])
        log_probs = only
    words, confidence = predict.continuations(
        released.params,
        suggester.state,
        jnp.asarray(log_probs)[None],
        cell=released.sizes.cell,
        length=LENGTH,
        beams=beams,
    )
    # In float64: a threshold below float32's range is not 0.
    count = int((np.asarray(confidence[0], np.float64) >= threshold).sum())
    if count < min_words:
        return []
    return released.vocabulary.decode(np.asarray(words[0, count - 1, :count]))


def measure(
    params: model.Params,
    examples: Int[np.ndarray, "examples width"],
    sizes: model.ModelConfig,
    *,
    thresholds: Float[np.ndarray, " thresholds"],
    min_words: int = MIN_WORDS,
    beams: int = BEAMS,
) -> list[Point]:
    """The curve over thresholds on held-out text: a completion is tried before every word of every example."""
    shown = np.zeros(len(thresholds))
    right, accepted = np.zeros_like(shown), np.zeros_like(shown)
    positions = 0
    for part in batches.blocks(examples, _ROWS):
        found = _continuations(params, jnp.asarray(part.T), cell=sizes.cell, beams=beams)
        words, confidence = np.asarray(found[0]), np.asarray(found[1], np.float64)
        # What really came: `following[t, row, j]` is the word j + 1 places after input t; 0 past the example's end.
        padded = np.concatenate([part.T, np.zeros((LENGTH, _ROWS), np.int32)])
        steps = part.shape[1] - 1
        following = np.stack([padded[1 + j : 1 + j + steps] for j in range(LENGTH)], -1)
        counted = following[..., 0] != model.PAD
        positions += int(counted.sum())
        # right_at[t, row, n - 1]: the continuation of n words is what came; that of none is never shown.
        same = np.cumprod((words == following[..., None, :]) & (words != model.PAD), -1)
        right_at = np.diagonal(same, axis1=-2, axis2=-1).astype(bool)
        for i, threshold in enumerate(thresholds):
            count = (confidence >= threshold).sum(-1)
            offered = counted & (count >= min_words)
            exact = offered & np.take_along_axis(right_at, np.maximum(count - 1, 0)[..., None], -1)[..., 0]
            shown[i] += offered.sum()
            right[i] += exact.sum()
            accepted[i] += count[exact].sum()
    rows = zip(thresholds, shown, right, accepted, strict=True)
    return [
        Point(float(t), _percent(s, positions), _percent(r, s), _percent(a, positions)) for t, s, r, a in rows
    ]


def _percent(part: float, whole: float) -> float:
    return float(100 * part / whole) if whole else float("nan")


@functools.partial(jax.jit, static_argnames=("cell", "beams"))
def _continuations(params, tokens, *, cell, beams):
    """Continuations at every position of a batch: `[time - 1, rows, ...]`; one time step at a time, to spare memory."""

    def at_step(state):
        log_prob = jax.nn.log_softmax(model.output_logits(params, state.hidden))
        return predict.continuations(params, state, log_prob, cell=cell, length=LENGTH, beams=beams)

    return lax.map(at_step, predict.states(params, tokens[:-1], cell=cell))
