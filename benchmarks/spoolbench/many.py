"""Spool with very many running jobs: what a short job beside them costs, and what doing nothing does."""

from __future__ import annotations

import os
import random
import time
from itertools import pairwise

from spoolbench.drop import drop
from spoolbench.engines import SpoolEngine
from spoolbench.figures import Samples, Size
from spoolbench.tools import Scratch, await_stamps, cpu_ns, stamps

_FEW = 10


def many(engine: SpoolEngine, scratch: Scratch, size: Size) -> Samples:
    """Run short jobs on the one slot that is free beside few running jobs, and beside many."""
    found: Samples = {}
    for count, prefix in ((min(_FEW, size.running), "few"), (size.running, "many")):
        for key, values in _beside(engine, scratch, size, count, idle=prefix == "many").items():
            found[f"{prefix}_{key}"] = values
    return found


def _beside(engine: SpoolEngine, scratch: Scratch, size: Size, count: int, *, idle: bool) -> Samples:
    engine.start(count + 1)
    try:
        held = scratch.fresh("held")
        drop(str(engine.root), count, "held", [scratch.stamp, held, "0", scratch.gate], workdir="/")
        if not await_stamps(held, count, size.timeout_s, 0.05):
            raise TimeoutError(f"{count} jobs do not run at once")
        time.sleep(min(10.0, size.idle_s))  # until all is written down
        found = {"dispatch": _dispatch(engine, scratch, size)}
        found["gap"], found["cpu"] = _gap(engine, scratch, size)
        if idle:
            time.sleep(min(5.0, size.idle_s))
            found["idle"] = [_share_of_a_core(engine.pids()[0], size.idle_s)]
        return found
    finally:
        engine.stop()
        scratch.open_gate()


def _dispatch(engine: SpoolEngine, scratch: Scratch, size: Size) -> list[float]:
    """Return the milliseconds from the renaming of a file to the first instruction, job after job."""
    found = []
    for number in range(1 + size.dispatches):
        file, name = scratch.fresh("many"), f"dispatch{number}"
        staged = engine.stage(name, [scratch.stamp, file], workdir="/")
        begun = time.time_ns()
        os.rename(staged, engine.queued(name))
        if not await_stamps(file, 1, 60, 0.001):
            raise TimeoutError("a short job never started")
        if number:  # the first one warms up
            found.append((stamps(file)[0][0] - begun) / 1e6)
        time.sleep(0.1 + random.random() * 0.05)
    return found


def _gap(engine: SpoolEngine, scratch: Scratch, size: Size) -> tuple[list[float], list[float]]:
    """Return the milliseconds between jobs of 30 ms, and the dispatcher's CPU milliseconds for each of them."""
    file, pid = scratch.fresh("many"), engine.pids()[0]
    before = cpu_ns(pid)
    drop(str(engine.root), size.gap_jobs, "gap", [scratch.stamp, file, "30"], workdir="/")
    if not await_stamps(file, size.gap_jobs, size.timeout_s):
        raise TimeoutError(f"only {len(stamps(file))} of {size.gap_jobs} short jobs ran")
    time.sleep(min(1.0, size.idle_s))  # the paperwork of the last
    used = (cpu_ns(pid) - before) / size.gap_jobs / 1e6
    return [(after[0] - one[1]) / 1e6 for one, after in pairwise(stamps(file))], [used]


def _share_of_a_core(pid: int, seconds: float) -> float:
    before, begun = cpu_ns(pid), time.monotonic_ns()
    time.sleep(seconds)
    return 100 * (cpu_ns(pid) - before) / (time.monotonic_ns() - begun)
