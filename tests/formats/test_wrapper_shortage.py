"""The wrapper where the machine refuses it a process, and where something else lies in the place of a record."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from spool.formats.wrapper import NO_JID, REFUSED
from support import wait_for
from wrapper_runs import COMPILED, SHELL, Run, Runs, poor_directory, runs_below, surroundings, words_of

POOR_NOW = "prlimit --pid $PPID --nproc=1"  # from here on the wrapper can start nothing
needs_prlimit = pytest.mark.skipif(shutil.which("prlimit") is None, reason="no prlimit on this machine")


@pytest.fixture
def runs(wrapper: str) -> Iterator[Runs]:
    """Make runs under each shell that there is and under the compiled wrapper, where another user can reach them."""
    with poor_directory() as directory, runs_below(directory, words_of(wrapper)) as made:
        yield made


# --- no process -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [{}, {"init": "exit 9"}, {"prolog": "exit 9"}])
def test_a_wrapper_that_can_start_nothing_says_so_and_leaves_no_exit_code(runs: Runs, first: dict[str, str]) -> None:
    """A refused first process leaves the record `refused` and no `rc`: the command cannot be told to have failed."""
    run = runs.make("touch began", workdir=str(runs.root), epilog="touch epilog", **first)
    assert run.start_poor().finish_refused() == REFUSED
    phase = next(iter(first), "command")
    assert f" the {phase}: " in (run.text("refused") or "")
    assert (run.text("rc"), run.text("error"), run.text("status")) == (None, None, "queued\n")
    assert not (runs.root / "began").exists()
    assert not (runs.root / "epilog").exists()


@needs_prlimit
def test_a_command_that_is_refused_after_its_prolog_has_not_begun(runs: Runs) -> None:
    """The prolog may run again with the next run, since nothing of the command has begun."""
    run = runs.make("touch began", workdir="/tmp", prolog=POOR_NOW)
    assert run.start_poor(later=True).finish_refused() == REFUSED
    assert " the command: " in (run.text("refused") or "")
    assert run.text("rc") is None
    assert not (run.metadir / "began").exists()


@needs_prlimit
@pytest.mark.parametrize("code", [0, 3])
def test_an_epilog_that_is_refused_takes_nothing_from_the_command(runs: Runs, code: int) -> None:
    """A command that has ended keeps its exit code, and the log says what was left out: else it would run twice."""
    run = runs.make(f"{POOR_NOW}; exit {code}", epilog="echo never")
    assert run.start_poor(later=True).finish_refused() == code
    assert (run.rc, run.text("refused")) == (code, None)
    assert run.text("status") == ("failed\n" if code else "finished\n")
    assert (run.log or "").startswith("spool: the epilog ")


@needs_prlimit
def test_what_the_command_itself_is_refused_is_its_own_failure(runs: Runs) -> None:
    """Once the command has begun, a fork of its own that fails is an exit code like any other."""
    run = runs.make("prlimit --pid $$ --nproc=1; /bin/true; exit 0", shell=shutil.which("dash") or "/bin/sh")
    assert run.start_poor(later=True).finish() == run.rc
    assert run.rc
    assert run.text("refused") is None


def test_an_env_that_cannot_be_executed_is_no_failure_of_the_command(runs: Runs) -> None:
    """The child that cannot turn into env has not begun the command, whose program may be a good one.

    Bash has dropped its traps by then; it has no need of env but for variables of odd names.
    """
    if runs.shell[0] == "bash":
        pytest.skip("bash does not tell")
    broken = runs.root / "env"
    broken.write_text("#!/no/interpreter\n")
    broken.chmod(0o755)
    around = replace(surroundings(), env_program=str(broken), reset="-x", become="")
    run = runs.make("echo never", around, environment={"a b": "1"})
    assert run.run() == REFUSED
    assert f" {broken}\n" in (run.text("refused") or "")
    assert run.text("rc") is None


def test_a_directory_for_the_output_that_cannot_be_made_for_want_of_a_process(runs: Runs) -> None:
    """What a shell needs a process for before its first child is refused in the same way; the program needs none."""
    run = runs.make("echo never", stdout=f"{runs.root}/not/there/out")
    if os.getuid() == 0:
        os.chmod(runs.root, 0o777)
    assert run.start_poor().finish_refused() == REFUSED
    what = "the command" if run.is_compiled else "it"
    assert f" {what}: " in (run.text("refused") or "")
    assert (runs.root / "not").exists() is run.is_compiled


# --- records --------------------------------------------------------------------------------------------------


def in_the_way(path: Path, kind: str) -> None:
    """Put something else in the place of a record."""
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("kind", ["directory", "fifo", "socket", "symlink"])
@pytest.mark.parametrize("name", ["status", "usage", "error", "signal"])
def test_a_record_that_cannot_be_written_stops_no_run(runs: Runs, name: str, kind: str) -> None:
    """A FIFO does not block the wrapper, and no link leads it elsewhere: the record is left out."""
    run = runs.make("exit 7" if name in ("status", "usage") else "kill -TERM $PPID; exit 7", workdir="/")
    if name == "error":
        run = runs.make("exit 7", workdir="/no/where")
    in_the_way(run.metadir / name, kind)
    assert run.run() == {"status": 7, "usage": 7, "error": 125}.get(name, run.rc)
    assert run.rc is not None
    assert not (run.metadir / "elsewhere").exists()


@pytest.mark.parametrize(("kind", "stopped"), [("directory", False), ("fifo", False), ("directory", True)])
def test_a_wrapper_whose_exit_code_has_no_place_leaves_when_it_is_told_to(runs: Runs, kind: str, stopped: bool) -> None:
    """It neither blocks nor spins while it waits for the place; TERM ends it, or an order to stop its run."""
    run = runs.make("exit 7")
    in_the_way(run.metadir / "rc", kind)
    if stopped:
        (run.metadir / "stop").write_text("timeout spool 1\n")
        assert run.run() == 143
    else:
        run.start()
        wait_for(lambda: run.text("status") == "failed\n", what="the end of the command")
        run.kill(signal.SIGTERM)
        assert run.finish() == 7
    assert not (run.metadir / "elsewhere").exists()
    assert run.text("rc.aside") is None


def test_what_stays_in_the_place_of_the_exit_code_is_moved_aside(runs: Runs, tmp_path: Path) -> None:
    """After half a minute the exit code counts for more than what lies in its place, which is kept."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sleep").symlink_to(shutil.which("true") or "/bin/true")
    run = runs.make("exit 7")
    in_the_way(run.metadir / "rc", "directory")
    (run.metadir / "rc" / "data").write_text("of the job\n")
    run.start(env={"PATH": f"{programs}:{os.environ['PATH']}"})
    if run.is_compiled:  # it sleeps without a program; what it hears meanwhile ends each of its seconds
        wait_for(lambda: run.text("status") == "failed\n", what="the end of the command")
        wait_for(lambda: run.text("rc.aside/data") or run.kill(signal.SIGUSR2), what="the exit code's place")
    assert run.finish() == 7
    assert run.rc == 7
    assert (run.metadir / "rc.aside" / "data").read_text() == "of the job\n"


