"""An engine without a machine, whose runs elsewhere begin, end and stop as a test has it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import ClassVar

from spool.core import layout
from spool.core.lifecycle import EngineWord, Liveness
from spool.core.model import Jid, Machine, SignalTo
from spool.executors import Engine, EngineEnd, Executor, Launch, Usage
from spool.executors.base import RunHandle
from spool.formats import run_records
from spool.formats.wrapper import Surroundings
from spool.machine import identity

HOST = "elsewhere"


class FakeRun(RunHandle):
    """A run of the fake engine. It waits there until `begin`, and goes on until `end`."""

    engine = key = jid = None  # not the properties of a RunHandle: each run has its own
    obeys = True  # it ends on request
    absent = False  # the engine reports that it never had it
    used = Usage()
    engine_id: str | None = None  # once the engine has accepted it
    waits: str | None = None
    blocked = False
    said: EngineEnd | None = None  # how the engine reports its end
    refusal: str | None = None
    holds_memory = True

    def __init__(
        self, engine: FakeEngine, key: tuple[str, int], metadir: str, jid: Jid | None = None, *, gone: bool = False
    ) -> None:
        self.engine, self.key, self.jid, self.gone = engine, key, jid, gone
        self.metadir = metadir
        self.asked: list[str] = []  # the signals sent to it

    def begin(self) -> None:
        """Write the records of its wrapper, on a host of its own."""
        self.jid = Jid(4711, 1, "there", "-", HOST, f"{self.engine.name}:4711")
        self.write(layout.JID, run_records.render_jid(self.jid))

    def end(self, code: int | None) -> None:
        """End it with that exit code, or without one."""
        if code is not None:
            self.write(layout.RC, f"{code}\n".encode())
        self.gone = True

    def write(self, name: str, data: bytes) -> None:
        """Write one of its records."""
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

    def signal(self, signal_name: str, to: SignalTo) -> int:
        """Record a signal, and go on."""
        self.asked.append(signal_name)
        return 1

    def usage(self) -> Usage:
        """Return the resource use that the test set."""
        return self.used

    def close(self) -> None:
        """Forget it."""
        self.engine.runs.pop(self.key, None)


class FakeEngine(Engine, Executor):
    """Executor and engine in one. Its runs outlive the dispatcher, so there is one table for all instances."""

    name = "fake"
    runs: ClassVar[dict[tuple[str, int], FakeRun]] = {}
    has: ClassVar[Machine] = Machine.of_an_engine(2)
    problem: ClassVar[str | None] = None

    def __init__(self, *_: object) -> None:
        self.engine = self

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

    def machine(self) -> Machine:
        """Return the machine for all its runs."""
        return self.has

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
