"""A timeline as a picture: what its panels show, drawn with characters for a terminal, or as SVG (`svg.py`).

On a colour terminal each group has a colour, and a cell's shade shows how much of it was in use. Without colours each
group has a letter: a capital if at least half of the cell was in use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import chain, groupby
from typing import Any

from msgspec import Struct
from rich.cells import cell_len

from spool.cli import render
from spool.cli.render import TICKS, Tick
from spool.core.accounting import By
from spool.core.errors import shown
from spool.core.model import SECOND_NS
from spool.core.reasons import count_of
from spool.core.units import show_duration, show_size
from spool.extras.plot import charts, svg
from spool.formats.capabilities import engine_title
from spool.query.timeline import OTHERS, LaneBar, Timeline, TimelineRow, UsageCurve

PANELS = ("gpus", "cpus", "use", "waits", "memory")
"""The panels of a picture, from the top."""

FILE_SIZE = (1000, 32)
"""The columns of a picture in a file, and the most rows for CPUs."""
TERMINAL_CPU_ROWS = 12
_NARROWEST = 40  # cells
_MARGIN = 12  # cells before the columns, for the names of rows
_HEIGHT = 3  # rows of a curve on the terminal
_TICK, _WIDE_TICK = 8, 11  # cells for a mark of the axis, and for one with seconds
_MINUTE_NS = 60 * SECOND_NS
_GAP_FROM = 3  # the fewest cells of a bar that may lose one to a gap
_ROW, _CURVE = 17, 110  # pixels of a row and of a curve in a file
_NAMED_ROWS = 24  # rows of a panel in a file that have a name
_SHADES = "░▒▓█"
_GROUP_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
_CURVE_COLOURS = (_GROUP_COLOURS[5], _GROUP_COLOURS[4])


class PictureCurve(Struct, frozen=True):
    """A value in each column; `highest` is the most that the panel shows."""

    name: str
    colour: str
    values: Sequence[float]
    highest: float


class PicturePanel(Struct, frozen=True):
    """One panel: rows with bars, or curves; neither of them: its heading says it all.

    `up` has the marks beside curves as parts of the height. In a file, `spans` take the place of curves: bars from one
    part of the height to another, None in a column without one.
    """

    heading: str
    rows: Sequence[TimelineRow] = ()
    curves: Sequence[PictureCurve] = ()
    up: Sequence[Tick] = ()
    spans: Sequence[tuple[float, float] | None] = ()


def panel(found: Timeline, name: str) -> PicturePanel | None:
    """Return one of `PANELS`, None if there is nothing to show in it."""
    match name:
        case "gpus":
            return PicturePanel(_share(found.gpus_used, found.gpus, "GPUs"), found.gpu_rows) if found.gpus else None
        case "cpus":
            return PicturePanel(_share(found.cpus_used, found.cpus, "CPUs"), found.cpu_rows)
        case "use":
            kinds = (("GPUs", found.gpus_used, found.gpus), ("CPUs", found.cpus_used, found.cpus))
            curves = [
                PictureCurve(f"{kind} {(most := max(used.highest, there_are))}", colour, used.columns, most)
                for (kind, used, there_are), colour in zip(kinds, _CURVE_COLOURS, strict=True)
                if there_are
            ]
            return PicturePanel("in use, of all", curves=curves, up=[(at / 4, f"{25 * at}%") for at in range(5)])
        case "waits":
            return _waits(found)
        case _:
            highest = max(found.memory_asked.highest, found.memory_used.highest)
            if not highest:
                return PicturePanel("memory: none requested, use unknown")
            asked, used = show_size(found.memory_asked.highest), show_size(found.memory_used.highest)
            return PicturePanel(
                f"memory: at most {asked} requested and {used} used, of {show_size(found.memory_bytes)}",
                curves=[
                    PictureCurve("requested", _GROUP_COLOURS[1], found.memory_asked.columns, highest),
                    PictureCurve("used", _GROUP_COLOURS[2], found.memory_used.columns, highest),
                ],
                up=[(at / 2, show_size(highest * at // 2)) for at in range(3)],
            )


def _waits(found: Timeline) -> PicturePanel:
    """Return the waits of runs before their starts: the median of each column, in a file up to the 90th percentile."""
    waits = found.all_waits
    if waits is None:
        return PicturePanel("waits: unknown")
    median, p90, longest = map(show_duration, (waits.median_ns, waits.p90_ns, waits.longest_ns))
    heading = f"waits: median {median}, 90% within {p90}, longest {longest}"
    if not waits.longest_ns:
        return PicturePanel(heading)
    medians = [each.median_ns if each is not None else 0 for each in found.waits]
    most = max(10.0, *(each.p90_ns / SECOND_NS for each in found.waits if each is not None))

    def up(seconds: float) -> float:
        return math.log10(1 + seconds) / math.log10(1 + most * 1.3)

    return PicturePanel(
        heading,
        curves=[PictureCurve("median", _CURVE_COLOURS[1], medians, max(medians))],
        up=[(up(at), word) for at, word in ((0, "0"), *TICKS) if at <= most],
        spans=[
            None if each is None else (up(each.median_ns / SECOND_NS), up(each.p90_ns / SECOND_NS))
            for each in found.waits
        ],
    )


def _share(used: UsageCurve, there_are: int, what: str) -> str:
    if used.highest > there_are:  # there were more then
        return f"{what}: {used.mean:.1f} in use on average, at most {used.highest} at once"
    return f"{what}: {round(100 * used.mean / there_are)}% in use on average, at most {used.highest} of {there_are}"


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


class TerminalPicture:
    """Draws a timeline with characters, in lines of *width* cells, or of the smallest useful width.

    *height*: the most lines of the picture, as far as one panel has that few; None: any number.
    """

    def __init__(self, width: int, height: int | None = None) -> None:
        self.cpu_rows = TERMINAL_CPU_ROWS if height is None else min(max(height // 4, 2), TERMINAL_CPU_ROWS)
        self._most = math.inf if height is None else height
        self.columns = max(width, _NARROWEST) - _MARGIN
        self._blocks = render.has_colours() and charts.can_draw()
        self._paint = render.painter()

    def lines(self, found: Timeline, panels: Sequence[str]) -> list[str]:
        """Return the panels that are not empty, each with its heading, and the legend above.

        Of a picture that is too high, the curves get lower, and then the last panels are named instead of drawn.
        """
        wanted = {name: shows for name in panels if (shows := panel(found, name)) is not None}
        for height in (_HEIGHT, 1):
            head, parts = self._heading(found), [self._panel(found, each, height) for each in wanted.values()]
            lines = list(chain(head, *parts))
            if len(lines) <= self._most:
                return lines
        kept = len(parts)
        while kept > 1 and len(lines) > self._most:
            kept -= 1
            rest = self._wrapped(f"not drawn: `spool plot --show {','.join([*wanted][kept:])}`")
            lines = list(chain(head, *parts[:kept], rest))
        return lines

    def _heading(self, found: Timeline) -> list[str]:
        lines, used, words = self._wrapped(_title(found)), 0, list[str]()
        marks = _colours(found)
        for at, group in enumerate(found.groups):
            name = render.short(shown(group), self.columns)
            cells = cell_len(name) + 4
            if words and used + cells > self.columns + _MARGIN:
                lines.append("  ".join(words))
                words, used = [], 0
            words.append(f"{self._paint(marks[group], '█' if self._blocks else _letter(at))} {name}")
            used += cells
        return [*lines, "  ".join(words)]

    def _wrapped(self, text: str) -> list[str]:
        return render.wrapped(text, self.columns + _MARGIN)

    def _panel(self, found: Timeline, shows: PicturePanel, height: int) -> list[str]:
        """Return a blank line, the heading, the rows or the curves of that height, and the axis of time."""
        drawn = [*self._rows(found, shows.rows)]
        for curve in shows.curves:
            rows = charts.area(curve.values, curve.highest, height)
            drawn += [_labelled("" if at else curve.name, row) for at, row in enumerate(rows)]
        if drawn:
            apart = found.step_ns * _TICK
            if apart < _MINUTE_NS:  # the marks have seconds
                apart = found.step_ns * _WIDE_TICK
            ticks = charts.time_ticks(found.since_at_ns, found.until_at_ns, apart)
            places = [((at_ns - found.since_at_ns) // found.step_ns, label) for at_ns, label in ticks]
            drawn.append(_labelled("", charts.axis(places, len(found.waits))))
        return ["", *self._wrapped(shows.heading), *drawn]

    def _rows(self, found: Timeline, rows: Sequence[TimelineRow]) -> Iterator[str]:
        marks = _colours(found)
        for row in rows:
            cells: list[tuple[str, str]] = [("", " ")] * len(found.waits)
            end, before = -1, ""
            for _, of_run in groupby(row.bars, key=lambda bar: id(bar.run)):
                bars = list(of_run)
                first, group = bars[0].first, found.group_of(bars[0].run)
                for bar in bars:
                    sign = _shade(bar.busy) if self._blocks else _letter(found.groups.index(group), bar.busy)
                    cells[bar.first : bar.last] = [(marks[group], sign)] * (bar.last - bar.first)
                if first == end and group == before and bars[-1].last - first >= _GAP_FROM:
                    cells[first] = marks[group], "▐" if self._blocks else "|"  # else two runs would look like one
                end, before = bars[-1].last, group
            yield _labelled("" if row.track else shown(row.label), render.painted(cells, self._paint))


def _labelled(label: str, row: str) -> str:
    return f"{render.short(label, _MARGIN - 1, middle=True):{_MARGIN}}{row}".rstrip()


def _letter(at: int, busy: float = 1.0) -> str:
    letter = chr(ord("A") + at)
    return letter if busy >= 0.5 else letter.lower()


def _shade(busy: float) -> str:
    return _SHADES[min(int(busy * len(_SHADES)), len(_SHADES) - 1)]


def document(found: Timeline, panels: Sequence[str], *, dark: bool) -> str:
    """Return the panels that are not empty as the text of an SVG file."""
    return svg.document(_title(found), _keys(found), _drawn(found, panels), dark=dark)


def runs(found: Timeline) -> str:
    """Return the rows of the GPUs and of the CPUs with their runs as SVG for a web page."""
    return svg.element(_keys(found), _drawn(found, ("gpus", "cpus")))


def _keys(found: Timeline) -> list[svg.Key]:
    return [(colour, render.short(shown(group), 14)) for group, colour in _colours(found).items()]


def _drawn(found: Timeline, panels: Sequence[str]) -> Iterator[svg.SvgPanel]:
    length, columns = found.until_at_ns - found.since_at_ns, len(found.waits)
    ticks = charts.time_ticks(found.since_at_ns, found.until_at_ns, length // 10)
    across = [((at_ns - found.since_at_ns) / length, label) for at_ns, label in ticks]
    for shows in filter(None, (panel(found, name) for name in panels)):
        drawn = svg.SvgPanel(shows.heading, _ROW * len(shows.rows) or _CURVE, across, shows.up)
        if shows.rows:
            drawn.bars, drawn.up, drawn.has_lines_up = _bars(found, shows.rows), _names(shows.rows), False
        elif shows.spans:
            colour = _CURVE_COLOURS[1]
            drawn.keys = [(colour, "median to 90th percentile")]
            for at, span in enumerate(shows.spans):
                if span is not None:
                    middle = (at + 0.5) / columns
                    sides = middle - 0.002, span[0] - 0.02, middle + 0.002, span[1] + 0.02
                    drawn.bars.append(svg.SvgBar(*sides, colour))
        else:
            drawn.keys = [(curve.colour, curve.name) for curve in shows.curves]
            for curve in shows.curves:
                heights = [value / curve.highest for value in curve.values]
                steps = [((at + side) / columns, height) for at, height in enumerate(heights) for side in (0, 1)]
                drawn.lines.append(svg.SvgLine(steps, curve.colour, filled=True))
        yield drawn


def _names(rows: Sequence[TimelineRow]) -> list[Tick]:
    """Return the names of the rows with their places, of each second one if there are many, and so on."""
    every = -(-len(rows) // _NAMED_ROWS)
    return [
        (1 - (at + 0.5) / len(rows), render.short(shown(row.label), 14))
        for at, row in enumerate(rows)
        if at % every == 0 and not row.track
    ]


def _bars(found: Timeline, rows: Sequence[TimelineRow]) -> list[svg.SvgBar]:
    """Return all bars, with those of one run in neighbouring rows joined."""
    joined: list[list[Any]] = []  # a bar with its first row and the row behind the last
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
    colours, columns, many = _colours(found), len(found.waits), len(rows)
    return [
        svg.SvgBar(
            bar.first / columns,
            1 - below / many,
            bar.last / columns,
            1 - top / many,
            colours[found.group_of(bar.run)],
            0.35 + 0.65 * bar.busy,
            shown(bar.run.job) if bar.alone else "",
            _told(bar),
        )
        for bar, top, below in joined
    ]


def _told(bar: LaneBar) -> str:
    """Return whose run a bar is, and when it ran."""
    run = bar.run
    began, ended = (
        "now" if at_ns is None else f"{datetime.fromtimestamp(at_ns // SECOND_NS):%b %d %H:%M}"
        for at_ns in (run.started_at_ns, run.ended_at_ns)
    )
    return f"{run.job}{'' if bar.alone else ' and others'}, {run.account.user or '?'}, {began} to {ended}"


# What other verbs draw (`cli/render.py`).
gantt, timeline, curve = charts.gantt, charts.timeline, charts.curve
checked, curves = svg.checked, svg.curves


def panels(spool: object) -> tuple[str, ...]:
    """Return the words of `--show`, which a shell offers."""
    return PANELS
