"""Which processes belong to a run, how they are signalled and reaped, and what they use."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from machine.fake_proc import FakeProc
from spool.core.model import Jid
from spool.machine import children, identity, marks, processes
from spool.machine.processes import Process, ProcessCache, TrackedRun, send
from support import wait_for
from wrapper_runs import SHELLS, Runs, runs_below

SPOOL = "/home/a/.spool"
ME = 40
JID = Jid(50, 500, "boot-1", "pid:[1]", "here")
MARK = {"HOME": "/", "SPOOL_DIR": SPOOL, "SPOOL_JOB": "a", "SPOOL_RUN": "3"}


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    """Show a dispatcher, 40, its wrapper, 50, with one child, 51, and another session, 90."""
    made = FakeProc(tmp_path)
    made.process(1, parent=0, start=1)
    made.process(ME, start=400)
    made.process(50, parent=ME, start=500)
    made.process(51, parent=50, session=50, start=501)
    made.process(90, start=90)
    return made


def pids(proc: FakeProc, *, known: frozenset[Process] = frozenset(), jid: Jid | None = JID) -> list[int]:
    """Return the pids that belong to run 3 of job a."""
    found = processes.scan([TrackedRun("a", 3, SPOOL, jid, known)], proc=str(proc), me=ME)
    return sorted(process.pid for process in found["a", 3])


def test_a_run_is_its_wrapper_and_its_descendants(proc: FakeProc) -> None:
    """Descendants belong to the run, whatever session they made for themselves and whatever their environment."""
    proc.process(52, parent=51, start=502)
    proc.process(53, parent=52, start=503)
    assert pids(proc) == [50, 51, 52, 53]


def test_who_has_left_the_tree_is_found_by_its_session(proc: FakeProc) -> None:
    """A process whose parent has ended is in the session of the wrapper still, and its descendants with it."""
    proc.process(52, parent=1, session=50, start=502)
    proc.process(53, parent=52, start=503)
    assert pids(proc) == [50, 51, 52, 53]


def test_a_hook_belongs_to_no_run_and_is_found_by_a_mark_of_its_own(proc: FakeProc) -> None:
    """It has the variables of the run that it is told of; who looks for it finds what it started, wherever that is."""
    hook = {**MARK, "SPOOL_HOOK": "45.7"}
    proc.process(60, parent=45, session=60, start=600, environment=hook)
    proc.process(61, parent=1, session=61, start=601, environment=hook)
    proc.process(62, parent=1, session=62, start=602, environment={**hook, "SPOOL_HOOK": "45.8"})
    proc.process(63, parent=1, session=63, start=603, environment={**hook, "SPOOL_DIR": "/elsewhere"})
    assert pids(proc) == [50, 51]
    wanted = TrackedRun("45.7", 0, SPOOL)
    assert sorted(found.pid for found in processes.scan([wanted], proc=str(proc), me=45)[wanted.key]) == [60, 61]
    assert sorted(marks.hooks_of(SPOOL, proc=str(proc))) == [(60, "45.7"), (61, "45.7"), (62, "45.8")]


def test_a_mark_may_name_the_spool_by_a_link(proc: FakeProc, tmp_path: Path) -> None:
    """Runs and hooks are found that were started under another path of the same spool, each path looked up once."""
    spool, link = tmp_path / "spool", tmp_path / "link"
    spool.mkdir()
    link.symlink_to(spool)
    here, there, nowhere = (MARK | {"SPOOL_DIR": str(path)} for path in (spool, link, tmp_path / "gone"))
    relative = MARK | {"SPOOL_DIR": os.path.relpath(spool)}
    for pid, environment in enumerate((here, there, there, nowhere, relative, there | {"SPOOL_JOB": "b"}), 60):
        proc.process(pid, parent=1, start=pid, environment=environment)
    proc.process(70, parent=51, start=700, environment=there | {"SPOOL_RUN": "4"})  # no part of run 3, though below it
    found = processes.scan([TrackedRun("a", 3, str(spool), JID), TrackedRun("b", 3, str(spool))], proc=str(proc), me=ME)
    assert {key: sorted(process.pid for process in of) for key, of in found.items()} == {
        ("a", 3): [50, 51, 60, 61, 62],
        ("b", 3): [65],
    }
    proc.process(80, parent=1, start=800, environment=there | {"SPOOL_HOOK": "45.7"})
    assert marks.hooks_of(str(spool), proc=str(proc)) == [(80, "45.7")]
    jobs = {pid: marks.job_of(pid, str(spool), proc=str(proc)) for pid in (51, 60, 61, 63, 64, 80, 99)}
    assert jobs == {51: None, 60: "a", 61: "a", 63: None, 64: None, 80: None, 99: None}


def test_who_has_left_the_session_too_is_found_by_its_mark(proc: FakeProc) -> None:
    """A daemon carries the mark of the run in its environment, and its descendants need not."""
    proc.process(52, parent=1, start=502, environment=MARK)
    proc.process(53, parent=52, start=503)
    assert pids(proc) == [50, 51, 52, 53]


@pytest.mark.parametrize(
    "change", [{"SPOOL_DIR": "/other"}, {"SPOOL_JOB": "b"}, {"SPOOL_RUN": "33"}, {"SPOOL_RUN": ""}]
)
def test_a_mark_counts_as_a_whole(proc: FakeProc, change: dict[str, str]) -> None:
    """The mark of another spool, job or run is none."""
    proc.process(52, parent=1, start=502, environment=MARK | change)
    assert pids(proc) == [50, 51]


@pytest.mark.parametrize("session", [60, 50])
def test_the_mark_of_another_run_is_stronger_than_descent_and_session(proc: FakeProc, session: int) -> None:
    """What a run of the same spool has started from within another belongs to itself alone."""
    proc.process(60, parent=51, session=session, start=600, environment=MARK | {"SPOOL_JOB": "b"})
    proc.process(61, parent=60, session=session, start=601)
    assert pids(proc) == [50, 51]


def test_the_mark_of_another_spool_is_not(proc: FakeProc) -> None:
    """A job may keep a spool of its own: whatever runs there is a part of the job."""
    proc.process(60, parent=51, start=600, environment=MARK | {"SPOOL_DIR": "/other", "SPOOL_JOB": "b"})
    assert pids(proc) == [50, 51, 60]


def test_a_dispatcher_that_was_started_by_a_job_is_not_a_part_of_it(proc: FakeProc) -> None:
    """Our own process never belongs to a run, nor does what it has started for other runs."""
    proc.process(ME, parent=52, start=400, environment=MARK)
    proc.process(52, parent=1, session=52, start=300, environment=MARK)
    proc.process(60, parent=ME, start=600)
    assert pids(proc) == [50, 51, 52]


def test_who_was_known_before_stays_known(proc: FakeProc) -> None:
    """A process that was found once and then cut every tie is found by its identity, and its children with it."""
    proc.process(52, parent=1, start=502)
    proc.process(53, parent=52, start=503)
    assert pids(proc) == [50, 51]
    assert pids(proc, known=frozenset({Process(52, 502)})) == [50, 51, 52, 53]
    assert pids(proc, known=frozenset({Process(52, 501)})) == [50, 51]


def test_a_session_that_bears_the_pid_of_a_dead_wrapper_is_somebody_elses(proc: FakeProc) -> None:
    """When the pid of the wrapper has come back, its session and its descendants are not the run's."""
    proc.process(50, parent=1, start=9999)
    proc.process(51, parent=50, session=50, start=10000)
    proc.process(52, parent=1, session=50, start=10001)
    assert pids(proc) == []


