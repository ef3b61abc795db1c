"""`machine.json` (FORMAT 17.3): who has how much of the machine, for everyone, and naming no job.

A reader ignores unknown keys, so that the file can grow. To a reader it is another account's: it counts only if an
account that may serve this machine wrote it, it is read up to a limit, and its numbers must be such as can be added.
Its words are shown as all text from outside is.
"""

from __future__ import annotations

from msgspec import DecodeError, Struct, json

from spool.core.model import SECOND_NS
from spool.core.units import show_duration
from spool.extras.machine import STATUS, SharedMachine, served_in
from spool.query.shared import GpuShare, MachineSharing, MachineUse, PoolUse, UserShare
from spool.store.ownership import name_of
from spool.store.reading import read_with_status

_SILENT_NS = 5 * SECOND_NS  # an arbiter that has not renewed the file for longer does not answer
_MOST_BYTES = 4 << 20
_MOST = 1 << 62  # a larger number is a mistake, or meant to do harm
_MOST_USERS = 4096


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


def sharing(directory: str, owner: str | None, uid: int | None, now_ns: int) -> MachineSharing:
    """Return the shared machine that is served in *directory*, as the user *uid* sees it. *owner* may serve it too."""
    return read(served_in(directory, owner), uid, now_ns)


def read(place: SharedMachine, uid: int | None, now_ns: int) -> MachineSharing:
    """Return the shared machine that is served at *place*, as the user *uid* sees it."""
    path = f"{place.directory}/{STATUS}"

    def unknown(problem: str, written_at_ns: int | None = None) -> MachineSharing:
        return MachineSharing(place.directory, problem, place.remedy, written_at_ns, None)

    try:
        found = read_with_status(path, _MOST_BYTES)
    except OSError as error:
        return unknown(f"{path} cannot be read: {error.strerror or error}")
    if found is None:
        return unknown(f"the arbiter is not running: there is no {path}")
    status, text = found
    if status.st_uid not in place.servers:
        return unknown(f"{path} belongs to {name_of(status.st_uid)}, who is not trusted to serve this machine")
    told = parse(text)
    if told is None or not _is_sound(told):
        return unknown(f"{path} is damaged", status.st_mtime_ns)
    silent_ns = now_ns - status.st_mtime_ns
    problem = f"the arbiter has not answered for {show_duration(silent_ns)}" if silent_ns > _SILENT_NS else ""
    return MachineSharing(place.directory, problem, place.remedy, status.st_mtime_ns, _use(told, uid))


def _is_sound(told: MachineShares) -> bool:
    """Whether all numbers can be added, and no list is longer than a machine could need."""
    numbers = [told.pid, told.cpus, told.memory_bytes, told.since_ns, *told.resources.values()]
    for share in told.users:
        numbers += (share.leases, share.cpus, share.memory_bytes, share.gpus, share.asks, *share.resources.values())
    for gpu in told.gpus:
        numbers += (size for _, size in gpu.users if size is not None)
    return len(told.users) <= _MOST_USERS and all(0 <= number <= _MOST for number in numbers)


def _use(told: MachineShares, uid: int | None) -> MachineUse:
    users = told.users
    name = name_of(uid) if uid is not None else ""
    own = next((share for share in users if share.user == name), UserShare(user=name))
    others = [share for share in users if share.user != own.user]
    return MachineUse(
        arbiter=told.pid,
        since_at_ns=told.since_ns,
        cpus=told.cpus,
        cpus_granted=sum(share.cpus for share in users),
        memory_bytes=told.memory_bytes,
        memory_granted_bytes=sum(share.memory_bytes for share in users),
        gpus=len(told.gpus),
        gpus_granted=sum(bool(gpu.users) for gpu in told.gpus),
        gpus_free=sum(not (gpu.users or gpu.without_lease) for gpu in told.gpus),
        gpu_problem=told.gpu_problem,
        resources={
            name: PoolUse(total, sum(share.resources.get(name, 0) for share in users))
            for name, total in told.resources.items()
        },
        own=own,
        others=tuple(sorted(others, key=_by_part)),
        by_gpu={gpu.uuid: gpu for gpu in told.gpus},
    )


def _by_part(share: UserShare) -> tuple[object, ...]:
    return -share.gpus, -share.cpus, -share.memory_bytes, -share.leases, -share.asks, share.user
