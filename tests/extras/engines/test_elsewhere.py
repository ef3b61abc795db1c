"""Runs on another machine: nothing of this one is taken, looked at or signalled, and their engine is asked."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from crash.events import events, nobody_reads, want_everything
from crash.world import Session, ends_of, history, world_at
from extras.engines.fake_engine import HOST, FakeEngine, FakeRun
from spool.core import layout
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.lifecycle import ACTIVE, EngineWord, Liveness
from spool.core.model import SECOND_NS, EventName, Machine, Result, State, StopKind
from spool.core.units import show_size
from spool.dispatcher import launcher, monitor, recovery, terminator
from spool.dispatcher.confinement import Thing
from spool.dispatcher.loop import Dispatcher
from spool.executors import EngineEnd, Usage
from spool.formats.capabilities import engines
from spool.formats.events import facts, variables
from spool.formats.run_records import VOID_JID, parse_result, render_result
from spool.formats.state import JobView
from spool.machine import processes
from spool.machine.processes import Found
from spool.query.details import compare, job_details
from spool.query.explain import why
from spool.query.jobs import list_jobs
from spool.query.listing import awaited
from spool.query.rows import JobFilter, JobRow
from spool.state.run import ActiveRun
from spool.store.locked_spool import LockedSpool
from spool.store.spool import Spool

THERE = 'executor = "slurm"'  # a name that job files may say, and that no engine has yet


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an engine of that name, and no process looked for."""
    monkeypatch.setattr(engines()["slurm"], "executor", "extras.engines.fake_engine:FakeEngine")
    monkeypatch.setattr(FakeEngine, "runs", {})

    def search(wanted: Any, *_: Any, **__: Any) -> Found:
        for run in wanted:
            raise AssertionError(f"processes of {run} were looked for")
        return Found({}, True)

    monkeypatch.setattr(processes, "search", search)
    monkeypatch.setattr(processes, "descendants", search)


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
    now(session).supervisor.suspects.add(live.key)  # no event tells of that
    session.turns(1)
    return run, live


def test_what_runs_elsewhere_takes_nothing_of_this_machine(session: Session) -> None:
    """Both are full at once, and each keeps waiting who is for it, and nobody else."""
    for name in ("far-1", "far-2", "far-3"):
        session.users.submit(name, "true", THERE, "cpus = 4")
    for name in ("near-1", "near-2", "near-3"):
        session.users.submit(name, "hang")
    session.settle()
    state, plan = now(session).state, now(session).planner.plan
    assert set(state.runs) == {"far-1", "far-2", "near-1", "near-2"}
    assert (state.runs.counts.cpus, state.runs.engines["slurm"].runs) == (2, 2)
    reasons = {name: str(plan.reason(name)) for name in ("far-3", "near-3")}
    assert reasons == {"far-3": "max_in_flight: 2 of 2 are in Slurm", "near-3": "cpus: needs 1, 0 free (2 runs hold 2)"}
    assert why(Spool(str(session.world.root)), "far-3").reasons[0].text == reasons["far-3"]


def test_what_runs_elsewhere_needs_no_lease_of_this_machine(session: Session) -> None:
    """The machine is shared, and its arbiter is not there: what is for it waits, and nothing else."""
    (session.world.root / layout.CONFIG).write_text(f'machine = "{session.world.root}"\n')
    session.users.submit("far", "true", THERE)
    session.users.submit("near", "hang")
    session.settle()
    plan = now(session).planner.plan
    assert set(now(session).state.runs) == {"far"}
    assert plan.reason("near").code == "machine"


def test_its_executor_says_how_a_run_goes_on_and_ends(session: Session) -> None:
    """Its liveness is the engine's word, its exit code that of its records, and what it used the engine's sum."""
    run, live = running(session)
    assert (live.is_over, live.jid is not None) == (False, True)
    run.used = Usage(cpu_time_ns=7_000_000, peak_memory_bytes=1 << 20)
    run.end(3)
    session.settle()
    assert ends_of(session.world).outcomes["x"] == ("failed 1.0",)
    (result,) = history(session.world.root)
    assert (result.exit_code, result.cpu_time_ns, result.peak_memory_bytes) == (3, 7_000_000, 1 << 20)
    assert not now(session).state.runs.engines["slurm"].runs


