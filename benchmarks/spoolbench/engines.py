"""What is measured: spool, and whatever peers a directory offers.

An engine has `start(slots)`, `stop()`, `submit(command)` and `bulk(count, command)` (argument lists of what a user
would type), `lists()`, `pids()` and `run(argv)`. The peers' classes (`PEERS` in `peers.py` of the directory) have the
same methods, and spool's class is made a subclass of theirs where they are loaded.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from spoolbench import drop
from spoolbench.drop import job_text
from spoolbench.tools import MissingError, Scratch, timed, until


def spool_command(named: str | None) -> list[str]:
    """Return how `spool` is called: as named, else the one beside this Python, else this Python's module."""
    if named:
        return named.split()
    beside = Path(sys.executable).with_name("spool")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "spool"]


class SpoolEngine:
    """A spool of its own with a CPU for each slot, and a dispatcher in the foreground."""

    name = "spool"
    opts: ClassVar[dict[str, dict[str, Any]]] = {}
    settle = 0.05
    ours = True

    def __init__(self, scratch: Scratch, command: list[str], variant: str = "", config: str = "") -> None:
        """Measure spool as it is, or under *config*: a *variant*, with the figures that this may change."""
        if variant:
            self.name = f"spool, {variant}"
            self.groups = frozenset({"dispatch", "gap", "drain", "calls"})
        self.config = config
        self.scratch = scratch
        self.command = command
        self.root = scratch.path / "spool"
        self.env = dict(os.environ)
        self.process: subprocess.Popen[bytes] | None = None
        self._serial = 0

    def prepare(self, slots: int) -> None:
        """Make an empty spool, in a place of its own."""
        self._serial += 1
        self.root = self.scratch.path / f"{self.name.replace(', ', '-')}{self._serial}"
        self.env["SPOOL_DIR"] = str(self.root)
        if self.run([*self.command, "init"])[0]:
            raise MissingError("`spool init` fails: install spool for this Python, or name it by --spool")
        settings = f"cpus = {slots}\nautostart = false\n{self.config}\n"
        (self.root / "config.toml").write_text(settings)

    def serve(self) -> None:
        """Start the dispatcher; it may not be ready yet."""
        self.process = subprocess.Popen(
            [*self.command, "dispatch"],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.scratch.trash,
            start_new_session=True,
        )

    def start(self, slots: int) -> None:
        """Make an empty spool and have it served."""
        self.prepare(slots)
        self.serve()
        until((self.root / "state.json").exists, 30, "the dispatcher's first pass")

    def stop(self) -> None:
        """End the dispatcher; what runs is let go at the gate."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def pids(self) -> list[int]:
        """Return the dispatcher."""
        return [self.process.pid] if self.process is not None else []

    def run(self, argv: list[str]) -> tuple[int, float]:
        """Run a command; return its exit code and how long it took."""
        return timed(argv, self.env, self.scratch.trash)

    def submit(self, command: list[str]) -> list[str]:
        """Return the command that submits *command*."""
        return [*self.command, "submit", "--", *command]

    def bulk(self, count: int, command: list[str]) -> list[str]:
        """Return the command that drops *count* job files."""
        self._serial += 1
        return [sys.executable, drop.__file__, str(self.root), str(count), f"bulk{self._serial}-", *command]

    def lists(self) -> dict[str, list[str]]:
        """Return the commands that list jobs."""
        return {"ls": [*self.command, "ls"]}

    # What only spool can do: a file is a job.

    def stage(self, name: str, command: list[str], **keys: Any) -> str:
        """Write a job file beside `queued/` and return its path."""
        path = self.root / ".tmp" / f"{name}.toml"
        path.write_text(job_text(command, **keys))
        return str(path)

    def queued(self, name: str) -> str:
        """Return the path under which a job waits."""
        return f"{self.root}/queued/{name}.toml"


def variants(scratch: Scratch, command: list[str]) -> list[SpoolEngine]:
    """Return spool with other settings than its own."""
    return [SpoolEngine(scratch, command, "strict", 'durability = "strict"')]


def load(directory: str | None, wanted: list[str], scratch: Scratch, command: list[str]) -> list[Any]:
    """Return the engines: spool first, then the *wanted* peers of *directory*, or all that are installed there."""
    if directory is None:
        return [SpoolEngine(scratch, command)]
    sys.path.insert(0, os.path.abspath(directory))
    peers = importlib.import_module("peers")
    offered = peers.PEERS
    peers.wipe = _move_aside  # nothing is deleted while we measure: see Scratch
    base = importlib.import_module("perflib").Peer
    spool_class = type("Spool", (SpoolEngine, base), {})
    engines = [spool_class(scratch, command)]
    for name in wanted or offered:
        if name not in offered:
            raise MissingError(f"no peer {name!r} in {directory}; there are: {', '.join(offered)}")
        engine = offered[name]()
        problem = unusable(engine)
        if problem is None:
            engines.append(engine)
        else:
            print(f"left out {name}: {problem}", file=sys.stderr)
    return engines


def _move_aside(directory: str) -> None:
    """Make *directory* an empty one; stands for the peers' own way, which deletes what was there."""
    if os.path.isdir(directory):
        aside = tempfile.mkdtemp(prefix="aside.", dir=os.path.dirname(directory))
        os.rename(directory, os.path.join(aside, os.path.basename(directory)))
    os.makedirs(directory)


def unusable(engine: Any) -> str | None:
    """Return why a peer cannot be measured here, None if it can: run its own install script first."""
    try:
        engine.start(1)
        try:
            code, _ = engine.run(engine.submit(["/bin/true"]))
        finally:
            engine.stop()
    except (OSError, RuntimeError, TypeError, subprocess.SubprocessError, MissingError) as error:
        return f"not installed, or does not start here ({error})"
    return f"its submission ends with {code}" if code else None
