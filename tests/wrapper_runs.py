"""Runs of the real wrapper under real shells, for tests."""

from __future__ import annotations

import atexit
import os
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from msgspec.structs import replace

from spool.core import layout
from spool.core.lifecycle import Liveness
from spool.core.model import Jid
from spool.executors import Launch, compiled
from spool.executors.local import LocalRun
from spool.executors.process import ProcessExecutor
from spool.formats.wrapper import Assignments, Surroundings, load, render
from spool.machine import identity
from support import PATIENCE_S, wait_for

COMPILED = "compiled"
SHELLS = {
    name: words
    for name, words in {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "ash"]}.items()
    if shutil.which(words[0])
}
SHELL, *_others = SHELLS
FIRST_WRAPPERS = (SHELL, COMPILED)
"""What carries out a `run.sh` in the core's tests: one shell, and the compiled program."""
OTHER_WRAPPERS = tuple(_others)
"""The other shells of this machine."""


@cache
def compiled_wrapper() -> str | None:
    """Copy the installed wrapper, or build that of this source once; None where there is no compiler.

    A source that does not compile fails the test. With `WRAPPER_LIBC` in the environment it has the C library, as on
    processors that the source does not know.
    """
    folder = tempfile.mkdtemp(prefix="spool-compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.chmod(folder, 0o755)  # for a user who has nothing
    if (installed := compiled.find().path) and not os.environ.get("WRAPPER_LIBC"):
        return shutil.copy2(installed, folder)
    try:
        return compiled.build(folder, alone=False if os.environ.get("WRAPPER_LIBC") else None).path
    except compiled.NotBuiltError as error:
        if not has_compiler():
            return None
        pytest.fail(f"the compiled wrapper cannot be built: {error}")


def has_compiler() -> bool:
    """Whether there is a compiler, and a source to compile."""
    words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    return shutil.which(words[0]) is not None and os.path.exists(compiled.SOURCE)


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C compiler, or nothing to compile")


def installed_wrapper() -> str:
    """Return the compiled wrapper beside its source; skip the test where there is none, fail it for a broken one."""
    found = compiled.find()
    if found.broken:
        pytest.fail(found.why)
    if found.path is None:
        pytest.skip(found.why)
    return found.path


def words_of(wrapper: str) -> list[str]:
    """Return how to start a script with one of `WRAPPERS`; skip the test if it is not here."""
    if wrapper == COMPILED and (program := compiled_wrapper()) is not None:
        return [program, "run"]
    if wrapper not in SHELLS:
        pytest.skip(f"no {wrapper} on this machine")
    return SHELLS[wrapper]


NOBODY = 1_000_000 + os.getpid()  # a user who has no other processes, not even those of another run of the tests


def become_poor(*, later: bool = False) -> None:
    """Make this process one that can start no other: root has no limit on its processes, so it becomes somebody."""
    if os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if not later:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))


@contextmanager
def poor_directory() -> Iterator[Path]:
    """Give a directory that such a user can reach."""
    with TemporaryDirectory(prefix="spool-poor-") as path:
        os.chmod(path, 0o755)
        yield Path(path)


def surroundings() -> Surroundings:
    """Return those of this machine."""
    return ProcessExecutor().surroundings()


def rendered(root: Path, assignments: Assignments) -> bytes:
    """Return the script of a run in the spool *root*, which has the constant then."""
    path = constant_of(root)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(load().constant)
    return render(assignments, str(path))


def constant_of(root: Path) -> Path:
    """Return the file with the constant of the spool *root*."""
    return root / layout.WRAPPERS / load().name