def test_our_own_orphans_are_the_runs_also_after_the_wrapper(proc: FakeProc) -> None:
    """A subreaper inherits the orphans of its wrappers: among its own children the session still proves the run."""
    proc.end(50)
    proc.process(51, parent=ME, session=50, start=501)
    proc.process(52, parent=1, session=50, start=502)
    assert pids(proc) == [51]


@pytest.mark.parametrize("heir", ["init", "us", "our ancestor", "nobody yet"])
def test_an_orphan_without_any_mark_is_known_by_its_output(proc: FakeProc, heir: str) -> None:
    """Who inherits it depends on the machine, and in the moment of its parent's end the parent is nowhere."""
    proc.process(20, parent=1, start=200)
    proc.process(30, parent=20, start=300)
    proc.process(ME, parent=30, start=400)
    proc.end(50)
    proc.end(51)
    parent = {"init": 1, "us": ME, "our ancestor": 20, "nobody yet": 51}[heir]
    proc.process(52, parent=parent, start=502)
    proc.process(53, parent=parent, start=503)
    proc.process(91, parent=90, start=910)
    for pid, file in ((52, f"{SPOOL}/jobs/a/3/log"), (53, f"{SPOOL}/jobs/a/4/log"), (91, f"{SPOOL}/jobs/a/3/log")):
        (proc.root / str(pid) / "fd").mkdir()
        os.symlink(file, proc.root / str(pid) / "fd" / "1")
    assert pids(proc) == [52]


