"""Texts of many clients as a few flat arrays: millions of tokens in tens of megabytes."""

# pyarrow.compute makes its functions at import, where a type checker does not see them.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainers.common.files import digest_of
from trainers.common.tokenizer import tokenize


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """A list of token lists. `packed[i]` is the i-th as a list of strings.

    words: the distinct tokens, in order of first appearance.
    ids: int32 [tokens], index into `words`.
    starts: int64 [len + 1], where each list begins in `ids`.
    """

    words: list[str]
    ids: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, i: int) -> list[str]:
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        return [self.words[w] for w in self.ids[self.starts[i] : self.starts[i + 1]]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len], tokens in each list."""
        return np.diff(self.starts)

    def take(self, indices: np.ndarray, max_tokens: int | None = None) -> "PackedTokens":
        """Returns the lists at `indices`, each cut after `max_tokens`; `words` stays the same."""
        lengths = self.lengths[indices]
        if max_tokens is not None:
            lengths = np.minimum(lengths, max_tokens)
        return PackedTokens(self.words, self.ids[spans(self.starts[:-1][indices], lengths)], offsets(lengths))

    @staticmethod
    def from_lists(lists: Iterable[Sequence[str]]) -> "PackedTokens":
        flat: list[str] = []
        lengths: list[int] = []
        for tokens in lists:
            flat.extend(tokens)
            lengths.append(len(tokens))
        return PackedTokens._from_flat(pa.array(flat, pa.large_string()), np.asarray(lengths, np.int64))

    @staticmethod
    def from_spaced(texts: pa.Array) -> "PackedTokens":
        """Splits texts whose tokens are separated by blanks. A null is an empty list."""
        split = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(texts.cast(pa.large_string())))
        flat = pc.list_flatten(split)
        lengths = pc.fill_null(pc.list_value_length(split), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        keep = pc.not_equal(flat, "").to_numpy(zero_copy_only=False)
        if not keep.all():  # a blank text splits into one empty string
            owner = np.repeat(np.arange(len(lengths)), lengths)[keep]
            lengths = np.bincount(owner, minlength=len(lengths)).astype(np.int64)
            flat = flat.filter(pa.array(keep))
        return PackedTokens._from_flat(flat, lengths)

    @staticmethod
    def from_texts(texts: Iterable[str]) -> "PackedTokens":
        """Tokenizes each text (`trainers.common.tokenizer`)."""
        return PackedTokens.from_lists(map(tokenize, texts))

    @staticmethod
    def _from_flat(flat: pa.Array, lengths: np.ndarray) -> "PackedTokens":
        coded = flat.dictionary_encode()
        if isinstance(coded, pa.ChunkedArray):
            coded = coded.combine_chunks()
        ids = coded.indices.to_numpy(zero_copy_only=False).astype(np.int32)
        return PackedTokens(coded.dictionary.to_pylist(), ids, offsets(lengths))


@dataclass(kw_only=True)
class ReadReport:
    """What reading met. It depends on the clients' data: for the operator's log, not for a release."""

    blank_examples: int = 0
    capped_clients: int = 0
    capped_examples: int = 0
    cut_examples: int = 0
    merged_records: int = 0
    empty_clients: int = 0
    nul_characters: int = 0
    long_records: int = 0
    skipped_records: int = 0
    skipped_reasons: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """One line for each thing met at least once."""
        said = {
            "blank_examples": "examples without a token were dropped",
            "capped_clients": "clients had more examples than allowed",
            "capped_examples": "examples beyond the cap per client were left out",
            "cut_examples": "examples were cut at the most tokens allowed",
            "merged_records": "records repeated a client id and were merged into that client",
            "empty_clients": "clients have no usable example; they are known and send zero",
            "nul_characters": "NUL characters were removed",
            "long_records": "records of a table span several lines: where a quote lacks its pair, those of others",
            "skipped_records": "bad records were skipped",
        }
        lines = [f"{getattr(self, name)} {text}" for name, text in said.items() if getattr(self, name)]
        return lines + [f"skipped: {reason}" for reason in self.skipped_reasons]


@dataclass(frozen=True, eq=False, kw_only=True)
class ClientData:
    """Examples of many clients. A client's examples are contiguous and in the order of the source.

    ids: client ids, strings or integers as in the source, in order of first appearance.
    starts: int64 [clients + 1]; client i has examples `starts[i] .. starts[i + 1]`. A client may have none:
      it stays known, and its update is zero.
    tokens: one token list an example.
    texts: the same examples as written, an arrow array of strings.
    hours: int8 [examples] hour of day 0..23, or None where the source has none.
    digest: SHA-256 of the content; equal data have equal digests whatever file they came in.
    """

    ids: list[str] | list[int]
    starts: np.ndarray
    tokens: PackedTokens
    texts: pa.Array
    hours: np.ndarray | None
    digest: str
    report: ReadReport

    @property
    def num_clients(self) -> int:
        return len(self.ids)

    @property
    def num_examples(self) -> int:
        return len(self.tokens)

    @property
    def counts(self) -> np.ndarray:
        """int64 [clients], examples of each."""
        return np.diff(self.starts)

    @property
    def owners(self) -> np.ndarray:
        """int64 [examples], the index of each example's client."""
        return np.repeat(np.arange(self.num_clients), self.counts)

    def client_tokens(self, i: int) -> list[list[str]]:
        """The i-th client's examples as lists of tokens."""
        return [self.tokens[e] for e in range(self.starts[i], self.starts[i + 1])]

    def client_texts(self, i: int) -> list[str]:
        """The i-th client's examples as written."""
        return self.texts[int(self.starts[i]) : int(self.starts[i + 1])].to_pylist()

    def select(self, clients: np.ndarray | Sequence[int]) -> "ClientData":
        """Returns the clients at these indices, in this order."""
        chosen = np.asarray(clients, np.int64)
        counts = self.counts[chosen]
        examples = spans(self.starts[:-1][chosen], counts)
        return client_data(
            ids=[self.ids[i] for i in chosen],
            counts=counts,
            tokens=self.tokens.take(examples),
            texts=self.texts.take(pa.array(examples)),
            hours=None if self.hours is None else self.hours[examples],
            report=self.report,
        )


