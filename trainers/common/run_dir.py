"""Run folders: made once, never overwritten, resumed only by the run that they belong to."""

import contextlib
import fcntl
import json
import os
import pathlib
import sys
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from trainers.common import files, kinds, manifest
from trainers.common.errors import InputError

_SHOWN = 5  # differing fields named in a refusal


def require_new(path: files.PathLike) -> None:
    """Refuses what is there already, but for an empty folder.

    Raises:
      InputError: with the remedy.
    """
    folder = pathlib.Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"run folder {folder} exists already; choose another --run-dir, or go on with --resume"
        )


@contextlib.contextmanager
def held(path: files.PathLike) -> Iterator[None]:
    """Keeps other processes' runs out of a folder while one is at work there; makes it where it is not.

    Two runs at once would each release rounds under a noise key of its own, and the log of both would count them once.
    A folder that is empty in the end, after a refusal, is gone again. File systems without locks are not held.

    Raises:
      InputError: another run is at work there, or the folder cannot be made.
    """
    folder = pathlib.Path(path)
    if folder.exists() and not folder.is_dir():  # refused by what reads it
        yield
        return
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        descriptor = _locked(folder)
    except OSError as error:
        raise InputError(
            f"run folder {folder} cannot be made: {error.strerror}; choose another --run-dir"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # something is in it
            for each in made:
                each.rmdir()
        os.close(descriptor)


def _locked(folder: pathlib.Path) -> int:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # removed in between
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise InputError(
                f"another run is at work in {folder}; wait for its end, or choose another --run-dir"
            ) from error
        except OSError:
            return descriptor
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(folder), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # what was locked was removed in between


def require(path: files.PathLike, command: str = "") -> pathlib.Path:
    """The folder of a run of `command` (or of its area, or any) that is to be resumed or read.

    Raises:
      InputError: it is not the folder of such a run.
    """
    folder = pathlib.Path(path)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not the folder of a run (no config.json); check --run-dir")
    require_command(folder, command)
    return folder


def resumes(path: files.PathLike, asked: bool) -> bool:
    """Whether a run is to go on, as `--resume` asked; where no folder is, or an empty one, one starts, and says so."""
    folder = pathlib.Path(path)
    if asked and (not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))):
        print(f"jaxpriv: nothing was written to {folder} before; starting anew", file=sys.stderr)
        return False
    return asked


def never_began(path: files.PathLike, command: str) -> bool:
    """Whether a run of `command` was killed here before its settings were written: nothing else is in the folder.

    Raises:
      InputError: another command's run was.
    """
    folder = pathlib.Path(path)
    names = [p.name for p in folder.iterdir()]
    left = [n for n in names if n.startswith((".manifest.json.", ".config.json.")) and n.endswith(".tmp")]
    if not names or set(names) - {"manifest.json", *left}:
        return False
    require_command(folder, command)
    return True


def require_command(folder: pathlib.Path, command: str) -> None:
    """Refuses a folder that another command wrote, as its manifest says; one without a manifest passes.

    Args:
      command: such as "documents evaluate", or an area such as "keyboard".
    """
    if not (folder / "manifest.json").is_file():
        return
    wrote = str(read_manifest(folder).get("command", "")).removeprefix("jaxpriv ")
    if f"{wrote} ".startswith(f"{command} ") or not command:
        return
    raise InputError(f"{folder} was written by `jaxpriv {wrote}`; give a folder of `jaxpriv {command}`")


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """What the run was asked for."""
    return _read(folder / "config.json")


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """What ran."""
    return _read(folder / "manifest.json")


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(saved, dict):
            raise ValueError("not an object")
        return saved
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}); the run folder is damaged") from error


def settings(config: Any, free: Collection[str]) -> dict[str, Any]:
    """What a resumed run must agree with, as JSON values: all settings but the `free` ones, which change no number."""
    return {k: v for k, v in manifest.config_dict(config).items() if k not in free}


def require_same_settings(
    saved: Mapping[str, Any],
    now: Any,
    *,
    free: Collection[str],
    presets: Mapping[str, Any],
    where: object,
) -> None:
    """Refuses to go on with other settings than the saved ones; says so where another preset makes the difference.

    Raises:
      InputError: names the fields that differ.
    """
    require_same(
        {k: v for k, v in saved.items() if k not in free},
        settings(now, free),
        where=where,
        what="settings",
        presets={name: settings(preset, free) for name, preset in presets.items()},
    )


def require_same(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    where: object,
    what: str,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Refuses to go on when something differs from what the run began with.

    The same noise added to other data, or with other settings, would reveal the difference.

    Args:
      presets: name -> values, to recognize a run that is resumed without its `--preset`.

    Raises:
      InputError: names the fields that differ (the first few, and how many more), with both values.
    """
    differing = [name for name in sorted(saved.keys() | now.keys()) if saved.get(name) != now.get(name)]
    if not differing:
        return
    shown = [
        f"{name} was {_short(saved.get(name))}, now it is {_short(now.get(name))}"
        for name in differing[:_SHOWN]
    ]
    if len(differing) > _SHOWN:
        shown.append(f"and {len(differing) - _SHOWN} more")
    raise InputError(
        f"{where} began with other {what}: {'; '.join(shown)}; "
        f"{_preset_changed(saved, now, differing, presets or {})}resume with the first "
        f"{'value' if len(differing) == 1 else 'values'}, or start a new run"
    )


def _preset_changed(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    differing: Sequence[str],
    presets: Mapping[str, Mapping[str, Any]],
) -> str:
    """Which two presets explain most of the difference; empty where none explains half of it, or two fields."""
    best, names = 0, ("", "")
    for was, first in presets.items():
        for is_now, second in presets.items():
            explained = sum(
                first[name] != second[name]
                and (saved.get(name), now.get(name)) == (first[name], second[name])
                for name in differing
                if name in first and name in second
            )
            if explained > best:
                best, names = explained, (was, is_now)
    if best < max(2, len(differing) / 2):
        return ""
    return f"{best} of these {len(differing)} differ as --preset {names[0]} does from --preset {names[1]}; "


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def require_types(saved: Mapping[str, Any], kind: type) -> None:
    """Refuses values that are not of the types that the dataclass `kind` declares; names it lacks pass.

    Raises:
      TypeError: names the first such field, with its value.
    """
    declared = typing.get_type_hints(kind)
    for name, value in saved.items():
        if name in declared and not kinds.is_a(value, declared[name]):
            raise TypeError(f"{name} is {_short(value)}")
