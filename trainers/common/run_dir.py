"""Run folders: made once, never overwritten, resumed only by the run that they belong to."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from trainers.common import files
from trainers.common.errors import InputError


def create(path: files.PathLike) -> pathlib.Path:
    """Makes a new run folder.

    Raises:
      InputError: it exists already, or cannot be made.
    """
    folder = pathlib.Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"run folder {folder} exists already; choose another --run-dir, or go on with --resume"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"run folder {folder} cannot be made: {error.strerror}; choose another --run-dir"
        ) from error
    return folder


def require(path: files.PathLike) -> pathlib.Path:
    """The folder of a run that is to be resumed or read.

    Raises:
      InputError: it is not the folder of a run.
    """
    folder = pathlib.Path(path)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not the folder of a run (no config.json); check --run-dir")
    return folder


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(saved, dict):
            raise ValueError("not an object")
        return saved
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{folder / 'config.json'} cannot be read ({error}); the run folder is damaged"
        ) from error


def require_same(saved: Mapping[str, Any], now: Mapping[str, Any], *, where: object, what: str) -> None:
    """Refuses to go on when something differs from what the run began with.

    The same noise added to other data, or with other settings, would reveal the difference.

    Raises:
      InputError: names the first field that differs, with both values.
    """
    for name in sorted(saved.keys() | now.keys()):
        if saved.get(name) != now.get(name):
            raise InputError(
                f"{where} began with other {what}: {name} was {_short(saved.get(name))}, now it is "
                f"{_short(now.get(name))}; resume with the first value, or start a new run"
            )


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
