"""Progress bars on standard error, quiet where nobody looks."""

import sys
from collections.abc import Iterable, Sized
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")


def bar(
    items: Iterable[T] | None = None, *, total: int | None = None, initial: int = 0, what: str, unit: str
) -> tqdm:
    """A progress bar over `items`, or one to be moved by hand with `.update()`.

    On a terminal it redraws often; in a log file it prints a line every 20 seconds at most. Where nothing is left to do
    it shows nothing.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    return tqdm(
        items,
        total=total,
        disable=total is not None and total <= initial,
        initial=initial,
        desc=what,
        unit=unit,
        file=sys.stderr,
        mininterval=0.2 if sys.stderr.isatty() else 20.0,
        dynamic_ncols=True,
        smoothing=0.1,
    )
