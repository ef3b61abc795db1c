"""Who a process is, which processes belong to a run, how they are signalled and reaped, and what they use."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest
from msgspec.structs import replace

from spool.core.layout import SERVICE
from spool.core.lifecycle import Liveness
from spool.core.model import Jid
from spool.machine import identity, processes
from spool.machine.processes import Children, Process, Sought, is_wrapper
from support import PATIENCE_S, wait_for

SPOOL = "/home/a/.spool"
ME = 40
JID = Jid(50, 500, "boot-1", "pid:[1]", "here")
MARK = {"HOME": "/", "SPOOL_DIR": SPOOL, "SPOOL_JOB": "a", "SPOOL_RUN": "3"}
SERVES = {SERVICE: "1"}


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    """Show a dispatcher, 40, its wrapper, 50, with one child, 51, and another session, 90."""
    made = FakeProc(tmp_path)
    made.process(1, parent=0, start=1)
    made.process(ME, start=400)
    made.process(50, parent=ME, start=500, environment=MARK)
    made.process(51, parent=50, session=50, start=501)
    made.process(90, start=90)
    return made


def family(proc: FakeProc) -> list[int]:
    """Return the pids below the wrapper of run 3 of job a, in the order in which they would be signalled."""
    wrapper = identity.read_stat(JID.pid, proc=str(proc))
    return [pid for pid, _ in processes.descendants(Sought("a", 3, SPOOL, JID), wrapper, proc=str(proc), me=ME)]


def found(proc: FakeProc, *, known: frozenset[Process] = frozenset(), jid: Jid | None = JID) -> list[int]:
    """Return the pids that a search finds after the wrapper of run 3 of job a was killed, and what it began with it."""
    for pid in (50, 51):
        if (proc.root / str(pid)).exists() and (proc.root / f"{pid}/stat").read_text().split()[19] != "0":
            proc.end(pid)
    members = processes.search([Sought("a", 3, SPOOL, jid, known)], proc=str(proc), me=ME).members
    return sorted(pid for pid, _ in members["a", 3])


def test_a_family_is_what_descends_from_the_wrapper(proc: FakeProc) -> None:
    """Whatever session a process has made for itself, whatever its environment, and whoever is beside it.

    One of which only the exit code is left holds nothing; a leader that other threads outlive is no such.
    """
    proc.process(54, parent=50, session=50, start=505, state="Z")
    proc.process(55, parent=50, session=50, start=506, state="Z", threads=2)
    proc.process(53, parent=51, session=53, start=503)
    proc.process(52, parent=53, session=53, start=504)
    proc.process(60, parent=1, session=50, start=600, environment=MARK)
    assert family(proc) == [51, 55, 53, 52]


@pytest.mark.parametrize("strange", [SERVES, MARK | {"SPOOL_RUN": "4"}, MARK | {"SPOOL_HOOK": "45.7"}, None])
def test_what_belongs_elsewhere_is_not_of_the_family(proc: FakeProc, strange: dict[str, str] | None) -> None:
    """A dispatcher that a job's submission has started, a run of its own spool, a hook; nor what these have started.

    Nor this process, which ends neither itself nor what it has started for others. But a job may run a dispatcher of
    its own in the foreground: what that runs ends with it.
    """
    other = ME if strange is None else 60
    proc.process(other, parent=51, start=600, environment=MARK if strange is None else strange)
    proc.process(61, parent=other, start=601, environment=MARK)
    assert family(proc) == [51]
    proc.process(70, parent=51, start=600, environment=MARK | {"SPOOL_DIR": "/other", "SPOOL_JOB": "b"})
    assert family(proc) == [51, 70]


# In a process of its own: the children of a thread that goes on, of an orphan that came back, and the order.
_FAMILY = """
import ctypes, json, os, sys, threading, time
from spool.machine import identity, processes
processes.become_subreaper()
def start(text):
    return os.posix_spawn("/bin/sh", ["sh", "-c", text], {}, setsid=True)
