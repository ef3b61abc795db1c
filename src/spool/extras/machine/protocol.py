"""The messages between the dispatchers of a shared machine and its arbiter (FORMAT 17).

One datagram of a SOCK_SEQPACKET socket is a JSON array of messages, each an array that begins with its word. The kernel
says who speaks, so no message names a user, and none names a job: a lease is for a request. Everything is bounded here,
before any other code sees it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import DecodeError, Meta, Struct, json

from spool.core.model import Pool, Request
from spool.core.pinning import cpus_in

VERSION = 2
MOST_BYTES = 60_000  # of one datagram
MOST_MESSAGES = 256  # of one datagram
MOST_ASKS = 256  # open asks of one spool; of one user, no more take part in a decision
MOST_LEASES = 3000  # of one user; an answer can name them all
MOST_HOLDS = 1000  # of one hello; `more` announces another one
MOST_CLAIMS = 8  # of one hello, as each can be long
MOST_POOLS = 16  # of one request
MOST_LABEL = 64  # characters
_MOST_TYPES = 16  # of GPUs, in one request
_MOST_GPUS = 64  # of one lease
_MOST_INDICES = 1024  # of one resource
MOST_TEXT = 500  # characters of a reason

_Word = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+\Z")]
_Label = Annotated[str, Meta(max_length=MOST_LABEL, pattern=r"^[ -~]*\Z")]
_Text = Annotated[str, Meta(max_length=MOST_TEXT)]
_Count = Annotated[int, Meta(ge=0, le=1 << 20)]
_Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
_Number = Annotated[int, Meta(ge=0, le=1 << 53)]
_Moment = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # in nanoseconds; 1 << 53 is only 104 days
_Pid = Annotated[int, Meta(ge=0, le=1 << 22)]
_Cpus = Annotated[str, Meta(max_length=16_384, pattern=r"^[0-9,-]*\Z")]
_Uuids = Annotated[
    tuple[Annotated[str, Meta(max_length=96, pattern=r"^[A-Za-z0-9._:/-]+\Z")], ...], Meta(max_length=_MOST_GPUS)
]
_Indices = Annotated[tuple[_Count, ...], Meta(max_length=_MOST_INDICES)]
_PoolIndices = Annotated[tuple[tuple[_Label, _Indices], ...], Meta(max_length=MOST_POOLS)]
_Leases = Annotated[tuple[_Number, ...], Meta(max_length=MOST_LEASES)]
_Pools = Annotated[tuple[tuple[_Label, _Count], ...], Meta(max_length=MOST_POOLS)]


class PeerMessage(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A message: its word, then its fields."""


