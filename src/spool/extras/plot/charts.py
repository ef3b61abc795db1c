"""Charts of runs, reservations and curves, drawn with characters for a terminal.

On the terminal a curve is a row, an interval of time a column.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

from spool.cli import render
from spool.cli.render import MARKS, Line
from spool.core.model import SECOND_NS, Result, State

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*%#"


def curve(values: Sequence[float], highest: float) -> str:
    """Return *values* as one row, each as high as its part of *highest*. Anything above zero is visible."""
    return area(values, highest, 1)[0]


def area(values: Sequence[float], highest: float, height: int) -> list[str]:
    """Return *values* as a surface of *height* rows, the top one first, each as high as its part of *highest*."""
    levels = _EIGHTHS if can_draw() else _ASCII
    tops = [
        min(max(round(value / highest * 8 * height), 1 if value > 0 else 0), 8 * height) if highest > 0 else 0
        for value in values
    ]
    return ["".join(levels[min(max(top - 8 * below, 0), 8)] for top in tops) for below in reversed(range(height))]


def can_draw() -> bool:
    """Whether the output can show block characters."""
    try:
        _EIGHTHS.encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def gantt(runs: Mapping[str, Sequence[Result]], begin_ns: int, end_ns: int, width: int) -> list[str]:
    """Return the runs between *begin_ns* and *end_ns*, a row for each job with its runs, oldest first."""
    names = max((len(name) for name in runs), default=0)
    words = max((len(_ending(results)) for results in runs.values()), default=0)
    room = max(20, width - names - words - 4)
    span = max(1, end_ns - begin_ns)
    paint = render.painter()

    def column(at_ns: int) -> int:
        return min(room - 1, max(0, (at_ns - begin_ns) * room // span))

    lines = [
        f"{name.ljust(names)}  {render.painted(_cells(results, column, room), paint)}  {_ending(results)}"
        for name, results in runs.items()
    ]
    return [*lines, f"{'':{names}}  {_seconds(span, room)}"]


def _cells(results: Sequence[Result], column: Callable[[int], int], room: int) -> list[tuple[str, str]]:
    """Return the cells of one job: waiting, running, and the outcome at the end of each run."""
    wait, full, bad = ("·", "█", "✗") if can_draw() else (".", "#", "x")
    cells = [("", " ")] * room
    for result in results:
        ended = column(result.ended_at_ns or 0)
        started = column(result.started_at_ns) if result.started_at_ns is not None else ended
        if result.submitted_at_ns is not None:
            for at in range(column(result.submitted_at_ns), started):
                if cells[at][1] == " ":
                    cells[at] = ("", wait)
        colour = render.colour_of(result.outcome)
        cells[started : ended + 1] = [(colour, full)] * (ended + 1 - started)
        if result.outcome is not State.FINISHED:
            cells[ended] = (colour, bad)
    return cells


def _ending(results: Sequence[Result]) -> str:
    """Return the outcome of a job, with the number of the run if it took several."""
    if not results:
        return ""
    last = results[-1]
    return f"{last.outcome.value} (run {last.run})" if last.run > 1 else last.outcome.value


def _seconds(span_ns: int, room: int) -> str:
    """Return the axis: marks at whole seconds, as many as fit."""
    seconds = span_ns / SECOND_NS
    step = next((each for each in (1, 2, 5, 10, 30, 60, 300, 600, 3600) if room / max(seconds / each, 1) >= 8), 3600)
    line, mark = "─┴" if can_draw() else "-+"
    marks = range(0, int(seconds) + 1, step)
    return axis(((int(at / seconds * room) if seconds else 0, f"{mark}{at}s") for at in marks), room, line)


_HOUR_NS = 3600 * SECOND_NS
_MINUTE_NS = 60 * SECOND_NS
_SCALES_NS = tuple(hours * _HOUR_NS for hours in (1, 2, 3, 6, 12, 24, 48, 168, 336, 720, 8760))
FINE_SCALES_NS = (
    *(seconds * SECOND_NS for seconds in (1, 2, 5, 10, 30)),
    *(minutes * _MINUTE_NS for minutes in (1, 2, 5, 10, 20, 30)),
    *_SCALES_NS,
)
"""Round distances between two marks of an axis."""
_BEFORE_NS, _AFTER_NS = 12 * _HOUR_NS, 14 * 24 * _HOUR_NS
_TICK = 8  # columns that a label on the scale needs


_NOW = ("┃", "|")


def timeline(lines: Sequence[Line], now_ns: int, width: int) -> list[str]:
    """Return reservations over time, a row for each, and the scale below them.

    It begins 12 hours before now at the earliest, and ends 14 days after at the latest.
    """
    bars = [bar for line in lines for bar in line.bars]
    start = max(min((bar.start_at_ns for bar in bars), default=now_ns), now_ns - _BEFORE_NS)
    end = min(max((bar.end_at_ns for bar in bars), default=now_ns), now_ns + _AFTER_NS)
    start = min(start, now_ns)
    end = max(end, now_ns + _HOUR_NS)
    margin = max((len(line.label) for line in lines), default=0) + 2
    columns = max(width - margin, 20)
    step = max(-(-(end - start) // columns), 1)
    plain = not can_draw()
    found = []
    for line in lines:
        row = [" "] * columns
        row[(now_ns - start) // step] = _NOW[plain]
        for bar in line.bars:
            mark = MARKS[bar.mark][plain] if bar.mark in MARKS else bar.mark
            first, last = max(bar.start_at_ns - start, 0) // step, -(-(bar.end_at_ns - start) // step)
            for at in range(first, min(max(last, first + 1), columns)):
                if row[at] == " " or bar.mark not in MARKS:
                    row[at] = mark
        found.append(f"{line.label.ljust(margin)}{''.join(row)}".rstrip())
    ticks = time_ticks(start, start + step * columns, step * _TICK, _SCALES_NS)  # days if the hours would not fit
    scale = axis((((at_ns - start) // step, label) for at_ns, label in ticks), columns)
    found.append(f"{'':{margin}}{scale.rstrip()}")
    return found


def axis(places: Iterable[tuple[int, str]], columns: int, line: str = " ") -> str:
    """Return a row with a label from each of *places* on, as far as there is room."""
    row = [line] * columns
    for at, label in places:
        if at + len(label) <= columns:
            row[at : at + len(label)] = label
    return "".join(row)


def time_ticks(
    start_ns: int, end_ns: int, apart_ns: int, scales_ns: Sequence[int] = FINE_SCALES_NS
) -> list[tuple[int, str]]:
    """Return instants of the local clock from *start_ns* to *end_ns*, at least *apart_ns* from each other, labelled.

    Their distance is a round time: the first of *scales_ns* that is long enough, or the last.
    """
    apart = next((each for each in scales_ns if each >= apart_ns), scales_ns[-1])
    offset = datetime.fromtimestamp(start_ns // SECOND_NS).astimezone().utcoffset()
    shift = int(offset.total_seconds()) * SECOND_NS if offset is not None else 0
    at_ns = -(-(start_ns + shift) // apart) * apart - shift  # full hours are those of the local clock
    found = []
    while at_ns < end_ns:
        moment = datetime.fromtimestamp(at_ns // SECOND_NS)
        if apart >= 24 * _HOUR_NS or (apart >= _HOUR_NS and not (moment.hour or moment.minute)):
            label = f"{moment:%b %d}"
        else:
            label = f"{moment:%H:%M}" if apart >= _MINUTE_NS else f"{moment:%H:%M:%S}"
        found.append((at_ns, label))
        at_ns += apart
    return found
