"""What is particular about jobs in a tmux session: their terminal, their server, and how these can be lost."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from served import LOOKS, Served, alive, marked, pids_in
from spool.machine.host import login_environment
from support import PATIENCE_S, wait_for

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

EXECUTORS = ("tmux",)

_FACTS = (
    "import json, os, resource, sys; print(json.dumps({'environment': dict(os.environ), 'umask': os.umask(0),"
    " 'core': resource.getrlimit(resource.RLIMIT_CORE), 'terminal': [os.isatty(n) for n in range(3)]}))"
)


def _screen(served: Served, name: str, run: int = 1) -> str:
    return served.tmux("capture-pane", "-p", "-S", "-", "-t", f"={name}/{run}:")


def _shows(served: Served, name: str, text: str, run: int = 1) -> str:
    """Wait until the session of a run shows *text*."""
    return wait_for(
        lambda: screen if text in (screen := _screen(served, name, run)) else "", what=f"{text!r} on the screen"
    )


def _type(served: Served, name: str, *keys: str) -> None:
    assert served.tmux("send-keys", "-t", f"={name}/1:", *keys) == ""


def _sessions(served: Served) -> list[str]:
    said = served.tmux("list-sessions", "-F", "#{session_name}")
    return sorted(said.split()) if "no server" not in said and "error connecting" not in said else []


def _server(served: Served) -> int:
    return int(served.tmux("display-message", "-p", "#{pid}"))


# The terminal.


def test_typing_reaches_the_job_and_stays_out_of_the_log(shared: Served) -> None:
    """`read` gets what is typed; the session shows it and the output, the log has the output alone, byte for byte."""
    shared.drop("ask", "printf 'name? '; read -r name; printf 'hello %s\\033[1m!\\n\\t\\n' \"$name\"; exec sleep 1000")
    shared.says("ask", "name? ")
    _shows(shared, "ask", "name?")
    _type(shared, "ask", "J. Doe", "Enter")
    shared.says("ask", "!\n\t\n")
    assert "J. Doe" in _shows(shared, "ask", "hello J. Doe!")
    assert shared.log("ask") == "name? hello J. Doe\x1b[1m!\n\t\n"
    shared.cancels("ask")


def test_only_the_input_is_a_terminal(shared: Served) -> None:
    """The job's outputs are its files, and /dev/tty is there for what is for the person alone."""
    shared.drop("tty", f'echo secret > /dev/tty; {sys.executable} -c "$CODE"; exec sleep 1000', env={"CODE": _FACTS})
    shared.says("tty", "}")
    _shows(shared, "tty", "secret")
    assert "secret" not in shared.log("tty")
    assert json.loads(shared.log("tty"))["terminal"] == [True, False, False]
    shared.cancels("tty")


def test_outputs_of_the_jobs_choice_are_shown_too(shared: Served) -> None:
    """What goes to files of the job's own, from where they ended, is seen in the session."""
    (shared.root.parent / "own.out").write_text("of old\n")
    shared.drop("own", "echo new; echo bad >&2; exec sleep 1000", stdout="own.out", stderr="own.err")
    _shows(shared, "own", "new")
    assert "of old" not in _shows(shared, "own", "bad")
    assert (shared.root.parent / "own.out").read_text() == "of old\nnew\n"
    shared.cancels("own")


def test_an_interrupt_from_the_keyboard_comes_once(shared: Served) -> None:
    """Ctrl-C interrupts the command a single time, so that what it does to clean up is not broken off."""
    program = (
        "import signal, sys, time\n"
        "count = 0\n"
        "def on(*_):\n    global count\n    count += 1\n"
        "signal.signal(signal.SIGINT, on)\nprint('up', flush=True)\n"
        "while not count:\n    time.sleep(0.01)\n"
        "time.sleep(0.3)\nprint('interrupts:', count)"
    )
    shared.up("keys", [sys.executable, "-c", program])
    _type(shared, "keys", "C-c")
    assert shared.wait_outcome("keys") == "finished"
    assert shared.log("keys") == "up\ninterrupts: 1\n"


