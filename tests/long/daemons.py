"""The daemons of a test's own cluster, as children of a keeper, with all that they write in one temporary directory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from long import keeper


class Daemons:
    """A cluster on this machine. `variables` is what a program's environment needs for its commands to find it."""

    def __init__(self, name: str) -> None:
        """Make its directory, whose path no test's environment holds."""
        self.directory = Path(tempfile.mkdtemp(prefix=f"spool-{name}-", dir="/tmp"))
        self.directory.chmod(0o755)
        (self.directory / "log").mkdir(mode=0o755)
        self.variables: Mapping[str, str] = {}
        self._running: set[str] = set()
        self._killed: set[str] = set()

    def _keep(self, **more: str) -> None:
        """Start the keeper, once `variables` are known. *more* are further variables of the daemons."""
        self._keeper = subprocess.Popen(
            [sys.executable, keeper.__file__, str(self.directory / "log")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **more, **self.variables},
        )

    def _start(self, name: str, *command: str) -> None:
        self._ask("start", name, *command)
        self._running.add(name)
        self._killed.discard(name)

    def _kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Kill a daemon at once, as a crash does, or end it by another signal."""
        self._ask("kill", name, str(int(number)))
        self._running.discard(name)
        self._killed.add(name)

    def _ask(self, *fields: str) -> None:
        self._keeper.stdin.write("\0".join(fields) + "\n")
        self._keeper.stdin.flush()
        int(self._keeper.stdout.readline())

    def command(self, *words: str | Path, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        """Run one of the cluster's commands; with *check* it must succeed. *more* are further variables of it."""
        environment = {**os.environ, **self.variables, **more}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done

    def close(self) -> None:
        """End every process of it and remove its directory."""
        self._keeper.communicate()
        shutil.rmtree(self.directory, ignore_errors=True)
