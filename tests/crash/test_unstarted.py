"""Jobs that end before they run: each has one record with all that its file asked for, or none where it only left."""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import pytest

from crash.cuts import Alike
from crash.world import Session, World, check, history
from faulty import FaultyDisk, PowerCut
from spool.client.gc import plan_removal, remove_planned
from spool.client.waiting import Waiter
from spool.core import layout
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import Result, State
from spool.dispatcher.context import Journal
from spool.dispatcher.finalizer import Finalizer
from spool.formats.config import RetentionPolicy
from spool.formats.run_records import render_history
from spool.formats.state import StateView, render_state
from spool.query.details import job_details
from spool.query.jobs import list_jobs
from spool.store.locked_spool import LockedSpool
from spool.store.spool import Service, Spool

ASKED = ("cpus = 2", 'memory = "2M"', 'project = "P"', 'tags = ["T", "U"]', 'group = "G"')


def _lines(session: Session, name: str = "job") -> list[Result]:
    return [result for result in history(session.world.root) if result.job == name]


def _assert_asked(result: Result) -> None:
    """Assert that a line of the history has what the job's file asked for."""
    request = result.request
    assert (request.cpus, request.memory_bytes) == (2, 2 << 20)
    assert (result.project, result.tags, result.group) == ("P", ("T", "U"), "G")
    assert result.started_at_ns is None


def _assert_one_end(session: Session, outcome: State = State.CANCELLED) -> None:
    check(session.world)
    (line,) = _lines(session)
    assert line.outcome is outcome
    _assert_asked(line)
    recorded = Spool(str(session.world.root)).result("job", line.run)
    assert recorded is not None
    _assert_asked(recorded)
    assert session.users.path(DONE, "job").exists()


# What was asked for.


def _told(session: Session) -> list[object]:
    """Return what `ls` says of the job, and `ls --all`, and `show`."""
    spool = Spool(str(session.world.root))
    rows = [*list_jobs(spool).rows, *list_jobs(spool, everything=True).rows, job_details(spool, "job").row]
    return [(row.state, row.user, row.project, row.tags, row.cpus, row.memory_bytes, row.reason) for row in rows]


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize(("place", "array"), [(QUEUED, ""), (HELD, ""), (HELD, 'array = "0-1"')])
def test_a_job_that_is_filed_away_keeps_what_it_asked_for(
    session: Session, place: str, array: str, *, served: bool
) -> None:
    """Waiting or held, with or without a dispatcher: its record and its line have project, tags, group and request.

    The file of an array that was not expanded waits like a job's, and ends like one.
    """
    session.users.submit("job", "ok", 'depends_on = "never"', array, *ASKED, place=place)
    session.settle()
    if not served:
        session.end()
    session.users.move("job", place, DONE)
    before = _told(session)
    session.settle()
    _assert_one_end(session)
    assert served or _told(session) == before  # the record says what the views said without it


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        (['depends_on = "bad"'], State.CANCELLED),
        (['depends_on = "never"', 'scheduling_timeout = "1ms"'], State.UNSCHEDULABLE),
    ],
    ids=["dependency", "timeout"],
)
def test_a_job_that_is_given_up_keeps_what_it_asked_for(session: Session, lines: list[str], outcome: State) -> None:
    """So it is for a dependency that has failed, and for one that has waited too long."""
    session.users.submit("bad", "fail")
    session.settle()
    session.users.submit("job", "ok", *lines, *ASKED)
    while session.users.path(QUEUED, "job").exists():
        session.settle()
    _assert_one_end(session, outcome)


@pytest.mark.parametrize("place", [QUEUED, HELD])
def test_a_cancel_is_recorded_once_wherever_the_dispatcher_is_killed(alike: Alike, place: str) -> None:
    """Before any change of the disk: one line, one record, with all that was asked for."""

    def cancelled(world: World, cut_at: int | None) -> FaultyDisk:
        session = Session(world)
        session.users.submit("job", "ok", 'depends_on = "never"', *ASKED, place=place)
        session.settle()
        session.end()
        disk = FaultyDisk(world.staging, cut_at=cut_at)
        session.disks = iter([disk])
        session.users.move("job", place, DONE)
        session.settle()
        session.end()
        session.settle()
        _assert_one_end(session)
        session.end()
        return disk

    alike(cancelled)


# What has only left.


