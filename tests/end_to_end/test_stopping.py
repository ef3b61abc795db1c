"""Stopping: every process of a run ends, whatever it left or hid, before what it had is free; who gets a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from served import Served, alive, marked, pids_in
from spool.client.requests import ChangeKind, Requests
from spool.core.errors import SpoolError
from spool.core.model import Stop, StopKind
from spool.formats.run_records import render_stop
from spool.store.ownership import this_user
from spool.store.spool import Spool
from support import wait_for

EXECUTORS = ("process", "sh", "tmux")

# Ways to leave a child behind that a process group or a session does not know of. Each prints the child's pid.
_ESCAPES = {
    "plain": "sleep 1000 & echo $!",
    "setsid": "setsid sleep 1000 & echo $!",
    "double-fork": "(setsid sh -c 'echo $$; exec sleep 1000' &)",
    "ignores-term": "sh -c 'trap \"\" TERM HUP INT; echo $$; while :; do sleep 0.1; done' &",
    "setsid-ignores": "setsid sh -c 'trap \"\" TERM HUP INT; echo $$; while :; do sleep 0.1; done' &",
    "no-marks": "env -i /bin/sh -c 'echo $$; exec sleep 1000' &",
    "setsid-no-marks": "env -i setsid /bin/sh -c 'echo $$; exec sleep 1000' &",
}


def _pids(served: Served, name: str, count: int) -> list[int]:
    def printed() -> list[int]:
        found = pids_in(served.log(name))
        return found if len(found) >= count else []

    return served.until(printed, f"{count} pids of {name}")


@pytest.mark.parametrize("how", ["cancel", "shot"])
@pytest.mark.parametrize("escape", _ESCAPES)
def test_a_cancelled_job_takes_all_its_processes_along(shared: Served, escape: str, how: str) -> None:
    """However a process hides from its group, cancelling the job ends it, before the job is called ended.

    When a wrapper is killed, what it ran is ended before the job is called lost.
    """
    name = f"{how}-{escape}"
    shared.drop(name, f"{_ESCAPES[escape]}\necho $$\nexec sleep 1000", kill_grace="300ms", requeue=False)
    pids = _pids(shared, name, 2)
    if how == "cancel":
        shared.cancels(name)
    else:
        os.kill(shared.pid(name), signal.SIGKILL)
        assert shared.wait_outcome(name) == "lost"
    assert [pid for pid in pids if alive(pid)] == []
    assert not marked(shared.root, name)


@pytest.mark.parametrize("escape", _ESCAPES)
def test_a_finished_command_leaves_nothing_behind(shared: Served, escape: str) -> None:
    """What a finished command left behind is ended, the outcome is what its exit code says, and comes after that."""
    name = f"leave-{escape}"
    shared.drop(name, f"{_ESCAPES[escape]}\nuntil [ -s $SPOOL_METADIR/log ]; do sleep 0.01; done\nexit 0",
                kill_grace="300ms")  # fmt: skip
    result = shared.wait_done(name)
    assert (result["outcome"], result["exit_code"]) == ("finished", 0)
    pids = _pids(shared, name, 1)
    assert [pid for pid in pids if alive(pid)] == []


def test_what_ignores_term_is_killed_after_its_grace(shared: Served) -> None:
    """KILL comes after `kill_grace`, not before."""
    shared.up("stubborn", "trap '' TERM INT HUP; echo up; while :; do sleep 0.05; done", kill_grace="700ms")
    begun = time.monotonic()
    shared.cancels("stubborn")
    assert time.monotonic() - begun >= 0.7  # how early is a claim, how late is not


@pytest.mark.parametrize("first", ["requeue", "hold"])
@pytest.mark.parametrize("then", ["cancel", "rm"])
def test_a_job_that_is_requeued_and_then_cancelled_ends_with_its_run(shared: Served, first: str, then: str) -> None:
    """It is `stopping` for all to see until that run is over, and then `cancelled` for good, as its dependents hear."""
    x, after = f"x-{first}-{then}", f"after-{first}-{then}"
    gate = shared.root / f"gate-{first}-{then}"
    tidies = f"trap 'until [ -e {gate} ]; do sleep 0.02; done; exit 3' TERM; echo up; while :; do sleep 0.02; done"
    shared.drop(x, tidies, kill_grace="1m")
    shared.drop(after, "true", depends_on={"ended": [x]})
    shared.says(x, "up")
    assert shared.spool(first, x).returncode == 0
    shared.until(lambda: shared.record(x, "stop"), "the stop")
    if then == "rm":
        shared.path("held" if first == "hold" else "queued", x).unlink()
    else:
        assert shared.spool("cancel", x).returncode == 0
    shared.looked()
    shared.until(lambda: shared.state()["jobs"].get(x, {}).get("state") == "stopping", "the view")
    assert "stopping" in shared.spool("ls", x).stdout
    for verb in ("cancel", "hold"):
        assert "stopped" in shared.spool(verb, x).stderr
    assert "stopped" in shared.spool("why", x).stdout
    assert shared.spool("wait", x, "--timeout", "300ms").returncode == 124
    gate.touch()
    result = shared.wait_done(x, after)
    assert (result["run"], result["outcome"], result.get("again")) == (1, "cancelled", None)
    assert [line["job"] for line in shared.history() if line["job"] == x] == [x]
    assert shared.spool("wait", x).returncode == 130


def test_a_time_limit_ends_a_job(shared: Served) -> None:
    """A job over its limit is a timeout, whatever its exit code, and never before its time."""
    result = shared.completes("limited", "trap 'exit 0' TERM; while :; do sleep 0.02; done", time_limit="500ms")
    assert result["outcome"] == "timeout"
    assert "500ms" in result["reason"]
    assert result["ended_at_ns"] - result["started_at_ns"] >= 500_000_000


@pytest.mark.parametrize("kind", ["text", "list", "waiting-shell"])
def test_the_warning_reaches_the_command(shared: Served, kind: str) -> None:
    """The warning signal comes before the limit, to the command itself, and not to a shell that waits for it."""
    program = (
        "import signal, sys, time\n"
        "def warned(*_):\n    print('warned', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, warned)\nprint('up', flush=True)\ntime.sleep(1000)"
    )
    script = Path(shared.root.parent / "warned.py")
    script.write_text(program)
    command: str | list[str] = {
        "text": f"exec {sys.executable} {script}",
        "list": [sys.executable, str(script)],
        "waiting-shell": f"{sys.executable} {script}; echo code $?",
    }[kind]
    name = f"warned-{kind}"
    shared.up(name, command, time_limit="1h", signal="USR1@30s")
    shared.shorten(name, "31s")
    result = shared.wait_done(name)
    assert result["outcome"] == "finished", (result, shared.log(name))
    assert shared.log(name) == ("up\nwarned\ncode 0\n" if kind == "waiting-shell" else "up\nwarned\n")


def test_the_next_job_starts_when_the_last_leftover_is_gone(served: Served) -> None:
    """With one CPU the next job starts only after the last process of the one before is gone, stubborn or not."""
    (served.root / "config.toml").write_text("cpus = 1\n")
    (served.root.parent / "stubborn.sh").write_text(
        "trap '' TERM HUP INT\necho $$ > stubborn.pid\nwhile :; do date +%s%N > new; mv new last; sleep 0.02; done\n"
    )
    served.drop("first", "setsid sh stubborn.sh & until [ -s last ]; do sleep 0.01; done; exit 0", kill_grace="500ms")
    served.drop("second", "cat last; kill -0 $(cat stubborn.pid) && echo ALIVE; date +%s%N")
    assert served.run() == 0
    first, second = served.history()
    assert (first["job"], second["job"]) == ("first", "second")
    assert first["outcome"] == "finished"
    assert first["ended_at"] <= second["started_at"]
    assert "ALIVE" not in served.log("second")
    last, now = pids_in(served.log("second"))
    assert last <= served.result("second")["started_at_ns"] <= now  # type: ignore[index]


_ATTACHES = """
import ctypes, os
trace = ctypes.CDLL(None, use_errno=True).ptrace
assert trace(16, os.getppid(), None, None) == 0, ctypes.get_errno()  # PTRACE_ATTACH
os.waitpid(os.getppid(), 0x40000000)  # __WALL
raise SystemExit(3)
"""


@pytest.mark.parametrize("stops", ["signal", "tracer"])
def test_a_run_ends_though_its_command_stops_its_wrapper(shared: Served, stops: str) -> None:
    """A wrapper that its own command stops, by a signal or as its tracer, goes on and writes the exit code."""
    (shared.root.parent / "attaches.py").write_text(_ATTACHES)
    command = "kill -STOP $PPID; exit 3" if stops == "signal" else f"exec {sys.executable} attaches.py"
    shared.drop(f"stops-{stops}", command)
    assert shared.wait_outcome(f"stops-{stops}") == "failed"
    assert (shared.record(f"stops-{stops}", "rc") or "").strip() == "3"


def test_an_adopted_wrapper_that_was_stopped_goes_on(live: Served) -> None:
    """A wrapper that was stopped while no dispatcher ran, and is no child of the next one, goes on under that."""
    live.drop("stood", "echo $PPID; until [ -e go ]; do sleep 0.1; done")
    (wrapper,) = _pids(live, "stood", 1)
    live.kill()
    os.kill(wrapper, signal.SIGSTOP)
    (live.root.parent / "go").touch()
    live.start()
    assert live.wait_outcome("stood") == "finished"


def test_other_jobs_are_left_alone(shared: Served) -> None:
    """Ending one job touches no process of another, not even one that hides from its own job's marks."""
    hides = "(env -i setsid /bin/sh -c 'echo $$; exec sleep 1000' &)"
    shared.drop("bystander", f"setsid sleep 1000 & echo $!; {hides}; exec sleep 1000", kill_grace="300ms")
    shared.drop("victim", "setsid sleep 1000 & echo $!; exec sleep 1000")
    kept = _pids(shared, "bystander", 2)
    (ended,) = _pids(shared, "victim", 1)
    shared.cancels("victim")
    assert not alive(ended)
    assert [alive(pid) for pid in (*kept, shared.pid("bystander"))] == [True] * 3
    shared.cancels("bystander")
    assert not any(map(alive, kept))


