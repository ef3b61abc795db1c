"""The figures that a user can take from outside, one round of each at a time, so that engines can alternate.

Every function takes an engine and returns samples by metric; `METRICS` in `table.py` says what each means.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from spoolbench.drop import drop
from spoolbench.engines import SpoolEngine
from spoolbench.tools import Scratch, await_stamps, cpu_ns, family, memory_bytes, stamps, until

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    rounds: int = 3
    submits: int = 10  # cold submissions timed one by one, in a round
    in_a_row: int = 200
    dispatches: int = 15
    jobs: int = 1000
    by_command: int = 200  # jobs of the throughput through the command line
    gap_jobs: int = 60
    idle_s: float = 60.0
    known: int = 10_000
    deep: int = 100_000
    lists: int = 7
    timeout_s: float = 300.0
    history: int = 1_000_000
    ended: int = 5_000
    running: int = 1_000
    counted: int = 300
    soaked: int = 2_000
    trips: int = 1_000
    joins: int = 10


SMOKE = Size(1, 2, 5, 2, 20, 5, 5, 0.5, 50, 300, 2, 60.0, 2_000, 50, 20, 20, 10, 20, 2)


def limited(engine: Any, test: str, key: str, ours: int) -> int:
    """Return *ours*, or fewer where the peer's class says that it is slow at, or cannot do, so many."""
    return min(ours, engine.opts.get(test, {}).get(key, ours)) if hasattr(engine, "opts") else ours


def hold(engine: Any, scratch: Scratch, slots: int) -> None:
    """Occupy *slots* slots until the gate opens."""
    file = scratch.fresh("held")
    for _ in range(slots):
        _must(engine, engine.submit([scratch.stamp, file, "0", scratch.gate]))
    if not await_stamps(file, slots, 60):
        raise TimeoutError(f"{engine.name}: {slots} jobs do not run at once")


def _must(engine: Any, argv: list[str]) -> float:
    code, seconds = engine.run(argv)
    if code:
        raise RuntimeError(f"{engine.name}: {' '.join(argv[:6])} … ends with {code}")
    return float(seconds)


def submit(engine: Any, scratch: Scratch, size: Size) -> Samples:
    """Cold submissions while the only slot is taken: one by one, and many in a row."""
    command = ["/bin/true"]
    in_a_row = limited(engine, "submit", "seq", size.in_a_row)
    engine.start(1)
    try:
        hold(engine, scratch, 1)
        _must(engine, engine.submit(command))
        single = []
        for _ in range(size.submits):
            single.append(_must(engine, engine.submit(command)) * 1e3)
            time.sleep(0.03)
        begun = time.perf_counter()
        for _ in range(in_a_row):
            _must(engine, engine.submit(command))
        row = (time.perf_counter() - begun) / in_a_row * 1e3
    finally:
        engine.stop()
        scratch.open_gate(1)
    return {"submit": single, "submit_in_a_row": [row]}


def dispatch(engine: Any, scratch: Scratch, size: Size) -> Samples:
    """From a submission to the first instruction of the command, the queue empty and a slot free."""
    found: Samples = {"dispatch_after_submit": [], "dispatch_with_submit": []}
    engine.start(engine.opts.get("dispatch", {}).get("slots", 1) if hasattr(engine, "opts") else 1)
    try:
        for number in range(1 + limited(engine, "dispatch", "reps", size.dispatches)):
            file = scratch.fresh("dispatch")
            begun = time.time_ns()
            _must(engine, engine.submit([scratch.stamp, file]))
            returned = time.time_ns()
            if not await_stamps(file, 1, 60, 0.001):
                raise TimeoutError(f"{engine.name}: a job never started")
            if number:  # the first one warms up
                start = stamps(file)[0][0]
                found["dispatch_after_submit"].append((start - returned) / 1e6)
                found["dispatch_with_submit"].append((start - begun) / 1e6)
            time.sleep(engine.settle * 0.4 + random.random() * 0.1)
    finally:
        engine.stop()
    if isinstance(engine, SpoolEngine):
        found |= _drops(engine, scratch, size)
    return found


def _drops(engine: SpoolEngine, scratch: Scratch, size: Size) -> Samples:
    found: Samples = {"dispatch_link": [], "dispatch_rename": []}
    engine.start(1)
    try:
        for how, place in (("dispatch_link", os.link), ("dispatch_rename", os.rename)):
            for number in range(1 + size.dispatches):
                file, name = scratch.fresh("drop"), f"{how}{number}"
                staged = engine.stage(name, [scratch.stamp, file], workdir="/")
                begun = time.time_ns()
                place(staged, engine.queued(name))
                if not await_stamps(file, 1, 60, 0.001):
                    raise TimeoutError("a dropped job never started")
                if number:
                    found[how].append((stamps(file)[0][0] - begun) / 1e6)
                time.sleep(0.02 + random.random() * 0.05)
    finally:
        engine.stop()
    return found


