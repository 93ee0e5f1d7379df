"""How well a model predicts the next word: two accuracies, which are different numbers, and perplexity.

- words: over the positions whose target is a word of the vocabulary, the share where the model's best (best three)
  *words* hold it: padding, out-of-vocabulary, begin and end are banned from the prediction, as on a keyboard;
- tff: the same positions, with the argmax over the whole output layer, so that predicting "end" there is an error
  (`accuracy_no_oov_no_eos` in federated-learning papers);
- perplexity: exp of the mean cross entropy over all targets but padding, out-of-vocabulary and end included.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from trainers.keyboard import model
from trainers.keyboard.model import NUM_SPECIAL, PAD, ModelConfig, Params

# Examples at once, and the step to which the length of a batch is rounded up: few shapes, little padding.
_ROWS = 64
_STEP = 5


class Evaluation(NamedTuple):
    """Accuracies in percent (NaN where no position counts).

    top1_words, top3_words: with special tokens banned from the prediction.
    tff_accuracy: argmax over the whole output layer.
    perplexity: over all targets but padding.
    num_words: positions that the accuracies count. num_targets: positions that the perplexity counts.
    """

    top1_words: float
    top3_words: float
    tff_accuracy: float
    perplexity: float
    num_words: int
    num_targets: int


def evaluate(params: Params, examples: Int[np.ndarray, "examples width"], config: ModelConfig) -> Evaluation:
    """Evaluates on `examples`, int32 tokens as `batches.pack_round` takes them (begin, words, end, zeros)."""
    examples = np.asarray(examples, np.int32)
    length = examples.shape[1] - 1 - (examples[:, :0:-1] != PAD).argmax(1)
    length = np.where((examples[:, 1:] != PAD).any(1), length, 0)
    order = np.argsort(length, kind="stable")
    totals = np.zeros(6)
    for start in range(0, len(order), _ROWS):
        rows = order[start : start + _ROWS]
        longest = int(length[rows].max())
        if longest == 0:
            continue
        steps = min(examples.shape[1] - 1, -(-longest // _STEP) * _STEP)
        batch = np.zeros((steps + 1, _ROWS), np.int32)
        batch[:, : len(rows)] = examples[rows, : steps + 1].T
        totals += np.asarray(_counts(params, batch, config=config), np.float64)
    nll, targets, words, *hits = totals
    return _summary(nll, targets, words, hits)


@functools.partial(jax.jit, static_argnames="config")
def _counts(params: Params, tokens: Int[Array, "width rows"], *, config: ModelConfig) -> Float[Array, "6"]:
    """(nats, targets, word targets, top-1 hits, top-3 hits, hits over the whole layer) of one batch."""
    inputs, targets = tokens[:-1], tokens[1:].reshape(-1)
    scores = model.logits(params, inputs, cell=config.cell).reshape(len(targets), -1)
    own = jnp.take_along_axis(scores, targets[:, None], 1)
    nll = jax.nn.logsumexp(scores, 1) - own[:, 0]
    token = jnp.arange(config.num_tokens)
    # Rank as `argmax` and `top_k` give it: ties go to the smaller id. Put so that NaN is ahead of the target.
    ahead = ~((scores < own) | ((scores == own) & (token[None] >= targets[:, None])))
    is_word = (token > PAD) & (token <= config.num_tokens - NUM_SPECIAL)
    rank_words = jnp.sum(ahead & is_word[None], 1)
    rank_all = jnp.sum(ahead, 1)
    real = targets != PAD
    word = (targets > PAD) & (targets <= config.num_tokens - NUM_SPECIAL)
    sums = [
        jnp.sum(jnp.where(real, nll, 0.0)),
        jnp.sum(real),
        jnp.sum(word),
        jnp.sum(word & (rank_words < 1)),
        jnp.sum(word & (rank_words < 3)),
        jnp.sum(word & (rank_all < 1)),
    ]
    return jnp.stack([x.astype(jnp.float32) for x in sums])


def _summary(nll, targets, words, hits) -> Evaluation:
    top1, top3, tff = (float(100 * x / words) if words else float("nan") for x in hits)
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(np.float64(nll) / targets)) if targets else float("nan")
    return Evaluation(top1, top3, tff, perplexity, int(words), int(targets))
