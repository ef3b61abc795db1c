"""Runs that are suspended, continued and signalled, and those that make room for a short job and go on after it."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from served import LOOKS, Served, marked
from spool.machine import identity

EXECUTORS = ("process", "tmux")

_COUNTS = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done"
_CATCHES = (
    "import signal, time\n"
    "for name in ('USR1', 'TERM'):\n"
    "    signal.signal(getattr(signal, 'SIG' + name), lambda number, _: print('got', number, flush=True))\n"
    "print('ready', flush=True)\n"
    "while True:\n    time.sleep(0.05)\n"
)


def _order(served: Served, name: str) -> Path:
    return served.root / "running" / f"{name}.toml.suspended"


def _is_suspended(served: Served, name: str) -> bool:
    return "suspended" in served.reason(name)


def _stands_still(pid: int) -> bool:
    stat = identity.read_stat(pid)
    return stat is not None and (stat.state == "T" or (stat.state == "D" and identity.must_stop(pid)))


def _all_stand_still(served: Served, name: str) -> bool:
    return all(_stands_still(pid) for pid in marked(served.root, name) if pid != served.pid(name))


def _quiet(served: Served, name: str, run: int = 1) -> bool:
    """Whether a job that writes all the time writes nothing for a while."""
    before = served.log(name, run)
    time.sleep(0.4)
    return served.log(name, run) == before


def test_every_process_of_a_suspended_job_stands_still_and_goes_on_again(shared: Served) -> None:
    """Also those that have left its session or its descent, and those of one that forks all the time."""
    name = "all"
    shared.drop(name, f"(setsid sh -c 'echo $$; {_COUNTS.replace('echo $i', ':')}' &)\necho $$\n{_COUNTS}")
    shared.says(name, "\n5\n")
    pids = [pid for pid in marked(shared.root, name) if pid != shared.pid(name)]
    assert shared.spool("suspend", name).stdout == f"{name} suspended\n"
    shared.until(lambda: _all_stand_still(shared, name) and _quiet(shared, name), "a quiet job")
    assert _all_stand_still(shared, name)
    assert len(pids) >= 2
    assert shared.spool("continue", name).stdout == f"{name} continued\n"
    shared.until(lambda: not _quiet(shared, name), "a job that writes again")
    assert not [pid for pid in marked(shared.root, name) if _stands_still(pid)]
    shared.spool("cancel", name)
    shared.wait_done(name)


def test_the_clock_of_the_time_limit_stands_still(shared: Served) -> None:
    """A job that has stood still for longer than its whole limit goes on, and ends by itself."""
    name, go, limit_s = "limited", shared.root.parent / "go-limited", 5
    shared.up(name, f"echo up; until [ -e {go} ]; do sleep 0.05; done; echo end", time_limit=f"{limit_s}s")
    _order(shared, name).touch()
    shared.until(lambda: _is_suspended(shared, name), "a suspended job")
    suspended = (shared.root / "jobs" / name / "1" / "suspended").stat().st_mtime
    shared.until(lambda: time.time() > suspended + limit_s, "a time that is longer than its limit")
    shared.looked()
    assert shared.outcome(name) is None
    go.touch()
    _order(shared, name).unlink()
    result = shared.wait_done(name)
    assert (result["outcome"], shared.log(name)) == ("finished", "up\nend\n")
    assert limit_s * 1e9 <= result["suspended_ns"] < result["ended_at_ns"] - result["started_at_ns"]
    line = next(line for line in shared.history() if line["job"] == name)
    assert line["suspended_ms"] == result["suspended_ns"] // 1_000_000


def test_a_suspended_job_that_is_cancelled_hears_term_before_its_grace_is_over(shared: Served) -> None:
    """It is woken to hear it, so that it can tidy up, and does not wait for KILL.

    A file that suspends nothing is taken away.
    """
    name = "tidy"
    program = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(print('tidied', flush=True)))\n"
    program += "print('ready', flush=True)\ntime.sleep(100)\n"
    shared.drop(name, [sys.executable, "-c", program], kill_grace="30s")
    shared.says(name, "ready")
    shared.spool("suspend", name)
    shared.until(lambda: _is_suspended(shared, name), "a suspended job")
    begun = time.monotonic()
    shared.spool("cancel", name)
    assert shared.wait_outcome(name) == "cancelled"
    assert time.monotonic() - begun < 20
    assert "tidied" in shared.log(name)
    _order(shared, "nobody").touch()
    for each in (name, "nobody"):
        shared.until(lambda each=each: not _order(shared, each).exists(), "no order for what does not run")


def test_a_suspended_job_keeps_what_it_was_given(shared: Served) -> None:
    """No other job gets its CPUs, and `why` and `show` say who suspended it and why."""
    shared.drop("big", _COUNTS, cpus=8)
    shared.says("big", "3")
    shared.spool("suspend", "big", "--reason", "demo\x1b[31m until 16:00")
    shared.until(lambda: _is_suspended(shared, "big"), "a suspended job")
    shared.drop("other", "true")
    assert "cpus: needs 1" in shared.wait_reason("other", "cpus")
    said = shared.spool("why", "big").stdout
    assert "\x1b" not in said + shared.spool("show", "big").stdout
    assert "demo" in shared.spool("show", "big").stdout
    shared.spool("continue", "big")
    shared.spool("cancel", "big")
    shared.wait_done("other")


def test_whoever_wakes_it_behind_the_back_of_spool_does_not_get_far(served: Served) -> None:
    """A process that somebody lets go on while its job is suspended is stopped again at the next look."""
    served.changes[LOOKS] = 10**9
    served.start()
    served.drop("woken", _COUNTS)
    served.says("woken", "3")
    served.spool("suspend", "woken")
    served.until(lambda: _is_suspended(served, "woken") and _quiet(served, "woken"), "a suspended job")
    for pid in marked(served.root, "woken"):
        os.kill(pid, signal.SIGCONT)
    served.until(lambda: _quiet(served, "woken"), "a job that stands still again")


def test_a_suspended_job_survives_its_dispatcher(live: Served) -> None:
    """Killed and started again, the dispatcher leaves it suspended; what was asked meanwhile is done then."""
    live.drop("kept", _COUNTS)
    live.says("kept", "3")
    live.spool("suspend", "kept")
    live.until(lambda: _is_suspended(live, "kept") and _quiet(live, "kept"), "a suspended job")
    live.restart()
    live.looked()
    assert _quiet(live, "kept")
    assert live.places("kept") == ["running"]
    live.kill()
    _order(live, "kept").unlink()
    assert _quiet(live, "kept")
    live.start()
    live.until(lambda: not _quiet(live, "kept"), "a job that moves")
    assert live.places("kept") == ["running"]


def test_only_a_file_suspends(live: Served) -> None:
    """A directory, a FIFO or a link of that name has no effect, hangs nobody and stays."""
    for name in ("dir", "fifo", "link"):
        live.drop(name, _COUNTS, cpus=0)
        live.says(name, "3")
    _order(live, "dir").mkdir()
    os.mkfifo(_order(live, "fifo"))
    _order(live, "link").symlink_to("/dev/zero")
    live.looked()
    for name in ("dir", "fifo", "link"):
        live.until(lambda name=name: not _quiet(live, name), "a job that moves")
        assert live.spool("cancel", name).returncode == 0
    live.wait_done("dir", "fifo", "link")
    live.looked()
    assert sum(_order(live, name).is_symlink() or _order(live, name).exists() for name in ("dir", "fifo", "link")) == 3
    assert "ERROR" not in live.said()


def test_options_suspend_the_tasks_that_run_and_continue_the_suspended_ones(shared: Served) -> None:
    """An array means its tasks that run; `--dry-run` changes nothing; what is already suspended is left out."""
    shared.drop("many", _COUNTS, array="0-3%2", project="p")
    shared.until(lambda: len(list((shared.root / "running").glob("many_*.toml"))) == 2, "two tasks")
    named = re.compile(r"^many_\d", re.MULTILINE)
    assert named.findall(shared.spool("suspend", "many", "--dry-run").stdout) == ["many_0", "many_1"]
    assert shared.spool("suspend", "many_0").returncode == 0
    assert shared.spool("suspend", "many").stdout == "many_1 suspended\n"
    assert shared.spool("suspend", "many_0").returncode == 1
    assert named.findall(shared.spool("continue", "--project", "p").stdout) == ["many_0", "many_1"]
    assert shared.spool("continue", "--project", "p").returncode == 0
    shared.spool("cancel", "many")
    shared.wait_done("many")


@pytest.mark.parametrize(("verb", "place"), [("suspend", "queued"), ("suspend", "held"), ("continue", "held")])
def test_what_does_not_run_cannot_be_suspended(shared: Served, verb: str, place: str) -> None:
    """It is told what the job does, and which verb is for that."""
    shared.drop("waits", "true", place=place, start_after="1h")
    said = shared.spool(verb, "waits")
    assert said.returncode == 1
    assert f"cannot {verb} job waits: it" in said.stderr
    assert not _order(shared, "waits").exists()
    shared.spool("cancel", "waits")
    shared.wait_done("waits")


def test_a_signal_reaches_the_command_and_not_the_wrapper(shared: Served) -> None:
    """By name or number, with or without SIG or a dash; to a job that stands still it comes when that goes on."""
    name = "catches"
    shared.drop(name, [sys.executable, "-c", _CATCHES])
    shared.says(name, "ready")
    for word in ("USR1", "sigusr1", "10", "-USR1"):
        assert shared.spool("signal", word, name).stdout.startswith(f"{name}: USR1 ")
    shared.until(lambda: "got 10" in shared.log(name), "a signal that is caught")
    before = shared.log(name)
    shared.spool("suspend", name)
    shared.until(lambda: _is_suspended(shared, name), "a suspended job")
    shared.until(lambda: all(_stands_still(pid) for pid in marked(shared.root, name) - {shared.pid(name)}), "a halt")
    assert shared.spool("signal", "TERM", name).returncode == 0
    assert "it is suspended" in shared.spool("signal", "CONT", name).stderr
    assert shared.log(name).replace("got 10\n", "") == before.replace("got 10\n", "")
    shared.spool("continue", name)
    shared.says(name, "got 15")
    assert shared.spool("signal", "KILL", name, "--dry-run").stdout == f"{name} would get KILL\n"
    shared.spool("signal", "KILL", name)
    result = shared.wait_done(name)
    assert (result["outcome"], result["exit_code"]) == ("failed", 137)


def test_a_job_that_stops_itself_and_its_wrapper_is_cancelled_by_term(shared: Served, executor: str | None) -> None:
    """It hears TERM at once, with a grace of an hour, and ends with its own code."""
    name = "stops-itself"
    shared.up(name, "trap 'exit 7' TERM; echo up; kill -STOP 0; while :; do sleep 0.02; done", kill_grace="1h")
    if executor != "tmux":  # which wakes what stops in its panes
        shared.until(lambda: any(_stands_still(pid) for pid in marked(shared.root, name)), "a job that stands still")
    shared.spool("cancel", name)
    result = shared.wait_done(name)
    assert (result["outcome"], result["exit_code"]) == ("cancelled", 7)


_TRAINS = """
trap 'echo saved > $SPOOL_METADIR/../../../saved; exit 0' USR1
if [ -e $SPOOL_METADIR/../../../saved ]; then echo continued; exit 0; fi
echo begun
while :; do sleep 0.05; done
"""


@pytest.fixture
def preempts(served: Served) -> Served:
    """Give a spool of one processor in which a run may be stopped as soon as it has begun."""
    (served.root / "config.toml").write_text('cpus = 1\ndisk_floor = "0M"\n')
    served.changes["spool.core.forecast.AFTER_NS"] = 0
    return served.start()


def test_a_long_job_saves_its_state_and_continues_after_the_short_one(preempts: Served) -> None:
    """It gets its warning signal and time; what it was stopped for is told of both jobs, and nothing is counted."""
    preempts.drop("long", ["sh", "-c", _TRAINS], preemptible=True, time_limit="1d", signal="USR1@60s", requeue=False)
    preempts.says("long", "begun")
    preempts.drop("short", "sleep 1", time_limit="1h")
    assert (preempts.wait_done("short") or {})["outcome"] == "finished"
    preempts.wait_done("long")
    assert [preempts.outcome("long", run) for run in preempts.runs("long")] == ["preempted", "finished"]
    first, last = (preempts.result("long", run) or {} for run in (1, 2))
    assert (first["reason"], first["again"]) == ("preempted for short", "requeue")
    assert (last["attempt"], last.get("requeues", 0)) == (1, 0)
    assert first["submitted_at_ns"] == last["submitted_at_ns"]
    assert "continued" in preempts.log("long", 2)
    assert "preempted" in preempts.spool("show", "long").stdout


def test_why_says_who_makes_room_for_whom(preempts: Served) -> None:
    """The short job is told which run is stopped for it; the long one, once it waits, for which job it was stopped."""
    command = "trap '' USR1; echo begun; while :; do sleep 0.05; done"
    preempts.drop("long", ["sh", "-c", command], preemptible=True, time_limit="1d", signal="USR1@60s")
    preempts.says("long", "begun")
    preempts.drop("short", "sleep 100", time_limit="1h")
    preempts.until(lambda: "preempted for short" in preempts.spool("ls").stdout, "the order to stop it")
    assert "preemption: long, " in preempts.spool("why", "short").stdout
    preempts.spool("cancel", "long")
