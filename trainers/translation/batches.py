"""From pairs of piece sequences to padded batches of few shapes: buckets by length, concatenations, token
budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from trainers.translation.model import END, PAD

BUCKETS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Padded lengths; one compilation a bucket."""


class Example(NamedTuple):
    """One pair as pieces, without end marks."""

    source: np.ndarray
    target: np.ndarray


class Batch(NamedTuple):
    """Padded rows. `source` ends in END; `inputs` is `targets` shifted right behind a first END.

    source: int32 `[rows, source_length]`.
    inputs, targets: int32 `[rows, target_length]`; the loss counts targets that are not PAD.
    """

    source: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray


def bucket_of(length: int) -> int:
    """The smallest bucket that holds `length`; multiples of 256 beyond the last."""
    for size in BUCKETS:
        if length <= size:
            return size
    return -(-length // 256) * 256


def pad(sequences: Sequence[np.ndarray], length: int, *, rows: int | None = None) -> np.ndarray:
    """int32 `[rows, length]`, each row a sequence and its end mark; missing rows are padding altogether."""
    out = np.full((len(sequences) if rows is None else rows, length), PAD, np.int32)
    for row, sequence in zip(out, sequences):
        row[: len(sequence)] = sequence
        row[len(sequence)] = END
    return out


def shift(targets: np.ndarray) -> np.ndarray:
    """Decoder inputs for `targets`: END, then all but the last piece; padding stays padding."""
    inputs = np.concatenate([np.full_like(targets[:, :1], END), targets[:, :-1]], 1)
    return np.where(targets == PAD, PAD, inputs)


def make_batch(examples: Sequence[Example], *, rows: int | None = None, length: int | None = None) -> Batch:
    """Pads examples to a common bucket, and to `rows` rows with empty ones."""
    if length is None:
        length = bucket_of(1 + max(max(len(e.source), len(e.target)) for e in examples))
    targets = pad([e.target for e in examples], length, rows=rows)
    return Batch(pad([e.source for e in examples], length, rows=rows), shift(targets), targets)


def rows_for(length: int, batch_tokens: int) -> int:
    """Rows of a batch whose rows are `length` long: about `batch_tokens` in all, at least 1."""
    return max(1, batch_tokens // length)


def epoch(
    examples: Sequence[Example],
    *,
    seed: int,
    number: int,
    batch_tokens: int,
    max_length: int = 128,
    concatenate: float = 0.3,
) -> list[list[tuple[int, ...]]]:
    """The batches of epoch `number`: each a list of rows, each row the indices of the pairs it joins.

    A fraction `concatenate` of the pairs is joined, 2 to 6 at random, to rows of at most `max_length` pieces,
    anew every epoch, so that a model of short sentences has seen late positions. Longer pairs than
    `max_length` are left out. The plan depends on `(seed, number)` and the lengths alone, so a resumed run
    continues in it.
    """
    rng = np.random.default_rng([seed, number])
    sizes = np.array([1 + max(len(e.source), len(e.target)) for e in examples])
    order = rng.permutation(len(examples))
    order = order[sizes[order] <= max_length]
    cut = int(len(order) * concatenate)
    rows, row, total, want = [], [], 0, int(rng.integers(2, 7))
    for i in order[:cut]:
        if row and (len(row) >= want or total + sizes[i] > max_length):
            rows.append(tuple(row))
            row, total, want = [], 0, int(rng.integers(2, 7))
        row.append(int(i))
        total += int(sizes[i])
    if row:
        rows.append(tuple(row))
    rows += [(int(i),) for i in order[cut:]]
    lengths = [1 + sum(int(sizes[i]) - 1 for i in row) for row in rows]
    by_bucket: dict[int, list[tuple[int, ...]]] = {}
    for i in rng.permutation(len(rows)):
        by_bucket.setdefault(bucket_of(lengths[i]), []).append(rows[i])
    out = []
    for size in sorted(by_bucket):
        step = rows_for(size, batch_tokens)
        out += [by_bucket[size][i : i + step] for i in range(0, len(by_bucket[size]), step)]
    return [out[i] for i in rng.permutation(len(out))]


def join(examples: Sequence[Example], row: tuple[int, ...]) -> Example:
    """The pairs of a row, one after the other, with nothing between them."""
    if len(row) == 1:
        return examples[row[0]]
    return Example(
        np.concatenate([examples[i].source for i in row]), np.concatenate([examples[i].target for i in row])
    )


def load(examples: Sequence[Example], rows: list[tuple[int, ...]], *, batch_tokens: int) -> Batch:
    """The arrays of one planned batch, with as many rows as its bucket always has."""
    joined = [join(examples, row) for row in rows]
    length = bucket_of(1 + max(max(len(e.source), len(e.target)) for e in joined))
    return make_batch(joined, rows=max(rows_for(length, batch_tokens), len(joined)), length=length)


class Targets(NamedTuple):
    """Every target position of a batch, padding left out.

    real: bool `[pairs, length]`, where they stand. pieces, pairs: int32, what is there and which pair it is of.
    """

    real: np.ndarray
    pieces: np.ndarray
    pairs: np.ndarray


def targets_of(index: np.ndarray, batch: Batch) -> Targets:
    """The target positions of `in_order`'s batch, whose first rows are the pairs `index`."""
    targets = np.asarray(batch.targets)[: len(index)]
    real = targets != PAD
    return Targets(real, targets[real], np.broadcast_to(index[:, None], targets.shape)[real].astype(np.int32))


def in_order(examples: Sequence[Example], *, batch_tokens: int) -> Iterator[tuple[np.ndarray, Batch]]:
    """Every example once, as `(indices, batch)`, sorted by length to waste little; shapes as in training."""
    sizes = np.array([1 + max(len(e.source), len(e.target)) for e in examples], np.int64)
    buckets = np.array([bucket_of(int(s)) for s in sizes])
    for size in np.unique(buckets):
        members = np.flatnonzero(buckets == size)
        step = rows_for(int(size), batch_tokens)
        for i in range(0, len(members), step):
            index = members[i : i + step]
            yield index, make_batch([examples[j] for j in index], rows=step, length=int(size))
