"""The picture of a simulation as a PNG or SVG file, drawn by matplotlib: an extra, imported when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from spool.core.errors import SpoolError, UsageError, cannot
from spool.core.model import SECOND_NS
from spool.core.simulation import Curve, Discipline

KINDS = (".png", ".svg")
# Okabe and Ito 2008: told apart by everybody.
_COLOURS = ("#888888", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_TICKS = (
    (1, "1 s"),
    (10, "10 s"),
    (60, "1 min"),
    (600, "10 min"),
    (3600, "1 h"),
    (36_000, "10 h"),
    (86_400, "1 d"),
    (7 * 86_400, "1 w"),
    (30 * 86_400, "30 d"),
    (365 * 86_400, "1 a"),
)
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
    return Figure(figsize=(10, 9), layout="constrained")


def draw(
    figure: Any,
    path: str,
    waits: Mapping[Discipline, Sequence[tuple[int, float]]],
    curves: Mapping[Discipline, Curve],
    title: str,
) -> None:
    """Draw the distribution of waits, utilisation and queue length, a line for each policy, and save it."""
    gpus = any(each.gpu_utilisation is not None for each in curves.values())
    distribution, *over_time = figure.subplots(4 if gpus else 3, 1)
    distribution.set_title(title)
    _draw_waits(distribution, waits)
    _draw_curves(over_time, curves)
    for axes in (distribution, *over_time):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    distribution.legend(frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SpoolError(cannot("plot", path, error.strerror or str(error))) from None


def _look(policy: Discipline) -> dict[str, Any]:
    colour = _COLOURS[list(Discipline).index(policy) % len(_COLOURS)]
    return {"label": policy.value, "color": colour, "linewidth": 1.4}


def _draw_waits(axes: Any, waits: Mapping[Discipline, Sequence[tuple[int, float]]]) -> None:
    """Draw what part of the jobs waited no longer than so long; no wait is told apart from less than a second."""
    longest = max((points[-1][0] for points in waits.values() if points), default=0) / SECOND_NS
    end = max(longest, 10.0)
    for policy, points in waits.items():
        at_once = max((part for wait, part in points if wait <= SECOND_NS), default=0.0)
        later = [(wait / SECOND_NS, 100 * part) for wait, part in points if wait > SECOND_NS]
        last = later[-1][1] if later else 100 * at_once
        line = [(1.0, 100 * at_once), *later, (end, last)]
        axes.step([wait for wait, _ in line], [part for _, part in line], where="post", **_look(policy))
    axes.set_xscale("log")
    ticks = [(at, word) for at, word in _TICKS if at <= end]
    axes.set_xticks([at for at, _ in ticks], [word for _, word in ticks])
    axes.minorticks_off()
    axes.set_xlim(1, end)
    axes.set_ylim(0, 105)
    axes.set_xlabel("wait no longer than")
    axes.set_ylabel("share of jobs, %")


def _draw_curves(over_time: Sequence[Any], curves: Mapping[Discipline, Curve]) -> None:
    upper, *middle, lower = over_time
    length = max((each.step_ns * len(each.queue) for each in curves.values()), default=0) / SECOND_NS
    unit, factor = next((each for each in _UNITS if length >= 2 * each[1]), _UNITS[-1])
    for policy, each in curves.items():
        step = each.step_ns / SECOND_NS / factor
        edges = [step * at for at in range(len(each.queue) + 1)]
        how = _look(policy) | {"baseline": None}
        upper.stairs([100 * part for part in each.utilisation], edges, **how)
        for axes in middle:
            axes.stairs([100 * part for part in each.gpu_utilisation or ()], edges, **how)
        lower.stairs(each.queue, edges, **how)
    for axes, what in zip((upper, *middle), ("processors in use, %", "GPUs in use, %"), strict=False):
        axes.set_ylabel(what)
        axes.set_ylim(0, 105)
        axes.set_xlim(left=0)
    lower.set_ylabel("jobs that wait")
    lower.set_ylim(bottom=0)
    lower.set_xlim(left=0)
    lower.set_xlabel(f"{unit} since the first submission")
