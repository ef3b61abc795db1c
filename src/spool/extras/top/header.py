"""The text around the list: the spool's condition, its use of the machine, each GPU, one job."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence

from rich.text import Text

from spool.cli import render
from spool.core.errors import shown
from spool.core.gpuuse import in_cells
from spool.core.model import ALIVE, Gpu, State
from spool.core.reasons import count_of
from spool.core.units import show_duration, show_size
from spool.query.overview import GpuGlance, Overview
from spool.query.rows import JobRow
from spool.query.shared import elsewhere

NARROW = 60
"""The cells below which bars are left out."""
_LEVELS = "▁▂▃▄▅▆▇█"
_LEAST_BAR, _MOST_BAR = 4, 24  # cells
_PROBLEMS = 2
_PROBLEM_LINES = 3
_LEAST_WIDTH = 32  # cells that the machine in words takes


def bar(part: float, width: int) -> str:
    """Return a line of *width* cells, drawn heavy up to *part* (0 to 1); anything above zero is visible."""
    halves = round(min(1.0, max(0.0, part)) * width * 2)
    full, half = divmod(max(1, halves) if part > 0 else 0, 2)
    return ("━" * full + "╾" * half).ljust(width, "─")


def header(seen: Overview | None, root: str, problem: str, width: int) -> Text:
    """Return the lines above the list: the spool and its counts, CPUs, memory and GPUs in use, and problems."""
    lines = list(_title(seen, root, width))
    if seen is not None and seen.machine is not None and width >= _LEAST_WIDTH:
        lines.append(_machine(seen, width))
    found = [problem] if problem else list(_problems(seen)) if seen is not None else []
    room = max(width - 4, 1)
    for line in found[:_PROBLEMS]:
        for at, part in enumerate(render.wrapped(shown(line), room)[:_PROBLEM_LINES]):
            lines.append(Text(f" {' ' if at else '!'} {render.short(part, room)}", style="bold yellow"))
    return _stacked(lines)


def _stacked(lines: Sequence[Text]) -> Text:
    """Return the lines as one text that is not wrapped again."""
    text = Text("\n").join(lines)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _title(seen: Overview | None, root: str, width: int) -> Iterator[Text]:
    """Yield the line with the spool, the counts and the service; a narrow screen has the counts on their own."""
    home = os.path.expanduser("~")
    where = f"~{root[len(home) :]}" if root.startswith(f"{home}/") else root
    counts = _counts(seen) if seen is not None else "looking …"
    word, style = _service(seen) if seen is not None else ("", "")
    beside = "" if width < NARROW else f"  {counts}"
    room = max(width - len(beside) - len(word) - 4, 8)
    left = Text.assemble((f" {render.short(shown(where), room, middle=True)}", "bold"), beside)
    yield Text.assemble(left, " " * max(2, width - left.cell_len - len(word) - 1), (word, style))
    if not beside:
        yield from (Text(f" {line}") for line in in_lines(counts, max(width - 2, 8)))


def in_lines(facts: str, width: int) -> list[str]:
    """Return *facts*, divided by " · ", in lines; one that is short is not broken."""
    parts = [part if len(part) > width // 2 else part.replace(" ", "\xa0") for part in facts.split(" · ")]
    return [line.replace("\xa0", " ") for line in render.wrapped("\xa0· ".join(parts), width)]


def _counts(seen: Overview) -> str:
    others = (State.SUBMITTED, State.QUEUED, State.HELD, State.INVALID)
    counts = [("running", seen.count(*ALIVE)), *((state.value, seen.count(state)) for state in others)]
    return " · ".join(f"{number} {word}" for word, number in counts if number or word in ("running", "queued"))


def _service(seen: Overview) -> tuple[str, str]:
    if seen.found.paused:
        return "paused", "bold yellow"
    if seen.found.dispatcher:
        return ("silent", "bold yellow") if seen.found.stale_ns is not None else ("dispatching", "green")
    return ("starting", "green") if seen.found.starting else ("no dispatcher", "yellow")


def _problems(seen: Overview) -> Iterator[str]:
    found = seen.found
    if found.paused:
        yield "the spool is paused: no job starts until `spool resume`"
    if found.unserved:
        yield "no dispatcher is running: `spool dispatch` starts one"
    elif found.stale_ns is not None:
        yield f"no heartbeat from the dispatcher for {show_duration(found.stale_ns)}; the reasons are equally old"
    if seen.gpu_problem is not None:
        yield f"the GPUs are unavailable: {seen.gpu_problem}"
    yield from seen.problems


def _machine(seen: Overview, width: int) -> Text:
    """Return how much of the machine is granted here "+" to others "/" of all, with a bar each."""
    machine = seen.machine
    assert machine is not None
    given = machine.memory_bytes - machine.memory_free_bytes
    cpus, held = machine.cpus - machine.cpus_free, sum(bool(gpu.jobs) for gpu in seen.gpus)
    more_cpus, more_bytes, more_gpus = elsewhere(seen.shared, cpus, given, held)
    kinds: list[tuple[str, int, int, int, Callable[[int], str]]] = [
        ("CPU", cpus, more_cpus, machine.cpus, str),
        ("MEM", given, more_bytes, machine.memory_bytes, render.size),
        ("GPU", held, more_gpus, len(seen.gpus), str),
    ]
    parts = [
        (name, (here + others) / whole, f"{words(here)}{f'+{words(others)}' if others else ''}/{words(whole)}")
        for name, here, others, whole, words in kinds
        if whole
    ]
    taken = sum(len(name) + len(words) + 4 for name, _, words in parts) + 2
    room = max(_LEAST_BAR, min(_MOST_BAR, (width - taken) // max(1, len(parts))))
    line = Text(" ")
    for name, part, words in parts:
        line.append(f"{name} ", style="bold")
        line.append(f"{bar(part, room)} " if width >= NARROW else "", style=_colour(part))
        line.append(f"{words}  ")
    return line


def gpu_lines(gpus: Sequence[GpuGlance], width: int, most: int) -> Text:
    """Return a line for each GPU, up to a maximum: memory, utilisation, and its users."""
    lines, room, wide = [], max(_LEAST_BAR, min(12, width // 10)), width >= NARROW
    for seen in gpus[: most if len(gpus) <= most else most - 1]:
        part, words = _memory(seen.gpu)
        percent = seen.gpu.utilisation_percent
        line = Text.assemble(
            (f" GPU {seen.gpu.index} ", "bold"),
            (f"{bar(part, room)} " if wide else "", _colour(part)),
            f"{words:<9} ",
            (f"{_computes(seen, room)} " if wide else "", _colour((percent or 0) / 100)),
            f"{'?' if percent is None else f'{percent}%':>4}  ",
            _heat(seen.gpu) if wide else "",
        )
        users = shown(", ".join(seen.jobs) or "; ".join(seen.remarks) or "idle")
        lines.append(line.append(render.short(users, max(width - line.cell_len, 1))))
    if len(gpus) > len(lines):
        lines.append(Text(f" {count_of(len(gpus) - len(lines), 'more GPU')}: see `spool gpus`"))
    return _stacked(lines)


def _colour(part: float) -> str:
    """Return the colour of a bar: green, and from three fifths on yellow, from nine tenths on red."""
    return "green" if part < 0.6 else "yellow" if part < 0.9 else "red"


def _heat(gpu: Gpu) -> str:
    """Return its temperature and power, as far as they are known, with a blank behind each."""
    known = ((gpu.temperature_c, "°C"), (gpu.power_w, "W"))
    return "".join(f"{number:>3}{unit}  " for number, unit in known if number is not None)


def _memory(gpu: Gpu) -> tuple[float, str]:
    """Return the used part of a GPU's memory, and that in words; unknown is "?"."""
    total, used = gpu.memory_total_bytes, gpu.memory_used_bytes
    return (used / total if used and total else 0.0), f"{render.size(used) or '?'}/{render.size(total) or '?'}"


