"""Loads the server's and the clients' pairs as a command line names them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainers.common import files, parallel_text
from trainers.common.errors import InputError
from trainers.common.pairs import Pair, PairSplits, side_keys, sides_of, without
from trainers.translation.config import Config

GENERAL = "general"
QUESTIONS = 600
"""Held-out pairs of a kind, at most, that the Meta-k network is trained on."""


class Corpora(NamedTuple):
    """Everything a run reads. Sentences of a test set are in no other set, whoever's (by `pairs.key`, either side).

    server: train pairs of the public model, and the server's validation and test pairs.
    memory, questions: public pairs with no sentence of the model's training: a store for the Meta-k network to learn
      on, and the pairs it is asked about (from the server's first source and from --held-out).
    clients: private pairs by domain. Whether a pair is in a train part depends on that pair, on the server's test set
      and on test files, never on another record of its file. notes: what was left out, for the operator.
    """

    server: PairSplits
    memory: list[Pair]
    questions: list[Pair]
    clients: Mapping[str, PairSplits]
    notes: list[str]

    def shared(self) -> dict[str, int]:
        """How many of each client's distinct train pairs are among what is called public (by `pairs.key`)."""
        public = self.public()
        return {name: len(distinct(splits.train) & public) for name, splits in self.clients.items()}

    def public(self) -> set[tuple[str, str]]:
        """All different pairs that are called public."""
        return distinct(*self.server, self.memory, self.questions)


def distinct(*parts: Sequence[Pair]) -> set[tuple[str, str]]:
    """The different pairs, near-identical ones taken for one."""
    return {side_keys(p) for part in parts for p in part}


def side_digests(pairs: Sequence[Pair]) -> np.ndarray:
    """64 bits of each different side of the pairs, by letters and digits (`pairs.key`), sorted."""
    return np.unique(np.array([hashed(side) for side in sides_of(pairs)], np.uint64))


class Seen(NamedTuple):
    """What a public model made elsewhere was trained on, of this run's pairs.

    known: whether its folder says so. train: how many of each client's different train pairs, both sides. test: how
    many test pairs of anyone, either side.
    """

    known: bool
    train: Mapping[str, int]
    test: int


def seen(read: Corpora, sides: np.ndarray | None) -> Seen:
    """Compares a run's pairs with the sides that a model was trained on (`side_digests`)."""
    if sides is None:
        return Seen(False, {}, 0)

    def among(pairs: Sequence[Pair]) -> np.ndarray:
        found = [[hashed(side) for side in pair] for pair in sorted(distinct(pairs))]
        return np.isin(np.array(found, np.uint64).reshape(-1, 2), sides)

    train = {name: int(among(splits.train).all(1).sum()) for name, splits in read.clients.items()}
    tests = [splits.test for splits in (read.server, *read.clients.values())]
    return Seen(True, train, sum(int(among(pairs).any(1).sum()) for pairs in tests))


def parse_source(text: str) -> tuple[str, tuple[str, ...] | None]:
    """`FILE` or `FILE:sub=a,b` as the file and the parts to keep."""
    path, found, subs = text.rpartition(":sub=")
    if not found:
        return text, None
    parts = tuple(p for p in subs.split(",") if p)
    if not parts:
        raise InputError(f"{text}: no part named after :sub=")
    return path, parts


def parse_client(text: str) -> tuple[str, str]:
    """`NAME=FILE...` as its two halves."""
    name, found, rest = text.partition("=")
    if not found or not rest or not name or not name.replace("-", "").replace("_", "").isalnum():
        raise InputError(f"--client needs NAME=FILE, got {text!r}; a name has letters, digits, - and _ only")
    if name == GENERAL:
        raise InputError(f"--client {text!r}: the name {GENERAL!r} is the server's")
    return name, rest


def hashed(text: str) -> int:
    """64 bits that depend on the text alone: how pairs are set aside."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


def _read(sources: Sequence[str], config: Config, notes: list[str]) -> PairSplits:
    joined = PairSplits([], [], [])
    for text in sources:
        path, subs = parse_source(text)
        splits, said = parallel_text.read_pair_splits(
            path,
            source_field=config.source_field,
            target_field=config.target_field,
            sub=subs,
            skip_bad=config.skip_bad,
        )
        notes += [f"{text}: {line}" for line in said]
        for mine, new in zip(joined, splits):
            mine.extend(new)
    return joined


def load(config: Config, *, filtered: bool = True) -> Corpora:
    """Reads all pairs and sets the held-out ones aside.

    Pairs leave train sets if a test set holds a sentence of theirs. A client's test pairs that are in one file with its
    train pairs (by their `split`, or taken from these) are left out themselves where they meet any train set, because a
    client's train part must not depend on other records of that file.

    Args:
      filtered: False reads as runs did that filtered the server's train pairs alone, to continue one of them.

    Raises:
      InputError: a source cannot be read; clients are missing, or named twice.
    """
    notes: list[str] = []
    taken: set[str] = set()  # clients whose test pairs are in their train file
    if config.server == ("catalogs",):
        sets = parallel_text.load_default()
        server = sets[GENERAL]
        server_size = len(server.train)
        clients = {name: splits for name, splits in sets.items() if name != GENERAL}
        if config.client:
            clients = {}
    else:
        server, clients = _read(config.server, config, notes), {}
        server_size = len(_read(config.server[:1], config, []).train)
    for text in config.client:
        name, source = parse_client(text)
        if name in clients:
            raise InputError(f"--client {name} is given twice; give each client its own name")
        clients[name] = _read([source], config, notes)
        if "test" not in parallel_text.parts_apart(
            parse_source(source)[0], source_field=config.source_field, target_field=config.target_field
        ):
            taken.add(name)
    if not clients:
        raise InputError("no client: give --client NAME=FILE at least once")

    fixed = [server, *(s for name, s in clients.items() if name not in taken or not filtered)]
    tests = sides_of(p for splits in fixed for p in splits.test)

    def outside(pairs: Sequence[Pair], sides: Collection[str], what: str) -> list[Pair]:
        kept = without(pairs, sides)
        if len(kept) < len(pairs):
            notes.append(f"{len(pairs) - len(kept)} {what}: left out")
        return kept

    clean = outside(server.train, tests, "server pairs have a side in a test set")
    # The model has never seen what the network is asked, or it would learn to trust the model too much.
    every = max(10, -(-server_size // QUESTIONS))
    aside = {p for p in clean if hashed(p.source) % every == 0} & set(server.train[:server_size])
    kept = [p for p in clean if p not in aside]
    own = [p for p in clean if p in aside]
    extra = _read(config.held_out, config, notes).train if config.held_out else []
    if filtered:
        model = sides_of(kept)
        own = outside(
            own, model, "pairs set aside for the Meta-k network have a side in the model's training"
        )
        extra = outside(
            extra, tests | model, "held-out pairs have a side in a test set or the model's training"
        )
    if config.held_out:
        memory = [p for p in extra if hashed(p.target) % 5]
        questions = [p for p in extra if hashed(p.target) % 5 == 0][:QUESTIONS] + own
    else:
        memory = [p for p in own if hashed(p.target) % 2]
        questions = [p for p in own if hashed(p.target) % 2 == 0]
    if not memory or len(questions) < 2:
        raise InputError("too few public pairs to train the Meta-k network on; give more with --held-out")
    server = server._replace(train=kept)
    if filtered:
        for name, splits in clients.items():
            train = outside(splits.train, tests, f"train pairs of {name} have a side in a test set")
            clients[name] = splits._replace(train=train)
        seen = sides_of(p for part in (kept, memory, questions) for p in part)
        seen |= sides_of(p for splits in clients.values() for p in splits.train)
        for name in taken:
            test = outside(clients[name].test, seen, f"test pairs of {name} have a side in a train set")
            clients[name] = clients[name]._replace(test=test)
        tests |= sides_of(p for splits in clients.values() for p in splits.test)
        for name, splits in [(GENERAL, server), *clients.items()]:
            rest = outside(splits.validation, tests, f"validation pairs of {name} have a side in a test set")
            if name == GENERAL:
                server = splits._replace(validation=rest)
            else:
                clients[name] = splits._replace(validation=rest)
    return Corpora(server, memory, questions, clients, notes)


def digest(corpora: Corpora) -> str:
    """SHA-256 over all pairs by use: what a resumed run must find unchanged."""
    parts = [*corpora.server, corpora.memory, corpora.questions]
    for name, splits in corpora.clients.items():
        parts += [[Pair(name, "")], *splits]
    return files.digest_of(*("\x1e".join("\x1f".join(p) for p in part) for part in parts))
