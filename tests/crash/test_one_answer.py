"""Every view says the same of a job at one moment, through whole random lives."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from crash.lives import NAMES, SEED, live_each
from crash.test_views import Watched
from crash.world import World
from spool.cli.ls import FIELDS
from spool.cli.publicjson import plain
from spool.core import layout
from spool.core.arrays import array_of
from spool.core.errors import InvalidRecord
from spool.core.layout import DONE, HELD, PLACES, QUEUED, RUNNING
from spool.core.model import Machine, Result, State
from spool.formats.run_records import parse_history_line
from spool.formats.state import parse_state_as, render_state
from spool.query.details import job_details
from spool.query.explain import preview, why
from spool.query.jobs import JobLister, list_jobs
from spool.query.listing import ListedJob
from spool.query.rows import JobRow, ListedState, row_of_result, row_of_view
from spool.store.spool import Service, Spool
from spool.store.tolerant import TolerantSpool

LIVES = int(os.environ.get("LIVES", "1"))
RUNS = frozenset({State.STARTING, State.RUNNING, State.STOPPING})
_OF_THE_VIEW = {"gpu_uuids", "gpu_use", "gpu_idle_ns", "beside", "problem", "engine", "place"}


class Compared(Watched):
    """A life after every event of which all views are compared: while a dispatcher lives, and while none does."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        with (world.root / layout.CONFIG).open("a") as config:
            config.write('[defaults]\nmemory = "1M"\ntime_limit = "9h"\n')
        self.session.after_turn = self._look
        self.session.after_cut = lambda: None

    def _look(self) -> None:
        """Compare with a view that was just written; between the turns it is as old as the last."""
        now, root = self.session.now, self.world.root
        fresh = now is not None and self.session.opened and self._cuts == self.session.cuts + len(self.session.errors)
        # On a busy machine a look gives way; what it has not come to yet the dispatcher cannot know.
        fresh = fresh and now is not None and bool(now.observer._rescans) and not now.observer.unfinished
        if now is not None and fresh:
            machine = Machine(cpus=self.world.cpus, memory_bytes=1 << 30)
            view = now.status.view(now.planner.plan, machine, paused=now.pause.paused)
            (root / layout.STATE).write_bytes(render_state(view))
        self._cuts = self.session.cuts + len(self.session.errors)
        compare(self.world, fresh=fresh)
        self.compared += 1

    def live(self, events: int) -> None:
        """Do so many things, each time look before any dispatcher has noticed; at times go on without a dispatcher."""
        for _ in range(events):
            name = self.random.choice(NAMES)
            deeds = self.submit, self.submit, self.submit, self.move, self.move, self.remove, self.kill, self.suspend
            deed = self.random.choice(deeds)
            self.told.append(f"{deed.__name__} {name}")
            deed(name)
            compare(self.world, fresh=False)
            if self.random.random() < 0.15:
                self.told.append("the dispatcher is killed")
                self.session.end()
                self.world.tick()
                compare(self.world, fresh=False)
            else:
                self.session.turns(self.random.randint(1, 3))


def inodes(root: Path) -> dict[str, dict[str, int]]:
    """Return which file each job has in each place."""
    found: dict[str, dict[str, int]] = {}
    for place in PLACES:
        for path in (root / place).glob("*.toml"):
            found.setdefault(path.stem, {})[place] = path.stat().st_ino
    return found


def compare(world: World, *, fresh: bool) -> None:
    """Assert that all views agree. *fresh*: state.json was written after the last thing that happened."""
    spool = TolerantSpool(str(world.root))
    listed = list_jobs(spool, everything=True)
    rows: dict[str, list[JobRow]] = {}
    for row in listed.rows:
        rows.setdefault(row.name, []).append(row)
    for found in rows.values():  # an invalid file of a name is listed behind a valid one, and is the first of its job
        found.sort(key=lambda row: (not row.array, row.place == HELD))
    _complete(world, spool, rows)
    _drawn(listed.rows, listed.at_ns)
    _shown(spool, rows)
    _planned(spool, rows, fresh=fresh)
    if fresh:
        _told(world)
    _accounted(world, spool, rows)


def _complete(world: World, spool: Spool, rows: dict[str, list[JobRow]]) -> None:
    """No job is missing, and none is listed twice: a name has as many rows as different files, and one for its run."""
    for name, places in inodes(world.root).items():
        assert name in rows, f"{name} in {list(places)} is missing"
    for name, found in rows.items():
        runs = [row.run for row in found if row.state in RUNS]
        assert len(runs) <= 1, f"{name} runs twice in the list: {found}"
        there = inodes(world.root).get(name, {})
        active = {inode for place, inode in there.items() if place != DONE}
        more = int(any(row.place == RUNNING for row in found) and RUNNING not in there)
        assert len(found) <= max(1, len(active) + more), f"{name} is listed {len(found)} times: {found}, {there}"
    for process in world.alive.values():
        places = inodes(world.root).get(process.name, {})
        if RUNNING in places:
            row = rows[process.name][0]
            assert row.run == process.run, f"{process.name} run {process.run} is listed as {row}"


