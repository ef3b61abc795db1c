"""An arbiter that a test drives pass by pass, and dispatchers that say what the test wants.

With root the users are real: the kernel tells the arbiter who speaks. Without, what needs one user only is tested.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from spool.extras.machine import ledger, parse, protocol
from spool.extras.machine.arbiter import Arbiter
from spool.extras.machine.ledger import EndLine, LeaseLine
from spool.extras.machine.protocol import Drop, LeaseRequest, MachineShares, Use
from spool.machine import identity
from support import as_user, wait_for

T = TypeVar("T", bound=protocol.PeerMessage)

IS_ROOT = os.getuid() == 0
ALICE, BOB, MALLORY = (12345, 12347, 12346) if IS_ROOT else (os.getuid(),) * 3
STRANGER = 12399
GIB = 1 << 30
SECOND_NS = 1_000_000_000
HOUR_NS = 3600 * SECOND_NS

several_users = pytest.mark.skipif(not IS_ROOT, reason="takes root, to speak as several users")
with_setpriv = pytest.mark.skipif(
    not IS_ROOT or shutil.which("setpriv") is None, reason="takes root and setpriv, for processes of several users"
)

USERS = f"users = [0, {ALICE}, {BOB}, {MALLORY}]\n" if IS_ROOT else f"users = [{ALICE}]\n"
MACHINE = f'{USERS}cpus = 4\nmemory = "4G"\n[resources]\nlicence = 2\n'

PASSES = 3
"""Passes of the arbiter until an ask is answered, whatever the others do: it is heard in the next, or the one after."""


def name_of(uid: int) -> str:
    """Return the name of a user as the arbiter has it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@contextmanager
def process_of(uid: int) -> Iterator[tuple[int, int]]:
    """Run a process of a user that leads a session; give its pid, and when it began."""
    process = subprocess.Popen([*as_user(uid), "sleep", "300"], start_new_session=True)
    try:
        comm = Path(f"/proc/{process.pid}/comm")
        wait_for(lambda: identity.owner_of(process.pid) == uid and comm.read_text() == "sleep\n", what="the process")
        yield process.pid, identity.start_ticks(process.pid) or 0
        assert process.poll() is None, "it was killed"
    finally:
        process.kill()
        process.wait()