def test_the_node_of_a_run_is_in_every_view_and_record(session: Session) -> None:
    """Every view has it while the run goes on, with and without a dispatcher, and then its result and the history."""
    session.users.submit("near", "true")
    run, live = running(session)
    spool = Spool(str(session.world.root))

    def nodes() -> dict[str, str | None]:
        return {row.name: row.node for row in list_jobs(spool).rows}

    assert live.node == HOST
    session.settle()
    assert nodes() == {"x": HOST, "near": None}
    assert job_details(spool, "x").runs[0].record.node == HOST
    session.end()
    assert nodes() == {"x": HOST, "near": None}
    session.turns(1)
    run.end(0)
    session.settle()
    (result,) = history(session.world.root)
    assert result.node == HOST
    assert result.host not in (None, HOST)
    assert parse_result(spool.record("x", 1, layout.RESULT) or b"") == result
    assert job_details(spool, "x").runs[0].record.node == HOST
    assert nodes() == {"x": HOST, "near": None}


@pytest.mark.parametrize(("measured", "recorded"), [(None, 324599808), (1 << 20, 324599808), (1 << 30, 1 << 30)])
def test_the_memory_for_which_its_engine_ended_a_run_is_its_peak(
    session: Session, measured: int | None, recorded: int
) -> None:
    """The engine's words have it where nothing larger was measured, and the advice is to ask for more than that."""
    run, _ = running(session, "x", 'memory = "50M"')
    run.used = Usage(peak_memory_bytes=measured)
    run.said = EngineEnd(EngineWord.OUT_OF_MEMORY, "Slurm wrote 'exceeded memory limit (324599808 > 52428800)'")
    run.end(137)
    session.settle()
    (result,) = history(session.world.root)
    assert (result.outcome, result.peak_memory_bytes) == (State.OUT_OF_MEMORY, recorded)
    found = compare(Spool(str(session.world.root)), "x")
    assert (found.compared.advice.memory_bytes or 0) >= 2 * recorded
    assert f"needs more than {show_size(recorded)}" in found.compared.advice.notes[0]


@pytest.mark.parametrize(("ended", "outcome"), [("", "lost 1.0"), ("0\n", "finished 1.0")])
def test_a_run_that_is_gone_without_an_exit_code_is_lost(session: Session, ended: str, outcome: str) -> None:
    """The engine's word is proof enough, though its wrapper was on another host; but not if only its epilog was cut."""
    run, _ = running(session, "x", "requeue = false")
    run.write(layout.ENDED, ended.encode())
    run.said = EngineEnd(EngineWord.TIMEOUT, "says so") if ended else None
    run.end(None)
    session.settle()
    assert ends_of(session.world).outcomes["x"] == (outcome,)


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
    (spool / "jobs" / "x" / "1" / "jid").write_bytes(VOID_JID)
    (spool / "running" / "x.toml").rename(spool / "queued" / "x.toml")  # and the journal does not say so
    assert FakeEngine.runs["x", 1].liveness() is Liveness.ALIVE
    session.turns(2)
    session.turns(3)
    FakeEngine.runs["x", 2].begin()
    now(session).supervisor.suspects.add(now(session).state.live["x", 2].key)
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
    assert (run.asked, live.is_over) == (["TERM"], False)
    assert live.key in now(session).state.live
    terminating = now(session).terminator.runs[live.key]
    terminating.kill_at_ns = terminating.look_at_ns = time.monotonic_ns()
    session.settle()
    assert run.asked == ["TERM", "KILL"]
    assert ends_of(session.world).places["x"] == (DONE,)
    assert ends_of(session.world).outcomes["x"] == ("cancelled 1.0",)


