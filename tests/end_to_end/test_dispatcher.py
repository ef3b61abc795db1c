"""The dispatcher as a process: its signals, configuration and exits, the order of jobs, and what they inherit."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from end_to_end.hooking import hook
from served import LOOKS, SHELL_ONLY, Served, alive, marked, pids_in
from spool.store.ownership import this_user
from spool.store.spool import Service, Spool
from support import PATIENCE_S, wait_for

_BOTH = pytest.mark.executors("process", "tmux")
_BLIND = """
import sys, errno
sys.argv = ["spool", *sys.argv[1:]]
from spool.dispatcher import wakeup
class Blind:
    def __init__(self, hear):
        raise OSError(errno.EMFILE, "inotify instance limit reached")
wakeup._Emitter = Blind
from spool.cli.main import main
main()
"""


def _configure(served: Served, text: str) -> None:
    """Write the configuration whole, as `mv` does."""
    staged = served.root / ".tmp" / "config"
    staged.write_text(text)
    staged.rename(served.root / "config.toml")


# Signals and exits.


def test_hup_reads_the_configuration_again(served: Served) -> None:
    """HUP makes a new configuration count at once, also one that no event told of."""
    _configure(served, "cpus = 1\n")
    served.start()
    served.drop("wide", "true", cpus=3)
    served.wait_reason("wide", "the machine has 1")
    with (served.root / "config.toml").open("r+b") as file:
        file.write(b"cpus = 4\n")
        file.flush()  # still open: no event says that it was closed
        served.process.send_signal(signal.SIGHUP)
        served.wait_done("wide")


def test_old_runs_go_by_themselves_where_the_configuration_has_a_limit(served: Served) -> None:
    """A limit that is set while the dispatcher runs counts at once, and so does one that it finds when it begins."""
    served.start()
    served.completes("a", "true")
    _configure(served, "[gc]\nmax_age = '0s'\n")
    served.until(lambda: not served.runs("a"), "the removal")
    _configure(served, "")
    served.looked()
    served.completes("b", "true")
    assert served.runs("b") == [1]
    served.stop()
    _configure(served, "[gc]\nmax_age = '0s'\n")
    served.start()
    served.until(lambda: not served.runs("b"), "the removal")
    assert len(served.history()) == 3


_BROKEN = [b"cpus = ", b"cpu = 4\n", b"\xff\xfe", b"cpus = 1" + b"0" * 5000, b"[" * 30_000, b"cpus = true\n"]


def test_a_broken_configuration_is_reported_and_the_last_good_one_stays(shared: Served) -> None:
    """What is wrong stands in `problems`; jobs go on as before; mending takes it away."""
    good = (shared.root / "config.toml").read_text()
    told = set()
    for at, broken in enumerate(_BROKEN):
        staged = shared.root / ".tmp" / "broken"
        staged.write_bytes(broken)
        staged.rename(shared.root / "config.toml")
        try:
            problem = shared.until(lambda told=told: set(shared.state()["problems"]) - told, "a problem").pop()
            told = {problem}
            assert "configuration" in problem
            shared.completes(f"five-wide-{at}", "true", cpus=5)
        except BaseException:
            _configure(shared, good)
            raise
    _configure(shared, good)
    shared.until(lambda: not shared.state()["problems"], "the problem's end")


def test_a_dispatcher_says_that_the_defaults_apply(served: Served) -> None:
    """Where people look: one that begins with keys that it does not know, as after a downgrade, uses no other."""
    served.serves("cpus = 1\nof_a_later_version = 3\n")
    served.until(lambda: served.state()["problems"], "the problem")
    for command in ("ls", "info"):
        said = served.spool(command)
        lines = (said.stderr if command == "ls" else said.stdout).splitlines()
        assert len([line for line in lines if "defaults apply" in line and "of_a_later_version" in line]) == 1, said


@_BOTH
def test_term_leaves_jobs_running(served: Served) -> None:
    """TERM, INT: the dispatcher leaves with 0, and what runs goes on."""
    for number in (signal.SIGTERM, signal.SIGINT):
        name = f"on-{number}"
        served.drop(name, "echo up; exec sleep 1000")
        served.start()
        served.says(name, "up")
        pid = served.pid(name)
        assert served.stop(number) == 0
        assert alive(pid)
        assert served.outcome(name) is None
    served.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        served.cancels(f"on-{number}")


@_BOTH
def test_a_job_holds_nothing_of_who_started_the_dispatcher(served: Served) -> None:
    """A pipe or a lock of the shell that ran `spool dispatch` is not open in what outlives that."""
    reading, writing = os.pipe()
    try:
        served.drop("stays", "exec sleep 1000")
        assert served.run("--once", inherits=[writing]) == 0
        served.pid("stays")
    finally:
        os.close(writing)
    try:
        os.set_blocking(reading, False)
        assert os.read(reading, 1) == b"", "somebody has the other end open"
    finally:
        os.close(reading)
        served.end_runs()


@pytest.mark.parametrize("until", [("--until-idle",), ("--idle-exit", "100ms")])
def test_what_is_no_job_keeps_no_dispatcher(served: Served, until: tuple[str, ...]) -> None:
    """A directory, a link or a FIFO with the name of a job file is looked for once more, and then left.

    A job that runs keeps one, however little it may idle.
    """
    (served.root / "queued" / "directory.toml").mkdir()
    (served.root / "queued" / "link.toml").symlink_to("nowhere")
    os.mkfifo(served.root / "queued" / "fifo.toml")
    served.drop("job", ["sleep", "0.5"])
    assert served.run(*until) == 0
    assert served.outcome("job") == "finished"
    assert served.said().count("dispatcher serves") <= 2


_RELEASED_TOO_LATE = """
import os, sys
from spool.dispatcher import loop, service
close = loop.Dispatcher.close
def release_and_close(self):
    if os.path.exists(f"{sys.argv[1]}/held/x.toml"):
        os.rename(f"{sys.argv[1]}/held/x.toml", f"{sys.argv[1]}/queued/x.toml")
        os.replace(f"{sys.argv[1]}/mended", f"{sys.argv[1]}/queued/broken.toml")
    close(self)
