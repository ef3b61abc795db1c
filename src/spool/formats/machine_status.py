"""The files of the arbiter of a shared machine (FORMAT 17): `machine.json` for everyone, and its own journal.

`machine.json` says who has how much, and names no job. A reader ignores unknown keys, so that the file can grow.
"""

from __future__ import annotations

from msgspec import DecodeError, Struct, json

from spool.formats.arbiter_protocol import LeaseRequest


class UserShare(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one user has of the machine, over all of that user's spools."""

    user: str
    leases: int = 0
    cpus: int = 0
    memory_bytes: int = 0
    gpus: int = 0  # by lease or without
    resources: dict[str, int] = {}
    asks: int = 0  # starts that wait for a lease


class GpuShare(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The users that have one GPU by lease. One with memory shares it."""

    uuid: str
    index: int
    users: tuple[tuple[str, int | None], ...] = ()  # user, bytes granted; None: not shared
    without_lease: tuple[str, ...] = ()  # users with processes there
    problem: str | None = None


class MachineShares(Struct, frozen=True, kw_only=True):
    """The content of `machine.json`."""

    version: int = 1
    written_at_ns: int
    since_ns: int  # the arbiter serves since then
    pid: int
    cpus: int
    memory_bytes: int
    resources: dict[str, int]
    users: tuple[UserShare, ...]
    gpus: tuple[GpuShare, ...]
    gpu_problem: str | None = None


def render(status: MachineShares) -> bytes:
    """Return the text of the file."""
    return json.encode(status) + b"\n"


def parse(text: bytes) -> MachineShares | None:
    """Return the content of the file; None if it cannot be one."""
    try:
        return json.decode(text, type=MachineShares)
    except (DecodeError, RecursionError, UnicodeDecodeError):
        return None


# The journal of the leases, and the past of each user: one JSON array a line, its word first.


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


class UserLine(Struct, array_like=True, frozen=True, tag="user"):
    """The past of a user, for fair share and for guesses of run times."""

    user: str
    used: float  # up to `at_ns`, decayed, by the leases of then too; in GPU seconds, CPUs with their weight
    at_ns: int
    ran_ns: tuple[int, ...] = ()  # how long the last leases were held
    kept: int | None = None  # leases in a row that kept their limits, of a user whose limits do not count


class UseLine(Struct, array_like=True, frozen=True, tag="use"):
    """A lease that is over, as spool 0.1 wrote it."""

    user: str
    uid: int
    demand: LeaseRequest
    gpus: int
    asked_at_ns: int
    at_ns: int
    until_ns: int


Line = Boot | LeaseLine | BeganLine | EndLine | UserLine | UseLine

_lines: json.Decoder[Line] = json.Decoder(Line)


def render_line(line: Line) -> bytes:
    """Return a line with its newline."""
    return json.encode(line) + b"\n"


def parse_line(text: bytes) -> Line | None:
    """Return what a line says; None if it cannot be one, as a line that a crash cut off."""
    try:
        return _lines.decode(text)
    except (DecodeError, RecursionError, UnicodeDecodeError):
        return None
