"""Files that are whole or absent: write aside, flush, rename."""

import contextlib
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from trainers.common.errors import InputError

PathLike = str | os.PathLike[str]


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
    descriptor, aside = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(descriptor, mode, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, permissions)
        os.replace(aside, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise


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
