"""Changing single keys of a job file and leaving all else as it was written: comments, order, spacing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import InlineTable, Table

from spool.core.errors import InvalidJob, InvalidValue, Problem, cannot

_ADDED_TO = frozenset({"env", "resources", "retry", "notify"})


def edited(data: bytes, changes: Mapping[str, object], unset: Iterable[str] = (), *, name: str) -> bytes:
    """Return the job file *data* with the keys of *changes* set and those of *unset* (dotted) taken out.

    `env`, `resources`, `retry` and `notify` in *changes* are laid over what is there. Raises InvalidJob if *data*
    cannot be read, InvalidValue for a key of *unset* that it has not. What comes out is not judged.
    """
    text = data if data.endswith(b"\n") else data + b"\n"
    try:
        document = tomlkit.parse(text.decode())
    except (TOMLKitError, UnicodeDecodeError, ValueError) as error:
        raise InvalidJob(f"job {name}", [Problem(None, None, f"not valid TOML: {error}")]) from None
    for key, value in changes.items():
        if isinstance(value, dict) and key in _ADDED_TO:
            inner = _table(document, key)
            for name_, item in value.items():
                inner[name_] = item
        else:
            document[key] = value
    for key in unset:
        _unset(document, key, name)
    return tomlkit.dumps(document).encode()


def _table(document: tomlkit.TOMLDocument, key: str) -> Any:
    found = document.get(key)
    if not isinstance(found, (Table, InlineTable)):
        document[key] = tomlkit.table()
    return document[key]


def _unset(document: tomlkit.TOMLDocument, key: str, name: str) -> None:
    *tables, last = key.split(".")
    inner: Any = document
    for part in tables:
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or last not in inner:
        raise InvalidValue(cannot("take", f'"{key}" out of job {name}', "it is not set"))
    del inner[last]  # type: ignore[attr-defined]
