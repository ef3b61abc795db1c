"""Runs on another machine: nothing of this one is taken, looked at or signalled, and their engine is asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crash.world import Session, ends_of, history, world_at
from spool import executors
from spool.core import layout
from spool.core.layout import DONE, RUNNING
from spool.core.lifecycle import Liveness
from spool.core.model import SECOND_NS, Machine, State, StopKind
from spool.dispatcher import launcher, recovery, supervisor
from spool.dispatcher.loop import Dispatcher
from spool.executors import Usage
from spool.formats import run_records
from spool.machine import processes
from spool.query.explain import why
from spool.state.run import ActiveRun
from spool.store.spool import Spool
from spool.testing.engine import FakeEngine, FakeRun

THERE = 'executor = "slurm"'  # a name that job files may say, and that no engine has yet


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an engine of that name, and no process looked for."""
    monkeypatch.setitem(executors._WHERE, "slurm", ("spool.testing.engine", "FakeEngine"))
    monkeypatch.setattr(FakeEngine, "runs", {})

    def scan(wanted: Any, **_: Any) -> None:
        raise AssertionError(f"processes of {wanted} were looked for")

    monkeypatch.setattr(processes, "scan", scan)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Give a dispatcher in a world with two processors, and an engine with eight."""
    with world_at(tmp_path / "spool", monkeypatch) as world:
        made = Session(world)
        yield made
        made.end()


def now(session: Session) -> Dispatcher:
    """Return the dispatcher that there is."""
    assert session.now is not None
    return session.now


def running(session: Session, name: str = "x", *lines: str) -> tuple[FakeRun, ActiveRun]:
    """Have a job of that name begin there."""
    session.users.submit(name, "true", THERE, *lines)
    session.turns(2)
    run = FakeEngine.runs[name, 1]
    run.begin()
    live = now(session).state.live[name, 1]
    now(session).supervisor.suspect(live)  # no event tells of that
    session.turns(1)
    return run, live


def test_what_runs_elsewhere_takes_nothing_of_this_machine(session: Session) -> None:
    """Both machines are full at once, and each keeps waiting who is for it, and nobody else."""
    for name in ("far-1", "far-2", "far-3"):
        session.users.submit(name, "true", THERE, "cpus = 4")
    for name in ("near-1", "near-2", "near-3"):
        session.users.submit(name, "hang")
    session.settle()
    state, plan = now(session).state, now(session).planner.plan
    assert set(state.runs) == {"far-1", "far-2", "near-1", "near-2"}
    assert (state.runs.counts.cpus, state.runs.elsewhere["slurm"].counts.cpus) == (2, 8)
    assert plan is not None
    reasons = {name: str(plan.reason(name)) for name in ("far-3", "near-3")}
    assert reasons == {
        "far-3": "cpus: needs 4, 0 free (2 runs hold 8)",
        "near-3": "cpus: needs 1, 0 free (2 runs hold 2)",
    }
    assert why(Spool(str(session.world.root)), "far-3").reasons[0].text == reasons["far-3"]


def test_its_executor_says_how_a_run_goes_on_and_ends(session: Session) -> None:
    """Its liveness is the engine's word, its exit code that of its records, and what it used the engine's sum."""
    run, live = running(session)
    assert (live.proof, live.jid is not None) == (None, True)
    run.used = Usage(cpu_time_ns=7_000_000, peak_memory_bytes=1 << 20)
    run.end(3)
    session.settle()
    assert ends_of(session.world).outcomes["x"] == ("failed 1.0",)
    (result,) = history(session.world.root)
    assert (result.exit_code, result.cpu_time_ns, result.peak_memory_bytes) == (3, 7_000_000, 1 << 20)
    assert not now(session).state.runs.elsewhere["slurm"]


def test_a_run_that_is_gone_without_an_exit_code_is_lost(session: Session) -> None:
    """The engine's word is proof enough, though its wrapper was on another host."""
    run, _ = running(session, "x", "requeue = false")
    run.end(None)
    session.settle()
    assert ends_of(session.world).outcomes["x"] == ("lost 1.0",)


@pytest.mark.parametrize("begun", [False, True])
def test_nothing_is_concluded_from_the_silence_of_a_run_that_its_engine_knows(
    session: Session, monkeypatch: pytest.MonkeyPatch, *, begun: bool
) -> None:
    """It may wait there for days: neither this dispatcher nor the next one takes its jid, and it is started once."""
    for module in (launcher, recovery):
        monkeypatch.setattr(module, "SILENT_NS", 0)
    session.users.submit("x", "true", THERE)
    session.turns(3)
    if begun:
        FakeEngine.runs["x", 1].begin()
    for _ in range(2):
        session.turns(2)
        session.end()
    session.turns(3)
    assert list(now(session).state.live) == [("x", 1)]
    assert Spool(str(session.world.root)).jid("x", 1) is not Liveness.VOID
    if not begun:
        FakeEngine.runs["x", 1].begin()
    FakeEngine.runs["x", 1].end(0)
    session.settle()
    assert ends_of(session.world).outcomes["x"] == ("finished 1.0",)