threading.Thread(target=lambda: (start("exec sleep 60"), time.sleep(60)), daemon=True).start()
os.waitpid(start("setsid sh -c 'sleep 60 & exec sleep 60' & exit 0"), 0)
run = processes.Sought("a", 3, "/spool")
most, until = {}, time.monotonic() + 120
while len(most) < 3 and time.monotonic() < until:
    most = processes.descendants(run, identity.read_stat(os.getpid()), me=-1)
    time.sleep(0.01)
pids = [process.pid for process in most]
ordered = all(stat.parent == os.getpid() or stat.parent in pids[:n] for n, stat in enumerate(most.values()))
for pid in pids:
    os.kill(pid, 9)
ended = {}
while len(ended) < len(pids) and time.monotonic() < until:
    ended |= processes.reap(pids)
    time.sleep(0.002)
codes = sorted({os.waitstatus_to_exitcode(status) for status in ended.values()})
print(json.dumps([len(most), ordered, len(ended), codes, list(processes.children_of_self())]), flush=True)
os._exit(0)
"""


def test_the_kernels_lists_show_the_children_of_all_threads() -> None:
    """A wrapper has one thread; what it runs may have many, each with children of its own.

    What a child leaves behind becomes the child of a subreaper, can be listed, and can be reaped.
    """
    done = subprocess.run([sys.executable, "-c", _FAMILY], capture_output=True, check=True)
    assert json.loads(done.stdout) == [3, True, 3, [-signal.SIGKILL], []]


def test_what_is_halted_when_found_forks_no_more(tmp_path: Path) -> None:
    """Each process is stopped before its children are read, so that none of them is missed."""
    with subprocess.Popen(["sh", "-c", "sh -c 'sleep 60; :'; :"], start_new_session=True) as shell:
        try:
            run, stat = Sought("a", 3, str(tmp_path)), identity.read_stat(shell.pid)
            wait_for(lambda: len(processes.descendants(run, stat)) == 2)
            before = processes.descendants(run, stat, halt=True)
            wait_for(lambda: processes.still(processes.descendants(run, stat)) == before.keys())
            assert state_of(shell.pid) != "T"
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


def test_a_search_knows_the_session_of_the_wrapper(proc: FakeProc) -> None:
    """The kernel gives its pid to no other process while a session has it; a session from before is another's."""
    proc.process(52, parent=1, session=50, start=502)
    proc.process(53, parent=52, start=503)
    proc.process(54, parent=1, session=50, start=499)
    assert found(proc) == [52, 53]
    assert found(proc, jid=None) == []


@pytest.mark.parametrize(
    ("change", "finds"),
    [({}, [52, 53]), ({"SPOOL_DIR": "/other"}, []), ({"SPOOL_JOB": "b"}, []), ({"SPOOL_RUN": "33"}, []),
     ({"SPOOL_RUN": ""}, [])],
)  # fmt: skip
def test_who_has_left_the_session_too_is_found_by_its_mark(
    proc: FakeProc, change: dict[str, str], finds: list[int]
) -> None:
    """A daemon carries the mark of the run in its environment, and its descendants need not; it counts as a whole."""
    proc.process(52, parent=1, start=502, environment=MARK | change)
    proc.process(53, parent=52, start=503)
    proc.process(60, parent=52, start=600, environment=MARK | {"SPOOL_JOB": "b"})
    proc.process(70, parent=52, start=700, environment=SERVES)
    assert found(proc) == finds


