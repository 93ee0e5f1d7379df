"""Files that are whole or absent: write aside, flush, rename."""

import contextlib
import fcntl
import glob
import hashlib
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

from trainers.common.errors import InputError

PathLike = str | os.PathLike[str]
_LOCK, _OURS = ".lock", b"made by jaxpriv; it may go once nobody holds this file\n"


@contextlib.contextmanager
def atomic_write(path: PathLike, mode: str = "w", *, permissions: int = 0o644) -> Iterator[IO[Any]]:
    """Opens a file that replaces `path` only when the block ends without an error.

    Args:
      path: target; its folder must exist.
      mode: "w" (UTF-8 text, newlines as written) or "wb".
      permissions: of the finished file; 0o600 for secrets.
    """
    target = pathlib.Path(path)
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        descriptor, aside = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise InputError(f"{target} cannot be written ({error.strerror}); check its folder") from error
    try:
        with os.fdopen(descriptor, mode, **text) as file:
            with contextlib.suppress(OSError):  # a file system without locks: `sweep` leaves its files alone
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, permissions)
        os.replace(aside, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise


def sweep(parent: PathLike, name: str = "*") -> None:
    """Removes what killed processes left in a folder: `.NAME.*.tmp`, as made here. What is being written is locked, and
    stays.
    """
    for left in pathlib.Path(parent).glob(f".{name}.*.tmp"):
        _sweep_one(left)


def _sweep_one(left: pathlib.Path) -> None:
    with contextlib.suppress(OSError), open(left / _LOCK if left.is_dir() else left, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()


@contextlib.contextmanager
def scratch_folder(parent: PathLike, name: str) -> Iterator[pathlib.Path]:
    """Yields a folder `.NAME.*.tmp` in `parent` that only the owner can read and that is gone in the end.

    Folders that killed processes left there are removed first, those of other names once they are a minute old; one in
    use is locked, and stays.
    """
    root = pathlib.Path(parent)
    sweep(root, glob.escape(name))
    for left in root.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            ours = (left / _LOCK).read_bytes() == _OURS
            if ours and (left / _LOCK).stat().st_mtime < time.time() - 60:
                _sweep_one(left)
    try:
        folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=root))
    except OSError as error:
        raise InputError(f"{root} cannot be written ({error.strerror}); choose another folder") from error
    try:
        with open(folder / _LOCK, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(_OURS)
            file.flush()
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def new_folder(path: PathLike) -> Iterator[pathlib.Path]:
    """Yields a folder that becomes `path`, whole, when the block ends without an error; only its owner can read it.

    Raises:
      InputError: there is something at `path` already (but for an empty folder), or it cannot be made.
    """
    target = pathlib.Path(path)
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise InputError(f"{target} exists already; choose another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {target}: {error.strerror}; choose another") from error
    with scratch_folder(target.parent, target.name) as scratch:
        aside = scratch / "whole"
        aside.mkdir(mode=0o700)
        yield aside
        os.rename(aside, target)


def require_new(path: PathLike, option: str) -> None:
    """Refuses, before any work, a file to write that exists already, or cannot be written."""
    require_writable(path, option)
    if os.path.lexists(path):
        raise InputError(
            f"{option} {path} exists; choose another name, or remove it first: nothing is overwritten"
        )


def require_writable(path: PathLike, option: str) -> None:
    """Refuses, before any work, a file to write whose folder is absent or closed, or that is a folder itself."""
    target = pathlib.Path(path)
    if target.is_dir():
        raise InputError(f"{option} {target} is a folder; give a file to write")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK | os.X_OK):
        raise InputError(f"{option} {target} cannot be written: its folder does not exist or is closed")


def cache_dir(*parts: str) -> pathlib.Path:
    """The user's cache folder for this project, made if absent (`JAXPRIV_CACHE` or `~/.cache/jaxpriv`)."""
    root = os.environ.get("JAXPRIV_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "jaxpriv"
    )
    folder = pathlib.Path(root, *parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the cache folder {folder}: {error.strerror}; set JAXPRIV_CACHE to a writable folder"
        ) from error
    return folder


def digest(path: PathLike) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(*parts: bytes | str) -> str:
    """SHA-256 of several byte strings or texts, each prefixed with its length, in hex."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8") if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def existing_file(path: PathLike, what: str) -> pathlib.Path:
    """Returns `path` if it is a readable, non-empty file; else raises InputError that names it."""
    target = pathlib.Path(path)
    if not target.exists():
        raise InputError(f"{what} {target} does not exist; check the path")
    if target.is_dir():
        raise InputError(f"{what} {target} is a folder, not a file; give a file inside it")
    if not os.access(target, os.R_OK):
        raise InputError(f"{what} {target} cannot be read; check its permissions")
    if target.stat().st_size == 0:
        raise InputError(f"{what} {target} is empty (0 bytes); give a file with data")
    return target