class Clock:
    """A clock that a test sets."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        """Return the time, which passes a little."""
        self.now_ns += 1000
        return self.now_ns


class Speaker:
    """A connection to an arbiter that says what a dispatcher could say, or anything else.

    *machine* is the arbiter if a test drives it: then what takes an answer lets it turn.
    """

    def __init__(self, path: str, uid: int | None = None, machine: Driven | None = None) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.heard: list[protocol.Reply] = []
        self._number = 0
        self._machine = machine
        before = os.geteuid()
        if uid is not None and uid != before:
            os.seteuid(uid)
        try:
            self.sock.connect(path)
        finally:
            if os.geteuid() != before:
                os.seteuid(before)
        self.sock.setblocking(False)

    # What is said.

    def say(self, *messages: protocol.Order) -> None:
        """Send messages in one datagram."""
        protocol.send(self.sock, list(messages))

    def say_bytes(self, data: bytes) -> None:
        """Send a datagram as it is."""
        self.sock.send(data)

    def hello(self, spool: str = "spool", *uses: Use) -> None:
        """Say hello, and which leases it has."""
        self.say(*uses, protocol.Hello(protocol.VERSION, spool))

    def ask(self, cpus: int = 1, **more: object) -> int:
        """Ask for a lease and return the number of the ask."""
        self._number += 1
        self.say(protocol.Ask(self._number, LeaseRequest(cpus, **more)))  # type: ignore[arg-type]
        return self._number

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()

    # What is heard.

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
            self.heard += protocol.read(protocol.REPLIES, data)

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

    # Both, with an arbiter that a test drives.

    def tells(self, *orders: protocol.Order) -> None:
        """Say something, and let the arbiter turn until it is answered."""
        self.say(*orders)
        self._machine.settle()

    def asks(self, cpus: int = 1, **more: object) -> int:
        """Ask for a lease, let the arbiter turn until there is an answer, and return the number of the ask."""
        number = self.ask(cpus, **more)
        self._machine.settle()
        return number

    def takes(self, cpus: int = 1, **more: object) -> protocol.Granted:
        """Ask for a lease and return it."""
        number = self.ask(cpus, **more)
        self._machine.until(lambda: self.grant(number) is not None)
        lease = self.grant(number)
        assert lease is not None
        return lease

    def uses(self, cpus: int = 1, **more: object) -> protocol.Granted:
        """Take a lease and begin to use it."""
        lease = self.takes(cpus, **more)
        self.tells(Use(lease.lease))
        return lease

    def waits(self, cpus: int, passes: int = 6) -> bool:
        """Ask for a lease; return whether it is still not there after some passes. The ask is withdrawn."""
        number = self.ask(cpus)
        took = self._machine.turns(passes, lambda: self.grant(number) is not None)
        self.tells(Drop(number))
        return took > passes

    def is_answered(self) -> bool:
        """Ask for nothing and withdraw it; return whether there was an answer at once."""
        number = self.ask(0)
        took = self._machine.turns(PASSES, lambda: self.grant(number) is not None or bool(self.why(number)))
        self.say(Drop(number))
        return took <= PASSES


def journal_of(directory: Path) -> dict[int, LeaseLine]:
    """Return the leases that the journal has: those that another arbiter would begin with."""
    left: dict[int, LeaseLine] = {}
    for text in (directory / "leases.jsonl").read_bytes().splitlines():
        line = ledger.parse_line(text)
        if isinstance(line, LeaseLine):
            assert line.lease not in left
            left[line.lease] = line
        elif isinstance(line, EndLine):
            del left[line.lease]
    return left


class Driven:
    """An arbiter in *directory*, with machine.toml *text*, that turns when the test wants."""

    def __init__(self, directory: Path, text: str = "", **clocks: Callable[[], int]) -> None:
        self.directory = directory
        self.text = text
        self.clocks = clocks
        self.arbiter = self._new()
        self.speakers: list[Speaker] = []

    def _new(self) -> Arbiter:
        arbiter = Arbiter(str(self.directory), parse(self.text.encode()), **self.clocks)  # type: ignore[arg-type]
        try:
            arbiter.open()
        except BaseException:
            arbiter.close()
            raise
        return arbiter

    def restart(self) -> None:
        """Replace the arbiter by a new one, as after a kill: the old one writes nothing any more."""
        self.arbiter.close()
        self.arbiter = self._new()

    def speaker(self, uid: int | None = None) -> Speaker:
        """Return a new connection."""
        speaker = Speaker(str(self.directory / "socket"), uid, self)
        self.speakers.append(speaker)
        return speaker

    def dispatcher(self, spool: str = "spool", uid: int | None = None, *uses: Use) -> Speaker:
        """Return a connection that was welcomed."""
        speaker = self.speaker(uid)
        speaker.hello(spool, *uses)
        self.until(lambda: bool(speaker.all(protocol.Welcome)))
        return speaker

    def users(self, *uids: int) -> list[Speaker]:
        """Return a dispatcher of each of these users."""
        return [self.dispatcher(f"spool-{number}", uid) for number, uid in enumerate(uids)]

    def until(self, so: Callable[[], bool]) -> None:
        """Turn until something is so."""
        wait_for(lambda: so() or self.arbiter.turn(), what="what was waited for")

    def turns(self, most: int, until: Callable[[], bool] = lambda: False) -> int:
        """Make passes until something is so; return how many it took, *most* + 1 if that is not enough."""
        for number in range(1, most + 1):
            self.arbiter.turn()
            if until():
                return number
        return most + 1

    def settle(self) -> None:
        """Turn until everything that was said is answered: a new dispatcher, which came last, is welcomed."""
        self.dispatcher(f"settled-{len(self.speakers)}").close()

    def status(self) -> MachineShares:
        """Return what everyone can read."""
        found = protocol.parse_status((self.directory / "machine.json").read_bytes())
        assert found is not None
        return found

    def held(self) -> dict[str, int]:
        """Return the CPUs of each user, once that is written."""
        self.turns(3)
        return {each.user: each.cpus for each in self.status().users if each.cpus}


@contextmanager
def driven(directory: Path, text: str = "", **clocks: Callable[[], int]) -> Iterator[Driven]:
    """Drive an arbiter within `with`."""
    directory.mkdir(mode=0o755, exist_ok=True)
    found = Driven(directory, text, **clocks)
    try:
        yield found
    finally:
        for speaker in found.speakers:
            with contextlib.suppress(OSError):
                speaker.close()
        found.arbiter.close()
