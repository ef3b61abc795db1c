"""What an arbiter knows when it begins: the leases of this boot, and the past of each user.

`leases.jsonl` has every lease before its dispatcher hears of it, so that an arbiter that is killed at any moment comes
back with all of them. It lies where a reboot empties it, and names its boot for the case that it does not: after a
reboot no run is left, and so no lease. `usage.jsonl` outlives a reboot, for fair share and for guesses of run times. It
has a line for each user, so that nothing that others do can displace it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time

from msgspec import DecodeError, Struct, json

from spool.core.errors import LockHeld, cannot
from spool.extras.machine.ledger import Holder, Lease, LeaseLedger, UserLine
from spool.extras.machine.protocol import LeaseRequest, Units
from spool.store.disk import Disk, open_log, read_file

log = logging.getLogger(__name__)

LEASES, USAGE, LOCK = "leases.jsonl", "usage.jsonl", ".lock"
_MOST_BYTES = 256 << 20  # of a journal; a line has some 200, at most 2,000
_COMPACT_AFTER = 20_000  # lines
_COMPACT_AGAIN_S = 10.0  # after an error
_SAVE_EVERY_S = 10.0  # what an arbiter that is killed forgets of the past


# One JSON array a line, its word first.


class Boot(Struct, array_like=True, frozen=True, tag="boot"):
    """The first line: leases of another boot are over."""

    boot_id: str
    next_lease: int = 0  # every lease before this line has a lower number


class LeaseLine(Struct, array_like=True, frozen=True, tag="grant"):
    """A lease was granted. It is on the disk before the dispatcher hears of it."""

    lease: int
    uid: int
    user: str
    spool: str
    demand: LeaseRequest
    gpu_uuids: tuple[str, ...]
    gpu_indices: tuple[int, ...]
    pool_indices: tuple[tuple[str, tuple[int, ...]], ...]
    asked_at_ns: int
    at_ns: int
    since_boot_ns: int  # `at_ns` on a clock that cannot be set
    cpu_list: str = ""  # the CPUs that its run is pinned to
    claimed: bool = False  # its run began without a lease


class BeganLine(Struct, array_like=True, frozen=True, tag="began"):
    """Which wrapper uses a lease."""

    lease: int
    pid: int
    ticks: int


class EndLine(Struct, array_like=True, frozen=True, tag="end"):
    """A lease is over."""

    lease: int


Line = Boot | LeaseLine | BeganLine | EndLine | UserLine

_decoder: json.Decoder[Line] = json.Decoder(Line)


def render_line(line: Line) -> bytes:
    """Return a line with its newline."""
    return json.encode(line) + b"\n"


def parse_line(text: bytes) -> Line | None:
    """Return what a line says; None if it cannot be one, as a line that a crash cut off."""
    try:
        return _decoder.decode(text)
    except (DecodeError, RecursionError, UnicodeDecodeError):
        return None


class LeaseJournal:
    """The two files of one arbiter. Whatever cannot be written raises OSError, and is not granted then."""

    def __init__(self, directory: str, state_directory: str, boot_id: str) -> None:
        self._leases = os.path.join(directory, LEASES)
        self._usage = os.path.join(state_directory, USAGE)
        self._lock_path = os.path.join(directory, LOCK)
        self._boot_id = boot_id
        self._disk = Disk(directory, hidden=True)
        self._past_disk = Disk(state_directory, hidden=True)
        self._fd = -1
        self._lines = 0
        self._not_before = 0.0  # monotonic: when the leases may be compacted again
        self._save_at = 0.0  # monotonic: when the past is saved again
        self._saved = -1  # the version of the ledger then
        self._locked = -1

    def open(self, ledger: LeaseLedger, now_ns: int) -> None:
        """Read both files into *ledger*, and begin new ones. Raises LockHeld if another arbiter writes them."""
        self._lock()
        self._read_usage(ledger, now_ns)
        self._read_leases(ledger)
        self._save(ledger, now_ns)
        self._compact(ledger)

    def close(self, ledger: LeaseLedger, now_ns: int) -> None:
        """Save the past, if the files are open, and close them."""
        if self._fd >= 0:
            self._save_at = 0.0
            self._try_to_save(ledger, now_ns)
        for fd in (self._fd, self._locked):
            if fd >= 0:
                os.close(fd)
        self._fd = self._locked = -1

    def granted(self, leases: list[Lease]) -> None:
        """Record leases; they may be told once this returns."""
        self._append([line for lease in leases for line in _lines(lease)])

    def note(self, line: BeganLine | EndLine, lease: Lease) -> None:
        """Record what a lease has come to. Never raises: its dispatcher says it again to an arbiter that begins."""
        try:
            self._append([render_line(line)])
        except OSError as error:
            log.error("cannot record what became of a lease of %s: %s", lease.holder.user, error)

    def tidy(self, ledger: LeaseLedger, now_ns: int) -> None:
        """Save the past now and then, and begin a new journal if the old one is long, or lost. Never raises."""
        self._try_to_save(ledger, now_ns)
        if time.monotonic() < self._not_before:
            return
        try:
            if self._fd < 0 or self._lines > _COMPACT_AFTER + 4 * len(ledger.leases):
                self._compact(ledger)
        except OSError as error:
            log.error("cannot begin a new journal: %s", error)
            self._not_before = time.monotonic() + _COMPACT_AGAIN_S

    def _lock(self) -> None:
        self._locked = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            directory = os.path.dirname(self._lock_path)
            raise LockHeld(cannot("serve in", "directory", "another arbiter serves there", where=directory)) from None

    def _append(self, lines: list[bytes]) -> None:
        self._disk.append(self._fd, b"".join(lines))
        self._lines += len(lines)

    def _read_leases(self, ledger: LeaseLedger) -> None:
        text = read_file(self._leases, _MOST_BYTES) or b""
        first, *lines = [parse_line(line) for line in text.splitlines()] or [None]
        if isinstance(first, Boot):
            ledger.next_number = max(ledger.next_number, first.next_lease)
        if not isinstance(first, Boot) or first.boot_id != self._boot_id:
            if text:
                log.info("%s is of another boot, or cannot be read: no lease is left", self._leases)
            return
        left: dict[int, Lease] = {}
        for line in lines:
            match line:
                case LeaseLine():
                    left[line.lease] = _lease(line)
                    ledger.next_number = max(ledger.next_number, line.lease + 1)  # if the clock was set back since
                case BeganLine() if line.lease in left:
                    left[line.lease].pid, left[line.lease].ticks = line.pid, line.ticks
                case EndLine():
                    left.pop(line.lease, None)
        for lease in left.values():
            ledger.put(lease)

    def _read_usage(self, ledger: LeaseLedger, now_ns: int) -> None:
        text = read_file(self._usage, _MOST_BYTES) or b""
        for line in map(parse_line, text.splitlines()):
            if isinstance(line, UserLine):
                ledger.recall(line, now_ns)

    def _try_to_save(self, ledger: LeaseLedger, now_ns: int) -> None:
        if time.monotonic() < self._save_at or (self._saved == ledger.version and not ledger.leases):
            return
        self._save_at = time.monotonic() + _SAVE_EVERY_S
        try:
            self._save(ledger, now_ns)
        except OSError as error:  # the past is worth less than the present
            log.error("cannot write %s: %s; what is used now is not remembered", self._usage, error)

    def _save(self, ledger: LeaseLedger, now_ns: int) -> None:
        """Write the past of each user."""
        self._past_disk.put(self._usage, b"".join(map(render_line, ledger.past(now_ns))), mode=0o640)
        self._saved = ledger.version

    def _compact(self, ledger: LeaseLedger) -> None:
        """Begin a new journal that has the leases of now alone."""
        data = [render_line(Boot(self._boot_id, ledger.next_number))]
        for lease in ledger.leases.values():
            data += _lines(lease)
        self._disk.put(self._leases, b"".join(data))
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1  # it has lost its name: unless the next step succeeds, nothing can be granted
        self._fd, self._lines = open_log(self._leases), len(data)


def _lines(lease: Lease) -> list[bytes]:
    holder, units = lease.holder, Units.of(lease.grant)
    line = LeaseLine(
        lease.number,
        holder.uid,
        holder.user,
        holder.spool,
        lease.demand,
        units.gpu_uuids,
        units.gpu_indices,
        units.pool_indices,
        lease.asked_at_ns,
        lease.at_ns,
        lease.since_boot_ns,
        units.cpu_list,
        lease.claimed,
    )
    began = [render_line(BeganLine(lease.number, lease.pid, lease.ticks))] if lease.pid else []
    return [render_line(line), *began]


def _lease(line: LeaseLine) -> Lease:
    lease = Lease(Holder(line.uid, line.user, line.spool), line.lease, line.demand, line.asked_at_ns)
    units = Units(line.gpu_uuids, line.gpu_indices, line.pool_indices, line.cpu_list)
    lease.grant, lease.claimed = units.granted(line.demand), line.claimed
    lease.at_ns, lease.since_boot_ns = line.at_ns, line.since_boot_ns
    lease.begun = True  # its dispatcher may have said so to an arbiter that is gone
    return lease