@dataclass
class Run:
    """One metadir with its script."""

    metadir: Path
    shell: list[str]
    process: Any = None

    def text(self, name: str) -> str | None:
        """Return a record, or None if it is not there."""
        try:
            return (self.metadir / name).read_text()
        except FileNotFoundError:
            return None

    @property
    def rc(self) -> int | None:
        """The exit code that is on record."""
        text = self.text("rc")
        return int(text) if text is not None and text.endswith("\n") else None

    @property
    def is_compiled(self) -> bool:
        """Whether it is run by the compiled wrapper, and not by a shell."""
        return self.shell[0] == compiled_wrapper()

    @property
    def jid(self) -> Jid:
        """The identity that is on record."""
        pid, ticks, boot, namespace, host = (self.text("jid") or "").split(" ")
        return Jid(int(pid), int(ticks), boot, namespace, host.removesuffix("\n"))

    @property
    def log(self) -> str | None:
        """What it has written."""
        return self.text("log")

    def start_poor(self, *, later: bool = False) -> Run:
        """Start the wrapper as a user who can start no other process; *later*: the job itself takes care of that."""
        if os.getuid() == 0:
            os.chown(self.metadir, NOBODY, NOBODY)
        return self.start(preexec_fn=lambda: become_poor(later=later))

    def finish_refused(self) -> int:
        """Wait for the end of a wrapper that can start nothing; bash is kept from trying again for 15s."""
        wait_for(lambda: self.text("jid"), what="a wrapper")
        wait_for(self._hurried, what="the end of the wrapper")
        return self.finish()

    def _hurried(self) -> bool:
        if self.process.poll() is not None:
            return True
        with suppress(OSError):
            if "nanosleep" in Path(f"/proc/{self.process.pid}/wchan").read_text():
                self.kill(signal.SIGUSR2)
        return False

    def start(self, *prefix: str, **options: Any) -> Run:
        """Start the wrapper in a session of its own; *prefix* is put before the shell."""
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | options
        argv = [*prefix, *self.shell, str(self.metadir / "run.sh")]
        self.process = subprocess.Popen(argv, start_new_session=True, **options)
        return self

    def finish(self) -> int:
        """Wait for the wrapper's end and return how it ended."""
        return self.process.wait(PATIENCE_S)

    def run(self, *prefix: str, **options: Any) -> int:
        """Start the wrapper and wait for its end."""
        return self.start(*prefix, **options).finish()

    def kill(self, number: int) -> None:
        """Send a signal to the wrapper alone."""
        self.process.send_signal(number)

    def says(self, text: str) -> None:
        """Wait until the log holds *text*."""
        wait_for(lambda: text in (self.log or ""), what=f"{text!r} in the log")

    def alive(self) -> bool:
        """Tell whether the wrapper on record is."""
        return identity.liveness(self.jid) is Liveness.ALIVE


@dataclass
class Runs:
    """Makes runs below one directory, and leaves no process of theirs behind."""

    root: Path
    shell: list[str]
    made: list[Run]

    def make(self, command: str | tuple[str, ...], around: Surroundings | None = None, **values: Any) -> Run:
        """Write the script of a run with that command."""
        metadir = self.root / f"run {len(self.made)} $x 'y'"  # a path that wants quoting, always
        metadir.mkdir()
        run = Run(metadir, self.shell)
        written = Assignments(str(metadir), command, around or surroundings(), **values)
        (metadir / "run.sh").write_bytes(rendered(self.root, written))
        self.made.append(run)
        return run

    def inherit(self, command: str | tuple[str, ...], **values: Any) -> Run:
        """Write the script of a run whose stdin and outputs are those of its wrapper."""
        return self.make(command, replace(surroundings(), stdin=None, inherit_outputs=True), **values)


@contextmanager
def runs_below(root: Path, shell: list[str]) -> Iterator[Runs]:
    """Give runs, and kill what is left of them."""
    runs = Runs(root, shell, [])
    try:
        yield runs
    finally:
        for run in runs.made:
            if run.process is not None:
                kill_session(run.process.pid)
                run.process.wait(PATIENCE_S)


def kill_session(session: int) -> None:
    """Kill every process of the session; the caller is not one of them."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            stat = identity.read_stat(int(entry))
            if stat is not None and stat.session == session and not stat.dead:
                with suppress(ProcessLookupError):  # its parent has just reaped it
                    os.kill(stat.pid, signal.SIGKILL)


class ByShell(ProcessExecutor):
    """Without the compiled wrapper."""

    def program(self) -> None:
        """Return that there is none."""


class Shop:
    """An executor, and the metadirs that it starts wrappers for; *kind* is that of the executor."""

    def __init__(self, root: Path, kind: type[ProcessExecutor] = ProcessExecutor) -> None:
        self.root = root
        self.executor = kind()
        self.made = 0

    def __enter__(self) -> Shop:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.close()

    def launch(self, command: str, name: str = "it's a run $x", **values: Any) -> Launch:
        """Write the script of a run."""
        self.made += 1
        metadir = self.root / f"{name} {self.made}"
        metadir.mkdir()
        text = rendered(self.root, Assignments(str(metadir), command, self.executor.surroundings(), **values))
        (metadir / "run.sh").write_bytes(text)
        return Launch("job", self.made, str(self.root), str(metadir), str(metadir / "run.sh"))

    def finish(self, started: LocalRun) -> int:
        """Wait for the wrapper's end; return its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1])


def record_of(launch: Launch, name: str) -> bytes:
    """Return what one record of a started run says."""
    return (Path(launch.metadir) / name).read_bytes()
