"""Greedy and beam decoding over a `Stepper`: anything that yields log-probabilities of the next piece.

The same two loops serve the plain model, an ensemble and kNN-MT. Each is jitted once a shape (rows, source
bucket), not once a sentence; a row's result does not depend on the rows beside it: its own length limit
applies, padding is masked, and rows that have ended are dropped from the batch when they have become many.

Length normalisation: the score of a hypothesis is `log p / length ** length_penalty`, where `length` counts
the pieces whose log-probabilities are summed: for a finished hypothesis that includes the end mark, one cut
at its limit has none. So an end mark alone has length 1, penalty 0 ranks by log-probability, negative
penalties prefer short hypotheses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from trainers.common.errors import InputError
from trainers.translation import batches
from trainers.translation import model as models
from trainers.translation.config import MOST_PENALTY
from trainers.translation.model import END, PAD, UNK

Weights = Any
RowCache = Any

LONGEST = 8192
"""Pieces of a source at most, end mark included: more is no sentence, and takes hours."""
ORDINARY = 256
"""Sources of so many pieces share batches; longer ones stand in batches of their own kind, of fewer rows."""
ROOM = 16_384, 65_536
"""Source positions of a batch at most, and those times beams: what bounds the memory of a batch of long sources."""


@dataclass(frozen=True)
class Stepper:
    """How to advance a batch of partial translations. Hashable: a static argument of the jitted loops.

    start: `(weights, source, max_length) -> cache` with one cache row a source row.
    step: `(weights, cache, pieces, position, active) -> (cache, log_probs [rows, vocabulary])`; rows that are
      not `active` may get anything finite.
    select: `(cache, rows) -> cache`, the cache of these rows in this order.
    """

    start: Callable[[Weights, Int[Array, "rows source"], int], RowCache]
    step: Callable[..., tuple[RowCache, Float[Array, "rows vocabulary"]]]
    select: Callable[[RowCache, Int[Array, " rows"]], RowCache]


class Hypothesis(NamedTuple):
    """One translation: its pieces without the end mark, its normalised score, and whether it ended by
    itself.
    """

    pieces: np.ndarray
    score: float
    finished: bool


def length_limit(source_length):
    """Most pieces (end mark included) that a source of so many pieces (end mark included) may be translated
    to.
    """
    return 2 * source_length + 16


def normalized(log_prob, length, length_penalty):
    """`log_prob / length ** length_penalty`, `length >= 1`."""
    return log_prob / jnp.maximum(length, 1).astype(jnp.float32) ** length_penalty


def select_rows(cache: models.Cache, rows: Int[Array, " rows"]) -> models.Cache:
    """The cache of these rows, in this order."""
    return jax.tree.map(lambda leaf: leaf[rows], cache)


def likeliest(
    log_probs: Float[Array, "rows vocabulary"],
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """The best piece of every row, the first of equal ones, and its log-probability.

    Two plain reductions, which a CPU vectorises; `argmax` is one that it does not, seven times slower.
    """
    best = log_probs.max(-1)
    pieces = jnp.arange(log_probs.shape[-1], dtype=jnp.int32)[None]
    first = jnp.where(log_probs == best[:, None], pieces, log_probs.shape[-1] - 1).min(-1)
    return first, best


def log_softmax(logits: Float[Array, "rows vocabulary"]) -> Float[Array, "rows vocabulary"]:
    """Log-probabilities over the pieces that may be produced: padding and the unknown piece get none."""
    never = jnp.arange(logits.shape[-1])
    return jax.nn.log_softmax(jnp.where(((never == PAD) | (never == UNK))[None], -1e9, logits), -1)


@functools.lru_cache(maxsize=8)
def plain(graphdef: nnx.GraphDef) -> Stepper:
    """The model alone; weights are its parameters."""

    def start(params, source, max_length):
        model = models.merge(graphdef, params)
        return model.start(model.encode(source), source != PAD, max_length)

    def step(params, cache, pieces, position, active):
        del active
        model = models.merge(graphdef, params)
        cache, hidden, _ = model.step(cache, pieces, position)
        return cache, log_softmax(model.logits(hidden))

    return Stepper(start, step, select_rows)


@functools.lru_cache(maxsize=8)
def ensemble(graphdef: nnx.GraphDef) -> Stepper:
    """Several models of one shape, probabilities averaged; weights are parameters with a leading models
    axis.
    """
    one = plain(graphdef)

    def start(params, source, max_length):
        return jax.vmap(lambda p: one.start(p, source, max_length))(params)

    def step(params, cache, pieces, position, active):
        cache, log_probs = jax.vmap(lambda p, c: one.step(p, c, pieces, position, active))(params, cache)
        return cache, jax.nn.logsumexp(log_probs, 0) - jnp.log(float(log_probs.shape[0]))

    return Stepper(start, step, lambda cache, rows: jax.vmap(lambda c: select_rows(c, rows))(cache))


class _Greedy(NamedTuple):
    cache: RowCache
    position: Int[Array, ""]
    pieces: Int[Array, "rows length"]
    log_prob: Float[Array, " rows"]
    length: Int[Array, " rows"]
    done: Bool[Array, " rows"]
    finished: Bool[Array, " rows"]
    limit: Int[Array, " rows"]


@functools.partial(jax.jit, static_argnums=(0, 3))
def _greedy_start(stepper, weights, source, max_length):
    rows = source.shape[0]
    lengths = (source != PAD).sum(1)
    return _Greedy(
        stepper.start(weights, source, max_length),
        jnp.int32(0),
        jnp.full((rows, max_length), PAD, jnp.int32),
        jnp.zeros(rows),
        jnp.zeros(rows, jnp.int32),
        lengths <= 1,  # nothing but an end mark: a blank line, or a row that pads the batch
        lengths <= 1,
        length_limit(lengths),
    )


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def _greedy_run(stepper, weights, state, keep):
    """Runs until at most `keep` rows are not done."""

    def body(s: _Greedy):
        last = jnp.where(
            s.position == 0, END, jax.lax.dynamic_index_in_dim(s.pieces, s.position - 1, 1, keepdims=False)
        )
        cache, log_probs = stepper.step(weights, s.cache, last, s.position, ~s.done)
        best, gain = likeliest(log_probs)
        pieces = jax.lax.dynamic_update_index_in_dim(s.pieces, jnp.where(s.done, PAD, best), s.position, 1)
        length = s.length + ~s.done
        finished = s.finished | (~s.done & (best == END))
        return _Greedy(
            cache,
            s.position + 1,
            pieces,
            s.log_prob + jnp.where(s.done, 0.0, gain),
            length,
            s.done | finished | (length >= s.limit),
            finished,
            s.limit,
        )

    return jax.lax.while_loop(lambda s: (~s.done).sum() > keep, body, state)


class _Beam(NamedTuple):
    """Live beams in order of log-probability, and the best ended ones by normalised score."""

    cache: RowCache
    position: Int[Array, ""]
    pieces: Int[Array, "rows beams length"]
    log_prob: Float[Array, "rows beams"]
    ended_pieces: Int[Array, "rows beams length"]
    ended_score: Float[Array, "rows beams"]
    ended_finished: Bool[Array, "rows beams"]
    done: Bool[Array, " rows"]
    limit: Int[Array, " rows"]


_WORST = -1e30


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _beam_start(stepper, weights, source, max_length, beams):
    rows = source.shape[0]
    lengths = (source != PAD).sum(1)
    cache = stepper.start(weights, source, max_length)
    cache = stepper.select(cache, jnp.repeat(jnp.arange(rows), beams))
    empty = jnp.full((rows, beams, max_length), PAD, jnp.int32)
    # One live beam at first: equal ones would fill the list with copies.
    first = jnp.where(jnp.arange(beams) == 0, 0.0, _WORST)
    return _Beam(
        cache,
        jnp.int32(0),
        empty,
        jnp.broadcast_to(first[None], (rows, beams)),
        empty,
        jnp.full((rows, beams), _WORST),
        jnp.zeros((rows, beams), bool),
        lengths <= 1,
        length_limit(lengths),
    )


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def _beam_run(stepper, weights, state, keep, length_penalty):
    rows, beams, _ = state.pieces.shape

    def body(s: _Beam):
        before = jax.lax.dynamic_index_in_dim(s.pieces, s.position - 1, 2, keepdims=False)
        last = jnp.where(s.position == 0, END, before).reshape(-1)
        active = jnp.repeat(~s.done, beams)
        cache, log_probs = stepper.step(weights, s.cache, last, s.position, active)
        # 2 x beams candidates hold at least `beams` that do not end.
        gain, piece = jax.lax.top_k(log_probs, 2 * beams)
        total = (s.log_prob[:, :, None] + gain.reshape(rows, beams, -1)).reshape(rows, -1)
        total, index = jax.lax.top_k(total, 2 * beams)
        origin = index // (2 * beams)
        piece = jnp.take_along_axis(piece.reshape(rows, -1), index, 1)
        history = jnp.take_along_axis(s.pieces, origin[:, :, None], 1)
        history = jax.lax.dynamic_update_index_in_dim(history, piece, s.position, 2)

        length = s.position + 1
        ends = piece == END
        out_of_room = (length >= s.limit)[:, None]
        possible = total > _WORST / 2
        score = jnp.where((ends | out_of_room) & possible, normalized(total, length, length_penalty), _WORST)
        pool = jnp.concatenate([s.ended_score, score], 1)
        ended_score, kept = jax.lax.top_k(pool, beams)
        pool_pieces = jnp.concatenate([s.ended_pieces, history], 1)
        ended_pieces = jnp.take_along_axis(pool_pieces, kept[:, :, None], 1)
        ended_finished = jnp.take_along_axis(jnp.concatenate([s.ended_finished, ends], 1), kept, 1)

        alive, chosen = jax.lax.top_k(jnp.where(ends, _WORST, total), beams)
        pieces = jnp.take_along_axis(history, chosen[:, :, None], 1)
        origin = jnp.take_along_axis(origin, chosen, 1)
        cache = stepper.select(cache, (jnp.arange(rows)[:, None] * beams + origin).reshape(-1))

        # A live beam only loses log-probability; its normalised score is monotone in the length it ends at.
        soonest = normalized(alive[:, 0], length + 1, length_penalty)
        latest = normalized(alive[:, 0], s.limit, length_penalty)
        hopeless = jnp.maximum(soonest, latest) <= ended_score[:, -1]
        done = s.done | out_of_room[:, 0] | hopeless
        hold = s.done
        return _Beam(
            cache,
            length,
            jnp.where(hold[:, None, None], s.pieces, pieces),
            jnp.where(hold[:, None], s.log_prob, alive),
            jnp.where(hold[:, None, None], s.ended_pieces, ended_pieces),
            jnp.where(hold[:, None], s.ended_score, ended_score),
            jnp.where(hold[:, None], s.ended_finished, ended_finished),
            done,
            s.limit,
        )

    return jax.lax.while_loop(lambda s: (~s.done).sum() > keep, body, state)


def _compact(stepper: Stepper, state, rows: np.ndarray, beams: int):
    """The state of these rows alone."""
    cache_rows = (rows[:, None] * beams + np.arange(beams)[None]).reshape(-1)
    rest = {name: value[rows] for name, value in state._asdict().items() if name not in ("cache", "position")}
    return state._replace(cache=_select(stepper, state.cache, cache_rows), **rest)


@functools.partial(jax.jit, static_argnums=0)
def _select(stepper, cache, rows):
    return stepper.select(cache, rows)


def _read(state, row: int, length_penalty: float) -> Hypothesis:
    if isinstance(state, _Greedy):
        length = int(state.length[row])
        pieces, finished = state.pieces[row, :length], bool(state.finished[row])
        score = float(state.log_prob[row]) / max(length, 1) ** length_penalty
    else:
        pieces, finished = state.ended_pieces[row, 0], bool(state.ended_finished[row, 0])
        pieces = pieces[: int((pieces != PAD).sum())]
        score = float(state.ended_score[row, 0])
    return Hypothesis(np.asarray(pieces[:-1] if finished else pieces), score, finished)


def search(
    stepper: Stepper,
    weights: Weights,
    sources: Sequence[np.ndarray],
    *,
    beams: int = 1,
    length_penalty: float = 1.0,
    rows: int = 32,
    progress: Callable[[int], Any] | None = None,
) -> list[Hypothesis]:
    """The best translation of every source, in their order.

    Args:
      sources: pieces without end marks; an empty one gives an empty hypothesis of score 0 without running the
      model. beams: 1 takes the likeliest piece at every step; more keeps that many hypotheses.
      rows: sentences a batch; changes speed only. Of long sources there are fewer, so that memory is bounded.
      progress: called with the number of sentences done since the last call.

    Raises:
      InputError: a source has more than `LONGEST` pieces.
    """
    if beams < 1:
        raise ValueError(f"beams must be at least 1, got {beams=}")
    if not abs(length_penalty) <= MOST_PENALTY:  # beyond it scores leave float32
        raise ValueError(
            f"length_penalty must be from {-MOST_PENALTY} to {MOST_PENALTY}, got {length_penalty=}"
        )
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows=}")
    check_lengths(sources)
    out: list[Hypothesis] = [Hypothesis(np.zeros(0, np.int32), 0.0, True)] * len(sources)
    for members, length, height in _source_batches(sources, rows, beams):
        source = jnp.asarray(batches.pad([sources[i] for i in members], length, rows=height))
        max_length = length_limit(length)
        owners = np.concatenate([members, np.full(height - len(members), -1)])
        if beams == 1:
            state = _greedy_start(stepper, weights, source, max_length)
        else:
            state = _beam_start(stepper, weights, source, max_length, beams)
        while True:
            keep = len(owners) // 4 if len(owners) >= 16 else 0
            if beams == 1:
                state = _greedy_run(stepper, weights, state, keep)
            else:
                state = _beam_run(stepper, weights, state, keep, jnp.float32(length_penalty))
            host = jax.device_get(state._replace(cache=None))
            for row in np.flatnonzero(host.done & (owners >= 0)).tolist():
                out[owners[row]] = _read(host, row, length_penalty)
                owners[row] = -1
            live = np.flatnonzero(~host.done)
            if not len(live):
                break
            ended = np.flatnonzero(host.done)
            chosen = np.concatenate([live, ended])[: max(len(owners) // 4, len(live))]
            state = _compact(stepper, state, chosen, beams)
            owners = owners[chosen]
        if progress is not None:
            progress(len(members))
    return out


def check_lengths(sources: Sequence[np.ndarray], what: str = "sentence", *, first: int = 1) -> None:
    """Refuses a source that is too long for `search`; `what` stands before its number, counted from `first`."""
    for number, source in enumerate(sources, first):
        if len(source) >= LONGEST:
            raise InputError(
                f"{what} {number} has {len(source)} pieces, at most {LONGEST - 1} are translated; "
                "divide it into sentences"
            )


def _source_batches(sources, rows: int, beams: int) -> Iterator[tuple[np.ndarray, int, int]]:
    """Batches of non-empty sources of like length, as `(indices, padded length, rows)`.

    Ordinary sources always make `rows` rows; of long ones there are as many rows as there is `ROOM` for, or as there
    are sources, in powers of two: a row that only fills up costs as much as one that does not.
    """
    sizes = np.array([len(s) + 1 for s in sources], np.int64)
    filled = np.flatnonzero(sizes > 1)
    order = filled[np.argsort(sizes[filled], kind="stable")]
    lengths = np.array([_source_bucket(int(size)) for size in sizes[order]], np.int64)
    kinds = np.maximum(lengths, ORDINARY)
    for kind in np.unique(kinds).tolist():
        of_kind, most = order[kinds == kind], _rows_at_once(kind, rows, beams)
        for i in range(0, len(of_kind), most):
            members = of_kind[i : i + most]
            length = _source_bucket(int(sizes[members].max()))
            few = kind > ORDINARY or most < rows
            yield members, length, min(most, _power_of_two(len(members))) if few else rows


def _rows_at_once(length: int, rows: int, beams: int) -> int:
    """Rows of a batch of sources of this length: never more than `rows`, and fewer where memory would not hold them."""
    return max(1, min(rows, ROOM[0] // length, ROOM[1] // (length * beams)))


def _source_bucket(length: int) -> int:
    """16, 32, 64, ...: few shapes, since the search over a store outweighs padding."""
    return max(16, _power_of_two(length))


def _power_of_two(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << (n - 1).bit_length()