def client_data(
    *,
    ids: list,
    counts: np.ndarray,
    tokens: PackedTokens,
    texts: pa.Array,
    hours: np.ndarray | None,
    report: ReadReport,
) -> ClientData:
    """Puts client data together and computes its digest."""
    starts = offsets(counts)
    order = _first_use(tokens)
    digest = digest_of(
        "\n".join(f"{type(i).__name__[0]}{i}" for i in ids),
        starts.tobytes(),
        "\n".join(tokens.words[w] for w in order),
        _renumber(tokens, order).tobytes(),
        tokens.starts.tobytes(),
        b"" if hours is None else np.ascontiguousarray(hours, np.int8).tobytes(),
    )
    return ClientData(
        ids=ids, starts=starts, tokens=tokens, texts=texts, hours=hours, digest=digest, report=report
    )


def offsets(lengths: np.ndarray) -> np.ndarray:
    """int64 [n + 1]: 0 and the running sums of `lengths`."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def spans(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: the indices `begin .. begin + length` of every span, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(lengths) else 0
    return np.arange(total) + np.repeat(begins - (ends - lengths), lengths)


def _first_use(tokens: PackedTokens) -> np.ndarray:
    """The word indices in use, by first appearance: a selection's digest forgets what was left out."""
    used, first = np.unique(tokens.ids, return_index=True)
    return used[np.argsort(first)]


def _renumber(tokens: PackedTokens, order: np.ndarray) -> np.ndarray:
    number = np.zeros(len(tokens.words), np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    return number[tokens.ids]
