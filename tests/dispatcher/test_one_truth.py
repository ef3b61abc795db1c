"""What a dispatcher holds true and what a command reads off the files is the same, also where nobody has looked."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash.world import Session, ends_of, history
from spool import doctor
from spool.client import waiting
from spool.client.waiting import Waiter
from spool.core import layout
from spool.core.layout import DONE, HELD, QUEUED, RESERVATIONS, RUNNING
from spool.core.model import Holding, Machine, State
from spool.core.scheduler import Plan
from spool.dispatcher import monitor, wakeup
from spool.dispatcher.context import all_lines
from spool.dispatcher.loop import Dispatcher
from spool.dispatcher.wakeup import DirectoryWatcher
from spool.doctor import Level
from spool.formats.journal import recall
from spool.machine.host import is_shared_between_hosts
from spool.query import snapshot
from spool.query.explain import why
from spool.query.jobs import JobLister
from spool.query.machine import machine_status
from spool.query.rows import in_words
from spool.query.snapshot import read_reservations
from spool.store.spool import Spool

HOUR_S = 3600


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Give what sets the clock of this process on; what the kernel writes beside a file stays the true time."""
    real, ahead_ns = time.time_ns, [0]

    def now() -> int:
        return real() + ahead_ns[0]

    monkeypatch.setattr(time, "time_ns", now)
    monkeypatch.setitem(Dispatcher.__init__.__kwdefaults__, "clock", now)

    def by(seconds: float) -> None:
        time.sleep(0.02)  # the kernel's clock of files has ticks: what comes after must not be dated like what was seen
        ahead_ns[0] += int(seconds * 1e9)

    return by


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Give what moves this machine into another zone."""

    def to(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield to
    monkeypatch.undo()
    time.tzset()


def planned(session: Session) -> Plan:
    """Return what a command foresees."""
    return snapshot.snapshot(Spool(str(session.world.root))).plan


def test_a_file_that_waited_without_a_dispatcher_has_waited(session: Session, later: Callable[[float], None]) -> None:
    """The time in queued/ counts from the arrival of the file, for the first dispatcher that sees it and for `plan`."""
    session.users.submit("late", "ok", 'scheduling_timeout = "1h"', "cpus = 99")
    later(2 * HOUR_S)
    assert [ending.name for ending in planned(session).endings] == ["late"]
    session.turns(1)
    assert ends_of(session.world).outcomes["late"] == ("unschedulable 1.0",)


def test_a_job_released_without_a_dispatcher_waits_since_then(session: Session, later: Callable[[float], None]) -> None:
    """The time in held/ does not count, that in queued/ does, whoever looked at either."""
    session.users.submit("kept", "ok", 'scheduling_timeout = "1h"', "cpus = 99", place=HELD)
    session.turns(1)
    session.end()
    session.users.move("kept", HELD, QUEUED)
    assert not planned(session).endings
    later(2 * HOUR_S)
    assert [ending.name for ending in planned(session).endings] == ["kept"]
    session.turns(1)
    assert ends_of(session.world).places["kept"] == (DONE,)


def test_the_time_of_a_pause_does_not_count_over_restarts(session: Session, later: Callable[[float], None]) -> None:
    """A pause counts from the file `paused`, not from the dispatcher that saw it first.

    If it began before a job came, no more is taken off that job's clock than what it has waited.
    """
    (session.world.root / layout.PAUSED).touch()
    session.users.submit("patient", "ok", 'scheduling_timeout = "1h"', "cpus = 99")
    session.turns(1)
    session.end()
    later(2 * HOUR_S)
    session.users.submit("new", "ok", 'scheduling_timeout = "1h"', "cpus = 99")
    session.turns(1)
    (session.world.root / layout.PAUSED).unlink()
    session.turns(2)
    assert ends_of(session.world).places == dict.fromkeys(("new", "patient"), (QUEUED,))
    later(1.1 * HOUR_S)
    session.turns(1)
    assert ends_of(session.world).outcomes == dict.fromkeys(("new", "patient"), ("unschedulable 1.0",))


def test_a_run_that_is_being_held_keeps_its_place_in_a_short_journal(session: Session) -> None:
    """A job that waits and runs at once, because its run is being stopped, has both in the journal written anew."""
    session.users.submit("long", "hang")
    session.turns(2)
    arrived = session.now.state.jobs["long"].live.wait.arrived_at_ns  # type: ignore[union-attr]
    now = session.now
    now.terminator.tick = list  # type: ignore[method-assign]
    session.users.move("long", RUNNING, HELD)
    session.turns(20, until_quiet=True)
    assert now.state.jobs["long"].live is not None
    assert recall(all_lines(now.state, "boot-1")).waits["long"].arrived_at_ns == arrived


def test_a_retry_keeps_its_place_beside_a_file_of_its_name_that_is_held(session: Session) -> None:
    """What is held has a place of its own, and the run that is tried again has that of its submission."""
    session.users.submit("twice", "fail until 2", "retry = { max = 1, delay = '1h' }")
    session.turns(1)
    now = session.now
    arrived = now.state.jobs["twice"].live.wait.arrived_at_ns  # type: ignore[union-attr]
    session.users.submit("twice", "ok", place=HELD)
    session.turns(3)
    assert now.state.queue["twice"].arrived_at_ns == arrived
    assert now.state.queue["twice"].attempt == 2


def test_a_retry_is_told_by_its_instant_which_each_look_counts_down_to(session: Session) -> None:
    """The view keeps when it is due, and what is printed follows the clock though the view does not change."""
    session.users.submit("twice", "fail until 2", "retry = { max = 1, delay = '1h' }")
    session.settle()
    now = session.now
    type(now.status).write(now.status, now.planner.plan, now.planner.machine, paused=False, force=True)
    kept = json.loads((session.world.root / layout.STATE).read_text())["jobs"]["twice"]["reason"]
    assert re.fullmatch(r"retry due \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", kept)
    due_ns = now.state.queue["twice"].not_before_ns or 0
    due_ns -= due_ns % 10**9
    spool = Spool(str(session.world.root))
    rows = [JobLister(spool, due_ns - left_s * 10**9).row("twice") for left_s in (1800, 39)]
    assert [row.reason for row in rows if row is not None] == ["retry in 30m00s", "retry in 39s"]


def test_each_view_names_the_mistake_in_a_file(session: Session) -> None:
    """`state.json` says what is wrong with a file, as a list does before a dispatcher and after it."""
    (session.world.root / QUEUED / "wrong.toml").write_text("command = 3\n")
    spool, mistake = Spool(str(session.world.root)), '"command" on line 1: must be a text in quotes or a list, not 3'
    assert [(row.state, row.reason) for row in JobLister(spool).listing().rows] == [(State.INVALID, mistake)]
    session.turns(1)
    told = session.now.status.view(session.now.planner.plan, None, paused=False).jobs["wrong"]
    assert (told.state, told.reason) == (State.INVALID, mistake)
    session.end()
    assert [(row.state, row.reason) for row in JobLister(spool).listing().rows] == [(State.INVALID, mistake)]
    assert [reason.text for reason in why(spool, "wrong").reasons] == [mistake]


def test_an_array_has_the_configured_defaults_in_each_view(session: Session) -> None:
    """Its dispatcher, the next one, and a list without any say the memory and the limit that its tasks get."""
    (session.world.root / layout.CONFIG).write_text('disk_floor = "0M"\n[defaults]\nmemory = "1M"\ntime_limit = "9h"\n')
    session.users.submit("many", "hang", 'array = "0-9%1"')
    for _ in range(2):
        session.turns(2)
        told = session.now.status.view(session.now.planner.plan, None, paused=False).jobs["many"]
        session.end()
        row = JobLister(Spool(str(session.world.root))).row("many")
        assert row is not None
        assert [(each.memory_bytes, each.time_limit_ns) for each in (told, row)] == [(1 << 20, 9 * 3600 * 10**9)] * 2


def test_an_adopted_run_has_the_configured_grace(session: Session) -> None:
    """A job that says none gets the kill_grace of the configuration, from whichever dispatcher looks after it."""
    (session.world.root / layout.CONFIG).write_text('disk_floor = "0M"\nkill_grace = "3s"\n')
    session.users.submit("long", "hang")
    session.turns(2)
    session.end()
    session.turns(1)
    assert [live.spec.kill_grace_ns for live in session.now.state.live.values()] == [3_000_000_000]


def test_a_job_whose_records_cannot_be_read_is_told_and_the_others_are_shown(session: Session) -> None:
    """`ls`, `why` and `plan` say of one job which file is in the way, keep its room, and answer for all others."""
    session.users.submit("broken", "hang", "cpus = 2")
    session.turns(2)
    session.users.submit("next", "ok", 'depends_on = { ended = ["broken"] }')
    session.users.submit("other", "ok")
    session.end()
    jobs = session.world.root / "jobs"
    shutil.rmtree(jobs / "broken")
    (jobs / "broken").touch()
    spool = Spool(str(session.world.root))
    rows = {row.name: row for row in JobLister(spool).listing().rows}
    assert rows.keys() == {"broken", "next", "other"}
    assert "jobs/broken" in rows["broken"].reason
    seen = snapshot.snapshot(spool)
    assert [(run.name, run.grant.cpus) for run in seen.view.running.values()] == [("broken", 2)]
    assert "jobs/broken" in seen.left_out["broken"]
    assert seen.plan.all_reasons("next")[0].code == "dependency"
    assert why(spool, "next").reasons[0].code == "dependency"
    assert machine_status(spool).cpus_granted == 2


def test_a_run_whose_job_file_is_lost_keeps_its_room_in_every_view(session: Session) -> None:
    """Where neither the job file nor the copy of it is left, a command counts the run by its grant, as a dispatcher."""
    session.users.submit("lost", "hang", "cpus = 2")
    session.turns(2)
    session.end()
    (session.world.root / "running" / "lost.toml").unlink()
    (session.world.root / "jobs" / "lost" / "1" / "job.toml").unlink()
    seen = snapshot.snapshot(Spool(str(session.world.root)))
    assert [(run.name, run.grant.cpus) for run in seen.view.running.values()] == [("lost", 2)]


def test_who_waits_for_a_job_waits_for_what_its_command_left(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is moved to done/ while leftovers are being ended cancels nothing, and is not the end."""
    monkeypatch.setattr(waiting, "GRACE_NS", -1)
    session.users.submit("r", "leave")
    session.turns(2)
    session.now.terminator.tick = list  # type: ignore[method-assign]
    session.users.move("r", RUNNING, DONE)
    session.turns(1)
    waiter = Waiter(Spool(str(session.world.root)), ("r",))
    assert waiter.poll() == []
    del session.now.terminator.tick
    session.settle()
    [end] = waiter.poll()
    assert (end.outcome, end.exit_code) == ("finished", 0)


