"""Whose dispatchers an arbiter serves, and how much each may say.

The kernel says which user a connection belongs to. All that a peer can do to the arbiter is bounded here: what it
sends, what it does not read, and how many connections it has.
"""

from __future__ import annotations

import grp
import pwd
import socket
import time
from collections.abc import Sequence

from msgspec import Struct

from spool.extras.machine import protocol
from spool.extras.machine.ledger import Holder

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

    @property
    def is_full(self) -> bool:
        """Whether a new one would be the same."""
        return self._made_up_at <= time.monotonic()


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
        self._allowances: dict[int, Allowance] = {}  # of those who have said something lately

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

    def allowance_of(self, uid: int) -> Allowance:
        """Return how much a user may say."""
        if uid not in self._allowances and len(self._allowances) >= _MOST_KNOWN:
            self._allowances = {uid: each for uid, each in self._allowances.items() if not each.is_full}
        return self._allowances.setdefault(uid, Allowance())

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


class Connection:
    """A connected dispatcher. It is disconnected if it sends invalid messages, or does not read the answers."""

    def __init__(self, sock: socket.socket, account: Account, allowance: Allowance) -> None:
        self.sock = sock
        self.account = account
        self.allowance = allowance
        self.uses: list[protocol.Use] = []  # said before the hello
        self.holder: Holder | None = None  # set by the hello
        self.replies: list[protocol.Reply] = []

    def fileno(self) -> int:
        """Return the descriptor; -1 once it is closed."""
        return self.sock.fileno()

    def receive(self) -> list[protocol.Order] | None:
        """Return the messages of one datagram; None if there is none now.

        Raises NotAMessage for nonsense, and EOFError or OSError for the end of the connection. What was said before an
        OSError can still be received.
        """
        try:
            data, _, flags, _ = self.sock.recvmsg(protocol.MOST_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise EOFError("the dispatcher is gone")
        if flags & socket.MSG_TRUNC:
            raise protocol.NotAMessage("it is too long")
        self.allowance.use(1 + len(data) // _BYTES_A_MESSAGE)
        orders = protocol.read_orders(data)
        self.allowance.use(len(orders))
        return orders

    def answer(self) -> None:
        """Send the replies that are collected. Raises OSError if the peer is gone, or does not read."""
        protocol.send(self.sock, self.replies)

    def send_away(self, reason: str) -> None:
        """Send the reason why it is not served, and close the connection. Its messages are ignored.

        They must be read all the same: else the kernel reports a reset to the peer before it delivers the reason.
        """
        self.replies = [protocol.Refused(reason)]
        try:
            self.answer()
            self.sock.shutdown(socket.SHUT_RD)
            for _ in range(_UNREAD):
                if not self.sock.recv(1):
                    break
        except OSError:
            pass
        self.close()

    def close(self) -> None:
        """Close it."""
        self.sock.close()
