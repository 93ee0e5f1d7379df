"""Whether text that is given as public is the clients' own, whatever its file is called and its lines are cut: told by
the runs of words in it.
"""

import hashlib
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt64

from trainers.common.errors import InputError
from trainers.common.packed import PackedTokens

# Shorter runs ("thank you very much") are anybody's: that two texts share them tells nothing.
RUN = 5
_MOST_SHARED = 0.5
_NEARLY_ALL = 0.9
_AT_ONCE = 1 << 22  # tokens; bounds the memory beside the text itself
_SKETCH = 1 << 16


class Words(NamedTuple):
    """What a text is told by: 16 bytes a token at most, equal for equal words whichever text they are of.

    runs: 64 bits of each different run of `RUN` words (tokens: marks count) within a line, sorted.
    short: 64 bits of each line of fewer words, sorted, equal ones as often as they occur.
    across: the runs of the whole text, line ends left out, sorted: the same however its lines are cut.

    Of a million runs and a million others, two different ones are taken for equal once in 10^7 times.
    """

    runs: UInt64[np.ndarray, "runs"]
    short: UInt64[np.ndarray, "lines"]
    across: UInt64[np.ndarray, "runs"]


NOTHING = Words(*[np.zeros(0, np.uint64)] * 3)


def words_of(*texts: PackedTokens) -> Words:
    """The runs and the short lines of all texts together."""
    runs, short, across = (np.concatenate(parts) for parts in zip(NOTHING, *map(_hashes, texts)))
    return Words(_distinct(runs), np.sort(short), _distinct(across))


def sketch(text: Words) -> UInt64[np.ndarray, "runs"]:
    """The least of a text's runs, at most 65,536 of them: an even sample, to compare with other texts later."""
    return text.runs[:_SKETCH]


def _hashes(text: PackedTokens) -> Words:
    coded = [
        hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest() for word in text.words
    ]
    values = np.frombuffer(b"".join(coded), "<u8").astype(np.uint64)
    lengths = text.lengths
    # The place of a word counts: each has an odd factor of its own.
    factors = np.random.PCG64(0).random_raw(RUN) | np.uint64(1)
    mixed = [_scrambled((values * f) ^ ((values * f) >> np.uint64(29))) for f in factors]

    runs, across = [], []
    for begin in range(0, len(text.ids), _AT_ONCE):
        ids = text.ids[begin : begin + _AT_ONCE + RUN - 1]
        hashed = np.zeros(max(0, len(ids) - RUN + 1), np.uint64)
        for place in range(RUN):
            hashed += mixed[place][ids[place : place + len(hashed)]]
        at = begin + np.arange(len(hashed))
        ends = text.starts[np.searchsorted(text.starts, at, "right")]
        inside = ends - at >= RUN
        runs.append(_distinct(hashed[inside]))
        across.append(_distinct(hashed))
    few = np.flatnonzero((lengths > 0) & (lengths < RUN))
    short = np.zeros(len(few), np.uint64)
    for place in range(RUN - 1):
        there = lengths[few] > place
        short[there] += mixed[place][text.ids[text.starts[:-1][few[there]] + place]]
    return Words(np.concatenate([NOTHING.runs, *runs]), short, np.concatenate([NOTHING.across, *across]))


def _distinct(values: np.ndarray) -> np.ndarray:
    """Sorted, each once; `numpy.unique` takes some ten times as long for millions of numbers."""
    values = np.sort(values)
    return values[np.concatenate([[True], values[1:] != values[:-1]])] if len(values) else values


def _scrambled(x: np.ndarray) -> np.ndarray:
    """Spreads differences over all bits (the finalizer of MurmurHash3), so that the least are an even sample."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def require_public(option: str, source: str, text: Words, clients: Words, remedy: str) -> list[str]:
    """What the operator should know of what `text` shares with the clients': a line or two, or none.

    It depends on the clients' text, and is not for release.

    Raises:
      InputError: most of the one is in the other: of the runs of words, or, where few lines have any, nearly all lines.
    """
    said = []
    shared = len(np.intersect1d(text.runs, clients.runs, assume_unique=True))
    if shared:
        said.append(
            f"{shared:,} of {len(text.runs):,} different runs of {RUN} words in {option} {source} are in the clients' "
            f"text too, which has {len(clients.runs):,}"
        )
    if shared > _MOST_SHARED * min(len(text.runs), len(clients.runs)):
        raise _refused(said[0], remedy)
    cut = len(np.intersect1d(text.across, clients.across, assume_unique=True))
    if cut > _MOST_SHARED * min(len(text.across), len(clients.across)):
        raise _refused(
            f"{cut:,} of {len(text.across):,} different runs of {RUN} words in {option} {source}, across lines, are in "
            f"the clients' text too, which has {len(clients.across):,}",
            remedy,
        )
    short = [len(each.runs) < len(each.short) for each in (text, clients)]
    if not any(short):
        return said
    alike = _in_common(text.short, clients.short)
    if all(short) and alike > _NEARLY_ALL * max(len(text.short), len(clients.short)):
        raise _refused(
            f"{alike:,} of the {len(text.short):,} lines of fewer than {RUN} words in {option} {source} are the "
            f"clients', who have {len(clients.short):,}",
            remedy,
        )
    whose = " and ".join(name for name, few in zip((f"{option} {source}", "the clients"), short) if few)
    return [
        *said,
        f"most lines of {whose} have fewer than {RUN} words: whether some are the same cannot be told",
    ]


def require_public_model(
    source: str, known: UInt64[np.ndarray, "runs"] | None, clients: Words, remedy: str
) -> list[str]:
    """The same of the text that a public model was made of, of which its file holds the `sketch`."""
    if known is None or not len(known):
        why = (
            "does not say of which text it was made"
            if known is None
            else f"is of lines of fewer than {RUN} words"
        )
        return [f"{source} {why}: whether it is the clients' cannot be told"]
    whole = len(known) < _SKETCH
    own = clients.runs if whole else clients.runs[clients.runs <= known[-1]]
    shared = len(np.intersect1d(known, own, assume_unique=True))
    if not shared:
        return []
    said = (
        f"{shared:,} of {len(known):,} runs of {RUN} words of the text that {source} was made of are in the clients' "
        f"text too, which has {len(own):,}{'' if whole else ' of the kind'}"
    )
    if shared > _MOST_SHARED * min(len(known), len(own)):
        raise _refused(said, remedy)
    return [said]


def _in_common(one: np.ndarray, two: np.ndarray) -> int:
    """How many lines two sets have in common, equal ones as often as both have them."""
    (a, times_a), (b, times_b) = np.unique(one, return_counts=True), np.unique(two, return_counts=True)
    _, at_a, at_b = np.intersect1d(a, b, assume_unique=True, return_indices=True)
    return int(np.minimum(times_a[at_a], times_b[at_b]).sum())


def _refused(said: str, remedy: str) -> InputError:
    return InputError(
        f"{said}: it is the clients' own data under another name; public text is text whose use costs nobody privacy: "
        f"give other text, {remedy}"
    )
