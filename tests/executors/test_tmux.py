"""Runs in tmux sessions: their names, sockets and refusals, and what copies their outputs to the terminal."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.core import layout
from spool.core.errors import SpoolError, StartRefused
from spool.core.layout import NAME_PATTERN
from spool.core.lifecycle import Liveness
from spool.executors import by_name, first_program, tmux
from spool.executors.base import Launch
from spool.executors.first_program import Output, Viewer
from spool.executors.tmux import TmuxExecutor, server_of, session_of, socket_of
from spool.formats import wrapper
from support import PATIENCE_S, ROOT, make_spool, wait_for

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

_NAMES = st.one_of(st.from_regex(rf"\A{NAME_PATTERN}\Z"), st.text(min_size=1, max_size=20))


def _install(directory: Path, says: str) -> str:
    """Put a program called tmux into *directory* and return a PATH that finds it and the system's shell."""
    directory.mkdir(exist_ok=True)
    program = directory / "tmux"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    return f"{directory}:/bin"


def _launch(directory: Path) -> Launch:
    """Return a start of a script in *directory*."""
    (directory / "run.sh").write_text("true\n")
    return Launch("train", 1, str(directory), str(directory), str(directory / "run.sh"))


@given(st.lists(st.tuples(_NAMES, st.integers(1, 10_000)), unique=True, max_size=8))
def test_no_two_runs_have_one_session(runs: list[tuple[str, int]]) -> None:
    """Whatever jobs are called, each run has a session of its own, whose name tmux has no reason to change."""
    sessions = [session_of(job, run) for job, run in runs]
    assert len(set(sessions)) == len(runs)
    assert all(re.fullmatch(r"[A-Za-z0-9_~+/-]+", session) for session in sessions)


def test_a_session_is_called_like_its_run() -> None:
    """What a person sees is the job's name and the run; only a dot becomes something else."""
    assert session_of("train_7", 2) == "train_7/2"
    assert session_of("train.v2", 1) == "train~v2/1"


@needs_tmux
def test_tmux_finds_a_session_by_the_name_that_it_was_given(tmp_path: Path) -> None:
    """Tmux keeps the name of every session as it is, and finds that session by it, and no other."""
    jobs = ["a.b", "a_b", "a:b", "a~b", "ü b", "-x", "%1", "=1", "$HOME", "#{pid}", "*", "a" * 100]
    left = {session_of(job, run) for job in jobs for run in (1, 11)}
    server = server_of(str(make_spool(tmp_path / "spool")))
    try:
        for session in left:
            server.cmd("new-session", "-d", "-s", session, "--", "sleep", "1000")
        for job in jobs:
            assert set(server.cmd("list-sessions", "-F", "#{session_name}").stdout) == left
            assert server.cmd("kill-session", "-t", f"={session_of(job, 1)}").stderr == []
            left.remove(session_of(job, 1))
            assert server.cmd("has-session", "-t", f"={session_of(job, 1)}").returncode != 0
    finally:
        server.cmd("kill-server")


def test_the_socket_lies_in_the_spool_or_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket's path is longer than the kernel takes; spools never share one, and one spool has one by any name."""
    assert socket_of("/home/alice/.spool") == "/home/alice/.spool/.tmux"
    monkeypatch.setattr(tmux, "_ELSEWHERE", str(tmp_path))
    spools = [str(tmp_path / ("d" * 100) / name) for name in ("a", "b")]
    for spool in spools:
        os.makedirs(spool)
    (tmp_path / ("l" * 100)).symlink_to(tmp_path / ("d" * 100))
    sockets = [socket_of(spool) for spool in spools]
    assert len(set(sockets)) == 2
    assert socket_of(str(tmp_path / ("l" * 100) / "a")) == sockets[0]
    (tmp_path / "short").symlink_to(spools[0])
    assert socket_of(str(tmp_path / "short")) == sockets[0]
    assert all(socket.startswith(f"{tmp_path}/spool-{os.getuid()}/") for socket in sockets)


