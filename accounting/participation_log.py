"""Who took part when: `participation.jsonl`, written before each release and never shortened."""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from accounting import _checks, _json

PARTICIPATION_FILE = "participation.jsonl"


class Participation(NamedTuple):
    """Who took part when; one entry of `devices` and `rounds` (int64) a participation.

    names: device ids, indexed by the numbers in `devices`.
    torn: whether an unfinished last line was left out.
    least_noise: the smallest noise_multiplier that a line states, or None.
    num_failed: timers started without a message in the sum.
    """

    num_rounds: int
    devices: np.ndarray
    rounds: np.ndarray
    names: list[Any]
    torn: bool
    least_noise: float | None
    num_failed: int


class Observed(NamedTuple):
    """Realised participation: least separation (None if no device came twice), counts, their histogram.

    histogram[c] is the number of devices that took part c times (c >= 1).
    """

    num_rounds: int
    num_devices: int
    min_separation: int | None
    max_participations: int
    histogram: dict[int, int]


class ParticipationLog:
    """Appends rounds to `participation.jsonl`, readable by its owner only; each line is on disk when `append` returns.

    A round that is there stays: a resumed run appends it again without effect if it is the same, and is refused
    (ValueError) if it is not, or if rounds before it are missing. Opening drops a torn last line and nothing else.
    """

    def __init__(self, run_dir: str | os.PathLike[str]):
        self._path = pathlib.Path(run_dir) / PARTICIPATION_FILE
        new = not self._path.exists()
        self._rounds = _Rounds()
        data = b"" if new else self._path.read_bytes()
        lines, rest = _split(data)
        for number, line in enumerate(lines, 1):
            where = f"{self._path}, line {number}"
            index, *_, row = _row(line, where)
            self._rounds.add(index, row, where)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._file = os.fdopen(descriptor, "ab")
        os.fchmod(descriptor, 0o600)
        if rest:
            self._file.truncate(len(data) - len(rest))
        elif data and not data.endswith(b"\n"):
            self._file.write(b"\n")
        self._file.flush()
        os.fsync(descriptor)
        if new:
            sync_folder(self._path.parent)

    def append(
        self,
        round: int,
        devices: Iterable[Any],
        *,
        failed: Iterable[Any] = (),
        noise_multiplier: float | None = None,
    ) -> None:
        """Records one round, before it is released; one that is there must be the same."""
        line: dict[str, Any] = {"round": int(round), "devices": list(devices)}
        if failed := list(failed):
            line["failed"] = failed
        if noise_multiplier is not None:
            line["noise_multiplier"] = float(noise_multiplier)
        written = json.dumps(line, default=plain, separators=(",", ":")).encode()
        where = os.fspath(self._path)
        index, *_, row = _row(written, where)
        if self._rounds.add(index, row, where):
            self._file.write(written + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def knows(self, round: int) -> bool:
        """Whether a round is recorded."""
        return round < len(self._rounds)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def plain(value: Any) -> Any:
    """Numpy numbers and arrays as json knows them."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def read_participation(run_dir: str | os.PathLike[str]) -> Participation:
    """Reads `participation.jsonl`; a torn last line is left out, any other fault is named with its line."""
    path = pathlib.Path(run_dir) / PARTICIPATION_FILE
    numbers: dict[Any, int] = {}
    seen: list[np.ndarray] = []
    rounds = _Rounds()
    least_noise: float | None = None
    num_failed = 0
    try:
        lines, rest = _split(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file; a run has it from its start, and without it nothing can be stated: restore it, or "
            "give another folder"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        index, devices, failed, row = _row(line, where)
        if not rounds.add(index, row, where):
            continue
        seen.append(np.array([numbers.setdefault(d, len(numbers)) for d in devices], np.int64))
        num_failed += len(failed)
        if "noise_multiplier" in row:
            noise = _checks.real(f"{where}: noise_multiplier", row["noise_multiplier"])
            least_noise = noise if least_noise is None else min(least_noise, noise)
    of_round = np.repeat(np.arange(len(seen)), [len(mine) for mine in seen])
    taking_part = np.concatenate([np.zeros(0, np.int64), *seen])
    return Participation(len(seen), taking_part, of_round, list(numbers), bool(rest), least_noise, num_failed)


def observe(participation: Participation) -> Observed:
    """Returns the realised separation and counts."""
    devices, rounds = participation.devices, participation.rounds
    if not len(devices):
        return Observed(participation.num_rounds, 0, None, 0, {})
    counts = np.bincount(devices)
    order = np.lexsort((rounds, devices))
    same = np.diff(devices[order]) == 0
    gaps = np.diff(rounds[order])[same]
    values, sizes = np.unique(counts[counts > 0], return_counts=True)
    return Observed(
        participation.num_rounds,
        int((counts > 0).sum()),
        int(gaps.min()) if len(gaps) else None,
        int(counts.max()),
        dict(zip(values.tolist(), sizes.tolist())),
    )


class _Rounds:
    """The rounds of a log, none missing and each once, however often it was written."""

    def __init__(self):
        self._known: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._known)

    def add(self, index: int, row: dict[str, Any], where: str) -> bool:
        """Whether the round is new; refuses one that differs from what was recorded, and one that comes too soon."""
        now = _summary(row)
        if index > len(self._known):
            last = f"follows round {len(self._known) - 1}" if self._known else "comes first"
            raise ValueError(f"{where}: round {index} {last}; rounds are missing")
        if index == len(self._known):
            self._known.append(now)
            return True
        if other := _differing(self._known[index], now):
            what = "other devices" if other == "devices" else f"another {other}"
            raise ValueError(f"{where}: round {index} was recorded before with {what}")
        return False


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    """A line without its round and the order of its devices; ids as 128 bits, since a run may hold millions."""
    ids = {name: _digest(row.get(name, ())) for name in ("devices", "failed")}
    return {name: value for name, value in row.items() if name != "round"} | ids


def _digest(ids: Iterable[Any]) -> bytes:
    text = "\x1f".join(sorted(map(repr, ids)))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _differing(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The first field in which two lines of one round differ, or None."""
    missing = object()
    names = (name for name in {**one, **other} if one.get(name, missing) != other.get(name, missing))
    return next(names, None)


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """A log's lines, and what a crash left of one more, whose round was not released.

    A last line that only lacks its end counts: whatever cut that off, its round may be out.
    """
    *lines, rest = data.split(b"\n")
    whole = _json.object_in(rest) is not None
    return ([*lines, rest], b"") if whole else (lines, rest)


def _row(line: bytes, where: str) -> tuple[int, list[Any], list[Any], dict[str, Any]]:
    """Reads and checks one line: its round, devices, failed ones, and the whole object."""
    with _json.refused(where, "a line of the log"):
        row = json.loads(line)
    if not isinstance(row, dict) or "round" not in row or "devices" not in row:
        raise ValueError(f'{where}: must be an object with "round" and "devices"')
    index = _checks.integer(f"{where}: round", row["round"], minimum=0)
    lists = []
    for name in ("devices", "failed"):
        ids = row.get(name, [])
        if not isinstance(ids, list) or not all(
            isinstance(i, (str, int)) and not isinstance(i, bool) for i in ids
        ):
            raise ValueError(f"{where}: {name} must be a list of ids (text or whole numbers)")
        if len(set(ids)) != len(ids):
            raise ValueError(f"{where}: {name} names a device twice in one round")
        lists.append(ids)
    if both := set(lists[0]) & set(lists[1]):
        raise ValueError(f"{where}: {next(iter(both))!r} is in both devices and failed; it can only be one")
    return index, lists[0], lists[1], row


def sync_folder(folder: pathlib.Path) -> None:
    """Puts a new file's name on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
