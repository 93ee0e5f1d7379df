"""Reads a Hugging Face data set by name, where the `datasets` package is installed."""

import importlib.util
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from trainers.common.errors import InputError
from trainers.common.tables import Row

_PREFIX = "hf:"
# owner/name, or a name of one word; `hf:` may stand before it, and `:configuration` behind it.
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_FILE = re.compile(r"\.(parquet|pq|jsonl?|ndjson|csv|tsv|sqlite3?|db|gz|txt)$", re.IGNORECASE)


def is_name(source: str) -> bool:
    """Whether this, which is no file, reads as a data set's name rather than as a path; after `hf:` it always does."""
    if source.startswith(_PREFIX):
        return True
    if _NAME.fullmatch(source) is None or _FILE.search(source) or source[:1] in "./":
        return False
    return (
        "/" not in source or not pathlib.Path(source).parent.is_dir()
    )  # in a folder of this machine it is a path


def rows(source: str, split: str | None) -> Iterator[Row]:
    """Yields the records of a split (by the data set's own name for it; None: of all splits)."""
    for name in split_names(source) if split is None else [split]:
        data = _load(source, split=name)
        for number, record in enumerate(data, 1):
            yield Row(f"{name} row {number}", record)


def split_names(source: str) -> list[str]:
    """The data set's own names of its splits."""
    return list(_load(source))


def _load(source: str, split: str | None = None) -> Any:
    name, _, configuration = source.removeprefix(_PREFIX).partition(":")
    if importlib.util.find_spec("datasets") is None:
        raise InputError(
            f"{source} does not exist here; check the path, and give a .parquet, .jsonl or .csv file (or pip install "
            "datasets, if it is the name of a Hugging Face data set)"
        )
    import datasets  # pyright: ignore[reportMissingImports]

    try:
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # whatever it is (no network, no such name, a script that is not trusted)
        reason = (str(error).splitlines() or [""])[0][:200]
        raise InputError(
            f"Hugging Face data set {name!r} could not be read ({type(error).__name__}: {reason}); "
            "check the name and the network, or give a file"
        ) from error
