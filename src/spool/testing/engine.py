"""A fake engine: its runs elsewhere begin, end and stop under control of a test."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar

from msgspec import Struct, field

from spool.core import layout
from spool.core.errors import SpoolError, cannot
from spool.core.lifecycle import EngineWord, Liveness
from spool.core.model import Jid, Machine, SignalTo
from spool.executors import EngineEnd, Launch, Usage
from spool.formats import run_records
from spool.formats.wrapper import Surroundings
from spool.machine import identity

HOST = "elsewhere"


class FakeRun(Struct, eq=False):
    """A run of the fake engine. It waits there until `begin`, and goes on until `end`."""

    engine: FakeEngine
    key: tuple[str, int]
    metadir: str
    jid: Jid | None = None
    obeys: bool = True  # it ends on request
    gone: bool = False
    absent: bool = False  # the engine reports that it never had it
    asked: list[str] = field(default_factory=list)  # the signals sent to it
    used: Usage = field(default_factory=Usage)
    exit_status: None = None
    engine_id: str | None = None  # once the engine has accepted it
    waits: str | None = None
    halted: str | None = None
    blocked: bool = False
    alive_at_ns: int | None = None
    said: EngineEnd | None = None  # how the engine reports its end
    refusal: str | None = None
    resists: str = ""
    lingers: bool = False
    by_others: bool = False
    doubtful: bool = False
    is_child: bool = False
    holds_memory: bool = True

    def begin(self) -> None:
        """Write the records of its wrapper, on a host of its own."""
        self.jid = Jid(4711, 1, "there", "-", HOST, f"{self.engine.name}:4711")
        self._write(layout.JID, run_records.render_jid(self.jid))

    def end(self, code: int | None) -> None:
        """End it with that exit code, or without one."""
        if code is not None:
            self._write(layout.RC, run_records.render_rc(code))
        self.gone = True

    def _write(self, name: str, data: bytes) -> None:
        with open(os.path.join(self.metadir, name), "xb") as record:
            record.write(data)

    def identified(self, jid: Jid) -> None:
        """Return the wrapper's identity."""
        self.jid = jid

    @property
    def ending(self) -> EngineEnd | None:
        """The end as the test set it; None: the run's records suffice."""
        return (self.said or EngineEnd(EngineWord.FORGOTTEN, "it is gone")) if self.gone else None

    def liveness(self) -> Liveness:
        """Return ALIVE, whether it has begun or waits."""
        return Liveness.ABSENT if self.absent else Liveness.GONE if self.gone else Liveness.ALIVE

    def watch(self) -> None:
        """Return nothing that signals its end: callers poll."""

    def left_behind(self, exit_code: int | None = None) -> bool:
        """Leave nothing behind."""
        return False

    def signal(self, signal_name: str, to: SignalTo) -> int:
        """Record a signal, and go on."""
        self.asked.append(signal_name)
        return 1

    def usage(self) -> Usage:
        """Return the resource use that the test set."""
        return self.used

    def close(self) -> None:
        """Do nothing."""
        self.engine.runs.pop(self.key, None)


class FakeEngine:
    """Executor and engine in one. Its runs outlive the dispatcher, so there is one table for all instances."""

    name = "fake"
    runs: ClassVar[dict[tuple[str, int], FakeRun]] = {}
    has: ClassVar[Machine] = Machine(cpus=8, memory_bytes=64 << 30)
    problem: ClassVar[str | None] = None

    tells = silent = False

    def __init__(self, *made_with: object) -> None:
        """Ignore the machine, the configuration and the spool."""

    # The executor.

    @property
    def engine(self) -> FakeEngine:
        """Return itself."""
        return self

    def unavailable(self) -> str | None:
        """Return the problem that the test set."""
        return self.problem

    def surroundings(self) -> Surroundings:
        """Return empty surroundings: the wrapper is never executed."""
        return Surroundings(identity.pid_namespace(), identity.host(), identity.boot_id())

    def start(self, launch: Launch) -> FakeRun:
        """Add a run, which waits."""
        made = self.runs[launch.job, launch.run] = FakeRun(self, (launch.job, launch.run), launch.metadir)
        return made

    def close(self) -> None:
        """Release nothing."""

    def attach(self, spool_dir: str, job: str, run: int, *, read_only: bool) -> tuple[str, ...]:
        """Raise SpoolError: there are no terminals."""
        raise SpoolError(cannot("attach to", f"job {job}", "it runs elsewhere"))

    def forget(self, spool_dir: str, runs: Iterable[tuple[str, int]]) -> None:
        """Do nothing."""

    # The engine.

    def machine(self) -> Machine:
        """Return the machine for all its runs."""
        return self.has

    def fileno(self) -> None:
        """Return None."""

    def due_ns(self) -> None:
        """Return None."""

    def work(self) -> tuple[FakeRun, ...]:
        """Do nothing: each run is asked."""
        return ()

    def limit_array(self, array: str, at_once: int | None) -> None:
        """Do nothing: the planner keeps the limits."""

    def keep_back(self, arrays: Collection[str], *, paused: bool) -> None:
        """Do nothing: nothing is handed over later."""

    def adopt(self, job: str, run: int, jid: Jid | None) -> FakeRun:
        """Return the run of that name; one that is not in the table is gone."""
        known = self.runs.get((job, run)) or FakeRun(self, (job, run), "", jid, gone=True)
        known.engine = self
        return known

    def terminate(self, runs: Mapping[FakeRun, bool]) -> Collection[FakeRun]:
        """Ask each run to end once, then force it."""
        for run, kill in runs.items():
            if kill or "TERM" not in run.asked:
                run.asked.append("KILL" if kill else "TERM")
            if not run.gone and (kill or run.obeys):
                run.end(None if kill else 143)
        return [run for run in runs if run.gone]

    def suspend(self, runs: Mapping[FakeRun, bool]) -> Collection[FakeRun]:
        """Record the suspension."""
        for run, on in runs.items():
            run.asked.append("STOP" if on else "CONT")
        return list(runs)
