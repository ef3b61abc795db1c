"""What an arbiter and the dispatchers of its users say to each other, and `machine.json`, which shows who has what.

One datagram of a SOCK_SEQPACKET socket is a JSON array of messages, each an array that begins with its word. The kernel
says who speaks, so no message names a user, and none names a job: a lease is for a request. Everything is bounded here,
before any other code sees it: what a peer sends, what it does not read, and how many connections it has.
"""

from __future__ import annotations

import grp
import pwd
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, TypeVar

from msgspec import DecodeError, Meta, Struct, json

from spool.core.model import SECOND_NS, Grant, Pool, Request
from spool.core.units import show_duration
from spool.extras.machine import STATUS, served_in
from spool.formats.state import PoolView
from spool.formats.wire import decoded
from spool.query.shared import GpuShare, MachineSharing, MachineUse, UserShare
from spool.store.ownership import name_of
from spool.store.reading import read_with_status

T = TypeVar("T")

VERSION = 2
MOST_BYTES = 60_000  # of one datagram
MOST_MESSAGES = 256  # of one datagram
MOST_ASKS = 256  # open asks of one spool; of one user, no more take part in a decision
MOST_LEASES = 3000  # of one user
MOST_TEXT = 500  # characters of a reason
_MOST_POOLS = 16  # of one request
_MOST_INDICES = 1024  # of one resource
_CREDENTIALS = struct.Struct("iII")  # user ids have 32 bits

_Word = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+\Z")]
_Label = Annotated[str, Meta(max_length=64, pattern=r"^[ -~]*\Z")]
_Text = Annotated[str, Meta(max_length=MOST_TEXT)]
_Count = Annotated[int, Meta(ge=0, le=1 << 20)]
_Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
_Number = Annotated[int, Meta(ge=0, le=1 << 53)]
_Moment = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # in nanoseconds; 1 << 53 is only 104 days
_Pid = Annotated[int, Meta(ge=0, le=1 << 22)]
_Uuid = Annotated[str, Meta(max_length=96, pattern=r"^[A-Za-z0-9._:/-]+\Z")]
_Indices = Annotated[tuple[_Count, ...], Meta(max_length=_MOST_INDICES)]


