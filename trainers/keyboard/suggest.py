"""Next-word suggestions as you type: three words, narrowed by the letters already typed."""

import bisect
import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from trainers.common.tokenizer import tokenize
from trainers.keyboard import predict
from trainers.keyboard.released import Released

# What stands at the end of a text and may still grow: letters, with apostrophes or hyphens between them or last.
_IN_PROGRESS = re.compile(r"[^\W_]+(?:['-][^\W_]*)*$")


def being_typed(text: str) -> str:
    """The letters at the end of the text that may still become another word; none after a blank or a sign."""
    found = _IN_PROGRESS.search(text)
    return found[0] if found else ""


def beginning_with(words: Sequence[str], letters: str) -> slice:
    """Where the words that begin with `letters` stand in a sorted list."""
    if not letters:
        return slice(0, len(words))
    return slice(bisect.bisect_left(words, letters), bisect.bisect_left(words, letters + chr(0x10FFFF)))


class Suggester:
    """One text being typed. Committing a word costs one model step; its letters, and taking words back, cost none.

    steps: model steps so far.
    """

    def __init__(self, released: Released):
        self._params, self._cell = released.params, released.sizes.cell
        self.vocabulary = released.vocabulary
        words = np.array(self.vocabulary.words)
        self._order = np.argsort(words, kind="stable")
        self._sorted = [str(word) for word in words[self._order]]
        self.steps = 0
        self._tokens: list[str] = []
        # After the begin token, and after each word: the state, and the log probabilities of what may follow.
        self._after = [self.advance(predict.start(self._params, 1), self.vocabulary.bos)]

    def begin(self) -> None:
        """Starts a new text."""
        self._keep(0)

    def _keep(self, words: int) -> None:
        del self._tokens[words:], self._after[words + 1 :]

    def advance(self, state: predict.State, token: int) -> tuple[predict.State, np.ndarray]:
        """The state after one more token, and the log probabilities of what may follow; the text stays as it is."""
        self.steps += 1
        state, log_prob = predict.advance(self._params, state, jnp.array([token], jnp.int32), cell=self._cell)
        return state, np.asarray(log_prob[0])

    @property
    def state(self) -> predict.State:
        """What the model remembers of the text."""
        return self._after[-1][0]

    @property
    def log_probs(self) -> np.ndarray:
        """Log probability (nats) of every token that may follow the text, float32 [tokens]."""
        return self._after[-1][1]

    def commit(self, word: str) -> None:
        """Appends a word (a word outside the vocabulary counts as out-of-vocabulary)."""
        self._after.append(self.advance(self.state, self.vocabulary.id(word)))
        self._tokens.append(word)

    def read(self, text: str) -> str:
        """Makes `text` the text so far; its last word is still being typed unless a blank follows: returns its letters.

        Only words behind the part that it has in common with the last text are computed.
        """
        letters = being_typed(text)
        tokens = tokenize(text[: len(text) - len(letters)])
        common = 0
        while common < min(len(tokens), len(self._tokens)) and tokens[common] == self._tokens[common]:
            common += 1
        self._keep(common)
        for token in tokens[len(self._tokens) :]:
            self.commit(token)
        return letters.lower()

    def starting_with(self, letters: str) -> np.ndarray:
        """The words of the vocabulary that begin so, by their place in it; word w is token w + 1."""
        return self._order[beginning_with(self._sorted, letters)]

    def suggest(self, letters: str = "", *, count: int = 3) -> list[str]:
        """The `count` most probable words that begin with `letters`; fewer where fewer exist."""
        ids = self.starting_with(letters)
        scores = self.log_probs[ids + 1]
        if len(ids) > count:
            best = np.argpartition(-scores, count)[:count]
            ids, scores = ids[best], scores[best]
        return [self.vocabulary.words[i] for i in ids[np.lexsort((ids, -scores))]]