@pytest.mark.parametrize("ended", ["", "3\n"])
def test_the_limit_of_a_run_there_is_kept_here(session: Session, monkeypatch: pytest.MonkeyPatch, ended: str) -> None:
    """Its warning and its stop go to the engine like a cancel. An epilog gets no warning, and five minutes more."""
    run, live = running(session, "x", 'time_limit = "10m"', 'signal = "USR1@1m"')
    run.write(layout.ENDED, ended.encode())
    for minutes in (9, 10, 14, 15) if ended else (9, 10):
        assert run.asked == ["USR1"] * (0 if ended else minutes - 9)
        at_ns = live.started_boot_ns + minutes * 60 * SECOND_NS
        for module in (monitor, terminator):
            monkeypatch.setattr(module, "boot_clock", lambda at_ns=at_ns: at_ns)
        session.turns(1)
    session.settle()
    assert run.asked == (["TERM"] if ended else ["USR1", "TERM"])
    assert live.stop_kind is (None if ended else StopKind.TIMEOUT)
    assert ends_of(session.world).outcomes["x"] == ("failed 1.0" if ended else "timeout 1.0",)


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
    assert str(plan.reason("far")) == "executor: it does not answer"
    assert ends_of(session.world).places["near"] == (DONE,)
    monkeypatch.setattr(FakeEngine, "problem", None)
    now(session).watcher.lost = True
    session.turns(2)
    assert list(FakeEngine.runs) == [("far", 1)]
    assert (session.world.root / layout.QUEUED / "far.toml").exists() is False


def handed_over(session: Session, name: str = "x", *lines: str) -> tuple[FakeRun, ActiveRun]:
    """Have a job of that name handed over, and wait there."""
    session.users.submit(name, "true", THERE, *lines)
    session.turns(2)
    run, live = FakeEngine.runs[name, 1], now(session).state.live[name, 1]
    run.waits = "Slurm: PENDING (Resources)"
    now(session).supervisor.suspects.add(live.key)
    session.turns(1)
    return run, live


def listed(session: Session, name: str = "x") -> JobRow:
    """Return the job as `spool ls` has it."""
    (row,) = list_jobs(Spool(str(session.world.root)), JobFilter((name,))).rows
    return row


def told(session: Session, name: str = "x") -> JobView:
    """Return the job as `state.json` would have it now."""
    here = now(session)
    return here.status.view(here.planner.plan, here.planner.machine, paused=False).jobs[name]


def test_a_run_that_waits_in_its_engine_is_submitted_with_the_engines_reason(session: Session) -> None:
    """It has not started; once its wrapper speaks, it runs, and the files say so before the dispatcher does."""
    run, live = handed_over(session)
    view = told(session)
    assert (view.state, view.reason, view.started_at_ns) == ("submitted", "Slurm: PENDING (Resources)", None)
    spool = Spool(str(session.world.root))
    assert [row.state for row in awaited(spool, ["x"])] == [State.SUBMITTED]
    run.begin()
    assert listed(session).state is State.RUNNING
    run.waits = None
    now(session).supervisor.suspects.add(live.key)
    session.turns(1)
    view = told(session)
    assert (view.state, view.reason) == ("running", "")
    assert live.begun_at_ns is not None
    assert view.started_at_ns == live.begun_at_ns >= live.started_at_ns


def test_what_waits_in_an_engine_has_used_nothing(session: Session) -> None:
    """Neither its user's share nor its run time counts before its wrapper has spoken."""
    run, live = handed_over(session, "x", "cpus = 4")
    state = now(session).state
    user = state.runs["x"].user

    def uses() -> bool:
        usage = state.past.shares._usage.get(user)
        return usage is not None and usage.rate > 0

    assert (state.runs["x"].submitted, uses()) == (True, False)
    run.begin()
    now(session).supervisor.suspects.add(live.key)
    session.turns(1)
    assert (state.runs["x"].submitted, uses()) == (False, True)
    run.end(0)
    session.settle()
    assert not uses()


