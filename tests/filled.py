"""Values in which each field is stated, for tests of what passes a value on: a field left out shows."""

from __future__ import annotations

from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Struct


def filled(kind: Any, **stated: Any) -> Any:
    """Return a value of that type in which nothing is empty, unknown or left at its default, but for what is stated."""
    origin, parts = get_origin(kind), [part for part in get_args(kind) if part not in (NoneType, ...)]
    if origin in (Union, UnionType):
        return filled(parts[0])
    if origin is dict:
        return {filled(parts[0]): filled(parts[1])}
    if origin is Literal:
        return parts[-1]
    if origin in (tuple, frozenset):
        return origin(map(filled, parts))
    if issubclass(kind, Struct):
        types = get_type_hints(kind)
        return kind(**{name: stated[name] if name in stated else filled(of) for name, of in types.items()})
    return list(kind)[-1] if issubclass(kind, Enum) else {int: 7_000_000, float: 7.0, bool: True}.get(kind, "x")
