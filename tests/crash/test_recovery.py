"""What a new dispatcher makes of the spool that it finds."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

from crash.world import HOST, NAMESPACE, Session, check, ends_of, history
from spool.client.requests import Requests
from spool.core import layout
from spool.core.errors import SpoolUnusable
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import Jid, State, StopKind
from spool.dispatcher import recovery, scanner
from spool.formats import run_records
from spool.store import locked_spool
from spool.store.spool import Spool


def _running(session: Session, name: str, *lines: str, command: str = "hang until 2") -> None:
    """Have a job run, and the dispatcher killed."""
    session.users.submit(name, command, *lines)
    session.settle()
    assert session.world.pids(name)
    session.end()


def _jid(session: Session, name: str, **other: str) -> None:
    """Have the run's `jid` say something else."""
    pid = session.world.pids(name)[0]
    words = {"boot_id": session.world.boot, "pid_namespace": NAMESPACE, "host": HOST} | other
    _record(session, name, layout.JID).write_bytes(run_records.render_jid(Jid(pid, 1, **words)))


def _started_elsewhere(session: Session, name: str) -> None:
    """Have the run of a job be one that a dispatcher of another host has started."""
    _jid(session, name, host="elsewhere", boot_id="another-boot")
    for path in (_record(session, name, layout.GRANT), session.world.root / layout.JOURNAL):
        path.write_text(path.read_text().replace(HOST, "elsewhere").replace(session.world.boot, "another-boot"))


def _record(session: Session, name: str, record: str, run: int = 1) -> Path:
    return Path(Spool(str(session.world.root)).layout.record(name, run, record))


def _outcomes(session: Session, name: str) -> tuple[str, ...]:
    return ends_of(session.world).outcomes.get(name, ())


# What died.


def test_after_a_reboot_what_ran_is_lost_and_run_again_where_it_may(session: Session) -> None:
    """A reboot ends every run as lost; those that may be requeued run again, and that is counted."""
    _running(session, "again")
    _running(session, "once", "requeue = false")
    session.world.reboot()
    session.settle()
    assert _outcomes(session, "again") == ("lost 1.0 requeue", "finished 1.1")
    assert _outcomes(session, "once") == ("lost 1.0",)
    check(session.world)


def test_what_the_journal_knows_to_be_over_is_not_begun_again_from_running(session: Session) -> None:
    """A power cut took back the names up to the first run's, and emptied its grant; the journal reached the disk."""
    session.users.submit("tired", "fail", "retry = { max = 1 }")
    session.settle()
    session.end()
    root = session.world.root
    shutil.rmtree(root / "jobs" / "tired" / "2")
    _record(session, "tired", layout.GRANT).write_bytes(b"")
    _record(session, "tired", layout.RESULT).unlink()
    os.rename(root / DONE / "tired.toml", root / RUNNING / "tired.toml")
    session.world.reboot()
    session.settle()
    assert session.world.begun == [("tired", 1), ("tired", 2)]
    assert ends_of(session.world).places == {"tired": (DONE,)}
    assert _outcomes(session, "tired") == ("failed 1.0 retry", "failed 2.0")


def _forget_ends(session: Session, name: str, *, of: str) -> None:
    """Have the journal and the history know nothing of how a run ended, *of* being the words of its start."""
    journal = session.world.root / layout.JOURNAL
    lines = journal.read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if of in line)
    journal.write_text("".join(line for line in lines[: at + 1]))
    log = session.world.root / layout.HISTORY
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if f'"{name}"' not in line))


def test_a_run_whose_end_was_emptied_in_done_is_lost_and_not_cancelled(session: Session) -> None:
    """The paperwork had moved its file; the result and the exit code never reached the disk. It is run again."""
    session.users.submit("first", "ok")
    session.settle()
    session.end()
    _forget_ends(session, "first", of='["started","first",1')
    _record(session, "first", layout.RESULT).write_bytes(b"")
    _record(session, "first", layout.RC).write_bytes(b"")
    session.users.submit("then", "ok", "depends_on = ['first']")
    session.world.reboot()
    session.settle()
    assert _outcomes(session, "first") == ("lost 1.0 requeue", "finished 1.1")
    assert _outcomes(session, "then") == ("finished 1.0",)
    assert ends_of(session.world).places == {"first": (DONE,), "then": (DONE,)}