def test_who_was_known_before_stays_known(proc: FakeProc) -> None:
    """A process that was found once and then cut every tie is found by its identity, and its children with it.

    So is what is in the control group of a run, and an orphan that still has its log, and not that of another.
    """
    proc.process(52, parent=1, start=502)
    proc.process(53, parent=52, start=503)
    assert found(proc) == []
    assert found(proc, known=frozenset({Process(52, 502)})) == [52, 53]
    assert found(proc, known=frozenset({Process(52, 501)})) == []
    sought = Sought("a", 3, SPOOL, None, grouped=frozenset({52}))
    assert processes.search([sought], proc=str(proc), me=ME).members["a", 3].keys() >= {Process(52, 502)}
    for pid, run in ((54, 3), (55, 4)):
        proc.process(pid, parent=1, start=503)
        (proc.root / f"{pid}/fd").mkdir()
        os.symlink(f"{SPOOL}/jobs/a/{run}/log", proc.root / f"{pid}/fd/1")
    assert found(proc) == [54]


def test_one_search_serves_many_runs(proc: FakeProc) -> None:
    """Each run gets its own processes, and a run without any gets none."""
    proc.process(70, parent=1, start=700, environment=MARK | {"SPOOL_JOB": "b", "SPOOL_RUN": "1"})
    sought = [Sought("a", 3, SPOOL), Sought("b", 1, SPOOL), Sought("c", 1, SPOOL)]
    result = processes.search(sought, proc=str(proc), me=ME)
    assert {key: [*of] for key, of in result.members.items()} == {
        ("a", 3): [Process(50, 500), Process(51, 501)],
        ("b", 1): [Process(70, 700)],
        ("c", 1): [],
    }
    assert processes.search([]) == processes.Found({}, True)
    proc.process(50, start=500, state="Z")
    proc.end(51)
    proc.end(70)
    assert processes.search(sought, proc=str(proc), me=ME) == processes.Found({key: {} for key in result.members}, True)


def test_a_hook_belongs_to_no_run_and_is_found_by_a_mark_of_its_own(proc: FakeProc) -> None:
    """It has the variables of the run that it is told of; who looks for it finds what it started, wherever that is."""
    hook = {**MARK, "SPOOL_HOOK": "45.7"}
    proc.process(60, parent=45, session=60, start=600, environment=hook)
    proc.process(61, parent=1, session=61, start=601, environment=hook)
    proc.process(62, parent=1, session=62, start=602, environment={**hook, "SPOOL_HOOK": "45.8"})
    proc.process(63, parent=1, session=63, start=603, environment={**hook, "SPOOL_DIR": "/elsewhere"})
    assert found(proc) == []
    sought = Sought("45.7", 0, SPOOL)
    members = processes.search([sought], proc=str(proc), me=45).members[sought.key]
    assert sorted(process.pid for process in members) == [60, 61]
    assert sorted(processes.hooks_of(SPOOL, proc=str(proc))) == [(60, "45.7"), (61, "45.7"), (62, "45.8")]


def test_a_mark_may_name_the_spool_by_a_link(proc: FakeProc, tmp_path: Path) -> None:
    """Runs and hooks are found that were started under another path of the same spool, each path looked up once."""
    spool, link = tmp_path / "spool", tmp_path / "link"
    spool.mkdir()
    link.symlink_to(spool)
    here, there, nowhere = (MARK | {"SPOOL_DIR": str(path)} for path in (spool, link, tmp_path / "gone"))
    relative = MARK | {"SPOOL_DIR": os.path.relpath(spool)}
    for pid, environment in enumerate((here, there, there, nowhere, relative, there | {"SPOOL_JOB": "b"}), 60):
        proc.process(pid, parent=1, start=pid, environment=environment)
    result = processes.search([Sought("a", 3, str(spool)), Sought("b", 3, str(spool))], proc=str(proc), me=ME)
    assert {key: sorted(process.pid for process in of) for key, of in result.members.items()} == {
        ("a", 3): [60, 61, 62],
        ("b", 3): [65],
    }
    proc.process(80, parent=1, start=800, environment=there | {"SPOOL_HOOK": "45.7"})
    assert processes.hooks_of(str(spool), proc=str(proc)) == [(80, "45.7")]
    jobs = {pid: processes.job_of(pid, str(spool), proc=str(proc)) for pid in (51, 60, 61, 63, 64, 80, 99)}
    assert jobs == {51: None, 60: "a", 61: "a", 63: None, 64: None, 80: None, 99: None}


