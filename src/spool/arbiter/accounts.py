"""Whose dispatchers an arbiter serves, and how much each may say.

The kernel says which user a connection belongs to. All that a peer can do to the arbiter is bounded here: what it
sends, what it does not read, and how many connections it has.
"""

from __future__ import annotations

import grp
import pwd
import socket
import struct
import time
from collections.abc import Sequence

from msgspec import Struct

from spool.arbiter.ledger import Holder
from spool.formats import arbiter_protocol as protocol

FIRST_UID = 1000
"""Accounts of people begin here (login.defs); those below it are served only if they are named."""

MOST_CONNECTIONS = 16
"""Connections of one user."""

_KNOWN_FOR_S = 10.0  # how long an answer about an account holds
_NOBODY = 65_534
_PER_SECOND = 4_000  # messages of one connection; a long datagram counts as more
_BURST = 8_000
_BYTES_A_MESSAGE = 256


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

    def of(self, uid: int) -> Account:
        """Return the account of *uid*, looked up again after a while: users leave groups, and accounts go."""
        now = time.monotonic()
        until, account = self._known.get(uid, (0.0, None))
        if account is None or until < now:
            if len(self._known) > 1000:
                self._known.clear()
            account = self._look_up(uid)
            self._known[uid] = now + _KNOWN_FOR_S, account
        return account

    def _look_up(self, uid: int) -> Account:
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            refusal = "" if uid in self._uids else f"uid {uid} has no account on this machine"
            return Account(uid, f"uid-{uid}", refusal)
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


class Connection:
    """A dispatcher that speaks. It is cut off if it says nonsense, or does not listen."""

    def __init__(self, sock: socket.socket, account: Account) -> None:
        self.sock = sock
        self.account = account
        self.holder: Holder | None = None  # set by the last hello
        self.named: set[int] = set()  # the leases of a hello that is not complete
        self.unknown: list[int] = []  # those of them that do not exist
        self.replies: list[protocol.Reply] = []
        self._tokens = float(_BURST)
        self._at = time.monotonic()

    def fileno(self) -> int:
        """Return the descriptor; -1 once it is closed."""
        return self.sock.fileno()

    def receive(self) -> list[protocol.Order] | None:
        """Return the messages of one datagram; None if there is none now.

        Raises NotAMessage for nonsense, and OSError for the end of the connection.
        """
        try:
            data, _, flags, _ = self.sock.recvmsg(protocol.MOST_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("the dispatcher is gone")
        if flags & socket.MSG_TRUNC:
            raise protocol.NotAMessage("it is too long")
        orders = protocol.read_orders(data)
        self._tokens -= max(len(orders), 1) + len(data) // _BYTES_A_MESSAGE
        return orders

    def pause_s(self) -> float:
        """Return how long it must be silent because it has said too much, 0 if it may speak."""
        now = time.monotonic()
        self._tokens = min(_BURST, self._tokens + (now - self._at) * _PER_SECOND)
        self._at = now
        return 0.0 if self._tokens > 0 else -self._tokens / _PER_SECOND + 0.001

    def answer(self) -> None:
        """Send the replies that are collected. Raises OSError if the peer is gone, or does not read."""
        while self.replies:
            part, self.replies = (
                self.replies[: protocol.MOST_MESSAGES // 2],
                self.replies[protocol.MOST_MESSAGES // 2 :],
            )
            self.sock.send(protocol.render(part))

    def close(self) -> None:
        """Close it."""
        self.sock.close()


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of the process at the other end, as of its `connect`."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