@pytest.mark.parametrize("how", ["cancelled", "left"])
def test_the_planner_knows_that_a_run_is_being_stopped(session: Session, how: str) -> None:
    """A pass, `plan` and `why` all count on its end once its kill grace is over, whenever they look."""
    session.users.submit("r", "leave" if how == "left" else "hang")
    session.turns(2)
    now = session.now
    now.terminator.tick = list  # type: ignore[method-assign]
    if how == "cancelled":
        session.users.cancel("r")
    session.turns(1)
    machine = Machine(cpus=2, memory_bytes=1 << 30)
    own = now.planner.view(machine, now.clock(), paused=now.pause.paused, holding=Holding())
    assert [run.stopping for run in own.running.values()] == [True]
    spool = Spool(str(session.world.root))
    (seen,) = snapshot.snapshot(spool).view.running.values()
    assert seen.stopping
    assert [run.stop_at_ns for run in own.running.values()] == [seen.stop_at_ns]
    order, left = spool.stop("r", 1), spool.exit("r", 1)
    began_ns = order.at_ns if order is not None else left.at_ns if left is not None else None
    assert seen.stop_at_ns == began_ns is not None
    foreseen = [
        next(iter(snapshot.snapshot(spool, began_ns + late).view.running.ends(began_ns + late))) for late in (0, 9**9)
    ]
    assert foreseen[0] == foreseen[1] == (began_ns + seen.spec.kill_grace_ns, "r")