def state_of(pid: int) -> str:
    """Return the state of a process as the kernel names it, "" of one that is gone."""
    stat = identity.read_stat(pid)
    return stat.state if stat is not None else ""


class Hopper:
    """A tree of one process that forks and ends again and again, while a walk goes on: *when* says before which steps.

    Its child has the next pid, or, where they begin anew, the lowest that is free. *parting*: what is left of it in the
    list: nothing, a zombie, or a process that has no memory any more.
    """

    def __init__(self, proc: FakeProc, when: Iterable[bool], *, anew_after: int, parting: str) -> None:
        self.proc, self.when, self.anew_after, self.parting = proc, iter(when), anew_after, parting
        self.pid = 60
        self.seen = {self.pid}  # those that the list shows
        proc.process(self.pid, environment=MARK)

    def hop(self) -> None:
        """Let the tree do what it does before the next step of the walk."""
        if not next(self.when, False):
            return
        before, self.anew_after = self.pid, self.anew_after - 1
        self.pid = 2 if self.anew_after == 0 else self.pid + 1
        self.proc.process(self.pid, environment=MARK, start=1000 + self.pid)
        self.seen.add(self.pid)
        if self.parting == "gone":
            self.proc.end(before)
            self.seen.remove(before)
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
    proc = FakeProc(tmp_path)
    proc.process(ME, start=400)
    for when in itertools.product([False, True], repeat=7):
        with monkeypatch.context() as patch:
            hopper = Hopper(proc, when, anew_after=anew_after, parting=parting)
            hopper.watched(patch)
            result = processes.search([Sought("a", 3, SPOOL)], proc=str(proc), me=ME)
            assert result.members["a", 3] or not result.certain, when
        for pid in hopper.seen:
            proc.end(pid)


