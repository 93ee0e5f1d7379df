"""Maps words to the ids that a next-word model predicts, and remembers whose text the words came from."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from trainers.common import tables
from trainers.common.errors import InputError
from trainers.common.files import PathLike, atomic_write, digest_of, existing_file
from trainers.common.packed import ClientData, PackedTokens, spans
from trainers.common.tokenizer import is_placeholder

Origin = Literal["public", "clients", "unstated"]
PAD = 0


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Words with ids 1..V; pad is 0, out-of-vocabulary V + 1, begin V + 2, end V + 3.

    words: in id order. origin: whose text chose them: "public", the "clients" whose model is trained, or
    "unstated". Placeholders such as `_url_` are never words.
    """

    words: tuple[str, ...]
    origin: Origin
    _ids: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.words:
            raise ValueError("words: a vocabulary needs at least one word, got none")
        ids = {word: number for number, word in enumerate(self.words, 1)}
        if len(ids) < len(self.words):
            repeated = next(w for n, w in enumerate(self.words, 1) if ids[w] != n)
            raise ValueError(f"words: {repeated!r} occurs twice; give each word once")
        object.__setattr__(self, "_ids", ids)

    def __len__(self) -> int:
        """The number of words, V."""
        return len(self.words)

    @property
    def size(self) -> int:
        """The number of ids, V + 4: the width of the model's output layer."""
        return len(self.words) + 4

    @property
    def oov(self) -> int:
        return len(self.words) + 1

    @property
    def bos(self) -> int:
        return len(self.words) + 2

    @property
    def eos(self) -> int:
        return len(self.words) + 3

    @property
    def specials(self) -> tuple[int, int, int, int]:
        """The ids that are no words: pad, out-of-vocabulary, begin, end."""
        return PAD, self.oov, self.bos, self.eos

    @property
    def covered_by_guarantee(self) -> bool:
        """Whether releasing the words costs no privacy: True only when public text chose them."""
        return self.origin == "public"

    @property
    def digest(self) -> str:
        """SHA-256 of the words in order."""
        return digest_of(*self.words)

    def id(self, word: str) -> int:
        """The word's id, or that of out-of-vocabulary."""
        return self._ids.get(word, self.oov)

    def ids_of(self, tokens: PackedTokens) -> np.ndarray:
        """int32 [tokens]: the id of every token, in the flat order of `tokens.ids`."""
        table = np.fromiter((self.id(w) for w in tokens.words), np.int32, len(tokens.words))
        return table[tokens.ids] if len(table) else np.zeros(0, np.int32)

    def encode(self, tokens: PackedTokens | Sequence[Sequence[str]], seq_len: int) -> np.ndarray:
        """int32 [examples, seq_len + 1]: begin, the first `seq_len` tokens, end when there are fewer, pad.

        Inputs are `rows[:, :-1]` and targets `rows[:, 1:]`, `seq_len` predictions each.
        """
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len=}")
        if not isinstance(tokens, PackedTokens):
            tokens = PackedTokens.from_lists(tokens)
        rows = np.full((len(tokens), seq_len + 1), PAD, np.int32)
        rows[:, 0] = self.bos
        taken = np.minimum(tokens.lengths, seq_len)
        row = np.repeat(np.arange(len(tokens)), taken)
        column = spans(np.ones_like(taken), taken)
        rows[row, column] = self.ids_of(tokens)[spans(tokens.starts[:-1], taken)]
        short = np.flatnonzero(taken < seq_len)
        rows[short, taken[short] + 1] = self.eos
        return rows

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The words of these ids; specials read `<pad> <oov> <bos> <eos>`."""
        names = {PAD: "<pad>", self.oov: "<oov>", self.bos: "<bos>", self.eos: "<eos>"}
        return [names[i] if i in names else self.words[i - 1] for i in map(int, ids)]

    def coverage(self, tokens: PackedTokens) -> float:
        """The share of tokens that are words of the vocabulary, 0 to 1."""
        return float((self.ids_of(tokens) != self.oov).mean()) if len(tokens.ids) else 0.0

    def save(self, path: PathLike) -> None:
        """Writes words and origin as JSON."""
        with atomic_write(path) as file:
            json.dump({"origin": self.origin, "words": self.words}, file, ensure_ascii=False, indent=0)

    @staticmethod
    def load(path: PathLike) -> "Vocabulary":
        """Reads what `save` wrote."""
        file = existing_file(path, "vocabulary")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            return Vocabulary(tuple(data["words"]), data["origin"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"vocabulary {file} cannot be read ({error}); make it again") from error

    @staticmethod
    def from_tsv(path: PathLike, size: int | None = None, *, origin: Origin | None = None) -> "Vocabulary":
        """Reads a word a line, most frequent first; what follows a tab is ignored.

        Args:
          size: words to take, counted after placeholders are left out; None takes all.
          origin: whose text the words came from. None judges by the words of the file's name: with `client(s)`
            it is from clients, else with `public` it is public, any other is unstated.
        """
        file = existing_file(path, "vocabulary")
        if file.suffix == ".json":
            whole = Vocabulary.load(file)
            return Vocabulary(whole.words[:size], origin or whole.origin)
        words: dict[str, None] = {}
        for number, line, problem in tables.lines(file):
            if line is None:
                raise InputError(f"vocabulary {file}, line {number}: {problem}; save it as UTF-8")
            word = line.partition("\t")[0].strip()
            if not word or is_placeholder(word):
                continue
            if word in words:
                raise InputError(f"vocabulary {file}, line {number}: {word!r} occurs twice; leave one out")
            words[word] = None
            if size is not None and len(words) == size:
                break
        if not words:
            raise InputError(f"vocabulary {file} holds no word; give a word a line")
        if origin is None:
            parts = set(re.split(r"[^a-z]+", file.name.lower()))
            origin = (
                "clients" if parts & {"client", "clients"} else "public" if "public" in parts else "unstated"
            )
        return Vocabulary(tuple(words), origin)

    @staticmethod
    def from_public_texts(tokens: PackedTokens, size: int) -> "Vocabulary":
        """The most frequent words of public text; equally frequent ones in alphabetical order."""
        counts = np.bincount(tokens.ids, minlength=len(tokens.words))
        return Vocabulary(_top(tokens.words, counts, size), "public")

    @staticmethod
    def from_clients(data: ClientData, size: int) -> "Vocabulary":
        """The words that most clients use, for comparisons only: the guarantee does not cover this choice."""
        owners = np.repeat(data.owners, data.tokens.lengths)
        pairs = np.unique(owners * len(data.tokens.words) + data.tokens.ids)
        counts = np.bincount(pairs % max(1, len(data.tokens.words)), minlength=len(data.tokens.words))
        return Vocabulary(_top(data.tokens.words, counts, size), "clients")


def _top(words: Sequence[str], counts: np.ndarray, size: int) -> tuple[str, ...]:
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size=}")
    ranked = sorted(
        (-int(count), word) for word, count in zip(words, counts) if count and not is_placeholder(word)
    )
    return tuple(word for _, word in ranked[:size])