def test_a_run_given_up_by_a_dispatcher_that_was_killed_counts_for_nothing(session: Session) -> None:
    """Its jid is void and its file waits again, so nobody has requeued it, though its engine still has it as alive."""
    session.users.submit("x", "true", THERE)
    session.turns(2)
    session.end()
    spool = session.world.root
    (spool / "jobs" / "x" / "1" / "jid").write_bytes(run_records.VOID_JID)
    (spool / "running" / "x.toml").rename(spool / "queued" / "x.toml")  # and the journal does not say so
    assert FakeEngine.runs["x", 1].liveness() is Liveness.ALIVE
    session.turns(2)
    session.turns(3)
    FakeEngine.runs["x", 2].begin()
    now(session).supervisor.suspect(now(session).state.live["x", 2])
    session.turns(1)
    FakeEngine.runs["x", 2].end(0)
    session.settle()
    assert [(line.run, line.outcome, line.attempt) for line in history(spool)] == [(2, State.FINISHED, 1)]


def test_a_cancel_asks_the_engine_and_forces_it_after_the_grace(session: Session) -> None:
    """TERM once, and the end of what does not obey once its kill grace is over; its job is cancelled then."""
    run, live = running(session, "x", 'kill_grace = "1h"')
    run.obeys = False
    session.users.cancel("x")
    session.turns(3)
    assert (run.asked, live.proof) == (["TERM"], None)
    assert live.key in now(session).state.live
    terminating = now(session).terminator._runs[live.key]
    terminating.kill_at_ns = terminating.look_at_ns = time.monotonic_ns()
    session.settle()
    assert run.asked == ["TERM", "KILL"]
    assert ends_of(session.world).places["x"] == (DONE,)
    assert ends_of(session.world).outcomes["x"] == ("cancelled 1.0",)


def test_the_time_limit_of_a_run_elsewhere_is_kept_here(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warning and its stop go to the engine like a cancel."""
    run, live = running(session, "x", 'time_limit = "10m"', 'signal = "USR1@1m"')
    for minutes in (9, 10):
        assert run.asked == ["USR1"] * (minutes - 9)
        at_ns = live.started_boot_ns + minutes * 60 * SECOND_NS
        monkeypatch.setattr(supervisor, "boot_clock", lambda at_ns=at_ns: at_ns)
        session.turns(1)
    session.settle()
    assert run.asked == ["USR1", "TERM"]
    assert live.stop_kind is StopKind.TIMEOUT
    assert ends_of(session.world).outcomes["x"] == ("timeout 1.0",)


def test_a_run_that_is_stopped_while_no_dispatcher_lives_is_stopped_by_the_next(session: Session) -> None:
    """It is adopted from the engine's table, whoever has started it."""
    run, _ = running(session)
    session.end()
    session.users.cancel("x")
    assert not session.users.path(RUNNING, "x").exists()
    session.settle()
    assert run.asked == ["TERM"]
    assert ends_of(session.world).outcomes["x"] == ("cancelled 1.0",)


def test_jobs_for_an_engine_that_cannot_be_used_wait(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps it from starting anything is asked again at each look at everything; others start meanwhile."""
    monkeypatch.setattr(FakeEngine, "problem", "it does not answer")
    session.users.submit("far", "true", THERE)
    session.users.submit("near", "ok")
    session.settle()
    plan = now(session).planner.plan
    assert plan is not None
    assert str(plan.reason("far")) == "executor: it does not answer"
    assert ends_of(session.world).places["near"] == (DONE,)
    monkeypatch.setattr(FakeEngine, "problem", None)
    now(session).watcher.lost = True
    session.turns(2)
    assert list(FakeEngine.runs) == [("far", 1)]
    assert (session.world.root / layout.QUEUED / "far.toml").exists() is False


def test_more_room_elsewhere_is_used_at_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan rests on what each machine has: another one is made when that changes, though no file has."""
    session.users.submit("wide", "true", THERE, "cpus = 9")
    session.settle()
    assert not FakeEngine.runs
    monkeypatch.setattr(FakeEngine, "has", Machine(cpus=9, memory_bytes=1 << 30))
    session.looks_at_everything = False
    session.turns(2)
    assert list(FakeEngine.runs) == [("wide", 1)]
