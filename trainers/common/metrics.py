"""Metrics as JSON lines: one object a line, append-only, exact after a resume."""

import collections
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from trainers.common import files, kinds
from trainers.common.errors import InputError


def plain(value: Any) -> Any:
    """Turns arrays and numpy scalars into JSON values; a non-finite float becomes None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


class Writer:
    """Appends records to a JSON-lines file and flushes each; `private` makes it readable by its owner only.

    What a killed process has left of a last line, if it is no record, is cut off first. What it wrote stays, and a run
    that is resumed writes it again without effect: the file is cut only where, and when, a repeated line differs.

    Args:
      resume_at: where a resumed run goes on: records from there on, by their `counter`, will be written again.
    """

    def __init__(
        self,
        path: files.PathLike,
        *,
        private: bool = False,
        resume_at: int | None = None,
        counter: str = "round",
    ):
        mode = 0o600 if private else 0o644
        _mend_end(pathlib.Path(path))
        self._end, self._repeats = 0, collections.deque[bytes]()
        if resume_at is not None and pathlib.Path(path).exists():
            self._end, self._repeats = _from(path, resume_at, counter)
        self._file = os.fdopen(
            os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode), "a", encoding="utf-8"
        )
        if private:
            os.chmod(path, mode)

    def write(self, **record: Any) -> None:
        line = json.dumps(plain(record), allow_nan=False) + "\n"
        if self._repeats:
            if self._repeats[0] == line.encode():
                self._end += len(self._repeats.popleft())
                return
            self._repeats.clear()
            self._file.truncate(self._end)
        self._file.write(line)
        self._file.flush()

    def sync(self) -> None:
        """Forces what was written onto the disk: called before a checkpoint that relies on it."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: files.PathLike, fields: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """All whole records; a torn last line (a killed process) is left out, a bad line elsewhere is refused.

    Args:
      fields: the types of fields that every record must have (`kinds.is_a`).
    """
    lines = _text(path).split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise InputError(f"{path}, line {number}: not JSON ({error}); the file was damaged") from error
        if not isinstance(record, dict):
            if number == len(lines):  # the beginning of nothing that a Writer writes, but harmless at the end
                break
            raise InputError(f"{path}, line {number}: no record (an object in braces); the file was damaged")
        for name, kind in (fields or {}).items():
            if not kinds.is_a(record.get(name), kind):
                raise InputError(
                    f"{path}, line {number}: no record of such a run ({name} is missing, or of another kind); the file "
                    "was damaged"
                )
        records.append(record)
    return records


def _text(path: files.PathLike) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); the file was damaged") from error


def _mend_end(path: pathlib.Path) -> None:
    """Ends the last line, if it is a whole record without its line end; else cuts it off."""
    if not path.is_file():
        return
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        tail, start = b"", end
        while start and b"\n" not in tail:
            size = min(65_536, start)
            start -= size
            file.seek(start)
            tail = file.read(size) + tail
        last = tail.rpartition(b"\n")[2]
        if not last:
            return
        try:
            whole = isinstance(json.loads(last), dict)
        except (ValueError, RecursionError):
            whole = False
        if whole:
            file.seek(end)
            file.write(b"\n")
        else:
            file.truncate(end - len(last))


def _from(path: files.PathLike, first: int, counter: str) -> tuple[int, collections.deque[bytes]]:
    """Where the first record from `first` on begins, in bytes, and the lines from there on."""
    read(path)  # refuses a damaged file, before anything is written
    lines = [line + b"\n" for line in pathlib.Path(path).read_bytes().split(b"\n")[:-1]]
    later = (i for i, line in enumerate(lines) if line.strip() and json.loads(line).get(counter, -1) >= first)
    kept = next(later, len(lines))
    return sum(map(len, lines[:kept])), collections.deque(lines[kept:])
