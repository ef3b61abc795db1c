"""`machine.json`, the arbiter's view of a shared machine for everyone: who has how much (FORMAT 17). It names no job.

A reader ignores unknown keys, so that the file can grow.
"""

from __future__ import annotations

from msgspec import DecodeError, Struct, json


class UserShare(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one user has of the machine, over all of that user's spools."""

    user: str
    leases: int = 0
    cpus: int = 0
    memory_bytes: int = 0
    gpus: int = 0
    resources: dict[str, int] = {}  # noqa: RUF012  (msgspec copies it)
    asks: int = 0  # starts that wait for a lease


class GpuShare(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The users that have one GPU by lease. One with memory shares it."""

    uuid: str
    index: int
    users: tuple[tuple[str, int | None], ...] = ()  # user, bytes granted; None: not shared
    problem: str | None = None


class MachineStatus(Struct, frozen=True, kw_only=True):
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


def render(status: MachineStatus) -> bytes:
    """Return the text of the file."""
    return json.encode(status) + b"\n"


def parse(text: bytes) -> MachineStatus | None:
    """Return the content of the file; None if it cannot be one."""
    try:
        return json.decode(text, type=MachineStatus)
    except (DecodeError, RecursionError):
        return None
