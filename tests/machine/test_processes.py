"""Which processes belong to a run, how they are signalled, and what they use."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from machine.fake_proc import FakeProc
from spool.core.layout import SERVICE
from spool.core.model import Jid
from spool.machine import identity, processes
from spool.machine.processes import Process, Sought
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
codes = sorted({one.exit_code for one in ended.values()})
print(json.dumps([len(most), ordered, len(ended), codes, list(processes.children_of_self())]), flush=True)
os._exit(0)
"""


def test_the_kernels_lists_show_the_children_of_all_threads() -> None:
    """A wrapper has one thread; what it runs may have many, each with children of its own.

    What a child leaves behind becomes the child of a subreaper, can be listed, and can be reaped.
    """
    done = subprocess.run([sys.executable, "-c", _FAMILY], capture_output=True, check=True)
    assert json.loads(done.stdout) == [3, True, 3, [128 + signal.SIGKILL], []]


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


def test_a_process_that_executes_a_program_is_asked_again() -> None:
    """In the middle of that it shows no environment, for moments; so one look may not be enough, but it says so."""
    run = Sought("a", 3, SPOOL)
    environment = {**os.environ, **MARK}
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
    run = Sought("a", 3, SPOOL)
    command = [sys.executable, "-I", "-S", "-c", spawn, str(tmp_path / "gate")]

    def still() -> set[int]:
        return {pid for pid, _ in processes.still(processes.search([run]).members[run.key])}

    with subprocess.Popen(command, env={**os.environ, **MARK}, start_new_session=True) as parent:
        try:
            wait_for(lambda: state_of(parent.pid) == "D")
            [child] = map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
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
        assert processes.send([other], signal.SIGKILL) == processes.Sent(gone=frozenset({other}))
        assert child.poll() is None
        assert processes.send([same], signal.SIGTERM) == processes.Sent(signalled=frozenset({same}))
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.send([same], signal.SIGTERM) == processes.Sent(gone=frozenset({same}))
        assert child.wait() == -signal.SIGTERM
    assert processes.send([same], signal.SIGTERM) == processes.Sent(gone=frozenset({same}))
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
    assert (ended[pid].pid, ended[pid].exit_code) == (pid, 128 + signal.SIGKILL)
    assert ended[pid].peak_memory_bytes > 0
    assert processes.children_of_self() == before
    with subprocess.Popen(["sh", "-c", "exit 3"]) as unnamed, subprocess.Popen(["sleep", "60"]) as living:
        os.waitid(os.P_PID, unnamed.pid, os.WEXITED | os.WNOWAIT)
        assert processes.reap([living.pid, 1]) == {}
        living.kill()
        assert unnamed.wait() == 3


def test_what_a_child_has_used_includes_what_it_waited_for() -> None:
    """CPU time and peak memory are those of the child and of the children that it waited for."""
    burn = "import time; x = bytearray(30_000_000)\nwhile time.process_time() < 0.1: pass"
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", '"$1" -c "$2"; exit 0', "sh", sys.executable, burn], dict(os.environ))
    used = wait_for(lambda: processes.reap([pid]))[pid]
    assert used.cpu_time_ns >= 50_000_000
    assert used.peak_memory_bytes >= 30_000_000


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
