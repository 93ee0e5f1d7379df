"""Turn the examples of a round's clients into arrays whose shapes stay the same from round to round.

All batches of all clients of a round lie in one store; a client is the range of batches that is its own, so none
is padded to another's length. A batch is packed: its examples are sorted by length, the longest first, and laid out
time step by time step without gaps. At step t the first `live[t]` examples still have a target, and their
tokens stand side by side:

    live      3 2 2 1
    inputs    a1 b1 c1 | a2 b2 | a3 b3 | a4 | 0 0 0 ...

which loses nothing (the loss of a batch does not depend on the order of its examples) and spares the model every
padded position.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxpriv import cohort as cohorts


class Packed(NamedTuple):
    """Packed batches; as single batch without the leading axis. Padding is 0.

    inputs, targets: tokens of the live positions, then zeros. `positions` = steps x rows of a batch.
    live: examples that have a target at each step, never increasing.
    """

    inputs: Int[Array, "batches positions"]
    targets: Int[Array, "batches positions"]
    live: Int[Array, "batches steps"]

    @property
    def rows(self) -> int:
        """Examples in a batch, `batch_size`."""
        return self.inputs.shape[-1] // self.live.shape[-1]


class Span(NamedTuple):
    """One client's batches in the store: `first`, `first + 1`, ..., `count` of them."""

    first: Int[Array, "..."]
    count: Int[Array, "..."]


class RoundBatch(NamedTuple):
    """What one round computes on.

    store: the batches of all its clients.
    cohort: who they are; `data` is a `Span` a client.
    """

    store: Packed
    cohort: cohorts.Cohort


def pack_round(
    ids: Sequence[int],
    examples: Sequence[Int[np.ndarray, "examples width"]],
    *,
    batch_size: int,
    max_examples: int,
    chunk_size: int,
    num_clients: int | None = None,
    width: int | None = None,
) -> RoundBatch:
    """Packs the clients of a round; memory is that of the examples used, at most `max_examples` a client.

    Args:
      ids: the clients' numbers.
      examples: for each client int32 tokens, one example a row (begin, words, end), zeros after its last token. A
        client may have no rows. Rows without any target are left out.
      batch_size: examples in a batch; a client's last batch may hold fewer.
      max_examples: examples used of one client, its first ones.
      chunk_size: clients computed at once (see `cohort.arrange`).
      num_clients: places to fill up to, usually the report goal, so that nothing is compiled again.
      width: tokens in a row; needed where no client has any row.

    Returns:
      numpy arrays. The store's length is a power of two from 256, so that a run sees one or two shapes.
    """
    _check(ids, examples, batch_size, max_examples)
    widths = {e.shape[1] for e in examples if len(e)} | ({width} if width else set())
    if len(widths) != 1 or min(widths) < 2:
        raise ValueError(f"all examples must have the same width of at least 2 tokens, got {sorted(widths)}")
    (tokens,) = widths
    return _pack(
        ids,
        [_with_targets(e[:max_examples], tokens) for e in examples],
        width=tokens,
        batch_size=batch_size,
        chunk_size=chunk_size,
        num_clients=num_clients,
        least_batches=0,
    )


