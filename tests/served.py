"""A spool with a real dispatcher process, for tests that treat both as a user does: by files, signals and commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

import forking
from spool.core import layout
from spool.core.errors import ExitCode
from spool.core.model import Grant, Result, State
from spool.formats.run_records import render_history
from spool.machine import identity
from spool.store.ownership import this_user
from spool.testing.served import PATIENCE_S, ServedSpool, wait_for
from support import ROOT

forking.parent()  # before any test: it belongs to none

LOOKS = "spool.dispatcher.observer.LOOK_NS"
"""How long after a look at everything the next is due, beside the events of files."""

GPU_LOOKS = "spool.machine.gpus.GpuWatcher.every_ns"
"""How long after a look at the GPUs the next is due."""

ENGINE_LOOKS = "spool.extras.engines.language.Language.look_ns"
"""The longest interval of questions to an engine."""

HOUR_NS = 3600 * 10**9
SHELL_ONLY = {"spool.executors.compiled.PROGRAM": "/nowhere"}
"""Without the compiled wrapper."""


def remember(spool: ServedSpool, name: str, peak_mib: int, runs: int = 1) -> None:
    """Put finished runs of *name* into the history, which took that much memory."""
    now_ns, grant = time.time_ns(), Grant(1, 4 << 30)
    result = Result(name, 1, 1, State.FINISHED, "exit code 0", 1, now_ns - 1, now_ns, user=this_user(), grant=grant)
    with open(spool.root / "history.jsonl", "ab") as file:
        file.writelines([render_history(replace(result, peak_memory_bytes=peak_mib << 20))] * runs)


class Served(ServedSpool):
    """One spool, and the dispatcher that serves it (or does not at the moment)."""

    def __init__(self, root: Path, environment: Mapping[str, str] | None = None, executor: str | None = None) -> None:
        """*executor* runs the jobs whose files do not name another; "sh" is `process` without the compiled wrapper."""
        variables = {"PYTHONPATH": str(ROOT / "src"), **(environment or {})}
        super().__init__(root, variables, "process" if executor == "sh" else executor)
        self.changes: dict[str, object] = {**forking.SEARCHES_SHORTLY, **(SHELL_ONLY if executor == "sh" else {})}
        """Other values of names in the dispatcher that is started next."""

    @property
    def _program(self) -> Sequence[str]:  # type: ignore[override]
        return forking.program_with(self.changes)

    def patched(self, *lines: str) -> Self:
        """Have the dispatcher and all that it starts run these *lines* of Python first."""
        site = self.root.parent / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text("\n".join((*lines, "")))
        self.environment["PYTHONPATH"] = f"{site}:{ROOT / 'src'}"
        return self

    def run(self, *arguments: str, inherits: Sequence[int] = ()) -> int:
        """Run a dispatcher to its end, with `--until-idle` or whatever is given, and return its exit code.

        Of what is not given, the code that says that a job failed is 0.

        *inherits* are descriptors that are left open for it.
        """
        words = arguments or ("--until-idle",)
        with self.stderr.open("ab") as stderr:
            if not inherits and forking.can_fork(self.environment):
                process: Any = self._forked(words)
            else:
                streams = {"stdin": subprocess.DEVNULL, "stdout": stderr, "stderr": stderr, "pass_fds": inherits}
                process = subprocess.Popen(self._command(words), env=self.environment, **streams)
            try:
                code = process.wait(PATIENCE_S)
            finally:
                process.kill()
        return 0 if code == ExitCode.JOBS_FAILED and not arguments else code

    def begin(self, *arguments: str, prefix: Sequence[str] = ()) -> Any:
        """Start a dispatcher and do not wait for it."""
        if prefix or not forking.can_fork(self.environment):
            return super().begin(*arguments, prefix=prefix)
        assert self.process is None
        self.process = self._forked(arguments)  # type: ignore[assignment]
        return self.process

    def _forked(self, arguments: Sequence[str]) -> forking.Forked:
        words = ["--spool", str(self.root), "dispatch", *arguments]
        with self.stderr.open("ab") as stderr, open(os.devnull) as stdin:
            streams = [stdin.fileno(), stderr.fileno(), stderr.fileno()]
            return forking.fork(words, self.environment, streams, changes=self.changes)

    def shorten(self, name: str, limit: str = "1s") -> None:
        """Give a run whose file says `time_limit = "1h"` another limit, once what is to come before that has come."""
        file = self.path("running", name)
        staged = self.root / ".tmp" / f"shorter-{name}"
        staged.write_text(file.read_text().replace('time_limit = "1h"', f'time_limit = "{limit}"'))
        staged.replace(file)

    def spool(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command of the command line to its end."""
        environment = options.get("env", self.environment)
        if options.keys() - {"env", "cwd", "input"} or not forking.can_fork(environment):
            return super().spool(*arguments, **options)
        return forking.answered(
            arguments, environment, cwd=options.get("cwd"), data=options.get("input", ""), timeout=PATIENCE_S
        )

    def move(self, name: str, source: str, target: str) -> None:
        """`mv SOURCE/NAME.toml TARGET/`."""
        self.path(source, name).rename(self.path(target, name))

    # What many tests do with a job.

    def restart(self) -> None:
        """Kill the dispatcher and start the next one."""
        self.kill()
        self.start()

    def serves(self, configuration: str) -> Self:
        """Write the configuration and start a dispatcher."""
        (self.root / "config.toml").write_text(configuration)
        return self.start()

    def begun(self, name: str, command: str | Sequence[str], **keys: Any) -> int:
        """Drop a job and return the pid of its wrapper, once that has said who it is."""
        self.drop(name, command, **keys)
        return self.pid(name)

    def up(self, name: str, command: str | Sequence[str], **keys: Any) -> None:
        """Drop a job and wait until its command has said `up`."""
        self.drop(name, command, **keys)
        self.says(name, "up")

    def completes(self, name: str, command: str | Sequence[str] | bytes, **keys: Any) -> dict[str, Any]:
        """Drop a job, wait until it lies in `done/`, and return how it ended."""
        self.drop(name, command, **keys)
        return self.wait_done(name) or {}

    def cancels(self, name: str, run: int = 1) -> None:
        """Cancel a job that runs by `rm`, and wait until that is recorded."""
        self.path("running", name).unlink()
        assert self.wait_outcome(name, run) == "cancelled"

    # What became of them.

    def history(self) -> list[dict[str, Any]]:
        """Return the accounting, without a line that is being written."""
        lines = (self.root / "history.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

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
