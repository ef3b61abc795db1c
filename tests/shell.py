"""A home with the program in it, for tests that do what the documentation says, by the real shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spool.store.lock import dispatcher_lives
from support import PATIENCE_S, ROOT, wait_for


class Home:
    """A home directory with `spool` and `python3` on the PATH, and no spool yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spool = path / ".spool"
        programs = path / ".local" / "bin"
        programs.mkdir(parents=True)
        self._program(programs / "spool", f'exec "{sys.executable}" -m spool "$@"')
        self._program(programs / "python3", f'exec "{sys.executable}" "$@"')
        self.environment = {
            "HOME": str(path),
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT / "src"),
            "LC_ALL": "C.UTF-8",
            "TMPDIR": str(path),
        }
        self._dispatcher: subprocess.Popen[bytes] | None = None

    @staticmethod
    def _program(path: Path, text: str) -> None:
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)

    def run(
        self, *command: str, cwd: Path | None = None, check: bool = True, timeout: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; its output is text, stderr with stdout."""
        done = subprocess.run(
            command,
            cwd=cwd or self.path,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}")
        return done

    def sh(self, text: str, cwd: Path | None = None, *, check: bool = True) -> str:
        """Run *text* by the real shell, ended by the first command that fails; return what it printed."""
        return self.run("/bin/sh", "-eu", "-c", text, cwd=cwd, check=check, timeout=5 * PATIENCE_S).stdout

    def serve(self) -> None:
        """Start a dispatcher that lives until `close`, and have no command start another."""
        self.run("spool", "init")
        (self.spool / "config.toml").write_text("autostart = false\ncpus = 4\n", encoding="utf-8")
        with open(self.path / "dispatcher.log", "ab") as log:
            self._dispatcher = subprocess.Popen(
                [sys.executable, "-m", "spool", "dispatch"],
                env=self.environment,
                cwd=self.path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(lambda: dispatcher_lives(str(self.spool / ".lock")), what="the dispatcher")

    def close(self) -> None:
        """End the dispatcher."""
        if self._dispatcher is not None:
            self._dispatcher.terminate()
            self._dispatcher.wait(PATIENCE_S)
            self._dispatcher = None


def home_of_test() -> Path:
    """Return the home directory that the walls gave this test."""
    return Path(os.environ["HOME"])