loop.Dispatcher.close = release_and_close
service.serve(sys.argv[1], until_idle=True)
"""


def test_what_is_released_or_mended_while_the_dispatcher_leaves_is_run(served: Served) -> None:
    """Whoever did that saw a dispatcher live, and started none."""
    served.drop("x", "true", place="held")
    served.drop("broken", b"]")
    (served.root / "mended").write_bytes(served.text("true"))
    subprocess.run([sys.executable, "-c", _RELEASED_TOO_LATE, served.root], env=served.environment, check=True)
    assert (served.outcome("x"), served.outcome("broken")) == ("finished", "finished")


def test_until_idle_tells_whether_a_job_failed(served: Served) -> None:
    """The code is 7 if one failed for good, by itself or in an array; a retry counts for nothing.

    It runs what waits, chains and retries included, and leaves; neither held files nor invalid ones keep it.
    """
    served.drop("kept", "true", place="held")
    served.drop("invalid", b"]")
    served.drop("retried", "[ $SPOOL_ATTEMPT = 2 ]", retry={"max": 1, "delay": "100ms"})
    served.drop("two", "true", depends_on="retried")
    assert served.run("--until-idle") == 0
    assert (served.outcome("two"), served.places("kept")) == ("finished", ["held"])
    served.drop("broken", "exit 3")
    served.drop("fine", "true", depends_on="broken")
    assert served.run("--until-idle") == 7
    assert served.outcome("broken") == "failed"
    assert served.run("--until-idle") == 0
    served.drop("many", "[ {index} = 1 ]", array="0-1")
    assert served.run("--until-idle") == 7


def test_until_idle_waits_for_who_is_writing(served: Served) -> None:
    """A file that is copied slowly into `queued/`, and is valid at a cut, is run whole, and waited for by one."""
    path = served.path("queued", "slow")
    with path.open("wb") as file:
        file.write(served.text("true"))
        file.flush()
        served.start("--until-idle")
        served.completes("other", "true")
        assert (served.lives(), served.runs("slow")) == (True, [])
        file.write(b"cpus = 1\n")
    served.wait_done("slow")
    assert "cpus = 1\n" in served.record("slow", "job.toml")
    process, served.process = served.process, None
    assert process.wait(PATIENCE_S) == 0
    assert served.said().count("dispatcher serves") == 1


def test_the_first_failure_pauses_where_that_is_asked_for(served: Served) -> None:
    """`on_failure = "pause"`: nothing starts after a job that failed for good, and `paused` says which."""
    _configure(served, 'cpus = 1\non_failure = "pause"\n')
    served.drop("bad", "exit 1", priority=20)
    served.drop("next", "true", start_after="1s")
    served.start()
    served.wait_done("bad")
    paused = served.root / "paused"
    served.until(lambda: paused.exists() and "bad" in paused.read_text(), "the pause")
    served.wait_reason("next", "paused")


def test_the_first_failure_cancels_everything_where_that_is_asked_for(served: Served) -> None:
    """`on_failure = "halt"`: what waits is cancelled and what runs is stopped, arrays too; what comes later runs."""
    _configure(served, 'cpus = 2\non_failure = "halt"\n')
    served.start()
    served.begun("running", "exec sleep 1000")
    served.drop("waiting", "true", cpus=2)
    served.drop("sweep", "exec sleep 1000", array="0-9", cpus=2)
    (served.root / "held" / "parked.toml").write_text('command = "true"\n')
    served.wait_reason("sweep_9", "cpus")  # the last one: all of them are queued
    served.drop("tried", "exit 1", start_after="1000s")
    served.drop("bad", "exit 1")
    for name in ("running", "waiting", "sweep_0", "sweep_9", "sweep", "tried"):
        assert served.wait_outcome(name) == "cancelled"
    for name in ("waiting", "running"):
        text = (served.root / "jobs" / name / "1" / "result.toml").read_text()
        assert "job bad failed: " in text
        assert f"by {this_user()}" not in text  # no user has cancelled it
    assert (served.root / "held" / "parked.toml").exists()
    served.until(lambda: not (served.root / ".halt").exists(), "the end of the halt")
    served.drop("later", "true")
    assert served.wait_outcome("later") == "finished"


def test_a_halt_that_was_cut_off_is_finished(served: Served) -> None:
    """The next dispatcher cancels what waited when the halt began; a record that is torn cancels nothing."""
    served.drop("old", "true")
    (served.root / ".halt").write_text(f"cancel me {time.time_ns()} halted: job bad failed\n")
    served.start()
    assert served.wait_outcome("old") == "cancelled"
    served.until(lambda: not (served.root / ".halt").exists(), "the end of the halt")
    served.stop()
    (served.root / ".halt").write_text("canc")
    served.drop("new", "true")
    served.start()
    assert served.wait_outcome("new") == "finished"


def test_without_file_events_it_polls_and_says_so_once(served: Served) -> None:
    """Where inotify cannot be had, files are found by looking, and the problem is told once."""
    with served.stderr.open("wb") as stderr:
        served.process = subprocess.Popen(
            [sys.executable, "-c", _BLIND, "--spool", str(served.root), "dispatch"],
            env=served.environment, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
        )  # fmt: skip
    served.until(lambda: "serves" in served.said(), "the dispatcher")
    for at in range(2):
        served.completes(f"blind-{at}", "true")
    served.begun("blind-cancel", "exec sleep 1000")
    served.cancels("blind-cancel")
    assert served.said().count("no file events") == 1
    assert "no file events" in served.state()["problems"][0]


def test_a_sleeping_dispatcher_uses_no_cpu(live: Served) -> None:
    """With nothing to do, or a job that just runs, the dispatcher sleeps: its CPU time stands still."""
    live.begun("sleeper", "exec sleep 1000")
    live.looked()
    pid = live.process.pid

    def ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    wait_for(lambda: live.state()["jobs"].keys() == {"sleeper"})
    before, begun = ticks(), time.monotonic()
    wait_for(lambda: time.monotonic() - begun > 1.5)
    assert ticks() - before <= 10  # a tenth of a second at most, of one and a half


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of one and a half megabytes, where that may be mounted."""
    at = tmp_path / "disk"
    at.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("only root may mount")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=1536k", "tmpfs", at], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("nothing can be mounted here")
    yield at
    subprocess.run(["umount", "-l", at], check=True)


