"""Starting a dispatcher behind a user's back: when, which, and when not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from spool.client import autostart
from spool.formats.state import parse_state
from spool.store.lock import dispatcher_lives
from support import wait_for


def stop(root: Path) -> None:
    """End the dispatcher of a spool."""
    state = wait_for(lambda: (root / "state.json").exists() and parse_state((root / "state.json").read_bytes()))
    assert state
    os.kill(state.pid, signal.SIGTERM)
    wait_for(lambda: not dispatcher_lives(str(root / ".lock")))


def test_a_hundred_submissions_start_one_dispatcher(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one that was started a moment ago is on its way to the lock, no other is started."""
    started = []
    start = autostart.start
    monkeypatch.setattr(autostart, "start", lambda root, idle: started.append(start(root, idle)))
    for _ in range(100):
        assert autostart.ensure(str(spool_root)) is None
    assert len(started) == 1
    wait_for(lambda: dispatcher_lives(str(spool_root / ".lock")))
    assert autostart.ensure(str(spool_root)) is None
    assert len(started) == 1
    stop(spool_root)


def test_autostart_off_says_how_to_start_one(spool_root: Path) -> None:
    """With `autostart = false` nothing is started, and the line for the user has the command."""
    (spool_root / "config.toml").write_text("autostart = false\n")
    told = autostart.ensure(str(spool_root))
    assert told is not None
    assert f"spool --spool {spool_root} dispatch" in told
    assert not dispatcher_lives(str(spool_root / ".lock"))


def test_a_broken_configuration_does_not_keep_jobs_from_running(spool_root: Path) -> None:
    """What the configuration says is not known, so the default is in force; the dispatcher tells what is wrong."""
    (spool_root / "config.toml").write_text("autostart = maybe\n")
    assert autostart.ensure(str(spool_root)) is None
    wait_for(lambda: dispatcher_lives(str(spool_root / ".lock")))
    assert dispatcher_lives(str(spool_root / ".lock"))
    stop(spool_root)


def test_a_dispatcher_takes_no_module_of_the_directory_it_is_started_from(
    spool_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own `logging.py` or `click.py` in the current directory is none of our business."""
    for name in ("logging", "click", "msgspec", "spool"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    monkeypatch.chdir(tmp_path)
    assert autostart.ensure(str(spool_root)) is None
    wait_for(lambda: dispatcher_lives(str(spool_root / ".lock")))
    stop(spool_root)


def test_a_dispatcher_in_the_background_inherits_nothing(spool_root: Path, tmp_path: Path) -> None:
    """Not its starter's descriptors, directory, umask, limits, niceness, CPUs, and ignored or blocked signals."""
    program = (
        "import os, resource, signal, sys; from spool.client import autostart\n"
        "os.dup2(9, 150); resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))\n"
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); print(autostart.start(sys.argv[1]))"
    )
    shell = """exec 9> lock; flock -n 9; trap '' HUP QUIT; umask 077; ulimit -S -n 200; export OLDPWD=/tmp
nice -n 5 ionice -c 3 "$@" < /dev/null"""
    words = ["sh", "-c", shell, "sh", sys.executable, "-c", program, str(spool_root)]
    pid = int(subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True).stdout)
    subprocess.run(["flock", "-n", tmp_path / "lock", "true"], check=True)
    wait_for(lambda: dispatcher_lives(str(spool_root / ".lock")))
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    environment = (process / "environ").read_bytes().split(b"\0")
    assert os.readlink(process / "cwd") == "/"
    assert status["Umask"].strip() == "0022"
    assert int(status["SigIgn"], 16) & (1 << signal.SIGQUIT - 1 | 1 << signal.SIGHUP - 1) == 0
    assert int(status["SigBlk"], 16) >> signal.SIGUSR2 - 1 & 1 == 0
    assert b"SPOOL_SERVICE=1" in environment
    assert not [entry for entry in environment if entry.startswith((b"OLDPWD=", b"PWD="))]
    assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)
    assert psutil.Process(pid).ionice().ioclass != psutil.IOPRIO_CLASS_IDLE
    assert os.getpriority(os.PRIO_PROCESS, pid) == (0 if os.geteuid() == 0 else 5)
    stop(spool_root)


@pytest.mark.parametrize(
    ("said", "serves"),
    [
        ("LANG=C SPOOL_DIR={root}/spool", True),
        ('"SPOOL_DIR={root}/spool" LANG=C', True),
        ("SPOOL_DIR={root}/link", True),
        ("SPOOL_DIR={root}/another", False),
        ("", False),
        (None, False),
    ],
)
def test_the_unit_serves_the_spool_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, serves: bool
) -> None:
    """By whatever path it names it; else, or where systemd does not answer, the usual spool."""
    (tmp_path / "link").symlink_to(tmp_path / "spool")
    (tmp_path / "systemd/user").mkdir(parents=True)
    (tmp_path / "systemd/user/spool.service").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(os.path, "isdir", lambda _: True)  # systemd runs here
    shell = "exit 1" if said is None else f"printf %s '{said.format(root=tmp_path)}'"
    (tmp_path / "systemctl").write_text(f"#!/bin/sh\n{shell}\n")
    (tmp_path / "systemctl").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert (autostart.unit_for(f"{tmp_path}/spool") == "spool.service") is serves
    assert (autostart.unit_for(os.path.expanduser("~/.spool")) is not None) is (not said)


def test_a_dispatcher_searches_nothing_where_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty or a relative entry of a search path means the current directory."""
    for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, ":/usr/bin::.:bin:/bin:")
        entries = autostart.environment()[name].split(":")
        assert entries[-2:] == ["/usr/bin", "/bin"]
        assert all(entry.startswith("/") for entry in entries)
