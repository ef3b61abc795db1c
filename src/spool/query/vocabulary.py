"""The names in a spool, for shell completion.

A shell waits for the answer, so this reads only some files and the end of the history, and imports little.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from spool.core.errors import SpoolError
from spool.core.layout import CONFIG, HELD, QUEUED, RUNNING, natural
from spool.store.spool import Spool

_MOST_FILES = 200
_MOST_LINES = 500


def labels(spool: Spool, key: str) -> list[str]:
    """Return the values of *key* ("user", "project", "group" or "tags") among the jobs, sorted.

    These include waiting, held and running jobs, and recently ended ones, as far as they can be read.
    """
    found: set[str] = set()
    for table in _jobs(spool, key):
        value = table.get(key)
        found.update(word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str) and word)
    quotas = _config(spool, b"quotas").get("quotas")
    if isinstance(quotas, dict):
        found.update(_names(quotas.get(f"{key}s")))
    return sorted(found, key=natural)


def resources(spool: Spool) -> list[str]:
    """Return the resources in the configuration."""
    return _names(_config(spool, b"resources").get("resources"))


def gpu_types(spool: Spool) -> list[str]:
    """Return the names of the GPUs in the dispatcher's last view."""
    from spool.query.rows import last_view

    view, _ = last_view(spool, 0)
    return sorted({gpu.name for gpu in view.machine.gpus if gpu.name}) if view is not None and view.machine else []


def _jobs(spool: Spool, key: str) -> Iterator[dict[str, object]]:
    """Yield job files and lines of the history, each as a table."""
    for place in (QUEUED, RUNNING, HELD):
        for name in spool.names(place)[:_MOST_FILES]:
            if key == "user":
                yield from _owner(spool.layout.job_file(place, name))
            else:
                yield _table(spool.job_text(place, name), key.encode())
    with suppress(OSError):
        for line in islice(spool.history(), _MOST_LINES):
            with suppress(ValueError):
                table = json.loads(line)
                if isinstance(table, dict):
                    yield table


def _owner(path: str) -> Iterator[dict[str, object]]:
    with suppress(OSError, KeyError):
        yield {"user": pwd.getpwuid(os.stat(path).st_uid).pw_name}


def _table(text: bytes | None, mentions: bytes) -> dict[str, object]:
    """Return a TOML file that contains *mentions* as a table; an empty one if it does not, or cannot be read."""
    if text is None or mentions not in text:
        return {}
    from spool.formats import toml

    try:
        return toml.read(text, "")
    except SpoolError:
        return {}


def _config(spool: Spool, mentions: bytes) -> dict[str, object]:
    with suppress(OSError):
        return _table(spool.file(CONFIG), mentions)
    return {}


def _names(table: object) -> list[str]:
    return sorted(table) if isinstance(table, dict) else []