def test_a_full_disk_stops_nothing_for_good(small_disk: Path, tmp_path: Path) -> None:
    """On a full disk what runs goes on, nothing starts, the dispatcher lives, and all goes on when there is room."""
    served = Served(small_disk / "spool")
    served.stderr = tmp_path / "stderr"
    _configure(served, 'disk_floor = "64K"\n')
    served.changes[LOOKS] = 300_000_000
    served.start()
    served.begun("runs", "until [ -e go ]; do sleep 0.05; done; exit 4", workdir=str(tmp_path))
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass
    (tmp_path / "go").touch()
    begun = time.monotonic()
    wait_for(lambda: time.monotonic() - begun > 1)
    assert served.lives(), served.said()[-2000:]
    filler.unlink()
    served.wait_done("runs")
    assert served.result("runs")["exit_code"] == 4  # type: ignore[index]
    served.completes("after", "true", workdir=str(tmp_path))
    served.close()
    assert [line["job"] for line in served.history()] == ["runs", "after"]


@pytest.mark.parametrize("first", ["by its path", "by a link"])
def test_a_spool_through_a_link_is_the_same_spool(served: Served, first: str) -> None:
    """A dispatcher that names the spool by another path is refused while one lives, and adopts and ends its runs."""
    link = served.root.parent / "link"
    link.symlink_to(served.root)
    with Served(link) as linked:
        one, other = (served, linked) if first == "by its path" else (linked, served)
        one.start()
        # Neither its parent nor its session nor its output says whose it is; the mark alone does.
        one.drop("left", "(setsid sleep 1000 >/dev/null 2>&1 & echo $!); echo up; exec sleep 1000", kill_grace="1s")
        escaped = pids_in(one.says("left", "up"))
        assert [alive(pid) for pid in escaped] == [True]
        assert other.run("--once") == 0
        one.kill()
        other.start()
        assert other.spool("--spool", str(other.root), "cancel", "left").returncode == 0
        assert other.wait_outcome("left") == "cancelled"
        assert [pid for pid in escaped if alive(pid)] == []
        other.wait_done("left")
        assert not marked(served.root) | marked(link)