def test_a_tree_that_always_escapes_is_never_taken_for_gone(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    """What forks and ends before each step is never found, and nothing is concluded from that."""
    hopper = Hopper(proc, itertools.repeat(True), anew_after=0, parting="gone")
    hopper.watched(monkeypatch)
    for pid in (50, 51, 90):
        proc.end(pid)
    assert processes.search([Sought("a", 3, SPOOL)], proc=str(proc), me=ME) == processes.Found({("a", 3): {}}, False)


def test_a_process_that_executes_a_program_is_asked_again(tmp_path: Path) -> None:
    """In the middle of that it shows no environment, for moments; so one look may not be enough, but it says so."""
    run = Sought("a", 3, str(tmp_path))
    environment = {**os.environ, **MARK, "SPOOL_DIR": str(tmp_path)}
    loop = "import os, sys; os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', sys.argv[1], sys.argv[1]])"
    with subprocess.Popen([sys.executable, "-c", loop, loop], env=environment, start_new_session=True) as child:
        try:
            looks = [processes.search([run]) for _ in range(30)]
        finally:
            child.kill()
    assert [look for look in looks if not look.members[run.key] and look.certain] == []


def test_a_parent_that_waits_for_a_stopped_child_to_execute_stands_still(tmp_path: Path) -> None:
    """After vfork it waits in the kernel, where it cannot be stopped itself; and without a signal it does not."""
    os.mkfifo(tmp_path / "gate")
    # The child waits between vfork and exec until the gate has a writer.
    opens = "(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)"
    spawn = f"import os, sys; os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[{opens}])"
    run = Sought("a", 3, str(tmp_path))
    command = [sys.executable, "-I", "-S", "-c", spawn, str(tmp_path / "gate")]

    def still() -> set[int]:
        return {pid for pid, _ in processes.still(processes.search([run]).members[run.key])}

    marks = {**os.environ, **MARK, "SPOOL_DIR": str(tmp_path)}
    with subprocess.Popen(command, env=marks, start_new_session=True) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        try:
            # It also waits for the disk while it starts.
            wait_for(lambda: children.read_text() and state_of(parent.pid) == "D")
            [child] = map(int, children.read_text().split())
            assert not still()
            os.kill(child, signal.SIGSTOP)
            wait_for(lambda: state_of(child) == "T")
            assert still() == {child}
            os.kill(parent.pid, signal.SIGSTOP)
            assert still() == {child, parent.pid}
            assert state_of(parent.pid) == "D"
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_a_signal_goes_to_the_process_that_was_meant_or_to_none() -> None:
    """The pid alone is not enough: with another start it is not signalled; nor are pid 1 and this process ever."""
    with subprocess.Popen(["sleep", "60"]) as child:
        ticks = identity.start_ticks(child.pid)
        other, same = Process(child.pid, ticks - 1), Process(child.pid, ticks)
        assert processes.send([other], signal.SIGKILL) == processes.Sent()
        assert child.poll() is None
        assert processes.send([same], signal.SIGTERM) == processes.Sent(signalled=frozenset({same}))
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.send([same], signal.SIGTERM) == processes.Sent()
        assert child.wait() == -signal.SIGTERM
    assert processes.send([same], signal.SIGTERM) == processes.Sent()
    mine = Process(os.getpid(), identity.start_ticks(os.getpid()) or 0)
    refused = frozenset({mine, Process(1, 0), Process(0, 0), Process(-1, 0)})
    assert processes.send(refused, signal.SIGTERM) == processes.Sent(refused=refused)


# In a process of its own, for a subreaper stays one: a child leaves an orphan behind, which becomes ours.


def test_our_children_are_listed_until_they_are_reaped() -> None:
    """A child is one from its start until somebody has asked how it ended; others are left alone."""
    before = processes.children_of_self()
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "kill -KILL $$"], {})
    assert processes.children_of_self() - before == {pid}
    ended = wait_for(lambda: processes.reap([pid]))
    assert os.waitstatus_to_exitcode(ended[pid]) == -signal.SIGKILL
    assert processes.children_of_self() == before
    with subprocess.Popen(["sh", "-c", "exit 3"]) as unnamed, subprocess.Popen(["sleep", "60"]) as living:
        os.waitid(os.P_PID, unnamed.pid, os.WEXITED | os.WNOWAIT)
        assert processes.reap([living.pid, 1]) == {}
        living.kill()
        assert unnamed.wait() == 3


PAGE = os.sysconf("SC_PAGE_SIZE")
TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def test_sizes_and_times_are_sums(tmp_path: Path) -> None:
    """Each figure is the sum over the processes; what a process has waited for is a part of its time.

    One that is not there adds nothing; where the proportional size cannot be read the resident one counts.
    """
    proc = FakeProc(tmp_path)
    for pid in (50, 51):
        proc.process(pid, times=(1, 2, 30, 40), rss_pages=100)
        (proc.root / f"{pid}/statm").write_text("900 100 50 1 0 9 0\n")
        shares = "00400000-7ffe ---p [rollup]\nRss: 400 kB\nPss: 300 kB\nPss_Dirty: 9 kB\n"
        (proc.root / f"{pid}/smaps_rollup").write_text(shares)
        (proc.root / f"{pid}/status").write_text("Name:\tsh\nVmPeak:\t  999 kB\nVmHWM:\t     700 kB\n")
    stats = [stat for pid in (50, 51) if (stat := identity.read_stat(pid, proc=str(proc))) is not None]
    both = [Process(stat.pid, stat.start_ticks) for stat in stats]
    assert processes.rss_bytes(stats) == 2 * 100 * PAGE
    assert processes.pss_bytes([*both, Process(99, 1)], proc=str(proc)) == 2 * 300 * 1024
    assert [processes.peak_rss_bytes(pid, proc=str(proc)) for pid in (50, 99)] == [700 * 1024, 0]
    assert processes.cpu_time_ns(stats) == 2 * 73 * TICK_NS
    (proc.root / "51/smaps_rollup").unlink()
    assert processes.pss_bytes(both, proc=str(proc)) == 300 * 1024 + 100 * PAGE


