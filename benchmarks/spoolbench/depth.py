"""Spool with very many waiting jobs: the start-up, a pass with nothing changed, memory, and a start at that depth."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from spoolbench.drop import drop
from spoolbench.engines import SpoolEngine
from spoolbench.figures import Samples, Size
from spoolbench.tools import Scratch, await_stamps, memory_bytes, stamps


def depth(engine: SpoolEngine, scratch: Scratch, size: Size) -> Samples:
    """Serve a spool in which jobs wait already; the one slot is taken by the first of them to start."""
    found: Samples = {}
    engine.prepare(1)
    drop(str(engine.root), size.deep, "wait", ["/bin/true"], numbered=True)
    first = scratch.fresh("first")
    os.rename(
        engine.stage("first", [scratch.stamp, first, "0", scratch.gate], priority=255, workdir="/"),
        engine.queued("first"),
    )
    begun = time.time_ns()
    engine.serve()
    try:
        if not await_stamps(first, 1, size.timeout_s):
            raise TimeoutError("nothing starts")
        found["deep_startup"] = [(stamps(first)[0][0] - begun) / 1e9]
        time.sleep(min(20.0, size.idle_s))  # until it has looked again and told everybody
        rss, pss = memory_bytes(engine.pids()[0])
        found["deep_rss"], found["deep_pss"] = [rss / 2**20], [pss / 2**20]
        found["deep_dispatch"] = []
        for number in range(size.dispatches):
            file = scratch.fresh("deep")
            staged = engine.stage(f"small{number}", [scratch.stamp, file], cpus=0, priority=200, workdir="/")
            dropped = time.time_ns()
            os.rename(staged, engine.queued(f"small{number}"))
            if not await_stamps(file, 1, 120, 0.002):
                raise TimeoutError("a small job never started")
            found["deep_dispatch"].append((stamps(file)[0][0] - dropped) / 1e6)
            time.sleep(0.2)
        found["deep_submit"] = [engine.run(engine.submit(["/bin/true"]))[1] * 1e3 for _ in range(size.lists)]
    finally:
        engine.stop()
        scratch.open_gate(2)
    return found | _from_inside(engine, size)


def _from_inside(engine: SpoolEngine, size: Size) -> Samples:
    """Have a dispatcher in a process of its own run passes on the same spool; what runs there has ended."""
    (engine.root / "paused").touch()
    argv = [sys.executable, "-c", _INSIDE, str(engine.root), str(10 if size.deep > 1000 else 2)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=size.timeout_s, env=engine.env, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    numbers = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
    return {"deep_pass": numbers[0], "deep_look": numbers[1]}


_INSIDE = """
import sys, time
from spool.dispatcher.loop import Dispatcher
from spool.store.locked_spool import LockedSpool
dispatcher = Dispatcher(LockedSpool(sys.argv[1]))
dispatcher.open()
dispatcher.turn()
for everything in (False, True):
    times = []
    for _ in range(int(sys.argv[2])):
        dispatcher.watcher.hints.append(("queued", "notes.txt~"))
        dispatcher.watcher.lost = everything
        begun = time.perf_counter()
        dispatcher.turn()
        times.append((time.perf_counter() - begun) * 1e3)
    print(*times)
"""
