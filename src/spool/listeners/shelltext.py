"""The configuration's `notifier`: shell text that sends a message, for every address that nothing else understands."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
from contextlib import suppress

from spool.listeners.message import Letter, UndeliveredError, masked

LIMIT_S = 60.0
_MOST_WORDS = 300


class ShellText:
    """Runs the text with the address as `$1` and the event as `$2`; the message comes on its standard input."""

    for_programs = False

    def __init__(self, text: str, address: str, *, limit_s: float = LIMIT_S) -> None:
        self._text, self._address, self._limit_s = text, address, limit_s
        self.shown = masked(address)

    def send(self, letter: Letter) -> None:
        """Run it. An exit code but 0 is a failure, and so is not to end in time; its whole group is killed then."""
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as message:
            message.write(f"{letter.title}\n\n{letter.body}".encode(errors="replace"))
            message.seek(0)
            try:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", self._text, "notifier", self._address, letter.event],
                    stdin=message,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise UndeliveredError(f"the notifier cannot be run: {type(error).__name__}") from None
            in_time = _ends_within(process.pid, self._limit_s)
            # While nobody has asked for its exit code, its number is nobody else's.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            if not in_time:
                raise UndeliveredError(f"the notifier did not end within {self._limit_s:g} s")
            if code != 0:
                words = _last_words(said.fileno())
                raise UndeliveredError(f"the notifier's exit code is {code}{f': {words}' if words else ''}")


def _ends_within(pid: int, limit_s: float) -> bool:
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(limit_s * 1000))
    finally:
        os.close(fd)


def _last_words(fd: int) -> str:
    size = os.fstat(fd).st_size
    said = os.pread(fd, _MOST_WORDS, max(0, size - _MOST_WORDS)).decode(errors="replace")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return "".join(character if character.isprintable() else "?" for character in lines[-1]) if lines else ""