def test_a_job_cannot_be_suspended_from_the_keyboard(shared: Served) -> None:
    """Ctrl-Z does nothing: nobody would be there to let the job go on."""
    shared.up("susp", "echo up; read -r x; echo $x")
    _type(shared, "susp", "C-z", "on", "Enter")
    assert shared.wait_outcome("susp") == "finished"
    assert shared.log("susp").endswith("on\n")


def test_attach_shows_types_and_leaves(shared: Served) -> None:
    """`spool attach` in a terminal: what the job writes is seen, what is typed arrives, and Ctrl-B D leaves it."""
    shared.drop("att", "echo ready; while read -r x; do echo got $x; done")
    shared.says("att", "ready")
    with _attached(shared, "att") as (terminal, process):
        _reads(terminal, b"ready")
        os.write(terminal, b"one\r")
        shared.says("att", "got one\n")
        assert _leaves(terminal, process) == 0
    with _attached(shared, "att", "--read-only") as (terminal, process):
        _reads(terminal, b"got one")
        os.write(terminal, b"two\r")
        assert _leaves(terminal, process) == 0
    _type(shared, "att", "C-u", "C-d")
    assert shared.wait_outcome("att") == "finished"
    assert shared.log("att") == "ready\ngot one\n"


def test_attach_says_why_it_cannot(shared: Served) -> None:
    """Without a terminal, for a job that is over, or a run that never was: one line says what is so."""
    shared.drop("live", "echo up; exec sleep 1000")
    shared.drop("over", "true")
    shared.says("live", "up")
    shared.wait_done("over")
    told = {
        ("live",): (1, "this is not a terminal; `spool log -f live` needs no terminal"),
        ("over",): (1, "run 1 has ended (finished); `spool log over` shows its output"),
        ("live", "--run", "4"): (3, "its runs are 1"),
    }
    for words, (code, why) in told.items():
        said = shared.spool("attach", *words, stdin=subprocess.DEVNULL)
        assert (said.returncode, said.stderr.count("\n")) == (code, 1), said
        assert why in said.stderr
    would = shared.spool("attach", "live", "--read-only", "--dry-run")
    assert would.stdout.split()[-4:] == ["attach-session", "-r", "-t", "=live/1"]
    shared.cancels("live")


# The server.


@pytest.mark.parametrize("how", ["kill-session", "kill-server", "kill -9"])
def test_who_loses_its_terminal_is_lost(live: Served, how: str) -> None:
    """A session or server that is killed takes its jobs along, even those that ignore HUP, and none has finished."""
    for name, command in (
        ("plain", "echo up; exec sleep 1000"),
        ("shell", "trap 'exit 0' HUP TERM; echo up; while :; do sleep 0.02; done"),
        ("stubborn", "trap '' HUP; echo up; while :; do sleep 0.02; done"),
        ("reads", "echo up; cat; exit 0"),
    ):
        live.up(name, command, requeue=False, kill_grace="300ms", cpus=0)
    if how == "kill -9":
        os.kill(_server(live), signal.SIGKILL)
    elif how == "kill-server":
        live.tmux("kill-server")
    else:
        for session in _sessions(live):
            live.tmux("kill-session", "-t", f"={session}")
    live.wait_done("plain", "shell", "stubborn", "reads")
    assert {line["job"]: line["outcome"] for line in live.history()} == dict.fromkeys(
        ("plain", "shell", "stubborn", "reads"), "lost"
    )
    assert not marked(live.root)
    live.drop("later", "true")
    assert live.wait_outcome("later") == "finished"