def test_zombies_belong_to_nobody(proc: FakeProc) -> None:
    """A process of which only the exit code is left holds nothing, and is no reason to wait."""
    proc.process(50, parent=ME, start=500, state="Z")
    proc.process(51, parent=ME, session=50, start=501, state="Z")
    assert pids(proc) == []


@pytest.mark.parametrize(
    "jid", [None, Jid(50, 500, "boot-0", "pid:[1]", "here"), Jid(50, 500, "boot-1", "pid:[2]", "x")]
)
def test_without_a_jid_of_this_machine_the_mark_alone_counts(proc: FakeProc, jid: Jid | None) -> None:
    """A run that has no wrapper here can be known by marks only."""
    proc.process(52, parent=1, start=502, environment=MARK)
    assert pids(proc, jid=jid) == [52]


def test_one_walk_serves_many_runs(proc: FakeProc) -> None:
    """Each run gets its own processes, and a run without any gets none."""
    proc.process(70, parent=ME, start=700)
    proc.process(71, parent=1, start=701, environment=MARK | {"SPOOL_JOB": "b", "SPOOL_RUN": "1"})
    found = processes.scan(
        [
            TrackedRun("a", 3, SPOOL, JID),
            TrackedRun("b", 1, SPOOL, Jid(70, 700, "boot-1", "pid:[1]", "here")),
            TrackedRun("c", 1, SPOOL, None),
        ],
        proc=str(proc),
        me=ME,
    )
    assert found == {
        ("a", 3): {Process(50, 500), Process(51, 501)},
        ("b", 1): {Process(70, 700), Process(71, 701)},
        ("c", 1): frozenset(),
    }
    assert processes.scan([]) == {}


class Machine:
    """Two runs, of which processes fork, leave and end at random; no pid comes back."""

    def __init__(self, proc: FakeProc, seed: int) -> None:
        self.proc, self.random = proc, random.Random(seed)
        self.wanted = [TrackedRun("a", 3, SPOOL, JID), TrackedRun("b", 1, SPOOL, replace(JID, pid=70, start_ticks=700))]
        self.alive: dict[int, dict[str, Any]] = {1: {"parent": 0}, ME: {"parent": 1}}
        self.next = 100
        for pid, name, run in ((50, "a", "3"), (70, "b", "1"), (90, "c", "1")):
            self.show(pid, parent=ME, session=pid, environment=MARK | {"SPOOL_JOB": name, "SPOOL_RUN": run})

    def show(self, pid: int, **facts: Any) -> None:
        self.alive[pid] = facts
        self.proc.process(pid, start=10 * pid, **facts)

    def step(self) -> None:
        """Have somebody fork, or end."""
        others = [pid for pid in self.alive if pid not in (1, ME)]
        pid = self.random.choice(others)
        if self.random.random() < 0.6 or len(others) < 4:
            self.next += 1
            session = self.random.choice((self.alive[pid]["session"], self.next))
            environment = self.random.choice((self.alive[pid]["environment"], self.alive[pid]["environment"], None))
            self.show(self.next, parent=pid, session=session, environment=environment)
        else:
            del self.alive[pid]
            self.proc.end(pid)
            for child, facts in self.alive.items():
                if facts["parent"] == pid:
                    self.show(child, **facts | {"parent": ME})


def same(
    found: Mapping[tuple[str, int], Iterable[Process]], keys: Iterable[tuple[str, int]]
) -> dict[Any, set[Process]]:
    """Return what was found, as it can be compared."""
    return {key: set(found.get(key, ())) for key in keys}


@pytest.mark.parametrize("seed", range(10))
def test_a_census_finds_what_a_walk_finds(proc: FakeProc, seed: int) -> None:
    """After whatever is forked, left and ended, as far as it is told what was known before."""
    machine, census, known = (
        Machine(proc, seed),
        ProcessCache(proc=str(proc), me=ME),
        dict[tuple[str, int], set[Process]](),
    )
    keys = [run.key for run in machine.wanted]
    for _ in range(60):
        for _ in range(machine.random.randint(0, 3)):
            machine.step()
        wanted = [replace(run, known=frozenset(known.get(run.key, ()))) for run in machine.wanted]
        fresh = same(processes.scan(wanted, proc=str(proc), me=ME), keys)
        found = census.look(lambda: machine.wanted)
        known = same({key: members.values() for key, members in found.items()}, keys)
        assert known == fresh


