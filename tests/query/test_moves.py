"""A list made while files move: each job is in it once, as what it was before or after the move."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cli.records import end, view
from spool.client.submit import make_spool
from spool.client.waiting import Waiter
from spool.core import layout
from spool.core.model import Grant, Request, Result, State
from spool.formats import run_records
from spool.formats.state import JobView
from spool.machine import identity
from spool.machine.processes import MachineProber
from spool.query.jobs import JobLister, list_jobs
from spool.query.rows import JobFilter, JobList
from spool.query.selection import picked
from spool.store.spool import Service, Spool

_CALLS = ("listdir", "lstat", "stat", "open", "scandir")


class Job:
    """One job in a spool of its own, that can be moved on as a dispatcher does it."""

    def __init__(self, root: Path, place: str, *, ended: bool) -> None:
        make_spool(str(root))
        self.root = root
        self._path(place).write_text('command = "true"\n')
        if place == layout.RUNNING:
            self._starts(ended=ended)
        if place == layout.DONE:
            self._starts(ended=True)
            self._recorded()

    def _path(self, place: str) -> Path:
        return self.root / place / "x.toml"

    def _record(self, name: str) -> Path:
        path = self.root / "jobs" / "x" / "1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _starts(self, *, ended: bool) -> None:
        file = [path for place in layout.PLACES if (path := self._path(place)).exists()]
        inode = file[0].stat().st_ino
        grant = run_records.GrantRecord("x", 1, grant=Grant(1), granted_at_ns=time.time_ns(), inode=inode, user="me")
        self._record(layout.SPEC_COPY).write_text('command = "true"\n')
        self._record(layout.GRANT).write_bytes(run_records.render_grant(grant))
        jid = identity.of_process(os.getpid())
        self._record(layout.JID).write_bytes(run_records.render_jid(replace(jid, start_ticks=1) if ended else jid))
        if ended:
            self._record(layout.RC).write_text("0\n")

    def _recorded(self) -> None:
        now = time.time_ns()
        ended = Result("x", 1, 1, State.FINISHED, "exit code 0", now, now, now, 0, request=Request(), grant=Grant(1))
        end(self.root, ended)

    def move(self, old: str, new: str) -> None:
        """Do what a dispatcher does, or a user, when the job goes from one directory to another."""
        if new == layout.RUNNING:
            self._starts(ended=False)
        if new == layout.DONE:
            self._recorded()
        os.rename(self._path(old), self._path(new))

    def serve(self, state: str | None) -> None:
        """Have a dispatcher that said *state* of the job last."""
        jobs = {} if state is None else {"x": JobView(state=state, run=1 if state != "queued" else None, user="me")}
        view(self.root, jobs)


def at_each_call(monkeypatch: pytest.MonkeyPatch, look: Callable[[], Any], make: Callable[[], Job]) -> Iterator[Any]:
    """Yield what *look* returns if a job moves before the first call of the file system, the second, and so on."""
    real = {name: getattr(os, name) for name in _CALLS}
    for cut in itertools.count():
        job = make()
        left = [cut]

        def called(name: str, left: list[int] = left, job: Any = job) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                left[0] -= 1
                if left[0] == -1:
                    for other in _CALLS:
                        monkeypatch.setattr(os, other, real[other])
                    job.then()
                return real[name](*given, **named)

            return call

        for name in _CALLS:
            monkeypatch.setattr(os, name, called(name))
        try:
            found = look(job.root)  # type: ignore[call-arg]
        finally:
            for name in _CALLS:
                monkeypatch.setattr(os, name, real[name])
        if left[0] >= 0:
            assert cut > 3, "nothing was read"
            return
        yield found


MOVES = [
    (layout.QUEUED, layout.RUNNING, "queued", {"queued", "running"}),
    (layout.HELD, layout.QUEUED, "held", {"held", "queued"}),
    (layout.QUEUED, layout.HELD, "queued", {"held", "queued"}),
    (layout.RUNNING, layout.DONE, "running", {"running", "stopping", "finished"}),
    (layout.RUNNING, layout.DONE, "stopping", {"stopping", "finished"}),
    (layout.DONE, layout.QUEUED, None, {"finished", "queued"}),
]


@pytest.mark.parametrize(("old", "new", "said", "states"), MOVES)
@pytest.mark.parametrize("served", [True, False], ids=["served", "alone"])
@pytest.mark.parametrize("how", ["ls", "ls NAME"])
def test_a_job_that_moves_is_listed_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    said: str | None,
    states: set[str],
    served: bool,
    how: str,
) -> None:
    """Whatever call of the file system comes after the move, the job is in the list once, in a state that it had."""
    numbers = itertools.count()
    monkeypatch.setattr(MachineProber, "has_left_processes", lambda *_: False)  # a look at each process of the machine
    monkeypatch.setattr(MachineProber, "is_wrapper", lambda *_: True)  # this process stands for it
    monkeypatch.setattr(Spool, "service", lambda self: Service.SERVED if served else Service.NONE)

    def make() -> Job:
        job = Job(tmp_path / str(next(numbers)), old, ended=said == "stopping")
        if served:
            job.serve(said)
        job.then = lambda: job.move(old, new)  # type: ignore[attr-defined]
        return job

    def look(root: Path) -> list[tuple[str, str]]:
        spool, wanted = Spool(str(root)), JobFilter(names=("x",))
        found: JobList = list_jobs(spool, wanted) if how == "ls NAME" else JobLister(spool).listing()
        return [(row.name, row.state.value) for row in found.rows]

    for rows in at_each_call(monkeypatch, look, make):  # type: ignore[arg-type]
        if how == "ls" and (old, new) == (layout.DONE, layout.QUEUED):
            assert len(rows) <= 1  # what has ended is read last, and a name that was asked for is looked for again
            continue
        assert [name for name, _ in rows] == ["x"], rows
        assert rows[0][1] in states, rows


def test_a_dispatcher_that_stands_still_has_nothing_listed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has ended, and that a stopped dispatcher has not recorded, is one row and one awaited job."""
    monkeypatch.setattr(Spool, "service", lambda self: Service.SERVED)
    job = Job(tmp_path / "s", layout.RUNNING, ended=True)
    for said in ("running", "stopping", None):
        job.serve(said)
        rows = JobLister(Spool(str(job.root))).listing().rows
        assert [(row.name, row.state) for row in rows] == [("x", State.STOPPING)]
        assert "a dispatcher will record it" not in rows[0].reason
        assert picked(Spool(str(job.root)), JobFilter(states=frozenset({State.STOPPING})), layout.PLACES)[0] == ["x"]
        assert Waiter(Spool(str(job.root)), ("x",)).poll() == []
