"""Values to what is seen: a table on a terminal, aligned text in a pipe, JSON for programs. Nothing is computed here.

Numbers and instants arrive as integers with their unit in the name; here they become words.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from spool.core.errors import shown
from spool.core.model import State
from spool.core.units import show_duration, show_size
from spool.formats.timestamps import render_instant

_LONG = 400  # rows; a drawn table of more takes longer to draw than to read

STATE_STYLES = {
    State.RUNNING: "green",
    State.STARTING: "green",
    State.STOPPING: "yellow",
    State.QUEUED: "",
    State.HELD: "cyan",
    State.INVALID: "bold red",
    State.FINISHED: "dim",
    State.FAILED: "red",
    State.TIMEOUT: "red",
    State.OUT_OF_MEMORY: "red",
    State.LOST: "red",
    State.UNSCHEDULABLE: "red",
    State.CANCELLED: "dim yellow",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. *wide* is the one that is cut short where there is no room."""

    title: str
    right: bool = False
    wide: bool = False


def say(line: str = "", *, drawn: str = "", at_once: bool = False) -> None:
    """Print *line* on stdout; *drawn* are signs and colours of our own before it."""
    print(f"{drawn}{shown(line)}", flush=at_once)


def say_text(text: str) -> None:
    """Print a text of several lines as it stands, but for what would reach the terminal as a control."""
    sys.stdout.write(shown(text, "\n\t"))


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] | None = None) -> None:
    """Print a table; *styles* has one for each row, for terminals."""
    if sys.stdout.isatty() and len(rows) <= _LONG:
        _drawn(columns, rows, styles)
    else:
        sys.stdout.write(aligned(columns, rows))


def aligned(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text: the columns padded with spaces, two of them between; the last is not padded."""
    lines = [[column.title for column in columns], *([shown(cell) for cell in row] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    last = len(columns) - 1
    text = []
    for line in lines:
        cells = [
            cell.rjust(width) if column.right else cell if at == last else cell.ljust(width)
            for at, (cell, width, column) in enumerate(zip(line, widths, columns, strict=True))
        ]
        text.append("  ".join(cells).rstrip() + "\n")
    return "".join(text)


def _drawn(columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        drawn.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.wide,
            overflow="fold" if column.wide else "ellipsis",
            ratio=None,
        )
    for at, row in enumerate(rows):
        drawn.add_row(*(Text(shown(cell)) for cell in row), style=styles[at] if styles else None)
    Console(highlight=False, emoji=False).print(drawn)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show on the terminal that stderr is, if it is one, how much of something is done; it goes when that is over."""
    if not sys.stderr.isatty():
        yield lambda done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def pairs(lines: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair a line, the values below each other; longer ones are indented."""
    listed = list(lines)
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        first, *more = value.splitlines() or [""]
        say(f"{name.ljust(width)}  {first}".rstrip())
        for line in more:
            say(f"{'':{width}}  {line}")


def as_json(value: Any) -> None:
    """Print *value* as JSON: data classes as objects, `…_at_ns` as RFC 3339 `…_at`, what is unknown as null."""
    found = plain(value)
    text = json.dumps(found, indent=2, ensure_ascii=False)
    sys.stdout.write((text if shown(text, "\n") == text else json.dumps(found, indent=2)) + "\n")


_TABLES = frozenset({"resources", "resource_indices"})
"""Fields that are tables, held as pairs so that the values that they are in can be compared and hashed."""


def plain(value: Any) -> Any:
    """Return *value* as what JSON has."""
    if is_dataclass(value) and not isinstance(value, type):
        found: dict[str, Any] = {}
        for field in fields(value):
            item = getattr(value, field.name)
            if field.name.endswith("_at_ns"):
                found[field.name.removesuffix("_ns")] = None if item is None else render_instant(item)
            elif field.name in _TABLES and isinstance(item, tuple):
                found[field.name] = {key: plain(each) for key, each in item}
            else:
                found[field.name] = plain(item)
        return found
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [plain(item) for item in sorted(value, key=str)]
    return value


def size(size_bytes: int | None) -> str:
    """Return a size for a table's cell."""
    return "" if size_bytes is None else show_size(size_bytes).replace(" ", "").replace("iB", "")


def duration(duration_ns: int | None) -> str:
    """Return a duration for a table's cell."""
    return "" if duration_ns is None else show_duration(max(0, duration_ns))


def cpu_time(duration_ns: int | None) -> str:
    """Return a time that may be very short."""
    if duration_ns is None:
        return ""
    return f"{duration_ns / 1e9:.3f} s" if duration_ns < 10_000_000_000 else show_duration(duration_ns)


def count(number: int | None) -> str:
    """Return a number for a table's cell."""
    return "" if number is None else str(number)


def ratio(number: float | None) -> str:
    """Return a number for a table's cell, a small one with its decimals."""
    if number is None:
        return ""
    return f"{number:.0f}" if number >= 1000 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def percent(part: float | None) -> str:
    """Return a part of one as a percentage."""
    return "" if part is None else f"{100 * part:.1f}%"


def moment(at_ns: int | None, now_ns: int | None = None) -> str:
    """Return an instant as this machine's clock shows it, and how long ago it was."""
    if at_ns is None:
        return ""
    from datetime import datetime

    text = datetime.fromtimestamp(at_ns // 1_000_000_000).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if now_ns is None:
        return text
    ago = now_ns - at_ns
    return f"{text} ({duration(ago)} ago)" if ago >= 0 else f"{text} (in {duration(-ago)})"