def test_the_dispatchers_death_and_the_servers_are_two(live: Served) -> None:
    """Jobs outlive the dispatcher in their sessions; one whose session went meanwhile is lost, another goes on."""
    for name in ("kept", "gone"):
        live.up(name, "echo up; read -r x; echo $x", requeue=False)
    server = _server(live)
    live.kill()
    live.tmux("kill-session", "-t", "=gone/1")
    live.start()
    assert live.wait_outcome("gone") == "lost"
    _type(live, "kept", "still", "Enter")
    assert live.wait_outcome("kept") == "finished"
    assert live.log("kept") == "up\nstill\n"
    wait_for(lambda: not alive(server))


def test_what_a_job_inherits_is_not_the_servers(served: Served, tmp_path: Path) -> None:
    """The job file's umask and limits count, a new dispatcher's hard limits, and the defined environment."""
    (tmp_path / "home.conf").write_text("set -g destroy-unattached on\n")
    (Path(os.environ["HOME"]) / ".tmux.conf").write_text("set -g destroy-unattached on\n")
    served.environment |= {"WHOSE": "first", "TMUX": "/elsewhere,1,0", "SPOOL_ARRAY_INDEX": "7", "OLD": "x"}
    served.start()
    served.up("keeper", "echo up; exec sleep 1000")
    server = _server(served)
    served.stop()
    large = {f"LARGE_{at}": "x" * 20_000 for at in range(20)}
    served.environment |= {"WHOSE": "second", "ODD%%": "a\nb\udcff", "TMUX_PANE": "%9", **large}
    del served.environment["OLD"], served.environment["TMUX"]
    limits = "import os, resource, sys; os.umask(0o027); resource.setrlimit(resource.RLIMIT_CORE, (4096, 8192)); "
    served.start(prefix=(sys.executable, "-c", f"{limits}os.execvp(sys.argv[1], sys.argv[1:])"))
    served.drop("facts", [sys.executable, "-c", _FACTS], umask="007", limits={"core": 1024})
    assert served.wait_outcome("facts") == "finished"
    facts = json.loads(served.log("facts"))
    assert _server(served) == server
    found = facts["environment"]
    assert found["SPOOL_JOB"] == "facts"
    assert not {"WHOSE", "OLD", "TMUX", "TMUX_PANE", "SPOOL_ARRAY_INDEX", *large} & set(found)
    assert {key: found[key] for key in login_environment()} == login_environment()
    assert found["TERM"].startswith(("screen", "tmux"))
    assert (facts["umask"], facts["core"]) == (0o007, [1024, 8192])
    assert (served.root / "jobs/keeper/1/jid").exists()
    assert not list(served.root.glob("jobs/*/*/launch"))
    served.cancels("keeper")
    (Path(os.environ["HOME"]) / ".tmux.conf").unlink()


def test_a_server_that_hangs_delays_nobody_else(served: Served) -> None:
    """While the server stands still other jobs run, those for it wait with the reason, and later each runs once."""
    served.changes[LOOKS] = 200_000_000
    served.serves("cpus = 8\n")
    served.up("first", "echo up; exec sleep 1000")
    server = _server(served)
    os.kill(server, signal.SIGSTOP)
    try:
        served.drop("second", "echo here")
        served.until(lambda: served.places("second") == ["running"], "the try")
        served.drop("third", "echo here")
        served.wait_reason("third", "executor: tmux does not answer")
        served.drop("other", "true", executor="process")
        assert served.wait_outcome("other") == "finished"
        assert served.outcome("second") is None
    finally:
        os.kill(server, signal.SIGCONT)
    served.wait_done("second", "third")
    assert [(served.runs(name), served.log(name)) for name in ("second", "third")] == [([1], "here\n")] * 2
    served.cancels("first")


