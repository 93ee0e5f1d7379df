"""A little random model whose outputs are far from uniform, and its slow, obvious twin."""

import jax
import numpy as np

from trainers.common.vocabulary import Vocabulary
from trainers.keyboard import model
from trainers.keyboard.released import Released

WORDS = ("the", "them", "then", "tea", "we", "see", "sea", "bread", "it's", "?")


def make() -> Released:
    vocabulary = Vocabulary(WORDS, "public")
    sizes = model.ModelConfig(num_tokens=vocabulary.size, embedding_size=6, hidden_size=9)
    params = jax.tree.map(lambda x: 6 * x, model.init_params(sizes, seed=3))
    return Released(params, sizes, vocabulary, {"sentence": "s"}, 7)


_logits = jax.jit(lambda params, inputs: model.logits(params, inputs, cell="cifg"))
_known = {}


def log_probs(little, words):
    """By the whole text at once (padded to one shape, which a causal model does not see)."""
    words = tuple(words)
    if words not in _known:
        v = little.vocabulary
        inputs = np.zeros((12, 1), np.int32)
        inputs[: len(words) + 1, 0] = [v.bos, *map(v.id, words)]
        _known[words] = np.asarray(jax.nn.log_softmax(_logits(little.params, inputs)[len(words), 0]))
    return _known[words]


def examples(little):
    """Some held-out texts, one of them with an unknown word."""
    rng = np.random.default_rng(0)
    texts = [[WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(1, 6))] for _ in range(20)]
    return little.vocabulary.encode([*texts, ["zebra", "the"]], 5)