class LeaseRequest(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a start needs of the machine; leases and asks with equal demands are interchangeable.

    0 is "not requested" of memory, GPU memory and the time limit; "" is any GPU type.
    """

    cpus: _Count
    memory_bytes: _Bytes = 0
    gpus: _Count = 0
    gpu_memory_bytes: _Bytes = 0
    gpu_type: _Label = ""
    resources: Annotated[tuple[tuple[_Label, _Count], ...], Meta(max_length=_MOST_POOLS)] = ()  # of the machine's pools
    limit_ns: _Moment = 0
    like: Annotated[str, Meta(max_length=16, pattern=r"^[0-9a-f]*\Z")] = ""  # equal for jobs that last about as long
    gpu_min_memory_bytes: _Bytes = 0
    other_gpu_types: Annotated[tuple[_Label, ...], Meta(max_length=16)] = ()  # any of them will do too

    def __post_init__(self) -> None:
        if len({name for name, _ in self.resources}) < len(self.resources):
            raise ValueError("it names a resource twice")

    def request(self) -> Request:
        """Return it as a request."""
        return Request(
            cpus=self.cpus,
            memory_bytes=self.memory_bytes or None,
            gpus=self.gpus,
            gpu_memory_bytes=self.gpu_memory_bytes or None,
            gpu_types=(self.gpu_type, *self.other_gpu_types) if self.gpu_type else (),
            resources=self.resources,
            gpu_min_memory_bytes=self.gpu_min_memory_bytes or None,
        )


class Units(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Which parts of the machine a lease has: GPUs, and units of resources with indices."""

    gpu_uuids: Annotated[tuple[_Uuid, ...], Meta(max_length=64)] = ()
    gpu_indices: _Indices = ()
    pool_indices: Annotated[tuple[tuple[_Label, _Indices], ...], Meta(max_length=_MOST_POOLS)] = ()

    @staticmethod
    def of(grant: Grant) -> Units:
        """Return the units of *grant*."""
        return Units(grant.gpu_uuids, grant.gpu_indices, grant.resource_indices)

    def granted(self, demand: LeaseRequest) -> Grant:
        """Return what a lease with these units grants for *demand*."""
        return Grant(
            cpus=demand.cpus,
            memory_bytes=demand.memory_bytes or None,
            gpu_uuids=self.gpu_uuids,
            gpu_indices=self.gpu_indices,
            gpu_memory_bytes=(demand.gpu_memory_bytes or None) if demand.gpus else None,
            resources=demand.resources,
            resource_indices=self.pool_indices,
        )

    def meet(self, demand: LeaseRequest, pools: Iterable[Pool]) -> bool:
        """Whether they are what was asked for, no more and nothing else; *pools* are the machine's resources."""
        units, wanted = dict(self.pool_indices), dict(demand.resources)
        named = {pool.name: set(pool.indices) for pool in pools if pool.indices and pool.name in wanted}
        counts = {len(self.gpu_uuids), len(set(self.gpu_uuids)), len(self.gpu_indices), len(set(self.gpu_indices))}
        return (
            counts == {demand.gpus}
            and len(units) == len(self.pool_indices)
            and units.keys() == named.keys()
            and all(len(units[name]) == len(named[name].intersection(units[name])) == wanted[name] for name in named)
        )


class PeerMessage(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A message: its word, then its fields."""


class Hello(Struct, array_like=True, frozen=True, tag="hello"):
    """The spool that speaks has the leases whose use was said before, and no others. *spool* is a hash of its path.

    Before it only `Use` may be said, and behind it all else. Another version's may have more fields.
    """

    version: _Number
    spool: _Word


class Use(PeerMessage, frozen=True, tag="use"):
    """A lease is in use, or about to be: it no longer lapses.

    The wrapper that uses it is the proof of its use if the dispatcher is gone; pid 0 while that is unknown.
    """

    lease: _Number
    pid: _Pid = 0
    ticks: _Number = 0  # its start, in clock ticks since boot


class Ask(PeerMessage, frozen=True, tag="ask"):
    """A start wants a lease. *number* is new for each ask and claim, and the answer repeats it."""

    number: _Number
    demand: LeaseRequest


class Claim(PeerMessage, frozen=True, tag="claim"):
    """A run that has no lease, as it began before its spool took part, wants one for what it has and its wrapper."""

    number: _Number
    demand: LeaseRequest
    units: Units
    pid: _Pid
    ticks: _Number


class Drop(PeerMessage, frozen=True, tag="drop"):
    """An ask is withdrawn; a lease that was granted for it meanwhile is over."""

    number: _Number


class EndLease(PeerMessage, frozen=True, tag="end"):
    """A lease is over."""

    lease: _Number


class Welcome(PeerMessage, frozen=True, tag="welcome"):
    """The answer to a hello: the totals of the machine."""

    cpus: _Count
    memory_bytes: _Bytes
    pools: Annotated[tuple[tuple[_Label, _Count, _Indices], ...], Meta(max_length=_MOST_INDICES)] = ()  # with totals

    def __post_init__(self) -> None:
        if any(indices and len(set(indices)) != total for _, total, indices in self.pools):
            raise ValueError("a resource has another total than indices")


class Unknown(PeerMessage, frozen=True, tag="unknown"):
    """A lease whose use was said does not exist."""

    lease: _Number


class Granted(PeerMessage, frozen=True, tag="grant"):
    """The answer to an ask or a claim. The lease lapses if it is not used before that time on the clock since boot."""

    number: _Number
    lease: _Number
    begin_before_ns: _Moment
    units: Units = Units()


class Wait(PeerMessage, frozen=True, tag="wait"):
    """The other answer: why an ask must wait, sent again when the reason changes; why a claim does not count."""

    number: _Number
    reason: _Text


class Refused(PeerMessage, frozen=True, tag="refused"):
    """The arbiter does not serve this user, and closes the connection."""

    reason: _Text


Order = Hello | Use | Ask | Claim | Drop | EndLease
"""What a dispatcher says."""
Reply = Welcome | Unknown | Granted | Wait | Refused
"""What the arbiter says."""

ORDERS: json.Decoder[list[Order]] = json.Decoder(Annotated[list[Order], Meta(max_length=MOST_MESSAGES)])
REPLIES: json.Decoder[list[Reply]] = json.Decoder(Annotated[list[Reply], Meta(max_length=MOST_MESSAGES)])
_encoder = json.Encoder()


class NotAMessage(ValueError):  # noqa: N818  (like the errors of core/errors.py)
    """A datagram that does not parse."""


def read(decoder: json.Decoder[T], text: bytes) -> T:
    """Return what *text* says: ORDERS reads a datagram of a dispatcher, REPLIES one of the arbiter.

    Raises only NotAMessage.
    """
    try:
        return decoder.decode(text)
    except (DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotAMessage(str(error)) from None


def send(sock: socket.socket, messages: list[Order] | list[Reply]) -> None:
    """Send *messages* in as few datagrams as may be, and remove what was sent. Raises OSError; the rest stays."""
    most = MOST_MESSAGES
    while messages:
        datagram = _encoder.encode(messages[:most])
        if len(datagram) > MOST_BYTES and most > 1:
            most = min(most, len(messages)) // 2
        else:
            sock.send(datagram)
            del messages[:most]


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of the process at the other end, as of its `connect` or `listen`. Raises OSError."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


FIRST_UID = 1000
"""Accounts of people begin here (login.defs); those below it are served only if they are named."""

MOST_CONNECTIONS = 16
"""Connections of one user."""

_KNOWN_FOR_S = 10.0  # how long an answer about an account holds
_MOST_KNOWN = 1000
_NOBODY = 65_534
_PER_SECOND = 4_000  # messages of one user; a long datagram counts as more
_BURST = 8_000
_BYTES_A_MESSAGE = 256
_UNREAD = 64  # datagrams of a peer that is sent away


class Allowance:
    """How much one user may say, over all connections: a user who leaves and comes back has said it all the same."""

    def __init__(self) -> None:
        self._made_up_at = 0.0  # monotonic: when all that was said counts no more

    def use(self, tokens: int) -> None:
        """Count something that was said, or done."""
        self._made_up_at = max(self._made_up_at, time.monotonic()) + tokens / _PER_SECOND

    def pause_s(self) -> float:
        """Return how long the user must be silent because of what was said, 0 if more may be said."""
        over_s = self._made_up_at - time.monotonic() - _BURST / _PER_SECOND
        return over_s + 0.001 if over_s >= 0 else 0.0


class Account(Struct, frozen=True):
    """A user as the machine knows it now. *refusal* is why it is not served, "" if it is."""

    uid: int
    name: str
    refusal: str = ""


class Accounts:
    """The accounts that may take part: *users* has names, `@group` and uids; empty: every person's."""

    def __init__(self, users: Sequence[str | int]) -> None:
        self._uids = {user for user in users if isinstance(user, int)}
        self._names = {user for user in users if isinstance(user, str) and not user.startswith("@")}
        self._groups = [user[1:] for user in users if isinstance(user, str) and user.startswith("@")]
        self._all = not users
        self._known: dict[int, tuple[float, Account]] = {}
        self.allowances = defaultdict[int, Allowance](Allowance)  # how much each user may say

    def of(self, uid: int) -> Account:
        """Return the account of *uid*, looked up again after a while: users leave groups, and accounts go."""
        now = time.monotonic()
        until, account = self._known.get(uid, (0.0, None))
        if account is None or until < now:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            account = self._look_up(uid)
            self._known[uid] = now + _KNOWN_FOR_S, account
        return account

    def _look_up(self, uid: int) -> Account:
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            refusal = "" if uid in self._uids else f"uid {uid} has no account on this machine"
            return Account(uid, str(uid), refusal)
        name = entry.pw_name
        if uid in self._uids or name in self._names:
            return Account(uid, name)
        if uid < FIRST_UID or uid == _NOBODY:
            return Account(uid, name, f"{name} is a system account, and `users` of machine.toml does not name it")
        if self._all or any(_is_in(group, name, entry.pw_gid) for group in self._groups):
            return Account(uid, name)
        return Account(uid, name, f"`users` of machine.toml does not have {name}")


def _is_in(group: str, name: str, gid: int) -> bool:
    try:
        found = grp.getgrnam(group)
    except KeyError:
        return False
    return found.gr_gid == gid or name in found.gr_mem


class Holder(Struct, frozen=True):
    """A spool of a user: what asks for leases and holds them. *spool* is what its dispatcher calls it."""

    uid: int
    user: str
    spool: str


class Connection(Struct, eq=False):
    """A connected dispatcher. It is disconnected if it sends invalid messages, or does not read the answers."""

    sock: socket.socket
    account: Account
    allowance: Allowance
    uses: list[Use] = []  # said before the hello
    holder: Holder | None = None  # set by the hello
    replies: list[Reply] = []

    def receive(self) -> list[Order] | None:
        """Return the messages of one datagram; None if there is none now.

        Raises NotAMessage for nonsense, and EOFError or OSError for the end of the connection. What was said before an
        OSError can still be received.
        """
        try:
            data, _, flags, _ = self.sock.recvmsg(MOST_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise EOFError("the dispatcher is gone")
        if flags & socket.MSG_TRUNC:
            raise NotAMessage("it is too long")
        self.allowance.use(1 + len(data) // _BYTES_A_MESSAGE)
        orders = read(ORDERS, data)
        self.allowance.use(len(orders))
        return orders


def send_away(sock: socket.socket, reason: str) -> None:
    """Tell a peer why it is not served, and close the connection. Its messages are ignored.

    They must be read all the same: else the kernel reports a reset to the peer before it delivers the reason.
    """
    replies: list[Reply] = [Refused(reason)]
    with sock, suppress(OSError):
        send(sock, replies)
        sock.shutdown(socket.SHUT_RD)
        for _ in range(_UNREAD):
            if not sock.recv(1):
                break


_SILENT_NS = 5 * SECOND_NS  # an arbiter that has not renewed the file for longer does not answer
_MOST_STATUS_BYTES = 4 << 20
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


parse_status = partial(decoded, json.Decoder(MachineShares))
"""Return the content of the file; None if it cannot be one."""


def sharing(directory: str, owner: str | None, uid: int | None, now_ns: int) -> MachineSharing:
    """Return the shared machine that is served in *directory*, as the user *uid* sees it. *owner* may serve it too."""
    place, path = served_in(directory, owner), f"{directory}/{STATUS}"

    def unknown(problem: str, written_at_ns: int | None = None) -> MachineSharing:
        return MachineSharing(directory, problem, place.remedy, written_at_ns, None)

    try:
        found = read_with_status(path, _MOST_STATUS_BYTES)
    except OSError as error:
        return unknown(f"{path} cannot be read: {error.strerror or error}")
    if found is None:
        return unknown(f"the arbiter is not running: there is no {path}")
    status, text = found
    if status.st_uid not in place.servers:
        return unknown(f"{path} belongs to {name_of(status.st_uid)}, who is not trusted to serve this machine")
    told = parse_status(text)
    if told is None or not _is_sound(told):
        return unknown(f"{path} is damaged", status.st_mtime_ns)
    silent_ns = now_ns - status.st_mtime_ns
    problem = f"the arbiter has not answered for {show_duration(silent_ns)}" if silent_ns > _SILENT_NS else ""
    return MachineSharing(directory, problem, place.remedy, status.st_mtime_ns, _use(told, uid))


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
    others = sorted(
        (share for share in users if share.user != own.user),
        key=lambda each: (-each.gpus, -each.cpus, -each.memory_bytes, -each.leases, -each.asks, each.user),
    )
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
            name: PoolView(total, sum(share.resources.get(name, 0) for share in users))
            for name, total in told.resources.items()
        },
        own=own,
        others=tuple(others),
        by_gpu={gpu.uuid: gpu for gpu in told.gpus},
    )
