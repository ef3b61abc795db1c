"""A spool with a dispatcher process, which a test treats as users do: by files, signals and commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

from spool.core import layout
from spool.formats import jobfile

PATIENCE_S = 120.0
"""How long anything may take that a test waits for: no claim about speed, it only ends a test that would never end.

So it is long enough for a machine with twenty processes to a processor. `pytest --timeout` is longer still.
"""

T = TypeVar("T")
_serial = count(1)


def wait_for(condition: Callable[[], T], timeout: float = PATIENCE_S, what: str = "") -> T:
    """Return the first true value of *condition*, asked again and again; fail after pauses of *timeout* seconds in all.

    Only the pauses count, as long as they were meant to be: a machine that stood still for half a minute is no reason
    to fail.
    """
    pause, left = 0.001, timeout
    while True:
        value = condition()
        if value:
            return value
        if left <= 0:
            raise AssertionError(
                f"waited {timeout}s, and there was not {what or getattr(condition, '__name__', condition)}"
            )
        time.sleep(pause)
        left -= pause
        pause = min(pause * 1.5, 0.05)


def make_spool(root: Path) -> Path:
    """Make an empty spool at *root* by hand, as docs/FORMAT.md describes it, and return its path."""
    root.mkdir(mode=0o700, parents=True)
    for name in layout.DIRECTORIES:
        (root / name).mkdir(mode=0o700)
    return root


class ServedSpool:
    """One spool, and the dispatcher that serves it, or does not at the moment.

    Used as a context manager, it ends the dispatcher, and fails if that was not well.
    """

    _program: Sequence[str] = ("-m", "spool")

    def __init__(self, root: Path, environment: Mapping[str, str] | None = None, executor: str | None = None) -> None:
        """Make the spool if there is none. *executor* runs the jobs that do not name another.

        *environment* has further variables for the dispatcher and the commands.
        """
        self.root = root
        self.executor = executor
        self.patience = PATIENCE_S
        if not root.exists():
            make_spool(root)
        self.environment = {**os.environ, "SPOOL_DIR": str(root), **(environment or {})}
        self.stderr = root.parent / f"{root.name}.stderr"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Serve a test."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave no dispatcher behind; fail if it was not well, unless the test has failed already."""
        try:
            if kind is None:
                self.close()
        finally:
            if self.process is not None:
                self.process.kill()
                self.process.wait()
            self.end_runs()

    # The dispatcher.

    def start(self, *arguments: str, prefix: Sequence[str] = ()) -> Self:
        """Start a dispatcher and wait until it serves. *prefix* are words before its command."""
        said = self.said().count("dispatcher serves")
        process = self.begin(*arguments, prefix=prefix)
        wait_for(
            lambda: self.said().count("dispatcher serves") > said or process.poll() is not None, what="a dispatcher"
        )
        return self

    def begin(self, *arguments: str, prefix: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start a dispatcher and do not wait for it."""
        assert self.process is None
        with self.stderr.open("ab") as stderr:
            self.process = subprocess.Popen(
                [*prefix, *self._command(arguments)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
            )
        return self.process

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, *self._program, "--spool", str(self.root), "dispatch", *arguments]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Tell the dispatcher to leave and return its exit code; its jobs go on."""
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(number)
        return process.wait(PATIENCE_S)

    def kill(self) -> None:
        """Kill the dispatcher: it can tidy nothing up."""
        self.stop(signal.SIGKILL)

    def lives(self) -> bool:
        """Whether the dispatcher that was started is still there."""
        return self.process is not None and self.process.poll() is None

    def said(self) -> str:
        """Return all that dispatchers of this spool have logged."""
        return self.stderr.read_text(errors="replace") if self.stderr.exists() else ""

    def spool(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command of the command line to its end."""
        more: dict[str, Any] = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60} | options
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [sys.executable, "-m", "spool", *arguments], check=False, **more
        )
        return done

    # Job files.

    def path(self, place: str, name: str) -> Path:
        """Return where the file of job *name* lies in *place*."""
        return self.root / place / f"{name}.toml"

    def text(self, command: str | Sequence[str], **keys: Any) -> bytes:
        """Return a job file; it runs in the spool's parent unless it says otherwise."""
        keys = {"workdir": str(self.root.parent), "executor": self.executor} | keys
        return jobfile.dump({"command": command} | {key: value for key, value in keys.items() if value is not None})

    def drop(self, name: str, command: str | Sequence[str] | bytes, *, place: str = "queued", **keys: Any) -> Path:
        """Put a whole job file into *place* at once, as `mv` from `.tmp/` does."""
        data = command if isinstance(command, bytes) else self.text(command, **keys)
        staged = self.root / ".tmp" / f"test-{next(_serial)}"
        staged.write_bytes(data)
        target = self.path(place, name)
        staged.rename(target)
        return target

    # What became of them.

    def places(self, name: str) -> list[str]:
        """Return the state directories in which the job has a file."""
        return [place for place in layout.PLACES if os.path.lexists(self.path(place, name))]

    def runs(self, name: str) -> list[int]:
        """Return the numbers of the job's metadirs."""
        try:
            return sorted(map(int, os.listdir(self.root / "jobs" / name)))
        except FileNotFoundError:  # it may be removed at any moment
            return []

    def record(self, name: str, record: str, run: int = 1) -> str | None:
        """Return a record of a run, or None."""
        try:
            return (self.root / "jobs" / name / str(run) / record).read_text(errors="surrogateescape")
        except FileNotFoundError:
            return None

    def log(self, name: str, run: int = 1) -> str:
        """Return what a run has written so far."""
        return self.record(name, "log", run) or ""

    def result(self, name: str, run: int = 1) -> dict[str, Any] | None:
        """Return how a run ended, None if it has not."""
        text = self.record(name, "result.toml", run)
        return tomllib.loads(text) if text is not None else None

    def outcome(self, name: str, run: int = 1) -> str | None:
        """Return the outcome of a run."""
        result = self.result(name, run)
        return result["outcome"] if result else None

    # Waiting.

    def says(self, name: str, text: str = "", run: int = 1) -> str:
        """Wait until a run has written *text*, and return all that it wrote."""
        return self.until(lambda: self.log(name, run) if text in self.log(name, run) else "", f"{text!r} of {name}")

    def wait_done(self, *names: str) -> dict[str, Any] | None:
        """Wait until the jobs lie in `done/` and nowhere else; return how the last run of the first one ended."""
        for name in names:
            self.wait_place(name, "done")
        self.until(lambda: self.runs(names[0]), f"the records of {names[0]}")  # who cancels a job moves its file first
        return self.result(names[0], self.runs(names[0])[-1])

    def wait_place(self, name: str, place: str) -> None:
        """Wait until the job lies in *place*, and nowhere else."""
        self.until(lambda: self.places(name) == [place], f"{name} in {place}/")

    def looked(self) -> None:
        """Return when the dispatcher has certainly seen everything that is there now."""
        name = f"looked-{next(_serial)}"
        self.drop(name, ["/bin/true"], cpus=0, priority=255, executor="process")
        self.wait_done(name)

    def until(self, condition: Callable[[], T], what: str) -> T:
        """Wait for a true value of *condition* as long as the dispatcher lives, and return it."""

        def asked() -> T:
            value = condition()
            if not value and self.process is not None and self.process.poll() is not None and not condition():
                raise AssertionError(f"the dispatcher left with {self.process.returncode}:\n{self.said()[-3000:]}")
            return value or condition()

        try:
            return wait_for(asked, self.patience, what=what)
        except AssertionError as error:
            files = sorted(str(path.relative_to(self.root)) for path in self.root.glob("*/*"))
            listed = self.spool("ls").stdout
            raise AssertionError(f"{error}\n{files}\n{listed}\n{self.said()[-3000:]}") from None

    # Afterwards.

    def close(self) -> None:
        """End the dispatcher; fail if it was not well."""
        if self.process is not None:
            lived = self.lives()
            code = self.stop()
            assert lived, f"the dispatcher died:\n{self.said()[-3000:]}"
            assert code == 0, self.said()[-3000:]
        assert "Traceback" not in self.said(), self.said()[-3000:]

    def end_runs(self) -> None:
        """End what the jobs left: nothing here, because the test's engine ends its jobs."""
