"""The arbiter of a shared machine: it grants leases to the users' dispatchers, and does nothing else (FORMAT 17).

It needs no privilege: it opens no file of a user, starts nothing of a user and kills nothing. Of a dispatcher it
believes only what harms that dispatcher's own user if it is a lie: what it wants, and that something of it is over. It
knows by itself who speaks, since when, what was granted, and whether the processes of a user are alive.

One thread serves all connections: it reads what was said, decides once for all of it, and answers every ask.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable
from types import FrameType

from spool.core.errors import SpoolUnusable, cannot, shown
from spool.core.model import SECOND_NS, Machine
from spool.extras.machine import SOCKET, STATUS, protocol
from spool.extras.machine.hardware import Hardware, gpu_shares, user_shares
from spool.extras.machine.journal import LeaseJournal
from spool.extras.machine.ledger import Decision, Holder, Lease, LeaseLedger, OpenAsk
from spool.extras.machine.machinefile import MachineConfig
from spool.extras.machine.peers import MOST_CONNECTIONS, Account, Accounts, Allowance, Allowances, Connection, peer_of
from spool.extras.machine.status import MachineShares, render
from spool.machine import descriptors, identity
from spool.store.disk import Disk

log = logging.getLogger(__name__)

LAPSE_NS = 30 * SECOND_NS
"""A lease that its dispatcher does not begin to use lapses after this time."""

_LAPSE_SLACK_NS = 5 * SECOND_NS  # between the last moment for a dispatcher and the end of the lease
_AWAY_NS = 3 * SECOND_NS  # how long a spool must be without a dispatcher before its processes are looked for
_LOOK_EVERY_S = 0.5
_LISTEN_AGAIN_S = 0.5  # after an error
_LAST_WORDS = 256  # datagrams that are read of a connection that is closed
_COMPLAIN_EVERY_S = 60.0  # of one user
_MOST_SHOWN = 200  # characters of an error that a peer has caused
_TELL_EVERY_S = 2.0  # `machine.json` while nothing changes, and the reasons of those that wait
_BACKLOG = 1024
_AT_ONCE = 64  # connections that are accepted before the others are read
_DATAGRAMS = 16  # of one connection before the others are read


class Arbiter:
    """An arbiter that serves in *directory*. *clock* is the wall clock, *boot_clock* the time since boot, in ns."""

    def __init__(
        self,
        directory: str,
        config: MachineConfig,
        *,
        state_directory: str | None = None,
        clock: Callable[[], int] = time.time_ns,
        boot_clock: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME),
    ) -> None:
        self._directory = directory
        self._config = config
        self._clock = clock
        self._boot_clock = boot_clock
        self._accounts = Accounts(config.users)
        self._allowances = Allowances()
        self._complained: dict[int, float] = {}  # of users
        self._hardware = Hardware(config)
        self._ledger = LeaseLedger(config.policy, config.reservations, clock() // 1000)
        self._journal = LeaseJournal(directory, state_directory or directory, identity.boot_id())
        self._disk = Disk(directory, hidden=True)
        self._epoll = select.epoll()
        self._listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        self._connections: dict[int, Connection] = {}
        self._by_holder: dict[Holder, Connection] = {}
        self._away: dict[Holder, int] = {}  # spools without a dispatcher that hold leases, since when (monotonic)
        self._silent: list[tuple[float, Connection]] = []  # connections that are not read until then
        self._fresh: list[OpenAsk] = []  # asks that have no answer yet
        self._machine: Machine | None = None
        self._next_at_ns: int | None = None  # when the decision changes by itself
        self._gpus_left_ns = 0  # when a lease with GPUs ended whose processes may go on; 0: none is in doubt
        self._gone: set[int] = set()  # leases whose processes the last look has not seen
        self._sees_processes = True
        self._listen_again = 0.0  # monotonic; 0: it listens
        self._looked = self._told = 0.0
        self._decided = self._published = -1  # versions of the ledger
        self._decision: Decision | None = None
        self._no_grants_before = 0.0  # monotonic: the journal could not be written
        self._trouble = ""  # why not
        self._since_ns = 0
        self._leaving = self._bound = False

    def open(self) -> None:
        """Read the journal and listen.

        Raises OSError, SpoolUnusable if the directory is not safe, and LockHeld if another arbiter serves there.
        """
        self._check_directory()
        self._sees_processes = identity.read_stat(1) is not None
        if not self._sees_processes:
            log.warning(
                "/proc hides processes (hidepid): leases end by their dispatchers alone, even if these are gone"
            )
        now_ns = self._clock()
        self._since_ns = now_ns
        self._journal.open(self._ledger, now_ns)
        for lease in self._ledger.leases.values():
            self._away[lease.holder] = time.monotonic_ns()
        path = os.path.join(self._directory, SOCKET)
        self._disk.discard(path)  # of an arbiter that was killed: there is no other
        self._listener.bind(path)
        self._bound = True
        self._disk.chmod(path, 0o666)
        self._listener.listen(_BACKLOG)
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._publish()
        log.info("serving %s: %d leases are known", self._directory, len(self._ledger.leases))

    def serve(self) -> None:
        """Open, and serve until TERM or INT. Both signals work before the status file appears."""
        descriptors.take_all()
        before = {number: signal.signal(number, self._leave) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.open()
            while not self._leaving:
                self.turn()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Leave. The leases stay in the journal for the next arbiter."""
        for connection in list(self._connections.values()):
            connection.close()
        if self._bound:  # else it may be another arbiter's
            with contextlib.suppress(OSError):
                self._disk.discard(os.path.join(self._directory, SOCKET))
        self._listener.close()
        self._journal.close(self._ledger, self._clock())
        self._hardware.close()
        self._epoll.close()

    def turn(self) -> None:
        """Wait for something, and see to all of it."""
        for fd, _ in self._epoll.poll(self._wait_s()):
            if fd == self._listener.fileno():
                self._accept()
            elif (connection := self._connections.get(fd)) is not None:
                self._read(connection)
            elif fd == self._hardware.fileno():
                self._hardware.take_answer(self._clock())
        now = time.monotonic()
        self._hear_again(now)
        if now >= self._looked + _LOOK_EVERY_S:
            self._looked = now
            self._look_after_accounts()
            self._look_after_leases()
            self._journal.tidy(self._ledger, self._clock())
        # Memory and GPUs change by themselves.
        self._decide(anew=now >= self._told + _TELL_EVERY_S and next(self._ledger.asks, None) is not None)
        if now >= self._told + (_LOOK_EVERY_S if self._published != self._ledger.version else _TELL_EVERY_S):
            self._told = now
            if self._decision is not None:
                for ask in list(self._ledger.asks):
                    self._tell(self._decision, ask)
                self._answer_all()
            if not self._is_unchanged():
                self._publish()

    # Waking.

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._leaving = True

    def _wait_s(self) -> float:
        if self._decided != self._ledger.version:
            return 0.0
        now = time.monotonic()
        wait = self._told + (_LOOK_EVERY_S if self._published != self._ledger.version else _TELL_EVERY_S) - now
        if self._away or any(not lease.begun for lease in self._ledger.leases.values()):
            wait = min(wait, self._looked + _LOOK_EVERY_S - now)
        if self._silent:
            wait = min(wait, min(until for until, _ in self._silent) - now)
        if self._listen_again:
            wait = min(wait, self._listen_again - now)
        if self._next_at_ns is not None:
            wait = min(wait, (self._next_at_ns - self._clock()) / SECOND_NS)
        return max(wait, 0.0)

    # Connections.

    def _check_directory(self) -> None:
        status = os.stat(self._directory)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            why = "other users can write to it, and could put a socket of theirs there"
            remedy = f"chmod go-w {self._directory}, in a directory of its own"
            raise SpoolUnusable(cannot("serve in", "directory", why, where=self._directory, remedy=remedy))

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # out of descriptors: those that are connected come first
                log.warning("cannot accept a connection: %s", error)
                self._epoll.modify(self._listener.fileno(), 0)
                self._listen_again = time.monotonic() + _LISTEN_AGAIN_S
                return
            sock.setblocking(False)
            pid, uid = peer_of(sock)
            account = self._accounts.of(uid)
            refusal = account.refusal or self._refusal(account, pid)
            connection = Connection(sock, account, Allowance() if refusal else self._allowances.of(uid))
            if refusal:
                connection.send_away(refusal)
                continue
            self._epoll.register(sock.fileno(), select.EPOLLIN)
            self._connections[sock.fileno()] = connection

    def _refusal(self, account: Account, pid: int) -> str:
        if pid <= 0:
            return "it is in another pid namespace, where its processes cannot be told from others"
        if sum(each.account.uid == account.uid for each in self._connections.values()) >= MOST_CONNECTIONS:
            return f"{account.name} has {MOST_CONNECTIONS} dispatchers here already"
        return ""

    def _cut_off(self, connection: Connection, reason: str = "") -> None:
        """Close a connection, saying *reason*. Its leases in use stay, its asks go. A second call does nothing."""
        fd = connection.fileno()
        if fd < 0:
            return
        holder, connection.holder = connection.holder, None
        has_spool = holder is not None and self._by_holder.get(holder) is connection
        heard = not has_spool or self._hear_last_words(connection, holder)
        self._connections.pop(fd, None)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        if reason:
            connection.send_away(reason)
        connection.close()
        if holder is not None and has_spool:
            del self._by_holder[holder]
            self._ledger.drop_all(holder)
            for lease in self._ledger.of(holder):
                if not lease.begun and heard:
                    self._end(lease)  # it can begin no more
                lease.begun = True
            if self._ledger.of(holder):
                self._away[holder] = time.monotonic_ns()

    def _hear_last_words(self, connection: Connection, holder: Holder | None) -> bool:
        """Stop serving a connection, and record which leases were begun; return whether that is known of all."""
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RD)
        for _ in range(_LAST_WORDS):
            try:
                orders = connection.receive()
            except EOFError:
                return True
            except OSError:  # the peer has closed it with answers unread
                continue
            except protocol.NotAMessage:
                return False
            for order in orders or ():
                if isinstance(order, protocol.Begin | protocol.Began) and (
                    lease := self._ledger.leases.get(order.lease)
                ):
                    lease.begun = lease.begun or lease.holder == holder
        return False

    def _read(self, connection: Connection) -> None:
        for _ in range(_DATAGRAMS):
            pause_s = connection.pause_s()
            if pause_s:
                self._epoll.unregister(connection.fileno())
                self._silent.append((time.monotonic() + pause_s, connection))
                return
            try:
                orders = connection.receive()
                if orders is None:
                    return
                for order in orders:
                    self._hear(connection, order)
                    if connection.fileno() < 0:
                        return
            except (OSError, EOFError):
                self._cut_off(connection)
                return
            except protocol.NotAMessage as error:
                self._complain(connection.account, str(error))
                self._cut_off(connection)
                return

    def _complain(self, account: Account, why: str) -> None:
        """Log why a user was cut off, but no more than now and then."""
        now = time.monotonic()
        if now >= self._complained.get(account.uid, 0.0):
            self._complained[account.uid] = now + _COMPLAIN_EVERY_S
            log.warning("a dispatcher of %s was cut off: %s", account.name, shown(why[:_MOST_SHOWN]))

    def _hear_again(self, now: float) -> None:
        if self._listen_again and now >= self._listen_again:
            self._listen_again = 0.0
            self._epoll.modify(self._listener.fileno(), select.EPOLLIN)
        due = [connection for until, connection in self._silent if until <= now]
        if due:
            self._silent = [each for each in self._silent if each[0] > now]
            for connection in due:
                if connection.fileno() >= 0:
                    self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _look_after_accounts(self) -> None:
        """Cut off the accounts that the machine no longer serves."""
        for connection in list(self._connections.values()):
            account = self._accounts.of(connection.account.uid)
            if account.refusal:
                self._cut_off(connection, account.refusal)
            elif account.name != connection.account.name:
                self._cut_off(connection, f"uid {account.uid} is {account.name} now")

    # What dispatchers say. Only leases and asks of the speaker's own spool change.

    def _hear(self, connection: Connection, order: protocol.Order) -> None:
        if isinstance(order, protocol.Hello):
            self._hello(connection, order)
            return
        holder = connection.holder
        if holder is None:
            raise protocol.NotAMessage("it did not say hello")
        match order:
            case protocol.Ask():
                self._ask(holder, order)
            case protocol.Drop():
                self._drop(holder, order.number)
            case protocol.Begin():
                if (lease := self._lease(holder, order.lease)) is not None:
                    lease.begun = True
            case protocol.Began():
                if (lease := self._lease(holder, order.lease)) is not None:
                    self._began(lease, order.pid, order.ticks)
            case protocol.EndLease():
                if (lease := self._lease(holder, order.lease)) is not None:
                    self._end(lease)

    def _lease(self, holder: Holder, number: int) -> Lease | None:
        lease = self._ledger.leases.get(number)
        return lease if lease is not None and lease.holder == holder else None

    def _hello(self, connection: Connection, hello: protocol.Hello) -> None:
        if hello.version != protocol.VERSION:
            why = f"it speaks version {hello.version}, the arbiter {protocol.VERSION}: restart the older"
            self._cut_off(connection, why)
            return
        if connection.spool not in ("", hello.spool):
            raise protocol.NotAMessage("it speaks for two spools")
        connection.spool = hello.spool
        account = connection.account
        holder = Holder(account.uid, account.name, hello.spool)
        connection.claims += hello.claims
        for hold in hello.holds:
            if len(connection.named) + len(connection.unknown) >= protocol.MOST_LEASES:
                raise protocol.NotAMessage("it names too many leases")
            lease = self._lease(holder, hold.lease)
            if lease is None:
                connection.unknown.append(hold.lease)
                continue
            connection.named.add(hold.lease)
            lease.begun = True  # it is in use, or else it would not be named
            if hold.pid:
                self._began(lease, hold.pid, hold.ticks)
        if len(connection.claims) > protocol.MOST_LEASES:
            raise protocol.NotAMessage("it claims too many leases")
        if hello.more:
            return
        other = self._by_holder.get(holder)
        if other is not None and other is not connection:
            self._cut_off(other)
        connection.holder = holder
        self._by_holder[holder] = connection
        self._away.pop(holder, None)
        for lease in self._ledger.of(holder):
            if lease.number not in connection.named:
                self._end(lease)
        machine = self._machine or self._look(self._clock())
        pools = tuple((pool.name, pool.total, pool.indices) for pool in machine.resources)
        unknown = tuple(connection.unknown)
        claimed = tuple(self._claim(holder, claim, machine) for claim in connection.claims)
        connection.replies.append(protocol.Welcome(machine.cpus, machine.memory_bytes, pools, unknown, claimed))
        connection.named, connection.unknown, connection.claims = set(), [], []
        self._answer(connection)

    def _claim(self, holder: Holder, claim: protocol.Claim, machine: Machine) -> int:
        """Count a run that began without a lease, if it lives; return its lease, 0 without one."""
        if self._sees_processes and not _is_alive(holder.uid, claim.pid, claim.ticks):
            return 0
        lease = self._ledger.claim(holder, claim, machine, self._clock())
        if lease is None:
            return 0
        try:
            self._journal.granted([lease])
        except OSError as error:  # after a restart it is unknown, and claimed again
            log.error("cannot record a lease of %s: %s", holder.user, error)
        return lease.number

    def _ask(self, holder: Holder, order: protocol.Ask) -> None:
        if self._ledger.asks_of(holder) >= protocol.MOST_ASKS:
            raise protocol.NotAMessage("it has too many asks open")
        ask = self._ledger.ask(holder, order.number, order.demand, self._clock())
        if ask is not None:
            self._fresh.append(ask)

    def _drop(self, holder: Holder, number: int) -> None:
        """Withdraw an ask, or what was granted for it meanwhile."""
        if not self._ledger.drop(holder, number):
            lease = self._ledger.answering(holder, number)
            if lease is not None and not lease.begun:
                self._end(lease)

    def _began(self, lease: Lease, pid: int, ticks: int) -> None:
        lease.begun = True
        if pid and (pid, ticks) != (lease.pid, lease.ticks):
            lease.pid, lease.ticks = pid, ticks
            try:
                self._journal.began(lease)
            except OSError as error:
                log.error("cannot record a wrapper of %s: %s", lease.holder.user, error)

    def _end(self, lease: Lease) -> None:
        now_ns = self._clock()
        if self._ledger.end(lease.number, now_ns) is not None:
            if lease.grant.gpu_uuids:
                self._gpus_left_ns = now_ns
            try:
                self._journal.ended(lease)
            except OSError as error:  # after a restart it is there again, until its dispatcher says hello
                log.error("cannot record the end of a lease of %s: %s", lease.holder.user, error)

    # Leases whose dispatchers do not end them.

    def _look_after_leases(self) -> None:
        self._ledger.distrust_overstayers(self._clock())
        self._let_lapse()
        now_ns = time.monotonic_ns()
        before, self._gone = self._gone, set()
        away = [holder for holder, since_ns in self._away.items() if now_ns - since_ns >= _AWAY_NS]
        if not away or not self._sees_processes:
            return
        try:
            processes = identity.processes_of({holder.uid for holder in away})
        except OSError as error:  # that proves nothing
            log.warning("cannot look for processes: %s", error)
            return
        for holder in away:
            for lease in self._ledger.of(holder):
                if _lives(lease, processes[holder.uid]):
                    continue
                if lease.number in before:  # one look can miss a process that forks and exits meanwhile
                    self._end(lease)
                else:
                    self._gone.add(lease.number)
            if not self._ledger.of(holder):
                del self._away[holder]

    def _let_lapse(self) -> None:
        now_ns = self._boot_clock()
        for lease in list(self._ledger.leases.values()):
            if not lease.begun and now_ns - lease.since_boot_ns >= LAPSE_NS + _LAPSE_SLACK_NS:
                log.info("a lease of %s has lapsed: it was not used", lease.holder.user)
                self._end(lease)

    # Decisions.

    def _look(self, now_ns: int) -> Machine:
        ledger = self._ledger
        leases = ledger.leases.values()
        gpus = bool(
            ledger.asks_for_gpus
            or ledger.squatters
            or self._gpus_left_ns
            or any(lease.grant.gpu_uuids for lease in leases)
        )
        self._machine = machine = self._hardware.machine(now_ns, leases, gpus=gpus)
        if gpus:
            ledger.squat(self._squatters(machine), now_ns)
            if self._hardware.seen_at_ns > self._gpus_left_ns:
                self._gpus_left_ns = 0
        fd = self._hardware.fileno()
        if fd is not None:
            try:
                self._epoll.modify(fd, select.EPOLLIN)
            except FileNotFoundError:  # it is new, though it may have the number of an older one
                self._epoll.register(fd, select.EPOLLIN)
        return machine

    def _squatters(self, machine: Machine) -> dict[str, frozenset[str]]:
        """Return the users of the machine that have processes on GPUs without a lease, and these GPUs."""
        found: dict[str, set[str]] = {}
        for gpu in machine.gpus:
            for process in gpu.foreign:
                if process.user is None:
                    continue
                with contextlib.suppress(OSError):
                    account = self._accounts.of(identity.owner_of(process.pid))
                    if not account.refusal:
                        found.setdefault(account.name, set()).add(gpu.uuid)
        return {user: frozenset(uuids) for user, uuids in found.items()}

    def _decide(self, *, anew: bool) -> None:
        """Decide if anything has changed, and answer."""
        now_ns, ledger = self._clock(), self._ledger
        due = self._next_at_ns is not None and now_ns >= self._next_at_ns
        if self._decided != ledger.version or due or anew or ledger.asks_for_gpus:
            decision = ledger.decide(self._look(now_ns), now_ns)
            self._next_at_ns = decision.next_at_ns
            self._grant(decision, now_ns)
            self._decided, self._decision = ledger.version, decision
            for ask in self._fresh:
                self._tell(decision, ask)
            self._fresh.clear()
        self._answer_all()

    def _grant(self, decision: Decision, now_ns: int) -> None:
        """Make leases of the starts of a decision: first on the disk, then in the answers."""
        if time.monotonic() < self._no_grants_before:
            return
        starts = [(ask, grant) for ask, grant in decision.starts if self._hardware.may_start_on(grant, now_ns)]
        since_boot_ns = self._boot_clock()
        granted = [(ask, ask.lease(grant, now_ns, since_boot_ns)) for ask, grant in starts]
        if not granted:
            return
        try:
            self._journal.granted([lease for _, lease in granted])
        except OSError as error:
            log.error("cannot record leases, so nothing is granted: %s", error)
            self._no_grants_before = time.monotonic() + _TELL_EVERY_S
            self._trouble = f"the arbiter cannot record leases: {error.strerror}"
            return
        self._trouble = ""
        begin_before_ns = since_boot_ns + LAPSE_NS
        for ask, lease in granted:
            self._ledger.grant(ask, lease)
            grant = lease.grant
            units = grant.gpu_uuids, grant.gpu_indices, grant.resource_indices
            reply = protocol.Granted(ask.number, lease.number, begin_before_ns, *units)
            if grant.cpu_list:
                reply = protocol.PinnedGrant(ask.number, lease.number, begin_before_ns, *units, grant.cpu_list)
            self._by_holder[ask.holder].replies.append(reply)

    def _tell(self, decision: Decision, ask: OpenAsk) -> None:
        """Tell the dispatcher of an ask that waits why, if that is news."""
        if not self._ledger.is_open(ask):
            return
        reason = (decision.why(ask) or self._trouble or "granted at any moment")[: protocol.MOST_TEXT]
        if reason != ask.told:
            ask.told = reason
            self._by_holder[ask.holder].replies.append(protocol.Wait(ask.number, reason))

    def _answer_all(self) -> None:
        for connection in list(self._connections.values()):
            if connection.replies:
                self._answer(connection)

    def _answer(self, connection: Connection) -> None:
        try:
            connection.answer()
        except OSError:  # it is gone, or does not read
            self._cut_off(connection)

    # What everyone may see.

    def _is_unchanged(self) -> bool:
        """Whether `machine.json` still says what is so; then it has the time of now."""
        if self._published != self._ledger.version or self._hardware.fileno() is not None:
            return False
        try:
            os.utime(os.path.join(self._directory, STATUS))
        except OSError:  # it is gone
            return False
        return True

    def _publish(self) -> None:
        """Write `machine.json`."""
        now_ns, ledger = self._clock(), self._ledger
        machine = self._look(now_ns)
        self._published = ledger.version
        problem = machine.gpu_problem
        status = MachineShares(
            written_at_ns=now_ns,
            since_ns=self._since_ns,
            pid=os.getpid(),
            cpus=machine.cpus,
            memory_bytes=machine.memory_bytes,
            resources={pool.name: pool.total for pool in machine.resources},
            users=tuple(user_shares(ledger)),
            gpus=tuple(gpu_shares(machine, ledger)),
            gpu_problem=problem,
        )
        try:
            self._disk.put(os.path.join(self._directory, STATUS), render(status), mode=0o644)
        except OSError as error:
            log.error("cannot write %s: %s", STATUS, error)
            self._published = -1


def _is_alive(uid: int, pid: int, ticks: int) -> bool:
    """Whether that process of a user is alive. What cannot be seen now is not."""
    try:
        stat = identity.read_stat(pid) if identity.owner_of(pid) == uid else None
    except OSError:
        return False
    return stat is not None and not stat.dead and stat.start_ticks == ticks


def _lives(lease: Lease, processes: list[identity.Stat]) -> bool:
    """Whether a process of its user may still use a lease."""
    if lease.pid:
        return identity.session_lives(lease.pid, lease.ticks, processes)
    oldest = (lease.since_boot_ns - SECOND_NS) // identity.TICK_NS  # it is unknown whether it was begun
    return any(stat.start_ticks >= oldest for stat in processes)
