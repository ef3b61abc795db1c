"""Running other programs' commands without ever waiting for one, for the capabilities that do.

A helper process runs them, each in a session of its own and with a time limit, several at once. If the helper ends or
is killed, the commands that it has begun run on to their end. Their results are lost then, and :class:`CommandEnd` says
so.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import asdict

from spool.core.model import SECOND_NS
from spool.machine.helpers import ChildProcess, Workers, import_path

AT_ONCE = 4
"""How many commands that may be delayed run at once; urgent ones do not wait for these."""

_PATIENCE_NS = 30 * SECOND_NS  # waiting time for the helper, beyond the time limit of the command
_GLANCE_S = 0.25  # between two looks at what a command has written
_LAST_OUTPUT_S = 1.0


class Command(Struct, frozen=True):
    """One command. *environment*: None means that of the helper."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None = None
    within_s: float = 60.0
    urgent: bool = False
    ends_on: str = ""  # a text on its standard error at which it is ended: it would only try again for long


class CommandEnd(Struct, frozen=True):
    """The result of a command."""

    status: int | None  # its exit status; None: unknown, because it or the helper was ended
    out: str = ""
    err: str = ""


class CommandRunner(ChildProcess):
    """The helper, and the commands that it runs. `fileno` is readable when :meth:`work` has something to do.

    It is started for the first command, and again for the next one after it has ended.
    """

    def __init__(self, environment: Callable[[], Mapping[str, str]] = lambda: os.environ) -> None:
        path = {"PYTHONPATH": import_path()}
        super().__init__(("spool.extras.commands",), lambda: {**environment(), **path}, answers_on_stdout=True)
        self._orders: dict[int, tuple[Command, Callable[[CommandEnd], object]]] = {}  # all sent, if there is a helper
        self._number = 0
        self._heard_ns = 0  # when it last answered, or had nothing to do
        self._ends: list[tuple[Callable[[CommandEnd], object], CommandEnd]] = []  # ends not reported yet
        self._trouble = ""  # why the last start failed

    def due_ns(self) -> int | None:
        """Return when :meth:`work` has something to do even without input, on the monotonic clock."""
        if self._ends:
            return time.monotonic_ns()
        if not self._orders:
            return None
        if self.pid is None:
            return self.start_due_ns
        longest_s = max(command.within_s for command, _ in self._orders.values())
        return self._heard_ns + int(longest_s * 1e9) + _PATIENCE_NS

    def order(self, command: Command, take: Callable[[CommandEnd], object]) -> None:
        """Queue a command; :meth:`work` calls *take* with its end."""
        if not self._orders:
            self._heard_ns = time.monotonic_ns()
        self._number += 1
        self._orders[self._number] = command, take
        self._send(self._number)

    def work(self) -> bool:
        """Take the available answers, restart the helper or give it up as needed; return whether there were answers.

        An error with one answer does not lose the others: the next call goes on.
        """
        why, pid, alive, due_ns = "", self.pid, self.is_alive, self.due_ns()
        self.lingers()
        for line in self.read():
            said = json.loads(line)
            self._heard_ns = time.monotonic_ns()
            self._answer([said.pop("number")], CommandEnd(**said))
        if pid is not None and (not alive or self.has_hung_up):
            why = "the process that runs commands has ended"
        elif pid is not None and not self._ends and due_ns is not None and time.monotonic_ns() >= due_ns:
            why = "the process that runs commands did not answer"
        if why:  # what it was sent may have been executed or not
            self.give_up(kill=True)
            self._answer([*self._orders], CommandEnd(None, "", why))
        self._send()
        has_answers = bool(self._ends)
        while self._ends:
            take, end = self._ends.pop(0)
            take(end)
        return has_answers

    def close(self) -> None:
        """Close the connection to the helper, which exits at once; commands that it has begun go on."""
        super().close()
        self.join()

    def _answer(self, numbers: list[int], end: CommandEnd) -> None:
        for number in numbers:
            if (order := self._orders.pop(number, None)) is not None:
                self._ends.append((order[1], end))

    def _send(self, *numbers: int) -> None:
        """Send these orders to the helper; all of them if it has to be started."""
        if self.pid is None and self._orders:
            if time.monotonic_ns() >= self.start_due_ns:
                try:
                    self.start()
                    self._trouble, self._heard_ns, numbers = "", time.monotonic_ns(), (*self._orders,)
                except OSError as error:
                    self._trouble = f"cannot start the process that runs commands: {error.strerror or error}"
            if self._trouble:  # urgent commands get an answer; the others run later
                urgent = [number for number, (command, _) in self._orders.items() if command.urgent]
                self._answer(urgent, CommandEnd(None, "", self._trouble))
        for number in numbers if self.pid is not None else ():
            self.send(_line(number, self._orders[number][0]))


def _line(number: int, value: Command | CommandEnd) -> bytes:
    return json.dumps({"number": number, **asdict(value)}, separators=(",", ":")).encode() + b"\n"


# The helper.


def run(command: Command) -> CommandEnd:
    """Run one command, and wait for its end; it is ended too once it has written what it `ends_on`."""
    try:
        process = subprocess.Popen(
            command.arguments,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a signal to the helper's group does not reach the command
            cwd="/",
        )
    except (OSError, ValueError) as error:
        return CommandEnd(127, "", str(error))
    until, ends_on, status = time.monotonic() + command.within_s, command.ends_on.encode(), None
    while status is None and (remains_s := until - time.monotonic()) > 0:
        try:
            out, err = process.communicate(timeout=min(remains_s, _GLANCE_S) if ends_on else remains_s)
            status = process.returncode
        except subprocess.TimeoutExpired as error:
            if ends_on and ends_on in (error.stderr or b""):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)  # the program may be a script around the one that retries
                ends_on = b""
    if status is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=_LAST_OUTPUT_S)
        except subprocess.TimeoutExpired:  # another process holds its output open
            out, err = b"", b""
        err += f"ended after {command.within_s}s without an answer".encode()
    return CommandEnd(status, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


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

    lanes = {urgent: Workers(AT_ONCE) for urgent in (False, True)}
    for line in sys.stdin.buffer:
        order = json.loads(line)
        number, command = order.pop("number"), Command(**order)
        lanes[command.urgent].put(carry_out, number, command)
    os._exit(0)


if __name__ == "__main__":
    main()