def test_a_deleted_lock_starts_no_second_dispatcher_and_a_moved_spool_is_left(tmp_path: Path) -> None:
    """`info` and `doctor` say what became of `.lock`, a submission starts nobody, and the lock is made anew.

    When the spool's directory is moved away, the dispatcher leaves with one line and exit code 5, and its jobs go on.
    """
    with Served(tmp_path / "spool").start() as served:
        pid = served.process.pid
        wait_for((served.root / "state.json").exists)
        os.kill(pid, signal.SIGSTOP)  # so that it does not notice before the others look
        (served.root / ".lock").unlink()
        assert served.spool("submit", "--name", "long", "--", "sleep", "60").returncode == 0
        assert not (served.root / ".tmp" / "dispatcher.start").exists()
        for verb in ("info", "doctor"):
            assert re.search(rf"\bpid {pid}\b.* \.lock |\.lock .*\bpid {pid}\b", served.spool(verb).stdout), verb
        assert served.run("--once") == 0  # another one lives
        assert not (served.root / ".lock").exists()
        os.kill(pid, signal.SIGCONT)
        wait_for((served.root / "jobs" / "long" / "1" / "status").exists)
        wait_for(lambda: Spool(str(served.root)).service() is Service.SERVED, what="a new lock")
        assert json.loads((served.root / "state.json").read_text())["pid"] == pid
        said = len(served.said())
        os.rename(served.root, tmp_path / "moved")
        assert served.process.wait(PATIENCE_S) == 5
        served.process = None
        lines = served.said()[said:].splitlines()
        assert [str(served.root) in line for line in lines[-1:]] == [True]
        assert "Traceback" not in "".join(lines)
        os.rename(tmp_path / "moved", served.root)
        (served.root / "running" / "long.toml").unlink()
        assert served.run() == 0
        assert (served.root / "done" / "long.toml").exists()