def test_stop_files_and_cancels_without_a_reason(shared: Served) -> None:
    """A stop record that somebody else wrote stays: it says who cancelled the job, and why."""
    shared.up("noted", "echo up; exec sleep 1000")
    (shared.root / "jobs/noted/1/stop").write_text(f"cancel alice {time.time_ns()} wrong data\n")
    shared.path("running", "noted").unlink()
    result = shared.wait_done("noted")
    assert result["outcome"] == "cancelled"
    assert "alice" in result["reason"]
    assert "wrong data" in result["reason"]


# Memory.

_ALLOCATE = (
    "import sys, time; x = bytearray(int(sys.argv[1]) << 20); x[::4096] = b'x' * len(x[::4096]); "
    "print('up', flush=True); time.sleep(1000)"
)


def test_a_process_tree_over_its_memory_is_stopped(shared: Served) -> None:
    """The memory of all processes counts together; a job over it is out of memory."""
    shared.drop(
        "greedy", f"for i in 1 2 3; do setsid {sys.executable} -c \"$CODE\" 50 & done; wait", memory="100M",
        kill_grace="1s", env={"CODE": _ALLOCATE},
    )  # fmt: skip
    result = shared.wait_done("greedy")
    assert result["outcome"] == "out_of_memory"
    assert "of 100 MiB" in result["reason"]
    assert result["peak_memory_bytes"] > 100 << 20
    assert not marked(shared.root, "greedy")


