"""The dispatcher's own moves raise file events: they cost no look, and hide nothing that a user does."""

from __future__ import annotations

import os
import select
from typing import Any

import pytest

from crash.world import Session, ends_of
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import StopKind
from spool.core.scheduler import Plan
from spool.dispatcher import loop, planner
from spool.dispatcher.wakeup import DirectoryWatcher
from spool.state.run import ActiveRun
from support import wait_for


@pytest.fixture
def session(session: Session) -> Session:
    """Give a dispatcher that looks where events tell it to, and nowhere else."""
    session.looks_at_everything = False
    session.settle()
    places = {place: session.users.layout.at(place) for place in (QUEUED, HELD, RUNNING)}
    DirectoryWatcher.start(session.now.watcher, places, modes_of=(QUEUED, HELD))
    assert session.now.watcher.problem is None
    session.after_turn = lambda: hear(session)
    return session


def hear(session: Session) -> None:
    """Have the dispatcher read what events there are."""
    while select.select([session.now.watcher.fileno()], [], [], 0)[0]:
        session.now.watcher.read()


def running(session: Session, name: str, *lines: str) -> ActiveRun:
    """Start a job; no event of its claim was read yet."""
    session.after_turn = lambda: None
    session.users.submit(name, "hang until 2", *lines)
    hear(session)
    session.turns(1)
    session.after_turn = lambda: hear(session)
    return session.now.state.live[name, 1]


