"""Turns what a caller typed into clean numbers, or says in one line what is wrong with it."""

import math
import operator
from typing import Any

ADJACENCIES = ("zero-out", "add-remove", "replace-one")


def integer(name: str, value: Any, *, minimum: int) -> int:
    """Returns a python int of at least `minimum`; floats, bools and text are refused."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if isinstance(value, bool) or number < minimum:
        raise ValueError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    return number


def real(name: str, value: Any, *, minimum: float = 0.0, above: bool = False) -> float:
    """Returns a float that is not NaN and at least (`above`: more than) `minimum`; infinity passes."""
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if math.isnan(number) or number < minimum or (above and number == minimum):
        bound = f"more than {minimum:g}" if above else f"at least {minimum:g}"
        raise ValueError(f"{name} must be {bound} and not NaN, got {value!r}")
    return number


def finite(name: str, value: Any, *, minimum: float = 0.0, above: bool = False) -> float:
    """Like `real`, and refuses infinity."""
    number = real(name, value, minimum=minimum, above=above)
    if math.isinf(number):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return number


def probability(name: str, value: Any) -> float:
    """Returns a delta in [0, 1): 0 asks for pure differential privacy, 1 or more would promise nothing."""
    number = real(name, value)
    if number >= 1:
        raise ValueError(f"{name} must be below 1 (at 1 every mechanism qualifies), got {value!r}")
    return number


def adjacency(value: Any) -> str:
    """Returns a known adjacency; there is no default on purpose."""
    if value not in ADJACENCIES:
        raise ValueError(f"adjacency must be one of {', '.join(ADJACENCIES)}, got {value!r}")
    return value


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Returns `value` if it is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value