def test_what_a_run_was_to_do_is_read_from_its_file_where_its_copy_is_empty(session: Session) -> None:
    """Its retries count on, though the power cut has emptied its grant, its result and its copy of the job file."""
    session.users.submit("tried", "fail until 2", "retry = { max = 1, delay = '1h' }")
    session.turns(8)
    session.end()
    _forget_ends(session, "tried", of='["started","tried",1')
    for record in (layout.RESULT, layout.GRANT, layout.SPEC_COPY):
        _record(session, "tried", record).write_bytes(b"")
    session.world.reboot()
    session.turns(8)
    assert _outcomes(session, "tried") == ("failed 1.0 retry",)
    assert ends_of(session.world).places == {"tried": (QUEUED,)}


def test_an_attempt_whose_result_was_emptied_is_made_again_and_no_other(session: Session) -> None:
    """The run before it says nothing either, and the history lacks its line: the grant says which attempt it was."""
    session.users.submit("x", "fail until 3", "retry = { max = 2, delay = '1h' }")
    session.settle()
    session.end()
    first = _record(session, "x", layout.RESULT).parent
    second = first.with_name("2")
    shutil.copytree(first, second)
    granted = (first / layout.GRANT).read_text().replace("run = 1", "run = 2").replace("attempt = 1", "attempt = 2")
    (second / layout.GRANT).write_text(granted)
    for metadir in (first, second):
        (metadir / layout.RESULT).write_bytes(b"")
    (session.world.root / layout.HISTORY).write_bytes(b"")
    session.world.reboot()
    session.turns(2)
    job = session.now.state.jobs["x"]
    assert (job.live.attempts if job.live else job.attempts).attempt == 2


@pytest.mark.parametrize("place", [RUNNING, QUEUED])
def test_a_file_that_lies_in_running_without_a_run_is_queued(session: Session, place: str) -> None:
    """After a reboot too: a newer file of a name that has ended is another submission.

    So is the same file, queued again: the journal says that it has ended, and a reboot does not undo the move.
    """
    session.users.submit("job", "ok")
    session.settle()
    session.end()
    if place == RUNNING:
        session.users.submit("job", "ok # again", place=RUNNING)
    else:
        session.users.move("job", DONE, QUEUED)
    session.world.reboot()
    session.settle()
    assert session.world.begun == [("job", 1), ("job", 2)]
    assert _outcomes(session, "job") == ("finished 1.0", "finished 1.0")
    check(session.world)


def test_what_vanishes_again_and_again_is_requeued_three_times(session: Session) -> None:
    """A job whose processes vanish runs four times in all, and its last outcome is lost."""
    session.users.submit("job", "hang")
    for _ in range(4):
        session.settle()
        session.world.kill("job")
    session.settle()
    expected = ("lost 1.0 requeue", "lost 1.1 requeue", "lost 1.2 requeue", "lost 1.3")
    assert _outcomes(session, "job") == expected
    check(session.world)


# A wrapper that has not spoken.


def _launched(session: Session, name: str) -> None:
    """Have a wrapper launched that has not spoken when the dispatcher is killed."""
    session.users.submit(name, "ok")
    tick, session.world.tick = session.world.tick, lambda: False  # type: ignore[method-assign]
    session.turns(2)
    session.end()
    session.world.tick = tick  # type: ignore[method-assign]
    assert session.world.launched


@pytest.mark.parametrize(("in_time", "run"), [(False, 2), (True, 1)])
def test_a_wrapper_that_speaks_too_late_runs_nothing(session: Session, run: int, *, in_time: bool) -> None:
    """A new dispatcher takes the jid of a run that has none; the wrapper finds it and leaves, the job runs anew.

    A wrapper that created its jid before the new dispatcher came keeps its run.
    """
    _launched(session, "job")
    if in_time:
        session.world.tick()
    session.settle()
    assert session.world.begun == [("job", run)]
    assert _outcomes(session, "job") == ("finished 1.0",)
    check(session.world)