def test_a_census_asks_only_who_is_new(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each of the others once in a while: who has the pid of one that has ended is found out."""
    asked: list[int] = []
    read = processes.read_stat
    monkeypatch.setattr(processes, "read_stat", lambda pid, *, proc: asked.append(pid) or read(pid, proc=proc))
    census = ProcessCache(proc=str(proc), me=ME)

    def look() -> list[int]:
        asked.clear()
        return sorted(census.look(lambda: [TrackedRun("a", 3, SPOOL, JID)])["a", 3])

    assert (look(), sorted(asked)) == ([50, 51], [1, ME, 50, 51, 90])
    proc.process(52, parent=51, session=50, start=502)
    assert (look(), asked) == ([50, 51, 52], [52])
    proc.end(51)
    assert (look(), asked) == ([50, 52], [])
    proc.process(52, parent=90, session=90, start=900)
    proc.process(90, start=90, environment=MARK)
    for _ in range(64):
        look()
    assert look() == [50, 52, 90]
    proc.process(90, start=90, environment=MARK | {"SPOOL_RUN": "4"})
    census.ask_again(90)
    assert look() == [50, 52]


def test_a_census_that_could_not_be_taken_is_taken_again(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine had too little left, nobody is left out for good."""
    census = ProcessCache(proc=str(proc), me=ME)
    with monkeypatch.context() as patch:
        patch.setattr(processes, "read_bytes", raising(errno.EMFILE))
        with pytest.raises(OSError, match="EMFILE"):
            census.look(lambda: [TrackedRun("a", 3, SPOOL, JID)])
    assert sorted(census.look(lambda: [TrackedRun("a", 3, SPOOL, JID)])["a", 3]) == [50, 51]


def state_of(pid: int) -> str:
    """Return the state of a process as the kernel names it, "" of one that is gone."""
    stat = identity.read_stat(pid)
    return stat.state if stat is not None else ""


def raising(number: int) -> Callable[..., bytes]:
    """Return a function that fails."""

    def fail(*_: object) -> bytes:
        raise OSError(number, errno.errorcode[number])

    return fail


def test_an_environment_that_cannot_be_read_is_skipped(proc: FakeProc) -> None:
    """A process that does not show its environment is judged by its descent and its session."""
    (proc.root / "51/environ").unlink()
    (proc.root / "90/environ").unlink()
    assert pids(proc) == [50, 51]


def test_a_process_that_forks_and_ends_before_it_is_asked_hides_nobody(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that forks without end has processes in every list, and each is gone when its environment is read."""
    for pid in (50, 51):
        proc.end(pid)
    proc.process(60, environment=MARK)
    read = processes.read_bytes

    def reads(path: str) -> bytes:
        pid = int(path.split("/")[-2])
        if pid in (60, 61, 62):
            proc.end(pid)
            proc.process(pid + 1, environment=MARK)
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), path)
        return read(path)

    monkeypatch.setattr(processes, "read_bytes", reads)
    assert pids(proc, jid=None) == [63]


class Hopper:
    """A tree of one process that forks and ends again and again, while a walk goes on: *when* says before which steps.

    Its child has the next pid, or, where they begin anew, the lowest that is free. *parting*: what is left of it in the
    list: nothing, a zombie, or a process that has no memory any more.
    """

    def __init__(self, proc: FakeProc, when: Iterable[bool], *, anew_after: int, parting: str) -> None:
        self.proc, self.when, self.anew_after, self.parting = proc, iter(when), anew_after, parting
        self.pid = 60
        proc.process(self.pid, environment=MARK)

    def hop(self) -> None:
        """Let the tree do what it does before the next step of the walk."""
        if not next(self.when, False):
            return
        before, self.anew_after = self.pid, self.anew_after - 1
        self.pid = 2 if self.anew_after == 0 else self.pid + 1
        self.proc.process(self.pid, environment=MARK, start=1000 + self.pid)
        if self.parting == "gone":
            self.proc.end(before)
        else:
            self.proc.process(before, state="Z" if self.parting == "zombie" else "D", size=0, start=1000 + before)

    def watched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hop before every step from now on."""
        for name in ("certainly", "read_stat", "read_bytes"):
            step = getattr(processes, name)

            def stepped(*args: Any, step: Callable[..., Any] = step, **named: Any) -> Any:
                self.hop()
                return step(*args, **named)

            monkeypatch.setattr(processes, name, stepped)


@pytest.mark.parametrize("parting", ["gone", "zombie", "leaving"])
@pytest.mark.parametrize("anew_after", [0, 1, 2])
def test_a_tree_that_forks_between_any_two_steps_of_a_walk_is_never_taken_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew_after: int, parting: str
) -> None:
    """Of all ways to interleave its forks with the steps of a walk none is certain and has not found it."""
    steps, certain = 8, 0
    for number, when in enumerate(itertools.product([False, True], repeat=steps)):
        with monkeypatch.context() as patch:
            proc = FakeProc(tmp_path / str(number))
            proc.process(ME, start=400)
            hopper = Hopper(proc, when, anew_after=anew_after, parting=parting)
            hopper.watched(patch)
            found = processes.look([TrackedRun("a", 3, SPOOL)], proc=str(proc), me=ME)
            assert found.members["a", 3] or not found.certain, when
            certain += found.certain
    assert certain  # else nothing would ever be proved


def test_a_tree_that_always_escapes_is_never_taken_for_gone(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    """What forks and ends before each step is never found, and nothing is concluded from that."""
    hopper = Hopper(proc, itertools.repeat(True), anew_after=0, parting="gone")
    hopper.watched(monkeypatch)
    for pid in (50, 51, 90):
        proc.end(pid)
    found = processes.look([TrackedRun("a", 3, SPOOL)], proc=str(proc), me=ME)
    assert found.members == {("a", 3): frozenset()}
    assert not found.certain


def test_strangers_that_come_and_go_keep_nothing_from_being_proved(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends while it is asked is known by the one that started it, if that is there and is another's."""
    listed = iter([*range(300, 320)])
    proc.process(50, parent=ME, start=500, state="Z")
    proc.end(51)
    read, certainly = processes.read_bytes, processes.certainly

    def ends(path: str) -> bytes:
        if (pid := int(path.split("/")[-2])) >= 300:
            proc.end(pid)
        return read(path)

    def lists(step: Callable[[], Any]) -> Any:
        proc.process(next(listed), parent=90, session=90, start=5000)
        return certainly(step)

    monkeypatch.setattr(processes, "read_bytes", ends)
    monkeypatch.setattr(processes, "certainly", lists)
    found = processes.look([TrackedRun("a", 3, SPOOL, JID)], proc=str(proc), me=ME)
    assert (found.members["a", 3], found.certain) == (frozenset(), True)


def test_a_process_that_executes_a_program_is_asked_again() -> None:
    """In the middle of that it shows no environment, for moments; so one look may not be enough, but it says so."""
    run = TrackedRun("a", 3, SPOOL)
    environment = {**os.environ, **MARK}
    loop = "import os, sys; os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', sys.argv[1], sys.argv[1]])"
    with subprocess.Popen([sys.executable, "-c", loop, loop], env=environment, start_new_session=True) as child:
        try:
            looks = [processes.look([run]) for _ in range(100)]
        finally:
            child.kill()
    assert [found for found in looks if not found.members[run.key] and found.certain] == []


def test_a_parent_that_waits_for_a_stopped_child_to_execute_stands_still(tmp_path: Path) -> None:
    """After vfork it waits in the kernel, where it cannot be stopped itself; and without a signal it does not."""
    os.mkfifo(tmp_path / "gate")
    # The child waits between vfork and exec until the gate has a writer.
    opens = "(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)"
    spawn = f"import os, sys; os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[{opens}])"
    run = TrackedRun("a", 3, SPOOL)
    command = [sys.executable, "-I", "-S", "-c", spawn, str(tmp_path / "gate")]
    with subprocess.Popen(command, env={**os.environ, **MARK}, start_new_session=True) as parent:
        try:
            wait_for(lambda: state_of(parent.pid) == "D")
            [child] = map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
            assert not processes.look([run]).still
            os.kill(child, signal.SIGSTOP)
            wait_for(lambda: state_of(child) == "T")
            assert {process.pid for process in processes.look([run]).still} == {child}
            os.kill(parent.pid, signal.SIGSTOP)
            assert {process.pid for process in processes.look([run]).still} == {child, parent.pid}
            assert state_of(parent.pid) == "D"
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_the_session_of_a_process_of_a_run_is_the_runs(proc: FakeProc) -> None:
    """A process of a session that one of the run leads belongs to it, though it has no parent and no mark left."""
    proc.process(60, parent=1, session=60, start=600, environment=MARK)
    proc.process(61, parent=1, session=60, start=601)
    proc.process(91, parent=1, session=90, start=901)
    assert pids(proc) == [50, 51, 60, 61]


def test_what_is_in_the_control_group_of_a_run_is_the_runs(proc: FakeProc) -> None:
    """Whatever else a process has got rid of."""
    proc.process(60, parent=1, session=60, start=600)
    wanted = TrackedRun("a", 3, SPOOL, JID, grouped=frozenset({60}))
    found = processes.look([wanted], proc=str(proc), me=ME)
    assert sorted(process.pid for process in found.members["a", 3]) == [50, 51, 60]


@pytest.mark.parametrize(("parent", "rss_pages", "found"), [(0, 0, [50, 51]), (1, 9, [2, 50, 51, 60])])
def test_pid_2_is_the_kernels_only_where_it_is(proc: FakeProc, parent: int, rss_pages: int, found: list[int]) -> None:
    """In a container it is anybody's, and its children belong to the run that it belongs to."""
    proc.process(2, parent=parent, start=2, rss_pages=rss_pages, environment=MARK)
    proc.process(60, parent=2, start=600, rss_pages=rss_pages)
    assert pids(proc) == found


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """Make runs under one shell."""
    with runs_below(tmp_path, SHELLS.get("dash", ["/bin/sh"])) as made:
        yield made


def test_a_real_daemon_is_found_and_ended(runs: Runs) -> None:
    """What a command sends away by `setsid` and two forks is found by its mark after all else has ended."""
    mark = {"SPOOL_DIR": str(runs.root), "SPOOL_JOB": "a", "SPOOL_RUN": "3"}
    run = runs.make("(setsid sh -c 'sleep 60 & sleep 60 &' &)", environment=mark)
    assert run.run() == 0

    def found() -> frozenset[Process]:
        return processes.scan([TrackedRun("a", 3, str(runs.root), run.jid)])["a", 3]

    wait_for(lambda: len(found()) == 2)
    left = found()
    assert not run.alive()
    assert send(left, signal.SIGKILL).signalled == left
    wait_for(lambda: not found())


def test_a_signal_goes_to_the_process_that_was_meant_or_to_none() -> None:
    """The pid alone is not enough: with another start the process is not signalled."""
    with subprocess.Popen(["sleep", "60"]) as child:
        ticks = identity.start_ticks(child.pid)
        assert ticks is not None
        other, same = Process(child.pid, ticks - 1), Process(child.pid, ticks)
        assert processes.send([other], signal.SIGKILL) == processes.Sent(gone=frozenset({other}))
        assert child.poll() is None
        assert processes.send([same], signal.SIGTERM) == processes.Sent(signalled=frozenset({same}))
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.send([same], signal.SIGTERM) == processes.Sent(gone=frozenset({same}))
        assert child.wait() == -signal.SIGTERM
    assert processes.send([same], signal.SIGTERM) == processes.Sent(gone=frozenset({same}))


def test_parents_are_signalled_before_their_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that is told late sees its program end first, and goes on to its next command."""
    told = []

    def opened(pid: int, flags: int = 0) -> int:
        told.append(pid)
        return pidfd_open(pid, flags)

    pidfd_open = os.pidfd_open
    nest = "exec sleep 60"
    for _ in range(7):
        nest = f"echo $$; sh -c {shlex.quote(nest)}; :"
    shells = subprocess.Popen(["sh", "-c", nest], stdout=subprocess.PIPE, text=True, start_new_session=True)
    with shells:
        try:
            assert shells.stdout is not None
            chain = [int(shells.stdout.readline()) for _ in range(7)]
            meant = frozenset(Process(pid, identity.start_ticks(pid) or 0) for pid in chain)
            monkeypatch.setattr(os, "pidfd_open", opened)
            for order in (meant, sorted(meant), sorted(meant, reverse=True)):
                assert processes.send(order, signal.SIGCONT).signalled == meant
                assert told == chain
                told.clear()
        finally:
            os.killpg(shells.pid, signal.SIGKILL)


@pytest.mark.parametrize("around", [{2: 3, 3: 2}, {2: 2, 3: 3}, {}])
def test_a_circle_of_parents_is_no_endless_one(monkeypatch: pytest.MonkeyPatch, around: dict[int, int]) -> None:
    """Pids that came back between two looks may seem to be each other's parents; nobody is left out."""

    def read_stat(pid: int) -> SimpleNamespace | None:
        return SimpleNamespace(parent=around[pid], dead=False, start_ticks=0) if pid in around else None

    monkeypatch.setattr(processes, "read_stat", read_stat)
    both = frozenset({Process(2, 1), Process(3, 1)})  # of another start, and so signalled in no case
    assert processes.send(both, signal.SIGTERM).gone == both


def test_pid_1_and_this_process_are_never_signalled() -> None:
    """Whatever a scan may have said, some processes are not to be signalled."""
    mine = Process(os.getpid(), identity.start_ticks(os.getpid()) or 0)
    with subprocess.Popen(["sleep", "60"]) as child:
        spared = Process(child.pid, identity.start_ticks(child.pid) or 0)
        refused = frozenset({mine, Process(1, 0), Process(0, 0), Process(-1, 0), spared})
        assert processes.send(refused, signal.SIGTERM, spare={child.pid}) == processes.Sent(refused=refused)
        child.kill()


def test_without_descriptors_a_signal_still_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no pidfd can be had, the process is checked and signalled by its pid."""

    def none_left(pid: int, flags: int = 0) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    with subprocess.Popen(["sleep", "60"]) as child:
        process = Process(child.pid, identity.start_ticks(child.pid) or 0)
        assert processes.send([process._replace(start_ticks=1)], signal.SIGKILL).signalled == frozenset()
        assert processes.send([process], signal.SIGKILL).signalled == {process}
        assert child.wait() == -signal.SIGKILL


# In a process of its own, for a subreaper stays one: a child leaves an orphan behind, which becomes ours.
_SUBREAPER = """
import json, os, subprocess, sys, time
from spool.machine import children, marks, processes
made = children.become_subreaper()
subprocess.run(["sh", "-c", "setsid sleep 0.05 & exit 0"])
orphans = children.children_of_self()
ended = {}
while not ended:
    ended = children.reap(orphans)
    time.sleep(0.002)
print(json.dumps([made, len(orphans), [r.exit_code for r in ended.values()], list(children.children_of_self())]))
"""


def test_a_subreaper_inherits_orphans_and_takes_them_away() -> None:
    """What a child leaves behind becomes our child, can be listed, and can be reaped."""
    done = subprocess.run([sys.executable, "-c", _SUBREAPER], capture_output=True, check=True)
    assert json.loads(done.stdout) == [True, 1, [0], []]


def test_our_children_are_listed_until_they_are_reaped() -> None:
    """A child is one from its start until somebody has asked how it ended."""
    before = children.children_of_self()
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "kill -KILL $$"], {})
    assert before is not None
    assert (children.children_of_self() or frozenset()) - before == {pid}
    ended = wait_for(lambda: children.reap([pid]))
    assert (ended[pid].pid, ended[pid].exit_code) == (pid, 128 + signal.SIGKILL)
    assert ended[pid].peak_memory_bytes > 0
    assert children.children_of_self() == before


# In a process of its own as well: one child of a nursery lives, another has left an orphan behind.
_NURSERY = """
import json, os, signal, sys, time
from spool.machine import children, marks, processes
children.become_subreaper()
nursery = children.SpawnThread()
def start(text):
    return lambda: os.posix_spawn("/bin/sh", ["sh", "-c", text], {}, setsigmask=[])
ready, told = os.pipe()
os.set_inheritable(told, True)
living = nursery.start(start("exec sleep 60"))
gone = nursery.start(start(f"sleep 60 & echo $! >&{told}"))
orphan = int(os.read(ready, 100))
os.waitpid(gone, 0)
masks = [line for task in os.listdir("/proc/self/task") for line in open(f"/proc/self/task/{task}/status")]
deaf = sum(int(line.split()[1], 16) & 1 << signal.SIGCHLD - 1 > 0 for line in masks if line.startswith("SigBlk"))
listed = children.children_of_self() == {orphan}
try:
    nursery.start(lambda: os.posix_spawn("/nowhere", ["sh"], {}))
except FileNotFoundError:
    failed = True
for pid in (living, orphan):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
nursery.close()
while len(os.listdir("/proc/self/task")) > 1:  # it has left Python, and not yet the kernel
    time.sleep(0.002)
print(json.dumps([listed, deaf, failed]))
"""


def test_only_orphans_are_listed_beside_the_children_of_a_nursery() -> None:
    """However many there are; the thread hears no signal, tells what fails, and leaves."""
    done = subprocess.run([sys.executable, "-c", _NURSERY], capture_output=True, check=True)
    assert json.loads(done.stdout) == [True, 1, True]


def test_a_machine_without_room_for_a_thread_has_children_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread starts them."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    nursery = children.SpawnThread()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    pid = nursery.start(lambda: os.posix_spawn("/bin/true", ["true"], {}))
    assert os.waitpid(pid, 0) == (pid, 0)
    nursery.close()


def test_only_the_named_children_are_reaped() -> None:
    """A child that lives, a child of which nobody spoke, and a process that is no child are left alone."""
    with subprocess.Popen(["sh", "-c", "exit 3"]) as unnamed, subprocess.Popen(["sleep", "60"]) as living:
        os.waitid(os.P_PID, unnamed.pid, os.WEXITED | os.WNOWAIT)
        assert children.reap([living.pid, 1]) == {}
        living.kill()
        assert unnamed.wait() == 3


def test_what_a_child_has_used_includes_what_it_waited_for() -> None:
    """CPU time and peak memory are those of the child and of the children that it waited for."""
    burn = "import time; x = bytearray(30_000_000)\nwhile time.process_time() < 0.05: pass"
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", '"$1" -c "$2"; exit 0', "sh", sys.executable, burn], dict(os.environ))
    used = wait_for(lambda: children.reap([pid]))[pid]
    assert used.cpu_time_ns >= 50_000_000
    assert used.peak_memory_bytes >= 30_000_000


PAGE = os.sysconf("SC_PAGE_SIZE")
TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@pytest.fixture
def sharing(tmp_path: Path) -> FakeProc:
    """Show two processes that share half of what they have."""
    made = FakeProc(tmp_path)
    for pid in (50, 51):
        made.process(pid, times=(1, 2, 30, 40))
        (made.root / f"{pid}/statm").write_text("900 100 50 1 0 9 0\n")
        (made.root / f"{pid}/smaps_rollup").write_text(
            "00400000-7ffe ---p [rollup]\nRss: 400 kB\nPss: 300 kB\nPss_Dirty: 9 kB\n"
        )
        (made.root / f"{pid}/status").write_text("Name:\tsh\nVmPeak:\t  999 kB\nVmHWM:\t     700 kB\n")
    return made


def test_sizes_and_times_are_sums(sharing: FakeProc) -> None:
    """Each figure is the sum over the processes; what a process has waited for is a part of its time."""
    both = [50, 51]
    assert processes.rss_bytes(both, proc=str(sharing)) == 2 * 100 * PAGE
    assert processes.pss_bytes(both, proc=str(sharing)) == 2 * 300 * 1024
    assert processes.peak_rss_bytes(both, proc=str(sharing)) == 2 * 700 * 1024
    assert processes.cpu_time_ns(both, proc=str(sharing)) == 2 * 73 * TICK_NS


def test_who_has_ended_uses_nothing(sharing: FakeProc) -> None:
    """A process that is not there any more adds nothing, and is no error."""
    for figure in (processes.rss_bytes, processes.pss_bytes, processes.peak_rss_bytes, processes.cpu_time_ns):
        assert figure([50, 99], proc=str(sharing)) == figure([50], proc=str(sharing)) > 0
        assert figure([], proc=str(sharing)) == 0


def test_who_does_not_show_its_share_counts_in_full(sharing: FakeProc) -> None:
    """Where the proportional size cannot be read, the resident size stands for it."""
    (sharing.root / "51/smaps_rollup").unlink()
    assert processes.pss_bytes([50, 51], proc=str(sharing)) == 300 * 1024 + 100 * PAGE


def test_a_real_process_is_measured() -> None:
    """A process that holds 30 MB shows at least that in every figure."""
    held = 30_000_000
    program = f"x = b'x' * {held}; print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        rss, pss = processes.rss_bytes([child.pid]), processes.pss_bytes([child.pid])
        assert held <= pss <= processes.peak_rss_bytes([child.pid])
        assert held <= rss
        wait_for(lambda: processes.cpu_time_ns([child.pid]) > 0)
        child.communicate(b"\n", 20)
    assert processes.rss_bytes([child.pid]) == 0
