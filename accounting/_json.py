"""JSON from files that may be damaged: refused in one line, or taken as absent."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def refused(where: str, kind: str) -> Iterator[None]:
    """Turns what parsing raises inside into one line: `where` is not JSON, or not `kind`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{where}: not {kind} (nested too deeply)") from None


def text_of(text: str) -> Any:
    """What JSON holds whose every string can be shown: half of a surrogate pair is no text (ValueError)."""
    found = json.loads(text)
    json.dumps(found, ensure_ascii=False).encode()
    return found


def object_in(text: bytes) -> dict[str, Any] | None:
    """The JSON object that `text` is; None if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_object(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file, or none that can be read."""
    try:
        return object_in(pathlib.Path(path).read_bytes())
    except OSError:
        return None
