"""What each metric is, what is wanted of it, and how a run is shown and kept."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spoolbench.figures import Samples
from spoolbench.tools import OUT


@dataclass(frozen=True)
class Metric:
    """One figure: its words, its unit, and the target, a most or a least."""

    title: str
    unit: str
    most: float | None = None
    least: float | None = None

    def met(self, value: float) -> bool | None:
        """Tell whether *value* meets the target, None if there is none."""
        if self.most is not None:
            return value <= self.most
        return None if self.least is None else value >= self.least

    @property
    def target(self) -> str:
        """Return the target in words."""
        if self.most is not None:
            return f"≤ {self.most:g}"
        return "" if self.least is None else f"≥ {self.least:g}"


_LEAST = 0.5  # a part of a figure that is smaller everywhere is not shown, only kept

METRICS = {
    "submit": Metric("submit, one cold command", "ms", most=20),
    "submit_in_a_row": Metric("submit, each of many in a row", "ms"),
    "submit_known": Metric("submit with 10,000 waiting", "ms"),
    "dispatch_link": Metric("file linked into queued/ → first instruction", "ms", most=3),
    "dispatch_rename": Metric("file renamed into queued/ → first instruction", "ms", most=3),
    "dispatch_after_submit": Metric("submit's return → first instruction", "ms", most=3),
    "dispatch_with_submit": Metric("submit's start → first instruction", "ms"),
    "gap": Metric("end of one → start of the next, one slot", "ms", most=2.4),
    "throughput_command": Metric("submitted one by one, two slots", "jobs/s"),
    "throughput_files": Metric("1,000 files dropped one by one, two slots", "jobs/s"),
    "drain": Metric("1,000 that wait, two slots", "jobs/s", least=700),
    "system_dispatcher": Metric("system calls of the dispatcher for a drained job", ""),
    "system_wrapper": Metric("system calls of the wrapper, until the command begins", ""),
    "python_functions": Metric("calls of Python functions for a drained job", ""),
    "python_builtins": Metric("calls of built-in functions for a drained job", ""),
    "idle_empty": Metric("idle, nothing waits", "% of a core", most=0.2),
    "idle_known": Metric("idle, 10,000 wait", "% of a core", most=0.2),
    "idle_memory": Metric("memory (PSS), 10,000 wait", "MiB"),
    "ls": Metric("list with 10,000 waiting", "ms"),
    "few_dispatch": Metric("file renamed → first instruction, 10 run", "ms"),
    "many_dispatch": Metric("file renamed → first instruction, 1,000 run", "ms", most=10),
    "few_gap": Metric("end of one → start of the next, 10 run", "ms"),
    "many_gap": Metric("end of one → start of the next, 1,000 run", "ms", most=5),
    "few_cpu": Metric("CPU of the dispatcher for a short job, 10 run", "ms"),
    "many_cpu": Metric("CPU of the dispatcher for a short job, 1,000 run", "ms"),
    "many_idle": Metric("idle, 1,000 run", "% of a core", most=0.1),
    "deep_startup": Metric("start-up, 100,000 wait → first instruction", "s", most=10),
    "deep_pass": Metric("pass with nothing changed, 100,000 wait", "ms", most=20),
    "deep_look": Metric("look at every file, 100,000 wait", "ms"),
    "deep_dispatch": Metric("file renamed → first instruction, 100,000 wait", "ms"),
    "deep_submit": Metric("submit with 100,000 waiting", "ms"),
    "deep_rss": Metric("memory (RSS), 100,000 wait", "MiB", most=400),
    "deep_pss": Metric("memory (PSS), 100,000 wait", "MiB"),
    "soak_few": Metric("memory (RSS) after 2,000 short jobs", "MiB"),
    "soak_many": Metric("memory (RSS) after 10,000 short jobs", "MiB"),
    "soak_page_few": Metric("memory of the listeners, with a page, after 2,000", "MiB"),
    "soak_page_many": Metric("memory of the listeners, with a page, after 10,000", "MiB"),
    "stats": Metric("accounting, a million runs", "s"),
    "stats_by": Metric("accounting, a million runs by user", "s"),
    "stats_day": Metric("accounting, a million runs by day", "s"),
    "stats_since": Metric("accounting, the last day of them", "s"),
    "stats_rss": Metric("accounting, memory (RSS), by user", "MiB"),
    "gc_jobs": Metric("gc, ended runs of as many jobs", "s"),
    "gc_runs": Metric("gc, as many of one job", "s"),
    "plan_small": Metric("planner, pass over 1,000 of mixed shapes", "ms"),
    "plan_middle": Metric("planner, pass over 10,000", "ms"),
    "plan_pass": Metric("planner, pass over 100,000", "ms", most=150),
    "plan_again": Metric("planner, the same with the machine full", "ms", most=150),
    "plan_reasons": Metric("planner, a reason for each of 100,000", "ms"),
    "plan_index": Metric("planner, the index of 100,000 from nothing", "ms"),
    "turns_decide": Metric("arbiter, a decision that grants, 20 users with 64 asks of 4 kinds", "ms", most=1),
    "turns_decide_kinds": Metric("arbiter, the same, most asks unlike the others", "ms"),
    "turns_decide_full": Metric("arbiter, the same with too little free", "ms"),
    "turns_trip": Metric("arbiter, end and ask → grant over the socket", "ms"),
    "turns_trip_10": Metric("arbiter, the same, 10 of 100 are faster", "ms"),
    "turns_idle": Metric("arbiter, idle", "% of a core", most=0.1),
    "turns_rss": Metric("arbiter, memory (RSS)", "MiB", most=40),
    "turns_join": Metric("arbiter, connect → welcome", "ms", most=500),
    "turns_join_flood": Metric("arbiter, the same under a flood of connections", "ms", most=500),
    "turns_gap_alone": Metric("end of one → start of the next, one slot, alone", "ms"),
    "turns_gap_shared": Metric("end of one → start of the next, one slot, by lease", "ms"),
    "turns_gap_more": Metric("… difference of the medians", "ms", most=0.5),
    "turns_drain_alone": Metric("1,000 that wait, two slots, alone", "jobs/s"),
    "turns_drain_shared": Metric("1,000 that wait, two slots, by lease", "jobs/s"),
    "turns_drain_part": Metric("… by lease, as a part of alone", "", least=0.85),
}


def machine() -> dict[str, Any]:
    """Return what a reader has to know of the machine, and no more."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "load": round(os.getloadavg()[0], 2)}