def _drawn(found: Sequence[JobRow], now_ns: int) -> None:
    """Assert that `ls` prints what it writes as JSON."""
    for row in found:
        cells = {key: FIELDS[key].text(ListedJob(row, row.name), now_ns) for key in ("state", "user", "project", "run")}
        told = plain(row)
        assert cells == {key: "" if told[key] is None else str(told[key]) for key in cells}


def _shown(spool: Spool, rows: dict[str, list[JobRow]]) -> None:
    for name, (row, *others) in rows.items():
        found = job_details(spool, name)
        same(f"show {name}", found.row, row)
        assert [(one.row.state, one.row.place) for one in found.others] == [(one.state, one.place) for one in others]
        runs = {run.record.run: run for run in found.runs}
        if row.run in runs and (row.state in RUNS or row.state.ended):
            run = runs[row.run]
            assert run.state == row.state, f"show {name}: run {row.run} is {run.state}, and the job {row}"
            assert run.record.started_at_ns == row.started_at_ns, f"show {name}: started"


def _planned(spool: Spool, rows: dict[str, list[JobRow]], *, fresh: bool) -> None:
    """`plan` and `why` are about the jobs that wait, of the same users, with the run times that `show` expects."""
    planned = preview(spool)
    named: dict[str, Any] = {each.job.name: each for each in (*planned.starts, *planned.waits)}
    ends = {each.name for each in planned.ends}
    for name, found in rows.items():
        waiting = next((row for row in found if row.state is State.QUEUED and row.place == QUEUED), None)
        if waiting is not None:
            assert name in named or name in planned.left_out or name in ends, f"plan lacks {name}: {found}"
        if waiting is not None and name in named:
            assert named[name].job.user == waiting.user, f"plan {name}: user"
            assert named[name].job.spec.priority == waiting.priority, f"plan {name}: priority"
        row = found[0]
        if row.state not in (State.QUEUED, State.HELD) or row.array or len(found) > 1:
            continue
        answer, shown = why(spool, name), job_details(spool, name)
        assert answer.place == row.place, f"why {name}: {answer.place}"
        if name not in planned.left_out:
            assert answer.expected == shown.expected, f"{name} is expected otherwise: {answer} and {shown}"
        if name in named:
            assert answer.expected == named[name].expected, f"plan {name}: expected"
    for name in named:
        # Or its array is, which has not issued it yet.
        of_array = any(row.array or row.place == QUEUED for row in rows.get(array_of(name), ()))
        listed = any(row.place == QUEUED for row in rows.get(name, ()))
        assert listed or of_array, f"{name} is planned and not in the list"
    for name, found in rows.items():
        if found[0].state in RUNS and all(row.place == RUNNING for row in found):
            assert why(spool, name).place == RUNNING, f"why {name}"


def _told(world: World) -> None:
    """Assert that a list has what the dispatcher has just written, and has the same from the files without it."""
    text, now_ns = (world.root / layout.STATE).read_bytes(), time.time_ns()
    view = parse_state_as(ListedState, text)
    assert view is not None
    spool = TolerantSpool(str(world.root))
    for service in (Service.SERVED, Service.NONE):
        with mock.patch.object(Spool, "service", lambda _, service=service: service):
            rows = {row.name: row for row in reversed(JobLister(spool, now_ns).listing().rows)}
        for name, said in view.jobs.items():
            want, row = row_of_view(name, said, now_ns), rows[name]
            left_out = {*_OF_THE_VIEW, *(("reason",) if service is Service.NONE and row.state is State.QUEUED else ())}
            for key in (field for field in want.__struct_fields__ if field not in left_out):
                assert getattr(want, key) == getattr(row, key), f"{key}: state.json {want}, and {service}: {row}"


def _accounted(world: World, spool: Spool, rows: dict[str, list[JobRow]]) -> None:
    """Assert that what has ended did so as the history says."""
    newest: dict[str, Result] = {}
    for line in spool.history():
        with suppress(InvalidRecord):  # a kill cut it off: its run has another line
            result = parse_history_line(line)
            newest.setdefault(result.job, result)
    for name, found in rows.items():
        row = found[0]
        if row.state.ended and row.place == DONE and name in newest and not row.array and row.run == newest[name].run:
            same(f"history {name}", replace(row_of_result(newest[name]), place=DONE), row)


def same(what: str, one: JobRow, other: JobRow) -> None:
    """Assert that two rows say the same; what only one of the views asks for is left out."""
    for key in (field for field in one.__struct_fields__ if field not in {"progress", "left", "start", "metrics"}):
        assert getattr(one, key) == getattr(other, key), f"{what}: {key}: {one} and in the list {other}"


def test_every_view_says_the_same_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every event of a random life ls, show, why, plan, state.json and the history agree."""
    live_each(tmp_path, monkeypatch, Compared, range(SEED, SEED + LIVES), 20)
