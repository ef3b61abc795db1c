"""Diagrams as SVG: a stack of panels, whose words stay text that can be searched and read out.

Positions within a panel are parts of it: 0 to 1 from the left, and 0 to 1 from the bottom.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from msgspec import Struct, field
from rich.cells import cell_len

from spool.cli import render
from spool.cli.render import CurvePanel, Tick
from spool.core.errors import SpoolError, UsageError, cannot, shown

_WIDTH, _LEFT, _RIGHT = 1100, 96, 16  # pixels
_INNER = _WIDTH - _LEFT - _RIGHT
_HEADING, _TICKS, _GAP = 24, 16, 10
_LETTER = 6.2  # pixels of a letter in a bar, on average
_KEY_LETTER, _KEY = 6.6, 26
_MANY = 4000  # bars: more have no gap between them
_ROOM_FOR_NAME = 9  # pixels
_ROOM_TO_POINT = 8  # pixels: a narrower bar has no words of its own below the mouse

_COLOURS = (render.GREY, "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito 2008: safe for colour-blind readers. The first is grey, the last black."""
_CURVES = 150  # pixels

Key = tuple[str, str]
"""A colour, and what it stands for."""


class SvgBar(Struct, frozen=True):
    """A rectangle. Its `name` is written into it if there is room; `words` are shown below the mouse."""

    left: float
    bottom: float
    right: float
    top: float
    colour: str
    opacity: float = 1.0
    name: str = ""
    words: str = ""


class SvgLine(Struct, frozen=True):
    """A line through points; `filled`: with the area below it."""

    points: Sequence[tuple[float, float]]
    colour: str
    filled: bool = False


class SvgPanel(Struct):
    """One panel, `height` pixels high without its words: the labels of its axes, and what is drawn in it."""

    heading: str
    height: float
    across: Sequence[Tick]
    up: Sequence[Tick] = ()
    has_lines_up: bool = True
    keys: Sequence[Key] = ()
    bars: list[SvgBar] = field(default_factory=list)
    lines: list[SvgLine] = field(default_factory=list)

    def draw(self, begin: float) -> Iterator[str]:
        """Yield the elements of the panel, whose heading begins at *begin*."""
        yield _text((_LEFT, begin + 15), self.heading, 12)
        yield from _keys(self.keys, begin + 15)
        above = begin + _HEADING
        below = above + self.height

        def x(part: float) -> str:
            return f"{_LEFT + min(max(part, 0.0), 1.0) * _INNER:.1f}"

        def y(part: float) -> str:
            return f"{below - min(max(part, 0.0), 1.0) * self.height:.1f}"

        grid = "".join(f"M{x(at)} {above}V{below}" for at, _ in self.across)
        grid += "".join(f"M{_LEFT} {y(at)}h{_INNER}" for at, _ in self.up if self.has_lines_up)
        frame = f"M{_LEFT} {above}V{below}h{_INNER}"
        yield f'<path d="{grid}{frame}" fill="none" stroke="currentColor" stroke-opacity=".15" stroke-width=".6"/>'
        yield "<g>" if len(self.bars) > _MANY else '<g class="bars" stroke-width=".5">'
        alike: dict[tuple[str, float], str] = {}  # the outlines of bars without words
        for bar in self.bars:
            outline = f"M{x(bar.left)} {y(bar.top)}H{x(bar.right)}V{y(bar.bottom)}H{x(bar.left)}Z"
            look = bar.colour, round(bar.opacity, 2)
            if bar.words and (bar.right - bar.left) * _INNER >= _ROOM_TO_POINT:
                yield _filled(outline, look, f"<title>{_words(bar.words)}</title>")
            else:
                alike[look] = alike.get(look, "") + outline
        yield from (_filled(outline, look) for look, outline in alike.items())
        yield "</g>"
        for line in filter(lambda line: line.points, self.lines):
            drawn = "L".join(f"{x(across)} {y(up)}" for across, up in line.points)
            if line.filled:
                area = f"M{x(line.points[0][0])} {below}L{drawn}L{x(line.points[-1][0])} {below}Z"
                yield _filled(area, (line.colour, 0.15))
            yield f'<path d="M{drawn}" fill="none" stroke="{line.colour}" stroke-width="1.3"/>'
        for bar in self.bars:
            high, wide = (bar.top - bar.bottom) * self.height, (bar.right - bar.left) * _INNER
            if bar.name and high >= _ROOM_FOR_NAME and cell_len(bar.name) * _LETTER < wide:
                place = f'x="{x((bar.left + bar.right) / 2)}" y="{y((bar.bottom + bar.top) / 2)}" dy=".35em"'
                outline = 'fill="#fff" stroke="#0008" stroke-width="2" paint-order="stroke" pointer-events="none"'
                yield f'<text {place} font-size="10" text-anchor="middle" {outline}>{_words(bar.name)}</text>'
        for at, label in self.up:
            yield _text((_LEFT - 6, float(y(at)) + 4), label, 10, "end")
        for at, label in self.across:
            yield _text((float(x(at)), below + 13), label, 10, "start" if at < 0.02 else "middle")