@_BOTH
def test_nothing_that_spool_makes_is_writable_by_others_whatever_the_umask(tmp_path: Path, executor: str) -> None:
    """With umask 0 no file and no directory of a spool lets others write; a job keeps that umask for itself."""
    umask = os.umask(0)
    try:
        with Served(tmp_path / "spool", executor=executor) as served:
            hook(served, "finished", "echo told")
            submit = ("submit", "--executor", executor, "--name")
            served.spool(*submit, "good", "-c", "umask")
            served.spool(*submit, "fails", "--retry-max", "1", "-c", "exit 3")
            served.spool(*submit, "nothing", "--", "/nonexistent")
            served.spool(*submit, "own", "--stdout", str(tmp_path / "made" / "out"), "-c", "umask")
            served.spool(*submit, "many", "--array", "0-1", "--", "true")
            served.spool(*submit, "held", "--hold", "--", "true")
            served.spool("reserve", "create", "demo", "--gpus", "1", "--duration", "2h")
            said = served.spool("wait", "good", "fails", "nothing", "own", "many", "--timeout", "60s")
            assert said.returncode in (3, 127), said.stderr
            served.spool("pause")
            os.kill(json.loads((served.root / "state.json").read_text())["pid"], signal.SIGTERM)
            wait_for(lambda: not Spool(str(served.root)).dispatcher_lives())
            paths = [served.root, *served.root.rglob("*")]
            assert {"good/1/rc", "fails/2/status", "nothing/1/error"} <= {
                str(path.relative_to(served.root / "jobs")) for path in paths if "jobs/" in str(path)
            }
            loose = []
            for path in paths:
                with suppress(FileNotFoundError):  # what the listeners had staged is in its place by now
                    loose += [str(path)] if not path.is_symlink() and path.stat().st_mode & 0o022 else []
            assert loose == []
            assert (served.root / "jobs" / "good" / "1" / "log").read_text() == "0000\n"
            assert (tmp_path / "made" / "out").read_text() == "0000\n"
            assert (tmp_path / "made" / "out").stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(umask)


def test_a_dispatcher_waits_for_a_damaged_spool_to_be_mended(served: Served) -> None:
    """It says once which file is wrong and what to do, calls no spool new, and goes on by itself."""
    lock, queued, readme = served.root / ".lock", served.root / "queued", served.root / "README"
    lock.unlink(missing_ok=True)
    lock.mkdir()
    queued.rmdir()
    queued.touch()
    readme.unlink(missing_ok=True)
    assert served.run("--once") == 5
    assert f"spool: {queued}: " in served.said()
    served.begin()
    wait_for(
        lambda: f"{lock}: it is not a regular file; move what is in the way" in served.said() or not served.lives()
    )
    lock.rmdir()
    text = f"cannot serve {served.root}: {queued}: Not a directory; move what is in the way"
    wait_for(lambda: text in served.said() or not served.lives())
    assert not readme.exists()
    queued.unlink()
    queued.mkdir()
    served.completes("x", "true")
    assert served.said().count("cannot serve") == 2
    assert "created a new spool" not in served.said()


