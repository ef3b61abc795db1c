"""Drawings of a terminal as SVG: what a command printed, a screen, or a session that types and answers by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from rich.cells import cell_len
from rich.color import Color, ColorType
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

Line = Sequence[Segment]

_WIDTH, _HEIGHT, _EDGE = 8.4, 18, 14  # of a cell, and the space around all of them
_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
_PAPER = {"dark": ("#0d1117", "#e6edf3"), "light": ("#ffffff", "#1f2328")}
_COLOURS = {
    "dark": ("#484f58", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf", "#b1bac4"),
    "light": ("#24292f", "#cf222e", "#116329", "#7d4e00", "#0969da", "#8250df", "#1b6f77", "#57606a"),
}


def lines_of(printed: str) -> list[Line]:
    """Return what a command printed, with its colours, as lines."""
    console = Console(width=1000, color_system="truecolor")
    return [list(Text.from_ansi(line).render(console)) for line in printed.splitlines()]


def still(lines: Sequence[Line], columns: int, theme: str) -> str:
    """Return the picture of some lines."""
    drawing = _Drawing(columns, theme)
    return drawing.svg(len(lines), "".join(drawing.line(y, line) for y, line in enumerate(lines)))


def session(frames: Sequence[tuple[float, Sequence[Line]]], columns: int, theme: str) -> str:
    """Return a picture that goes through *frames*, each with the seconds for which it is seen, again and again.

    Where animations are unwanted, it is the last frame. A line that stays is in the file once.
    """
    drawing = _Drawing(columns, theme)
    rows, total_s = max(len(lines) for _, lines in frames), sum(seconds for seconds, _ in frames)
    ends = [0.0]
    for seconds, _ in frames:
        ends.append(ends[-1] + seconds)
    body, rules = "", {}
    for y in range(rows):
        begun = 0
        texts = [drawing.line(y, lines[y]) if y < len(lines) else "" for _, lines in frames]
        for at in range(1, len(frames) + 1):
            if at < len(frames) and texts[at] == texts[begun]:
                continue
            if texts[begun]:
                name = f"s{begun}-{at}"
                start, end = (f"{100 * ends[each] / total_s:.2f}%" for each in (begun, at))
                first = "" if begun == 0 else "0%{visibility:hidden}"
                last = "" if at == len(frames) else f"{end}{{visibility:hidden}}"
                rules[name] = f"@keyframes {name}{{{first}{start}{{visibility:visible}}{last}}}"
                rest = "visible" if at == len(frames) else "hidden"
                look = f"visibility:{rest};animation:{name} {total_s:.1f}s step-end infinite"
                body += f'<g style="{look}">{texts[begun]}</g>'
            begun = at
    return drawing.svg(rows, body, "".join(rules.values()))


class _Drawing:
    """One picture: its colours become classes."""

    def __init__(self, columns: int, theme: str) -> None:
        self._columns, self._theme = columns, theme
        self._paper, self._ink = _PAPER[theme]
        self._classes: dict[str, str] = {}

    def line(self, y: int, segments: Iterable[Segment]) -> str:
        """Return one line of text."""
        x, found = 0, ""
        for segment in Segment.simplify(segments):
            style = segment.style or Style()
            ink, paper = self._colour(style.color, self._ink), self._colour(style.bgcolor, self._paper)
            if style.reverse:
                ink, paper = paper, ink
            width = cell_len(segment.text)
            if paper != self._paper:
                found += f'<rect x="{self._x(x)}" y="{y * _HEIGHT}" width="{width * _WIDTH:.1f}" height="{_HEIGHT}" '
                found += f'fill="{paper}"/>'
            for word, at in _words(segment.text):
                look = self._class(style, ink)
                found += f'<text x="{self._x(x + at)}" y="{y * _HEIGHT + 13}" {look}'
                found += f'textLength="{cell_len(word) * _WIDTH:.1f}">{escape(word, quote=False)}</text>'
            x += width
        return found

    def svg(self, rows: int, body: str, rules: str = "") -> str:
        """Return the whole document."""
        width, height = self._columns * _WIDTH + 2 * _EDGE, rows * _HEIGHT + 2 * _EDGE
        looks = "".join(f".{name}{{{look}}}" for look, name in self._classes.items())
        calm = "@media(prefers-reduced-motion:reduce){g{animation:none!important}}" if rules else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.1f} {height}" width="{width:.1f}">'
            f"<style>text{{font:14px {_FONT};fill:{self._ink};white-space:pre}}{looks}{rules}{calm}</style>"
            f'<rect width="100%" height="100%" rx="8" fill="{self._paper}" stroke="#8b949e" stroke-opacity=".4"/>'
            f'<g transform="translate({_EDGE} {_EDGE})">{body}</g></svg>\n'
        )

    def _x(self, cells: int) -> str:
        return f"{cells * _WIDTH:.1f}"

    def _class(self, style: Style, ink: str) -> str:
        look = f"fill:{ink};" if ink != self._ink else ""
        look += "font-weight:bold;" if style.bold else ""
        look += "font-style:italic;" if style.italic else ""
        look += "fill-opacity:.66;" if style.dim else ""
        if not look:
            return ""
        return f'class="{self._classes.setdefault(look, f"c{len(self._classes)}")}" '

    def _colour(self, colour: Color | None, default: str) -> str:
        if colour is None or colour.type is ColorType.DEFAULT:
            return default
        if colour.number is not None and colour.number < 16:
            return _COLOURS[self._theme][colour.number % 8]
        red, green, blue = colour.get_truecolor()
        return f"#{red:02x}{green:02x}{blue:02x}"


def _words(text: str) -> Iterable[tuple[str, int]]:
    """Yield the parts of a text between wide gaps, each with its place: so a gap needs no width of its own."""
    at = 0
    for part in text.replace("   ", "\0\0\0").split("\0"):
        bare = part.strip(" ")
        if bare:
            yield bare, at + len(part) - len(part.lstrip(" "))
        at += cell_len(part) + 1
