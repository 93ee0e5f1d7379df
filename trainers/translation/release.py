"""What a client lets go: a filter by frequency, and a noisy histogram with a guarantee.

The filter is a habit, not a guarantee (epsilon: none): whether a record passes depends on the other sentences. The
histogram is private: sentences fill buckets (cell of a public coarse quantizer, value), each client adds Gaussian noise
to its own counts and drops what does not exceed a threshold, *before* encryption, because the other members are the
adversary. What leaves is (centroid, value, noisy count). `accounting` says what it guarantees; noisy counts are rounded
to a public grid, which is post-processing, and their law is exact there (`sampling.rounded_normal`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

import accounting
from accounting import PrivacyStatement
from accounting.statement import ADJACENCY_WORDS
from jaxpriv import sampling
from trainers.common.errors import InputError

LEAST_DELTA, DELTA_BELOW = 1e-18, 0.01
LARGEST_EPSILON = 100.0
LARGEST_STDDEV = 2.0**30  # of `sampling.rounded_normal`
MOST_BUCKETS = 2**16


def frequent(values: np.ndarray, sentences: np.ndarray, *, min_sentences: int) -> np.ndarray:
    """Returns which records may leave: those whose value occurs in at least `min_sentences` sentences of this client.

    Args:
      values, sentences: token id and sentence number of every record.
    """
    if min_sentences < 1:
        raise ValueError(f"min_sentences must be at least 1, got {min_sentences=}")
    kinds, number = np.unique(np.asarray(values, np.int64), return_inverse=True)
    pairs = np.unique(np.stack([number, np.asarray(sentences, np.int64)]), axis=1)
    return np.bincount(pairs[0], minlength=len(kinds))[number] >= min_sentences


class Histogram(NamedTuple):
    """One client's private counts.

    cells: uint8 [buckets, subspaces], codes of the coarse quantizer. values: int32 [buckets].
    counts: sentences that filled each bucket; true counts are private, released ones noisy.
    """

    cells: np.ndarray
    values: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, kw_only=True)
class ReleaseConfig:
    """A histogram release. Nothing here is secret."""

    max_buckets: int
    """r: distinct buckets that one unit fills at most, each with weight 1."""
    stddev: float
    """Sigma of the Gaussian noise on each count."""
    threshold: float
    """tau > 1: noisy counts up to it are dropped."""
    unit: Literal["sentence", "client"]
    """Whose presence is hidden."""
    adjacency: Literal["add-remove", "zero-out", "replace-one"]
    """Neighbouring data: one unit more or less, or one exchanged."""

    def __post_init__(self):
        if self.unit not in ("sentence", "client"):
            raise ValueError(f"unit must be 'sentence' or 'client', got {self.unit!r}")
        if self.adjacency not in ("add-remove", "zero-out", "replace-one"):
            raise ValueError(f"adjacency must be add-remove, zero-out or replace-one, got {self.adjacency!r}")
        if not 0 < self.stddev <= LARGEST_STDDEV:
            raise ValueError(
                f"stddev must be positive and at most 2^30, got {self.stddev=}; a release without noise has no epsilon"
            )
        if type(self.max_buckets) is not int or not 1 <= self.max_buckets <= MOST_BUCKETS:
            raise ValueError(
                f"max_buckets must be an integer in [1, {MOST_BUCKETS}], got {self.max_buckets!r:.20}"
            )
        if not 1 < self.threshold < math.inf:
            raise ValueError(f"threshold must be more than 1 (a unit's own weight), got {self.threshold=}")


def grid(stddev: float) -> float:
    """What noisy counts are multiples of: a power of two, about a thousandth of the stddev and at most 1.

    True counts are multiples of it too, so that a count plus rounded noise is the noisy count, rounded.
    """
    return 2.0 ** min(0, max(-20, math.frexp(stddev)[1] - 11))


def histogram(
    cells: np.ndarray, values: np.ndarray, sentences: np.ndarray, *, max_buckets: int, unit: str
) -> Histogram:
    """Counts the units that fill each bucket; private.

    A unit adds weight 1 to each of at most `max_buckets` distinct buckets. If it has more, those whose hash is lowest
    count: the choice depends on its own buckets alone, and units choose alike, so that counts gather.
    """
    owners = np.zeros(len(values), np.int64) if unit == "client" else np.asarray(sentences, np.int64)
    keys = np.concatenate([np.asarray(cells, np.uint8), _bytes_of(values)], 1)
    buckets, number = np.unique(keys, axis=0, return_inverse=True)
    pairs = np.unique(np.stack([owners, number.reshape(-1)], 1), axis=0)
    rank = _hash(buckets)[pairs[:, 1]]
    order = np.lexsort([pairs[:, 1], rank, pairs[:, 0]])
    pairs = pairs[order]
    new = np.concatenate([[True], pairs[1:, 0] != pairs[:-1, 0]]) if len(pairs) else np.zeros(0, bool)
    place = np.arange(len(pairs)) - np.maximum.accumulate(np.where(new, np.arange(len(pairs)), 0))
    counts = np.bincount(pairs[place < max_buckets, 1], minlength=len(buckets))
    filled = counts > 0
    width = np.shape(cells)[1]
    return Histogram(
        buckets[filled, :width],
        buckets[filled, width:].copy().view("<i4")[:, 0],
        counts[filled].astype(np.int64),
    )


def release(key: jax.Array, counts: Histogram, config: ReleaseConfig) -> Histogram:
    """Returns the buckets whose noisy count exceeds the threshold, with that count: differentially private.

    Buckets that nobody filled get no noise and never appear: that is what the threshold pays for (`epsilon`). The
    key must be secret (`trainers.common.entropy`), and used for this alone. Shown is what exceeds the threshold by
    half a step of the grid, so that the noisy count before rounding exceeds it as well.
    """
    step = grid(config.stddev)
    noisy = counts.counts + step * sampling.rounded_normal(
        key, counts.counts.shape, stddev=config.stddev / step
    )
    shown = noisy - step / 2 >= config.threshold
    return Histogram(counts.cells[shown], counts.values[shown], noisy[shown].astype(np.float32))


def check(epsilon: float, delta: float, max_buckets: int, *, option: str = "epsilon") -> None:
    """Refuses what no release serves, in one line.

    A noise key holds 64 bits: 2^-64, the chance of guessing it, is not to weigh beside delta. From 0.01 on,
    publishing one pair in a hundred would satisfy the definition, and an epsilon of more than 100 promises nothing
    either.
    """
    if not 0 < epsilon < math.inf:
        raise InputError(f"{option} must be positive, got {epsilon}")
    if epsilon > LARGEST_EPSILON:
        raise InputError(
            f"{option} must be at most {LARGEST_EPSILON:g}, got {epsilon}: more promises nothing"
        )
    if not 1 <= max_buckets <= MOST_BUCKETS:
        raise InputError(f"--max-buckets must be in [1, {MOST_BUCKETS}], got {max_buckets!s:.20}")
    if not LEAST_DELTA <= delta < DELTA_BELOW:
        raise InputError(
            f"--delta must be in [1e-18, 0.01), well below one in the number of pairs, got {delta}: a noise key of 64 "
            "bits serves no smaller one, and a larger one promises nothing"
        )


def lost(*, stddev: float, max_buckets: int) -> float:
    """The share of delta that the sampler's distance from its law takes, at any epsilon up to 100.

    (1 + e^epsilon) times that distance, for the at most 2 r buckets that a unit moves (if it is exchanged): 1e-27
    for r = 16 and a sigma in the thousands.
    """
    distance = sampling.rounded_residual(stddev / grid(stddev))
    return 2 * max_buckets * (1 + math.exp(LARGEST_EPSILON)) * distance


def epsilon(config: ReleaseConfig, *, delta: float) -> float:
    """Returns epsilon at `delta`, for one client's release; infinite if delta is less than the threshold's share, or if
    it would exceed 100.
    """
    left = delta - lost(stddev=config.stddev, max_buckets=config.max_buckets)
    if left <= 0:
        return math.inf
    value = accounting.histogram_epsilon(
        delta=left,
        stddev=config.stddev,
        threshold=config.threshold,
        max_buckets=config.max_buckets,
        adjacency=config.adjacency,
    )
    return value if value <= LARGEST_EPSILON else math.inf


def calibrate(
    *, epsilon: float, delta: float, max_buckets: int, unit: str, adjacency: str, share: float = 0.5
) -> ReleaseConfig:
    """Returns the release with the least noise that guarantees (epsilon, delta).

    Args:
      share: of delta that pays for the threshold; the rest pays for the noise.
    """
    if not 0 < epsilon <= LARGEST_EPSILON:
        raise ValueError(f"epsilon must be positive and at most {LARGEST_EPSILON:g}, got {epsilon=}")

    def left(stddev: float) -> float:
        return delta - lost(stddev=stddev, max_buckets=max_buckets)

    def config(stddev: float) -> ReleaseConfig:
        threshold = accounting.histogram_threshold(
            delta=left(stddev), stddev=stddev, max_buckets=max_buckets, adjacency=adjacency, share=share
        )
        settings: dict[str, Any] = dict(unit=unit, adjacency=adjacency)
        return ReleaseConfig(max_buckets=max_buckets, stddev=stddev, threshold=threshold, **settings)

    def spent(stddev: float) -> float:
        if left(stddev) <= delta / 2:  # more buckets than the sampler's bits serve at this delta
            return math.inf
        return accounting.histogram_epsilon(
            delta=left(stddev),
            stddev=stddev,
            threshold=config(stddev).threshold,
            max_buckets=max_buckets,
            adjacency=adjacency,
        )

    low, high = 1e-3, 1.0
    while spent(high) > epsilon:
        low, high = high, 2 * high
        if high > LARGEST_STDDEV:
            raise InputError(f"no noise reaches epsilon {epsilon:g} at delta {delta:g}; ask for a larger one")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    return config(high)


def as_json(config: ReleaseConfig, *, delta: float) -> dict[str, Any]:
    """What others need to know of a release to state its guarantee themselves; public."""
    return {**dataclasses.asdict(config), "delta": delta}


def joint_statement(releases: Sequence[Any]) -> PrivacyStatement:
    """States what holds for every unit when each client made one of these releases (`as_json`): the largest epsilon
    and delta, computed anew.

    Raises:
      ValueError: there is none, one is not readable, or they speak of different units or adjacencies.
    """
    found: list[tuple[float, ReleaseConfig, float]] = []
    for said in releases:
        if not isinstance(said, dict):
            raise ValueError("a client did not say how its histogram was made")
        try:
            delta = float(said["delta"])
            config = ReleaseConfig(**{k: v for k, v in said.items() if k != "delta"})
            value = epsilon(config, delta=delta) if LEAST_DELTA <= delta < DELTA_BELOW else math.inf
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"a client's settings cannot be read ({error!s:.200})") from error
        if not LEAST_DELTA <= delta < DELTA_BELOW:
            raise ValueError(
                f"a client claims delta {delta:g}; it must be in [1e-18, 0.01) to promise anything"
            )
        found.append((value, config, delta))
    if len({(config.unit, config.adjacency) for _, config, _ in found}) != 1:
        raise ValueError("the clients' histograms have no unit and adjacency in common")
    value, config, _ = max(found, key=lambda one: one[0])
    made = statement(config, delta=max(delta for _, _, delta in found), at_least=value).data
    told = (
        "every client made its histogram with the settings that it sent along, and the server passed them on"
    )
    return PrivacyStatement({**made, "assumptions": [*made["assumptions"], told]})


def statement(config: ReleaseConfig, *, delta: float, at_least: float = 0.0) -> PrivacyStatement:
    """States what one client's released histogram guarantees; raises ValueError where delta is too small for it.

    Args:
      at_least: an epsilon that is stated in place of a smaller one.
    """
    value = max(epsilon(config, delta=delta), at_least)
    if not np.isfinite(value):
        raise ValueError(
            f"delta {delta:g} is less than the threshold {config.threshold:g} costs, or epsilon would exceed "
            f"{LARGEST_EPSILON:g}; raise the threshold, the noise or delta"
        )
    words = ADJACENCY_WORDS[config.adjacency].format(unit=config.unit)
    printed = accounting.round_up(value)
    blank = accounting.no_guarantee(unit=config.unit, reasons=["replaced below"]).data
    return PrivacyStatement(
        {
            **blank,
            "sentence": f"Each {config.unit} has ({printed}, {accounting.in_full(delta)})-differential privacy in the "
            f"histogram that its client released ({config.adjacency} adjacency: {words}).",
            "adjacency": config.adjacency,
            "adjacency_in_words": words,
            "epsilon": value,
            "delta": delta,
            "epsilon_printed": printed,
            "conversion": "exact Gaussian curve for the counts, which rounding to a public grid leaves as it is, and "
            "1 - Phi((tau - 1) / sigma)^r for the threshold",
            "covered": [
                "the released (cell, value, noisy count) triples and everything computed from them",
                "towards everyone: other members, the server and the public",
            ],
            "not_covered": [
                "a second release from the same text (it composes)",
                "records shared beside the histogram, and anything else published about the text",
                "the choice of r, sigma and tau, if it was made by looking at the text",
                f"a {config.unit} that occurs several times, at one client or at several: every occurrence is one of "
                "its own, and the guarantee for all of them together is that of a group",
            ],
            "assumptions": [
                "the model, the coarse quantizer and the settings are public and came from public data",
                "the noise key is secret and comes from the operating system; it holds 64 bits, so that the guarantee "
                "is computational: nobody tries them all",
                f"each {config.unit} fills at most {config.max_buckets} distinct buckets with weight at most 1",
            ],
            "notes": [
                f"r = {config.max_buckets}, sigma = {config.stddev:g}, tau = {config.threshold:g}; each client "
                "noises its own counts before encryption",
            ],
        }
    )


def no_statement(*, unit: str = "sentence") -> PrivacyStatement:
    """The statement for everything here that only hinders: epsilon is none."""
    from trainers.translation.protocol import NO_GUARANTEE

    return accounting.no_guarantee(unit=unit, reasons=NO_GUARANTEE)


def _bytes_of(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, "<i4").reshape(-1, 1).view(np.uint8)


def _hash(rows: np.ndarray) -> np.ndarray:
    """A public, well-mixed 64-bit number of every row (FNV-1a, then the finaliser of SplitMix64)."""
    state = np.full(len(rows), 0xCBF29CE484222325, np.uint64)
    with np.errstate(over="ignore"):
        for column in rows.T:
            state = (state ^ column.astype(np.uint64)) * np.uint64(0x100000001B3)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