@pytest.mark.parametrize("change", ["held", "withdrawn", "edited"])
def test_a_file_that_changes_before_its_end_is_written_ends_nothing(
    session: Session, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Held, withdrawn or saved anew in the moment in which it is given up: nothing is recorded of what was seen."""
    real, users = Finalizer.end_unstarted, session.users

    def end(*arguments: Any) -> None:
        monkeypatch.setattr(Finalizer, "end_unstarted", real)
        if change == "held":
            users.move("job", QUEUED, HELD)
        elif change == "withdrawn":
            users.path(QUEUED, "job").unlink()
        else:
            users.submit("job", "ok # edited")
        real(*arguments)

    monkeypatch.setattr(Finalizer, "end_unstarted", end)
    users.submit("job", "ok", 'depends_on = "never"', 'scheduling_timeout = "1ms"')
    session.settle()
    places = {place for place in layout.PLACES if users.path(place, "job").exists()}
    outcomes = [line.outcome for line in _lines(session)]
    expected = {"held": ({HELD}, []), "withdrawn": (set(), []), "edited": ({DONE}, [State.FINISHED])}
    assert (places, outcomes) == expected[change]


def test_a_job_that_was_withdrawn_meanwhile_is_not_taken_for_the_record_of_an_earlier_one(session: Session) -> None:
    """The file in `done/` is that of the run before: it cancels nothing."""
    session.users.submit("job", "ok")
    session.settle()
    session.users.submit("job", "ok", 'depends_on = "never"')
    session.settle()
    session.end()
    session.users.path(QUEUED, "job").unlink()
    session.settle()
    assert [line.outcome for line in _lines(session)] == [State.FINISHED]
    session.end()
    shutil.rmtree(session.world.root / "jobs" / "job")  # nor does it without the records of that run
    session.settle()
    assert [line.outcome for line in _lines(session)] == [State.FINISHED]


# Claimed, and told nobody.


def _claimed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the dispatcher killed between the move to `running/` and the line of the journal."""
    real = Journal.write

    def cut(*_: object) -> None:
        raise PowerCut

    monkeypatch.setattr(Journal, "write", cut)
    session.users.submit("job", "ok", *ASKED)
    session.after_cut = lambda: monkeypatch.setattr(Journal, "write", real)
    session.turns(1)
    assert session.cuts == 1
    assert session.users.path(RUNNING, "job").exists()


def test_an_end_that_was_cut_off_is_finished_without_the_journal_too(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start was taken back for a newer file; the record of that is there, and the older file still in `running/`."""
    _claimed(session, monkeypatch)
    session.users.submit("job", "ok # newer")

    def cut(*_: object) -> None:
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(LockedSpool, "archive", cut)
        session.after_cut = patch.undo
        session.turns(1)
    assert session.users.path(RUNNING, "job").exists()
    (session.world.root / layout.JOURNAL).unlink(missing_ok=True)
    session.settle()
    check(session.world)
    assert [(line.run, line.outcome) for line in _lines(session)] == [(2, State.CANCELLED), (3, State.FINISHED)]


@pytest.mark.parametrize("how", ["rm", "cancel", "done"])
@pytest.mark.parametrize("journal", ["as it is", "lost"])
def test_a_job_that_was_claimed_and_then_cancelled_ends_once(
    session: Session, monkeypatch: pytest.MonkeyPatch, how: str, journal: str
) -> None:
    """Its file has left `running/` and the journal does not know of it: it ends as cancelled, with one record."""
    _claimed(session, monkeypatch)
    if how == "rm":
        session.users.path(RUNNING, "job").unlink()
    elif how == "cancel":
        session.users.cancel("job")
    else:
        session.users.move("job", RUNNING, DONE)
    if journal == "lost":
        (session.world.root / layout.JOURNAL).unlink(missing_ok=True)
    waiter = Waiter(Spool(str(session.world.root)), ("job",))
    assert waiter.poll() == []
    session.settle()
    _assert_one_end(session)
    [end] = waiter.poll()
    assert end.outcome is State.CANCELLED


@pytest.mark.parametrize("place", [QUEUED, HELD])
def test_a_job_that_was_claimed_and_then_moved_back_waits(
    session: Session, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Nothing of it is recorded before it runs, and then once."""
    _claimed(session, monkeypatch)
    session.users.move("job", RUNNING, place)
    session.settle()
    if place == HELD:
        assert not _lines(session)
        session.users.move("job", HELD, QUEUED)
        session.settle()
    assert [line.outcome for line in _lines(session)] == [State.FINISHED]
    check(session.world)


def test_recovery_reads_no_record_of_jobs_ended_long_ago(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no run since the journal was written last is not looked at."""
    for number in range(5):
        session.users.submit(f"old{number}", "ok")
    session.settle()
    session.end()
    later = time.time() + 3600
    os.utime(session.world.root / layout.JOURNAL, (later, later))
    looked: list[str] = []
    real = Spool.latest_run
    monkeypatch.setattr(Spool, "latest_run", lambda spool, name: looked.append(name) or real(spool, name))
    session.turns(1)
    assert not looked


# Waiting for what nobody ends.


def test_a_metadir_that_no_dispatcher_has_prepared_is_no_run_to_wait_for(session: Session) -> None:
    """A directory that somebody has made by hand ends nothing, and nothing waits for it."""
    (session.world.root / "jobs" / "job" / "7").mkdir(parents=True)
    [end] = Waiter(Spool(str(session.world.root)), ("job",)).poll()
    assert end.outcome is State.CANCELLED


def test_nobody_waits_for_a_run_that_the_dispatcher_does_not_know(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result was removed: the history says how it ended, and where that is silent too, it is lost."""
    session.users.submit("job", "ok")
    session.settle()
    root = session.world.root
    (root / "jobs" / "job" / "1" / layout.RESULT).unlink()
    monkeypatch.setattr(Spool, "service", lambda _: Service.SERVED)
    monkeypatch.setattr("spool.client.waiting.GRACE_NS", 0)
    (root / layout.STATE).write_bytes(render_state(StateView(version=1, at_ns=1, pid=1)))
    os.utime(root / layout.STATE, (time.time() + 60, time.time() + 60))

    def polled() -> State:
        waiter = Waiter(Spool(str(root)), ("job",))
        waiter.poll()
        [end] = waiter.poll()
        return end.outcome

    assert polled() is State.FINISHED
    (root / layout.HISTORY).write_bytes(b"")
    assert polled() is State.LOST


# What is collected.


def _collect(session: Session, policy: RetentionPolicy) -> None:
    spool = Spool(str(session.world.root))
    remove_planned(spool, plan_removal(spool, policy, time.time_ns() + 10**9))
    (session.world.root / layout.STAGING / "gc.lock").unlink()


def test_what_has_no_line_of_history_is_not_collected(session: Session) -> None:
    """Filed away while no dispatcher runs, a job stays until its end is on record; then it goes."""
    session.users.submit("job", "ok", 'depends_on = "never"', *ASKED)
    session.settle()
    session.end()
    session.users.move("job", QUEUED, DONE)
    _collect(session, RetentionPolicy(max_age_ns=1))
    assert session.users.path(DONE, "job").exists()
    session.settle()
    _assert_one_end(session)
    _collect(session, RetentionPolicy(max_age_ns=1))
    assert not session.users.path(DONE, "job").exists()
    assert len(_lines(session)) == 1


@pytest.mark.parametrize("policy", [RetentionPolicy(max_age_ns=1), RetentionPolicy(max_runs=1)], ids=["all", "some"])
def test_what_was_collected_does_not_come_back(session: Session, policy: RetentionPolicy) -> None:
    """The next dispatcher restores no run of the last minute that was removed, and uses no number again."""
    for number in range(2):
        session.users.submit("job", f"ok # {number}")
        session.settle()
    _collect(session, policy)
    spool = Spool(str(session.world.root))
    kept = spool.runs("job")
    assert 1 not in kept
    session.end()
    session.world.reboot()
    session.settle()
    assert spool.runs("job") == kept
    session.users.submit("job", "ok")
    session.settle()
    assert [line.run for line in _lines(session)] == [1, 2, 3]


# What the history cannot know.


@pytest.mark.parametrize("job", ["job", "../../outside", "x/../../outside"])
def test_a_line_of_history_that_the_files_contradict_restores_nothing(session: Session, job: str) -> None:
    """A run of this boot goes on, whatever a line says; and no line is written outside the spool."""
    session.users.submit("job", "hang until 2")
    session.settle()
    session.end()
    line = render_history(Result(job, 1, 1, State.FINISHED, "exit code 0", ended_at_ns=time.time_ns()))
    with open(session.world.root / layout.HISTORY, "ab") as accounts:
        accounts.write(line)
    session.turns(3)
    assert session.world.pids("job")
    assert Spool(str(session.world.root)).result("job", 1) is None
    assert not list(session.world.root.parent.glob("outside*"))