def shown(number: float) -> str:
    """Return a number with three digits that mean something."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _cell(samples: list[float]) -> str:
    middle = shown(statistics.median(samples))
    return middle if len(samples) == 1 else f"{middle} ({shown(min(samples))}..{shown(max(samples))})"


def _parts(results: Mapping[str, Samples], key: str) -> list[tuple[str, list[str]]]:
    """Return the largest parts of a figure, by name, with a cell for each engine; a part has the key KEY/NAME."""
    parts = {name for samples in results.values() for name in samples if name.startswith(f"{key}/")}
    most = {part: max(statistics.median(samples.get(part, [0])) for samples in results.values()) for part in parts}
    largest = sorted((part for part in parts if most[part] >= _LEAST), key=lambda part: (-most[part], part))
    found = [[samples.get(part) for samples in results.values()] for part in largest]
    rows = [[_cell(values) if values else "-" for values in row] for row in found]
    return [(part.removeprefix(f"{key}/"), row) for part, row in zip(largest, rows, strict=True)]


def render(results: Mapping[str, Samples]) -> str:
    """Return the one table: a row for each metric, a column for each engine, medians (min..max)."""
    engines = list(results)
    rows = [["", "unit", "target", *engines, ""]]
    for key, metric in METRICS.items():
        values = [results[engine].get(key) for engine in engines]
        if any(values):
            ours = results[engines[0]].get(key)
            met = metric.met(statistics.median(ours)) if ours else None
            verdict = {True: "met", False: "MISSED", None: ""}[met]
            rows.append([metric.title, metric.unit, metric.target, *(_cell(v) if v else "-" for v in values), verdict])
            rows += [[f"  {part}", "", "", *cells, ""] for part, cells in _parts(results, key)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def markdown(results: Mapping[str, Samples]) -> str:
    """Return the same table for a page."""
    engines = list(results)
    lines = ["| figure | target | " + " | ".join(engines) + " |", "|---|---|" + "---|" * len(engines)]
    for key, metric in METRICS.items():
        values = [results[engine].get(key) for engine in engines]
        if any(values):
            cells = " | ".join(_cell(value) if value else "-" for value in values)
            title = f"{metric.title}, {metric.unit}" if metric.unit else metric.title
            lines.append(f"| {title} | {metric.target} | {cells} |")
            lines += [f"| … {part} | | {' | '.join(cells)} |" for part, cells in _parts(results, key)]
    return "\n".join(lines)


def keep(results: Mapping[str, Samples], about: dict[str, Any]) -> str:
    """Write everything to `out/` and return the path."""
    OUT.mkdir(exist_ok=True)
    path = OUT / time.strftime("%Y%m%d-%H%M%S.json", time.gmtime())
    figures = {
        engine: {
            key: {
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
                "unit": METRICS[key.partition("/")[0]].unit,
                "samples": values,
            }
            for key, values in samples.items()
        }
        for engine, samples in results.items()
    }
    path.write_text(json.dumps(about | {"figures": figures}, indent=1) + "\n")
    return str(path)