def _pack(
    ids: Sequence[int],
    kept: Sequence[Int[np.ndarray, "examples width"]],
    *,
    width: int,
    batch_size: int,
    chunk_size: int,
    num_clients: int | None,
    least_batches: int,
) -> RoundBatch:
    """`pack_round` of rows that all have a target; `least_batches` is what the store must have room for."""
    steps = width - 1
    num_examples = np.array([len(e) for e in kept], np.int32)
    count = -(-num_examples // batch_size)
    first = np.cumsum(count) - count
    total = int(count.sum())

    tokens = np.concatenate([*kept, np.zeros((0, steps + 1), np.int32)])
    position = np.arange(len(tokens)) - np.repeat(np.cumsum(num_examples) - num_examples, num_examples)
    batch = np.repeat(first, num_examples) + position // batch_size
    length = steps - (tokens[:, :0:-1] != 0).argmax(1)
    order = np.lexsort((-length, batch))  # by batch, the longest first
    tokens, length, batch = tokens[order], length[order], batch[order]
    row = np.arange(len(tokens)) - np.searchsorted(batch, batch)  # rank in its batch

    # [batches, steps, rows]: True where an example still has a target.
    lengths = np.zeros((total, batch_size), np.int32)
    lengths[batch, row] = length
    alive = lengths[:, None, :] > np.arange(steps)[None, :, None]
    where = np.nonzero(alive)
    slot = (np.cumsum(alive.reshape(total, steps * batch_size), 1) - 1).reshape(alive.shape)[where]
    padded = np.zeros((total, batch_size, steps + 1), np.int32)
    padded[batch, row] = tokens

    size = _round_up(max(total, least_batches))
    store = Packed(
        inputs=np.zeros((size, steps * batch_size), np.int32),  # type: ignore[arg-type]
        targets=np.zeros((size, steps * batch_size), np.int32),  # type: ignore[arg-type]
        live=np.zeros((size, steps), np.int32),  # type: ignore[arg-type]
    )
    store.inputs[where[0], slot] = padded[where[0], where[2], where[1]]  # type: ignore[index]
    store.targets[where[0], slot] = padded[where[0], where[2], where[1] + 1]  # type: ignore[index]
    store.live[:total] = alive.sum(2)  # type: ignore[index]
    return RoundBatch(
        store,
        cohorts.arrange(
            ids,
            num_examples,
            Span(first.astype(np.int32), count.astype(np.int32)),  # type: ignore[arg-type]
            chunk_size=chunk_size,
            num_clients=num_clients,
        ),
    )


def pack_parts(
    ids: Sequence[int],
    examples: Sequence[Int[np.ndarray, "examples width"]],
    *,
    num_parts: int,
    batch_size: int,
    max_examples: int,
    chunk_size: int,
    num_clients: int,
    width: int,
    largest: Callable[[int], int] = int,
) -> list[RoundBatch]:
    """Packs the clients of a round in parts of about equal work, all of the same shapes: one for each device.

    Args:
      chunk_size: clients that each device computes at once.
      num_clients: places in every part, the report goal: a part may get any number of clients.
      largest: gives the largest of all processes' numbers for one's own, so that shapes agree across them.
      The rest as for `pack_round`.
    """
    _check(ids, examples, batch_size, max_examples)
    kept = [_with_targets(e[:max_examples], width) for e in examples]
    work = [-(-len(rows) // batch_size) for rows in kept]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    load = np.zeros(num_parts, np.int64)
    for i in sorted(range(len(ids)), key=lambda i: -work[i]):  # the longest first, to whoever has least
        part = int(load.argmin())
        parts[part].append(i)
        load[part] += work[i]
    least = largest(int(load.max()))
    return [
        _pack(
            [ids[i] for i in sorted(part)],
            [kept[i] for i in sorted(part)],
            width=width,
            batch_size=batch_size,
            chunk_size=chunk_size,
            num_clients=num_clients,
            least_batches=least,
        )
        for part in parts
    ]


def blocks(examples: Int[np.ndarray, "examples width"], rows: int) -> Iterator[Int[np.ndarray, "rows width"]]:
    """The examples in their order, `rows` at a time; the last block is filled up with zeros."""
    for first in range(0, len(examples), rows):
        block = np.zeros((rows, examples.shape[1]), np.int32)
        part = examples[first : first + rows]
        block[: len(part)] = part
        yield block


def unpack(batch: Packed) -> tuple[Int[Array, "steps rows"], Int[Array, "steps rows"]]:
    """`(inputs, targets)` of one packed batch, padded again, time first."""
    rows = jnp.arange(batch.rows)
    start = jnp.cumsum(batch.live) - batch.live
    slot = start[:, None] + rows[None]
    real = rows[None] < batch.live[:, None]
    # Slots of dead rows belong to others, or lie beyond the end: read anything, keep nothing.
    take = lambda x: jnp.where(real, x.at[slot].get(mode="clip"), 0)
    return take(batch.inputs), take(batch.targets)


def _check(ids: Sequence[int], examples: Sequence, batch_size: int, max_examples: int) -> None:
    if len(ids) != len(examples):
        raise ValueError(f"one id a client, got {len(ids)} ids for {len(examples)} clients")
    if batch_size < 1 or max_examples < 1:
        raise ValueError(
            f"batch_size and max_examples must be at least 1, got {batch_size=}, {max_examples=}"
        )


def _with_targets(rows: np.ndarray, width: int) -> np.ndarray:
    rows = np.asarray(rows).reshape(-1, width)
    return rows[(rows[:, 1:] != 0).any(1)]


def _round_up(n: int) -> int:
    """The next power of two: every other length would be one more compilation."""
    return max(256, 1 << max(n - 1, 0).bit_length())
