"""Metrics as JSON lines: one object a line, append-only, exact after a resume."""

import json
import math
import os
import pathlib
from typing import Any

from trainers.common import files
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
    """Appends records to a JSON-lines file and flushes each; `private` makes it readable by its owner only."""

    def __init__(self, path: files.PathLike, *, private: bool = False):
        mode = 0o600 if private else 0o644
        self._file = os.fdopen(
            os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode), "a", encoding="utf-8"
        )
        if private:
            os.chmod(path, mode)

    def write(self, **record: Any) -> None:
        self._file.write(json.dumps(plain(record), allow_nan=False) + "\n")
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


def read(path: files.PathLike) -> list[dict[str, Any]]:
    """All whole records; a torn last line (a killed process) is left out, a bad line elsewhere is refused."""
    lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise InputError(
                f"{path}, line {number}: not JSON ({error.msg}); the file was damaged"
            ) from error
    return records


def truncate(path: files.PathLike, *, before: int, counter: str = "round") -> None:
    """Keeps the records whose `counter` is below `before`: what a resumed run starts from."""
    if not pathlib.Path(path).exists():
        return
    kept = [r for r in read(path) if r.get(counter, -1) < before]
    with files.atomic_write(path) as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
