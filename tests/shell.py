"""A home with the program in it, for tests that do what the documentation says, by the real shell; and a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
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


class Terminal:
    """A terminal of 80 by 24, the one that controls *words*, as a user sees it and types into it."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], cwd: Path) -> None:
        """Start *words* in it."""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            try:
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
                os.chdir(cwd)
                os.execvpe(words[0], words, environment)
            finally:
                os._exit(99)
        os.set_blocking(self._fd, False)
        self._screen = b""
        self.code: int | None = None

    def shows(self, text: str) -> str:
        """Wait until *text* was shown, and return all that was."""
        try:
            return wait_for(lambda: self.screen() if text in self.screen() else "", what=text)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.screen()}") from None

    def screen(self) -> str:
        """Return all that was shown so far."""
        with contextlib.suppress(OSError):  # nothing new, or it is over
            while data := os.read(self._fd, 1 << 16):
                self._screen += data
        return self._screen.decode(errors="replace")

    def type(self, keys: str | bytes) -> None:
        """Press keys."""
        os.write(self._fd, keys.encode() if isinstance(keys, str) else keys)

    def resize(self, lines: int, columns: int) -> None:
        """Change its size."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def is_raw(self) -> bool:
        """Whether its keys go to the program as they are."""
        return not termios.tcgetattr(self._fd)[3] & (termios.ICANON | termios.ECHO | termios.ISIG)

    def ends(self) -> int:
        """Wait for the end of its program and return the exit code."""

        def reaped() -> bool:
            self.screen()
            if self.code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.code = os.waitstatus_to_exitcode(status) if pid else None
            return self.code is not None

        wait_for(reaped, what=f"the end of the program: {self.screen()}")
        self.screen()
        assert self.code is not None
        return self.code

    def close(self) -> None:
        """Close the window."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def leave(self) -> None:
        """Leave nothing behind."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.close()