def test_the_moves_of_a_run_cost_no_look(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its claim nobody looks at a job's file but who moves it on, and nobody at where it was."""
    looks: list[str] = []
    lstat = os.lstat

    def look(path: str, **more: int) -> os.stat_result:
        looks.append(os.path.relpath(path, session.users.root))
        return lstat(path, **more)

    session.users.submit("x", "ok")
    session.after_turn = lambda: None
    hear(session)
    session.turns(1)
    assert session.users.path(RUNNING, "x").exists()
    monkeypatch.setattr(os, "lstat", look)
    session.after_turn = lambda: hear(session)
    session.settle()
    assert ends_of(session.world).places["x"] == (DONE,)
    assert [path for path in looks if path == "queued/x.toml"] == []
    assert len([path for path in looks if path == "running/x.toml"]) <= 2  # to file it


@pytest.mark.parametrize("written", [False, True])
def test_an_edit_right_after_the_claim_is_seen(session: Session, written: bool) -> None:
    """Whether an editor writes the file or puts another in its place, before or after the claim's event was read.

    The kernel makes one event of two that are alike, if nothing was read in between.
    """
    after, before = running(session, "after"), running(session, "before")
    for live in (before, after):
        if written:
            session.users.path(RUNNING, live.name).write_text('command = "hang until 2"\npriority = 77\n')
        else:
            session.users.submit(live.name, "hang until 2", "priority = 77", place=RUNNING)
        session.turns(3)
        assert live.spec.priority == 77


@pytest.mark.parametrize(("to", "kind"), [(None, StopKind.CANCEL), (HELD, StopKind.HOLD), (QUEUED, StopKind.REQUEUE)])
@pytest.mark.parametrize("heard", [False, True])
def test_a_file_that_leaves_right_after_the_claim_stops_its_run(
    session: Session, to: str | None, kind: StopKind, heard: bool
) -> None:
    """It was deleted, or moved, before or after the event of the claim was read."""
    live = running(session, "x")
    if heard:
        session.turns(2)
    path = session.users.path(RUNNING, "x")
    if to is None:
        path.unlink()
    else:
        os.rename(path, session.users.path(to, "x"))
    session.turns(3)
    assert live.stop_kind is kind


def test_another_submission_that_comes_while_a_run_ends_waits_for_nothing(session: Session) -> None:
    """`queued/x.toml` appears in the pass in which the run of x is filed: its event is enough to start it."""
    session.users.submit("x", "ok")
    session.turns(2)

    def again() -> None:
        if session.users.path(DONE, "x").exists():
            session.users.submit("x", "ok")
            session.after_turn = lambda: hear(session)
        hear(session)

    session.after_turn = again
    session.settle()
    ends = ends_of(session.world)
    assert (ends.places["x"], ends.starts["x"]) == ((DONE,), 2)


@pytest.mark.parametrize("heard", [True, False])
def test_a_job_starts_when_what_is_in_its_way_goes(session: Session, heard: bool) -> None:
    """What somebody put into running/ keeps the job of its name waiting, and no longer than it is there.

    What events tell of is looked at before a number is given away; anything else the claim finds, once.
    """
    way, runs = session.users.path(RUNNING, "x"), session.world.root / "jobs/x"
    if heard:
        way.mkdir()
    session.users.submit("x", "ok")
    hear(session)
    if not heard:
        way.mkdir()
    session.turns(3)
    assert session.users.path(QUEUED, "x").exists()
    assert "running/" in (session.now.state.queue["x"].executor_problem or "")
    for _ in range(5):
        session.look_next()
        session.turns(1)
    assert (os.listdir(runs) if runs.exists() else []) == ([] if heard else ["1"])
    way.rmdir()
    hear(session)
    session.settle()
    assert ends_of(session.world).places["x"] == (DONE,)


def test_the_record_of_a_run_has_the_text_that_was_parsed(session: Session) -> None:
    """Of jobs with the same text each has its copy; one that was written anew before its start has the new text."""
    lines = [f'env = {{ N = "{number}" }}' for number in (1, 1, 1, 2)]
    session.users.submit("way", "hang until 2", "cpus = 2")
    session.settle()
    for name, line in zip("abcd", lines, strict=True):
        session.users.submit(name, "ok", line)
    wait_for(lambda: session.turns(1) or (session.now is not None and set("abcd") <= set(session.now.state.jobs)))
    assert [file.text is None for name in "abcd" if (file := session.now.state.jobs[name].queued)] == [
        True,
        False,
        False,
        True,
    ]
    session.users.submit("c", "ok", 'env = { N = "3" }')
    session.world.kill("way")
    session.settle()
    copies = {name: (session.world.root / f"jobs/{name}/1/job.toml").read_bytes() for name in "abcd"}
    assert copies == {name: session.users.path(DONE, name).read_bytes() for name in "abcd"}
    assert b'"3"' in copies["c"]


@pytest.mark.parametrize("another", [True, False], ids=["a job waits", "no job waits"])
def test_a_start_and_an_end_take_a_plan(session: Session, monkeypatch: pytest.MonkeyPatch, *, another: bool) -> None:
    """Own moves and paperwork make no other plan, and an end that no job waits for makes none."""
    plans: list[int] = []
    really = planner.decide

    def decide(*about: Any) -> Plan:
        plans.append(len(plans))
        return really(*about)

    monkeypatch.setattr(planner, "decide", decide)
    monkeypatch.setattr(planner.Planner, "foreseen", lambda self, *, paused: None)
    monkeypatch.setattr(loop, "is_on_its_way", lambda _: True)  # as a child is
    session.users.submit("x", "ok")
    if another:
        session.users.submit("large", "ok", "cpus = 99999")
    hear(session)
    session.turns(5)
    session.settle()
    assert ends_of(session.world).places["x"] == (DONE,)
    assert len(plans) == 1 + another


def test_who_depends_on_a_run_starts_with_its_end(session: Session) -> None:
    """Its paperwork is news for those that wait for it."""
    session.users.submit("y", "ok", 'depends_on = ["x"]')
    session.users.submit("x", "ok")
    session.users.submit("z", "ok", 'depends_on = { failed = ["x"] }', 'on_dependency_failure = "cancel"')
    hear(session)
    session.settle()
    assert ends_of(session.world).outcomes == {"x": ("finished 1.0",), "y": ("finished 1.0",), "z": ("cancelled 1.0",)}


def test_another_file_that_is_held_is_known_when_the_waiting_one_ends(session: Session) -> None:
    """No event tells of it a second time."""
    session.users.submit("x", "ok", place=HELD)
    session.users.submit("x", "ok", 'depends_on = ["y"]')
    session.users.submit("y", "fail")
    hear(session)
    session.settle()
    assert ends_of(session.world).outcomes["x"] == ("cancelled 1.0",)
    assert list(session.now.state.held) == ["x"]
    os.rename(session.users.path(HELD, "x"), session.users.path(QUEUED, "x"))
    hear(session)
    session.settle()
    assert ends_of(session.world).outcomes["x"] == ("cancelled 1.0", "finished 1.0")
