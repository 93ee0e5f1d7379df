"""Sentences to vectors: tokens, length buckets, fixed batch shapes, and a cache on disk.

A sentence's embedding is bitwise a function of that sentence and the model alone: it is padded to its own
length bucket and computed in a batch of a fixed shape, in which rows do not mix. Without this, one changed
sentence could move the embeddings of the others, and a utility's sensitivity would no longer be 1.
"""

import bisect
import functools
import pathlib
import unicodedata
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainers.common import files, progress
from trainers.common.errors import InputError
from trainers.documents import encoder_model
from trainers.documents.cache import VectorCache

# Widths that a sentence may be padded to: fine where most sentences are, so that little is wasted.
BUCKETS = (*range(4, 33, 4), *range(40, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
TOKENS_PER_BATCH = 1536


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph: nnx.GraphDef, state: nnx.State, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    mask = jnp.arange(ids.shape[1])[None, :] < lengths[:, None]
    return nnx.merge(graph, state)(ids, mask)


class SentenceEncoder:
    """A sentence-transformers folder ready to encode.

    folder: where it was read from. name: what it is called in reports. dim: length of an embedding.
    digest: of its weights, tokenizer, pooling and length limit.
    """

    def __init__(self, folder: files.PathLike, *, name: str = "", cache: files.PathLike | None = None):
        """Loads the model in `folder`; `cache` is a folder for embeddings, None for no cache."""
        from tokenizers import Tokenizer

        folder = pathlib.Path(folder)
        if not folder.is_dir():
            raise InputError(f"encoder folder {folder} does not exist; give a sentence-transformers folder")
        model = encoder_model.load(folder)
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"{path} cannot be read: {error}; the encoder needs its tokenizer") from error
        # MiniLM ships with padding to 128 switched on, which would cut and slow everything.
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(model.config.max_length)
        self.folder = folder
        self.config = model.config
        self.dim = model.config.hidden_size
        self.digest = files.digest_of(
            files.digest(folder / "model.safetensors"),
            files.digest(path),
            f"{model.config.pooling}, {model.config.max_length} tokens",
        )
        self.name = name or folder.name
        self._graph, self._state = nnx.split(model)
        self._cache = None if cache is None else VectorCache(pathlib.Path(cache, self.digest[:32]), self.dim)

    @property
    def word_vectors(self) -> np.ndarray:
        """The input embedding of every token, float32 [vocabulary, dim]."""
        return np.asarray(self._state["words"]["embedding"][...])

    def token_ids(self, sentences: Sequence[str]) -> list[list[int]]:
        """Token ids with the special tokens, cut at the model's limit, no padding."""
        texts = [unicodedata.normalize("NFC", s) for s in sentences]
        return [e.ids for e in self._tokenizer.encode_batch_fast(texts)]

    def whole_words(self) -> list[str | None]:
        """The token of each row of `word_vectors`, None where it is a piece of a word or a special one."""
        tokens = {i: t for t, i in self._tokenizer.get_vocab().items()}
        names = [tokens.get(i, "") for i in range(len(self.word_vectors))]
        return [t if t and not t.startswith("##") and not t.startswith("[") else None for t in names]

    def encode(
        self, sentences: Sequence[str], *, show_progress: bool = False, keep: bool = True
    ) -> np.ndarray:
        """Unit vectors float32 [len(sentences), dim], in order; the same text always gives the same bits.

        NFC is applied first, so composed and decomposed forms of a text agree. Cached texts are read back;
        new ones are written as batches end, so that a killed run goes on where it stopped; not with `keep`
        False, for texts that will not come again.
        """
        sentences = list(sentences)
        if any(not isinstance(s, str) for s in sentences):
            raise InputError("encode takes strings; one of the sentences is not text")
        out = np.zeros((len(sentences), self.dim), np.float32)
        unique: dict[str, list[int]] = {}
        for i, s in enumerate(sentences):
            unique.setdefault(unicodedata.normalize("NFC", s), []).append(i)
        texts = list(unique)
        missing = texts
        if self._cache is not None:
            found = self._cache.get(texts)
            for text, vector in found.items():
                out[unique[text]] = vector
            missing = [t for t in texts if t not in found]
        bar = progress.bar(total=len(missing), what="encoding", unit="sentence") if show_progress else None
        # Slices bound what a kill can lose and what the tokens take in memory.
        for start in range(0, len(missing), 8192):
            part = missing[start : start + 8192]
            vectors = np.zeros((len(part), self.dim), np.float32)
            for rows, values in self._batches(self.token_ids(part)):
                vectors[rows] = values
                if bar is not None:
                    bar.update(len(rows))
            for text, vector in zip(part, vectors):
                out[unique[text]] = vector
            if self._cache is not None and keep:
                self._cache.put(part, vectors)
        if bar is not None:
            bar.close()
        return out

    def _batches(self, ids: list[list[int]]) -> Iterable[tuple[list[int], np.ndarray]]:
        """Yields (rows, vectors) of full-shape batches, one bucket after another."""
        buckets: dict[int, list[int]] = {}
        for row, tokens in enumerate(ids):
            buckets.setdefault(bucket(len(tokens)), []).append(row)
        waiting: list[tuple[list[int], jax.Array]] = []
        for width, rows in sorted(buckets.items()):
            size = batch_size(width)
            for start in range(0, len(rows), size):
                chosen = rows[start : start + size]
                padded = np.zeros((size, width), np.int32)
                lengths = np.zeros(size, np.int32)
                for i, row in enumerate(chosen):
                    padded[i, : len(ids[row])] = ids[row]
                    lengths[i] = len(ids[row])
                waiting.append((chosen, _forward(self._graph, self._state, padded, lengths)))
                if len(waiting) > 1:  # one batch computes while the next is laid out
                    done, values = waiting.pop(0)
                    yield done, np.asarray(values)[: len(done)]
        for done, values in waiting:
            yield done, np.asarray(values)[: len(done)]


@functools.cache
def batch_size(width: int) -> int:
    """Rows of a batch of sentences padded to `width`: a multiple of 8, fixed for the width."""
    return max(8, TOKENS_PER_BATCH // width // 8 * 8)


def bucket(length: int) -> int:
    """The least bucket that holds `length` tokens."""
    return BUCKETS[bisect.bisect_left(BUCKETS, min(length, BUCKETS[-1]))]
