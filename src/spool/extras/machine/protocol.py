"""The messages between the dispatchers of a shared machine and its arbiter (FORMAT 17).

One datagram of a SOCK_SEQPACKET socket is a JSON array of messages, each an array that begins with its word. The kernel
says who speaks, so no message names a user, and none names a job: a lease is for a request. Everything is bounded here,
before any other code sees it.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from typing import Annotated, TypeVar

from msgspec import DecodeError, Meta, Struct, json

from spool.core.model import Grant, Pool, Request
from spool.core.pinning import cpus_in

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
_Cpus = Annotated[str, Meta(max_length=16_384, pattern=r"^[0-9,-]*\Z")]
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
    """Which parts of the machine a lease has: GPUs, units of resources with indices, and CPUs if runs are pinned."""

    gpu_uuids: Annotated[tuple[_Uuid, ...], Meta(max_length=64)] = ()
    gpu_indices: _Indices = ()
    pool_indices: Annotated[tuple[tuple[_Label, _Indices], ...], Meta(max_length=_MOST_POOLS)] = ()
    cpu_list: _Cpus = ""  # as a list of the kernel ("0-3,8")

    @staticmethod
    def of(grant: Grant) -> Units:
        """Return the units of *grant*."""
        return Units(grant.gpu_uuids, grant.gpu_indices, grant.resource_indices, grant.cpu_list)

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
            cpu_list=self.cpu_list,
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
            and (not self.cpu_list or len(cpus_in(self.cpu_list)) == demand.cpus)
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

_orders: json.Decoder[list[Order]] = json.Decoder(Annotated[list[Order], Meta(max_length=MOST_MESSAGES)])
_replies: json.Decoder[list[Reply]] = json.Decoder(Annotated[list[Reply], Meta(max_length=MOST_MESSAGES)])
_encoder = json.Encoder()


class NotAMessage(ValueError):  # noqa: N818  (like the errors of core/errors.py)
    """A datagram that does not parse."""


def read_orders(datagram: bytes) -> list[Order]:
    """Return the messages of a dispatcher. Raises only NotAMessage."""
    return _read(_orders, datagram)


def read_replies(datagram: bytes) -> list[Reply]:
    """Return the messages of the arbiter. Raises only NotAMessage."""
    return _read(_replies, datagram)


def _read(decoder: json.Decoder[T], datagram: bytes) -> T:
    try:
        return decoder.decode(datagram)
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