@pytest.mark.parametrize("begins", [True, False])
def test_a_run_that_ends_between_two_looks_has_started_if_its_wrapper_spoke(session: Session, begins: bool) -> None:
    """Its engine never said that it runs: its records say when it did, or that it has used nothing."""
    run, live = handed_over(session)
    if begins:
        run.begin()
        run.end(0)
    else:
        session.users.cancel("x")
        run.gone = True
    session.settle()
    (result,) = history(session.world.root)
    assert (result.outcome, result.run) == (State.FINISHED if begins else State.CANCELLED, 1)
    assert result.started_at_ns == (live.begun_at_ns if begins else None)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_job_that_waits_too_long_in_its_engine_is_unschedulable(
    session: Session, monkeypatch: pytest.MonkeyPatch, *, restarted: bool
) -> None:
    """The time in the queue and the time there count together, and the next dispatcher counts both as well."""
    monkeypatch.setattr(FakeEngine, "problem", "it does not answer")
    session.users.submit("x", "true", THERE, 'scheduling_timeout = "10m"')
    session.turns(2)
    job = now(session).state.jobs["x"]
    assert job.wait is not None
    job.wait = replace(job.wait, waited_ns_before=6 * 60 * SECOND_NS)
    monkeypatch.setattr(FakeEngine, "problem", None)
    now(session).launcher.ask_executors_again()
    session.turns(2)
    run, live = FakeEngine.runs["x", 1], now(session).state.live["x", 1]
    run.waits = "Slurm: PENDING (Resources)"
    if restarted:
        session.end()
        session.turns(2)
        live = now(session).state.live["x", 1]
    for minutes, asked in ((3, []), (5, ["TERM"])):
        at_ns = live.started_boot_ns + minutes * 60 * SECOND_NS
        monkeypatch.setattr(monitor, "boot_clock", lambda at_ns=at_ns: at_ns)
        session.turns(2)
        assert run.asked == asked
    session.settle()
    (result,) = history(session.world.root)
    assert (result.outcome, result.started_at_ns) == (State.UNSCHEDULABLE, None)
    assert result.reason.endswith("10m00s (Slurm: PENDING (Resources))")
    assert ends_of(session.world).places["x"] == (DONE,)