def document(title: str, keys: Sequence[Key], panels: Iterable[SvgPanel], *, dark: bool = False) -> str:
    """Return a file: a title with the meanings of the colours, and the panels below each other."""
    ground, ink = ("#16181c", "#e4e6ea") if dark else ("white", "#222222")
    parts, height = _stacked(44, keys, panels)
    size = f'width="{_WIDTH}" height="{height:.0f}" font-family="sans-serif"'
    look = f'color="{ink}" stroke="{ground}" stroke-width="0"'
    above = [f'<rect width="100%" height="100%" fill="{ground}"/>', _text((12, 24), title, 15)]
    return _element(f'xmlns="http://www.w3.org/2000/svg" {size} {look}', [*above, *parts], height)


def element(keys: Sequence[Key], panels: Iterable[SvgPanel]) -> str:
    """Return the same without the title for a web page, in the colour of its text and on its ground."""
    return _element('class="diagram"', *_stacked(12, keys, panels))


def _stacked(y: float, keys: Sequence[Key], panels: Iterable[SvgPanel]) -> tuple[list[str], float]:
    """Return the meanings of the colours at *y* with the panels below, and how high that is."""
    parts, height = [*_keys(keys, y)], y + 8
    for panel in panels:
        parts += panel.draw(height)
        height += _HEADING + panel.height + _TICKS + _GAP
    return parts, height


def _element(attributes: str, parts: Sequence[str], height: float) -> str:
    return "\n".join([f'<svg {attributes} viewBox="0 0 {_WIDTH} {height:.0f}">', *parts, "</svg>", ""])


def checked(path: str) -> str:
    """Return *path*, the name of a file to draw. Raises UsageError if it does not end in `.svg`."""
    if os.path.splitext(path)[1].lower() != ".svg":
        remedy = "a browser shows it; `rsvg-convert` makes a .png of it"
        raise UsageError(cannot("plot", path, "the file must be an .svg", remedy=remedy))
    return path


def save(path: str, text: str) -> None:
    """Write the file. Raises SpoolError."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SpoolError(cannot("plot", path, error.strerror or str(error))) from None


def curves(path: str, title: str, colours: Mapping[str, int], panels: Iterable[CurvePanel]) -> None:
    """Draw panels of curves as SVG, each name in the colour of that number. Raises SpoolError."""
    of = {name: _COLOURS[number % len(_COLOURS)] for name, number in colours.items()}
    drawn = [
        SvgPanel(
            each.heading,
            _CURVES,
            each.across,
            each.up,
            lines=[SvgLine(points, of[name]) for name, points in each.curves.items()],
        )
        for each in panels
    ]
    save(path, document(title, [(colour, name) for name, colour in of.items()], drawn))


def _filled(outline: str, look: tuple[str, float], inside: str = "") -> str:
    return f'<path d="{outline}" fill="{look[0]}" fill-opacity="{look[1]}">{inside}</path>'


def _keys(keys: Sequence[Key], y: float) -> Iterator[str]:
    """Yield the meanings of colours in a line that ends on the right."""
    left = _WIDTH - _RIGHT - sum(_KEY + _KEY_LETTER * cell_len(name) for _, name in keys)
    for colour, name in keys:
        yield f'<rect x="{left:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{colour}"/>'
        yield _text((left + 14, y), name, 11)
        left += _KEY + _KEY_LETTER * cell_len(name)


def _text(at: tuple[float, float], text: str, size: int, anchor: str = "start") -> str:
    placed = f'x="{at[0]:.1f}" y="{at[1]:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {placed} fill="currentColor" stroke="none">{_words(text)}</text>'


def _words(text: str) -> str:
    return escape(shown(text))
