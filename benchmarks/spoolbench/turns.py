"""Turns on a shared machine: what the arbiter costs, and what a spool loses by asking it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from spoolbench.engines import SpoolEngine
from spoolbench.figures import Samples, Size, drain, gap
from spoolbench.tools import Scratch, cpu_ns, memory_bytes, until

USERS, ASKS = 20, 64
CPUS = 64
_OTHER_UID = 23451


def turns(engine: SpoolEngine, scratch: Scratch, size: Size) -> Samples:
    """Measure the arbiter by itself, then a spool that asks it in turns with one that has the machine alone."""
    found: Samples = {
        "turns_decide": _decisions(size.trips),
        "turns_decide_kinds": _decisions(size.trips, ASKS),
        "turns_decide_full": _decisions(size.trips, full=True),
    }
    found |= _over_the_socket(engine, scratch, size)
    shared = SharedEngine(scratch, engine.command)
    for _ in range(size.rounds):
        for figure, key in ((gap, "gap"), (drain, "drain")):
            for each, who in ((engine, "alone"), (shared, "shared")):
                found.setdefault(f"turns_{key}_{who}", []).extend(figure(each, scratch, size)[key])
    middle = {key: statistics.median(values) for key, values in found.items()}
    found["turns_gap_more"] = [middle["turns_gap_shared"] - middle["turns_gap_alone"]]
    found["turns_drain_part"] = [middle["turns_drain_shared"] / middle["turns_drain_alone"]]
    return found


class SharedEngine(SpoolEngine):
    """A spool on a machine that is shared, with an arbiter that has a CPU for each slot."""

    name = "spool, shared"

    def __init__(self, scratch: Scratch, command: list[str]) -> None:
        super().__init__(scratch, command)
        self.arbiter: subprocess.Popen[bytes] | None = None

    def prepare(self, slots: int) -> None:
        """Make an empty spool, and have an arbiter serve."""
        directory = _directory(self.scratch, slots)
        self.config = f'machine = "{directory}"'
        super().prepare(slots)
        self.arbiter = _served(self.command, directory, self.scratch)

    def stop(self) -> None:
        """End the dispatcher, and then the arbiter."""
        super().stop()
        if self.arbiter is not None:
            _end(self.arbiter)
            self.arbiter = None


_directories = count(1)


def _directory(scratch: Scratch, cpus: int) -> Path:
    directory = scratch.path / f"machine{next(_directories)}"
    directory.mkdir(mode=0o755)
    text = f"users = [{os.getuid()}, {_OTHER_UID}]\ncpus = {cpus}\nresources.licence = 1\n"
    (directory / "machine.toml").write_text(text)
    return directory


def _served(command: list[str], directory: Path, scratch: Scratch) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [*command, "machine", "serve", str(directory)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=scratch.trash,
        start_new_session=True,
    )
    try:
        until((directory / "socket").exists, 30, "the arbiter's socket")
    except TimeoutError:
        _end(process)
        raise
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(30)


def _decisions(times: int, kinds: int = 4, *, full: bool = False) -> list[float]:
    """Return the milliseconds of decisions over asks of many users, of *kinds* each; *full*: with too little free."""
    from spool.core.model import SECOND_NS, Machine, Policy
    from spool.extras.machine.ledger import LeaseLedger
    from spool.extras.machine.protocol import Holder, LeaseRequest

    random, numbers, now_ns = Random(1), count(1), 1_700_000_000 * SECOND_NS
    ledger = LeaseLedger(Policy(), (), 1)
    machine = Machine(CPUS, 1 << 40)
    holders = [Holder(1000 + number, f"user{number}", "spool") for number in range(USERS)]

    def request() -> LeaseRequest:
        return LeaseRequest(
            cpus=random.choice((1, 1, 1, 2, 4, 8)),
            memory_bytes=random.choice((0, 1 << 30, 4 << 30)),
            limit_ns=random.choice((0, 3600, 8 * 3600)) * SECOND_NS,
            like=f"{random.getrandbits(40):x}",
        )

    wanted = {holder: [request() for _ in range(kinds)] for holder in holders}

    def ask(holder: Holder) -> None:
        ledger.ask(holder, next(numbers), random.choice(wanted[holder]), now_ns)

    for holder in holders:
        for _ in range(ASKS):
            ask(holder)
    found = []
    while len(found) < times:
        now_ns += random.randrange(2 * SECOND_NS)
        begun = time.perf_counter()
        starts = ledger.decide(machine, now_ns)
        took = (time.perf_counter() - begun) * 1e3
        if full is not bool(starts):
            found.append(took)
        for each, grant in starts:
            each.grant, each.at_ns = grant, now_ns
            ledger.grant(each)
            ask(each.holder)
        if not starts:
            ledger.end(random.choice(list(ledger.leases.values())), now_ns)
    return found


class _Peer:
    """What a dispatcher says, without the dispatcher."""

    def __init__(self, directory: Path, spool: str) -> None:
        from spool.extras.machine import protocol

        self._protocol = protocol
        self._numbers = count(1)
        begun = time.perf_counter()
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(30)
        while True:
            try:
                self.sock.connect(str(directory / "socket"))
                break
            except BlockingIOError:  # too many are ahead; a dispatcher tries again as soon
                time.sleep(0.1)
        self.say(protocol.Hello(protocol.VERSION, spool))
        self.hear(protocol.Welcome)
        self.joined_ms = (time.perf_counter() - begun) * 1e3

    def say(self, *messages: Any) -> None:
        """Send one datagram."""
        self._protocol.send(self.sock, list(messages))

    def hear(self, kind: Any) -> Any:
        """Return the next message of a kind."""
        while True:
            for each in self._protocol.read(self._protocol.REPLIES, self.sock.recv(1 << 18)):
                if isinstance(each, kind):
                    return each

    def ask(self, *, ending: int | None = None) -> int:
        """End a lease, if any, and ask for another one; return it once it is granted."""
        protocol = self._protocol
        end = () if ending is None else (protocol.EndLease(ending),)
        self.say(*end, protocol.Ask(next(self._numbers), protocol.LeaseRequest(1)))
        return int(self.hear(protocol.Granted).lease)

    def want_licences(self, times: int) -> None:
        """Ask for the licence so often; one ask is granted, and the others wait."""
        protocol = self._protocol
        request = protocol.LeaseRequest(1, resources=(("licence", 1),))
        self.say(*(protocol.Ask(next(self._numbers), request) for _ in range(times)))
        self.hear(protocol.Wait)


def _over_the_socket(engine: SpoolEngine, scratch: Scratch, size: Size) -> Samples:
    """Speak with an arbiter as dispatchers do, and look at its process."""
    directory = _directory(scratch, 3)
    process = _served(engine.command, directory, scratch)
    found: Samples = {}
    try:
        peer, other = _Peer(directory, "first"), _Peer(directory, "other")
        other.want_licences(ASKS)
        lease, trips = peer.ask(), []
        for _ in range(size.trips):
            begun = time.perf_counter()
            lease = peer.ask(ending=lease)
            trips.append((time.perf_counter() - begun) * 1e3)
        found["turns_trip"] = trips
        found["turns_trip_10"] = [sorted(trips)[len(trips) // 10]]
        time.sleep(min(3.0, size.idle_s))
        before, begun_ns, seconds = cpu_ns(process.pid), time.monotonic_ns(), min(10.0, size.idle_s)
        time.sleep(seconds)
        found["turns_idle"] = [100 * (cpu_ns(process.pid) - before) / (time.monotonic_ns() - begun_ns)]
        found["turns_rss"] = [memory_bytes(process.pid)[0] / 2**20]
        found["turns_join"] = [_Peer(directory, f"joins{number}").joined_ms for number in range(size.joins)]
        if os.getuid() == 0:  # the flood is another user's
            with _flooded(directory):
                joined = [_Peer(directory, f"floods{number}").joined_ms for number in range(size.joins)]
            found["turns_join_flood"] = joined
    finally:
        _end(process)
    return found


_FLOOD = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
while True:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(sys.argv[1])
    except OSError:
        pass
"""


@contextmanager
def _flooded(directory: Path) -> Iterator[None]:
    """Have a process connect and leave, as fast as it can."""
    flood = subprocess.Popen([sys.executable, "-c", _FLOOD, str(directory / "socket"), str(_OTHER_UID)])
    try:
        time.sleep(0.5)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            flood.kill()
        flood.wait()
