"""The process executor: its shells, and the compiled wrapper as a server that makes each run a child of who asks."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from spool.core.errors import InvalidValue, SpoolError, StartRefused
from spool.core.layout import LOCAL_EXECUTORS
from spool.core.lifecycle import Liveness
from spool.core.reasons import ranges_of
from spool.executors import Launch, base, by_name, compiled, process
from spool.executors.process import WrapperServer
from spool.formats import run_records
from spool.machine import identity
from support import in_child, wait_for
from wrapper_runs import ByShell, Shop, become_poor, poor_directory, record_of


def _server(shop: Shop) -> int:
    """Have a run started, and return the server that has started it."""
    assert shop.finish(shop.executor.start(shop.launch("true"))) == 0
    [server] = _servers()
    return server


def _servers() -> list[int]:
    """Return the children of this process that are servers."""
    found = []
    for about in Path("/proc").glob("[0-9]*"):
        stat = identity.read_stat(int(about.name))
        if stat is not None and stat.parent == os.getpid() and not stat.dead:
            words = (about / "cmdline").read_bytes().split(b"\0")
            found += [stat.pid] if words[1:2] == [b"serve"] else []
    return found


def _killed(server: int, number: int = signal.SIGKILL) -> None:
    """Send a server of this process a signal, and wait for its effect."""
    os.kill(server, number)
    os.waitpid(server, os.WUNTRACED)


def test_a_wrapper_is_a_child_of_ours_in_a_session_of_its_own(either: Shop) -> None:
    """Its jid says who it is, its end comes here, and one server, if there is any, makes them all."""
    servers = set[int]()
    for code in (3, 4):
        launch = either.launch(f"read x; echo got $x; exit {code}")
        started = either.executor.start(launch)
        wait_for((Path(launch.metadir) / "jid").exists, what="the jid")  # before, it may be in another session
        stat = identity.read_stat(started.pid)
        assert (stat.session, stat.parent) == (started.pid, os.getpid())
        assert either.finish(started) == code
        jid = run_records.parse_jid(record_of(launch, "jid"))
        assert (jid.pid, jid.start_ticks) == (started.pid, stat.start_ticks)
        assert (record_of(launch, "rc"), record_of(launch, "log")) == (b"%d\n" % code, b"got\n")
        servers |= set(_servers())
    assert len(servers) == (0 if isinstance(either.executor, ByShell) else 1)


@pytest.mark.parametrize("texts", [{}, {"prolog": "true"}, {"epilog": "true"}, {"workdir": "/tmp/../tmp"}])
def test_a_run_does_not_see_who_has_started_it(shop: Shop, tmp_path: Path, texts: dict[str, str]) -> None:
    """Arguments, signals, environment, limits and descriptors are those of a run under a shell, also of one for it."""
    say = (
        'echo "$0" $#; grep -E "^Sig(Ign|Blk|Cgt)" /proc/self/status; ls -l /proc/self/fd | sed "s/.* //; s/[0-9]//g"; '
    )
    say += "env | grep -v METADIR= | sort; umask; cat /proc/self/limits"
    logs = []
    (tmp_path / "by sh").mkdir()
    with Shop(tmp_path / "by sh", ByShell) as plain:
        for each in (plain, shop):
            launch = each.launch(say, **texts)
            assert each.finish(each.executor.start(launch)) == 0
            log = record_of(launch, "log").replace(launch.metadir.encode(), b"METADIR")
            logs.append([line for line in log.splitlines() if not line.startswith(b"/proc/")])  # of `ls` itself
    assert logs[0] == logs[1]


ALLOWED = "grep Cpus_allowed_list /proc/self/status"


def test_a_run_is_pinned_and_the_next_one_is_not(either: Shop) -> None:
    """From the first moment to the CPUs of its launch; one without any may use all that this process may."""
    own = os.sched_getaffinity(0)
    one = str(min(own))
    for cpus, expected in ((one, one), ("", ranges_of(own)), (one, one), ("", ranges_of(own))):
        launch = replace(either.launch(ALLOWED), cpus=cpus)
        assert either.finish(either.executor.start(launch)) == 0
        assert record_of(launch, "log").split()[-1].decode() == expected
    assert os.sched_getaffinity(0) == own


def test_a_run_whose_cpus_are_gone_is_refused_and_not_started(either: Shop) -> None:
    """A CPU that was there when the run was planned and is offline now: the job waits, and others start as ever."""
    own = os.sched_getaffinity(0)
    for gone in ("65000", f"{min(own)},65000"):
        launch = replace(either.launch("echo begun"), cpus=gone)
        with pytest.raises(StartRefused, match=f"CPUs {gone} cannot be given to it"):
            either.executor.start(launch)
        assert not (Path(launch.metadir) / "jid").exists()
        launch = either.launch(ALLOWED)
        assert either.finish(either.executor.start(launch)) == 0
        assert record_of(launch, "log").split()[-1].decode() == ranges_of(own)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_killed_server_is_replaced(shop: Shop, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """The next run has another, also where the first one only stands still; it runs once, pinned if it is to be."""
    if number is signal.SIGSTOP:
        monkeypatch.setattr(process, "_ANSWERS_WITHIN_S", 1)
    server = _server(shop)
    _killed(server, number)
    one = str(min(os.sched_getaffinity(0)))
    launch = replace(shop.launch(f"{ALLOWED}; exit 4"), cpus=one)
    assert shop.finish(shop.executor.start(launch)) == 4
    assert record_of(launch, "log").split() == [b"Cpus_allowed_list:", one.encode()]
    assert _server(shop) != server
    assert identity.read_stat(server) is None


def test_a_server_that_ends_before_it_has_answered_leaves_the_run_to_its_jid(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have started the wrapper or not: nothing is started again, and the run is nobody until its jid speaks."""
    deaf = shop.root / "deaf"
    deaf.write_text("#!/bin/sh\ndd bs=9999 count=1 <&3 2> /dev/null\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(compiled, "find", lambda: compiled.FoundWrapper(str(deaf)))
    started = shop.executor.start(shop.launch("echo no"))
    assert (started.pid, started.liveness()) == (None, Liveness.ABSENT)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_server_that_may_not_make_the_wrapper_leaves_it_to_a_shell(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A sandbox or an emulated processor may not know a child of its parent: that says nothing about the job."""
    launch = shop.launch("echo once; exit 4")
    answer = "".join(f"\\{byte:03o}" for byte in struct.pack("i", -number))
    barred = shop.root / "barred"
    barred.write_text(f"#!/bin/sh\ndd bs=9999 count=1 <&3 2> /dev/null\nprintf '{answer}' >&3\nexec cat <&3\n")
    barred.chmod(0o755)
    monkeypatch.setattr(compiled, "find", lambda: compiled.FoundWrapper(str(barred)))
    assert shop.finish(shop.executor.start(launch)) == 4
    assert record_of(launch, "log") == b"once\n"


def test_a_machine_without_room_refuses_a_start(shop: Shop) -> None:
    """The server is refused the child, and says so; with room again the same one starts it."""
    if os.getuid() != 0:
        pytest.skip("only root can become somebody who is poor")
    with poor_directory() as directory:
        poor = Shop(directory)
        launches = [poor.launch("exit 3") for _ in range(2)]
        for path in [directory, *directory.rglob("*")]:
            os.chmod(path, 0o777)
        said = directory / "said"

        def child() -> None:
            become_poor(later=True)
            server = _server(poor)
            before = resource.prlimit(server, resource.RLIMIT_NPROC, (1, 1))
            try:
                poor.executor.start(launches[0])
            except StartRefused as error:
                resource.setrlimit(resource.RLIMIT_NPROC, before)
                _killed(server)  # nobody but root gives it a limit back
                said.write_text(f"{error}\n{poor.finish(poor.executor.start(launches[1]))}")

        assert in_child(child) == 0
        assert re.fullmatch(rf"{compiled.PROGRAM} .*: {os.strerror(errno.EAGAIN)}\n3", said.read_text())
        assert os.listdir(launches[0].metadir) == ["run.sh"]


def test_any_path_of_a_metadir_will_do(either: Shop) -> None:
    """The path goes through as bytes."""
    for name in ("two\nlines", "long" * 60, "-n", "caf\udce9"):
        for texts in ({}, {"prolog": "true"}):
            assert either.finish(either.executor.start(either.launch("exit 5", name, **texts))) == 5


def test_what_a_request_has_no_room_for_is_started_as_ever(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of a megabyte is none of the server's."""
    launch = shop.launch('test ${#A} = 100000 && test "$KEPT" = x && exit 6')
    large = {"KEPT": "x"} | dict.fromkeys("ABCDEFGHIJ", "y" * 100000)
    monkeypatch.setattr(base, "login_environment", lambda: large)
    assert shop.finish(shop.executor.start(launch)) == 6


def test_a_program_that_was_removed_serves_as_long_as_it_runs(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade may take it away at any moment: what names it runs with env then, and a shell starts the next run."""
    mine = shutil.copy(compiled.PROGRAM, tmp_path / "mine")
    monkeypatch.setattr(compiled, "PROGRAM", str(mine))
    launches = [shop.launch("kill -INT $$; echo survived", prolog="true") for _ in range(2)]
    server = _server(shop)
    os.unlink(mine)
    assert shop.finish(shop.executor.start(launches[0])) == 130
    _killed(server)
    assert shop.finish(shop.executor.start(launches[1])) == 130
    assert [record_of(launch, "log") for launch in launches] == [b"", b""]


def test_a_program_that_goes_ends_its_server(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends with the first start of a shell, comes back when it can, and goes with the executor.

    It is reaped each time.
    """
    server = _server(shop)
    with monkeypatch.context() as away:
        away.setattr(compiled, "PROGRAM", "/nowhere")
        assert shop.finish(shop.executor.start(shop.launch("exit 7"))) == 7
    assert identity.read_stat(server) is None
    assert not _servers()
    server = _server(shop)
    shop.executor.close()
    assert identity.read_stat(server) is None


def test_the_server_leaves_with_whoever_started_it(shop: Shop, tmp_path: Path) -> None:
    """After KILL to the dispatcher nobody holds its socket."""

    def child() -> None:
        (tmp_path / "pid").write_text(str(_server(shop)))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(child) == -signal.SIGKILL
    server = int((tmp_path / "pid").read_text())
    wait_for(lambda: (stat := identity.read_stat(server)) is None or stat.dead, what="the end of the server")


@pytest.mark.parametrize("texts", [{}, {"prolog": "true"}])
def test_a_run_goes_on_when_its_starter_is_killed_at_once(either: Shop, texts: dict[str, str]) -> None:
    """Killed right after the answer: the run has its jid and comes to its end."""
    launch = either.launch("exit 7", **texts)

    def child() -> None:
        either.executor.start(launch)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(child) == -signal.SIGKILL
    wait_for(lambda: (Path(launch.metadir) / "rc").exists() and record_of(launch, "rc") == b"7\n", what="the exit code")
    assert run_records.parse_jid(record_of(launch, "jid")) is not None


def test_a_request_that_outlives_who_made_it_runs_nothing_that_is_settled(shop: Shop, tmp_path: Path) -> None:
    """A server that stood still meanwhile goes on one day; its wrapper finds the jid that a dispatcher took since."""
    launch = shop.launch("echo no")

    def child() -> None:
        server = _server(shop)
        (tmp_path / "pid").write_text(str(server))
        _killed(server, signal.SIGSTOP)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.3)  # while it waits for the answer
        shop.executor.start(launch)

    assert in_child(child) == -signal.SIGALRM
    (Path(launch.metadir) / "jid").write_bytes(run_records.VOID_JID)
    server = int((tmp_path / "pid").read_text())
    os.kill(server, signal.SIGCONT)
    wait_for(lambda: (stat := identity.read_stat(server)) is None or stat.dead, what="the end of the server")
    wait_for(lambda: not _wrappers_of(launch), what="the end of the wrapper")
    assert sorted(os.listdir(launch.metadir)) == ["jid", "run.sh"]


def _wrappers_of(launch: Launch) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if launch.script.encode() in path.read_bytes().split(b"\0"):
                found.append(str(path))
        except OSError:
            continue
    return found


def test_no_descriptor_is_left_whatever_becomes_of_the_server(shop: Shop) -> None:
    """Killed, dismissed, or never there."""
    before = os.listdir("/proc/self/fd")
    for number in (None, signal.SIGKILL):
        server = _server(shop)
        if number is not None:
            _killed(server, number)
        assert shop.finish(shop.executor.start(shop.launch("exit 8"))) == 8
    shop.executor.close()

    def fail(words: list[str], files: Mapping[int, int], environment: Mapping[str, str]) -> int:
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        WrapperServer(fail, "/no/such/program")
    assert os.listdir("/proc/self/fd") == before


def test_a_run_has_nothing_that_its_starter_left_open_and_reads_nothing_that_it_reads(either: Shop) -> None:
    """Neither the server nor a shell passes on the stdin of its starter.

    A library may open a file that every child inherits: a run.sh closes 3 to 7, and so does the server.
    """
    reading, writing = os.pipe()
    os.write(writing, b"of the dispatcher\n")
    launch = either.launch("read x; echo got $x; for fd in 0 3 4 5 6 7; do readlink /proc/self/fd/$fd; done")

    def child() -> None:
        os.dup2(reading, 0)
        for fd in range(3, 8):
            os.dup2(os.open(os.devnull, os.O_RDONLY), fd)
        either.finish(either.executor.start(launch))

    assert in_child(child) == 0
    os.close(reading)
    os.close(writing)
    assert (record_of(launch, "rc"), record_of(launch, "log")) == (b"1\n", b"got\n/dev/null\n")


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1, 2)])
def test_a_process_without_the_first_descriptors_starts_runs_as_any(either: Shop, closed: tuple[int, ...]) -> None:
    """The socket to the server may be one of them, or the file with the identity of the wrapper."""
    launches = [either.launch("read x; echo got $x; exit 3") for _ in range(2)]

    def child() -> None:
        for fd in closed:
            os.close(fd)
        for launch in launches:
            either.finish(either.executor.start(launch))

    assert in_child(child) == 0
    assert [(record_of(launch, "rc"), record_of(launch, "log")) for launch in launches] == [(b"3\n", b"got\n")] * 2