def _computes(seen: GpuGlance, width: int) -> str:
    """Return how busy a GPU was in the last half hour, a blank where it is unknown; else a bar of the present."""
    if all(percent is None for percent in seen.recent):
        return bar((seen.gpu.utilisation_percent or 0) / 100, width)
    top = len(_LEVELS) - 1
    return "".join(
        " " if percent is None else _LEVELS[min(top, math.ceil(percent * top / 100))]
        for percent in in_cells(seen.recent, width)
    )


def facts(row: JobRow, now_ns: int) -> str:
    """Return the line about one job."""
    time_ns = row.time_ns(now_ns)
    words = [
        row.name,
        row.state.value if time_ns is None else f"{row.state} {show_duration(max(0, time_ns))}",
        row.progress,
        f"{row.left.words()} left" if row.left is not None else "",
        f"starts {row.start.words(now_ns)}" if row.start is not None else "",
        f"run {row.run}" if row.run is not None else "",
        f"exit {row.exit_code}" if row.exit_code and f"exit code {row.exit_code}" not in row.reason else "",
        row.reason if row.state.ended else "",
        f"{row.cpus} CPU" if row.cpus else "",
        show_size(row.memory_bytes) if row.memory_bytes else "",
        f"{row.gpus} GPU" if row.gpus else "",
        f"priority {row.priority}" if row.priority is not None else "",
        row.user or "",
        row.project or "",
        " ".join(row.tags),
    ]
    return shown(" · ".join(filter(None, words)))
