"""The floor: the smallest loop that leaves spool's files behind in spool's order, to see how far from it spool is.

For each job it reads the file, makes a metadir with three files by one rename, moves the file to `running/`, appends to
the journal, starts a wrapper, waits for it, reads `rc`, writes `result.toml` by a rename, appends to the history, moves
the file to `done/` and appends to the journal. The journal and the history are synced in groups, in a thread. Nothing
is checked, planned, limited or found again after a crash.

Also a program: floor.py ROOT SLOTS [LAUNCHER]. SIGUSR1 says that there are new files; SIGTERM ends it. LAUNCHER is the
compiled `floor.c`; without one the wrapper is a shell's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from spoolbench import drop
from spoolbench.tools import HERE, Scratch, timed, until

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_SIGNALS = {signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM}
_GROUP_S = 0.04  # appended lines are on the disk within this time

_WRAPPER = """
exec 2> /dev/null < /dev/null
set -C
echo "$$ 0 boot namespace host" > "$metadir/jid" || exit 73
set +C
(cd / && exec "$@") >> "$metadir/log" 2>&1 &
echo running > "$metadir/status"
wait "$!"
code=$?
echo finished 1<> "$metadir/status"
echo "$code" > "$metadir/rc"
"""


class FloorEngine:
    """The floor as something that can be measured: jobs are dropped as for spool, and announced by a signal."""

    opts: ClassVar[dict[str, dict[str, Any]]] = {}
    groups = frozenset({"gap", "drain", "calls"})
    ours = True

    def __init__(self, scratch: Scratch, name: str, launcher: str | None) -> None:
        self.name = name
        self.scratch = scratch
        self.launcher = launcher
        self.process: subprocess.Popen[bytes] | None = None
        self._serial = 0
        self._root = ""

    def start(self, slots: int) -> None:
        """Serve an empty directory."""
        self._serial += 1
        self._root = f"{self.scratch.path}/{self.name.replace(', ', '-')}{self._serial}"
        words = [sys.executable, "-m", "spoolbench.floor", self._root, str(slots)]
        self.process = subprocess.Popen(
            [*words, *([self.launcher] if self.launcher else [])],
            cwd=HERE,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.scratch.trash,
        )
        until(lambda: os.path.exists(f"{self._root}/ready"), 30, "the floor's loop")

    def stop(self) -> None:
        """End the loop."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)
            self.process = None

    def submit(self, command: Sequence[str]) -> list[str]:
        """Return the command that drops one job file."""
        return self.bulk(1, command)

    def bulk(self, count: int, command: Sequence[str]) -> list[str]:
        """Return the command that drops *count* job files."""
        self._serial += 1
        return [sys.executable, drop.__file__, self._root, str(count), f"floor{self._serial}-", *command]

    def run(self, argv: Sequence[str]) -> tuple[int, float]:
        """Run a command, and have the loop look at what it has dropped."""
        found = timed(argv, os.environ, self.scratch.trash)
        if self.process is not None:
            self.process.send_signal(signal.SIGUSR1)
        return found

    def lists(self) -> dict[str, list[str]]:
        """Return nothing: it lists nothing."""
        return {}

    def pids(self) -> list[int]:
        """Return the loop."""
        return [self.process.pid] if self.process is not None else []


def floors(scratch: Scratch) -> list[FloorEngine]:
    """Return the loop with either wrapper."""
    return [FloorEngine(scratch, "floor, sh", None), FloorEngine(scratch, "floor, compiled", scratch.compiled("floor"))]


