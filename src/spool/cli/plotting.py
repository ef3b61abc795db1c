"""The picture of a simulation as a PNG or SVG file, drawn by matplotlib: an extra, imported when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from spool.core.errors import SpoolError, UsageError, cannot
from spool.core.measures import Curve
from spool.core.model import SECOND_NS
from spool.core.simulation import Discipline

KINDS = (".png", ".svg")
_COLOURS = {Discipline.FIFO: "#888888", Discipline.EASY: "#0072b2", Discipline.SPOOL: "#d55e00"}  # Okabe and Ito 2008
_UNITS = (("days", 86_400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def ready(path: str) -> Any:
    """Return matplotlib's figure, made sure that *path* can be drawn. Raises UsageError and SpoolError."""
    if os.path.splitext(path)[1].lower() not in KINDS:
        raise UsageError(cannot("plot", path, "a picture is a .png or an .svg"))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        remedy = "`pip install 'spool-scheduler[plot]'`, or `pip install matplotlib` where spool is installed"
        raise SpoolError(cannot("plot", path, "matplotlib is not installed", remedy=remedy)) from None
    return Figure(figsize=(10, 6), layout="constrained")


def draw(figure: Any, path: str, curves: Mapping[Discipline, Curve], title: str) -> None:
    """Draw utilisation and queue length over time, a line for each policy, and save it."""
    upper, lower = figure.subplots(2, 1, sharex=True)
    length = max((each.step_ns * len(each.queue) for each in curves.values()), default=0) / SECOND_NS
    unit, factor = next((each for each in _UNITS if length >= 2 * each[1]), _UNITS[-1])
    for policy, each in curves.items():
        step = each.step_ns / SECOND_NS / factor
        edges = [step * at for at in range(len(each.queue) + 1)]
        how = {"label": policy.value, "color": _COLOURS[policy], "linewidth": 1.4, "baseline": None}
        upper.stairs([100 * part for part in each.utilisation], edges, **how)
        lower.stairs(each.queue, edges, **how)
    upper.set_title(title)
    upper.set_ylabel("processors in use, %")
    upper.set_ylim(0, 105)
    lower.set_ylabel("jobs that wait")
    lower.set_ylim(bottom=0)
    lower.set_xlim(left=0)
    lower.set_xlabel(f"{unit} since the first submission")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    lower.legend(frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SpoolError(cannot("plot", path, error.strerror or str(error))) from None
