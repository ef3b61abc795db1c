"""The names that `--json` prints."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import Struct
from msgspec.structs import replace

from filled import filled
from spool.cli.ls import FIELDS
from spool.cli.publicjson import PUBLIC, names_of, plain, row_of
from spool.core.model import State
from spool.query.listing import ListedJob
from spool.query.rows import JobRow

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


NAMES = Path(__file__).with_name("public_names.txt")


def test_programs_read_the_same_names_as_before() -> None:
    """A field that is named anew has its old name by a row; a new one is new in the list too."""
    names = {name: " ".join(word for word, _ in names_of(_classes()[name])) for name in sorted(PUBLIC)}
    today = "".join(f"{name}: {words}\n" for name, words in names.items())
    if "SPOOL_RECORD" in os.environ:
        NAMES.write_text(today)
    assert today == NAMES.read_text()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_each_name_leads_to_a_field_or_property(name: str) -> None:
    """Each path of a row leads somewhere, the structs at its end have a row too, and no name is there twice."""
    kind = _classes()[name]
    words = [word.partition("=") for word in row_of(kind)]
    for word, _, path in words:
        assert set(_structs(_type_of(kind, path or word))) <= PUBLIC.keys()
    assert len({word for word, _, _ in words}) == len(words) == len(names_of(kind))


def test_each_value_of_a_job_has_a_column() -> None:
    """Each field that `--json` prints of a job is seen in a column of `ls` too, but for those listed here."""
    row, empty = filled(JobRow), JobRow(state=State.QUEUED)
    fields = set(JobRow.__struct_fields__).intersection(name for name, _ in names_of(JobRow))
    rows = {name: replace(row, **{name: getattr(empty, name)}) for name in fields} | {"": row}
    cells = {name: [each.text(ListedJob(one, "x"), 0) for each in FIELDS.values()] for name, one in rows.items()}
    unseen = {name for name in fields if cells[name] == cells[""]}
    assert unseen == {"place", "suspended_ns", "suspended_at_ns", "array", "name"}


def test_a_field_without_a_public_name_is_not_printed() -> None:
    """A struct that the table lacks is refused, instead of printed with the names of its source."""

    class Private(Struct):
        field: int = 1

    with pytest.raises(TypeError, match="Private has no public names"):
        plain(Private())