def test_memory_limits_hold_for_adopted_runs(served: Served) -> None:
    """A run that goes over its memory under a second dispatcher is stopped by that."""
    program = _ALLOCATE.replace(
        "x = ", "import os\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\nx = "
    )
    served.start()
    served.up("late", [sys.executable, "-c", program, "150"], memory="100M", kill_grace="1s")
    served.restart()
    (served.root.parent / "go").touch()
    assert served.wait_outcome("late") == "out_of_memory"


def test_the_limit_of_a_job_that_runs_can_be_changed(live: Served) -> None:
    """A shorter limit stops it, a longer one or none lets it go on, and a file that is not valid changes nothing."""
    for name in ("shorter", "longer", "none", "broken"):
        limit = {} if name == "shorter" else {"time_limit": "1500s"}
        live.begun(name, "exec sleep 1000", cpus=0, **limit)
    path = live.path("running", "broken")
    path.write_text("command = [")
    live.until(lambda: "its file in running/ was changed and is not valid" in live.said(), "the complaint")
    live.spool("edit", "longer", "--time-limit", "1600s", "--priority", "77")
    live.spool("edit", "none", "--unset", "time_limit")
    live.spool("edit", "shorter", "--time-limit", "1s")
    assert live.wait_outcome("shorter") == "timeout"
    assert "limit 1s" in str(live.result("shorter"))
    live.until(lambda: live.state()["jobs"].get("longer", {}).get("priority") == 77, "the priority")
    live.restart()
    live.until(lambda: live.state()["jobs"].get("longer", {}).get("priority") == 77, "the priority again")
    live.spool("edit", "longer", "--time-limit", "1s")
    assert live.wait_outcome("longer") == "timeout"
    for name in ("none", "broken"):
        assert live.state()["jobs"][name]["state"] == "running"