def test_a_real_process_is_measured() -> None:
    """A process that holds 30 MB, and has computed for some ticks of the kernel's clock, shows both in every figure."""
    held = 30_000_000
    program = f"import time; x = b'x' * {held}\nwhile time.process_time() < .1: pass\nprint(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        jid = identity.of_process(child.pid)

        def measured() -> dict[Process, identity.Stat]:
            return processes.family(Sought("a", 3, SPOOL, jid))

        rss, pss = processes.rss_bytes(measured().values()), processes.pss_bytes(measured())
        assert held <= pss <= processes.peak_rss_bytes(child.pid)
        assert held <= rss
        assert processes.cpu_time_ns(measured().values()) > 0
        child.communicate(b"\n", PATIENCE_S)
        assert measured() == {}


def test_a_search_below_a_process_sees_no_other(proc: FakeProc) -> None:
    """What descends from it is found, and a process of the same run that does not is not."""
    proc.process(60, parent=1, start=600, environment=MARK)
    for below, finds in ((None, [50, 51, 60]), (ME, [50, 51]), (90, [])):
        members = processes.search([Sought("a", 3, SPOOL, JID)], below=below, proc=str(proc), me=ME).members["a", 3]
        assert sorted(pid for pid, _ in members) == finds


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Start eight children, which are ended afterwards."""
    pids = [os.posix_spawnp("sleep", ("sleep", "1000"), dict(os.environ)) for _ in range(8)]
    left = list(pids)
    yield left
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_all_that_end_together_are_told_each_once(started: list[int]) -> None:
    """In one call, whether a run waits for them or not; a stopped one is named, and not one that has ended."""
    children = Children()
    assert list(children.reap()) == []
    over, started[:] = started[:6], started[6:]
    for pid in over:
        os.kill(pid, signal.SIGKILL)
    os.kill(started[0], signal.SIGSTOP)
    for pid in over:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.waitid(os.P_PID, started[0], os.WSTOPPED | os.WNOWAIT)
    found = {pid: (status, usage.ru_maxrss > 0) for pid, status, usage in children.reap()}
    assert found == dict.fromkeys(over, (signal.SIGKILL, True))
    assert (children.stopped, children.due_ns) == ({started[0]}, None)
    assert list(children.reap()) == []


def test_reaping_gives_way_where_children_end_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that end faster than they are reaped do not hold up the caller: the rest is due at once."""
    ended = count(1000)
    now = count(step=10_000_000)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    monkeypatch.setattr(os, "wait4", lambda which, options: (next(ended), 0, usage))
    reaper = Children(clock=lambda: next(now))
    first = [pid for pid, _, _ in reaper.reap()]
    assert first
    assert reaper.due_ns < next(now)
    assert next(iter(reaper.reap()))[0] == first[-1] + 1


class _Begun(Protocol):
    def __call__(self, *words: str, run: str = "", output: Path | None = None) -> int: ...


@pytest.fixture
def begun() -> Iterator[_Begun]:
    """Give a function that starts a process, with the marks of a run as `SPOOL:JOB:RUN`, and returns its pid."""
    with ExitStack() as those:

        def start(*words: str, run: str = "", output: Path | None = None) -> int:
            marks = dict(zip(("SPOOL_DIR", "SPOOL_JOB", "SPOOL_RUN"), run.split(":"), strict=False)) if run else {}
            to = those.enter_context(output.open("wb")) if output is not None else subprocess.DEVNULL
            environment = {key: value for key, value in os.environ.items() if not key.startswith("SPOOL_")} | marks
            process = those.enter_context(subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=to))
            those.callback(process.kill)
            shown = Path(f"/proc/{process.pid}/environ")
            wait_for(shown.read_bytes, what="the new program, which has its environment a moment after its start")
            return process.pid

        yield start


