"""Commands of other programs, run for a process that never waits for one.

A helper process runs them, each in a session of its own and with a time limit, several at once. One that ends, or is
killed, leaves the commands that it has begun to themselves: what a command was in the middle of, it finishes. Nobody
hears of it then, and :class:`CommandEnd` says so.
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

from spool.core.model import SECOND_NS
from spool.machine.child_process import ChildProcess

AT_ONCE = 4
"""How many commands run at once that others may wait for; those that are urgent wait for none of these."""

_PATIENCE_NS = 30 * SECOND_NS  # with the helper, beyond what a command may take
_LAST_WORDS_S = 1.0


class Command(Struct, frozen=True):
    """One command. *environment*: None is that of the helper."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None = None
    within_s: float = 60.0
    urgent: bool = False


class CommandEnd(Struct, frozen=True):
    """How a command has ended."""

    status: int | None  # its exit status; None: nobody knows what it has done, for it or the helper was ended
    out: str = ""
    err: str = ""


class _Order(Struct):
    line: bytes
    within_ns: int
    urgent: bool
    sent_ns: int | None = None  # None: not yet


class CommandRunner:
    """Has commands run. `fileno` is readable when :meth:`work` has something to do, which is also due at `due_ns`.

    The process is started for the first command, and anew for the next one after it has ended. *clock* is monotonic.
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
        self._trouble = ""  # why the helper could not be started when that was last tried

    @property
    def pid(self) -> int | None:
        """The pid of the helper, None while there is none."""
        return self._child.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to read; the same for life."""
        return self._child.fileno()

    def due_ns(self) -> int | None:
        """Return when :meth:`work` has something to do though nothing can be read, on the monotonic clock."""
        if not self._orders:
            return None
        if self._child.pid is None:
            told = any(order.urgent for order in self._orders.values()) and self._trouble
            return self._clock() if told else self._child.start_due_ns
        sent = [order.sent_ns + order.within_ns for order in self._orders.values() if order.sent_ns is not None]
        return min(sent, default=None)

    def order(self, command: Command) -> int:
        """Have a command run as soon as possible; return the number of the answer."""
        self._number += 1
        said = {
            "number": self._number,
            "arguments": command.arguments,
            "environment": None if command.environment is None else dict(command.environment),
            "within_s": command.within_s,
            "urgent": command.urgent,
        }
        line = json.dumps(said, separators=(",", ":")).encode() + b"\n"
        # Those before it in the helper may each take all the time that they are given.
        waits = 1 + len(self._orders) // AT_ONCE
        within_ns = int(command.within_s * 1e9) * waits + _PATIENCE_NS
        self._orders[self._number] = _Order(line, within_ns, command.urgent)
        self._send()
        return self._number

    def work(self) -> Iterator[tuple[int, CommandEnd]]:
        """Yield the answers that there are, each with its number; see to the helper."""
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
        if self._trouble:  # who asks is told; what is only to be done is done later
            for number in [number for number, order in self._orders.items() if order.urgent and order.sent_ns is None]:
                del self._orders[number]
                yield number, CommandEnd(None, "", self._trouble)

    def close(self) -> None:
        """Let go of the helper, which leaves at once; what it has begun goes on."""
        self._child.close()
        self._child.join()

    def _gone(self, why: str, *, kill: bool = False) -> Iterator[tuple[int, CommandEnd]]:
        """Know that the helper is gone: what it was sent may have been done or not."""
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
            except OSError as error:  # it is tried again
                self._trouble = f"cannot start the process that runs commands: {error.strerror or error}"
                return
            self._trouble = ""
        for order in self._orders.values():
            if order.sent_ns is None:
                order.sent_ns = self._clock()
                self._child.send(order.line)

    def _child_environment(self) -> Mapping[str, str]:
        # It must find what this process has found, however that came about.
        return {**self._environment(), "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}


def _answer(line: bytes) -> tuple[int, CommandEnd]:
    try:
        said = json.loads(line)
        return int(said["number"]), CommandEnd(said["status"], str(said["out"]), str(said["err"]))
    except (ValueError, TypeError, KeyError):
        return 0, CommandEnd(None)


# The helper.


def _run(order: Mapping[str, object], say: Callable[[Mapping[str, object]], None]) -> None:
    """Run one command and say how it ended."""
    arguments, environment, within_s = order["arguments"], order["environment"], order["within_s"]
    try:
        process = subprocess.Popen(
            arguments,  # type: ignore[call-overload]
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # who ends this process, with a signal to its group, does not end the command
            cwd="/",
        )
    except (OSError, ValueError) as error:
        say({"number": order["number"], "status": 127, "out": "", "err": str(error)})
        return
    status: int | None = None
    try:
        out, err = process.communicate(timeout=within_s)
        status = process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=_LAST_WORDS_S)
        except subprocess.TimeoutExpired:  # something else has its output
            out, err = b"", b""
        err += f"ended after {within_s} s without an answer".encode()
    words = {"out": out.decode("utf-8", "replace"), "err": err.decode("utf-8", "replace")}
    say({"number": order["number"], "status": status, **words})


def main() -> None:
    """Run what is ordered on standard input until that ends, and leave at once, whatever is still being run."""
    speaking = threading.Lock()

    def say(answer: Mapping[str, object]) -> None:
        with speaking:
            try:
                sys.stdout.buffer.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
                sys.stdout.buffer.flush()
            except OSError:  # nobody listens any more
                os._exit(0)

    lanes = {urgent: ThreadPoolExecutor(AT_ONCE) for urgent in (False, True)}
    for line in sys.stdin.buffer:
        try:
            order = json.loads(line)
            lanes[bool(order["urgent"])].submit(_run, order, say)
        except (ValueError, KeyError):
            continue
    os._exit(0)


if __name__ == "__main__":
    main()
