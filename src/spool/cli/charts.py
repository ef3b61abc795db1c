"""Charts in verbs: the values that they show. A capability draws them; without one, a verb prints none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from spool.core.model import Result
from spool.formats.capabilities import contributed

if TYPE_CHECKING:
    from spool.query.timeline import Timeline

Tick = tuple[float, str]
"""A position on an axis, and its label."""

TICKS = (  # s
    (1, "1s"),
    (10, "10s"),
    (60, "1 min"),
    (600, "10 min"),
    (3600, "1h"),
    (36_000, "10h"),
    (86_400, "1d"),
    (7 * 86_400, "1 w"),
    (30 * 86_400, "30d"),
    (365 * 86_400, "1 a"),
)
"""Round times on an axis."""


class Bar(Struct, frozen=True):
    """The begin, the end and the mark of a bar: one of the words of MARKS, or a digit."""

    start_at_ns: int
    end_at_ns: int
    mark: str


class Line(Struct, frozen=True):
    """One row: its label and its bars."""

    label: str
    bars: Sequence[Bar]


MARKS = {"active": ("█", "#"), "pending": ("░", "+"), "completed": ("·", ".")}
"""The marks of reservations: as a block, and in ASCII."""


class CurvePanel(Struct, frozen=True):
    """One panel of a diagram: the labels of its axes, and curves by their names; all positions are from 0 to 1."""

    heading: str
    across: Sequence[Tick]
    up: Sequence[Tick]
    curves: Mapping[str, Sequence[tuple[float, float]]]


class Charts(Protocol):
    """What draws charts: `Capability.charts` names one."""

    def gantt(self, runs: Mapping[str, Sequence[Result]], begin_ns: int, end_ns: int, width: int) -> list[str]:
        """Return the runs between *begin_ns* and *end_ns*, a row for each job with its runs, oldest first."""

    def timeline(self, lines: Sequence[Line], now_ns: int, width: int) -> list[str]:
        """Return reservations over time, a row for each, and the scale below them."""

    def curve(self, values: Sequence[float], highest: float) -> str:
        """Return *values* as one row, each as high as its part of *highest*."""

    def checked(self, path: str) -> str:
        """Return *path*, the name of a file to draw. Raises UsageError if it cannot be one."""

    def runs(self, found: Timeline) -> str:
        """Return runs on the GPUs and the CPUs over time as SVG for a web page, in the colour of its text."""

    def curves(self, path: str, title: str, colours: Mapping[str, int], panels: Iterable[CurvePanel]) -> None:
        """Draw panels of curves into a file, each name in the colour of that number. Raises SpoolError."""


def charts() -> Charts | None:
    """Return what draws charts; None if nothing here does."""
    return next((drawing for _, drawing in contributed("charts")), None)
