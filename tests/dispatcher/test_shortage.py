"""What the dispatcher does when the machine refuses what a start needs."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crash.world import Session, World, check, ends_of
from spool.core import layout
from spool.core.errors import StartRefused
from spool.core.lifecycle import Ended, RunEnd, Void
from spool.core.model import SECOND_NS, State
from spool.dispatcher.confinement import Confinement, Thing
from spool.dispatcher.planner import Shortage
from spool.dispatcher.wakeup import Timer
from spool.executors import Executors
from spool.executors.base import Launch, refused, sounds_refused
from spool.executors.local import LocalRun
from spool.formats import run_records, wrapper
from spool.formats.wrapper import NO_JID, REFUSED
from spool.query.explain import why
from spool.query.rows import in_words
from spool.state.run import NO_BACKOFF, ActiveRun
from spool.store.spool import Spool


@pytest.fixture
def session(session: Session) -> Session:
    """Give a dispatcher in a world on a machine with sixty processors."""
    session.world.cpus = 60
    return session


@pytest.fixture
def lasting(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the pauses last longer than any test, as soon as there is one."""
    monkeypatch.setattr("spool.state.run.LONGEST_PAUSE_NS", 1 << 60)
    monkeypatch.setattr("spool.state.run.SECOND_NS", 3600 * SECOND_NS)


def refusing(monkeypatch: pytest.MonkeyPatch, refuses: Callable[[Launch], bool]) -> list[str]:
    """Have the machine refuse starts; return the names of the jobs that were tried."""
    start, tried = World.start, list[str]()

    def tries(self: World, launch: Launch) -> LocalRun:
        tried.append(launch.job)
        if refuses(launch):
            raise StartRefused("/bin/sh was not started: Resource temporarily unavailable")
        return start(self, launch)

    monkeypatch.setattr(World, "start", tries)
    return tried


def test_pauses_grow_from_a_second_to_a_minute() -> None:
    """Each refusal in succession doubles the pause, up to a minute."""
    refusal, pauses = NO_BACKOFF, []
    for at_ns in range(9):
        refusal = refusal.again("no process", at_ns)
        pauses.append((refusal.until_ns - at_ns) // SECOND_NS)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_pauses_after_errors_grow_to_five_seconds() -> None:
    """Each error of the same work doubles its pause, from 50 ms."""
    timer, pauses = Timer(), []
    confinement = Confinement("/nowhere", timer, lambda: 0)
    for _ in range(9):
        timer.set(None)
        confinement.failed(Thing.of_job("x"), "start", OSError(errno.EIO, "bad disk"))
        pauses.append((timer.at_ns or 0) * 1000 // SECOND_NS)
    assert pauses == [50, 100, 200, 400, 800, 1600, 3200, 5000, 5000]


def test_a_machine_without_a_thread_to_spare_is_short_like_any_other() -> None:
    """What a failed start of a thread raises is told with the remedy, not as an internal error."""
    confinement = Confinement("/nowhere", Timer(), lambda: 0)
    confinement.failed(Thing("service", "the listeners"), "serve", RuntimeError("can't start new thread"))
    (said,) = confinement.problems()
    assert (os.strerror(errno.EAGAIN) in said, "ulimit -u" in said, "internal" in said) == (True, True, False)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT])
def test_every_shortage_is_a_refusal(number: int) -> None:
    """A quota that is full fails no job either, and another program's words for it say the same."""
    error = OSError(number, os.strerror(number))
    assert refused(error)
    assert sounds_refused(f"tmux: {error.strerror}")


