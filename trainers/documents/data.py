"""Documents from files, folders and installed packages, as sentences and as vectors."""

import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainers.common import docstrings, files, readers
from trainers.common.errors import InputError
from trainers.common.wording import counted
from trainers.documents import sentences
from trainers.documents.encoder import SentenceEncoder

SPLITS = ("train", "validation", "test")
HOLDOUT = 0.1  # of documents that no split is given for, as of client data
WIDTHS = tuple(16 * 2**i for i in range(13))  # a document's sentences are padded to the next of these


class Documents(NamedTuple):
    """Texts as read: `labels[i]` is "" where a document has none."""

    ids: list[str]
    texts: list[str]
    labels: list[str]


class Encoded(NamedTuple):
    """Documents as sentence vectors, one after another.

    ids, texts: of each document. labels: index into `classes`, -1 for none.
    vectors: float32 [all sentences, dim], unit length. offsets: document i holds rows offsets[i]:offsets[i + 1].
    """

    ids: list[str]
    texts: list[str]
    labels: np.ndarray
    classes: tuple[str, ...]
    vectors: np.ndarray
    offsets: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Sentences of each document: its k, which is public."""
        return np.diff(self.offsets)

    @property
    def means(self) -> np.ndarray:
        """Mean embedding of each document, float32 [documents, dim]; zero where it has no sentence."""
        padded = np.concatenate([self.vectors, np.zeros((1, self.vectors.shape[1]), np.float32)])
        sums = np.add.reduceat(padded, self.offsets[:-1], axis=0)
        return np.where(self.counts[:, None] > 0, sums / np.maximum(self.counts, 1)[:, None], 0).astype(
            np.float32
        )

    def sums(self, rows: np.ndarray) -> np.ndarray:
        """Sum of `rows` [sentences, columns] over each document's sentences, in int64 or float64."""
        wide = np.int64 if rows.dtype.kind in "iu" else np.float64
        running = np.concatenate([np.zeros((1, rows.shape[1]), wide), np.cumsum(rows, 0, dtype=wide)])
        return running[self.offsets[1:]] - running[self.offsets[:-1]]

    def with_vectors(self, vectors: np.ndarray) -> "Encoded":
        """The same documents with their sentences mapped elsewhere."""
        return self._replace(vectors=vectors)

    def take(self, rows: Sequence[int] | np.ndarray) -> "Encoded":
        """The documents `rows`, in that order."""
        rows = np.asarray(rows)
        counts = self.counts[rows]
        inside = np.concatenate(
            [np.arange(int(self.offsets[r]), int(self.offsets[r + 1])) for r in rows] or [[]]
        )
        return self._replace(
            ids=[self.ids[r] for r in rows],
            texts=[self.texts[r] for r in rows],
            labels=self.labels[rows],
            vectors=self.vectors[inside.astype(np.int64)],
            offsets=np.concatenate([[0], np.cumsum(counts)]),
        )

    def padded(self, rows: Sequence[int] | np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Vectors [rows, width, dim] and a mask [rows, width]; absent sentences are zero vectors."""
        out = np.zeros((len(rows), width, self.vectors.shape[1]), np.float32)
        where = np.arange(width)[None, :] < self.counts[rows][:, None]
        for place, row in enumerate(rows):
            out[place, : self.counts[row]] = self.vectors[self.offsets[row] : self.offsets[row + 1]]
        return out, where


def width_of(count: int) -> int:
    """The padded number of sentences for a document of `count`."""
    width = next((w for w in WIDTHS if w >= count), None)
    if width is None:
        raise InputError(f"a document of {count} sentences is too long: at most {WIDTHS[-1]}; divide it")
    return width


def load(source: str, parts: Sequence[str] = SPLITS) -> tuple[dict[str, Documents], dict[str, Any]]:
    """The named splits with labels, and where they come from: source, division in words, digest of what was read.

    Args:
      source: `docstrings` (those of installed packages, labelled by package), or a file whose records have
        `text` and `label`: a train file that finds its validation and test files beside it, or one with a
        `split` column. One without either is divided by a hash of its documents' ids, a tenth each for validation
        and for test; one with train and test documents gives a tenth of the former for validation. Docstrings
        of fewer than 2 sentences are left out, as in the paper; of a file every document is kept.

    Raises:
      InputError: a split or a field is missing.
    """
    facts: dict[str, Any] = {"source": source, "division": "splits given by the data"}
    if source == "docstrings":
        found = docstrings.load_documents()
        rows: dict[str, list[tuple[str, str, str]]] = {name: [] for name in SPLITS}
        for i, (text, label, split) in enumerate(zip(found.texts, found.labels, found.splits)):
            rows[split].append((f"{found.modules[i]}:{i}", text, label))
        splits = {name: Documents(*map(list, zip(*rows[name]))) for name in parts}
        facts |= {"packages": found.versions}
    else:
        splits, facts["division"] = _read_splits(source, parts)
    facts["digest"] = files.digest_of(
        *(x for name in parts for column in (*splits[name], [name]) for x in (str(len(column)), *column))
    )
    return splits, facts


def _read_splits(source: str, parts: Sequence[str]) -> tuple[dict[str, Documents], str]:
    """The named splits of a file, and in words how it is divided."""

    def read(split: str | None) -> Documents:
        records, _ = readers.read_records(source, ("text", "label"), optional=("id",), split=split)
        return _documents(records, prefix=split or "document")

    available = readers.split_names(source)
    advice = (
        "name the file with `train` in it and put the others beside it (NAME_train.jsonl, NAME_val.jsonl, "
        "NAME_test.jsonl), or give it a `split` column"
    )
    if not available or set(available) == {"train"}:
        whole = read(next(iter(available), None))
        shares = {"train": 1 - 2 * HOLDOUT, "validation": HOLDOUT, "test": HOLDOUT}
        divided = _by_hash(whole, shares)
        if empty := [name for name in SPLITS if not divided[name].ids]:
            raise InputError(
                f"{source} has {counted(len(whole.ids), 'document')}, and a hash of their ids leaves none for "
                f"{' or '.join(empty)}: give more, or {advice}"
            )
        words = f"documents divided by a hash of their id, {HOLDOUT:.0%} each for validation and for test"
        return {name: divided[name] for name in parts}, words
    derived = {"validation"} if "test" in available else set()
    if missing := [name for name in ("train", *parts) if name not in available and name not in derived]:
        raise InputError(
            f"{source} has {' and '.join(available)} documents, but no {missing[0]} ones: {advice}"
        )
    splits = {name: read(name) for name in parts if name in available}
    if "validation" in available or "validation" not in parts:
        return splits, "splits given by the data"
    splits |= _by_hash(splits["train"], {"train": 1 - HOLDOUT, "validation": HOLDOUT})
    if not splits["validation"].ids:
        raise InputError(
            f"{source} has too few train documents to keep some for validation: give more, or {advice}"
        )
    return (
        splits,
        f"train and test given by the data, {HOLDOUT:.0%} of the train documents taken for validation",
    )


def _by_hash(documents: Documents, shares: Mapping[str, float]) -> dict[str, Documents]:
    """Divided by a hash of the id: the same document always falls in the same part."""
    position = np.array([readers.unit_hash(i) for i in documents.ids])
    part = np.searchsorted(np.cumsum(list(shares.values()))[:-1], position, side="right")
    return {
        name: Documents(*([column[i] for i in np.flatnonzero(part == number)] for column in documents))
        for number, name in enumerate(shares)
    }


def read_private(source: str) -> Documents:
    """Documents to release: a folder of .txt files, one text file, or records with a `text` field.

    Ids are the `id` field, the file's name, or the record's number: they tell which budget a release spends.
    """
    path = pathlib.Path(source)
    if path.is_dir():
        found = private_files(source)
        if not found:
            raise InputError(
                f"folder {path} holds no .txt files; give text files, or a JSONL, CSV or parquet file"
            )
        return Documents(
            [str(f.relative_to(path)) for f in found], [_text(f) for f in found], [""] * len(found)
        )
    if _is_text(path):
        if not path.is_file():
            raise InputError(f"document file {path} does not exist; check the path")
        return Documents([path.name], [_text(path)], [""])
    records, _ = readers.read_records(source, ("text",), optional=("id", "label"))
    return _documents(records, prefix=path.name)


def private_files(source: str) -> list[pathlib.Path]:
    """The files that `read_private` reads: those of a folder that end in .txt or .TXT, or the one named."""
    path = pathlib.Path(source)
    return sorted(f for f in path.rglob("*") if _is_text(f) and f.is_file()) if path.is_dir() else [path]


def _is_text(path: pathlib.Path) -> bool:
    return path.suffix.lower() == ".txt"


def encode(
    documents: Documents,
    encoder: SentenceEncoder,
    *,
    splitter: str,
    classes: Sequence[str],
    keep: bool = True,
) -> Encoded:
    """Splits and encodes documents; labels that are not in `classes` become -1; with `keep` vectors may be cached."""
    split = [sentences.split(text, splitter=splitter) for text in documents.texts]
    vectors = encoder.encode([s for one in split for s in one], show_progress=True, keep=keep)
    index = {name: i for i, name in enumerate(classes)}
    return Encoded(
        documents.ids,
        documents.texts,
        np.array([index.get(label, -1) for label in documents.labels], np.int32),
        tuple(classes),
        vectors,
        np.concatenate([[0], np.cumsum([len(one) for one in split])]).astype(np.int64),
    )


def _documents(records: list[dict[str, Any]], *, prefix: str) -> Documents:
    ids, texts, labels = [], [], []
    for i, record in enumerate(records):
        text = record["text"]
        texts.append("\n".join(map(str, text)) if isinstance(text, list) else str(text))
        ids.append(str(record["id"]) if record.get("id") is not None else f"{prefix}:{i}")
        labels.append("" if record.get("label") is None else str(record["label"]))
    if len(set(ids)) < len(ids):
        again = Counter(ids).most_common(1)[0][0]
        raise InputError(f"document id {again!r} occurs twice; ids must tell documents apart")
    return Documents(ids, texts, labels)


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # a byte order mark is no text
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text: {error}") from error
