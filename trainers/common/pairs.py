"""A sentence and its translation: cleaning, and a division without leaks."""

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from trainers.common.readers import unit_hash

# A side with more is no sentence; the longest of legal texts have some 200 words. Where words are
# not divided by blanks, the characters tell; what a side costs in memory grows with their square.
MAX_WORDS, MAX_CHARACTERS = 250, 2500


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
    """A clean pair, or None where a side is blank or longer than MAX_WORDS words or MAX_CHARACTERS characters."""
    source, target = clean(source), clean(target)
    if not source or not target or max(source.count(" "), target.count(" ")) >= MAX_WORDS:
        return None
    if max(len(source), len(target)) > MAX_CHARACTERS:
        return None
    return Pair(source, target, sub)


def key(text: str) -> str:
    """What near-identical sentences share: letters in lower case and digits, all digits read as 0."""
    return re.sub(r"\d+", "0", "".join(c for c in text.lower() if c.isalnum()))


def side_keys(pair: Pair) -> tuple[str, str]:
    """What the two sides of a pair have in common with near-identical sentences; never empty."""
    return key(pair.source) or pair.source, key(pair.target) or pair.target


def sides_of(pairs: Iterable[Pair]) -> set[str]:
    """The keys of both sides of all pairs."""
    return {side for pair in pairs for side in side_keys(pair)}


def without(pairs: Sequence[Pair], sides: Collection[str]) -> list[Pair]:
    """The pairs with neither side in `sides`: a choice about each pair by itself."""
    return [pair for pair in pairs if not any(side in sides for side in side_keys(pair))]


def divide(
    sets: Mapping[str, Sequence[Pair]],
    *,
    shares: tuple[float, float] = (0.05, 0.1),
    most: tuple[int, int] = (200, 400),
) -> dict[str, PairSplits]:
    """Divides each set into train, validation and test so that no sentence of either side is in two of them.

    Which part a pair falls into depends on its source alone (a hash of its `key`), so that one pair more or less
    changes a train part by that pair: what a guarantee for each pair rests on. Of validation and test, pairs are then
    left out whose target is in the train part of any set (or, for validation, in a test part).

    Args:
      shares: of the sources, for validation and for test.
      most: pairs for validation and for test; the others of that part are left out, not trained on.
    """
    parts: dict[str, PairSplits] = {name: PairSplits([], [], []) for name in sets}
    for name, pairs in sets.items():
        for pair in pairs:
            position = unit_hash(side_keys(pair)[0])
            parts[name][1 if position < shares[0] else 2 if position < sum(shares) else 0].append(pair)
    seen = sides_of(p for each in parts.values() for p in each.train)
    tests = {name: without(each.test, seen)[: most[1]] for name, each in parts.items()}
    seen |= sides_of(p for test in tests.values() for p in test)
    return {
        name: PairSplits(each.train, without(each.validation, seen)[: most[0]], tests[name])
        for name, each in parts.items()
    }