@pytest.mark.usefixtures("lasting")
def test_a_machine_that_refuses_is_not_asked_by_sixty_jobs(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs find out that the machine refuses every start, and the others wait with that reason, uncounted."""
    tried = refusing(monkeypatch, lambda _: True)
    for number in range(60):
        session.users.submit(f"job-{number}", "ok", "requeue = false")
    session.settle()
    assert len(tried) == 2
    assert ends_of(session.world).outcomes == {}
    plan = session.now.planner.plan
    for number in range(60):
        reason = plan.reason(f"job-{number}")
        assert reason.code == "refused"
        assert os.strerror(errno.EAGAIN) in reason.text


def test_all_jobs_run_once_the_machine_allows_it(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was refused a hundred times has its first attempt before it, and nothing was counted."""
    left = iter(range(100))
    refusing(monkeypatch, lambda _: next(left, None) is not None)
    for number in range(20):
        session.users.submit(f"job-{number}", "ok", "retry = { max = 1 }")
    session.settle(patience=2000)
    ends = ends_of(session.world)
    assert set(ends.outcomes.values()) == {("finished 1.0",)}
    assert set(ends.starts.values()) == {1}
    session.end()
    check(session.world)


@pytest.mark.usefixtures("lasting")
@pytest.mark.parametrize("how", ["denied", "refused"])
def test_a_job_that_is_refused_alone_keeps_nobody_waiting(session: Session, how: str) -> None:
    """What the machine refuses to one job only is that job's own trouble."""
    session.users.submit("a-first", f"{how} until 9", "priority = 9")
    for number in range(5):
        session.users.submit(f"job-{number}", "ok")
    session.settle()
    outcomes = ends_of(session.world).outcomes
    assert outcomes == {f"job-{number}": ("finished 1.0",) for number in range(5)}
    assert str(session.now.planner.plan.reason("a-first")).startswith("refused: ")


def test_the_end_of_a_shortage_is_its_first_run_that_begins(tmp_path: Path) -> None:
    """After a refusal one job is tried at a time, and all of them once one has begun."""
    spool: Any = SimpleNamespace(record=lambda *_: status)
    status: bytes | None = None
    timer = Timer()
    shortage = Shortage(spool, timer)
    one, two, three = (_live(name, at) for name, at in (("one", 10), ("two", 20), ("three", 30)))
    assert shortage.most() is None
    shortage.refused(one, "no process", 11)
    assert (shortage.most(), shortage.words(12)) == (1, "")
    shortage.tries(two)
    assert (shortage.most(), "job two" in shortage.words(21)) == (0, True)
    assert timer.at_ns > 21
    shortage.refused(two, "no process", 22)
    assert shortage.words(23).startswith("no process; ")
    assert timer.at_ns == 22 + SECOND_NS
    later = 2 * SECOND_NS
    assert shortage.words(later) == ""
    shortage.tries(three)
    status = b"queued\n"
    assert shortage.words(later)
    status = b"running\n"
    assert (shortage.words(later), shortage.most(), timer.at_ns) == ("", None, None)


@pytest.mark.parametrize(("age_ns", "status"), [(2 * SECOND_NS, None), (0, b""), (0, b"finished\n")])
def test_a_first_job_whose_status_does_not_say_running_keeps_nobody_waiting(age_ns: int, status: bytes | None) -> None:
    """Whatever its wrapper wrote is a beginning, and so is a life of two seconds where the job removed the record."""
    spool: Any = SimpleNamespace(record=lambda *_: status)
    shortage = Shortage(spool, Timer())
    shortage.refused(_live("one", 10), "no process", 11)
    first = _live("two", 20)
    first.is_over, first.started_boot_ns = False, first.started_boot_ns - (3600 * SECOND_NS + age_ns if age_ns else 0)
    shortage.tries(first)
    assert (shortage.words(21), shortage.most()) == ("", None)


def test_runs_that_were_refused_together_count_once(tmp_path: Path) -> None:
    """Sixty wrappers that were on their way when the machine ran out of processes make one pause, not the longest."""
    spool: Any = SimpleNamespace(record=lambda *_: None)
    shortage = Shortage(spool, Timer())
    lives = [_live(f"job-{number}", 10) for number in range(60)]
    shortage.ended(lives, 11)
    assert (shortage.most(), shortage.words(12)) == (1, "")


def _live(name: str, at_ns: int) -> Any:
    return SimpleNamespace(
        name=name,
        run=1,
        started_at_ns=at_ns,
        started_boot_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 3600 * SECOND_NS,  # it grows old in no test
        elsewhere=None,
        phase=Void(RunEnd(at_ns), "no process"),
        is_over=True,
        exit_status=None,
    )


@pytest.mark.parametrize("how", ["denied", "refused"])
def test_the_number_of_a_refused_run_is_not_used_again(session: Session, how: str) -> None:
    """Its metadir says that it never began, and the job's history has one run only."""
    session.users.submit("x", f"{how} until 3")
    session.settle()
    spool = Spool(str(session.world.root))
    assert spool.runs("x") == [1, 2, 3]
    voids = [spool.record("x", run, layout.JID) == run_records.VOID_JID for run in spool.runs("x")]
    assert voids == [True, True, False]
    assert ends_of(session.world).outcomes == {"x": ("finished 1.0",)}


def test_a_refusal_that_found_no_room_for_its_words_counts(session: Session) -> None:
    """A full disk leaves the record `refused` empty, and the job waits on all the same."""
    cut_off = session.world.root / "jobs" / "x" / "1" / layout.REFUSED
    session.world.watchers.append(lambda _, path, __: cut_off.write_bytes(b"") if path == str(cut_off) else None)
    session.users.submit("x", "refused until 2", "requeue = false")
    session.settle()
    assert ends_of(session.world).outcomes == {"x": ("finished 1.0",)}


def test_a_run_that_was_stopped_is_not_put_back_though_it_was_refused(session: Session) -> None:
    """A cancel counts for more than a refusal: the job has ended."""
    session.users.submit("x", "refused until 9")
    session.turns(1)
    session.users.cancel("x")
    session.settle()
    ends = ends_of(session.world)
    assert ends.places["x"] == ("done",)
    assert ends.outcomes["x"] == ("cancelled 1.0",)


@pytest.mark.usefixtures("lasting")
def test_why_says_what_the_dispatcher_knows_of_a_refusal(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh look takes over from `state.json` what was refused, to one job or to all, and until when."""
    refusing(monkeypatch, lambda launch: launch.job.startswith("a"))
    session.users.submit("a", "ok")
    session.settle()
    root = session.world.root
    now = session.now
    report = type(now.status)
    report.write(now.status, now.planner.plan, now.planner.machine, paused=False, force=True)
    state = json.loads((root / layout.STATE).read_text())
    assert os.strerror(errno.EAGAIN) in state["refused"]["a"]["why"]
    assert state["refused"]["a"]["why"] in state["jobs"]["a"]["reason"]
    monkeypatch.setattr(Executors, "problem", lambda *_: None)
    answer = why(Spool(str(root)), "a")
    said = in_words(state["jobs"]["a"]["reason"], answer.at_ns)
    assert (answer.reasons[0].code, answer.reasons[0].text) == ("refused", said)
    session.users.submit("ab", "ok")
    session.settle()
    report.write(now.status, now.planner.plan, now.planner.machine, paused=False, force=True)
    session.users.submit("new", "ok")
    assert why(Spool(str(root)), "new").reasons[0].code == "refused"


def _without_jid(session: Session, status: int, leftovers: list[str]) -> ActiveRun:
    """Have a wrapper end without an exit code and its jid removed; *leftovers* are the records that are left."""
    session.users.submit("x", "hang", "requeue = false")
    session.turns(1)
    session.world.kill("x")
    metadir = session.world.root / "jobs" / "x" / "1"
    for record in metadir.iterdir():
        if record.name not in leftovers:
            record.unlink()
    for name in leftovers:
        (metadir / name).touch()
    live = session.now.state.live["x", 1]
    handle = session.world.engine.child("x", 1, 1)
    if live.jid is not None:
        handle.identified(live.jid)
    handle.ended(status, 0, 0)
    live.launched(handle)
    assert session.now.supervisor.concluder.conclude(live)
    return live


_LAUNCHED = [layout.SPEC_COPY, layout.GRANT, layout.WRAPPER]


@pytest.mark.parametrize("status", [signal.SIGKILL, NO_JID << 8, REFUSED << 8, 1 << 8])
@pytest.mark.parametrize(
    "leftovers",
    [[], [layout.SPEC_COPY], *([*_LAUNCHED, trace] for trace in (layout.STATUS, layout.JOB_LOG, layout.FAILURE))],
)
def test_a_job_that_removes_its_own_jid_has_begun(session: Session, status: int, leftovers: list[str]) -> None:
    """Whatever a run leaves but its jid proves that it began, and nothing says later that it never did."""
    live = _without_jid(session, status, leftovers)
    assert live.ended.outcome in (State.LOST, State.FAILED)
    assert Spool(str(session.world.root)).record("x", 1, layout.JID) != run_records.VOID_JID


@pytest.mark.parametrize(
    ("status", "phase"), [(NO_JID << 8, Void), (REFUSED << 8, Void), (signal.SIGKILL, Ended), (1 << 8, Ended)]
)
def test_a_wrapper_without_a_trace_is_refused_only_if_it_says_so(session: Session, status: int, phase: type) -> None:
    """The exit codes 73 and 75 mean that the machine refused something; any other end without a jid is a failure."""
    live = _without_jid(session, status, _LAUNCHED)
    assert isinstance(live.phase, phase)


def test_what_every_start_needs_is_read_before_anything_can_run_short(session: Session) -> None:
    """A dispatcher that has opened its spool needs neither a file nor a module more to write a wrapper's constant."""
    wrapper.load.cache_clear()
    session.turns(1)
    assert wrapper.load.cache_info().currsize == 1
    path = session.world.root / ".wrapper" / wrapper.load().name
    for number, damage in enumerate((os.path.dirname, os.unlink, lambda path: os.truncate(path, 9))):
        session.users.submit(f"job{number}", "ok")
        session.turns(3)
        assert path.read_bytes() == wrapper.load().constant
        damage(path)


def test_a_start_that_is_refused_leaves_no_control_group(session: Session) -> None:
    """The group that was made for its memory is removed with it; nobody else would."""
    standing = list[str]()

    def create(job: str, run: int, memory_bytes: int, cpu_list: str) -> Any:
        standing.append(f"{job}.{run}")
        return SimpleNamespace(procs="/nowhere/cgroup.procs", remove=lambda: standing.remove(f"{job}.{run}"))

    session.turns(1)
    session.world.engine.groups = SimpleNamespace(create=create)  # type: ignore[assignment]
    session.users.submit("started", "hang", 'memory = "1M"')
    session.turns(2)
    session.users.submit("refused", "denied until 9", 'memory = "1M"')
    session.turns(2)
    assert session.world.tried["refused"] >= 1
    assert standing == ["started.1"]