class _Loop:
    """The program."""

    def __init__(self, root: str, slots: int, launcher: str | None) -> None:
        self.root = root
        self.slots = slots
        for name in ("", "queued", "running", "done", "jobs", ".tmp"):
            os.mkdir(f"{root}/{name}")
        self.queue: deque[str] = deque()
        self.known: set[str] = set()
        self.live: dict[int, str] = {}
        self.asked: deque[str] = deque()  # the launcher has these, and has not said their pids
        self.ready: tuple[str, str, list[str]] | None = None  # the next job, its metadir in .tmp/, its command
        self.serial = 0
        self.environment = dict(os.environ)
        self.server = self._serve(launcher) if launcher else None
        self.journal = os.open(f"{root}/.journal", _APPEND, 0o600)
        self.history = os.open(f"{root}/history.jsonl", _APPEND, 0o600)
        self.unsynced = threading.Event()
        threading.Thread(target=self._sync, daemon=True).start()

    def run(self) -> None:
        """Serve until SIGTERM."""
        _create(f"{self.root}/ready", b"")
        while (number := signal.sigwait(_SIGNALS)) != signal.SIGTERM:
            if number == signal.SIGUSR1:
                self._look()
            ended = self._reap()
            self._start()
            self._finish(ended)
            if self.queue and self.ready is None:
                self.ready = self._prepared(self.queue[0])

    def _serve(self, launcher: str) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            os.posix_spawn(launcher, [launcher, str(theirs.fileno())], {}, setsigmask=[])
        return ours

    def _sync(self) -> None:
        while self.unsynced.wait():
            time.sleep(_GROUP_S)
            self.unsynced.clear()
            os.fdatasync(self.journal)
            os.fdatasync(self.history)

    def _look(self) -> None:
        new = {file.removesuffix(".toml") for file in os.listdir(f"{self.root}/queued")} - self.known
        self.known |= new
        self.queue.extend(sorted(new))

    def _staged(self) -> str:
        self.serial += 1
        return f"{self.root}/.tmp/{self.serial}"

    def _prepared(self, name: str) -> tuple[str, str, list[str]]:
        """Put together what can be before there is a free slot."""
        text, staged = _read(f"{self.root}/queued/{name}.toml"), self._staged()
        command = json.loads(text.partition(b"\n")[0].partition(b"=")[2])
        words = " ".join(f"'{word}'" for word in command)
        os.mkdir(f"{self.root}/jobs/{name}")
        os.mkdir(staged)
        _create(f"{staged}/job.toml", text)
        script = f"metadir='{self.root}/jobs/{name}/1'\nset -- {words}\n{_WRAPPER}"
        _create(f"{staged}/run.sh", script.encode(), 0o700)
        return name, staged, command

    def _start(self) -> None:
        begun, lines = [], b""
        while self.queue and len(self.live) + len(self.asked) + len(begun) < self.slots:
            name, staged, command = self.ready or self._prepared(self.queue[0])
            self.queue.popleft()
            self.ready = None
            grant = b'job = "%s"\nrun = 1\nattempt = 1\ncpus = 1\nexecutor = "process"\ngranted_at_ns = %d\n'
            _create(f"{staged}/grant.toml", grant % (name.encode(), time.time_ns()))
            os.rename(staged, f"{self.root}/jobs/{name}/1")
            os.rename(f"{self.root}/queued/{name}.toml", f"{self.root}/running/{name}.toml")
            lines += b'{"started":"%s","run":1,"at_ns":%d}\n' % (name.encode(), time.time_ns())
            begun.append((name, command))
        if begun:
            self._append(self.journal, lines)
        for name, command in begun:
            self._launch(name, f"{self.root}/jobs/{name}/1", command)

    def _launch(self, name: str, metadir: str, command: list[str]) -> None:
        environment = self.environment | {"SPOOL_JOB": name, "SPOOL_METADIR": metadir}
        if self.server is None:
            words = ["/bin/sh", f"{metadir}/run.sh"]
            self.live[os.posix_spawn("/bin/sh", words, environment, setsid=True, setsigmask=[])] = name
            return
        given = [metadir, str(len(command)), *command, *(f"{key}={value}" for key, value in environment.items())]
        self.server.send("\0".join(given).encode() + b"\0")
        self.asked.append(name)

    def _reap(self) -> list[str]:
        ended = []
        while self.live or self.asked:
            try:
                pid = os.wait4(-1, os.WNOHANG)[0]
            except ChildProcessError:
                break
            if not pid:
                break
            while pid not in self.live:
                assert self.server is not None
                self.live[int.from_bytes(self.server.recv(4), sys.byteorder)] = self.asked.popleft()
            ended.append(self.live.pop(pid))
        return ended

    def _finish(self, ended: list[str]) -> None:
        if not ended:
            return
        history = b""
        for name in ended:
            code = int(_read(f"{self.root}/jobs/{name}/1/rc"))
            staged, job, now = self._staged(), name.encode(), time.time_ns()
            result = b'job = "%s"\nrun = 1\noutcome = "finished"\nexit_code = %d\nended_at_ns = %d\n'
            _create(staged, result % (job, code, now))
            os.rename(staged, f"{self.root}/jobs/{name}/1/result.toml")
            line = b'{"job":"%s","run":1,"attempt":1,"outcome":"finished","exit_code":%d,"ended_at_ns":%d}\n'
            history += line % (job, code, now)
        self._append(self.history, history)
        for name in ended:
            os.rename(f"{self.root}/running/{name}.toml", f"{self.root}/done/{name}.toml")
        self._append(self.journal, b"".join(b'{"over":"%s"}\n' % name.encode() for name in ended))

    def _append(self, file: int, lines: bytes) -> None:
        os.write(file, lines)
        self.unsynced.set()


def _create(path: str, data: bytes, mode: int = 0o600) -> None:
    fd = os.open(path, _CREATE, mode)
    os.write(fd, data)
    os.close(fd)


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    data = os.read(fd, 1 << 16)
    os.close(fd)
    return data


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _Loop(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None).run()
