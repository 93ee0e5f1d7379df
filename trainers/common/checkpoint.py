"""Checkpoints of a whole training state: private, atomic, verified before they are trusted.

A checkpoint is a folder `<folder>/<step>`: the arrays (written by orbax), `facts.json` (what a resumed run
must agree with) and `digests.json` (size and SHA-256 of every other file). It is written aside and renamed,
so a killed process leaves either the whole of it or a hidden temporary folder that the next save removes. A
checkpoint with a missing, shortened or changed file is never used: the newest whole one before it is.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from accounting.participation_log import sync_folder
from trainers.common import files, metrics
from trainers.common.errors import InputError
from trainers.common.host_arrays import from_host, is_key, to_host

T = TypeVar("T")
ARRAYS, FACTS, DIGESTS = "arrays", "facts.json", "digests.json"
_ASIDE = ".aside-"  # where a checkpoint is written before it has its name
_ONE_AT_A_TIME = threading.Lock()  # orbax fails where two threads save at once: runs side by side do


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _file_name(leaf_name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "." for c in leaf_name)


def _digests(folder: pathlib.Path) -> dict[str, list[Any]]:
    found = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / DIGESTS)
    return {p.relative_to(folder).as_posix(): [p.stat().st_size, files.digest(p)] for p in found}


def steps(folder: files.PathLike) -> list[int]:
    """Steps that have a checkpoint folder, whole or not, in rising order."""
    root = pathlib.Path(folder)
    if not root.is_dir():
        return []
    return sorted(int(p.name) for p in root.iterdir() if p.is_dir() and p.name.isdecimal())


def is_whole(folder: files.PathLike, step: int) -> bool:
    """True when every file of the checkpoint is there with the size and the SHA-256 it was written with."""
    place = pathlib.Path(folder, str(step))
    try:
        recorded = json.loads((place / DIGESTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return recorded == _digests(place)


@contextlib.contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Lets Ctrl-C wait until the block is done: its threads would otherwise be left behind with half of a file."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where no signal is ever delivered
        return
    waiting: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if waiting:
            signal.raise_signal(signal.SIGINT)


@_interrupted_afterwards()
def save(folder: files.PathLike, step: int, tree: Any, *, facts: dict[str, Any], keep: int = 2) -> None:
    """Writes `tree` (arrays and typed keys) and `facts` as the checkpoint of `step`; keeps the newest `keep`.

    An older checkpoint of the same step, whole or damaged, is replaced. The folder is readable by its owner
    only, because the state holds the secret noise key. Several processes call it together, with the same values and
    a folder that all of them see; the first one writes. Ctrl-C is obeyed when it is done.
    """
    root = pathlib.Path(folder).resolve()
    aside, place = root / f"{_ASIDE}{step}", root / str(step)
    first = jax.process_index() == 0
    if first:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(root, 0o700)
        for left_over in root.glob(f"{_ASIDE}*"):
            shutil.rmtree(left_over, ignore_errors=True)
        aside.mkdir(mode=0o700)
    arrays = {_file_name(name): to_host(leaf) for name, leaf in _named_leaves(tree)}
    with _ONE_AT_A_TIME:
        ocp.save(str(aside / ARRAYS), arrays)
    if not first:
        return
    with files.atomic_write(aside / FACTS) as file:
        json.dump(metrics.plain(facts), file, indent=1)
    recorded = _digests(aside)
    with files.atomic_write(aside / DIGESTS) as file:
        json.dump(recorded, file, indent=1)
    sync_folder(aside)
    if place.exists():
        replaced = root / f"{_ASIDE}replaced-{step}"
        os.rename(place, replaced)
        os.rename(aside, place)
        shutil.rmtree(replaced)
    else:
        os.rename(aside, place)
    sync_folder(root)
    for old in [s for s in steps(root) if s < step][: -(keep - 1) or None]:
        shutil.rmtree(root / str(old))


def read_facts(folder: files.PathLike, step: int) -> dict[str, Any]:
    return json.loads(pathlib.Path(folder, str(step), FACTS).read_text(encoding="utf-8"))


def latest(folder: files.PathLike) -> int | None:
    """The newest whole checkpoint's step; a warning names every newer one that is damaged or was not finished."""
    aside = [p.name.removeprefix(_ASIDE) for p in pathlib.Path(folder).glob(f"{_ASIDE}*")]
    unfinished = {int(name) for name in aside if name.isdecimal()}
    for step in sorted(unfinished.union(steps(folder)), reverse=True):
        if is_whole(folder, step):
            return step
        how = "was not finished" if step in unfinished else "is incomplete or damaged"
        warnings.warn(f"checkpoint {step} in {folder} {how}; it is not used", stacklevel=2)
    return None


@_interrupted_afterwards()
def load(folder: files.PathLike, step: int, like: T, *, under: str = "") -> T:
    """The state saved at `step`, in the structure of `like` (whose shapes and dtypes it must have).

    Several processes call it together, as `save`.

    Args:
      under: path of the part wanted, as `.round.params`; empty for the whole.

    Raises:
      InputError: the checkpoint is damaged, or belongs to a state of another shape.
    """
    place = pathlib.Path(folder, str(step)).resolve()
    if not is_whole(folder, step):
        raise InputError(f"checkpoint {place} is incomplete or damaged; remove it to use an older one")
    with _ONE_AT_A_TIME:
        arrays = ocp.load(str(place / ARRAYS))
    expected = {_file_name(under + name): leaf for name, leaf in _named_leaves(like)}
    if {name for name in arrays if name.startswith(_file_name(under))} != set(expected):
        raise InputError(
            f"checkpoint {place} holds another kind of state (model, optimizer or mechanism changed)"
        )
    leaves = []
    for name, leaf in expected.items():
        value = np.asarray(arrays[name])
        template = jax.random.key_data(leaf) if is_key(leaf) else leaf
        shape, dtype = np.shape(template), np.asarray(template).dtype
        if value.shape != shape or value.dtype != dtype:
            raise InputError(
                f"checkpoint {place}: {name} is {value.dtype}{list(value.shape)}, "
                f"this run needs {dtype}{list(shape)}"
            )
        leaves.append(from_host(value, leaf))
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), leaves)