class LeaseRequest(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a start needs of the machine; leases and asks with equal demands are interchangeable.

    0 is "not requested" of memory, GPU memory and the time limit; "" is any GPU type.
    """

    cpus: _Count
    memory_bytes: _Bytes = 0
    gpus: _Count = 0
    gpu_memory_bytes: _Bytes = 0
    gpu_type: _Label = ""
    resources: _Pools = ()  # of the machine's pools, ordered by name
    limit_ns: _Moment = 0
    like: Annotated[str, Meta(max_length=16, pattern=r"^[0-9a-f]*\Z")] = ""  # equal for jobs that last about as long
    gpu_min_memory_bytes: _Bytes = 0
    other_gpu_types: Annotated[tuple[_Label, ...], Meta(max_length=_MOST_TYPES)] = ()  # any of them will do too

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


class Hold(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A lease that a dispatcher has, and the wrapper that uses it; pid 0 while that is unknown."""

    lease: _Number
    pid: _Pid = 0
    ticks: _Number = 0


class Claim(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A run that began without a lease, before its spool took part: what it has, and its wrapper."""

    demand: LeaseRequest
    gpu_uuids: _Uuids = ()
    pool_indices: _PoolIndices = ()
    cpu_list: _Cpus = ""
    pid: _Pid = 0
    ticks: _Number = 0


class Hello(PeerMessage, frozen=True, tag="hello"):
    """The first message of a connection: the spool, and every lease that it has. Its other leases are over.

    *spool* is a hash of its path. With *more*, another one follows, and only the last one ends leases. Each of *claims*
    becomes a lease as far as it counts.
    """

    version: _Number
    spool: _Word
    holds: Annotated[tuple[Hold, ...], Meta(max_length=MOST_HOLDS)] = ()
    more: bool = False
    claims: Annotated[tuple[Claim, ...], Meta(max_length=MOST_CLAIMS)] = ()


class Ask(PeerMessage, frozen=True, tag="ask"):
    """A start wants a lease. *number* is new for each ask, and the answer repeats it."""

    number: _Number
    demand: LeaseRequest


class Drop(PeerMessage, frozen=True, tag="drop"):
    """An ask is withdrawn; a lease that was granted for it meanwhile is over."""

    number: _Number


class Begin(PeerMessage, frozen=True, tag="begin"):
    """A lease is about to be used: it no longer lapses."""

    lease: _Number


class Began(PeerMessage, frozen=True, tag="began"):
    """The wrapper that uses a lease: the proof of its use if the dispatcher is gone."""

    lease: _Number
    pid: _Pid
    ticks: _Number  # its start, in clock ticks since boot


class EndLease(PeerMessage, frozen=True, tag="end"):
    """A lease is over."""

    lease: _Number


class Welcome(PeerMessage, frozen=True, tag="welcome"):
    """The answer to the last hello: the machine's totals, the leases of the hello that do not exist, and the new ones.

    *claimed* has a lease for each claim, in their order; 0: it does not count.
    """

    cpus: _Count
    memory_bytes: _Bytes
    pools: Annotated[tuple[tuple[_Label, _Count, _Indices], ...], Meta(max_length=_MOST_INDICES)] = ()  # with totals
    unknown: _Leases = ()
    claimed: _Leases = ()

    def __post_init__(self) -> None:
        if any(indices and len(set(indices)) != total for _, total, indices in self.pools):
            raise ValueError("a resource has another total than indices")


class Granted(PeerMessage, frozen=True, tag="grant"):
    """The answer to an ask. The lease must begin before that time on the clock since boot, or else it lapses."""

    number: _Number
    lease: _Number
    begin_before_ns: _Moment
    gpu_uuids: _Uuids = ()
    gpu_indices: _Indices = ()
    pool_indices: _PoolIndices = ()

    def answers(self, demand: LeaseRequest, pools: Iterable[Pool]) -> bool:
        """Whether it grants what was asked for, no more and nothing else; *pools* are the machine's resources."""
        units, wanted = dict(self.pool_indices), dict(demand.resources)
        named = {pool.name: set(pool.indices) for pool in pools if pool.indices and pool.name in wanted}
        counts = {len(self.gpu_uuids), len(set(self.gpu_uuids)), len(self.gpu_indices), len(set(self.gpu_indices))}
        return (
            counts == {demand.gpus}
            and len(units) == len(self.pool_indices)
            and units.keys() == named.keys()
            and all(len(units[name]) == len(named[name].intersection(units[name])) == wanted[name] for name in named)
        )


class PinnedGrant(Granted, frozen=True, tag="pinned"):
    """A grant by a machine with `cpu_pinning`: with the CPUs of the run, as a list of the kernel ("0-3,8")."""

    cpu_list: _Cpus = ""

    def answers(self, demand: LeaseRequest, pools: Iterable[Pool]) -> bool:
        """Whether it grants what was asked for, no more and nothing else."""
        return super().answers(demand, pools) and len(cpus_in(self.cpu_list)) == demand.cpus


class Wait(PeerMessage, frozen=True, tag="wait"):
    """The other answer to an ask: why it must wait. Sent again when the reason changes."""

    number: _Number
    reason: _Text


class Refused(PeerMessage, frozen=True, tag="refused"):
    """The arbiter does not serve this user, and closes the connection."""

    reason: _Text


Order = Hello | Ask | Drop | Begin | Began | EndLease
"""What a dispatcher says."""
Reply = Welcome | Granted | PinnedGrant | Wait | Refused
"""What the arbiter says."""

_orders: json.Decoder[list[Order]] = json.Decoder(Annotated[list[Order], Meta(max_length=MOST_MESSAGES)])
_replies: json.Decoder[list[Reply]] = json.Decoder(Annotated[list[Reply], Meta(max_length=MOST_MESSAGES)])
_encoder = json.Encoder()


class NotAMessage(ValueError):  # noqa: N818  (like the errors of core/errors.py)
    """A datagram that does not parse."""


def render(messages: list[Order] | list[Reply]) -> bytes:
    """Return messages as one datagram."""
    return _encoder.encode(messages)


def read_orders(datagram: bytes) -> list[Order]:
    """Return the messages of a dispatcher. Raises only NotAMessage."""
    try:
        return _orders.decode(datagram)
    except (DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotAMessage(str(error)) from None


def read_replies(datagram: bytes) -> list[Reply]:
    """Return the messages of the arbiter. Raises only NotAMessage."""
    try:
        return _replies.decode(datagram)
    except (DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise NotAMessage(str(error)) from None