def test_a_job_that_has_begun_in_time_may_run_for_as_long_as_it_likes(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduling timeout ends with the start."""
    run, live = running(session, "x", 'scheduling_timeout = "10m"')
    monkeypatch.setattr(monitor, "boot_clock", lambda: live.started_boot_ns + 3600 * SECOND_NS)
    session.turns(2)
    assert run.asked == []


def test_what_is_moved_back_while_it_waits_there_waits_in_the_queue_again(session: Session) -> None:
    """It is the same submission: its earlier run that never started is not taken for its end."""
    run, _ = handed_over(session, "x", 'scheduling_timeout = "1h"')
    session.users.move("x", RUNNING, layout.HELD)
    session.turns(3)
    assert run.asked == ["TERM"]
    session.settle()
    assert ends_of(session.world).places["x"] == (layout.HELD,)
    session.users.move("x", layout.HELD, DONE)
    session.settle()
    assert [(result.run, result.outcome) for result in history(session.world.root)] == [
        (1, State.CANCELLED),
        (2, State.CANCELLED),
    ]


def test_no_more_runs_are_in_an_engine_than_the_configuration_allows(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next ones wait with that reason, in the order of their priority, whatever they ask for."""
    monkeypatch.setattr(FakeEngine, "has", Machine.of_an_engine(2))
    for name, priority in (("low", 1), ("first", 30), ("second", 20)):
        session.users.submit(name, "true", THERE, f"priority = {priority}", "cpus = 99", "gpus = 3")
    session.settle()
    assert list(FakeEngine.runs) == [("first", 1), ("second", 1)]
    plan = now(session).planner.plan
    reason = plan.reason("low")
    assert (reason.code, "2 of 2" in reason.text) == ("max_in_flight", True)
    spool = Spool(str(session.world.root))
    monkeypatch.setattr(FakeEngine, "has", Machine.of_an_engine(1))
    assert "2 of 1" in why(spool, "low").reasons[0].text
    monkeypatch.setattr(FakeEngine, "has", Machine.of_an_engine(2))
    FakeEngine.runs["first", 1].end(0)
    session.settle()
    assert ("low", 1) in FakeEngine.runs


def test_quotas_and_groups_count_what_is_in_an_engine(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs too, though nobody here knows which ones: what a user may have at once is a matter of both machines."""
    monkeypatch.setattr(FakeEngine, "has", Machine.of_an_engine(200))
    monitor = "[quotas.default_user]\nmax_running_gpus = 4\nmax_running_cpus = 9\n"
    (session.world.root / layout.CONFIG).write_text(f'disk_floor = "0M"\n{monitor}')
    session.users.submit("a", "true", THERE, "gpus = 3", 'group = "g"', "group_limit = 1")
    session.settle()
    session.users.submit("b", "true", THERE, "gpus = 2")
    session.users.submit("c", "true", THERE, 'group = "g"', "group_limit = 1")
    session.users.submit("d", "true", THERE, "cpus = 9")
    session.settle()
    assert list(FakeEngine.runs) == [("a", 1)]
    plan = now(session).planner.plan
    user = now(session).state.runs["a"].user
    assert [str(plan.reason(name)) for name in "bcd"] == [
        f"quota: {user} uses 3 of 4 GPUs, needs 2",
        "group g is full: 1 of 1 running",
        f"quota: {user} uses 1 of 9 CPUs, needs 9",
    ]


def ends_there(session: Session, name: str, word: EngineWord, *, run: int = 1, begun: bool = False) -> None:
    """Have the engine say that a run has ended, and let the dispatcher see it."""
    there = FakeEngine.runs[name, run]
    if begun:
        there.begin()
    there.said, there.gone = EngineEnd(word, f"it says {word}"), True
    session.settle()


def test_a_job_that_fails_there_before_it_begins_is_held_after_the_third_time(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing counts, no result is written, and the file in held/ has the engine's words beside it."""
    monkeypatch.setattr("spool.state.run.LONGEST_PAUSE_NS", 0)
    session.users.submit("x", "true", THERE)
    session.turns(3)
    for run in (1, 2):
        ends_there(session, "x", EngineWord.FAILED, run=run)
        assert ("x", run + 1) in FakeEngine.runs
    ends_there(session, "x", EngineWord.FAILED, run=3)
    assert ends_of(session.world).places["x"] == (HELD,)
    said = "it has failed 3 times before it began: it says failed; `spool release x` tries again\n"
    assert (session.world.root / HELD / "x.toml.reason").read_text() == said
    assert not history(session.world.root)
    assert ("x", 4) not in FakeEngine.runs


@pytest.mark.parametrize("refusal", ["no such partition", None])
def test_a_run_that_its_engine_does_not_have_is_void(session: Session, refusal: str | None) -> None:
    """What arrives late begins nothing, and nothing counts; its job waits again, or is held if it was refused."""
    session.users.submit("x", "true", THERE)
    session.turns(3)
    run = FakeEngine.runs["x", 1]
    run.refusal, run.absent = refusal, True
    session.settle()
    assert Spool(str(session.world.root)).jid("x", 1) is Liveness.VOID
    assert not history(session.world.root)
    if refusal is not None:
        assert ends_of(session.world).places["x"] == (HELD,)
        said = "no such partition; `spool edit x`, then `spool release x`"
        assert (session.world.root / HELD / "x.toml.reason").read_text() == f"{said}\n"
        assert why(Spool(str(session.world.root)), "x").reasons[0].text == f"held: {said}"
        assert list(FakeEngine.runs) == []
        (session.world.root / HELD / "x.toml").rename(session.world.root / QUEUED / "x.toml")
        session.settle()
    assert list(FakeEngine.runs) == [("x", 2)]


def test_a_run_that_is_preempted_runs_again_however_often(session: Session) -> None:
    """That counts neither as a retry nor as one of the three requeues of a lost run."""
    session.users.submit("x", "true", THERE)
    session.turns(3)
    for run in range(1, 6):
        ends_there(session, "x", EngineWord.PREEMPTED, run=run, begun=True)
    lines = history(session.world.root)
    assert {(line.outcome, line.again, line.requeues) for line in lines} == {("preempted", "requeue", 0)}
    assert ("x", 6) in FakeEngine.runs


@pytest.mark.parametrize("begun", [False, True])
def test_what_somebody_cancels_there_is_cancelled(session: Session, *, begun: bool) -> None:
    """Whether it has begun or not, it is no loss, and does not run again."""
    session.users.submit("x", "true", THERE)
    session.turns(3)
    ends_there(session, "x", EngineWord.CANCELLED, begun=begun)
    assert ends_of(session.world).outcomes["x"] == ("cancelled 1.0",)
    assert ends_of(session.world).places["x"] == (DONE,)


@pytest.mark.parametrize("known", [True, False])
def test_a_wrapper_that_speaks_when_its_jid_is_taken_is_not_lost(
    session: Session, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    """A network file system shows a jid late: the engine forgot the run, its wrapper lives, and nothing starts twice.

    Where not even the content of the jid can be read, nothing is concluded until it can.
    """
    session.users.submit("x", "true", THERE)
    session.turns(2)
    run = FakeEngine.runs["x", 1]
    jid = session.world.root / "jobs" / "x" / "1" / "jid"

    def identified(*_: Any) -> None:
        run.absent = False

    def spoken(*_: Any) -> bool:
        if known and not jid.exists():
            run.begin()
        return False

    monkeypatch.setattr(type(run), "identified", identified)
    monkeypatch.setattr(LockedSpool, "take_jid", spoken)
    session.survives_errors = True
    run.absent = True
    now(session).supervisor.suspects.add(now(session).state.live["x", 1].key)
    session.turns(3)
    assert history(session.world.root) == []
    assert list(FakeEngine.runs) == [("x", 1)]
    if not known:
        assert {error.errno for error in session.errors} == {errno.ESTALE}
        run.begin()
        run.absent = False
    run.end(0)
    now(session).confinement.forget(Thing.of_run(("x", 1)))
    now(session).supervisor.suspects.add(now(session).state.live["x", 1].key)
    session.settle()
    assert ends_of(session.world).outcomes["x"] == ("finished 1.0",)


def test_an_exit_code_that_comes_with_a_late_jid_counts(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says FAILED, and neither record was there when they were read: the job failed, and is not lost."""
    session.users.submit("x", "true", THERE)
    session.turns(2)
    run = FakeEngine.runs["x", 1]

    def spoken(*_: Any) -> bool:
        run.begin()
        run.write(layout.RC, b"3\n")
        return False

    monkeypatch.setattr(LockedSpool, "take_jid", spoken)
    run.gone, run.said = True, EngineEnd(EngineWord.FAILED, "Slurm says FAILED")
    now(session).supervisor.suspects.add(now(session).state.live["x", 1].key)
    session.settle()
    assert ends_of(session.world).outcomes["x"] == ("failed 1.0",)


def test_a_recorded_end_needs_no_word_of_the_engine(session: Session) -> None:
    """A dispatcher was killed between the result and the move: the next one files the job though the engine is away."""
    _, live = running(session)
    session.end()
    spool = Spool(str(session.world.root))
    result = Result("x", 1, 1, State.FINISHED, "exit code 0", live.wait.arrived_at_ns, ended_at_ns=live.started_at_ns)
    (session.world.root / "jobs" / "x" / "1" / "result.toml").write_bytes(render_result(result))
    session.settle()
    assert spool.places("x") == [DONE]
    assert ends_of(session.world).outcomes["x"] == ("finished 1.0",)


def test_a_run_whose_grant_a_power_cut_has_emptied_is_still_its_engine_s(session: Session) -> None:
    """Its wrapper says which engine has it: it is neither lost nor refused as that of another host."""
    running(session)
    session.end()
    (session.world.root / "jobs" / "x" / "1" / "grant.toml").write_bytes(b"")
    (session.world.root / "jobs" / "x" / "1" / "jid").write_bytes(b"4711 1 there - elsewhere slurm:7\n")
    session.turns(3)
    live = now(session).state.live["x", 1]
    assert (live.executor, live.handle, live.is_over) == ("slurm", FakeEngine.runs["x", 1], False)


def test_a_run_that_cannot_be_read_is_watched_where_it_is(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job file does not name its executor: once its records can be read, its engine says what became of it."""
    (session.world.root / "config.toml").write_text('autostart = false\nexecutor = "slurm"\n')
    session.users.submit("x", "true")
    session.turns(2)
    FakeEngine.runs["x", 1].begin()
    session.end()
    grant = Spool.grant

    def unreadable(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Spool, "grant", unreadable)
    session.survives_errors = True
    session.turns(2)
    assert now(session).state.live["x", 1].executor == "slurm"
    (session.world.root / "config.toml").write_text('autostart = false\nexecutor = "process"\n')
    monkeypatch.setattr(Spool, "grant", grant)
    now(session).confinement.forget(Thing.of_job("x"))
    session.turns(3)
    live = now(session).state.live["x", 1]
    assert (live.executor, live.handle, live.phase) == ("slurm", FakeEngine.runs["x", 1], ACTIVE)
    assert history(session.world.root) == []


@pytest.mark.parametrize("off_s", [-3600, 0, 3600])
def test_the_begin_of_a_run_is_told_right_whatever_clock_the_file_system_has(session: Session, off_s: int) -> None:
    """What counts is how long after its grant the wrapper spoke: a limit must not count from an hour before that."""
    running(session)
    metadir = session.world.root / "jobs" / "x" / "1"
    granted_ns = 1_000_000 * SECOND_NS
    for name, after_s in (("grant.toml", 0), ("jid", 7200)):
        at_ns = granted_ns + (after_s + off_s) * SECOND_NS
        os.utime(metadir / name, ns=(at_ns, at_ns))
    spool = Spool(str(session.world.root))
    assert spool.spoke_at_ns("x", 1, granted_ns) == granted_ns + 7200 * SECOND_NS


@pytest.mark.parametrize("served", [True, False])
def test_a_file_that_would_suspend_a_run_elsewhere_suspends_nothing_and_is_told_of(
    session: Session, caplog: pytest.LogCaptureFixture, served: bool
) -> None:
    """It is taken away, by the next dispatcher too, the log and the reason say why, and no view calls it suspended."""
    run, live = running(session)
    if not served:
        session.end()
    session.users.suspend("x")
    assert listed(session).suspended_at_ns is None
    session.settle()
    assert not Path(session.users.layout.suspend_file("x")).exists()
    live = now(session).state.live["x", 1]
    assert (run.asked, live.suspended) == ([], False)
    said = "not suspended: it is in Slurm; `spool hold x` stops it and holds it"
    assert f"job x run 1: {said}" in caplog.text
    view = told(session)
    assert (view.state, view.reason, view.suspended_at_ns) == ("running", said, None)


# --- events ---------------------------------------------------------------------------------------------------


def heard(session: Session) -> list[tuple[str, str | None]]:
    """Return the events of job x, each with the id of its job there."""
    return [(event.name.value, event.engine_id) for event in events(session.world) if event.job == "x"]


@pytest.mark.parametrize("killed", ["never", "before", "after"])
def test_that_its_engine_has_accepted_a_run_is_told_once(
    session: Session, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    """The event comes when its id is known, between those of its claim and of its begin, by whichever dispatcher."""
    nobody_reads(monkeypatch)
    want_everything(monkeypatch)
    run, live = handed_over(session)
    assert heard(session) == [("queued", None), ("submitting", None), ("submitted", None)]
    if killed == "before":
        session.end()
    run.engine_id = "4711"
    if killed != "before":
        now(session).supervisor.suspects.add(live.key)
    session.turns(3)
    if killed == "after":
        session.end()
        session.turns(3)
    run.begin()
    now(session).supervisor.suspects.add(now(session).state.live["x", 1].key)
    session.turns(3)
    run.end(0)
    session.settle()
    known = [("handed_over", "4711"), ("started", "4711"), ("finished", None)]
    assert heard(session) == [("queued", None), ("submitting", None), ("submitted", None), *known]
    (event,) = (each for each in events(session.world) if each.name is EventName.HANDED_OVER)
    assert (event.id, event.executor, "4711" in event.reason) == ("x:1:handed_over", "slurm", True)
    assert (facts(event)["executor"], facts(event)["engine_id"]) == ("slurm", "4711")
    assert variables(event)["SPOOL_ENGINE_ID"] == "4711"


def test_a_run_whose_engine_is_gone_is_left_alone(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may go on there, so it is neither lost nor run again; once the engine is back, its end is found."""
    run, _ = handed_over(session)
    run.begin()
    session.turns(3)
    session.end()
    monkeypatch.setattr(engines()["slurm"], "executor", "spool.extras.nowhere:executor")
    session.survives_errors = True
    session.turns(5)
    assert not (session.world.root / "jobs" / "x" / "1" / "result.toml").exists()
    assert (session.world.root / "running" / "x.toml").exists()
    session.end()
    monkeypatch.setattr(engines()["slurm"], "executor", "extras.engines.fake_engine:FakeEngine")
    run.end(0)
    session.settle()
    assert ends_of(session.world).outcomes["x"] == ("finished 1.0",)