def test_a_jid_in_the_middle_of_being_written_is_waited_for(session: Session) -> None:
    """A jid that is not whole yet is no reason to call the run lost, nor to start the job again."""
    _running(session, "job", command="hang")
    path = _record(session, "job", layout.JID)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    session.settle()
    assert _outcomes(session, "job") == ()
    path.write_bytes(whole)
    session.settle()
    session.world.exit(session.world.pids("job")[0], 0)
    session.settle()
    assert session.world.begun == [("job", 1)]
    assert _outcomes(session, "job") == ("finished 1.0",)


def test_a_jid_that_stays_cut_short_counts_as_a_start(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a jid has said nothing for long enough, and nobody is there, the run is lost: it may have begun."""
    _running(session, "job")
    session.world.kill("job")
    _record(session, "job", layout.JID).write_bytes(b"12")
    monkeypatch.setattr(recovery, "SILENT_NS", 0)
    session.settle()
    assert _outcomes(session, "job") == ("lost 1.0 requeue", "finished 1.1")
    check(session.world)


# Other hosts.


def test_a_dispatcher_refuses_to_serve_beside_another_host(session: Session) -> None:
    """While a run of another host may be alive, a dispatcher does not begin, and says what would let it.

    With `other_hosts_gone` the runs of that host are lost, and run again.
    """
    _running(session, "job")
    _started_elsewhere(session, "job")
    with pytest.raises(SpoolUnusable, match=r'elsewhere.*other_hosts_gone = \["elsewhere"\]'):
        session.settle()
    session.end()
    assert session.world.begun == [("job", 1)]
    session.world.kill("job")
    with open(session.world.root / layout.CONFIG, "a") as config:
        config.write('other_hosts_gone = ["elsewhere"]\n')
    session.settle()
    assert _outcomes(session, "job") == ("lost 1.0 requeue", "finished 1.1")
    check(session.world)


def test_a_silent_run_of_another_host_is_settled_by_its_jid(session: Session) -> None:
    """A run without a jid that another host prepared is taken back by creating its jid, never called lost."""
    _launched(session, "job")
    path = _record(session, "job", layout.GRANT)
    text = path.read_text().replace(f'host = "{HOST}"', 'host = "elsewhere"').replace("boot-1", "its own")
    path.write_text(text)
    session.settle()
    assert _record(session, "job", layout.JID).read_bytes() == run_records.VOID_JID
    assert _outcomes(session, "job") == ("finished 1.0",)
    check(session.world)


def test_a_run_of_another_pid_namespace_is_left_alone(session: Session) -> None:
    """Of a run in another container nothing is known but its records: it stays, and ends once its rc is there."""
    _running(session, "job")
    _jid(session, "job", pid_namespace="pid:[1]")
    session.world.kill("job")
    session.settle()
    assert ends_of(session.world).places == {"job": ("running",)}
    _record(session, "job", layout.RC).write_bytes(b"0\n")
    session.settle()
    assert _outcomes(session, "job") == ("finished 1.0",)
    check(session.world)


# What people did while no dispatcher lived.


@pytest.mark.parametrize(
    ("place", "kind", "outcomes"),
    [
        (None, StopKind.CANCEL, ("cancelled 1.0",)),
        (DONE, StopKind.CANCEL, ("cancelled 1.0",)),
        (QUEUED, StopKind.REQUEUE, ("cancelled 1.0 requeue", "finished 1.0")),
        (HELD, StopKind.HOLD, ("cancelled 1.0 hold",)),
    ],
)
def test_a_file_that_left_running_meanwhile_stops_its_run(
    session: Session, place: str | None, kind: StopKind, outcomes: tuple[str, ...]
) -> None:
    """Deleting or moving the file of a run means the same with and without a dispatcher."""
    _running(session, "job")
    if place is None:
        session.users.path(RUNNING, "job").unlink()
    else:
        session.users.move("job", RUNNING, place)
    session.settle()
    stop = Spool(str(session.world.root)).stop("job", 1)
    assert stop.kind is kind
    assert _outcomes(session, "job") == outcomes
    assert ends_of(session.world).places == {"job": (HELD if place == HELD else DONE,)}
    check(session.world)


@pytest.mark.parametrize("place", [None, DONE, QUEUED, HELD])
@pytest.mark.parametrize(
    ("code", "first", "again"),
    [(0, "finished 1.0", "finished 1.0"), (3, "failed 1.0", "finished 2.0")],
    ids=["well", "badly"],
)
def test_a_file_that_left_running_after_the_end_of_its_run_stops_nothing(
    session: Session, place: str | None, code: int, first: str, again: str
) -> None:
    """The run ended as its exit code says. Back in the queue the file is the retry, or else a new submission."""
    _running(session, "job", "retry = { max = 1 }")
    session.world.exit(session.world.pids("job")[0], code)
    if place is None:
        session.users.path(RUNNING, "job").unlink()
    else:
        session.users.move("job", RUNNING, place)
    session.settle()
    expected: tuple[str, ...] = (first,)
    if place == QUEUED:
        expected = (first if code == 0 else f"{first} retry", again)
    assert _outcomes(session, "job") == expected
    assert ends_of(session.world).places == {"job": (HELD if place == HELD else DONE,)}
    assert Spool(str(session.world.root)).stop("job", 1) is None
    check(session.world)


def test_a_file_deleted_from_the_queue_meanwhile_is_forgotten(session: Session) -> None:
    """A job that was withdrawn while no dispatcher lived leaves nothing, and nothing runs."""
    session.users.submit("job", "ok", "cpus = 99")
    session.settle()
    session.end()
    session.users.path(QUEUED, "job").unlink()
    session.settle()
    assert ends_of(session.world).places == {}
    assert history(session.world.root) == []
    assert session.now.state.jobs == {}  # another file of the name is a submission of its own


@pytest.mark.parametrize(
    ("one", "other"), [(QUEUED, HELD), (HELD, QUEUED), (DONE, QUEUED), (RUNNING, QUEUED), (RUNNING, HELD)]
)
def test_a_move_that_was_cut_in_its_middle_ends_in_one_place(
    session: Session, monkeypatch: pytest.MonkeyPatch, one: str, other: str
) -> None:
    """A file with two names, of a command that was killed between link and unlink, runs no more often than twice.

    A release that was cut off leaves it in held/.
    """
    monkeypatch.setattr(locked_spool, "CUT_OFF_NS", 0)
    if one == RUNNING:
        _running(session, "job")
    else:
        session.users.submit("job", "ok", place=one)
    os.link(session.users.path(one, "job"), session.users.path(other, "job"))
    session.settle()
    for pid in session.world.pids("job"):
        session.world.exit(pid, 0)
    session.settle()
    places = ends_of(session.world).places["job"]
    assert RUNNING not in places
    assert QUEUED not in places
    assert len(session.world.begun) <= 2
    assert {one, other} != {HELD, QUEUED} or (places, session.world.begun) == ((HELD,), [])
    check(session.world)


@pytest.mark.parametrize("left", [QUEUED, HELD])
def test_a_file_that_somebody_is_moving_waits_until_he_has_done_so(session: Session, left: str) -> None:
    """Between `ln held/x.toml queued/` and `rm held/x.toml` nothing starts, and neither name is taken away."""
    session.users.submit("job", "ok", place=HELD)
    os.link(session.users.path(HELD, "job"), session.users.path(QUEUED, "job"))
    session.turns(20)
    assert session.world.begun == []
    assert ends_of(session.world).places == {"job": (QUEUED, HELD)}
    session.users.path(HELD if left == QUEUED else QUEUED, "job").unlink()
    session.settle()
    assert ends_of(session.world).places == {"job": (DONE if left == QUEUED else HELD,)}
    check(session.world)


# What lies about.


def test_the_leavings_of_dead_processes_are_swept_and_no_others(session: Session) -> None:
    """Staged files of processes that are no more go away; files of people and of live processes stay."""
    staging = session.world.root / layout.STAGING
    dead = 2**22 + 1  # above every pid_max
    (staging / f"{dead}.1").write_text("half a rec")
    (staging / f"{dead}.run.1").mkdir()
    (staging / f"{dead}.run.1" / "job.toml").touch()
    (staging / f"{os.getppid()}.1").touch()
    (staging / "mine.toml").touch()
    session.settle()
    assert sorted(os.listdir(staging)) == [f"{os.getppid()}.1", "mine.toml"]


def test_an_empty_metadir_is_a_run_that_never_was(session: Session) -> None:
    """A file in running/ whose metadir says nothing goes back to the queue and runs under another number."""
    (session.world.root / "jobs" / "job" / "1").mkdir(parents=True)
    session.users.submit("job", "ok", place=RUNNING)
    session.settle()
    assert session.world.begun == [("job", 2)]
    check(session.world)


def test_a_file_in_the_place_of_a_metadir_stops_that_job_alone(session: Session) -> None:
    """A job whose metadir cannot be made waits and keeps nobody else waiting; it runs once the way is free."""
    (session.world.root / "jobs" / "job").touch()
    session.users.submit("job", "ok", f"cpus = {session.world.cpus}", "priority = 99")
    session.users.submit("other", "ok", f"cpus = {session.world.cpus}")
    session.looks_at_everything = False
    session.turns(12)
    assert _outcomes(session, "other") == ("finished 1.0",)
    assert ends_of(session.world).places["job"] == (QUEUED,)
    assert os.listdir(session.world.root / layout.STAGING) == []
    (session.world.root / "jobs" / "job").unlink()
    session.looks_at_everything = True
    session.settle()
    assert _outcomes(session, "job") == ("finished 1.0",)


def test_a_directory_that_cannot_be_read_for_a_moment_is_not_empty(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a directory cannot be listed, the jobs in it keep their places."""
    monkeypatch.setattr(scanner, "FORGET_NS", 0)
    session.survives_errors = True
    session.users.submit("job", "ok", "cpus = 99")
    session.settle()
    wait = session.now.state.jobs["job"].wait
    with monkeypatch.context() as broken:
        broken.setattr(os, "listdir", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
        session.turns(2)
    session.settle()
    assert session.now.state.jobs["job"].wait is wait


@pytest.mark.parametrize("deleted", [False, True], ids=["noise", "deleted"])
def test_a_journal_of_noise_loses_no_job_and_repeats_none(session: Session, *, deleted: bool) -> None:
    """With random bytes for a journal, what runs is adopted, what waits runs, and what has ended stays so.

    Somebody may also delete the journal and the history: what runs is accounted for at its end all the same.
    """
    ended = {} if deleted else {"ended": 1}  # of which the history alone knows
    for name in ended:
        session.users.submit(name, "ok")
    session.settle()
    session.users.submit("waits", "ok", f"cpus = {session.world.cpus}")
    _running(session, "runs", command="hang", *("priority = 99",))  # noqa: B026
    noise = random.Random(1).randbytes(5000) + b'\n["waits"]\n["started","a",1]\n[]\n{}\n["over",1,2,3]\n'
    (session.world.root / layout.JOURNAL).write_bytes(noise)
    if deleted:
        (session.world.root / layout.JOURNAL).unlink()
        (session.world.root / layout.HISTORY).unlink()
    session.settle()
    assert session.world.pids("runs")
    session.world.exit(session.world.pids("runs")[0], 0)
    session.settle()
    assert ends_of(session.world).starts == ended | {"runs": 1, "waits": 1}
    assert _outcomes(session, "runs") == ("finished 1.0",)
    check(session.world)


# Two files of one name.


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_submission_that_is_cancelled_beside_the_run_has_its_record(session: Session, killed: bool) -> None:
    """Both get a metadir and a line of history, the second one's after the run's, also from the next dispatcher."""
    session.users.submit("job", "hang")
    session.settle()
    session.users.submit("job", "ok", 'tags = ["second"]')
    session.settle()
    if killed:
        session.end()
    Requests(Spool(str(session.world.root)), "me").cancel("job")
    session.settle()
    lines = [(line.run, line.outcome, line.started_at_ns is None) for line in history(session.world.root)]
    assert lines == [(1, State.CANCELLED, False), (2, State.CANCELLED, True)]
    assert (
        Spool(str(session.world.root)).job_text(DONE, "job")
        == _record(session, "job", layout.SPEC_COPY, 2).read_bytes()
    )
    assert b"second" in _record(session, "job", layout.SPEC_COPY, 2).read_bytes()


def test_a_third_submission_outlives_the_cancel_of_the_second(session: Session) -> None:
    """What is put into queued/ after that cancel is a submission of its own: it runs when the first run is over."""
    session.users.submit("job", "hang until 2")
    session.settle()
    session.users.submit("job", "ok")
    session.settle()
    session.users.move("job", QUEUED, DONE)
    session.settle()
    session.users.submit("job", "ok #3")
    session.settle()
    session.world.exit(session.world.pids("job")[0], 0)
    session.settle()
    found = [(line.run, line.outcome) for line in history(session.world.root)]
    assert found == [(1, State.FINISHED), (2, State.CANCELLED), (3, State.FINISHED)]
    session.end()
    session.settle()
    assert len(history(session.world.root)) == 3


@pytest.mark.parametrize("trace", [None, layout.STATUS, layout.JOB_LOG])
def test_a_run_whose_metadir_or_jid_somebody_removed_is_not_run_beside_itself(
    session: Session, tmp_path: Path, trace: str | None
) -> None:
    """The next dispatcher leaves it alone for as long as a process of it lives, and then it is lost, and counted.

    Where the jid alone is gone, its other records say that it has begun: it is not taken back.
    """
    _running(session, "job")
    metadir = session.world.root / "jobs" / "job" / "1"
    if trace is None:
        os.rename(metadir, tmp_path / "elsewhere")
    else:
        (metadir / layout.JID).unlink()
        (metadir / trace).write_text("running\n")
    session.turns(4)
    assert session.world.pids("job"), "it was ended"
    assert [run for name, run in session.world.begun] == [1]
    session.world.kill("job")
    session.settle()
    assert ends_of(session.world).outcomes == {"job": ("lost 1.0 requeue", "finished 1.1")}


def test_what_a_killed_wrapper_left_behind_is_ended_by_the_next_dispatcher(session: Session) -> None:
    """The jid says that the wrapper is gone, so the run is over, though its command goes on."""
    _running(session, "job", "requeue = false")
    world = session.world
    world.alive[next(world.next_pids)] = world.alive.pop(*world.pids("job"))
    session.settle()
    assert not world.pids("job")
    assert ends_of(world).places == {"job": (DONE,)}


@pytest.mark.parametrize("kind", ["gone", "a file for a while"])
def test_an_array_whose_metadir_was_removed_runs_no_task_again(session: Session, tmp_path: Path, kind: str) -> None:
    """What its tasks have come to is on record: the array ends by that, and is not expanded anew."""
    session.survives_errors = True
    session.users.submit("sweep", "fail # {index}", 'array = "0-1"')
    session.users.submit("blocker", "ok")
    session.turns(3)
    session.end()
    os.rename(session.world.root / "jobs" / "sweep", tmp_path / "elsewhere")
    if kind != "gone":
        (session.world.root / "jobs" / "sweep").touch()
        session.turns(6)
        (session.world.root / "jobs" / "sweep").unlink()
    session.settle()
    assert max(Counter(name for name, _ in session.world.begun).values()) == 1
    assert not session.users.path(RUNNING, "sweep").exists()


def test_what_is_no_file_in_running_does_not_become_the_record_of_a_job(session: Session) -> None:
    """A directory in the place of a running job's file stays, and `done/` has the job from its run's copy."""
    session.users.submit("job", "hang")
    session.settle()
    running = session.users.path(RUNNING, "job")
    running.unlink()
    running.mkdir()
    session.world.exit(session.world.pids("job")[0], 0)
    session.turns(6)
    assert running.is_dir()
    assert session.users.path(DONE, "job").read_text().startswith("command")
