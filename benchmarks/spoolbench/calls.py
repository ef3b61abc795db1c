"""What a drained job costs in calls: those of the system, counted by strace, and those of Python functions.

Other than times they hardly depend on the machine, its load or the hour. Both counters slow down what they count, so
that a dispatcher finds more ends in one pass than it would by itself.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from spoolbench.drop import drop
from spoolbench.engines import SpoolEngine
from spoolbench.figures import Samples, Size, hold
from spoolbench.tools import MissingError, Scratch, await_stamps, family, stamps, until

_SLOTS = 2
_CALL = re.compile(r"(\d+) +([a-z]\w*)\((.*)")


def calls(engine: Any, scratch: Scratch, size: Size) -> Samples:
    """Count, for a drained job: the system calls of the dispatcher and of what starts the command; Python calls."""
    found: Samples = {}
    try:
        found |= _system_calls(engine, scratch, size)
    except MissingError as missing:
        print(f"left out the system calls of {engine.name}: {missing}", file=sys.stderr)
    if isinstance(engine, SpoolEngine):
        found |= _python_calls(engine, scratch, size)
    return found


def _system_calls(engine: Any, scratch: Scratch, size: Size) -> Samples:
    engine.start(_SLOTS)
    try:
        hold(engine, scratch, _SLOTS)
        (loop,) = engine.pids()
        unheld = {pid for pid in family([loop]) if not _leads_to(pid, scratch.stamp)} | {loop}
        file, log = scratch.fresh("calls"), Path(scratch.fresh("strace"))
        if engine.run(engine.bulk(size.counted, [scratch.stamp, file]))[0]:
            raise RuntimeError(f"{engine.name}: the jobs cannot be dropped")
        time.sleep(1.0)
        ours = _threads(loop)
        tracer = _attached(unheld, log)
        try:
            scratch.open_gate()
            if not await_stamps(file, size.counted, size.timeout_s, 0.05):
                raise TimeoutError(f"{engine.name}: only {len(stamps(file))} of {size.counted} jobs ran")
            time.sleep(min(2.0, size.idle_s))  # the paperwork of the last
            ours |= _threads(loop)
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.wait(30)
    finally:
        engine.stop()
        scratch.open_gate(0.1)
    with log.open(errors="replace") as lines:
        dispatcher, wrapper = _counted(lines, ours, scratch.stamp)
    return _samples("system_dispatcher", dispatcher, size) | _samples("system_wrapper", wrapper, size)


def _threads(pid: int) -> set[int]:
    return {int(thread) for thread in os.listdir(f"/proc/{pid}/task")}


def _leads_to(pid: int, program: str) -> bool:
    """Whether a process is a run of *program*, or has one among its descendants."""
    for each in family([pid]):
        with suppress(OSError):
            if os.readlink(f"/proc/{each}/exe") == program:
                return True
    return False


def _attached(pids: set[int], log: Path) -> subprocess.Popen[bytes]:
    """Have strace write every system call of *pids*, and of what they start, to *log*. MissingError if it cannot."""
    strace = shutil.which("strace")
    if strace is None:
        raise MissingError("strace, which counts system calls, is not installed")
    said = log.with_suffix(".said")
    with said.open("wb") as errors:
        words = [strace, "-f", "-s", "0", "-o", str(log), *(f"--attach={pid}" for pid in pids)]
        tracer = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=errors)
    until(lambda: tracer.poll() is not None or said.read_bytes().count(b" attached") >= len(pids), 30, "strace")
    if tracer.poll() is not None:
        raise MissingError(said.read_text().strip())
    return tracer


def _counted(lines: Iterable[str], dispatcher: set[int], program: str) -> tuple[Counter[str], Counter[str]]:
    """Return the calls of the *dispatcher*'s threads, and those of all others up to the exec of *program*."""
    ours, others = Counter[str](), Counter[str]()
    begun: set[str] = set()  # these run the program; what it does is its own affair
    for line in lines:
        found = _CALL.match(line)
        if found is None or found[1] in begun:
            continue  # a signal, an end, or the second half of a call
        pid, name, rest = found.groups()
        (ours if int(pid) in dispatcher else others)[name] += 1
        if name == "execve" and rest.startswith(f'"{program}"'):
            begun.add(pid)
    return ours, others


def _samples(key: str, counted: Counter[str], size: Size) -> Samples:
    """Return the calls for a job, and how many each name has of them."""
    by_name = {f"{key}/{name}": [number / size.counted] for name, number in counted.most_common()}
    return {key: [counted.total() / size.counted]} | by_name


def _python_calls(engine: SpoolEngine, scratch: Scratch, size: Size) -> Samples:
    """Count in a dispatcher of this Python that drains some jobs, and twice as many: the start-up is in neither."""
    counted = []
    for number in (size.counted, 2 * size.counted):
        engine.prepare(_SLOTS)
        drop(str(engine.root), number, "count", [scratch.stamp, scratch.fresh("python")], workdir="/")
        argv = [sys.executable, "-c", _PROFILED]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=size.timeout_s, env=engine.env, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        counted.append([int(word) for word in done.stdout.split()])
    few, many = counted
    keys = ("python_functions", "python_builtins")
    return {key: [(many[at] - few[at]) / size.counted] for at, key in enumerate(keys)}


_PROFILED = """
import itertools, sys
seen = {"call": itertools.count(), "c_call": itertools.count()}
def profile(frame, event, argument):
    if event in seen:
        next(seen[event])
from spool.cli.main import run
sys.setprofile(profile)
code = run(["dispatch", "--until-idle"])
sys.setprofile(None)
print(*map(next, seen.values()))
sys.exit(code)
"""
