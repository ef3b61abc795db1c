"""A list of jobs as a table: of HTML for notebooks, of pandas for programs.

The rows are those of `query.jobs`, whose lists show themselves by this module; so it cannot import their class.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from msgspec.structs import asdict

from spool.core.errors import SpoolError, cannot
from spool.core.units import show_duration, show_size

_MOST = 200  # rows that a notebook shows
_HEADS = ("name", "state", "parameters", "CPUs", "memory", "GPUs", "time", "reason")


def html(rows: Sequence[Any], now_ns: int) -> str:
    """Return a table in HTML, with everything escaped, of at most the last rows."""
    shown = rows[-_MOST:]
    cells = [_cells(row, now_ns) for row in shown]
    kept = [at for at in range(len(_HEADS)) if at < 2 or any(line[at] for line in cells)]
    head = "".join(f"<th>{_HEADS[at]}</th>" for at in kept)
    body = "".join("<tr>" + "".join(f"<td>{escape(line[at])}</td>" for at in kept) + "</tr>" for line in cells)
    more = f"<p>… and {len(rows) - len(shown)} before them</p>" if len(rows) > len(shown) else ""
    return f"{more}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(row: Any, now_ns: int) -> tuple[str, ...]:
    time_ns = row.time_ns(now_ns)
    return (
        row.name,
        row.state.value.replace("_", " "),
        ", ".join(f"{key}={value}" for key, value in row.parameters),
        str(row.cpus or ""),
        show_size(row.memory_bytes) if row.memory_bytes is not None else "",
        str(row.gpus or ""),
        show_duration(time_ns) if time_ns is not None else "",
        row.reason,
    )


def dataframe(rows: Sequence[Any]) -> Any:
    """Return a table of pandas, one row for each job. Raises SpoolError if there is no pandas."""
    try:
        import pandas
    except ImportError:
        why, remedy = "pandas is not installed", "`pip install pandas`, or use the rows"
        raise SpoolError(cannot("make", "a table", why, remedy=remedy)) from None
    keys = list(dict.fromkeys(key for row in rows for key in _tables(row)))
    columns: dict[str, list[Any]] = {}
    for row in rows:
        values, tables = asdict(row), _tables(row)
        for name in ("parameters", "metrics", "left", "start"):
            del values[name]
        values |= {name: getattr(row, name) for name in ("left_ns", "left_by", "start_at_ns", "start_is_guess")}
        values |= {"state": row.state.value, "resources": dict(row.resources), "tags": list(row.tags)}
        for key, value in (values | {key: tables.get(key) for key in keys}).items():
            columns.setdefault(key, []).append(value)
    found = pandas.DataFrame(columns)
    for name in [name for name in columns if name.endswith("_at_ns")]:
        instants = pandas.to_datetime(pandas.array(columns[name], dtype="Int64"), unit="ns", utc=True)
        found[name] = instants
    return found.rename(columns={name: name.removesuffix("_ns") for name in columns if name.endswith("_at_ns")})


def _tables(row: Any) -> dict[str, str]:
    found = {f"parameters.{key}": value for key, value in row.parameters}
    return found | {f"metrics.{key}": value for key, value in row.metrics}