def test_the_marks_in_its_environment_decide(tmp_path: Path, begun: _Begun) -> None:
    """The wrapper of a run is none of another job, run or spool; a stranger and this process are none at all."""
    root = os.path.realpath(tmp_path)
    pid = begun("cat", run=f"{root}:a:1")
    assert is_wrapper(pid, root, "a", 1)
    assert not is_wrapper(pid, root, "a", 2)
    assert not is_wrapper(pid, root, "b", 1)
    assert not is_wrapper(pid, f"{root}/other", "a", 1)
    for pid in (begun("cat"), os.getpid(), 1):
        assert not is_wrapper(pid, str(tmp_path), "a", 1)


def test_a_wrapper_that_holds_its_metadir_is_known_wherever_that_moved(tmp_path: Path, begun: _Begun) -> None:
    """Its script and its marks name the place where the spool was, and its output may be elsewhere."""
    root = os.path.realpath(tmp_path)
    metadir = Path(root, "before", "jobs", "a", "1")
    metadir.mkdir(parents=True)
    pid = begun("sh", "-c", 'exec 8< "$1"; echo; cat', "sh", str(metadir), run=f"{root}/before:a:1")
    wait_for(lambda: os.path.exists(f"/proc/{pid}/fd/8"), what="what it holds")
    Path(root, "before").rename(Path(root, "after"))
    assert is_wrapper(pid, f"{root}/after", "a", 1)
    assert not is_wrapper(pid, f"{root}/after", "a", 2)


def test_a_wrapper_without_marks_is_known_by_script_output_or_child(tmp_path: Path, begun: _Begun) -> None:
    """One that was run by hand names the script or holds the log; one of an earlier version says that it waited."""
    root = os.path.realpath(tmp_path)
    metadir = Path(root, "jobs", "a", "1")
    metadir.mkdir(parents=True)
    (metadir / "run.sh").write_text("read -r line\n")
    assert is_wrapper(begun("sh", f"{metadir}/run.sh"), root, "a", 1)
    assert is_wrapper(begun("cat", output=metadir / "log"), root, "a", 1)
    waited = "read -r spool_told && . /proc/self/fd/8"
    assert is_wrapper(begun("sh", "-c", waited, "sh", "ready"), root, "a", 1)
    with_child = ": spool_told; SPOOL_DIR=$1 SPOOL_JOB=a SPOOL_RUN=1 cat; :"
    pid = begun("sh", "-c", with_child, "sh", root)
    wait_for(lambda: not is_wrapper(pid, root, "a", 2), what="the child, which has the marks of another run than that")
    assert is_wrapper(pid, root, "a", 1)


WHO = Jid(50, 1000, "boot-1", "pid:[1]", "here")


@pytest.fixture
def one_process(tmp_path: Path) -> FakeProc:
    """Show a machine called boot-1 on which the process of WHO runs."""
    made = FakeProc(tmp_path)
    made.process(50, start=1000)
    return made


def liveness(jid: Jid, proc: FakeProc) -> Liveness:
    """Return what *jid* is on the fake machine, which is called "here"."""
    return identity.liveness(jid, proc=str(proc), here="here")


