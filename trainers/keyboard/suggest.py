"""Next-word suggestions as you type: three words, narrowed by the letters already typed."""

import bisect

import jax.numpy as jnp
import numpy as np

from trainers.common.tokenizer import tokenize
from trainers.keyboard import predict
from trainers.keyboard.released import Released


class Suggester:
    """One text being typed. Committing a word costs one model step; letters of the next word cost none."""

    def __init__(self, released: Released):
        self._params, self._cell = released.params, released.sizes.cell
        self.vocabulary = released.vocabulary
        words = np.array(self.vocabulary.words)
        self._order = np.argsort(words, kind="stable")
        self._sorted = [str(word) for word in words[self._order]]
        self.begin()

    def begin(self) -> None:
        """Starts a new text."""
        self._state = predict.start(self._params, 1)
        self._tokens: list[str] = []
        self._take(self.vocabulary.bos)

    def _take(self, token: int) -> None:
        self._state, log_prob = predict.advance(
            self._params, self._state, jnp.array([token], jnp.int32), cell=self._cell
        )
        self.log_probs = np.asarray(log_prob[0])

    @property
    def state(self) -> predict.State:
        """What the model remembers of the text."""
        return self._state

    def commit(self, word: str) -> None:
        """Appends a word (a word outside the vocabulary counts as out-of-vocabulary)."""
        self._tokens.append(word)
        self._take(self.vocabulary.id(word))

    def read(self, text: str) -> str:
        """Makes `text` the text so far; its last word is still being typed unless a blank follows: returns its letters.

        Where the text only grew, just its new words are computed.
        """
        tokens = tokenize(text)
        typing = tokens.pop() if tokens and not text[-1].isspace() else ""
        if tokens[: len(self._tokens)] != self._tokens:
            self.begin()
        for token in tokens[len(self._tokens) :]:
            self.commit(token)
        return typing

    def suggest(self, letters: str = "", *, count: int = 3) -> list[str]:
        """The `count` most probable words that begin with `letters`; fewer where fewer exist."""
        low = bisect.bisect_left(self._sorted, letters)
        high = bisect.bisect_left(self._sorted, letters + chr(0x10FFFF)) if letters else len(self._sorted)
        ids = self._order[low:high]  # word w of the vocabulary is token w + 1
        scores = self.log_probs[ids + 1]
        if len(ids) > count:
            best = np.argpartition(-scores, count)[:count]
            ids, scores = ids[best], scores[best]
        return [self.vocabulary.words[i] for i in ids[np.lexsort((ids, -scores))]]