@pytest.mark.parametrize("trap", ["open", "link", "file"])
def test_a_place_that_others_may_make_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str) -> None:
    """A directory in /tmp that others may write to, a link, a file: none of them is used for a socket."""
    monkeypatch.setattr(tmux, "_ELSEWHERE", str(tmp_path))
    place = tmp_path / f"spool-{os.getuid()}"
    if trap == "open":
        place.mkdir()
        place.chmod(0o777)
    elif trap == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "theirs")
    else:
        place.touch()
    with pytest.raises(SpoolError, match=r"^cannot use tmux: .*too long for a socket"):
        socket_of(f"/home/{'x' * 120}")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for an answer of tmux, however busy the machine is."""
    monkeypatch.setattr(tmux, "LIMIT_S", PATIENCE_S)


@needs_tmux
def test_a_job_waits_for_a_place_for_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another user's directory is where the socket belongs nothing starts and nothing fails, and it says why."""
    monkeypatch.setattr(tmux, "_ELSEWHERE", str(tmp_path))
    place = tmp_path / f"spool-{os.getuid()}"
    place.mkdir()
    place.chmod(0o777)
    executor = TmuxExecutor()
    assert executor.unavailable() is None
    launch = Launch("a", 1, f"/home/{'x' * 120}", str(tmp_path), str(tmp_path / "run.sh"))
    assert executor.start(launch) is None
    assert executor.unavailable()
    place.chmod(0o700)
    assert executor.unavailable() is None


