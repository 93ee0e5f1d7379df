"""A sentence and its translation: cleaning, and a division without leaks."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainers.common.readers import unit_hash

MAX_WORDS = 250  # a side with more is no sentence; the longest of legal texts have some 200


class Pair(NamedTuple):
    """A sentence, its translation, and the part of the set it belongs to ("" where there are none)."""

    source: str
    target: str
    sub: str = ""


class PairSplits(NamedTuple):
    """Pairs by use."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]


def clean(text: str) -> str:
    """NFC, single blanks (of whatever kind: line ends, U+2028, no-break), no NUL, no byte order mark inside."""
    text = unicodedata.normalize("NFC", text.replace("\0", "").replace("\ufeff", ""))
    return " ".join(text.split())


def clean_pair(source: str, target: str, sub: str = "") -> Pair | None:
    """A clean pair, or None where a side is blank or longer than MAX_WORDS words."""
    source, target = clean(source), clean(target)
    if not source or not target or max(source.count(" "), target.count(" ")) >= MAX_WORDS:
        return None
    return Pair(source, target, sub)


def key(text: str) -> str:
    """What near-identical sentences share: letters in lower case and digits, all digits read as 0."""
    return re.sub(r"\d+", "0", "".join(c for c in text.lower() if c.isalnum()))


def divide(
    sets: Mapping[str, Sequence[Pair]],
    *,
    shares: tuple[float, float] = (0.05, 0.1),
    most: tuple[int, int] = (200, 400),
) -> dict[str, PairSplits]:
    """Divides each set into train, validation and test so that no sentence of either side is in two of them.

    Pairs that share a source or a target (by `key`), within a set or across sets, fall together, by a
    hash of their first source. So no train pair of any set has a sentence of any test part.

    Args:
      shares: of the pairs, for validation and for test.
      most: pairs for validation and for test; the others of that part are left out, not trained on.
    """
    flat = [(name, pair) for name, pairs in sets.items() for pair in pairs]
    root = _components([(key(p.source), key(p.target)) for _, p in flat])
    part: dict[int, int] = {}
    for r, (_, pair) in zip(root, flat):
        if r not in part:
            position = unit_hash(key(pair.source) or pair.source)
            part[r] = 1 if position < shares[0] else 2 if position < sum(shares) else 0
    divided = {name: PairSplits([], [], []) for name in sets}
    for r, (name, pair) in zip(root, flat):
        divided[name][part[r]].append(pair)
    return {
        name: PairSplits(parts.train, parts.validation[: most[0]], parts.test[: most[1]])
        for name, parts in divided.items()
    }


def _components(keys: Sequence[tuple[str, str]]) -> np.ndarray:
    """For each pair, the first pair that it is linked to through equal sources or equal targets."""
    parent = list(range(len(keys)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    seen: dict[tuple[int, str], int] = {}
    for i, sides in enumerate(keys):
        for side in enumerate(sides):
            a, b = sorted((find(i), find(seen.setdefault(side, i))))
            parent[b] = a
    return np.array([find(i) for i in range(len(keys))], np.int64)