def test_an_executor_is_found_by_its_name() -> None:
    """Any other name is an error that names them."""
    for name in LOCAL_EXECUTORS:
        assert by_name(name).name == name
    with pytest.raises(InvalidValue, match=r"executor 'proces': .*process"):
        by_name("proces")


def test_what_the_dispatcher_ignores_or_blocks_is_not_inherited(either: Shop) -> None:
    """A dispatcher started in the background ignores INT; its jobs can be interrupted, and block no signal."""
    launch = either.launch("grep -E 'Sig(Ign|Blk)' /proc/self/status; kill -INT $$; echo survived")
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    try:
        started = either.executor.start(launch)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert either.finish(started) == 130
    masks = [int(line.split()[1], 16) for line in record_of(launch, "log").splitlines()]
    # glibc keeps two signals to itself and starts every process with these ignored; they are no valid ones.
    assert [number for mask in masks for number in signal.valid_signals() if mask >> (number - 1) & 1] == []
    assert len(masks) == 2


def test_a_wrapper_shows_its_script_and_its_own_marks_alone(either: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first moment it can be found by them, and nothing of an outer run is in it, or in its command."""
    for name, value in {"SPOOL_JOB": "outer", "SPOOL_ARRAY_INDEX": "1", "BASH_VERSION": "5"}.items():
        monkeypatch.setenv(name, value)
    os.mkfifo(gate := either.root / "gate")
    launch = either.launch(f"env; read -r x < '{gate}'")
    started = either.executor.start(launch)
    about = Path(f"/proc/{started.pid}")
    # A program that has just begun has no environment to show for a moment.
    wait_for(lambda: b"SPOOL_RUN=" in (about / "environ").read_bytes())
    marks = sorted(entry for entry in (about / "environ").read_bytes().split(b"\0") if entry.startswith(b"SPOOL_"))
    assert marks == [f"SPOOL_DIR={either.root}".encode(), b"SPOOL_JOB=job", b"SPOOL_RUN=1"]
    assert launch.script.encode() in (about / "cmdline").read_bytes().split(b"\0")
    gate.write_text("\n")
    assert either.finish(started) == 0
    found = record_of(launch, "log").splitlines()
    assert not [entry for entry in found if entry.startswith(b"SPOOL_") or entry == b"BASH_VERSION=5"]


@pytest.mark.parametrize("call", ["posix_spawn", "memfd_create"])
def test_a_machine_without_room_for_a_shell_refuses_a_start(
    either: Shop, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Where no process can be made, the executor says that the machine refuses it, which another moment may change.

    A server that cannot be made is none, and then a shell is started.
    """
    monkeypatch.setattr(compiled, "PROGRAM", "/no/such/program")
    monkeypatch.setattr(os, call, failing(errno.ENFILE))
    with pytest.raises(StartRefused, match=rf"/bin/sh .*{os.strerror(errno.ENFILE)}"):
        either.executor.start(either.launch("true"))


def test_a_shell_that_is_not_there_is_no_shortage(either: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says something about the program will be the same in a moment, and is told in words."""
    monkeypatch.setattr(os, "posix_spawn", failing(errno.ENOENT))
    with pytest.raises(SpoolError, match=r"job job: /bin/sh: ") as raised:
        either.executor.start(either.launch("true"))
    assert not isinstance(raised.value, StartRefused)


def failing(number: int) -> Callable[..., int]:
    """Return what fails with that error."""

    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail
