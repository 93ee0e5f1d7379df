"""What a run must satisfy beyond single options, asked before anything is written or trained."""

from __future__ import annotations

import collections
import importlib.util
import itertools

import numpy as np

from trainers.common.errors import InputError
from trainers.common.pairs import PairSplits
from trainers.translation import corpora, dealing
from trainers.translation.config import Config
from trainers.translation.corpora import Corpora


def before_writing(config: Config, read: Corpora, dim: int, sides: np.ndarray | None = None) -> None:
    """Raises InputError where settings, data and a model of width `dim`, trained on `sides`, do not fit together."""
    parties = {"the server": read.server, **{f"client {name}": s for name, s in read.clients.items()}}
    for who, splits in parties.items():
        _check_party(who, splits)
    check_public(read, sides)
    most = config.client_pairs
    sizes = {name: min(most or len(s.train), len(s.train)) for name, s in read.clients.items()}
    for setting in config.settings:
        dealing.deal(setting, sizes, seed=0)
    if "fednn_fixed" in config.methods and not any(s.validation for s in parties.values()):
        raise InputError("--methods fednn_fixed needs validation pairs to tune its weight on; nobody has any")
    check_search(config.search)
    if config.search == "shadow" and config.shadow > dim:
        raise InputError(f"--shadow must be at most the model's width {dim}, got {config.shadow}")
    if config.key_encryption == "pq" and dim % config.subspaces:
        raise InputError(f"--subspaces must divide the model's width {dim}, got {config.subspaces}")
    if config.key_encryption == "pca" and config.subspaces > dim:
        raise InputError(
            f"--subspaces must be at most the model's width {dim} with pca, got {config.subspaces}"
        )


def check_public(read: Corpora, sides: np.ndarray | None = None) -> None:
    """Refuses public pairs that are mostly a client's own: what is made of them would be called public.

    So with `sides`, what a public model made elsewhere was trained on, where its folder says so. Short sentences that
    everyone has are shared by honest sets too (4 % of the embedded ones); they are reported.
    """
    for name, shared in corpora.seen(read, sides).train.items():
        total = len(corpora.distinct(read.clients[name].train))
        if sides is not None and 2 * shared > min(total, len(sides) // 2):
            raise InputError(
                f"--public-model was trained on {shared} of the {total} train pairs of client {name}: what is private "
                "cannot be given as public too; give a model of other pairs"
            )
    public = len(read.public())
    for name, shared in read.shared().items():
        total = len(corpora.distinct(read.clients[name].train))
        if 2 * shared > min(total, public):
            raise InputError(
                f"{shared} of the {total} train pairs of client {name} are among the server's {public}: what is "
                "private cannot be given as public too; give the server other pairs"
            )


def check_apart(read: Corpora) -> str:
    """Refuses one text given as two clients', whose histograms would release it twice; returns how many pairs stand at
    more than one client, in words, or nothing.
    """
    own = {name: corpora.distinct(splits.train) for name, splits in read.clients.items()}
    for (one, first), (two, second) in itertools.combinations(own.items(), 2):
        both = len(first & second)
        if 2 * both > min(len(first), len(second)):
            raise InputError(
                f"{both} of the {len(first)} train pairs of client {one} are among the {len(second)} of client {two}: "
                "each would be released twice; give a run whose clients have texts of their own, or --epsilons with "
                "nothing behind it"
            )
    times = collections.Counter(pair for pairs in own.values() for pair in pairs)
    several = sum(number > 1 for number in times.values())
    if not several:
        return ""
    return (
        f"{several} of the {len(times)} different train pairs stand at more than one client, at most at "
        f"{max(times.values())}; each occurrence has the guarantee, all of them together that of a group"
    )


def check_search(search: str) -> None:
    """Refuses a way to search whose package is absent."""
    if search == "faiss" and importlib.util.find_spec("faiss") is None:
        raise InputError("--search faiss needs FAISS: pip install faiss-cpu, or use --search exact")


def _check_party(who: str, splits: PairSplits) -> None:
    for part, pairs in (("train", splits.train), ("test", splits.test)):
        if not pairs:
            raise InputError(
                f"{who} has no {part} pair ({len(splits.train)} for training, {len(splits.validation)} for validation, "
                f"{len(splits.test)} for testing); give more pairs, or train and test files, "
                "or leave `split` out where pairs are to be divided"
            )
