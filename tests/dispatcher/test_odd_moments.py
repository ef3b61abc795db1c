"""What nobody can tell for a moment, and what happens before a run has said who it is."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Collection, Mapping
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from crash.world import HOST, NAMESPACE, Session, World, _Processes, ends_of
from spool.core import layout
from spool.core.layout import DONE, HELD, QUEUED, RESERVATIONS, RUNNING
from spool.core.model import SECOND_NS, Jid, Stop, StopKind
from spool.core.runtimes import Source
from spool.dispatcher import arrays, scanner, service
from spool.dispatcher.wakeup import Hint
from spool.executors.base import Launch
from spool.executors.local import LocalRun
from spool.store.disk import Disk
from spool.store.edited import FileText, ReadFailure, read_stable
from support import wait_for


def test_a_file_that_nobody_can_see_for_a_moment_is_not_gone(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale handle of NFS, or a directory that nobody may enter: the job keeps its place."""
    session.users.submit("first", "hang until 2", "cpus = 2")
    session.users.submit("waits", "ok")
    session.settle()
    now = session.now
    lstat, path = os.lstat, str(session.users.path(QUEUED, "waits"))

    def stale(of: Any, *arguments: Any, **keys: Any) -> os.stat_result:
        if os.fspath(of) == path:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return lstat(of, *arguments, **keys)

    before = now.state.queue["waits"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", stale)
        now.scanner.hint(Hint(QUEUED, "waits.toml"))
    assert now.state.queue["waits"] is before


def test_a_job_whose_second_name_goes_starts_at_once(session: Session) -> None:
    """`ln held/x queued/`, then `rm held/x`: between the two it cannot start, and after them it waits for no look."""
    session.users.submit("x", "ok", place=HELD)
    session.settle()
    now = session.now
    held, queued = session.users.path(HELD, "x"), session.users.path(QUEUED, "x")
    os.link(held, queued)
    now.scanner.hint(Hint(QUEUED, "x.toml"))
    now._plan()
    assert "held/" in (now.state.queue["x"].executor_problem or "")
    os.unlink(held)
    now.scanner.hint(Hint(HELD, "x.toml"))
    assert now._plan()


@pytest.mark.parametrize("how", ["cancel", "rm"])
def test_a_run_whose_file_goes_in_the_moment_of_its_claim_was_cancelled(
    session: Session, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its job is not forgotten without a word: there is an end, and its file is in `done/`."""
    move = Disk.move

    def taken(self: Disk, old: str, new: str) -> None:
        move(self, old, new)
        if new == str(session.users.path(RUNNING, "x")):
            if how == "cancel":
                session.users.cancel("x")
            else:
                os.unlink(new)

    monkeypatch.setattr(Disk, "move", taken)
    session.users.submit("x", "hang until 9")
    session.settle()
    ends = ends_of(session.world)
    assert ends.outcomes["x"] == ("cancelled 1.0",)
    assert ends.places["x"] == (DONE,)


def test_a_file_that_is_made_readable_is_read(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the mode is none of the text: the next look at everything reads the file all the same."""
    session.users.submit("private", "ok")
    path = session.users.path(QUEUED, "private")
    before = path.stat()

    def unreadable(at: str) -> FileText | ReadFailure:
        return ReadFailure.UNREADABLE if at == str(path) and path.stat().st_mode == before.st_mode else read_stable(at)

    monkeypatch.setattr(scanner, "read_stable", unreadable)
    session.settle()
    assert session.users.layout.error_file(QUEUED, "private") in map(str, path.parent.iterdir())
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the file system's clock may be coarse
        path.chmod(0o640)
    session.settle()
    assert ends_of(session.world).places["private"] == (DONE,)


def test_a_run_that_was_cancelled_before_it_said_who_it_is_was_cancelled(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wrapper was ended before it could: that is no failure."""
    world = session.world

    def start(self: World, launch: Launch) -> LocalRun:
        gone = Jid(9_999_999, 1, self.boot, NAMESPACE, HOST)
        return self.engine.no_child(launch.job, launch.run, gone)

    def cancel() -> None:
        session.users.cancel("young")

    monkeypatch.setattr(World, "start", start)
    session.after_turn = cancel
    session.users.submit("young", "ok")
    session.settle()
    ends = ends_of(world)
    assert ends.outcomes["young"] == ("cancelled 1.0",)
    assert ends.places["young"] == (DONE,)


def test_a_run_that_has_just_said_who_it_is_is_ended_by_that(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search would not see a command that begins at that moment, and the run would be taken for gone."""
    known, terminate = list[bool](), _Processes.terminate

    def ended(self: _Processes, runs: Mapping[LocalRun, bool]) -> Collection[LocalRun]:
        known.extend(run.jid is not None for run in runs)
        return terminate(self, runs)

    monkeypatch.setattr(_Processes, "terminate", ended)
    session.users.submit("young", "hang until 9")
    session.turns(1)
    session.users.cancel("young")
    session.settle()
    assert known == [True]
    assert ends_of(session.world).outcomes["young"] == ("cancelled 1.0",)


def test_a_wrapper_that_begins_after_the_look_that_missed_it_is_ended(session: Session) -> None:
    """Also where its order to stop is on no record that it could find, as on a full disk."""
    session.users.submit("late", "hang until 9")
    world, slow = session.world, list[Launch]()

    def wait() -> None:
        slow.extend(world.launched)
        world.launched.clear()

    session.after_turn = wait
    session.turns(1)
    session.users.cancel("late")
    session.turns(1)
    session.after_turn = lambda: None
    world.launched.extend(slow)
    session.settle()
    assert ends_of(session.world).outcomes["late"] == ("cancelled 1.0",)


def test_the_end_of_a_child_that_no_signal_told_of_is_found_by_a_look_at_everything(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its signal was lost, no run goes on for ever."""

    def start(self: World, launch: Launch) -> LocalRun:
        pid = os.posix_spawn("/bin/true", ["true"], {})
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return self.engine.child(launch.job, launch.run, pid)

    monkeypatch.setattr(World, "start", start)
    session.looks_at_everything = False
    session.settle()
    session.users.submit("short", "ok")
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # blocked, another thread of the tests would take it
    try:
        session.now.scanner.hint(Hint(QUEUED, "short.toml"))
        session.settle()
        assert [live.name for live in session.now.state.live.values()] == ["short"]
        session.look_next()
        session.settle()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert ends_of(session.world).outcomes["short"] == ("failed 1.0",)


def test_a_reservation_that_is_being_written_is_read_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no leases nothing else tells that the file is whole: no event follows the last one."""
    wholeness: list[ReadFailure] = [ReadFailure.WRITING]
    monkeypatch.setattr(scanner, "read_stable", lambda path: next(iter(wholeness), None) or read_stable(path))
    monkeypatch.setattr(scanner, "RECHECK_NS", 0)
    session.looks_at_everything = False
    session.settle()
    now = session.now
    text = 'user = "alice"\ngpus = [0]\nstart = 2100-01-01T00:00:00Z\nend = 2100-01-02T00:00:00Z\n'
    session.users.path(RESERVATIONS, "talk").write_text(text)
    now.watcher.hints.append(Hint(RESERVATIONS, "talk.toml"))
    session.settle()
    assert now.reservations.standing == ()
    assert now.due_in_ns() == 0
    wholeness.clear()
    session.settle()
    assert [one.name for one in now.reservations.standing] == ["talk"]
    assert now.reservations._timer.at_ns is None


def test_who_waits_for_a_writer_sleeps_until_the_next_look_at_his_file(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that was due is due no more, whatever it has found."""
    monkeypatch.setattr(scanner, "read_stable", lambda _: ReadFailure.WRITING)
    monkeypatch.setattr(scanner, "RECHECK_NS", 0)
    session.looks_at_everything = False
    session.users.submit("x", "ok")
    session.turns(1)
    assert session.now.due_in_ns() == 0
    for limit in ("RECHECK_NS", "RECHECK_MAX_NS"):
        monkeypatch.setattr(scanner, limit, 3600 * SECOND_NS)
    session.turns(1)
    assert session.now.due_in_ns() != 0


def test_a_job_that_was_not_started_waits_for_its_executor(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is back in the queue at once, with the reason, and starts when there is something to start it with."""
    with monkeypatch.context() as patch:
        problems = iter([None])  # nothing was wrong before the start
        patch.setattr(World, "unavailable", lambda _: next(problems, "silence"))
        patch.setattr(World, "start", lambda *_: None)
        session.looks_at_everything = False
        for name in ("first", "second"):
            session.users.submit(name, "ok", "cpus = 1")
        session.settle()
        now = session.now
        assert now.state.live == {}
        reasons = {name: now.state.queue[name].executor_problem for name in now.state.queue}
        assert reasons == dict.fromkeys(("first", "second"), "silence")
        assert ends_of(session.world).outcomes == {}
    session.looks_at_everything = True
    session.settle()
    assert ends_of(session.world).outcomes == {"first": ("finished 1.0",), "second": ("finished 1.0",)}


def test_the_deadline_of_an_array_that_is_over_wakes_nobody(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array may end while its file is missing: when that would have counted as deleted matters no more."""
    monkeypatch.setattr(arrays, "MISSING_NS", SECOND_NS // 5)
    session.users.submit("sweep", "ok", 'array = "0"')
    session.turns(2)
    now = session.now
    session.users.path(RUNNING, "sweep").unlink()
    wait_for(lambda: (session.turns(1), not now.state.arrays)[1])
    wait_for(lambda: (session.turns(1), now.due_in_ns() != 0)[1])
    now.arrays._timer.set(0)
    session.turns(1)
    assert now.due_in_ns() != 0


def test_who_may_idle_for_an_hour_does_not_leave_at_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--idle-exit` counts from the last work."""
    session.settle()
    now, slept = session.now, list[int]()

    def sleep(limit_ns: int) -> None:
        slept.append(limit_ns)
        now.wakeup.leaving = limit_ns != 0

    monkeypatch.setattr(now, "sleep", sleep)
    assert now.idle
    service._run(now, once=False, until_idle=False, idle_exit_ns=3600 * SECOND_NS)
    assert 1800 * SECOND_NS < slept[-1] <= 3600 * SECOND_NS


def test_a_dispatcher_learns_from_the_ends_that_it_sees(session: Session) -> None:
    """The history is read once; after that each run that is filed tells how long those like it may last."""
    session.world.cpus = 1
    for name in ("first", "next"):
        session.users.submit(name, "hang")
    session.settle()
    state = session.now.state
    live, guess = state.live["first", 1], state.past.run_times.guess
    assert guess(live.user, "first", live.spec.request).source is Source.NONE
    session.world.exit(session.world.pids("first")[0], 0)
    session.settle()
    assert guess(live.user, "first", live.spec.request).source is Source.USER


def test_a_run_that_does_not_stand_still_is_looked_at_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it forks during a look escapes that, and no event tells of it."""
    session.users.submit("x", "hang")
    session.settle()
    monkeypatch.setattr(_Processes, "suspend", lambda *_: ())
    session.users.suspend("x")
    session.turns(2)
    assert session.now.suspender._timer.at_ns is not None


def test_who_waits_beside_a_run_that_is_killed_for_its_memory_asks_for_more(session: Session) -> None:
    """Its request was another as long as that run had not ended."""
    for _ in range(2):
        session.users.submit("x", "hang", 'memory = "50M"', 'retry = { max = 1, memory_factor = 4, on = ["failed"] }')
        session.settle()
    (session.world.root / layout.PAUSED).touch()
    now = session.now
    now.stops.order(now.state.live["x", 1], Stop(StopKind.MEMORY, "spool", 0))
    session.settle()
    assert ends_of(session.world).outcomes == {"x": ("out_of_memory 1.0",)}
    assert now.state.queue["x"].sized.request.memory_bytes == 200 << 20


def test_an_array_that_goes_while_expanded_leaves_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a pass has no time for all of it, and no other array comes."""
    monkeypatch.setattr(arrays, "BUDGET_NS", 8)
    monkeypatch.setattr(arrays, "time", SimpleNamespace(monotonic_ns=count().__next__))
    session.users.submit("sweep", "ok # {index}", 'array = "0-9"')
    session.turns(1)
    assert os.listdir(session.world.staging)
    session.users.path(QUEUED, "sweep").unlink()
    session.settle()
    assert not os.listdir(session.world.staging)
