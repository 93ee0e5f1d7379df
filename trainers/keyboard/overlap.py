"""Whether text that is given as public is the clients' own, whatever its file is called: told by its lines."""

import hashlib

import numpy as np
from jaxtyping import UInt64

from trainers.common.errors import InputError
from trainers.common.packed import PackedTokens

# Shorter lines ("hi", "thank you very much") are anybody's: that two texts share them tells nothing.
LEAST_WORDS = 5
_MOST_SHARED = 0.5
_AT_ONCE = 1 << 22  # tokens; bounds the memory beside the text itself


def lines_of(*texts: PackedTokens) -> UInt64[np.ndarray, "lines"]:
    """64 bits of each different line of at least `LEAST_WORDS` words (tokens: marks count), sorted; equal lines are
    equal whichever text they are of.

    Of a million lines and a million others, two different ones are taken for equal once in 10^7 times.
    """
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *map(_hashes, texts)]))


def _hashes(text: PackedTokens) -> UInt64[np.ndarray, "lines"]:
    words = [
        hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest() for word in text.words
    ]
    values = np.frombuffer(b"".join(words), "<u8").astype(np.uint64)
    long = np.flatnonzero(text.lengths >= LEAST_WORDS)
    if not len(long):
        return np.zeros(0, np.uint64)
    # The place of a word counts: each has an odd factor of its own.
    factors = np.random.PCG64(0).random_raw(int(text.lengths.max())) | np.uint64(1)
    found = []
    per_part = max(1, _AT_ONCE // len(factors))
    for part in np.split(long, range(per_part, len(long), per_part)):
        some = text.take(part)
        places = np.arange(len(some.ids)) - np.repeat(some.starts[:-1], some.lengths)
        mixed = values[some.ids] * factors[places]
        found.append(np.add.reduceat(mixed ^ (mixed >> np.uint64(29)), some.starts[:-1]))
    return np.concatenate(found)


def require_public(
    option: str, source: str, text: PackedTokens, clients: UInt64[np.ndarray, "lines"], remedy: str
) -> list[str]:
    """What the operator should know of the lines that `text` shares with the clients' (`lines_of`): one line, or none.

    It depends on the clients' text, and is not for release.

    Raises:
      InputError: most lines of the one are lines of the other.
    """
    own = lines_of(text)
    shared = len(np.intersect1d(own, clients, assume_unique=True))
    said = (
        f"{shared:,} of {len(own):,} different lines of {option} {source} are clients' lines too, of which there are "
        f"{len(clients):,} (lines of at least {LEAST_WORDS} words)"
    )
    if shared > _MOST_SHARED * min(len(own), len(clients)):
        raise InputError(
            f"{said}: it is the clients' own data under another name; public text is text whose use costs nobody "
            f"privacy: give other text, {remedy}"
        )
    return [said] if shared else []
