"""Starting a dispatcher in the background, for commands that submit or release jobs.

If spool's systemd unit is installed for the user, systemd starts it and keeps it running; otherwise it is a process in
its own session that outlives the terminal and exits after ten idle minutes. Imports almost nothing.
"""

from __future__ import annotations

import os
import sys
import time

from spool.core import layout
from spool.core.layout import SERVICE, without_here
from spool.store.disk import Disk, owner_of, read_file
from spool.store.glance import config_if
from spool.store.lock import dispatcher_lives

IDLE_EXIT = "10m"  # the configuration's default
UNIT = "spool.service"
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK  # fail on a FIFO, do not wait
_OF_HERE = ("PWD", "OLDPWD")
_STARTING = f"{layout.STAGING}/dispatcher.start"  # the dispatcher started last, until it holds the lock
_PATIENCE_S = 5.0
_UNIT_PLACES = ("{config}/systemd/user", "/etc/systemd/user", "/usr/local/lib/systemd/user", "/usr/lib/systemd/user")


def ensure(root: str) -> str | None:
    """Make sure that a dispatcher serves the spool *root*. Return None, or a line for the user if none will.

    Does not wait for it: the submission is on disk, and the next dispatcher finds it.
    """
    if dispatcher_lives(f"{root}/{layout.LOCK}") or is_starting(root):
        return None
    owner = owner_of(root)
    if owner is not None and owner != os.geteuid():  # it would run the jobs of that user as this one
        from spool.store.ownership import name_of

        return f"no dispatcher is known to be running; {name_of(owner)}, whose spool it is, can start one"
    by_hand = f"run {_by_hand(root)}"
    wanted, idle_exit = _wishes(root)
    if not wanted:
        return f"no dispatcher is running, and autostart is off: {by_hand}"
    unit = unit_for(root)
    try:
        if unit is not None and _systemctl("--no-block", "--quiet", "start", unit) is not None:
            return None
        start(root, idle_exit)
    except OSError as error:
        return f"no dispatcher is running, and starting one failed ({error.strerror or error}): {by_hand}"
    return None


def outlook(root: str) -> str:
    """Return that no dispatcher is running, and how :func:`ensure` would start the next one now."""
    if is_starting(root):
        return "starting"
    by_hand, owner = _by_hand(root), owner_of(root)
    if owner not in (None, os.geteuid()):
        return f"not running: no job starts until its owner, uid {owner}, starts one"
    if not _wishes(root)[0]:
        return f"not running, and autostart is off: no job starts until you run {by_hand}"
    unit = unit_for(root)
    by = f" by systemd ({unit})" if unit is not None else ""
    return f"not running: the next submission starts one{by}, or {by_hand}"


def start(root: str, idle_exit: str = IDLE_EXIT) -> int:
    """Start a dispatcher in its own session, with messages in `dispatcher.log`, and return its pid.

    Raises OSError, and SpoolUnusable for the spool of another user.
    """
    if owner_of(root) != os.geteuid():
        from spool.store.ownership import check_owner

        check_owner(root)
    import resource  # here, because most submissions start none
    import signal

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    ours = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2]
    for fd in ours:
        if fd >= most:  # from before the limit was lowered: the C library refuses to close it in the child
            os.set_inheritable(fd, False)
    log = f"{root}/{layout.LOG}"
    pid = os.posix_spawn(
        sys.executable,
        command(root, "--idle-exit", idle_exit),
        environment(),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, _APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_CLOSE, fd) for fd in ours if fd < most),
        ],
        setsid=True,
        setsigmask=(),
        setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
    )
    Disk(f"{root}/{layout.STAGING}").put(f"{root}/{_STARTING}", f"{pid}\n".encode())
    return pid


def command(root: str, *words: str) -> list[str]:
    """Return the command for a dispatcher of the spool *root*. `-P`: do not import from the current directory."""
    return [sys.executable, "-P", "-m", "spool", "--spool", root, "dispatch", *words]


def environment() -> dict[str, str]:
    """Return a dispatcher's environment: this process's, without the marks of a job around it, or what means here."""
    own = without_here(os.environ)
    found = {key: value for key, value in own.items() if not key.startswith("SPOOL_") and key not in _OF_HERE}
    found[SERVICE] = "1"
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.basename(home) not in ("site-packages", "dist-packages"):  # not installed, such as a working copy
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (home, found.get("PYTHONPATH"))))
    return found


def is_starting(root: str) -> bool:
    """Whether a dispatcher was started moments ago and is alive: a loop of submissions must not start more."""
    path = f"{root}/{_STARTING}"
    try:
        if not -1 < time.time() - os.stat(path).st_mtime < _PATIENCE_S:
            return False
        pid = int(read_file(path) or b"")
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, ValueError, IndexError):
        return False


def _wishes(root: str) -> tuple[bool, str]:
    """Return from the configuration whether to start dispatchers, and their idle time before exit."""
    said = config_if(root, b"autostart", b"idle_exit")
    if said is None:  # the dispatcher reports an invalid configuration
        return True, IDLE_EXIT
    return said.autostart, "0s" if said.idle_exit_ns is None else f"{said.idle_exit_ns}ns"


def _by_hand(root: str) -> str:
    is_usual = os.path.realpath(root) == os.path.realpath(_usual_root())
    return "`spool dispatch`" if is_usual else f"`spool --spool {root} dispatch`"


def _usual_root() -> str:
    return os.path.abspath(os.path.expanduser("~/.spool"))


def unit_for(root: str) -> str | None:
    """Return the user's systemd unit that serves the spool *root*, None if there is none, or no systemd."""
    if not os.path.isdir(f"/run/user/{os.getuid()}/systemd"):
        return None
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    if not any(os.path.exists(f"{place.format(config=config)}/{UNIT}") for place in _UNIT_PLACES):
        return None
    import shlex  # imported here, because most submissions start no dispatcher

    stated = shlex.split(_systemctl("show", "--property=Environment", "--value", UNIT) or "")
    served = next((word.removeprefix("SPOOL_DIR=") for word in stated if word.startswith("SPOOL_DIR=")), _usual_root())
    return UNIT if os.path.realpath(root) == os.path.realpath(served) else None


def _systemctl(*words: str) -> str | None:
    """Return what the user's service manager answers in a while; None if it does not do what it is told."""
    import subprocess  # imported here, because most submissions start none

    command, null, own = ["systemctl", "--user", *words], subprocess.DEVNULL, without_here(os.environ)
    try:
        return subprocess.check_output(command, env=own, stdin=null, stderr=null, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError):
        return None
