"""`spool run --here`: a job whose command runs in the terminal of the command that submitted it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import spool
from crash.conftest import world as world
from crash.cuts import cuts, each_alike
from crash.world import Ends, Session, World, check, ends_of, world_at
from docs.test_pages import START
from faulty import FaultyDisk
from plugins.fake_nvml import FakeNvml
from served import GPU_LOOKS, Served
from shell import Home, Terminal, home_of_test
from spool.core import layout
from spool.core.errors import InvalidValue
from spool.dispatcher import launcher, recovery
from spool.executors.base import Launch
from spool.extras.here.launching import own_terminal
from spool.formats import jobfile
from spool.store.spool import Spool
from support import PATIENCE_S
from test_examples import folder, result
from test_examples import served as served_examples
from test_readme import end_dispatcher

EXECUTORS = ("process", "sh")

_CTRL_C, _CTRL_D, _CTRL_Z = b"\x03", b"\x04", b"\x1a"
_LOG = "spool: what this run prints is in the terminal of its `spool run --here`\n"
_UNTIL_GO = "until [ -e go ]; do sleep 0.02; done"


class Desk:
    """One who sits before a spool, with as many terminals as they like."""

    def __init__(self, served: Served) -> None:
        """Sit down."""
        self.served = served
        self.home = served.root.parent
        self._terminals: list[Terminal] = []
        way = [] if served.executor is None else ["--executor", served.executor]
        self._words = [sys.executable, "-m", "spool", "run", "--here", *way]
        self.environment = {**served.environment, "TERM": "xterm-256color", "MY_TOKEN": "secret-in-here", "LINES": ""}

    def words(self, *words: str) -> list[str]:
        """Return the command that runs *words* here."""
        return [*self._words, *words]

    def terminal(self, *words: str) -> Terminal:
        """Open a terminal that runs *words* here."""
        return self.open(self.words(*words))

    def open(self, words: Sequence[str]) -> Terminal:
        """Open a terminal with the program *words*."""
        terminal = Terminal(words, self.environment, self.home)
        self._terminals.append(terminal)
        return terminal

    def piped(self, *words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run *words* here without a terminal."""
        return subprocess.run(
            self.words(*words), input=data, capture_output=True, env=self.environment, cwd=self.home,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    def begun(self, *words: str, **more: Any) -> subprocess.Popen[bytes]:
        """Start *words* here without a terminal and without input."""
        return subprocess.Popen(
            self.words(*words), env=self.environment, cwd=self.home, stdin=subprocess.DEVNULL, **more
        )

    def leave(self) -> None:
        """Close every terminal."""
        for terminal in self._terminals:
            terminal.leave()


@pytest.fixture
def desk(served: Served) -> Iterator[Desk]:
    """Give a spool with one CPU that is served, and a user."""
    served.serves("cpus = 1\n")
    sat = Desk(served)
    yield sat
    (sat.home / "go").touch()
    sat.leave()


# Without a terminal.


def test_a_pipe_gets_the_command_s_own_bytes_and_code(desk: Desk) -> None:
    """Input, output and errors are the caller's own, megabytes too, the code is the command's; the run is recorded."""
    data = os.urandom(3 << 20)
    done = desk.piped("-n", "three", "-c", "cat; echo bad >&2; exit 3", data=data)
    assert (done.returncode, done.stdout == data) == (3, True)
    assert done.stderr == b"spool: job three\nbad\n"
    result = desk.served.wait_done("three")
    assert (result["outcome"], result["exit_code"]) == ("failed", 3)
    assert desk.served.log("three") == _LOG


def test_a_reader_sees_the_end_of_the_output_with_the_command(desk: Desk) -> None:
    """Nothing but the command keeps its output open, nor what else belongs to the terminal."""
    done = desk.piped("-q", "-c", "exec >&-; ls /proc/self/fd")
    assert done.returncode != 0  # ls has nowhere to write to
    listed = desk.piped("-q", sys.executable, "-c", "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))")
    assert listed.stdout == b"[0, 1, 2, 3]\n"  # the last is the directory itself


def test_signals_reach_the_command(desk: Desk) -> None:
    """USR1 that this process gets goes to the command, as do TERM and USR2."""
    text = "trap 'echo told; exit 7' USR1; echo ready; while :; do sleep 0.02; done"
    process = desk.begun("-q", "-c", text, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=PATIENCE_S)[0] == b"told\n"
    assert process.returncode == 7


# In a terminal.


def test_the_command_has_the_terminal(desk: Desk) -> None:
    """It has the very terminal, with its size, its kind and what is typed; the log says where its output is."""
    text = 'test -t 0 && test -t 1 && test -t 2 && stty size; echo $TERM; read -r name < /dev/tty; echo "hello $name"'
    terminal = desk.terminal("-n", "ask", "-c", text)
    terminal.shows("24 80\r\nxterm-256color\r\n")
    assert not terminal.is_raw()
    terminal.type("J. Doe\r")
    terminal.shows("hello J. Doe\r\n")
    assert terminal.ends() == 0
    assert "submitting" not in terminal.screen()
    desk.served.wait_done("ask")
    assert desk.served.log("ask") == _LOG


def test_the_whole_environment_is_there_and_in_no_file(desk: Desk) -> None:
    """A secret of the terminal reaches the command and not the disk; what is set for the job alone wins."""
    shown = desk.piped("-q", "-n", "env", "-e", "LANG=of-the-job", "--", "env").stdout.decode().splitlines()
    assert {"MY_TOKEN=secret-in-here", "LANG=of-the-job", "SPOOL_JOB=env", "TERM=xterm-256color"} <= set(shown)
    for path in desk.served.root.rglob("*"):
        if path.is_file():
            assert b"secret-in-here" not in path.read_bytes(), path
    picked = desk.piped("-q", "--export", "PATH", "--", "env").stdout.decode()
    assert "MY_TOKEN" not in picked
    assert "TERM=xterm-256color" in picked


def test_what_a_prolog_says_counts_more_than_the_terminal(desk: Desk) -> None:
    """As it does for any job (FORMAT 3.12); `setup` runs in the terminal, with the same variables."""
    desk.environment["TOKEN"] = "terminal"
    words = ("--set", 'prolog=echo TOKEN=prolog >> "$SPOOL_ENV"', "--set", 'setup=echo "setup $TOKEN"; A=1', "-c")
    done = desk.piped(*words, "echo command $TOKEN $A")
    assert (done.stdout, done.returncode) == (b"setup prolog\ncommand prolog 1\n", 0)


def test_ctrl_c_goes_to_the_command(desk: Desk) -> None:
    """A command that handles Ctrl-C goes on; one that does not ends by it, with 130."""
    terminal = desk.terminal("-n", "trap", "-c", "trap 'echo not yet' INT; echo ready; read -r word; echo \"$word\"")
    terminal.shows("ready")
    terminal.type(_CTRL_C)
    terminal.shows("not yet")
    terminal.type("now\r")
    assert terminal.ends() in (0, 130)
    other = desk.terminal("-n", "sleep", "-c", "echo ready; exec sleep 1000")
    other.shows("ready")
    other.type(_CTRL_C)
    assert other.ends() == 130


def test_a_new_size_reaches_the_command(desk: Desk) -> None:
    """Who resizes the window resizes the command's."""
    terminal = desk.terminal("-c", "trap 'stty size' WINCH; echo ready; while :; do sleep 0.02; done")
    terminal.shows("ready")
    terminal.resize(30, 100)
    terminal.shows("30 100")
    terminal.type(_CTRL_C)
    assert terminal.ends() == 130


def test_ctrl_z_stops_it_and_fg_continues_it(desk: Desk) -> None:
    """The shell around it sees a stopped job, has its terminal back, and `fg` gives it to the command again."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    shell = desk.open(["bash", "--norc", "--noprofile", "--noediting", "-i"])
    words = " ".join(desk.words("-q", "-n", "cat", "cat"))
    shell.type(f"PS1='ready> '\r{words}\r")
    desk.served.until(lambda: "cat" in _commands(desk.served, "cat"), "the command")
    shell.type("one\r")
    shell.shows("one\r\none\r\n")
    shell.type(_CTRL_Z)
    shell.shows("Stopped")
    desk.served.until(lambda: shell.screen().rpartition("Stopped")[2].endswith("ready> "), "the prompt of the shell")
    # The shell waits for its own child to stop; until the command has, it still may take a line that is typed.
    desk.served.until(lambda: _commands(desk.served, "cat").get("cat") == "T", "the command to stop")
    shell.type("echo in the $((1 + 1))nd shell\r")
    shell.shows("in the 2nd shell")
    shell.type("fg\r")
    desk.served.until(lambda: "-n cat" in shell.screen().rpartition("in the 2nd shell\r\n")[2], "what `fg` prints")
    shell.type("two\r")
    shell.shows("two\r\ntwo\r\n")
    shell.type(_CTRL_D)
    shell.type("echo it gave $?\r")
    shell.shows("it gave 0")
    shell.type("exit\r")
    assert shell.ends() == 0


def test_in_the_background_it_runs_and_gets_the_terminal_with_fg(desk: Desk) -> None:
    """Started with `&` it leaves the terminal to the shell, and stops to read from it; `fg` gives it to the command."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    shell = desk.open(["bash", "--norc", "--noprofile", "-i"])
    shell.type(f"{' '.join(desk.words('-q', '-n', 'later', '-c'))} 'echo ready $((1 + 1)); read -r x; echo got $x' &\r")
    shell.shows("ready 2")
    shell.type("echo in the $((1 + 1))nd shell\r")
    shell.shows("in the 2nd shell")
    desk.served.until(lambda: shell.type("\r") or "Stopped" in shell.screen(), "what the shell says at a prompt")
    shell.type("fg\r")
    desk.served.until(lambda: shell.screen().rpartition("Stopped")[2].count("-n later") == 2, "what `fg` prints")
    shell.type("word\r")
    shell.shows("\ngot word\r\n")
    desk.served.wait_done("later")


def test_a_pipeline_reads_what_a_command_in_the_terminal_prints(desk: Desk) -> None:
    """With a pipe behind it the output is the pipe's, and the input still the terminal's."""
    words = " ".join(desk.words("-q", "--", "sh", "-c", "'read -r x; echo got $x; test -t 1 || echo piped'"))
    terminal = desk.open(["sh", "-c", f"{words} | tr a-z A-Z"])
    terminal.type("word\r")
    terminal.shows("GOT WORD")
    terminal.shows("PIPED")
    assert terminal.ends() == 0


def test_a_shell_is_opened(desk: Desk) -> None:
    """`--here` without a command opens the user's shell."""
    desk.environment["SHELL"] = "/bin/sh"
    terminal = desk.terminal("-n", "shell")
    desk.served.until(lambda: "sh" in _commands(desk.served, "shell"), "the shell")
    terminal.type("echo $SPOOL_JOB $((40 + 2)); exit 5\r")
    terminal.shows("shell 42")
    assert terminal.ends() == 5


# The end of the terminal.


@pytest.mark.parametrize("how", ["killed", "closed", "without a terminal"])
def test_the_job_ends_with_its_terminal(desk: Desk, how: str) -> None:
    """When the window is closed, or the command killed, in a pipeline too, the job gets HUP, and its room is free."""
    words = ("-n", "long", "-c", "echo ready; exec sleep 1000")
    if how == "without a terminal":
        with desk.begun(*words) as process:
            desk.served.until(lambda: "sleep" in _commands(desk.served, "long"), "the command")
            process.kill()
    else:
        terminal = desk.terminal(*words)
        terminal.shows("ready")
        terminal.close() if how == "closed" else os.kill(terminal.pid, signal.SIGKILL)
    result = desk.served.wait_done("long")
    assert (result["outcome"], result.get("exit_code")) == ("failed", 129), result


def test_who_has_no_terminal_any_more_is_told(desk: Desk) -> None:
    """A job that is run again finds no terminal: it fails at once, and its log says why."""
    assert desk.piped("-n", "again", "true").returncode == 0
    desk.served.wait_done("again")
    desk.served.move("again", "done", "queued")
    assert desk.served.wait_outcome("again", run=2) == "failed"
    assert "terminal" in desk.served.spool("why", "again").stdout


# As any job.


def test_it_waits_its_turn_and_ctrl_c_ends_the_wait(desk: Desk) -> None:
    """It is queued, the terminal says why it waits, and Ctrl-C cancels it, with 130."""
    desk.served.begun("first", _UNTIL_GO, cpus=1)
    with desk.begun("-n", "piped", "echo", "my turn", stderr=subprocess.PIPE) as piped:
        assert piped.stderr is not None
        assert piped.stderr.readline() == b"spool: job piped\n"
        assert piped.stderr.readline().startswith(b"spool: job piped waits: cpus: needs 1")
        piped.terminate()
        said = [line for line in piped.stderr if not line.startswith(b"spool: job piped waits: ")]
        assert said == [b"spool: job piped is cancelled\n"]
    assert piped.returncode == 143
    terminal = desk.terminal("-n", "second", "echo", "my turn")
    terminal.shows("job second waits: cpus: needs 1")
    assert desk.served.places("second") == ["queued"]
    terminal.type(_CTRL_C)
    assert terminal.ends() == 130
    assert "job second " in terminal.screen()
    assert desk.served.wait_outcome("second") == "cancelled"
    third = desk.terminal("-n", "third", "echo", "my turn")
    third.shows("job third waits")
    (desk.home / "go").touch()
    third.shows("my turn")
    assert third.ends() == 0


def test_ctrl_z_while_it_waits_keeps_no_room(desk: Desk) -> None:
    """A stopped caller is passed by others, with the reason; once it is continued, its command has its turn."""
    desk.served.begun("first", _UNTIL_GO, cpus=1)
    waits = desk.begun("-n", "stopped", "echo", "my turn", stdout=subprocess.PIPE)
    desk.served.until(lambda: desk.served.places("stopped") == ["queued"], "the job")
    waits.send_signal(signal.SIGSTOP)
    (desk.home / "go").touch()
    desk.served.wait_reason("stopped", "is stopped, as by Ctrl-Z")
    desk.served.completes("other", "true", cpus=1)
    assert desk.served.places("stopped") == ["queued"]
    waits.send_signal(signal.SIGCONT)
    assert waits.communicate(timeout=PATIENCE_S)[0] == b"my turn\n"
    assert waits.returncode == 0


def test_a_caller_that_is_killed_while_it_waits_leaves_a_job_that_fails(desk: Desk) -> None:
    """Nothing runs for nobody: when its turn comes the job has failed, and says why."""
    desk.served.begun("first", _UNTIL_GO, cpus=1)
    waits = desk.begun("-n", "gone", "touch", "ran")
    desk.served.until(lambda: desk.served.places("gone") == ["queued"], "the job")
    waits.kill()
    waits.wait()
    (desk.home / "go").touch()
    assert desk.served.wait_outcome("gone") == "failed"
    assert "terminal" in desk.served.spool("why", "gone").stdout
    assert not (desk.home / "ran").exists()


def test_without_any_terminal_it_runs_too(desk: Desk) -> None:
    """From cron or over `ssh` without `-t` there is none, and stdin may even be closed."""
    words = shlex.join(desk.words("-q", "-c", "echo out; exit 3"))
    done = subprocess.run(
        ["sh", "-c", f"exec {words} <&-"], stdout=subprocess.PIPE, env=desk.environment, cwd=desk.home,
        timeout=PATIENCE_S, check=False, start_new_session=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, b"out\n")


def test_a_list_says_that_it_is_in_a_terminal(desk: Desk) -> None:
    """`ls` has a word for it while it runs, with and without a dispatcher; it takes a CPU."""
    terminal = desk.terminal("-n", "here", "-c", "echo ready; read -r x")
    terminal.shows("ready")
    desk.served.wait_reason("here", "in a terminal")
    for serve in (True, False):
        if not serve:
            desk.served.kill()
        row = next(line for line in desk.served.spool("ls").stdout.splitlines() if line.startswith("here "))
        assert "running" in row
        assert row.endswith("in a terminal")
    desk.served.start()
    terminal.type("\r")
    assert terminal.ends() == 0


def test_a_time_limit_and_a_cancel_end_it(desk: Desk) -> None:
    """The outcome is the job's, and so are the words and the exit code; the terminal has its settings again."""
    limited = desk.terminal("-t", "1s", "-n", "limited", "sleep", "1000")
    assert limited.ends() == 124
    assert "job limited: timeout" in limited.screen()
    terminal = desk.terminal("-n", "cancelled", "-c", "stty raw -echo; echo ready; exec sleep 1000")
    terminal.shows("ready")
    desk.served.spool("cancel", "cancelled")
    assert terminal.ends() == 130
    assert "job cancelled: " in terminal.screen()
    assert not terminal.is_raw()


def test_the_dispatcher_may_die_at_any_time(desk: Desk) -> None:
    """The next one records a run that it finds, and starts a job that waits; until then the terminal says so."""
    terminal = desk.terminal("-n", "here", "-c", "echo ready; read -r x; echo got $x")
    terminal.shows("ready")
    desk.served.restart()
    terminal.type("it\r")
    terminal.shows("got it")
    assert terminal.ends() == 0
    assert desk.served.wait_done("here")["outcome"] == "finished"
    desk.served.begun("first", _UNTIL_GO, cpus=1)
    second = desk.terminal("-n", "second", "echo", "my turn")
    second.shows("job second waits")
    (desk.served.root / "config.toml").write_text("cpus = 1\nautostart = false\n")
    desk.served.kill()
    second.shows("no dispatcher is running, and autostart is off")
    (desk.home / "go").touch()
    desk.served.start()
    second.shows("my turn")
    assert second.ends() == 0


def test_inside_a_job_it_takes_nothing_new(desk: Desk) -> None:
    """The one CPU is the job's around it, and the command runs at once, after its setup, whose failure is its own.

    More than that job has is refused, and a container; a size that is left to spool is what is there.
    """
    calls = [
        ["--cpus", "1", "-m", "auto", "--set", "setup=A=1", "-c", "echo in $SPOOL_JOB, A=$A"],
        ["--set", "setup=false", "-c", "echo never"],
        ["--cpus", "2", "true"],
        ["--container", "img", "true"],
    ]
    text = "; ".join(f"{shlex.join(desk.words(*words))}; echo gave $?" for words in calls)
    env = {"PYTHONPATH": desk.environment["PYTHONPATH"]}
    desk.served.completes("outer", text + "; exit 3", env=env, memory="200M", cpus=1)
    log = desk.served.log("outer")
    assert "in outer, A=1\ngave 0\n" in log
    assert re.findall(r"gave (\d)", log) == ["0", "1", "2", "2"]
    assert "cpus = 2" in log
    assert not (desk.served.root / "jobs/outer/1/error").exists()
    desk.environment |= {"SPOOL_JOB": "outer", "SPOOL_RUN": "1"}  # of a run that is over: as after a detached tmux
    assert desk.piped("-n", "new", "-c", "echo in $SPOOL_JOB").stdout == b"in new\n"


def test_inside_a_job_of_another_spool_it_is_a_job(desk: Desk) -> None:
    """Also if its own spool is not there yet: the variables of the job around it say nothing of that."""
    metadir = desk.served.root / "jobs" / "outer" / "1"
    desk.environment |= {"SPOOL_JOB": "outer", "SPOOL_RUN": "1", "SPOOL_METADIR": str(metadir)}
    desk.environment["SPOOL_DIR"] = str(desk.home / "another")
    assert b"which runs jobs on other machines" in desk.piped("--executor", "slurm", "true").stderr


def test_what_ran_in_a_terminal_is_not_run_without_it(desk: Desk) -> None:
    """`requeue` refuses it, with what to type; Python can take the key out."""
    assert desk.piped("-n", "once", "-c", "true").returncode == 0
    desk.served.wait_done("once")
    for words in (("requeue", "once"), ("requeue", "once", "--set", "cpus=1")):
        done = desk.served.spool(*words)
        assert done.returncode == 1, words
    assert desk.served.places("once") == ["done"]
    spool.Client(str(desk.served.root)).requeue("once", terminal=None, requeue=None)
    assert desk.served.wait_outcome("once", 2) == "finished"


def _commands(served: Served, name: str) -> dict[str, str]:
    """Return the processes of a job, by name, with the letter of their state; another spool's may have its name."""
    found, marks = {}, {f"SPOOL_JOB={name}".encode(), f"SPOOL_DIR={served.root}".encode()}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and marks <= {*(entry / "environ").read_bytes().split(b"\0")}:
                comm, _, after = (entry / "stat").read_text().partition(" (")[2].rpartition(") ")
                found[comm] = after[0]
    return found


# What it is not for.


def test_a_hook_sets_nothing_that_gives_it_another_run() -> None:
    """As from `[defaults]`, what does not go with the key is left out; the key itself is refused."""
    said = (("p", {"project": "p", "retry": {"max": 1}, "preemptible": True, "stdout": "out"}),)
    data = b'command = "true"\nterminal = "x"\n'
    spec = jobfile.parse(data, name="x", defaults=jobfile.with_set(jobfile.NO_DEFAULTS, said))
    assert (spec.project, spec.retry.max, spec.preemptible, spec.stdout) == ("p", 0, False, None)
    with pytest.raises(InvalidValue, match=r'^p: cannot set "terminal"'):
        jobfile.check_set("x", b'command = "true"\n', (("p", {"terminal": "x"}),), jobfile.NO_DEFAULTS)


@pytest.mark.parametrize("executor", [None], indirect=True)
def test_retries_of_the_defaults_are_for_other_jobs(served: Served) -> None:
    """What the configuration says of all jobs does not keep one from a terminal, nor run it again."""
    served.serves("[defaults]\nretry = { max = 2 }\n")
    assert Desk(served).piped("-n", "once", "sh", "-c", "exit 3").returncode == 3
    result = served.wait_done("once")
    assert (result["run"], "again" in result) == (1, False)


# GPUs.


def test_idle_gpus_are_taken_back(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """As those of any job: the terminal says why its job was ended."""
    uuid = "GPU-11111111-1111-1111-1111-111111111111"
    fake_nvml.gpu(uuid, bus=0)
    fake_nvml.busy(uuid, 0, 0)
    with Served(tmp_path / "spool", fake_nvml.variables) as served:
        served.changes[GPU_LOOKS] = 100_000_000
        served.serves("cpus = 4\n")
        desk = Desk(served)
        idle = ("-g", "1", "--set", "gpu_idle=1s", "--set", "gpu_idle_action=stop")
        terminal = desk.terminal("-n", "idle", *idle, "-c", "echo on $CUDA_VISIBLE_DEVICES; exec sleep 1000")
        terminal.shows(f"on {uuid}")
        assert terminal.ends() == 130
        assert "gpu_idle = " in terminal.screen()
        desk.leave()


@pytest.mark.parametrize("executor", [None], indirect=True)
def test_a_memory_limit_is_enforced(served: Served) -> None:
    """What the command uses is the job's use. A first guess that was too small is reported; no second run follows."""
    served.start()
    desk = Desk(served)
    hog = "x = bytearray(400 << 20)\nimport time\ntime.sleep(1000)"
    done = desk.piped("-n", "hog", "-m", "150M", "--", sys.executable, "-c", hog)
    assert done.returncode == 137
    assert b"job hog: out_of_memory" in done.stderr
    spec = tomllib.loads((served.root / "done" / "hog.toml").read_text())
    assert (spec["requeue"], spec["command"][-1]) == (False, hog)
    done = desk.piped("-n", "guess", "-m", "auto:150M", "--", sys.executable, "-c", hog)
    assert (done.returncode, b"job guess: out_of_memory" in done.stderr) == (137, True)
    assert served.places("guess") == ["done"]
    more = served.spool("why", "guess", "--json").stdout
    assert '"outcome": "out_of_memory"' in more


# What the pages and the examples show.


def test_a_notebook_runs_in_the_terminal(tmp_path: Path) -> None:
    """The script runs Jupyter here as a job, with the limits that it states."""
    with served_examples(tmp_path / "home") as home:
        jupyter = home.path / ".local/bin/jupyter"
        jupyter.write_text('#!/bin/sh\necho "$SPOOL_JOB on $SPOOL_CPUS CPUs: $*"\n', encoding="utf-8")
        jupyter.chmod(0o755)
        home.environment["GPUS"] = "0"
        printed = home.run("sh", "notebook.sh", cwd=folder(home, "here")).stdout
        assert printed.endswith("notebook on 2 CPUs: lab --no-browser --port 8899\n")
        assert result(home, "notebook")["outcome"] == "finished"


def test_the_recipe_of_jupyter_runs() -> None:
    """Its first block runs Jupyter; here that is a program of that name, and there is no GPU."""
    home = Home(home_of_test())
    jupyter = home.path / ".local" / "bin" / "jupyter"
    jupyter.write_text('#!/bin/sh\necho "in $SPOOL_JOB: $*"\n', encoding="utf-8")
    jupyter.chmod(0o755)
    recipe = START.read_text(encoding="utf-8").partition("## Jupyter on a GPU\n")[2]
    block = re.findall(r"^```shell\n(.*?)^```", recipe, re.MULTILINE | re.DOTALL)[0]
    try:
        printed = home.sh(block.replace("-g 1", "-g 0").replace("--cpus 4", "--cpus 1"))
    finally:
        end_dispatcher(home.spool)
    assert printed.endswith("in jupyter: lab --no-browser --port 8899\n")


def _caller_looks(session: Session) -> None:
    """Start the wrapper if the dispatcher has told so, as `spool run --here` does."""
    spool = Spool(str(session.world.root))
    run = spool.latest_run("job")
    if run is None or spool.record("job", run, layout.LAUNCH) != own_terminal().encode():
        return
    metadir = spool.layout.metadir("job", run)
    os.unlink(f"{metadir}/{layout.LAUNCH}")
    script = f"{metadir}/{layout.WRAPPER}"
    session.world.launched.append(Launch("job", run, spool.root, metadir, script, keep=False))


def _played(world: World, cut_at: int | None, *, slow: int = 0) -> FaultyDisk:
    disk = FaultyDisk(world.staging, cut_at=cut_at)
    session = Session(world, iter([disk]))
    looks = [*[lambda _: None] * slow, _caller_looks]  # after a cut the next dispatcher is faster than the caller
    session.after_turn = lambda: looks.append(_caller_looks) or looks.pop(0)(session)  # type: ignore[func-returns-value]
    session.after_cut = lambda: looks.insert(0, lambda _: None)
    session.users.submit("job", "ok", f'terminal = "{own_terminal()}"', "requeue = false")
    session.turns(8)
    session.settle()
    session.end()
    session.settle()
    session.end()
    check(world)
    assert ends_of(world) == Ends({"job": ("done",)}, {"job": 1}, {"job": ("finished 1.0",)})
    return disk


def test_a_command_in_a_terminal_runs_once_wherever_the_dispatcher_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any change of the disk: the next one tells the terminal again, or finds the run that goes on."""
    monkeypatch.setattr(launcher, "SILENT_NS", 0)
    monkeypatch.setattr(recovery, "SILENT_NS", 0)
    with world_at(tmp_path / "whole", monkeypatch) as world:
        whole = _played(world, None)
    each_alike(tmp_path, monkeypatch, whole, cuts(whole, 0), _played)


def test_a_run_that_its_terminal_has_not_begun_yet_is_not_lost(world: World) -> None:
    """However often the dispatcher looks at it meanwhile."""
    _played(world, None, slow=5)
