"""The names that `--json` prints of values within values."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, get_type_hints

import pytest

import spool.query
from spool.cli.publicjson import PUBLIC, names_of
from spool.core import efficiency


def _class_of(name: str) -> type:
    there = pkgutil.iter_modules(spool.query.__path__, "spool.query.")
    modules = [importlib.import_module(each.name) for each in there]
    (found,) = {vars(module)[name] for module in (*modules, efficiency) if name in vars(module)}
    assert isinstance(found, type)
    return found


def _type_at(kind: Any, part: str) -> Any:
    found = getattr(kind, part)
    return get_type_hints(found.fget)["return"] if isinstance(found, property) else get_type_hints(kind)[part]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_each_name_leads_to_a_field_or_property(name: str) -> None:
    """A row names a class that exists, each of its paths leads somewhere, and no name is there twice."""
    kind = _class_of(name)
    words = [word.partition("=") for word in PUBLIC[name].split()]
    for word, _, path in words:
        at: Any = kind
        for part in (path or word).split("."):
            at = _type_at(at, part)
    assert len({word for word, _, _ in words}) == len(words) == len(names_of(kind))
