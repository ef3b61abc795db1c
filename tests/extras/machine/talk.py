"""An arbiter that a test drives pass by pass, and dispatchers that say what the test wants."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from spool.extras.machine import journal, machinefile, protocol
from spool.extras.machine.arbiter import Arbiter
from spool.extras.machine.journal import EndLine, LeaseLine
from spool.extras.machine.protocol import LeaseRequest
from support import wait_for

T = TypeVar("T", bound=protocol.PeerMessage)


class Speaker:
    """A connection to an arbiter that says what a dispatcher could say, or anything else."""

    def __init__(self, path: str, uid: int | None = None) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.heard: list[protocol.Reply] = []
        self._number = 0
        before = os.geteuid()
        if uid is not None and uid != before:
            os.seteuid(uid)
        try:
            self.sock.connect(path)
        finally:
            if os.geteuid() != before:
                os.seteuid(before)
        self.sock.setblocking(False)

    def say(self, *messages: protocol.Order) -> None:
        """Send messages in one datagram."""
        protocol.send(self.sock, list(messages))

    def say_bytes(self, data: bytes) -> None:
        """Send a datagram as it is."""
        self.sock.send(data)

    def hello(self, spool: str = "spool", *uses: protocol.Use) -> None:
        """Say hello, and which leases it has."""
        self.say(*uses, protocol.Hello(protocol.VERSION, spool))

    def ask(self, cpus: int = 1, **more: object) -> int:
        """Ask for a lease and return the number of the ask."""
        self._number += 1
        self.say(protocol.Ask(self._number, LeaseRequest(cpus, **more)))  # type: ignore[arg-type]
        return self._number

    def listen(self) -> bool:
        """Take in what was said; return False once the connection is closed."""
        while True:
            try:
                data = self.sock.recv(protocol.MOST_BYTES)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not data:
                return False
            self.heard += protocol.read_replies(data)

    def all(self, kind: type[T]) -> list[T]:
        """Return the messages of one kind that it has heard."""
        self.listen()
        return [each for each in self.heard if isinstance(each, kind)]

    def grant(self, number: int) -> protocol.Granted | None:
        """Return the lease for an ask; None if there is none."""
        return next((each for each in self.all(protocol.Granted) if each.number == number), None)

    def why(self, number: int) -> str:
        """Return the last reason for which an ask waits, "" if none was said."""
        found = [each.reason for each in self.all(protocol.Wait) if each.number == number]
        return found[-1] if found else ""

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()


def journal_of(directory: Path) -> dict[int, LeaseLine]:
    """Return the leases that the journal has: those that another arbiter would begin with."""
    left: dict[int, LeaseLine] = {}
    for text in (directory / "leases.jsonl").read_bytes().splitlines():
        line = journal.parse_line(text)
        if isinstance(line, LeaseLine):
            assert line.lease not in left
            left[line.lease] = line
        elif isinstance(line, EndLine):
            del left[line.lease]
    return left


class Driven:
    """An arbiter in *directory*, with machine.toml *text*, that turns when the test wants."""

    def __init__(
        self,
        directory: Path,
        text: str = "",
        clock: Callable[[], int] = time.time_ns,
        boot_clock: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME),
    ) -> None:
        self.directory = directory
        self.text = text
        self.clock = clock
        self.boot_clock = boot_clock
        self.arbiter = self._new()
        self.speakers: list[Speaker] = []

    def _new(self) -> Arbiter:
        config = machinefile.parse(self.text.encode())
        arbiter = Arbiter(str(self.directory), config, clock=self.clock, boot_clock=self.boot_clock)
        try:
            arbiter.open()
        except BaseException:
            arbiter.close()
            raise
        return arbiter

    def restart(self, text: str | None = None) -> None:
        """Replace the arbiter by a new one, as after a kill: the old one writes nothing any more."""
        self.text = self.text if text is None else text
        self.arbiter.close()
        self.arbiter = self._new()

    def speaker(self, uid: int | None = None) -> Speaker:
        """Return a new connection."""
        speaker = Speaker(str(self.directory / "socket"), uid)
        self.speakers.append(speaker)
        return speaker

    def dispatcher(self, spool: str = "spool", uid: int | None = None) -> Speaker:
        """Return a connection that was welcomed."""
        speaker = self.speaker(uid)
        speaker.hello(spool)
        self.until(lambda: bool(speaker.all(protocol.Welcome)))
        return speaker

    def until(self, so: Callable[[], bool]) -> None:
        """Turn until something is so."""
        wait_for(lambda: so() or self.arbiter.turn(), what="what was waited for")

    def told(self, speaker: Speaker, *orders: protocol.Order) -> None:
        """Say something as that dispatcher, and turn until it is answered."""
        speaker.say(*orders)
        self.settle()

    def asked(self, speaker: Speaker, cpus: int = 1, **more: object) -> int:
        """Ask for a lease, turn until there is an answer, and return the number of the ask."""
        number = speaker.ask(cpus, **more)
        self.settle()
        return number

    def settle(self) -> None:
        """Turn until everything that was said is answered: a new dispatcher, which came last, is welcomed."""
        self.dispatcher(f"settled-{len(self.speakers)}").close()


@contextmanager
def driven(directory: Path, text: str = "", **clocks: Callable[[], int]) -> Iterator[Driven]:
    """Drive an arbiter within `with`."""
    directory.mkdir(mode=0o755, exist_ok=True)
    found = Driven(directory, text, **clocks)
    try:
        yield found
    finally:
        for speaker in found.speakers:
            speaker.close()
        found.arbiter.close()