def test_the_memory_of_a_run_that_nobody_saw_is_unknown(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a look finds no process there is no peak, rather than one of 0."""
    monkeypatch.setattr(monitor, "MEMORY_EVERY_NS", 0)
    session.users.submit("short", "ok", 'memory = "1M"')
    session.settle()
    assert [result.peak_memory_bytes for result in history(session.world.root)] == [None]
    assert "peak" not in (session.world.root / "jobs/short/1/result.toml").read_text()


def test_reservations_are_judged_alike_everywhere(session: Session, zone: Callable[[str], None]) -> None:
    """By the indices that there are, with gaps too, in words with the clock times of this place."""
    zone("Asia/Kolkata")
    for number, (name, gpus) in enumerate({"first": "[2]", "second": "[1]", "third": "2", "last": "[0]"}.items()):
        path = session.users.path(RESERVATIONS, name)
        path.write_text(f'user = "alice"\ngpus = {gpus}\nstart = 2100-01-01T00:00:00Z\nduration = "1h"\n')
        os.utime(path, ns=(number, number))
    session.turns(1)
    now = session.now
    now.world.gpu_indices = frozenset({0, 2})
    now.state.changed()
    session.turns(1)
    shelf = read_reservations(Spool(str(session.world.root)), frozenset({0, 2}), now.clock())
    assert now.reservations.standing == shelf.standing
    assert [one.name for one in shelf.standing] == ["first", "last"]
    for row in shelf.rows:
        error = Path(f"{session.users.path(RESERVATIONS, row.name)}{layout.ERROR_SUFFIX}")
        assert error.exists() != row.stands
        if not row.stands:
            assert row.problem in in_words(error.read_text(), now.clock())
    problems = {row.name: row.problem for row in shelf.rows}
    assert "GPU 1," in problems["second"]
    assert "05:30" in problems["third"]


def test_what_stands_does_not_change_with_the_clock(session: Session) -> None:
    """A reservation that never stood is not in the way of another one once it is over."""
    root = session.world.root
    hours = {"early": (0, 2), "never": (1, 3), "late": (2, 4)}
    for number, (name, (start, end)) in enumerate(hours.items()):
        path = root / RESERVATIONS / f"{name}.toml"
        path.write_text(f'user = "a"\ngpus = [0]\nstart = 2100-01-01T0{start}:00:00Z\nend = 2100-01-01T0{end}:00:00Z\n')
        os.utime(path, ns=(number, number))
    for at_ns in (0, 4_102_500_000_000_000_000):
        standing = read_reservations(Spool(str(root)), None, at_ns).standing
        assert [one.name for one in standing] == ["early", "late"]


def test_a_dispatcher_without_jobs_for_gpus_judges_reservations_too(session: Session) -> None:
    """Where there are reservations the GPUs are looked at once, so that `.error` says what `reserve list` says."""
    session.turns(1)
    now = session.now
    assert not now.reservations.ask_for_gpus
    session.users.path(RESERVATIONS, "talk").write_text('user = "alice"\ngpus = [7]\nduration = "1h"\n')
    session.look_next()
    session.turns(1)
    assert now.world.gpus_matter()
    now.world.gpu_indices = frozenset({0})
    now.state.changed()
    session.turns(1)
    assert not now.world.gpus_matter()
    assert "GPU 7" in (session.world.root / RESERVATIONS / "talk.toml.error").read_text()


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "fuse.sshfs", "ext4"])
def test_whoever_asks_is_told_the_same_of_a_disk(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher looks without events, and `doctor` says so, on the same file systems."""
    for module in (wakeup, doctor):
        monkeypatch.setattr(module, "file_system_of", lambda _: kind)
    made = DirectoryWatcher()
    made.start({QUEUED: str(tmp_path)})
    made.close()
    checks = [each for each in doctor.OF_THE_MACHINE if each.name == "disk type"]
    found = list(doctor.examine(str(tmp_path), checks=checks))
    assert is_shared_between_hosts(kind) == (kind != "ext4")
    assert (made.problem is not None) == (found[0].level is Level.WARN) == is_shared_between_hosts(kind)