def test_a_session_that_never_becomes_a_wrapper_failed_to_start(served: Served, tmp_path: Path) -> None:
    """When the process that was to be the wrapper ends before it has written its jid, that is a start that failed."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "tmux").write_text(
        '#!/bin/sh\n[ "$1" = -V ] && exec echo tmux 3.3\n'
        f"sh -c 'sleep 0.2 & echo $! $$ > {tmp_path}/pids; wait' > /dev/null 2>&1 &\n"
        f"until [ -s {tmp_path}/pids ]; do sleep 0.01; done\ncat {tmp_path}/pids\n"
    )
    (programs / "tmux").chmod(0o755)
    served.environment["PATH"] = f"{programs}:{served.environment['PATH']}"
    served.start()
    result = served.completes("never", "true")
    assert result["outcome"] == "failed"
    assert served.record("never", "jid") == "void\n"


# Keeping.


def test_a_kept_session_can_be_read_until_the_next_run(served: Served) -> None:
    """With `keep_session` all that was written can be read after the end; the next run closes it, and `gc` the last."""
    served.start()
    served.drop("kept", "echo run $SPOOL_RUN; echo the last line", time_limit="1m", keep_session=True)
    served.drop("not", "true")
    served.wait_done("kept", "not")
    assert "the last line" in _screen(served, "kept")
    assert _sessions(served) == ["kept/1"]
    assert served.spool("attach", "kept", "--dry-run").returncode == 0
    assert served.spool("requeue", "kept").returncode == 0
    served.until(lambda: served.outcome("kept", 2), "the second run")
    served.wait_done("kept")
    assert "run 2" in _screen(served, "kept", 2)
    assert _sessions(served) == ["kept/2"]
    assert served.spool("gc", "--older-than", "1h").returncode == 0
    assert _sessions(served) == ["kept/2"]
    assert served.spool("gc", "--older-than", "1ms").returncode == 0
    wait_for(lambda: _sessions(served) == [])


def test_a_session_that_is_not_kept_goes_with_its_job(live: Served) -> None:
    """After the last job no session, no viewer and no server is left."""
    live.up("ends", "echo up; read -r x")
    server = _server(live)
    _type(live, "ends", "Enter")
    assert live.wait_outcome("ends") == "finished"
    wait_for(lambda: not alive(server))
    assert [pid for pid in _with(b"first_program.py", live) if alive(pid)] == []


def test_a_viewer_belongs_to_no_run(shared: Served) -> None:
    """What copies the output to the terminal is not counted, stopped or waited for; without it the job goes on."""
    shared.up("seen", "echo up; read -r x; echo $x; echo $$")
    (viewer,) = [pid for pid in _with(b"jobs/seen/1", shared) if pid not in marked(shared.root, "seen")]
    os.kill(viewer, signal.SIGKILL)
    _type(shared, "seen", "on", "Enter")
    assert shared.wait_outcome("seen") == "finished"
    assert len(pids_in(shared.log("seen"))) == 1


def _with(word: bytes, served: Served) -> list[int]:
    """Return the Python processes of this spool with *word* in their command line."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{entry}/cmdline").read_bytes() if entry.isdigit() else b""
            if words.startswith(sys.executable.encode()) and word in words and bytes(served.root) in words:
                found.append(int(entry))
    return found


# Terminals for the test itself.


@contextlib.contextmanager
def _attached(served: Served, name: str, *options: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run `spool attach` in a terminal, and give that."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "spool", "attach", name, *options],
        env=served.environment | {"TERM": "xterm", "LC_ALL": "C.UTF-8"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        yield ours, process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _leaves(terminal: int, process: subprocess.Popen[bytes]) -> int:
    """Type Ctrl-B D until that is taken for it (keys that come at once with others are taken for a paste)."""

    def ended() -> bool:
        with contextlib.suppress(OSError):
            os.write(terminal, b"\x02d")
            os.read(terminal, 65536)
        return process.poll() is not None

    wait_for(ended)
    return process.wait(PATIENCE_S)


def _reads(terminal: int, text: bytes) -> None:
    """Wait until the terminal has been sent *text*."""
    seen = b""

    def more() -> bool:
        nonlocal seen
        with contextlib.suppress(BlockingIOError):
            seen += os.read(terminal, 65536)
        return text in seen

    deadline = time.monotonic() + PATIENCE_S
    while not more():
        assert time.monotonic() < deadline, seen
        time.sleep(0.01)