def test_without_tmux_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tmux is not installed, or is no program, nothing crashes, and it is found as soon as it is."""
    monkeypatch.setenv("PATH", str(tmp_path))
    executor = TmuxExecutor()
    assert executor.unavailable()
    with pytest.raises(SpoolError, match="tmux is not installed"):
        executor.attach(str(tmp_path), "job", 1, read_only=False)
    executor.forget(str(tmp_path), [("job", 1)])
    monkeypatch.setenv("PATH", _install(tmp_path / "broken", ""))
    (tmp_path / "broken" / "tmux").write_bytes(b"\x7fELF, or so")
    assert executor.unavailable()
    monkeypatch.setenv("PATH", _install(tmp_path / "bin", "echo tmux 3.4"))
    assert executor.unavailable() is None


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        ("2.9a", "tmux 2.9a is too old: 3.2 is needed"),
        ("3.1c", "tmux 3.1c is too old: 3.2 is needed"),
        ("3.2a", None),
        ("next-3.6", None),
        ("master", None),
        ("openbsd-7.5", None),
    ],
)
def test_a_tmux_that_is_too_old_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, problem: str | None
) -> None:
    """The version is looked at; one without a number is a new one. An update is noticed."""
    monkeypatch.setenv("PATH", _install(tmp_path / "bin", f"echo tmux {says}"))
    executor = TmuxExecutor()
    assert executor.unavailable() == problem
    monkeypatch.setenv("PATH", _install(tmp_path / "new", "echo tmux 3.3"))
    assert executor.unavailable() is None


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ("no, never", SpoolError),
        ("create window failed: fork failed: Resource temporarily unavailable", StartRefused),
        ("Cannot allocate memory", StartRefused),
    ],
)
def test_a_tmux_that_says_no_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, error: type[Exception]
) -> None:
    """The error has its words; what it was itself refused is no failure of the job. No environment stays on disk."""
    monkeypatch.setenv("PATH", _install(tmp_path / "bin", f"echo '{says}' >&2; exit 1"))
    with pytest.raises(SpoolError, match=f"tmux.*: {says}$") as raised:
        TmuxExecutor().start(_launch(tmp_path))
    assert raised.type is error
    assert not (tmp_path / layout.LAUNCH).exists()


def test_a_tmux_that_cannot_be_started_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of a process the start is refused, for want of tmux the job waits; no environment stays on disk.

    That tmux could not be asked for its version is not remembered of it.
    """
    monkeypatch.setenv("PATH", _install(tmp_path / "bin", "echo tmux 3.4"))

    def none(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    executor = TmuxExecutor()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", none)
        assert executor.unavailable()
        with pytest.raises(StartRefused):
            executor.start(_launch(tmp_path))
    assert executor.unavailable() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert executor.start(_launch(tmp_path)) is None
    assert not (tmp_path / layout.LAUNCH).exists()


def test_a_server_that_leaves_just_now_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server leaves with its last session; who asks it for one in that moment asks again."""
    says = (
        f"echo x >> {tmp_path}/asked; [ -s {tmp_path}/late ] && exec echo $$ $PPID; cp {tmp_path}/asked {tmp_path}/late"
    )
    monkeypatch.setenv("PATH", _install(tmp_path / "bin", f"{says}; echo 'server exited unexpectedly' >&2; exit 1"))
    TmuxExecutor().start(_launch(tmp_path))
    assert (tmp_path / "asked").read_text() == "x\nx\n"


def test_a_tmux_that_hangs_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command without an answer is cut off, later starts are none, and the reason lasts as long as the silence."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("PATH", _install(tmp_path / "bin", f'[ "$1" = -V ] && exec echo tmux 3.3\nread x < {gate}'))
    executor = TmuxExecutor()
    assert executor.unavailable() is None
    monkeypatch.setattr(tmux, "LIMIT_S", 0.1)
    first, *others = [executor.start(_launch(tmp_path)) for _ in range(20)]
    assert (first.is_child, first.liveness(), others) == (False, Liveness.ABSENT, [None] * 19)
    for _ in range(3):
        assert f"{tmp_path}/.tmux" in (executor.unavailable() or "")
    gate.write_text("now\n")
    wait_for(lambda: executor.unavailable() is None)


def test_a_tmux_that_is_slow_is_not_asked_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many slow answers in a row count as silence: the starts of a pass together take no longer than that."""
    says = f"[ $1 = -V ] && exec echo tmux 3.3\necho x >> {tmp_path}/asked\nsleep 0.3; echo 1 1"
    monkeypatch.setenv("PATH", _install(tmp_path / "bin", says))
    executor = TmuxExecutor()
    assert executor.unavailable() is None
    monkeypatch.setattr(tmux, "LIMIT_S", 0.5)
    started = [executor.start(_launch(tmp_path)) for _ in range(20)]
    assert (tmp_path / "asked").read_text().count("x") <= 2
    assert started[2:] == [None] * 18
    wait_for(lambda: executor.unavailable() is None)


def test_who_uses_no_tmux_pays_nothing_for_it_and_a_dispatcher_without_stdout_can_use_it() -> None:
    """Neither the dispatcher nor a submission imports libtmux before a job wants it.

    `spool dispatch >&-` is no reason for it not to be there, and stdout is as it was afterwards.
    """
    program = (
        "import sys\nassert sys.stdout is None\n"
        "import spool.cli.main, spool.cli.fastsubmit, spool.cli.submit, spool.dispatcher.service\n"
        "from spool.executors import by_name\nby_name('process').unavailable()\n"
        "assert 'libtmux' not in sys.modules\nby_name('tmux')\nassert 'libtmux' in sys.modules\n"
        "assert sys.stdout is None and sys.__stdout__ is None"
    )
    closed = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", program]
    subprocess.run(closed, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})


def test_plain_processes_have_no_terminal() -> None:
    """The process executor says that there is nothing to attach to, and has nothing to forget."""
    executor = by_name("process")
    with pytest.raises(SpoolError, match=r"^cannot attach to job x: run 2 has no terminal"):
        executor.attach("/nowhere", "x", 2, read_only=True)
    executor.forget("/nowhere", [("x", 2)])


def test_an_output_is_read_from_where_it_ended(tmp_path: Path) -> None:
    """What a file had before is not shown; what comes is, once, also after the file was cut short.

    A file that is not there yet has nothing to show, and all of it is new when it is.
    """
    path = tmp_path / "log"
    path.write_bytes(b"old\n")
    output = Output(str(path))
    assert output.read() == b""
    with path.open("ab") as file:
        file.write(b"new\n\x00\xff")
    assert output.read() == b"new\n\x00\xff"
    assert output.read() == b""
    path.write_bytes(b"cut\n")
    assert output.read() == b"cut\n"
    output = Output(str(tmp_path / "later"))
    assert output.read() == b""
    (tmp_path / "later").write_bytes(b"all\n")
    assert output.read() == b"all\n"


