"""A timeline as a picture: characters for a terminal, matplotlib for a file.

On a colour terminal each group has a colour, and a cell's shade shows how much of it was in use. Without colours each
group has a letter: a capital if at least half of the cell was in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from spool.cli import charts, render
from spool.core.accounting import By
from spool.core.errors import shown
from spool.core.model import SECOND_NS
from spool.core.names import engine_title
from spool.core.reasons import count_of
from spool.core.units import show_duration, show_size
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
_WIDTH_INCHES, _ROW_INCHES, _LETTER_INCHES = 11.0, 0.17, 0.062
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
    """Draws a timeline by matplotlib, as SVG or PNG according to the name of the file.

    Raises UsageError and SpoolError, also if matplotlib is missing.
    """

    def __init__(self, path: str, *, dark: bool) -> None:
        charts.figure_for(path)
        self._path = path
        self._ground, self._ink, self._faint = (
            ("#16181c", "#e4e6ea", "#3a3f47") if dark else ("white", "#222222", "#dddddd")
        )

    def draw(self, found: Timeline, panels: Sequence[str]) -> None:
        """Draw the panels that are not empty, and write the file."""
        shares = {"gpus": found.gpu_rows, "cpus": found.cpu_rows}
        wanted = [panel for panel in panels if panel != "gpus" or found.gpus]
        heights = [max(len(shares[each]) * _ROW_INCHES, 0.6) if each in shares else 1.2 for each in wanted]
        figure = charts.figure_for(self._path, (_WIDTH_INCHES, sum(heights) + 0.55 * len(wanted) + 0.8))
        figure.set_facecolor(self._ground)
        stack = figure.subplots(len(wanted), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
        for panel, axes in zip(wanted, (row[0] for row in stack), strict=True):
            self._prepare(axes, found)
            match panel:
                case "gpus":
                    self._chart(axes, found, found.gpu_rows, gpu_words(found))
                case "cpus":
                    self._chart(axes, found, found.cpu_rows, cpu_words(found))
                case "use":
                    self._use(axes, found)
                case "waits":
                    self._waits(axes, found)
                case _:
                    self._memory(axes, found)
        self._legend(figure, found)
        charts.save(figure, self._path)

    def _prepare(self, axes: Any, found: Timeline) -> None:
        """Give a panel its axis of time, in seconds since the begin, and the colours of the picture."""
        length = (found.until_at_ns - found.since_at_ns) / SECOND_NS
        ticks = charts.time_ticks(found.since_at_ns, found.until_at_ns, (found.until_at_ns - found.since_at_ns) // 10)
        axes.set_xlim(0, length)
        axes.set_xticks([(at - found.since_at_ns) / SECOND_NS for at, _ in ticks], [label for _, label in ticks])
        axes.set_facecolor(self._ground)
        axes.tick_params(colors=self._ink, labelsize=8, length=2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(self._faint)
        axes.grid(color=self._faint, linewidth=0.5)
        axes.set_axisbelow(True)

    def _head(self, axes: Any, text: str) -> None:
        axes.set_title(text, loc="left", fontsize=9, color=self._ink)

    def _chart(self, axes: Any, found: Timeline, rows: Sequence[TimelineRow], heading: str) -> None:
        step = found.step_ns / SECOND_NS
        marks = colours(found)
        boxes = _joined(rows)
        charts.boxes(
            axes,
            [(bar.first * step, top, bar.last * step, below) for bar, top, below in boxes],
            [(marks[found.group_of(bar.run)], 0.35 + 0.65 * bar.busy) for bar, _, _ in boxes],
            self._ground,
        )
        self._names(axes, found, boxes)
        every = -(-len(rows) // 24)
        axes.set_ylim(len(rows), 0)
        named = [(at + 0.5, shown(row.label)) for at, row in enumerate(rows) if at % every == 0 and not row.track]
        axes.set_yticks([at for at, _ in named], [label for _, label in named])
        axes.grid(visible=False, axis="y")
        self._head(axes, heading)

    def _names(self, axes: Any, found: Timeline, boxes: Sequence[tuple[LaneBar, int, int]]) -> None:
        """Write the name of its job into each bar that has room for it."""
        from rich.cells import cell_len

        column = found.step_ns / SECOND_NS
        marks = colours(found)
        for bar, top, below in boxes:
            name = shown(bar.run.job)
            room = (bar.last - bar.first) / len(found.waits) * _WIDTH_INCHES * 0.9
            if bar.alone and cell_len(name) * _LETTER_INCHES < room:
                ink = "white" if marks[found.group_of(bar.run)] == _BLUE else "black"
                look = {"ha": "center", "va": "center_baseline", "fontsize": 7, "color": ink, "clip_on": True}
                axes.text((bar.first + bar.last) / 2 * column, (top + below) / 2, name, **look)

    def _use(self, axes: Any, found: Timeline) -> None:
        for (name, used, there_are), colour in zip(_in_use(found), _CURVE_COLOURS, strict=False):
            self._stairs(axes, found, [100 * each / there_are for each in used.columns], name, colour)
        axes.set_ylim(0, 103)
        self._key(axes)
        self._head(axes, "in use, % of all")

    def _stairs(self, axes: Any, found: Timeline, values: Sequence[float], name: str, colour: str) -> None:
        step = found.step_ns / SECOND_NS
        edges = [step * at for at in range(len(values) + 1)]
        axes.stairs(values, edges, fill=True, alpha=0.15, color=colour)
        axes.stairs(values, edges, baseline=None, color=colour, linewidth=1.2, label=name)

    def _key(self, axes: Any) -> None:
        axes.legend(
            frameon=False,
            fontsize=8,
            labelcolor=self._ink,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=2,
            borderaxespad=0,
        )

    def _waits(self, axes: Any, found: Timeline) -> None:
        known = [
            ((at + 0.5) * found.step_ns / SECOND_NS, each.median_ns / SECOND_NS, each.p90_ns / SECOND_NS)
            for at, each in enumerate(found.waits)
            if each is not None
        ]
        at, median, p90 = ([each[part] for each in known] for part in range(3))
        axes.vlines(at, median, p90, color=_GROUP_COLOURS[4], linewidth=1, alpha=0.5, label="90% waited at most")
        axes.plot(at, median, ".", color=_GROUP_COLOURS[4], markersize=3, label="median")
        axes.set_yscale("symlog", linthresh=1)
        longest = max((*p90, 10))
        ticks = [(0, "0"), *(each for each in charts.TICKS if each[0] <= longest)]
        axes.set_yticks([each for each, _ in ticks], [label for _, label in ticks])
        axes.minorticks_off()
        axes.set_ylim(-0.3, longest * 1.3)
        self._key(axes)
        self._head(axes, wait_words(found.all_waits))

    def _memory(self, axes: Any, found: Timeline) -> None:
        highest = _highest_memory(found)
        unit, factor = ("GiB", 1 << 30) if highest >= 1 << 30 else ("MiB", 1 << 20)
        for name, used, colour in (
            ("requested", found.memory_asked, _GROUP_COLOURS[1]),
            ("used", found.memory_used, _GROUP_COLOURS[2]),
        ):
            self._stairs(axes, found, [each / factor for each in used.columns], name, colour)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(unit, fontsize=8, color=self._ink)
        self._key(axes)
        self._head(axes, memory_words(found))

    def _legend(self, figure: Any, found: Timeline) -> None:
        """Write the title, and below it the meanings of the colours."""
        figure.suptitle(title(found), x=0.01, ha="left", fontsize=11, color=self._ink)
        marks = colours(found)
        handles = [charts.patch(marks[group]) for group in found.groups]
        columns = len(handles) if sum(len(shown(group)) + 6 for group in found.groups) <= 75 else 4
        legend = figure.legend(
            handles,
            [" "] * len(handles),
            loc="outside upper right",
            ncols=columns,
            frameon=False,
            fontsize=8,
            labelcolor=self._ink,
        )
        for text, group in zip(legend.get_texts(), found.groups, strict=True):
            text.set_text(render.short(shown(group), 14))  # matplotlib leaves out a label that begins with _


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
