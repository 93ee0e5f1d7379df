"""Values that come from files, held against the types that they should have."""

import types
import typing
from typing import Any


def is_a(value: Any, declared: Any) -> bool:
    """Whether a value is of a declared type: a class, a literal, a union, a tuple of one type, or a dict by name."""
    origin, inside = typing.get_origin(declared), typing.get_args(declared)
    if origin is typing.Literal:
        return value in inside
    if origin in (types.UnionType, typing.Union):
        return any(is_a(value, each) for each in inside)
    if origin is tuple:
        return isinstance(value, tuple) and all(is_a(each, inside[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(is_a(each, inside[1]) for each in value.values())
    if declared is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, declared) and (declared is bool or not isinstance(value, bool))
