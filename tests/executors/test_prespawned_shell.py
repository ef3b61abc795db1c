"""A shell that waits for the next job, and becomes its wrapper."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from spool.core.errors import SpoolError
from spool.executors import Launch
from spool.executors.process import PrespawnedShell, ProcessExecutor
from spool.formats import run_records
from spool.formats.wrapper import ALREADY_STARTED, Assignments, Surroundings, render
from spool.machine import identity
from support import in_child, wait_for
from wrapper_runs import SHELLS, Shop, record_of


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """Give an executor that leaves nothing waiting."""
    with Shop(tmp_path, "sh") as made:
        yield made


def test_the_waiting_shell_is_the_next_wrapper(shop: Shop) -> None:
    """The run has its pid, its jid says who it is, and it leads a session of its own."""
    waiting = shop.executor.get_ready()
    assert waiting is not None
    stat = identity.read_stat(waiting)
    assert stat is not None
    assert stat.session == waiting
    launch = shop.launch("read x; echo got $x; exit 3")
    started = shop.executor.start(launch)
    assert started.pid == waiting
    assert shop.finish(started) == 3
    jid = run_records.parse_jid(record_of(launch, "jid"))
    assert jid is not None
    assert (jid.pid, jid.start_ticks) == (waiting, stat.start_ticks)
    assert (record_of(launch, "rc"), record_of(launch, "log")) == (b"3\n", b"got\n")


def test_one_waits_at_a_time(shop: Shop) -> None:
    """Asked again it is the same; a second start in a row has a shell of its own, and then another may wait."""
    waiting = shop.executor.get_ready()
    assert shop.executor.get_ready() == waiting
    first, second = shop.executor.start(shop.launch("exit 1")), shop.executor.start(shop.launch("exit 2"))
    assert (first.pid == waiting, second.pid == waiting) == (True, False)
    assert (shop.finish(first), shop.finish(second)) == (1, 2)
    assert shop.executor.get_ready() not in (None, waiting)


def test_a_run_does_not_see_that_its_shell_has_waited(shop: Shop) -> None:
    """Arguments, signals, environment and descriptors are those of a wrapper that was started for it."""
    say = 'echo "$0" $#; grep -E "^Sig(Ign|Blk)" /proc/self/status; ls /proc/self/fd; env | grep -v METADIR | sort'
    logs = []
    for ready in ("", "waits", "has read"):
        launch = shop.launch(say)
        if ready:
            shop.executor.get_ready(launch.text if ready == "has read" else None)
        assert shop.finish(shop.executor.start(launch)) == 0
        logs.append(record_of(launch, "log").replace(launch.metadir.encode(), b"METADIR"))
    assert logs[0] == logs[1] == logs[2]


def test_what_it_has_read_is_not_begun(shop: Shop) -> None:
    """It waits for the word, whatever is there by then; the next start is its own, and nothing was read twice."""
    launch = shop.launch("echo begun")
    waiting = shop.executor.get_ready(launch.text)
    assert waiting is not None
    _wait_until_read(waiting, launch)
    assert not (Path(launch.metadir) / "jid").exists()
    assert shop.executor.get_ready(launch.text) == waiting
    started = shop.executor.start(launch)
    assert started.pid == waiting
    assert shop.finish(started) == 0
    assert record_of(launch, "log") == b"begun\n"


@pytest.mark.parametrize("again", ["get ready", "start"])
def test_a_shell_that_has_read_another_script_is_not_used(shop: Shop, again: str) -> None:
    """A guess that was wrong costs a shell; what was guessed does not run."""
    wrong, right = shop.launch("echo wrong"), shop.launch("echo right")
    waiting = shop.executor.get_ready(wrong.text)
    assert waiting is not None
    if again == "get ready":
        assert shop.executor.get_ready(right.text) not in (None, waiting)
    started = shop.executor.start(right)
    assert started.pid != waiting
    assert shop.finish(started) == 0
    assert identity.read_stat(waiting) is None
    assert record_of(right, "log") == b"right\n"
    assert not (Path(wrong.metadir) / "jid").exists()


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_every_shell_can_wait(tmp_path: Path, shell: str) -> None:
    """What it is given to read with, and to be told by, no shell takes otherwise."""

    def spawn(words: list[str], files: Mapping[int, int], environment: Mapping[str, str]) -> int:
        words = [*SHELLS[shell], *words[1:]]
        moved = [(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in files.items()]
        return os.posix_spawnp(words[0], words, environment, file_actions=moved, setsid=True)

    around = Surroundings(identity.pid_namespace(), identity.host(), identity.boot_id())
    text = render(Assignments(str(tmp_path), "ls -l /proc/self/fd; exit 7", around))
    for read_before in (True, False):
        spare = PrespawnedShell(spawn, dict(os.environ))
        if read_before:
            assert spare.reads(text)
        assert spare.become(text)
        assert os.waitstatus_to_exitcode(os.waitpid(spare.pid, 0)[1]) == 7
        assert "memfd" not in (tmp_path / "log").read_text()
        (tmp_path / "jid").unlink()
        (tmp_path / "log").unlink()


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="nobody else may mount a /dev")
def test_a_machine_need_not_have_dev_fd(tmp_path: Path) -> None:
    """It is a link that udev makes, or a container's runtime, or nobody."""
    bare = 'mount -t tmpfs bare /dev && mknod /dev/null c 1 3 && exec "$@"'

    def spawn(words: list[str], files: Mapping[int, int], environment: Mapping[str, str]) -> int:
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", bare, "sh", *words]
        moved = [(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in files.items()]
        return os.posix_spawnp(words[0], words, environment, file_actions=moved, setsid=True)

    around = Surroundings(identity.pid_namespace(), identity.host(), identity.boot_id())
    spare = PrespawnedShell(spawn, dict(os.environ))
    assert spare.become(render(Assignments(str(tmp_path), "ls /dev; exit 8", around)))
    assert os.waitstatus_to_exitcode(os.waitpid(spare.pid, 0)[1]) == 8
    assert (tmp_path / "log").read_text() == "null\n"


def _wait_until_read(pid: int, launch: Launch) -> None:
    """Wait until the shell has read the whole script, and waits for more."""

    def has_read() -> bool:
        counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        return int(counts["rchar"]) > len(launch.text) and state == "S"

    wait_for(has_read, what="the shell to have read the script")


@pytest.mark.parametrize("has_read", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_waiting_shell_that_somebody_ended_is_no_matter(
    shop: Shop, number: signal.Signals, *, has_read: bool
) -> None:
    """The job starts in a new one."""
    launch = shop.launch("exit 4")
    waiting = shop.executor.get_ready(launch.text if has_read else None)
    assert waiting is not None
    if has_read:
        _wait_until_read(waiting, launch)
    os.kill(waiting, number)
    os.waitpid(waiting, 0)
    started = shop.executor.start(launch)
    assert started.pid != waiting
    assert shop.finish(started) == 4


@pytest.mark.parametrize("name", ["two\nlines", "long" * 60, "-n", "caf\udce9"])
def test_any_path_of_a_metadir_will_do(shop: Shop, name: str) -> None:
    """The shell is told the text, not where it lies."""
    waiting = shop.executor.get_ready()
    started = shop.executor.start(shop.launch("exit 5", name))
    assert started.pid == waiting
    assert shop.finish(started) == 5


def test_a_run_that_was_settled_meanwhile_is_not_run(shop: Shop) -> None:
    """Where a jid is, the shell leaves as any wrapper does."""
    shop.executor.get_ready()
    launch = shop.launch("echo no")
    (Path(launch.metadir) / "jid").write_bytes(run_records.VOID_JID)
    assert shop.finish(shop.executor.start(launch)) == ALREADY_STARTED
    assert not (Path(launch.metadir) / "log").exists()


def test_nothing_waits_once_the_executor_is_closed(shop: Shop) -> None:
    """Its shell is gone, and reaped."""
    waiting = shop.executor.get_ready()
    assert waiting is not None
    shop.executor.close()
    assert identity.read_stat(waiting) is None


@pytest.mark.parametrize("has_read", [False, True])
def test_the_shell_leaves_with_whoever_started_it(shop: Shop, tmp_path: Path, *, has_read: bool) -> None:
    """After KILL to the dispatcher nobody holds the pipe, and the shell ends by itself and runs nothing."""
    launch = shop.launch("echo no")

    def child() -> None:
        (tmp_path / "pid").write_text(
            str(ProcessExecutor(config=shop.config).get_ready(launch.text if has_read else None))
        )
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(child) == -signal.SIGKILL
    waiting = int((tmp_path / "pid").read_text())
    wait_for(lambda: (stat := identity.read_stat(waiting)) is None or stat.dead, what="the end of the shell")
    assert os.listdir(launch.metadir) == ["run.sh"]


def test_a_shell_that_is_gone_is_not_named_again(shop: Shop) -> None:
    """Its pid may be another process's by now. No new one is started until a job is: it might end as fast, for ever."""
    waiting = shop.executor.get_ready()
    assert waiting is not None
    os.kill(waiting, signal.SIGKILL)
    os.waitpid(waiting, 0)
    assert shop.executor.get_ready() is None
    assert shop.finish(shop.executor.start(shop.launch("exit 6"))) == 6
    assert shop.executor.get_ready() is not None


def test_a_shell_that_was_stopped_does_not_start_a_run_that_was_settled_meanwhile(shop: Shop) -> None:
    """Told while it is stopped, it goes on one day, finds the jid and leaves."""
    waiting = shop.executor.get_ready()
    assert waiting is not None
    os.kill(waiting, signal.SIGSTOP)
    launch = shop.launch("echo no")
    started = shop.executor.start(launch)
    (Path(launch.metadir) / "jid").write_bytes(run_records.VOID_JID)
    os.kill(waiting, signal.SIGCONT)
    assert shop.finish(started) == ALREADY_STARTED
    assert not (Path(launch.metadir) / "log").exists()


def test_a_stopped_shell_is_ended_as_any(shop: Shop) -> None:
    """It is not waited for in vain."""
    waiting = shop.executor.get_ready()
    assert waiting is not None
    os.kill(waiting, signal.SIGSTOP)
    shop.executor.close()
    assert identity.read_stat(waiting) is None


def test_a_run_goes_on_when_who_started_it_is_killed_at_once(shop: Shop) -> None:
    """Killed right after its word to the waiting shell: the run has its jid and comes to its end."""
    launch = shop.launch("exit 7")

    def child() -> None:
        shop.executor.get_ready()
        shop.executor.start(launch)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(child) == -signal.SIGKILL
    wait_for(lambda: (Path(launch.metadir) / "rc").exists() and record_of(launch, "rc") == b"7\n", what="the exit code")
    assert run_records.parse_jid(record_of(launch, "jid")) is not None


def test_no_descriptor_is_left_whatever_becomes_of_the_shell(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told, ended by somebody, dismissed, or never started because the machine has no room."""

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    before = os.listdir("/proc/self/fd")
    for number in (None, signal.SIGKILL):
        waiting = shop.executor.get_ready()
        assert waiting is not None
        if number is not None:
            os.kill(waiting, number)
            os.waitpid(waiting, 0)
        assert shop.finish(shop.executor.start(shop.launch("exit 8"))) == 8
    shop.executor.get_ready()
    shop.executor.close()
    for name in ("posix_spawn", "pipe2"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            assert shop.executor.get_ready() is None
            if name == "posix_spawn":
                with pytest.raises(SpoolError, match="temporarily unavailable"):
                    shop.executor.start(shop.launch("exit 9"))
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1, 2)])
def test_a_process_without_the_first_descriptors_starts_runs_as_any(shop: Shop, closed: tuple[int, ...]) -> None:
    """The pipe to the waiting shell may be one of them."""
    launches = [shop.launch("read x; echo got $x; exit 3") for _ in range(2)]

    def child() -> None:
        for fd in closed:
            os.close(fd)
        for launch in launches:
            shop.finish(shop.executor.start(launch))
            shop.executor.get_ready()

    assert in_child(child) == 0
    assert [(record_of(launch, "rc"), record_of(launch, "log")) for launch in launches] == [(b"3\n", b"got\n")] * 2