SAVES = (
    "import signal, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
    "def save(*_):\n"
    "    time.sleep(0.2)\n"
    "    print('saved', 'alone' if child.poll() is None else 'without its helper', flush=True)\n"
    "    child.kill()\n"
    "    sys.exit(0)\n"
    "signal.signal(signal.SIGUSR1, save)\n"
    "print('ready', flush=True)\n"
    "time.sleep(1000)\n"
)
SCRIPT = f"cat > saves.py << 'END'\n{SAVES}END\n{sys.executable} saves.py\necho after $?\n"


def _signalled(shared: Served, name: str, *options: str) -> str:
    shared.says(name, "ready")
    done = shared.spool("signal", "USR1", name, *options)
    assert done.returncode == 0, done.stderr
    shared.wait_done(name)
    return shared.log(name).replace("\n", " ")


@pytest.mark.parametrize("shape", ["text", "list", "script", "nested", "plain"])
def test_the_program_gets_it_and_no_helper_or_shell(shared: Served, shape: str) -> None:
    """However the shell around the program is stated, and however many there are."""
    name, keys = f"saves-{shape}", {"workdir": str(shared.root.parent)}
    match shape:
        case "text":
            shared.drop(name, SCRIPT, **keys)
        case "list":
            (shared.root.parent / "list.sh").write_text(SCRIPT)
            shared.drop(name, ["sh", "list.sh"], **keys)
        case "script":
            shared.drop(name, ["job.sh"], script=f"#!/bin/sh\n{SCRIPT}", **keys)
        case "nested":
            (shared.root.parent / "inner.sh").write_text(SCRIPT)
            shared.drop(name, "(sh inner.sh) | cat; echo", **keys)
        case "plain":
            shared.drop(name, [sys.executable, "-c", SAVES], **keys)
    said = _signalled(shared, name)
    assert "saved alone" in said
    assert ("after 0" in said) == (shape != "plain")


def test_all_is_also_the_helpers(shared: Served) -> None:
    """`signal_to = "all"` is what it says, but a shell that waits is spared."""
    shared.drop("all", SCRIPT, workdir=str(shared.root.parent), signal_to="all", signal="USR1", time_limit="1h")
    assert "saved without its helper after 0" in _signalled(shared, "all")


WAITS = f"{sys.executable} -c \"import time; print('ready', flush=True); time.sleep(1000)\""
TRAP = f"trap 'echo trapped; kill $!' USR1; {WAITS} & wait; wait $!; echo $?"


def test_shell_is_the_command_alone(shared: Served) -> None:
    """`signal_to = "shell"`, or `--shell`, reaches a script, also one that does not handle it."""
    shared.drop("shell", f"{WAITS}; echo after", signal_to="shell", signal="USR1", time_limit="1h")
    shared.drop("by-option", f"{WAITS}; echo after")
    for name, options in (("shell", ()), ("by-option", ("--shell",))):
        assert "after" not in _signalled(shared, name, *options)
        assert shared.result(name)["exit_code"] == 138


def test_a_trap_in_the_shell_gets_it_unless_the_job_says_main(shared: Served) -> None:
    """A script that handles it decides for its program; `main` is as for Slurm's steps, past the batch shell."""
    shared.drop("with-trap", TRAP)
    said = _signalled(shared, "with-trap")
    assert "trapped" in said
    assert "143" in said
    shared.drop("past-trap", TRAP, signal_to="main", signal="USR1", time_limit="1h")
    said = _signalled(shared, "past-trap")
    assert "trapped" not in said
    assert "138" in said


# A process that nothing ties to its run but its descent: no session, no mark, no output; its pid is in a file.
_HIDDEN = "(env -i setsid /bin/sh -c 'echo $$ > {to}; exec sleep 1000' > /dev/null 2>&1 < /dev/null &); {after}"
_STUBBORN = (
    "setsid sh -c 'trap \"\" TERM; echo $$ > {to}; exec >/dev/null 2>&1; while :; do sleep 0.05; done' & {after}"
)
_WAITS = "until [ -s {to} ]; do sleep 0.01; done; exit {code}"


def _leaving(served: Served, name: str, how: str, code: int = 0) -> tuple[str, Path]:
    """Return a command that leaves a process behind, and where that writes its pid."""
    to = served.root.parent / f"{name}.pid"
    return how.format(to=to, after=_WAITS.format(to=to, code=code)), to


def _left(served: Served, name: str) -> bool:
    """Whether the command of run 1 has ended, and its wrapper waits for what it has left behind."""
    return served.record(name, "leftovers") is not None and (served.record(name, "rc") or "").endswith("\n")


@pytest.mark.parametrize("epilog", [None, "true"])
def test_what_hides_from_everything_is_its_wrappers_child(shared: Served, epilog: str | None) -> None:
    """It is ended with its run; a wrapper with an epilog is a shell, and hands over to a reaper."""
    name = f"hidden-{epilog}"
    command, to = _leaving(shared, name, _HIDDEN, 3)
    result = shared.completes(name, command, kill_grace="300ms", **({"epilog": epilog} if epilog else {}))
    assert (result["outcome"], result["exit_code"]) == ("failed", 3)
    assert not alive(int(to.read_text()))
    assert shared.record(name, "leftovers") is None


def test_one_cancel_of_a_job_and_of_what_depends_on_it_never_fails(shared: Served) -> None:
    """The dispatcher may cancel the second because of the first; a later command finds it ended."""
    shared.drop("fit", "true", start_after="2099-01-01")
    shared.drop("draw", "true", depends_on=["fit"])
    requests = Requests(Spool(str(shared.root)), this_user())
    requests.cancel("fit")
    shared.wait_done("draw")
    assert [change.kind for change in requests.cancel("draw")] == [ChangeKind.CANCELLED]
    with pytest.raises(SpoolError, match="it has ended"):
        Requests(Spool(str(shared.root)), this_user()).cancel("draw")


@pytest.mark.parametrize("order", ["time", "memory", "cancel", "stop"])
def test_what_was_reached_is_overruled_by_nothing(shared: Served, order: str) -> None:
    """While what the command left behind is being ended, its limits pass, or it is cancelled: its exit code counts."""
    name = f"reached-{order}"
    keys = {"time": {"time_limit": "1h"}, "memory": {"memory": "60M"}}.get(order, {})
    how = _STUBBORN
    if order == "memory":
        grows = "import os, signal, time; signal.signal(15, lambda *_: 0); parent = os.getppid(); "
        grows += "print(os.getpid(), file=open('{to}', 'w'), flush=True)\n"
        grows += "while os.getppid() == parent: time.sleep(.01)\n"
        grows += "x = bytearray(150 << 20); time.sleep(1000)"
        how = f'setsid {sys.executable} -c "{grows}" > /dev/null 2>&1 & {{after}}'
    command, _ = _leaving(shared, name, how, 7)
    shared.drop(name, command, kill_grace="6s" if order == "time" else "3s", retry={"max": 1, "on": [7]}, **keys)
    shared.until(lambda: _left(shared, name), "the end of its command")
    if order == "time":
        shared.shorten(name)
    elif order == "cancel":
        shared.spool("cancel", name)
    elif order == "stop":  # by a user's own hand
        (shared.root / "jobs" / name / "1" / "stop").write_bytes(
            render_stop(Stop(StopKind.CANCEL, "ann", time.time_ns()))
        )
    first = shared.until(lambda: shared.result(name), "the end of its first run")
    assert (first["outcome"], first["exit_code"]) == ("failed", 7)
    if order != "cancel":  # which takes the job back before its retry
        assert first["again"] == "retry"
    shared.spool("cancel", name)
    shared.until(lambda: shared.path("done", name).exists(), "the end of the job")


@pytest.mark.parametrize("order", ["cancel", "shot"])
def test_what_ends_an_epilog_changes_no_outcome(shared: Served, order: str) -> None:
    """Its command had ended by itself: that is how the run ends, and the reason says what came after."""
    shared.drop(f"epilog-{order}", "true", epilog="echo late; exec sleep 1000")
    shared.says(f"epilog-{order}", "late")
    assert "(its command has ended with exit code 0; its epilog is" in shared.spool("why", f"epilog-{order}").stdout
    if order == "shot":
        os.kill(shared.pid("epilog-shot"), signal.SIGKILL)
    shared.spool("cancel", "epilog-cancel")
    result = shared.wait_done(f"epilog-{order}")
    assert (result["outcome"], result["exit_code"]) == ("finished", 0)
    assert result["reason"].startswith("exit code 0; its epilog was cut short")
    assert "its epilog was cut short" in shared.spool("why", f"epilog-{order}").stdout


def test_a_wrapper_that_is_killed_while_it_waits_leaves_its_exit_code_and_nothing_else(shared: Served) -> None:
    """The record of leftovers says that it had not outlasted them: they are searched for, and ended."""
    command, to = _leaving(shared, "shot", _STUBBORN)
    shared.drop("shot", command, kill_grace="1s")
    shared.until(lambda: _left(shared, "shot"), "the end of its command")
    os.kill(shared.pid("shot"), signal.SIGKILL)
    result = shared.wait_done("shot")
    assert (result["outcome"], result["exit_code"]) == ("finished", 0)
    assert not alive(int(to.read_text()))


def test_a_dispatcher_that_a_job_starts_lives_on(shared: Served, executor: str) -> None:
    """A submission to another spool starts one: it is nobody's leftover, and neither are its jobs."""
    other = shared.root.parent / "other"
    words = f"{sys.executable} -P -m spool --spool {other} submit --name inner -- sleep 1000"
    try:
        shared.drop("outer", f"{words}; until [ -s {other}/jobs/inner/1/jid ]; do sleep 0.02; done")
        assert shared.wait_outcome("outer") == "finished", shared.log("outer")
        inner = int((other / "jobs/inner/1/jid").read_text().split()[0])
        assert alive(inner)
        assert not (other / "jobs/inner/1/rc").exists()
        (other / "running/inner.toml").unlink()
        wait_for(lambda: (other / "done/inner.toml").exists(), what="the end of the inner job, by its dispatcher")
        assert not alive(inner)
    finally:
        said = (other / ".tmp/dispatcher.start").read_text() if other.exists() else ""
        if said:
            os.kill(int(said), signal.SIGTERM)
            wait_for(lambda: not alive(int(said)), what="the end of that dispatcher")