# --- descriptors ----------------------------------------------------------------------------------------------


def test_a_job_has_as_many_descriptors_as_it_would_have_without_spool(runs: Runs) -> None:
    """The soft limit is the one that is asked for, and the hard one stays as it is."""
    run = runs.make("ulimit -S -n; ulimit -H -n", replace(surroundings(), open_files=321))
    assert run.run() == 0
    soft, hard = (run.log or "").split()
    assert (soft, hard) == ("321", soft if hard == "321" else hard)
    assert hard != "321"


# --- a file system of another machine -------------------------------------------------------------------------


@cache
def _can_trace() -> bool:
    words = ["strace", "-qq", "-o", os.devnull, "true"]
    return shutil.which("strace") is not None and subprocess.run(words, check=False).returncode == 0


def _disturbed(run: Run, name: str, disturbance: str) -> Run:
    """Start a wrapper to which one call on the file *name* of its metadir fails; skip the test if that is forbidden."""
    if not _can_trace():
        pytest.skip("no strace on this machine, or nobody may be traced")
    paths = [str(run.metadir / name), f"/proc/self/fd/8/{name}", name]  # as a shell names it, and the program
    told = ["-e", f"inject={disturbance}", "-e", "signal=none", *(word for path in paths for word in ("-P", path))]
    return run.start("strace", "-f", "-qq", "-o", str(run.metadir / "trace"), *told)


@pytest.mark.parametrize("wrapper", [SHELL, COMPILED], indirect=True)  # not every shell does it
@pytest.mark.parametrize("name", ["jid", "log", "status", "rc"])
def test_an_open_that_was_interrupted_is_done_again(runs: Runs, name: str) -> None:
    """A server of files may answer so when the wrapper was stopped and goes on: nothing is wrong with the file."""
    run = _disturbed(runs.make("echo done; exit 3"), name, "openat:error=EINTR:when=1")
    assert run.finish() == 3
    assert "INJECTED" in (run.text("trace") or "")
    assert (run.rc, run.text("status"), run.log, run.text("error")) == (3, "failed\n", "done\n", None)


@pytest.mark.parametrize("wrapper", [COMPILED], indirect=True)
@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT", "EIO"])
def test_a_record_that_fails_when_it_is_closed_is_not_written(runs: Runs, error: str) -> None:
    """Such a file system takes every byte and says at the end that it has no room. No shell hears that."""
    run = _disturbed(runs.make("echo done; exit 3"), "rc", f"close:error={error}:when=1")
    assert run.finish() == 3
    assert (run.text("trace") or "").count("close(") == 2
    assert run.rc == 3
    run = _disturbed(runs.make("echo done; exit 3"), "jid", f"close:error={error}:when=1")
    assert run.finish() == NO_JID
    assert (run.text("jid"), run.log) == (None, None)