def test_a_process_that_has_ended_is_gone_even_while_nobody_has_waited_for_it() -> None:
    """What runs is alive, and says where it runs; a zombie is gone: only its exit code is left."""
    pid = os.posix_spawn("/bin/cat", ["cat"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)])
    jid = identity.of_process(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    stat = identity.read_stat(pid)
    assert stat.state == "Z"
    assert identity.liveness(jid) is Liveness.GONE
    os.waitpid(pid, 0)
    assert identity.liveness(jid) is Liveness.GONE
    assert identity.of_process(pid) is None
    jid = identity.of_process(os.getpid())
    assert (jid.pid, jid.host) == (os.getpid(), identity.host())
    assert identity.liveness(jid) is Liveness.ALIVE


def test_another_process_with_the_same_pid_is_not_it(one_process: FakeProc) -> None:
    """Its start time proves that the first is gone; one whose first thread has ended runs as long as another does."""
    one_process.process(50, start=1000, state="Z", threads=2)
    assert liveness(WHO, one_process) is Liveness.ALIVE
    one_process.process(50, start=1001)
    assert liveness(WHO, one_process) is Liveness.GONE


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Liveness.ALIVE),
        ({"pid": 51}, Liveness.GONE),
        ({"boot_id": "boot-0"}, Liveness.REBOOTED),
        ({"boot_id": "boot-0", "pid_namespace": "pid:[2]"}, Liveness.REBOOTED),
        ({"boot_id": "boot-0", "host": "there"}, Liveness.ELSEWHERE),
        ({"pid_namespace": "pid:[2]"}, Liveness.ELSEWHERE),
        ({"pid_namespace": "pid:[2]", "host": "there"}, Liveness.ELSEWHERE),
        ({"host": "there"}, Liveness.ALIVE),  # this boot, this namespace: the host was given another name
    ],
)
def test_only_this_boot_and_namespace_can_prove_anything(
    one_process: FakeProc, changes: dict[str, object], expected: Liveness
) -> None:
    """Another boot of this host means gone; another host or pid namespace means that we cannot know."""
    assert liveness(replace(WHO, **changes), one_process) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a b", "a) S 1 2 (b", ")", "((", "x) Z 9 9 9"])
def test_a_programs_name_may_hold_anything(one_process: FakeProc, name: str) -> None:
    """Spaces and parentheses in a program's name do not move the fields after it."""
    one_process.process(60, start=77, parent=3, session=4, name=name)
    stat = identity.read_stat(60, proc=str(one_process))
    assert (stat.state, stat.parent, stat.session, stat.start_ticks) == ("S", 3, 4, 77)


def test_a_host_without_a_name_is_told_apart_by_its_machine_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines that are both called localhost are not the same host."""
    uname = os.uname()
    nameless = os.uname_result((uname.sysname, "localhost", uname.release, uname.version, uname.machine))
    monkeypatch.setattr(os, "uname", lambda: nameless)
    monkeypatch.setattr(identity, "read_bytes", lambda path: b"0123456789abcdef\n")
    identity.host.cache_clear()
    try:
        assert identity.host() == "localhost-0123456789ab"
    finally:
        identity.host.cache_clear()


class FakeProc:
    """A directory with the files of /proc that spool reads."""

    def __init__(self, root: Path, boot_id: str = "boot-1", pid_namespace: str = "pid:[1]") -> None:
        self.root = root
        (root / "sys/kernel/random").mkdir(parents=True)
        (root / "sys/kernel/random/boot_id").write_text(boot_id + "\n")
        (root / "self/ns").mkdir(parents=True)
        os.symlink(pid_namespace, root / "self/ns/pid")

    def __str__(self) -> str:
        return str(self.root)

    def process(
        self,
        pid: int,
        *,
        parent: int = 1,
        session: int | None = None,
        start: int = 1000,
        state: str = "S",
        name: str = "sh",
        threads: int = 1,
        times: tuple[int, int, int, int] = (0, 0, 0, 0),
        rss_pages: int = 0,
        size: int = 4096,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Show a process; one that was shown before with that pid is gone."""
        at = self.root / str(pid)
        at.mkdir(exist_ok=True)
        session = pid if session is None else session
        user, system, children_user, children_system = times
        fields = [state, parent, pid, session, 0, -1, 0, 0, 0, 0, 0, user, system, children_user, children_system]
        fields += [20, 0, threads, 0, start, size, rss_pages, *([0] * 28)]
        (at / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, fields))}\n")
        pairs = (f"{key}={value}" for key, value in (environment or {}).items())
        (at / "environ").write_bytes(b"".join(os.fsencode(pair) + b"\0" for pair in pairs))

    def end(self, pid: int) -> None:
        """Show that process no longer."""
        for file in (self.root / str(pid)).iterdir():
            file.unlink()
        (self.root / str(pid)).rmdir()