_TRACER = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
print(libc.ptrace(0x4206, int(sys.argv[1]), 0, 0), flush=True)  # PTRACE_SEIZE
time.sleep(1000)
"""


def test_a_zombie_that_a_tracer_holds_keeps_no_run(shared: Served) -> None:
    """Only its exit code is left, and nobody but its tracer can take that."""
    command, to = _leaving(shared, "traced", _STUBBORN)
    shared.drop("traced", command, kill_grace="1s")
    shared.until(lambda: _left(shared, "traced"), "the end of its command")
    words = [sys.executable, "-c", _TRACER, to.read_text().strip()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as tracing:
        try:
            if tracing.stdout.readline() != "0\n":
                pytest.skip("no process may be traced here")
            assert shared.wait_outcome("traced") == "finished"
            assert Path(f"/proc/{to.read_text().strip()}/stat").read_text().split()[2] == "Z"
        finally:
            tracing.kill()


def _ended_unseen(served: Served, name: str) -> Path:
    """Run a job whose command ends, and leaves a process behind, while no dispatcher lives; return the pid's file."""
    served.start()
    gate = served.root.parent / "go"
    command, to = _leaving(served, name, _STUBBORN)
    served.drop(name, f"until [ -e {gate} ]; do sleep 0.01; done; {command}", kill_grace="300ms")
    served.until(lambda: served.record(name, "jid"), "its begin")
    served.kill()
    gate.touch()
    wait_for(lambda: _left(served, name), what="the end of its command")
    return to


def test_a_run_of_an_earlier_version_is_looked_after_once(served: Served) -> None:
    """Its wrapper ended with its command, and nothing in its records says whether it had left something behind."""
    to = _ended_unseen(served, "old")
    script = served.root / "jobs/old/1/run.sh"
    script.write_text(script.read_text().replace("spool_start", "spool_begin"))
    os.kill(served.pid("old"), signal.SIGKILL)
    wait_for(lambda: not alive(served.pid("old")), what="the end of its wrapper")
    (served.root / "jobs/old/1/leftovers").unlink()
    served.start()
    assert served.wait_outcome("old") == "finished"
    assert not alive(int(to.read_text()))


def test_views_without_a_dispatcher_tell_of_what_was_left_behind(served: Served) -> None:
    """The run is stopping while its wrapper waits, and the next dispatcher ends it."""
    to = _ended_unseen(served, "left")
    assert "stopping" in served.spool("ls", "left").stdout
    assert alive(int(to.read_text()))
    assert served.run() == 0
    assert served.outcome("left") == "finished"
    assert not alive(int(to.read_text()))


_FORKS = """
import os, time
for _ in range(100_000):
    if os.fork():
        time.sleep(0.002)
        os._exit(0)
    os.setsid()
"""


def test_a_tree_that_forks_without_end_is_finite_work(shared: Served) -> None:
    """Orphans of killed processes come back to the wrapper, so that none of them outlives the record of its end."""
    (shared.root.parent / "forks.py").write_text(_FORKS)
    names = [f"forks-{number}" for number in range(4)]
    command = f"echo up; {sys.executable} {shared.root.parent}/forks.py & exec sleep 1000"
    for name in names:
        shared.drop(name, command, kill_grace="100ms")
    for name in names:
        shared.says(name, "up")
        shared.path("running", name).unlink()
    for name in names:
        assert shared.wait_outcome(name) == "cancelled"
    mine = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    assert [path for path in mine if f"{shared.root.parent}/forks.py".encode() in _read(path)] == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
