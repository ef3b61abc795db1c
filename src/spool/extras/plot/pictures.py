"""Runs over time as pictures: with characters for a terminal, and as SVG for a file or a web page.

On a colour terminal each group has a colour, and a cell's shade shows how much of it was in use. Without colours each
group has a letter: a capital if at least half of the cell was in use. In SVG, words stay text that can be searched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from itertools import groupby
from typing import Any

from rich.cells import cell_len

from spool.cli import render
from spool.core.accounting import By
from spool.core.errors import shown
from spool.core.model import SECOND_NS, Result, State
from spool.core.reasons import count_of
from spool.formats.capabilities import engine_title
from spool.query.timeline import OTHERS, LaneBar, Timeline, TimelineRow

MARGIN, NARROWEST = 12, 40
"""The cells before the columns of a picture on the terminal, for the names of rows, and the fewest cells of all."""
_TICK, _WIDE_TICK = 8, 11  # cells for a mark of the axis, and for one with seconds
_GAP_FROM = 3  # the fewest cells of a bar that may lose one to a gap
_SHADES = "░▒▓█"
_GROUP_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
"""Okabe and Ito 2008: safe for colour-blind readers."""
_MINUTE_NS, _HOUR_NS = 60 * SECOND_NS, 3600 * SECOND_NS
_SCALES_NS = (
    *(seconds * SECOND_NS for seconds in (1, 2, 5, 10, 30)),
    *(minutes * _MINUTE_NS for minutes in (1, 2, 5, 10, 20, 30)),
    *(hours * _HOUR_NS for hours in (1, 2, 3, 6, 12, 24, 48, 168, 336, 720, 8760)),
)
"""Round distances between two marks of an axis."""

# In SVG all numbers are pixels.
_WIDTH, _LEFT, _RIGHT = 1100, 96, 16
_INNER = _WIDTH - _LEFT - _RIGHT
_HEADING, _TICKS, _GAP = 24, 16, 10
_ROW = 17
_NAMED_ROWS = 24  # rows of a panel that have a name
_NAME, _LETTER = 14, 6.2  # letters of a name beside a row or of a group; a letter in a bar, on average
_KEY_LETTER, _KEY = 6.6, 26
_MANY = 4000  # bars: more have no gap between them
_ROOM_TO_POINT = 8  # a narrower bar has no words of its own below the mouse


def _painted(cells: Iterable[tuple[str, str]], coloured: Callable[[str, str], str]) -> str:
    """Return a row of cells, each a style and a sign, with the styles that *coloured* gives them."""
    return "".join(
        coloured(style, "".join(sign for _, sign in group)) for style, group in groupby(cells, key=lambda cell: cell[0])
    )


def _has_colours() -> bool:
    """Whether stdout has colours, and the user wants them."""
    from rich.console import Console

    console = Console()
    return console.color_system is not None and not console.no_color


def can_draw() -> bool:
    """Whether the output can show block characters."""
    try:
        _SHADES.encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


# --- what a picture shows --------------------------------------------------------------------------------------------


def _panels(found: Timeline) -> Iterator[tuple[str, Sequence[TimelineRow]]]:
    """Yield the heading and the rows of the GPUs, if there are some, and of the CPUs."""
    for what, used, there_are, rows in (
        ("GPUs", found.gpus_used, found.gpus, found.gpu_rows),
        ("CPUs", found.cpus_used, found.cpus, found.cpu_rows),
    ):
        if used.highest > there_are:  # there were more then
            yield f"{what}: {used.mean:.1f} in use on average, at most {used.highest} at once", rows
        elif there_are:
            share = round(100 * used.mean / there_are)
            yield f"{what}: {share}% in use on average, at most {used.highest} of {there_are}", rows


def _colours(found: Timeline) -> dict[str, str]:
    """Return the colour of each group. A state always has the same."""
    if found.by is By.STATE:
        return {group: render.colour_of(group) for group in found.groups}
    return {
        group: render.GREY if group == OTHERS else _GROUP_COLOURS[at % len(_GROUP_COLOURS)]
        for at, group in enumerate(found.groups)
    }


def _title(found: Timeline) -> str:
    """Return the title of the picture, with the period by the local clock: "2026-03-01 14:00 to 16:00"."""
    going_on = f", {found.going_on} still running" if found.going_on else ""
    there = "".join(f", {count} in {engine_title(name)} (not drawn)" for name, count in found.elsewhere.items())
    first, last = (datetime.fromtimestamp(at // SECOND_NS) for at in (found.since_at_ns, found.until_at_ns))
    clock = "%H:%M:%S" if found.until_at_ns - found.since_at_ns < 600 * SECOND_NS else "%H:%M"
    end = last.strftime(clock if first.date() == last.date() else f"%Y-%m-%d {clock}")
    return f"{count_of(found.runs, 'run')}{there}{going_on}, {first:%Y-%m-%d {clock}} to {end}"


def _time_ticks(start_ns: int, end_ns: int, apart_ns: int) -> Iterator[tuple[int, str]]:
    """Yield instants of the local clock from *start_ns* to *end_ns*, at least *apart_ns* from each other, labelled.

    Their distance is a round time: the first of `_SCALES_NS` that is long enough, or the last.
    """
    apart = next((each for each in _SCALES_NS if each >= apart_ns), _SCALES_NS[-1])
    offset = datetime.fromtimestamp(start_ns // SECOND_NS).astimezone().utcoffset()
    shift = int(offset.total_seconds()) * SECOND_NS if offset is not None else 0
    first_ns = -(-(start_ns + shift) // apart) * apart - shift  # full hours are those of the local clock
    for at_ns in range(first_ns, end_ns, apart):
        moment = datetime.fromtimestamp(at_ns // SECOND_NS)
        if apart >= 24 * _HOUR_NS or (apart >= _HOUR_NS and not (moment.hour or moment.minute)):
            yield at_ns, f"{moment:%b %d}"
        else:
            yield at_ns, f"{moment:%H:%M}" if apart >= _MINUTE_NS else f"{moment:%H:%M:%S}"


# --- on a terminal ---------------------------------------------------------------------------------------------------


def lines(found: Timeline, width: int) -> list[str]:
    """Return a timeline in lines of *width* cells."""
    width = max(width, NARROWEST)
    blocks, paint, marks = _has_colours() and can_draw(), render.painter(), _colours(found)
    drawn, used, words = render.wrapped(_title(found), width), 0, list[str]()
    for at, group in enumerate(found.groups):
        name = render.short(shown(group), width - MARGIN)
        cells = cell_len(name) + 4
        if words and used + cells > width:
            drawn.append("  ".join(words))
            words, used = [], 0
        words.append(f"{paint(marks[group], '█' if blocks else _letter(at))} {name}")
        used += cells
    drawn.append("  ".join(words))
    apart = found.step_ns * _TICK
    if apart < _MINUTE_NS:  # the marks have seconds
        apart = found.step_ns * _WIDE_TICK
    ticks = _time_ticks(found.since_at_ns, found.until_at_ns, apart)
    columns = found.columns
    axis = _axis((((at_ns - found.since_at_ns) // found.step_ns, label) for at_ns, label in ticks), columns)
    for heading, rows in _panels(found):
        drawn += ["", *render.wrapped(heading, width)]
        for row in rows:
            cells_of_row = _painted(_row(found, row, marks, blocks=blocks), paint)
            drawn.append(_labelled("" if row.track else shown(row.label), cells_of_row))
        drawn.append(_labelled("", axis))
    return drawn


def _row(found: Timeline, row: TimelineRow, marks: Mapping[str, str], *, blocks: bool) -> list[tuple[str, str]]:
    """Return the cells of a row, each with its colour; a gap begins a run that would look like the one before it."""
    cells: list[tuple[str, str]] = [("", " ")] * found.columns
    end, before = -1, ""
    for _, of_run in groupby(row.bars, key=lambda bar: id(bar.run)):
        bars = list(of_run)
        first, group = bars[0].first, found.group_of(bars[0].run)
        for bar in bars:
            shade = _SHADES[min(int(bar.busy * len(_SHADES)), len(_SHADES) - 1)]
            sign = shade if blocks else _letter(found.groups.index(group), bar.busy)
            cells[bar.first : bar.last] = [(marks[group], sign)] * (bar.last - bar.first)
        if first == end and group == before and bars[-1].last - first >= _GAP_FROM:
            cells[first] = marks[group], "▐" if blocks else "|"
        end, before = bars[-1].last, group
    return cells


def _labelled(label: str, row: str) -> str:
    return f"{render.short(label, MARGIN - 1, middle=True):{MARGIN}}{row}".rstrip()


def _letter(at: int, busy: float = 1.0) -> str:
    letter = chr(ord("A") + at)
    return letter if busy >= 0.5 else letter.lower()


def _axis(places: Iterable[tuple[int, str]], columns: int, line: str = " ") -> str:
    """Return a row with a label from each of *places* on, as far as there is room."""
    row = [line] * columns
    for at, label in places:
        if at + len(label) <= columns:
            row[at : at + len(label)] = label
    return "".join(row)


def gantt(runs: Mapping[str, Sequence[Result]], begin_ns: int, end_ns: int, width: int) -> list[str]:
    """Return the runs between *begin_ns* and *end_ns*, a row for each job with its runs, oldest first."""
    names = max((len(name) for name in runs), default=0)
    words = max((len(_ending(results)) for results in runs.values()), default=0)
    room = max(20, width - names - words - 4)
    span = max(1, end_ns - begin_ns)
    paint = render.painter()

    def column(at_ns: int) -> int:
        return min(room - 1, max(0, (at_ns - begin_ns) * room // span))

    drawn = [
        f"{name.ljust(names)}  {_painted(_cells(results, column, room), paint)}  {_ending(results)}"
        for name, results in runs.items()
    ]
    apart = next((each for each in _SCALES_NS if each * room >= 8 * span), _SCALES_NS[-1])
    line, mark = "─┴" if can_draw() else "-+"
    places = ((at_ns * room // span, f"{mark}{at_ns // SECOND_NS}s") for at_ns in range(0, span + 1, apart))
    return [*drawn, f"{'':{names}}  {_axis(places, room, line)}"]


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


# --- as SVG ----------------------------------------------------------------------------------------------------------


def document(found: Timeline) -> str:
    """Return a timeline as the text of an SVG file."""
    above = ['<rect width="100%" height="100%" fill="white"/>', _text((12, 24), _title(found), 15)]
    look = 'font-family="sans-serif" color="#222222" stroke="white" stroke-width="0"'
    return _svg(found, f'xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{{:.0f}}" {look}', 44, above)


def runs(found: Timeline) -> str:
    """Return a timeline as SVG for a web page, in the colour of its text and on its ground."""
    return _svg(found, 'class="diagram"', 12)


def _svg(found: Timeline, attributes: str, y: float, above: Sequence[str] = ()) -> str:
    """Return an element: the meanings of the colours at *y*, with the panels below. *attributes* may ask its height."""
    parts, height = [*above, *_keys(found, y)], y + 8
    for heading, rows in _panels(found):
        parts += _panel(found, heading, rows, height)
        height += _HEADING + _ROW * len(rows) + _TICKS + _GAP
    begin = f'<svg {attributes.format(height)} viewBox="0 0 {_WIDTH} {height:.0f}">'
    return "\n".join([begin, *parts, "</svg>", ""])


def _keys(found: Timeline, y: float) -> Iterator[str]:
    """Yield the meanings of the colours in a line that ends on the right."""
    keys = [(colour, render.short(shown(group), _NAME)) for group, colour in _colours(found).items()]
    left = _WIDTH - _RIGHT - sum(_KEY + _KEY_LETTER * cell_len(name) for _, name in keys)
    for colour, name in keys:
        yield f'<rect x="{left:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{colour}"/>'
        yield _text((left + 14, y), name, 11)
        left += _KEY + _KEY_LETTER * cell_len(name)


def _panel(found: Timeline, heading: str, rows: Sequence[TimelineRow], begin: float) -> Iterator[str]:
    """Yield the elements of a panel, whose heading begins at *begin*."""
    length, columns = found.until_at_ns - found.since_at_ns, found.columns
    above, below = begin + _HEADING, begin + _HEADING + _ROW * len(rows)
    ticks = [
        (_LEFT + _INNER * (at_ns - found.since_at_ns) / length, label)
        for at_ns, label in _time_ticks(found.since_at_ns, found.until_at_ns, length // 10)
    ]
    yield _text((_LEFT, begin + 15), heading, 12)
    grid = "".join(f"M{x:.1f} {above}V{below}" for x, _ in ticks)
    frame = f"M{_LEFT} {above}V{below}h{_INNER}"
    yield f'<path d="{grid}{frame}" fill="none" stroke="currentColor" stroke-opacity=".15" stroke-width=".6"/>'
    bars, colours, names = _joined(rows), _colours(found), list[str]()
    yield "<g>" if len(bars) > _MANY else '<g class="bars" stroke-width=".5">'
    alike: dict[str, str] = {}  # the outlines of bars without words
    for bar, top, bottom in bars:
        x, end = (_LEFT + _INNER * at / columns for at in (bar.first, bar.last))
        y, high, wide = above + _ROW * top, _ROW * (bottom - top), end - x
        outline = f"M{x:.1f} {y}h{wide:.1f}v{high}h{-wide:.1f}Z"
        look = f'fill="{colours[found.group_of(bar.run)]}" fill-opacity="{0.35 + 0.65 * bar.busy:.2f}"'
        if wide < _ROOM_TO_POINT:
            alike[look] = alike.get(look, "") + outline
            continue
        yield f'<path d="{outline}" {look}><title>{_words(_told(bar))}</title></path>'
        if bar.alone and cell_len(name := shown(bar.run.job)) * _LETTER < wide:
            place = f'x="{x + wide / 2:.1f}" y="{y + high / 2}" dy=".35em" font-size="10" text-anchor="middle"'
            outlined = 'fill="#fff" stroke="#000c" stroke-width="3" paint-order="stroke" pointer-events="none"'
            names.append(f"<text {place} {outlined}>{_words(name)}</text>")
    yield from (f'<path d="{outline}" {look}/>' for look, outline in alike.items())
    yield "</g>"
    yield from names
    every = -(-len(rows) // _NAMED_ROWS)
    for at, row in enumerate(rows):
        if at % every == 0 and not row.track:
            middle = above + _ROW * (at + 0.5)
            yield _text((_LEFT - 6, middle + 4), render.short(shown(row.label), _NAME), 10, "end")
    for x, label in ticks:
        yield _text((x, below + 13), label, 10, "start" if x < _LEFT + 0.02 * _INNER else "middle")


def _joined(rows: Sequence[TimelineRow]) -> list[list[Any]]:
    """Return all bars, those of one run in neighbouring rows joined, with the first row and that behind the last."""
    joined: list[list[Any]] = []
    before: dict[tuple[object, ...], list[Any]] = {}
    for at, row in enumerate(rows):
        here: dict[tuple[object, ...], list[Any]] = {}
        for bar in row.bars:
            key = id(bar.run), bar.first, bar.last, bar.busy, bar.alone
            if (one := before.get(key)) is None:
                joined.append(one := [bar, at, at])
            one[2] = at + 1
            here[key] = one
        before = here
    return joined


def _told(bar: LaneBar) -> str:
    """Return whose run a bar is, and when it ran."""
    run = bar.run
    began, ended = (
        "now" if at_ns is None else f"{datetime.fromtimestamp(at_ns // SECOND_NS):%b %d %H:%M}"
        for at_ns in (run.started_at_ns, run.ended_at_ns)
    )
    return f"{run.job}{'' if bar.alone else ' and others'}, {run.user or '?'}, {began} to {ended}"


def _text(at: tuple[float, float], text: str, size: int, anchor: str = "start") -> str:
    placed = f'x="{at[0]:.1f}" y="{at[1]:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {placed} fill="currentColor" stroke="none">{_words(text)}</text>'


def _words(text: str) -> str:
    return escape(shown(text))


DRAWING = sys.modules[__name__]
"""What draws the charts of other verbs, a `cli.render.Charts`."""
