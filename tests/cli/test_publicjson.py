"""The names that `--json` prints."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import Struct

from spool.cli.publicjson import PUBLIC, names_of, plain

ROOMS = ("cli", "client", "core", "doctor", "formats", "query")


@cache
def _classes() -> dict[str, type]:
    rooms = [importlib.import_module(f"spool.{room}") for room in ROOMS]
    modules = [
        importlib.import_module(each.name)
        for room in rooms
        for each in pkgutil.iter_modules(room.__path__, f"{room.__name__}.")
    ]
    return {name: found for module in modules for name, found in vars(module).items() if isinstance(found, type)}


@cache
def _hints(source: Any) -> dict[str, Any]:
    return get_type_hints(source, localns=_classes())


def _type_at(kind: Any, part: str) -> Any:
    found = getattr(kind, part)
    return _hints(found.fget)["return"] if isinstance(found, property) else _hints(kind)[part]


def _type_of(kind: type, path: str) -> Any:
    at: Any = kind
    for part in path.split("."):
        at = _type_at(at, part)
    return at


def _structs(kind: Any) -> Iterator[str]:
    if isinstance(kind, type) and issubclass(kind, Struct):
        yield kind.__name__
    for part in get_args(kind):
        yield from _structs(part)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_each_name_leads_to_a_field_or_property(name: str) -> None:
    """Each path of a row leads somewhere, the structs at its end have a row too, and no name is there twice."""
    kind = _classes()[name]
    words = [word.partition("=") for word in PUBLIC[name].split()]
    for word, _, path in words:
        assert set(_structs(_type_of(kind, path or word))) <= PUBLIC.keys()
    assert len({word for word, _, _ in words}) == len(words) == len(names_of(kind))


def test_a_field_without_a_public_name_is_not_printed() -> None:
    """A struct that the table lacks is refused, instead of printed with the names of its source."""

    class Private(Struct):
        field: int = 1

    with pytest.raises(TypeError, match="Private has no public names"):
        plain(Private())