def throughput(engine: Any, scratch: Scratch, size: Size) -> Samples:
    """Submitted one after the other to two slots, from the first submission to the last end: jobs per second."""
    count = min(size.by_command, limited(engine, "thru", "n", size.by_command))
    found: Samples = {}
    engine.start(2)
    try:
        file = scratch.fresh("throughput")
        begun = time.time_ns()
        for _ in range(count):
            _must(engine, engine.submit([scratch.stamp, file]))
        found["throughput_command"] = [_rate(engine, file, count, begun, size)]
    finally:
        engine.stop()
    if isinstance(engine, SpoolEngine):
        engine.start(2)
        try:
            file = scratch.fresh("throughput")
            begun = time.time_ns()
            drop(str(engine.root), size.jobs, "drop", [scratch.stamp, file], workdir="/")
            found["throughput_files"] = [_rate(engine, file, size.jobs, begun, size)]
        finally:
            engine.stop()
    return found


def drain(engine: Any, scratch: Scratch, size: Size) -> Samples:
    """Jobs that wait already, let go at once to two slots: jobs per second."""
    count = limited(engine, "drain", "n", size.jobs)
    engine.start(2)
    try:
        hold(engine, scratch, 2)
        file = scratch.fresh("drain")
        command = engine.bulk(count, [scratch.stamp, file])
        if command:
            _must(engine, command)
        else:
            for _ in range(count):
                _must(engine, engine.submit([scratch.stamp, file]))
        time.sleep(1.0)
        begun = time.time_ns()
        scratch.open_gate()
        return {"drain": [_rate(engine, file, count, begun, size)]}
    finally:
        engine.stop()
        scratch.open_gate(0.1)


def _rate(engine: Any, file: str, count: int, begun_ns: int, size: Size) -> float:
    if not await_stamps(file, count, size.timeout_s, 0.02):
        raise TimeoutError(f"{engine.name}: only {len(stamps(file))} of {count} jobs ran")
    return count / (max(end for _, end in stamps(file)) - begun_ns) * 1e9


def gap(engine: Any, scratch: Scratch, size: Size) -> Samples:
    """One slot, jobs of 30 ms: from the end of one to the start of the next."""
    count = limited(engine, "gap", "n", size.gap_jobs)
    engine.start(1)
    try:
        hold(engine, scratch, 1)
        file = scratch.fresh("gap")
        for _ in range(count):
            _must(engine, engine.submit([scratch.stamp, file, "30"]))
        scratch.open_gate()
        if not await_stamps(file, count, size.timeout_s):
            raise TimeoutError(f"{engine.name}: only {len(stamps(file))} of {count} jobs ran")
    finally:
        engine.stop()
        scratch.open_gate(0.1)
    seen = stamps(file)
    return {"gap": [(after[0] - before[1]) / 1e6 for before, after in pairwise(seen)]}


def idle(engine: Any, scratch: Scratch, size: Size) -> Samples:
    """What doing nothing costs, with nothing waiting and with many jobs waiting, and listing them."""
    found: Samples = {}
    engine.start(1)
    try:
        time.sleep(min(3.0, size.idle_s))
        found["idle_empty"] = [_share_of_a_core(engine, size.idle_s)]
        hold(engine, scratch, 1)
        known = min(size.known, max(engine.opts.get("known", {}).get("sizes", (size.known,))))
        command = engine.bulk(known, ["/bin/true"])
        if command is None:
            for _ in range(known):
                _must(engine, engine.submit(["/bin/true"]))
        elif known > 1000 and not isinstance(engine, SpoolEngine):
            for _ in range(known // 1000):  # one peer takes no more at once
                _must(engine, engine.bulk(1000, ["/bin/true"]))
        else:
            _must(engine, command)
        if isinstance(engine, SpoolEngine):
            until(lambda: _waiting_seen(engine) >= known, 120, "all waiting jobs in state.json")
        time.sleep(min(5.0, size.idle_s))
        found["idle_known"] = [_share_of_a_core(engine, size.idle_s)]
        found["idle_memory"] = [sum(memory_bytes(pid)[1] for pid in family(engine.pids())) / 2**20]
        found["submit_known"] = [_must(engine, engine.submit(["/bin/true"])) * 1e3 for _ in range(size.lists)]
        for name, argv in engine.lists().items():
            for _ in range(size.lists):
                code, seconds = engine.run(argv)
                if code == 0 and name == next(iter(engine.lists())):
                    found.setdefault("ls", []).append(seconds * 1e3)
    finally:
        engine.stop()
        scratch.open_gate(1)
    return found


def _waiting_seen(engine: SpoolEngine) -> int:
    return (engine.root / "state.json").read_bytes().count(b'"queued"')


def _share_of_a_core(engine: Any, seconds: float) -> float:
    """Return per cent of one core, over all processes of the engine but jobs that only wait at the gate."""
    pids = family(engine.pids())
    before = {pid: cpu_ns(pid) for pid in pids}
    begun = time.monotonic_ns()
    time.sleep(seconds)
    return 100 * sum(cpu_ns(pid) - before[pid] for pid in pids) / (time.monotonic_ns() - begun)


FIGURES = {
    "submit": submit,
    "dispatch": dispatch,
    "throughput": throughput,
    "drain": drain,
    "gap": gap,
    "idle": idle,
}
