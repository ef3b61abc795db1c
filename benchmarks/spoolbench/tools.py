"""What every measurement needs: running a command, the job that stamps, the gate, and what /proc says."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
OUT = HERE / "out"
LINE_BYTES = 42  # no line of the stamp program is shorter


class MissingError(Exception):
    """Something that a measurement needs is not there."""


class Scratch:
    """A directory for what one call makes, the stamp program in it, and a gate.

    Nothing in it is deleted before the end. For minutes after a deletion ext4 skips the inodes that it freed
    (`recently_deleted` in its `ialloc.c`), looking at each of them again for every new file: after 10,000 deletions
    a new file costs 0.8 ms instead of 0.03 ms, whichever process creates it.
    """

    def __init__(self, parent: str | None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="spool-benchmark-", dir=parent))
        self.gate = str(self.path / "gate")
        self.trash = os.open(self.path / "stderr.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.mkfifo(self.gate)
        self._serial = 0
        self.stamp = self.compiled("stamp")

    def compiled(self, name: str) -> str:
        """Compile a program of `benchmarks/` and return its path."""
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise MissingError("no C compiler (cc, gcc or clang): the job that is measured is a C program")
        source, program = str(HERE / f"{name}.c"), str(self.path / name)
        for how in (["-static"], []):  # static starts faster; not every machine has a static C library
            if subprocess.run([compiler, "-O2", *how, "-o", program, source], capture_output=True).returncode == 0:
                return program
        raise MissingError(f"cannot compile {source}")

    def close(self) -> None:
        """Remove it."""
        os.close(self.trash)
        shutil.rmtree(self.path, ignore_errors=True)

    def fresh(self, name: str) -> str:
        """Return a path that nobody has written to."""
        self._serial += 1
        return str(self.path / f"{name}.{self._serial}.stamps")

    def open_gate(self, timeout: float = 5.0) -> bool:
        """Let everyone who waits at the gate go; return whether anybody was there."""
        end = time.monotonic() + timeout
        while True:
            try:
                fd = os.open(self.gate, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads
                if time.monotonic() >= end:
                    return False
                time.sleep(0.002)
                continue
            time.sleep(0.005)
            os.close(fd)
            return True


def timed(argv: Sequence[str], env: Mapping[str, str], errors: int) -> tuple[int, float]:
    """Run one command to its end, its output thrown away; return its exit code and the seconds that it took."""
    program = shutil.which(argv[0], path=env.get("PATH"))
    if program is None:
        raise MissingError(f"{argv[0]} is not installed")
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_DUP2, errors, 2),
    ]
    begun = time.perf_counter()
    pid = os.posix_spawn(program, argv, env, file_actions=actions)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), time.perf_counter() - begun


def stamps(path: str) -> list[tuple[int, int]]:
    """Return (start, end) of every job that has stamped *path*, in the order of their starts."""
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        return []
    return sorted((int(start), int(end)) for start, end, _ in map(str.split, text.splitlines()))


def await_stamps(path: str, count: int, timeout: float, poll: float = 0.005) -> bool:
    """Wait until *count* jobs have stamped *path*; return whether they did in time."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            if os.stat(path).st_size >= count * LINE_BYTES and len(stamps(path)) >= count:
                return True
        except FileNotFoundError:
            pass
        time.sleep(poll)
    return False


def until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Wait for *condition*; TimeoutError, saying *what*, if it does not come."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(0.005)


# What /proc says.


def family(pids: Sequence[int]) -> list[int]:
    """Return *pids* and all their descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                after = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(after[1]), []).append(int(entry))
    found: list[int] = []
    todo = list(pids)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.append(pid)
            todo += children.get(pid, [])
    return found


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of *pid*; schedstat, because the clock tick of 10 ms is too coarse."""
    total = 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            total += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
    except OSError:
        pass
    return total


def memory_bytes(pid: int) -> tuple[int, int]:
    """Return (RSS, PSS) of *pid*."""
    found = {"Rss": 0, "Pss": 0}
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            key, _, rest = line.partition(":")
            if key in found:
                found[key] = int(rest.split()[0]) * 1024
    except OSError:
        pass
    return found["Rss"], found["Pss"]