def test_a_run_keeps_the_defaults_that_it_began_with(served: Served) -> None:
    """They are in its metadir, so that a new dispatcher under another configuration knows them."""
    config = served.root / "config.toml"
    config.write_text('[defaults]\nretry = { max = 1 }\nenv = { WHICH = "old" }\n')
    served.start()
    gate = served.root.parent / "gate"
    os.mkfifo(gate)
    served.drop("runs", f'read x < "{gate}"; echo $WHICH; exit 3')
    served.wait_place("runs", "running")
    file = served.path("running", "runs").read_bytes()
    served.stop()
    config.write_text('[defaults]\nenv = { WHICH = "new" }\n')
    served.start()
    shown = json.loads(served.spool("show", "runs", "--json").stdout)
    assert shown["defaults"] == '[retry]\nmax = 1\n\n[env]\nWHICH = "old"\n'
    served.drop("waits", "echo $WHICH")
    assert served.wait_outcome("waits") == "finished"
    assert served.log("waits") == "new\n"
    gate.write_text("go\n")
    assert served.wait_outcome("runs") == "failed"
    assert served.result("runs")["again"] == "retry"  # as the defaults of its time have it
    gate.write_text("go\n")
    assert served.wait_outcome("runs", 2) == "failed"
    assert (served.log("runs"), served.log("runs", 2)) == ("old\n", "new\n")
    assert served.path("done", "runs").read_bytes() == file


def test_a_change_of_the_defaults_counts_for_who_waits(served: Served) -> None:
    """A job that waits is read with the new ones, and `plan`, `show` and `check` use them too."""
    config = served.root / "config.toml"
    config.write_text('[defaults]\nenv = { WHICH = "old" }\n')
    (served.root / "paused").touch()
    served.start()
    served.drop("waits", "echo $WHICH", signal="USR1@10s")
    error = served.root / "queued" / "waits.toml.error"
    served.until(error.exists, "the error")  # a warning needs a limit
    config.write_text('[defaults]\ntime_limit = "1m"\nenv = { WHICH = "new" }\n')
    served.until(lambda: not error.exists(), "the mended file")
    path = str(served.path("queued", "waits"))
    assert served.spool("check", path).returncode == 0
    assert 'time_limit = "1m"' in served.spool("show", "waits").stdout
    assert "waits" in served.spool("plan").stdout
    (served.root / "paused").unlink()
    assert served.wait_outcome("waits") == "finished"
    assert served.log("waits") == "new\n"


def test_the_outputs_of_an_arrays_tasks_come_one_after_the_other(shared: Served) -> None:
    """`run` shows each when the task has ended for good, `log` all of them in their order, and both its newest run."""
    script = "echo run $SPOOL_RUN; sleep 0.2; echo of $SPOOL_ARRAY_INDEX; test $SPOOL_ARRAY_INDEX$SPOOL_RUN != 11"
    done = shared.spool("run", "-n", "sweep", "--array", "0-2", "--retry-max", "1", "--cpus", "0", "-c", script)
    assert (done.returncode, done.stderr) == (0, "spool: job sweep\n")
    blocks = sorted(done.stdout.split("==> ")[1:])
    assert blocks == [f"sweep_{index} <==\nrun {run}\nof {index}\n" for index, run in ((0, 1), (1, 2), (2, 1))]
    for words in (("log", "sweep"), ("log", "-f", "sweep")):
        assert sorted(shared.spool(*words).stdout.split("==> ")[1:]) == blocks
    last = shared.spool("log", "sweep", "-n", "1").stdout
    assert last == "".join(f"==> sweep_{index} <==\nof {index}\n" for index in range(3))
    paths = shared.spool("log", "sweep", "--path").stdout.splitlines()
    assert paths == [f"{shared.root}/jobs/sweep_{index}/{run}/log" for index, run in ((0, 1), (1, 2), (2, 1))]
    shared.drop("sweep", "echo again", cpus=0, array="1-2%1")
    shared.until(lambda: shared.spool("log", "sweep").stdout.count("again") == 2, "the outputs of the second time")
    assert "sweep_0" not in shared.spool("log", "sweep").stdout


