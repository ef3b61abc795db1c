"""A timeline as a picture: characters for a terminal, SVG for a file.

On a colour terminal each group has a colour, and a cell's shade shows how much of it was in use. Without colours each
group has a letter: a capital if at least half of the cell was in use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby

from spool.cli import render
from spool.cli.charts import TICKS, Tick
from spool.core.accounting import By
from spool.core.errors import shown
from spool.core.model import SECOND_NS
from spool.core.names import engine_title
from spool.core.reasons import count_of
from spool.core.units import show_duration, show_size
from spool.extras.plot import charts, svg
from spool.query.timeline import OTHERS, LaneBar, Timeline, TimelineRow, UsageCurve, WaitTimes

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
_SHADES = "░▒▓█"
_BLUE = "#0072b2"
_GROUP_COLOURS = (_BLUE, "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
_CURVE_COLOURS = (_GROUP_COLOURS[5], _GROUP_COLOURS[4])


def colours(found: Timeline) -> dict[str, str]:
    """Return the colour of each group. A state always has the same."""
    if found.by is By.STATE:
        return {group: render.colour_of(group) for group in found.groups}
    return {
        group: render.GREY if group == OTHERS else _GROUP_COLOURS[at % len(_GROUP_COLOURS)]
        for at, group in enumerate(found.groups)
    }


def period(found: Timeline) -> str:
    """Return the period by the local clock: "2026-03-01 14:00 to 16:00"."""
    first, last = (datetime.fromtimestamp(at // SECOND_NS) for at in (found.since_at_ns, found.until_at_ns))
    short = found.until_at_ns - found.since_at_ns < 600 * SECOND_NS
    clock = "%H:%M:%S" if short else "%H:%M"
    return f"{first:%Y-%m-%d {clock}} to {last.strftime(clock if first.date() == last.date() else f'%Y-%m-%d {clock}')}"


def title(found: Timeline) -> str:
    """Return the title of the picture."""
    going_on = f", {found.going_on} still running" if found.going_on else ""
    there = "".join(f", {count} in {engine_title(name)} (not drawn)" for name, count in found.elsewhere.items())
    return f"{count_of(found.runs, 'run')}{there}{going_on}, {period(found)}"


def _share(used: UsageCurve, there_are: int, what: str) -> str:
    if used.highest > there_are:  # there were more then
        return f"{what}: {used.mean:.1f} in use on average, at most {used.highest} at once"
    return f"{what}: {round(100 * used.mean / there_are)}% in use on average, at most {used.highest} of {there_are}"


def _in_use(found: Timeline) -> list[tuple[str, UsageCurve, int]]:
    """Return the use of the GPUs, if there are any, and of the CPUs, with their numbers."""
    kinds = [("GPUs", found.gpus_used, found.gpus), ("CPUs", found.cpus_used, found.cpus)]
    return [(name, used, max(used.highest, there_are)) for name, used, there_are in kinds if there_are]


def cpu_words(found: Timeline) -> str:
    """Return the use of the CPUs, in words."""
    return _share(found.cpus_used, found.cpus, "CPUs")


def gpu_words(found: Timeline) -> str:
    """Return the use of the GPUs, in words."""
    return _share(found.gpus_used, found.gpus, "GPUs")


def wait_words(waits: WaitTimes | None) -> str:
    """Return the waits of runs before their starts, in words."""
    if waits is None:
        return "waits: unknown"
    median, p90, longest = map(show_duration, (waits.median_ns, waits.p90_ns, waits.longest_ns))
    return f"waits: median {median}, 90% within {p90}, longest {longest}"


def memory_words(found: Timeline) -> str:
    """Return the requested and the used memory, in words."""
    if not _highest_memory(found):
        return "memory: none requested, use unknown"
    asked, used = show_size(found.memory_asked.highest), show_size(found.memory_used.highest)
    return f"memory: at most {asked} requested and {used} used, of {show_size(found.memory_bytes)}"


def _highest_memory(found: Timeline) -> int:
    return max(found.memory_asked.highest, found.memory_used.highest)


class TerminalPicture:
    """Draws a timeline with characters, in lines of *width* cells, or of the smallest useful width.

    *height*: the most lines of the picture, as far as one panel has that few; None: any number.
    """

    def __init__(self, width: int, height: int | None = None) -> None:
        self.cpu_rows = TERMINAL_CPU_ROWS if height is None else min(max(height // 4, 2), TERMINAL_CPU_ROWS)
        self._most = height
        self._curve_rows = _HEIGHT
        self.columns = max(width, _NARROWEST) - _MARGIN
        self._blocks = render.has_colours() and charts.can_draw()
        self._paint = render.painter()

    def lines(self, found: Timeline, panels: Sequence[str]) -> list[str]:
        """Return the panels that are not empty, each with its heading, and the legend above.

        Of a picture that is too high, the curves get lower, and then the last panels are named instead of drawn.
        """
        wanted = [panel for panel in panels if panel != "gpus" or found.gpus]
        if self._most is None:
            return self._drawn(found, wanted)
        for self._curve_rows in (_HEIGHT, 1):
            lines = self._drawn(found, wanted)
            if len(lines) <= self._most:
                return lines
        kept = len(wanted)
        while kept > 1 and len(lines) > self._most:
            kept -= 1
            rest = ",".join(wanted[kept:])
            lines = [*self._drawn(found, wanted[:kept]), *self._wrapped(f"not drawn: `spool plot --show {rest}`")]
        return lines

    def _drawn(self, found: Timeline, panels: Sequence[str]) -> list[str]:
        parts = {
            "gpus": lambda: self._chart(found, found.gpu_rows, gpu_words(found)),
            "cpus": lambda: self._chart(found, found.cpu_rows, cpu_words(found)),
            "use": lambda: self._use(found),
            "waits": lambda: self._waits(found),
            "memory": lambda: self._memory(found),
        }
        lines = self._heading(found)
        for panel in panels:
            lines += ["", *parts[panel]()]
        return lines

    def _heading(self, found: Timeline) -> list[str]:
        from rich.cells import cell_len

        lines = self._wrapped(title(found))
        used = 0
        marks = colours(found)
        words: list[str] = []
        for at, group in enumerate(found.groups):
            name = render.short(shown(group), self.columns)
            cells = cell_len(name) + 4
            if words and used + cells > self.columns + _MARGIN:
                lines.append("  ".join(words))
                words, used = [], 0
            sign = "█" if self._blocks else _letter(at)
            words.append(f"{self._paint(marks[group], sign)} {name}")
            used += cells
        return [*lines, "  ".join(words)]

    def _wrapped(self, text: str) -> list[str]:
        return render.wrapped(text, self.columns + _MARGIN)

    def _chart(self, found: Timeline, rows: Sequence[TimelineRow], heading: str) -> list[str]:
        lines = self._wrapped(heading)
        marks = colours(found)
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
            lines.append(_labelled("" if row.track else shown(row.label), render.painted(cells, self._paint)))
        return [*lines, self._axis(found)]

    def _axis(self, found: Timeline) -> str:
        apart = found.step_ns * _TICK
        if apart < _MINUTE_NS:  # the marks have seconds
            apart = found.step_ns * _WIDE_TICK
        ticks = charts.time_ticks(found.since_at_ns, found.until_at_ns, apart)
        return _labelled("", charts.axis(ticks, found.since_at_ns, found.step_ns, len(found.waits)))

    def _use(self, found: Timeline) -> list[str]:
        lines = ["in use, of all"]
        for name, used, there_are in _in_use(found):
            lines += self._curve(f"{name} {there_are}", used.columns, there_are)
        return [*lines, self._axis(found)]

    def _waits(self, found: Timeline) -> list[str]:
        heading = self._wrapped(wait_words(found.all_waits))
        if found.all_waits is None or not found.all_waits.longest_ns:
            return heading
        medians = [each.median_ns if each is not None else 0 for each in found.waits]
        return [
            *self._wrapped(wait_words(found.all_waits)),
            *self._curve("median", medians, max(medians)),
            self._axis(found),
        ]

    def _memory(self, found: Timeline) -> list[str]:
        highest = _highest_memory(found)
        lines = self._wrapped(memory_words(found))
        if not highest:
            return lines
        lines += self._curve("requested", found.memory_asked.columns, highest)
        lines += self._curve("used", found.memory_used.columns, highest)
        return [*lines, self._axis(found)]

    def _curve(self, name: str, values: Sequence[float], highest: float) -> list[str]:
        rows = charts.area(values, highest, self._curve_rows)
        labels = [name, *[""] * (self._curve_rows - 1)]
        return [_labelled(label, row) for label, row in zip(labels, rows, strict=True)]


def _labelled(label: str, row: str) -> str:
    return f"{render.short(label, _MARGIN - 1, middle=True):{_MARGIN}}{row}".rstrip()


def _letter(at: int, busy: float = 1.0) -> str:
    letter = chr(ord("A") + at)
    return letter if busy >= 0.5 else letter.lower()


def _shade(busy: float) -> str:
    return _SHADES[min(int(busy * len(_SHADES)), len(_SHADES) - 1)]


class FilePicture:
    """Draws a timeline as SVG. Raises UsageError, and SpoolError if the file cannot be written."""

    def __init__(self, path: str, *, dark: bool) -> None:
        self._path, self._dark = svg.checked(path), dark

    def draw(self, found: Timeline, panels: Sequence[str]) -> None:
        """Draw the panels that are not empty, and write the file."""
        marks = colours(found)
        keys = [(marks[group], render.short(shown(group), 14)) for group in found.groups]
        diagram = svg.Diagram(title(found), keys, dark=self._dark)
        length = found.until_at_ns - found.since_at_ns
        ticks = charts.time_ticks(found.since_at_ns, found.until_at_ns, length // 10)
        across = [((at_ns - found.since_at_ns) / length, label) for at_ns, label in ticks]
        for panel in panels:
            match panel:
                case "gpus" if found.gpus:
                    self._chart(diagram, found, found.gpu_rows, (gpu_words(found), across))
                case "cpus":
                    self._chart(diagram, found, found.cpu_rows, (cpu_words(found), across))
                case "use":
                    curves = [
                        (name, colour, [each / there_are for each in used.columns])
                        for (name, used, there_are), colour in zip(_in_use(found), _CURVE_COLOURS, strict=False)
                    ]
                    part = self._curves(diagram, ("in use, of all", across), curves)
                    part.scale([(at / 4, f"{25 * at}%") for at in range(5)])
                case "waits":
                    self._waits(diagram, found, across)
                case "memory":
                    self._memory(diagram, found, across)
                case _:
                    pass
        diagram.save(self._path)

    def _chart(
        self, diagram: svg.Diagram, found: Timeline, rows: Sequence[TimelineRow], about: tuple[str, Sequence[Tick]]
    ) -> None:
        heading, across = about
        panel = diagram.panel(heading, max(_ROW * len(rows), _ROW), across)
        marks, columns, many = colours(found), len(found.waits), len(rows) or 1
        for bar, top, below in _joined(rows):
            sides = bar.first / columns, 1 - below / many, bar.last / columns, 1 - top / many
            name = shown(bar.run.job) if bar.alone else ""
            panel.bar(sides, marks[found.group_of(bar.run)], 0.35 + 0.65 * bar.busy, name)
        every = -(-len(rows) // 24)
        named = [(1 - (at + 0.5) / many, row.label) for at, row in enumerate(rows) if at % every == 0 and not row.track]
        panel.scale([(at, render.short(shown(label), 14)) for at, label in named], lines=False)

    def _curves(
        self,
        diagram: svg.Diagram,
        about: tuple[str, Sequence[Tick]],
        curves: Sequence[tuple[str, str, Sequence[float]]],
    ) -> svg.Panel:
        """Add a panel of curves, each with its name and colour, of values from 0 to 1."""
        heading, across = about
        panel = diagram.panel(heading, _CURVE, across, [(colour, name) for name, colour, _ in curves])
        for _, colour, values in curves:
            panel.steps(values, colour, filled=True)
        return panel

    def _waits(self, diagram: svg.Diagram, found: Timeline, across: Sequence[Tick]) -> None:
        """Add the waits on a logarithmic scale: a bar from the median to the 90th percentile in each column."""
        keys = [(_CURVE_COLOURS[1], "median to 90th percentile")]
        panel = diagram.panel(wait_words(found.all_waits), _CURVE, across, keys)
        columns = len(found.waits)
        longest = max((each.p90_ns / SECOND_NS for each in found.waits if each is not None), default=0.0)

        def up(seconds: float) -> float:
            return math.log10(1 + seconds) / math.log10(1 + max(longest, 10.0) * 1.3)

        for at, each in enumerate(found.waits):
            if each is not None:
                low, high = up(each.median_ns / SECOND_NS), up(each.p90_ns / SECOND_NS)
                middle = (at + 0.5) / columns
                panel.bar((middle - 0.002, low - 0.02, middle + 0.002, high + 0.02), _CURVE_COLOURS[1])
        panel.scale([(up(at), word) for at, word in ((0, "0"), *TICKS) if at <= max(longest, 10)])

    def _memory(self, diagram: svg.Diagram, found: Timeline, across: Sequence[Tick]) -> None:
        highest = _highest_memory(found) or 1
        curves = [
            (name, colour, [each / highest for each in used.columns])
            for name, used, colour in (
                ("requested", found.memory_asked, _GROUP_COLOURS[1]),
                ("used", found.memory_used, _GROUP_COLOURS[2]),
            )
        ]
        panel = self._curves(diagram, (memory_words(found), across), curves)
        panel.scale([(at / 2, show_size(highest * at // 2)) for at in range(3)])


def _joined(rows: Sequence[TimelineRow]) -> list[tuple[LaneBar, int, int]]:
    """Return all bars, with those of one run in neighbouring rows joined: with their first and last row."""
    found: list[tuple[LaneBar, int, int]] = []
    open_: dict[tuple[int, int, int, bool], int] = {}
    for at, row in enumerate(rows):
        still: dict[tuple[int, int, int, bool], int] = {}
        for bar in row.bars:
            key = id(bar.run), bar.first, bar.last, bar.alone
            place = open_.get(key)
            if place is not None and found[place][0].busy == bar.busy:
                found[place] = found[place][0], found[place][1], at + 1
            else:
                place = len(found)
                found.append((bar, at, at + 1))
            still[key] = place
        open_ = still
    return found


def panels(spool: object) -> tuple[str, ...]:
    """Return the words of `--show`, which a shell offers."""
    return tuple(PANELS)
