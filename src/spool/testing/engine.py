"""A fake engine: runs elsewhere that begin, end and stop when a test says so."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar

from msgspec import Struct, field

from spool.core import layout
from spool.core.errors import SpoolError, cannot
from spool.core.lifecycle import EngineWord, Liveness
from spool.core.model import Jid, Machine
from spool.executors import EngineEnd, Launch, Usage
from spool.formats import run_records
from spool.formats.wrapper import Surroundings
from spool.machine import identity

HOST = "elsewhere"


class FakeRun(Struct, eq=False):
    """A run of the fake engine. It waits there until it begins, and goes on until it ends."""

    engine: FakeEngine
    key: tuple[str, int]
    metadir: str
    jid: Jid | None = None
    obeys: bool = True  # it ends when it is asked to
    gone: bool = False
    absent: bool = False  # the engine says that it never had it
    asked: list[str] = field(default_factory=list)  # which signals it was sent
    used: Usage = field(default_factory=Usage)
    exit_status: None = None
    waits: str | None = None
    halted: str | None = None
    alive_at_ns: int | None = None
    said: EngineEnd | None = None  # how the engine calls its end
    refusal: str | None = None
    resists: str = ""
    is_child: bool = False
    holds_memory: bool = True

    def begin(self) -> None:
        """Write what its wrapper would, on a host of its own."""
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
        """Say how it ended: as the test says, or that there is no more to say than what it left."""
        return (self.said or EngineEnd(EngineWord.FORGOTTEN, "it is gone")) if self.gone else None

    def liveness(self) -> Liveness:
        """Return that it is alive, whether it has begun or waits there."""
        return Liveness.ABSENT if self.absent else Liveness.GONE if self.gone else Liveness.ALIVE

    def watch(self) -> None:
        """Return nothing that signals its end: callers poll."""

    def has_ended(self) -> None:
        """Do nothing: callers poll."""

    def left_behind(self) -> bool:
        """Leave nothing behind."""
        return False

    def signal(self, signal_name: str, *, spare_shell: bool) -> int:
        """Take a signal, and go on."""
        self.asked.append(signal_name)
        return 1

    def usage(self) -> Usage:
        """Return what the test says that it used."""
        return self.used

    def close(self) -> None:
        """Forget it."""
        self.engine.runs.pop(self.key, None)


class FakeEngine:
    """Executor and engine in one. What it runs outlives the dispatcher, so the table is one for all."""

    name = "fake"
    runs: ClassVar[dict[tuple[str, int], FakeRun]] = {}
    has: ClassVar[Machine] = Machine(cpus=8, memory_bytes=64 << 30)
    problem: ClassVar[str | None] = None

    tells = silent = False

    def __init__(self, *made_with: object) -> None:
        """Use nothing of this machine, the configuration or the spool."""

    # What an executor does.

    @property
    def engine(self) -> FakeEngine:
        """Return itself."""
        return self

    def unavailable(self) -> str | None:
        """Return what the test says."""
        return self.problem

    def surroundings(self) -> Surroundings:
        """Return what a wrapper's text needs; nobody runs it."""
        return Surroundings(identity.pid_namespace(), identity.host(), identity.boot_id())

    def start(self, launch: Launch) -> FakeRun:
        """Take a run in; it waits."""
        made = self.runs[launch.job, launch.run] = FakeRun(self, (launch.job, launch.run), launch.metadir)
        return made

    def get_ready(self, text: bytes | None = None) -> int | None:
        """Have nothing ready."""
        return None

    def close(self) -> None:
        """Release nothing."""

    def attach(self, spool_dir: str, job: str, run: int, *, read_only: bool) -> tuple[str, ...]:
        """Raise SpoolError: nothing here has a terminal."""
        raise SpoolError(cannot("attach to", f"job {job}", "it runs elsewhere"))

    def forget(self, spool_dir: str, runs: Iterable[tuple[str, int]]) -> None:
        """Keep nothing."""

    # What an engine does.

    def machine(self) -> Machine:
        """Return what it has for all its runs."""
        return self.has

    def fileno(self) -> None:
        """Have none."""

    def due_ns(self) -> None:
        """Have nothing to do by itself."""

    def work(self) -> tuple[FakeRun, ...]:
        """Do nothing: each run is asked."""
        return ()

    def adopt(self, job: str, run: int, jid: Jid | None) -> FakeRun:
        """Return the run of that name; one that is not in the table is gone."""
        known = self.runs.get((job, run)) or FakeRun(self, (job, run), "", jid, gone=True)
        known.engine = self
        return known

    def terminate(self, runs: Mapping[FakeRun, bool]) -> Collection[FakeRun]:
        """Ask each to end once, and force it then."""
        for run, kill in runs.items():
            if kill or "TERM" not in run.asked:
                run.asked.append("KILL" if kill else "TERM")
            if not run.gone and (kill or run.obeys):
                run.end(None if kill else 143)
        return [run for run in runs if run.gone]

    def suspend(self, runs: Mapping[FakeRun, bool]) -> Collection[FakeRun]:
        """Take note of it."""
        for run, on in runs.items():
            run.asked.append("STOP" if on else "CONT")
        return list(runs)