_VERBS = (("ls",), ("info",), ("--help",), ("submit", "--hold", "--", "true"), ("show", "x"), ("doctor",), ("no-verb",))


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_closed_standard_descriptor_is_as_good_as_dev_null(served: Served, closed: tuple[int, ...]) -> None:
    """Every verb does its work and exits as it does otherwise, with no traceback."""
    closing = " ".join(f"{number}>&-" for number in closed)
    lines = [f"{shlex.join([sys.executable, '-m', 'spool', *verb])} {closing}; echo $?" for verb in _VERBS]
    run = subprocess.run(
        ["sh", "-c", "\n".join(lines)],
        env=served.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    codes = [line for line in run.stdout.splitlines() if line.isdigit()]
    assert (codes[:5], codes[6:]) == (["0", "0", "0", "0", "3"], ["2"])  # what the doctor finds is the machine's
    assert "Traceback" not in run.stderr
    assert "lost sys.stderr" not in run.stderr
    assert 2 in closed or "no-verb" in run.stderr
    assert list((served.root / "held").glob("*.toml"))


SHOW = "umask; ulimit -S -n; ulimit -S -c; ulimit -S -s; nice; echo ${SPOOL_SERVICE-none}"
NICE = os.getpriority(os.PRIO_PROCESS, 0)  # of whoever runs the tests
LOGIN = ["0022", "1024", "0", "8192", str(NICE), "none"]
ODD = ["0002", "300", "16", "4096", str(min(NICE + 5, 19)), "none"]
ODD_SHELL = '''umask 002; ulimit -S -n 300; ulimit -S -c 16; ulimit -S -s 4096; exec nice -n 5 "$@"'''


def _oddly(served: Served, *words: str) -> None:
    """Run a command of the command line from a shell with another umask, other limits and another niceness."""
    program = ["sh", "-c", ODD_SHELL, "sh", sys.executable, "-m", "spool", *words]
    subprocess.run(program, env=served.environment, check=True, capture_output=True)


@pytest.mark.parametrize("changes", [{}, SHELL_ONLY], ids=["compiled", "sh"])
def test_a_job_has_what_its_submitter_had(served: Served, changes: dict[str, object]) -> None:
    """Its umask, soft limits and niceness, in both wrappers; a file that is dropped has those of a login.

    A dispatcher that is started by hand, in an odd shell, keeps its starter's from all of them.
    """
    served.changes |= changes
    served.start(prefix=("sh", "-c", 'umask 077; ulimit -S -n 200; ulimit -S -c 16; exec "$@"', "sh"))
    _oddly(served, "submit", "--name", "odd", "-c", SHOW)
    served.spool("submit", "--name", "usual", "-c", SHOW)
    served.drop("dropped", SHOW)
    served.wait_done("odd", "usual", "dropped")
    assert served.log("odd").split() == ODD
    assert served.log("usual").split() == LOGIN
    assert served.log("dropped").split() == LOGIN
    assert "\nlimits" not in (served.root / "done" / "usual.toml").read_text()


def test_defaults_can_state_them(served: Served) -> None:
    """The configuration decides for files that state nothing, such as dropped ones."""
    served.serves('[defaults]\numask = "007"\nnice = 1\nlimits = { nofile = 256 }\n')
    served.completes("dropped", SHOW)
    assert served.log("dropped").split() == ["0007", "256", "0", "8192", "1", "none"]
