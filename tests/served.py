"""A spool with a real dispatcher process, for tests that treat both as a user does: by files, signals and commands."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

from spool.core import layout
from spool.formats import jobfile
from spool.machine import identity
from support import PATIENCE_S, ROOT, make_spool, wait_for

T = TypeVar("T")
_serial = count(1)
_WITHOUT_COMPILED = (
    "-c",
    "import runpy, spool.executors.compiled as compiled; compiled.PROGRAM += '-nowhere'; "
    "runpy.run_module('spool', run_name='__main__')",
)


class Served:
    """One spool, and the dispatcher that serves it (or does not at the moment)."""

    def __init__(self, root: Path, environment: Mapping[str, str] | None = None, executor: str | None = None) -> None:
        """*executor* runs the jobs whose files do not name another; "sh" is `process` without the compiled wrapper."""
        self.root = root
        self.executor = "process" if executor == "sh" else executor
        self._program = _WITHOUT_COMPILED if executor == "sh" else ("-m", "spool")
        self.patience = PATIENCE_S
        if not root.exists():
            make_spool(root)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "SPOOL_DIR": str(root),
            **(environment or {}),
        }
        self.stderr = root.parent / f"{root.name}.stderr"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Serve a test."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave nothing behind; fail if the dispatcher was not well, unless the test has failed already."""
        try:
            if kind is None:
                self.close()
        finally:
            if self.process is not None:
                self.process.kill()
                self.process.wait()
            self.end_runs()

    # The dispatcher.

    def start(self, *arguments: str, prefix: Sequence[str] = ()) -> Served:
        """Start a dispatcher and wait until it serves."""
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

    def run(self, *arguments: str, inherits: Sequence[int] = ()) -> int:
        """Run a dispatcher to its end, with `--until-idle` or whatever is given, and return its exit code.

        *inherits* are descriptors that are left open for it.
        """
        with self.stderr.open("ab") as stderr:
            return subprocess.run(
                self._command(arguments or ("--until-idle",)),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                timeout=PATIENCE_S,
                check=False,
                pass_fds=inherits,
            ).returncode

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
        options = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60} | options
        return subprocess.run([sys.executable, "-m", "spool", *arguments], check=False, **options)

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

    def move(self, name: str, source: str, target: str) -> None:
        """`mv SOURCE/NAME.toml TARGET/`."""
        self.path(source, name).rename(self.path(target, name))

    # What became of them.

    def places(self, name: str) -> list[str]:
        """Return the state directories in which the job has a file."""
        return [place for place in layout.PLACES if os.path.lexists(self.path(place, name))]

    def runs(self, name: str) -> list[int]:
        """Return the numbers of the job's metadirs."""
        directory = self.root / "jobs" / name
        return sorted(int(entry) for entry in os.listdir(directory)) if directory.is_dir() else []

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

    def history(self) -> list[dict[str, Any]]:
        """Return the accounting."""
        lines = (self.root / "history.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def state(self) -> dict[str, Any]:
        """Return the dispatcher's last view."""
        try:
            loaded: dict[str, Any] = json.loads((self.root / "state.json").read_text())
        except FileNotFoundError:
            return {"jobs": {}, "problems": []}
        return loaded

    def reason(self, name: str) -> str:
        """Return why a job waits, as the last view has it."""
        return str(self.state()["jobs"].get(name, {}).get("reason", ""))

    def pid(self, name: str, run: int = 1) -> int:
        """Return the pid of a run's wrapper, once it has said who it is."""
        text = wait_for(lambda: _whole(self.record(name, "jid", run)), what=f"the jid of {name}/{run}")
        return int(text.split()[0])

    # Waiting.

    def says(self, name: str, text: str = "", run: int = 1) -> str:
        """Wait until a run has written *text*, and return all that it wrote."""
        return self.until(lambda: self.log(name, run) if text in self.log(name, run) else "", f"{text!r} of {name}")

    def wait_done(self, *names: str) -> dict[str, Any] | None:
        """Wait until the jobs lie in `done/` and nowhere else; return how the last run of the first one ended."""
        for name in names:
            self.until(lambda name=name: self.places(name) == ["done"], f"the end of {name}")
        self.until(lambda: self.runs(names[0]), f"the records of {names[0]}")  # who cancels a job moves its file first
        return self.result(names[0], self.runs(names[0])[-1])

    def wait_place(self, name: str, place: str) -> None:
        """Wait until the job lies in *place*, and nowhere else."""
        self.until(lambda: self.places(name) == [place], f"{name} in {place}/")

    def wait_outcome(self, name: str, run: int = 1) -> str:
        """Wait until a run is recorded and its job's file has moved on; return its outcome."""

        def ended() -> str:
            outcome = self.outcome(name, run)
            filed = not self.lives() or "running" not in self.places(name) or self.runs(name)[-1] > run
            return outcome or "" if filed else ""

        return self.until(ended, f"the end of {name}/{run}")

    def wait_reason(self, name: str, text: str) -> str:
        """Wait until the reason why a job waits has *text* in it."""
        return self.until(lambda: self.reason(name) if text in self.reason(name) else "", f"{name}: {text}")

    def looked(self) -> None:
        """Return when the dispatcher has certainly seen everything that is there now."""
        name = f"looked-{next(_serial)}"
        self.drop(name, ["/bin/true"], cpus=0, priority=255, executor=None)
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
            raise AssertionError(f"{error}\n{files}\n{self.said()[-3000:]}") from None

    # Afterwards.

    def close(self) -> None:
        """End the dispatcher and all that runs; fail if it was not well."""
        if self.process is not None:
            lived = self.lives()
            code = self.stop()
            assert lived, f"the dispatcher died:\n{self.said()[-3000:]}"
            assert code == 0, self.said()[-3000:]
        assert "Traceback" not in self.said(), self.said()[-3000:]

    def end_runs(self) -> None:
        """Kill everything that carries this spool's mark, whatever it is, and end its tmux server if it has one."""
        for pid in marked(self.root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if (self.root / layout.TERMINALS).exists():
            self.tmux("kill-server")

    def tmux(self, *words: str) -> str:
        """Ask the spool's own tmux server, and return what it says."""
        command = ["tmux", "-S", str(self.root / layout.TERMINALS), *words]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        return done.stdout + done.stderr


def marked(root: Path, job: str | None = None) -> set[int]:
    """Return the live processes with the mark of a run of the spool at *root* in their environment."""
    mark = f"SPOOL_DIR={root}".encode()
    job_mark = f"SPOOL_JOB={job}".encode() if job is not None else b"SPOOL_JOB="
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                known = job_mark in words if job is not None else any(word.startswith(job_mark) for word in words)
                if mark in words and known and alive(int(entry)):
                    found.add(int(entry))
    return found


def alive(pid: int) -> bool:
    """Whether a process of that id lives; a zombie does not."""
    stat = identity.read_stat(pid)
    return stat is not None and not stat.dead


def pids_in(text: str) -> list[int]:
    """Return the numbers that a job printed, one a line."""
    return [int(line) for line in text.split() if line.isdigit()]


def overlap(lines: Iterable[Mapping[str, Any]]) -> int:
    """Return the largest number of the runs of a history that were alive at one moment."""
    moments = []
    for line in lines:
        if "started_at" in line:
            moments += [(line["started_at"], 1), (line["ended_at"], -1)]
    most = now = 0
    for _, step in sorted(moments):
        now += step
        most = max(most, now)
    return most


def _whole(text: str | None) -> str:
    return text if text is not None and text.endswith("\n") else ""


def remove(path: Path) -> None:
    """Remove a directory with all that is in it, if it is there."""
    shutil.rmtree(path, ignore_errors=True)