def test_what_is_no_file_is_never_read(tmp_path: Path) -> None:
    """Of a FIFO or a device not a byte is taken: somebody else waits for them."""
    os.mkfifo(tmp_path / "fifo")
    keeper = os.open(tmp_path / "fifo", os.O_RDWR)
    os.write(keeper, b"for another\n")
    assert Output(str(tmp_path / "fifo")).read() == b""
    assert Output("/dev/zero").read() == b""
    assert os.read(keeper, 100) == b"for another\n"
    os.close(keeper)


def test_a_flood_is_passed_over(tmp_path: Path) -> None:
    """Of more than a person can read the end is shown, and that something is missing."""
    output = Output(str(tmp_path / "log"))
    (tmp_path / "log").write_bytes(b"x" * (5 << 20) + b"end\n")
    shown = output.read()
    assert shown.startswith(b"\n[%d bytes are not shown here]\n" % ((5 << 20) + 4 - (1 << 16)))
    assert shown.endswith(b"xend\n")
    assert len(shown) < 70_000


def test_the_viewer_ends_with_the_run_and_shows_all_of_it(tmp_path: Path) -> None:
    """When the wrapper closes its pipe, what is left in the outputs is shown first."""
    wrapper, theirs = os.pipe()
    screen, terminal = os.pipe2(os.O_NONBLOCK)
    outputs = [Output(str(tmp_path / name)) for name in ("out", "err")]
    (tmp_path / "out").write_bytes(b"out\n")
    (tmp_path / "err").write_bytes(b"err\n")
    os.close(theirs)
    Viewer(outputs, terminal, wrapper).show()
    assert os.read(screen, 100) == b"out\nerr\n"
    for fd in (wrapper, screen, terminal):
        os.close(fd)


def test_a_terminal_that_takes_nothing_does_not_keep_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the run has ended, the viewer gives a terminal that stands still a moment, and then it leaves."""
    monkeypatch.setattr(first_program, "_LAST_S", 0.05)
    wrapper, theirs = os.pipe()
    screen, terminal = os.pipe2(os.O_NONBLOCK)
    (tmp_path / "out").write_bytes(b"")
    output = Output(str(tmp_path / "out"))
    (tmp_path / "out").write_bytes(b"x" * 500_000)
    os.close(theirs)
    with pytest.raises(TimeoutError):
        Viewer([output], terminal, wrapper).show()
    for fd in (wrapper, screen, terminal):
        os.close(fd)


@pytest.mark.parametrize("which", [1, 2])
def test_a_viewer_that_cannot_be_started_leaves_the_job_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The first process of the terminal says what it was refused, and the wrapper does not begin."""
    fork, refused = os.fork, errno.EAGAIN
    forks = iter(range(1, 3))

    def sparing() -> int:
        if next(forks) == which:
            raise OSError(refused, os.strerror(refused))
        return fork()

    monkeypatch.setattr(os, "fork", sparing)
    (tmp_path / "launch").write_text(json.dumps({"outputs": []}))
    with pytest.raises(SystemExit) as left:
        first_program.main(str(tmp_path / "launch"), str(tmp_path / "run.sh"))
    assert left.value.code == wrapper.REFUSED
    said = (tmp_path / layout.REFUSED).read_text()
    assert os.strerror(errno.EAGAIN) in said


def test_a_run_whose_cpus_are_gone_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of the terminal says so, and the wrapper does not begin on other CPUs."""
    monkeypatch.setattr(first_program, "leave_viewer", lambda paths: None)
    own = os.sched_getaffinity(0)
    try:
        for cpus, why in (([65000], "Invalid argument"), ([min(own), 65000], "not all of them can be used")):
            (tmp_path / "launch").write_text(json.dumps({"outputs": [], "cpus": cpus}))
            with pytest.raises(SystemExit) as left:
                first_program.main(str(tmp_path / "launch"), str(tmp_path / "run.sh"))
            assert left.value.code == wrapper.REFUSED
            listed = ",".join(map(str, cpus))
            assert f" {listed}: {why}\n" in (tmp_path / layout.REFUSED).read_text()
    finally:
        os.sched_setaffinity(0, own)
