"""Diagrams as SVG: a stack of panels, whose words stay text that can be searched and read out.

Positions within a panel are parts of it: 0 to 1 from the left, and 0 to 1 from the bottom.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape

from spool.cli.charts import Tick
from spool.core.errors import SpoolError, UsageError, cannot, shown

_WIDTH, _LEFT, _RIGHT = 1100, 96, 16  # pixels
_HEADING, _TICKS, _GAP = 24, 16, 10
_LETTER = 6.2  # pixels of a letter in a bar, on average
_KEY_LETTER, _KEY = 6.6, 26
_MANY = 4000  # bars: more have no gap between them
_ROOM_FOR_NAME = 9  # pixels

Key = tuple[str, str]
"""A colour, and what it stands for."""


def checked(path: str) -> str:
    """Return *path*, the name of a file to draw. Raises UsageError if it does not end in `.svg`."""
    if os.path.splitext(path)[1].lower() != ".svg":
        remedy = "a browser shows it; `rsvg-convert` makes a .png of it"
        raise UsageError(cannot("plot", path, "the file must be an .svg", remedy=remedy))
    return path


class Panel:
    """One panel: it is filled by its methods, and drawn by its diagram."""

    def __init__(self, heading: str, height: float, keys: Sequence[Key], across: Sequence[Tick]) -> None:
        self.heading, self.height, self.keys, self.across = heading, height, keys, across
        self._bars: dict[tuple[str, float], list[tuple[float, float, float, float]]] = {}
        self._names: list[tuple[float, float, str]] = []
        self._lines: list[tuple[str, bool, list[tuple[float, float]]]] = []
        self._up: Sequence[Tick] = ()
        self._has_lines_up = True

    def scale(self, ticks: Sequence[Tick], *, lines: bool = True) -> None:
        """Label the axis on the left, with *lines* across the panel or without."""
        self._up, self._has_lines_up = ticks, lines

    def bar(self, sides: tuple[float, float, float, float], colour: str, opacity: float = 1.0, name: str = "") -> None:
        """Add a rectangle: its left, bottom, right and top. Its *name* is written into it if there is room."""
        from rich.cells import cell_len

        self._bars.setdefault((colour, round(opacity, 1)), []).append(sides)
        left, bottom, right, top = sides
        high, wide = (top - bottom) * self.height, (right - left) * (_WIDTH - _LEFT - _RIGHT)
        if name and high >= _ROOM_FOR_NAME and cell_len(name) * _LETTER < wide:
            self._names.append(((left + right) / 2, (bottom + top) / 2, name))

    def line(self, points: Iterable[tuple[float, float]], colour: str, *, filled: bool = False) -> None:
        """Add a line through *points*; *filled*: with the area below it."""
        self._lines.append((colour, filled, list(points)))

    def steps(self, values: Sequence[float], colour: str, *, width: float = 1.0, filled: bool = False) -> None:
        """Add a line that keeps each of *values* over an equal part of *width*."""
        step = width / max(1, len(values))
        ends = [(at * step, value, (at + 1) * step) for at, value in enumerate(values)]
        self.line(
            (point for left, high, right in ends for point in ((left, high), (right, high))), colour, filled=filled
        )

    def draw(self, top: float, look: tuple[str, str, str]) -> Iterable[str]:
        """Yield the elements of the panel, whose heading begins at *top*; *look* is ground, ink, and faint lines."""
        ground, ink, faint = look
        yield _text((_LEFT, top + 15), self.heading, 12, ink)
        yield from _keys(self.keys, _WIDTH - _RIGHT, top + 15, ink)
        above, wide = top + _HEADING, _WIDTH - _LEFT - _RIGHT
        below = above + self.height

        def x(part: float) -> str:
            return f"{_LEFT + min(max(part, 0.0), 1.0) * wide:.1f}"

        def y(part: float) -> str:
            return f"{below - min(max(part, 0.0), 1.0) * self.height:.1f}"

        grid = "".join(f"M{x(at)} {above}V{below}" for at, _ in self.across)
        grid += "".join(f"M{_LEFT} {y(at)}h{wide}" for at, _ in self._up if self._has_lines_up)
        yield f'<path d="{grid}M{_LEFT} {above}V{below}h{wide}" fill="none" stroke="{faint}" stroke-width=".6"/>'
        many = sum(map(len, self._bars.values())) > _MANY
        edge = "" if many else f' stroke="{ground}" stroke-width=".5"'
        for (colour, opacity), sides in self._bars.items():
            drawn = "".join(f"M{x(left)} {y(high)}H{x(right)}V{y(low)}H{x(left)}Z" for left, low, right, high in sides)
            yield f'<path d="{drawn}" fill="{colour}" fill-opacity="{opacity}"{edge}/>'
        for colour, filled, points in self._lines:
            drawn = "L".join(f"{x(across)} {y(up)}" for across, up in points)
            if filled and points:
                area = f"M{x(points[0][0])} {below}L{drawn}L{x(points[-1][0])} {below}Z"
                yield f'<path d="{area}" fill="{colour}" fill-opacity=".15"/>'
            if drawn:
                yield f'<path d="M{drawn}" fill="none" stroke="{colour}" stroke-width="1.3"/>'
        for across, up, name in self._names:
            place = f'x="{x(across)}" y="{y(up)}" dy=".35em" font-size="10" text-anchor="middle"'
            outline = 'fill="#fff" stroke="#0008" stroke-width="2" paint-order="stroke"'
            yield f"<text {place} {outline}>{_words(name)}</text>"
        for at, label in self._up:
            yield _text((_LEFT - 6, float(y(at)) + 4), label, 10, ink, "end")
        for at, label in self.across:
            yield _text((float(x(at)), below + 13), label, 10, ink, "start" if at < 0.02 else "middle")


class Diagram:
    """A title with the meanings of the colours, and panels below each other."""

    def __init__(self, title: str, keys: Sequence[Key], *, dark: bool = False) -> None:
        self._title, self._keys = title, keys
        self._look = ("#16181c", "#e4e6ea", "#3a3f47") if dark else ("white", "#222222", "#dddddd")
        self._panels: list[Panel] = []

    def panel(self, heading: str, height: float, across: Sequence[Tick], keys: Sequence[Key] = ()) -> Panel:
        """Add a panel, *height* pixels high without its words, with the labels of the axis below it."""
        panel = Panel(heading, height, keys, across)
        self._panels.append(panel)
        return panel

    def save(self, path: str) -> None:
        """Write the file. Raises SpoolError."""
        ground, ink, _ = self._look
        parts = [_text((12, 24), self._title, 15, ink), *_keys(self._keys, _WIDTH - _RIGHT, 44, ink)]
        top = 52.0
        for panel in self._panels:
            parts += panel.draw(top, self._look)
            top += _HEADING + panel.height + _TICKS + _GAP
        size = f'width="{_WIDTH}" height="{top:.0f}" viewBox="0 0 {_WIDTH} {top:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
        text = "\n".join([head, f'<rect width="100%" height="100%" fill="{ground}"/>', *parts, "</svg>", ""])
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise SpoolError(cannot("plot", path, error.strerror or str(error))) from None


def _keys(keys: Sequence[Key], right: float, y: float, ink: str) -> Iterable[str]:
    """Yield the meanings of colours in a line that ends at *right*."""
    from rich.cells import cell_len

    left = right - sum(_KEY + _KEY_LETTER * cell_len(name) for _, name in keys)
    for colour, name in keys:
        yield f'<rect x="{left:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{colour}"/>'
        yield _text((left + 14, y), name, 11, ink)
        left += _KEY + _KEY_LETTER * cell_len(name)


def _text(at: tuple[float, float], text: str, size: int, ink: str, anchor: str = "start") -> str:
    placed = f'x="{at[0]:.1f}" y="{at[1]:.1f}" font-size="{size}" fill="{ink}" text-anchor="{anchor}"'
    return f"<text {placed}>{_words(text)}</text>"


def _words(text: str) -> str:
    return escape(shown(text))
