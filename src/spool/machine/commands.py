"""Running other programs' commands without ever waiting for one.

A helper process runs them, each in a session of its own and with a time limit, several at once. If the helper ends or
is killed, the commands that it has begun run on to their end. Their results are lost then, and :class:`CommandEnd` says
so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct
from msgspec.structs import asdict

from spool.core.model import SECOND_NS
from spool.machine.child_process import ChildProcess, import_path

AT_ONCE = 4
"""How many commands that may be delayed run at once; urgent ones do not wait for these."""

_PATIENCE_NS = 30 * SECOND_NS  # waiting time for the helper, beyond the time limit of the command
_GLANCE_S = 0.25  # between two looks at what a command has written
_LAST_WORDS_S = 1.0


class Command(Struct, frozen=True):
    """One command. *environment*: None means that of the helper."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None = None
    within_s: float = 60.0
    urgent: bool = False
    standard_input: str = ""
    ends_on: str = ""  # a text on its standard error at which it is ended: it would only try again for long


class CommandEnd(Struct, frozen=True):
    """The result of a command."""

    status: int | None  # its exit status; None: unknown, because it or the helper was ended
    out: str = ""
    err: str = ""


class _Order(Struct):
    line: bytes
    within_ns: int
    urgent: bool
    sent_ns: int | None = None  # None: not yet


class CommandRunner:
    """Runs commands. `fileno` is readable when :meth:`work` has something to do, which is also due at `due_ns`.

    The helper is started for the first command, and again for the next one after it has ended. *clock* is monotonic.
    """

    def __init__(
        self,
        environment: Callable[[], Mapping[str, str]] = lambda: os.environ,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._environment = environment
        self._clock = clock
        self._child = ChildProcess(("spool.machine.commands",), self._child_environment, answers_on_stdout=True)
        self._orders: dict[int, _Order] = {}
        self._number = 0
        self._trouble = ""  # why the last start of the helper failed

    @property
    def pid(self) -> int | None:
        """The pid of the helper, None while there is none."""
        return self._child.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to read; it never changes."""
        return self._child.fileno()

    def due_ns(self) -> int | None:
        """Return when :meth:`work` has something to do even without input, on the monotonic clock."""
        if not self._orders:
            return None
        if self._child.pid is None:
            told = any(order.urgent for order in self._orders.values()) and self._trouble
            return self._clock() if told else self._child.start_due_ns
        sent = [order.sent_ns + order.within_ns for order in self._orders.values() if order.sent_ns is not None]
        return min(sent, default=None)

    def order(self, command: Command) -> int:
        """Queue a command; return the number of its answer."""
        self._number += 1
        line = _line(self._number, command)
        # Each command before it in the helper may take all of its time.
        waits = 1 + len(self._orders) // AT_ONCE
        within_ns = int(command.within_s * 1e9) * waits + _PATIENCE_NS
        self._orders[self._number] = _Order(line, within_ns, command.urgent)
        self._send()
        return self._number

    def work(self) -> Iterator[tuple[int, CommandEnd]]:
        """Yield the available answers with their numbers; restart the helper or give it up as needed."""
        self._child.lingers()
        pid, alive = self._child.pid, self._child.is_alive
        for line in self._child.read():
            number, done = _answer(line)
            if self._orders.pop(number, None) is not None:
                yield number, done
        if pid is not None and (not alive or self._child.has_hung_up):
            yield from self._gone("the process that runs commands has ended")
        elif self._child.pid is not None and (due := self.due_ns()) is not None and self._clock() >= due:
            yield from self._gone("the process that runs commands did not answer", kill=True)
        self._send()
        if self._trouble:  # urgent commands get an answer; the others run later
            for number in [number for number, order in self._orders.items() if order.urgent and order.sent_ns is None]:
                del self._orders[number]
                yield number, CommandEnd(None, "", self._trouble)

    def close(self) -> None:
        """Close the connection to the helper, which exits at once; commands that it has begun go on."""
        self._child.close()
        self._child.join()

    def _gone(self, why: str, *, kill: bool = False) -> Iterator[tuple[int, CommandEnd]]:
        """Record that the helper is gone: the commands that it was sent may have been executed or not."""
        self._child.give_up(kill=kill)
        for number in [number for number, order in self._orders.items() if order.sent_ns is not None]:
            del self._orders[number]
            yield number, CommandEnd(None, "", why)

    def _send(self) -> None:
        if self._child.pid is None:
            if not self._orders or self._clock() < self._child.start_due_ns:
                return
            try:
                self._child.start()
            except OSError as error:  # retried later
                self._trouble = f"cannot start the process that runs commands: {error.strerror or error}"
                return
            self._trouble = ""
        for order in self._orders.values():
            if order.sent_ns is None:
                order.sent_ns = self._clock()
                self._child.send(order.line)

    def _child_environment(self) -> Mapping[str, str]:
        return {**self._environment(), "PYTHONPATH": import_path()}


def _line(number: int, value: Command | CommandEnd) -> bytes:
    return json.dumps({"number": number, **asdict(value)}, separators=(",", ":")).encode() + b"\n"


def _answer(line: bytes) -> tuple[int, CommandEnd]:
    try:
        said = json.loads(line)
        return int(said["number"]), CommandEnd(said["status"], str(said["out"]), str(said["err"]))
    except (ValueError, TypeError, KeyError):
        return 0, CommandEnd(None)


# The helper.


def run(command: Command) -> CommandEnd:
    """Run one command, and wait for its end."""
    try:
        process = subprocess.Popen(
            command.arguments,
            env=command.environment,
            stdin=subprocess.PIPE if command.standard_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a signal to the helper's group does not reach the command
            cwd="/",
        )
    except (OSError, ValueError) as error:
        return CommandEnd(127, "", str(error))
    status: int | None = None
    try:
        out, err = _outputs(process, command)
        status = process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=_LAST_WORDS_S)
        except subprocess.TimeoutExpired:  # another process holds its output open
            out, err = b"", b""
        err += f"ended after {command.within_s}s without an answer".encode()
    return CommandEnd(status, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def _outputs(process: subprocess.Popen[bytes], command: Command) -> tuple[bytes, bytes]:
    """Return what a process has written; it is ended once that holds `ends_on`. Raises TimeoutExpired."""
    left: bytes | None = command.standard_input.encode() or None
    until, ends_on = time.monotonic() + command.within_s, command.ends_on.encode()
    while True:
        remains_s = until - time.monotonic()
        try:
            return process.communicate(left, timeout=min(remains_s, _GLANCE_S) if ends_on else remains_s)
        except subprocess.TimeoutExpired as error:
            left = None
            if ends_on and ends_on in (error.stderr or b""):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)  # the program may be a script around the one that retries
                ends_on = b""
            elif time.monotonic() >= until:
                raise


def main() -> None:
    """Run the commands on standard input until its end, and exit at once, even if some are still running."""
    speaking = threading.Lock()

    def carry_out(number: int, command: Command) -> None:
        line = _line(number, run(command))
        with speaking:
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except OSError:  # the other end is closed
                os._exit(0)

    lanes = {urgent: ThreadPoolExecutor(AT_ONCE) for urgent in (False, True)}
    for line in sys.stdin.buffer:
        try:
            order = json.loads(line)
            number, command = order.pop("number"), Command(**order)
            lanes[command.urgent].submit(carry_out, number, command)
        except (ValueError, KeyError, TypeError):
            continue
    os._exit(0)


if __name__ == "__main__":
    main()
