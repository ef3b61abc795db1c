"""The arbiter of a shared machine: it grants leases to the users' dispatchers, and does nothing else (FORMAT 17).

It needs no privilege: it opens no file of a user, starts nothing of a user and kills nothing. Of a dispatcher it
believes only what harms that dispatcher's own user if it is a lie: what it wants, and that something of it is over. It
knows by itself who speaks, since when, what was granted, and whether the processes of a user are alive.

A process on a GPU belongs to a lease if its user has a lease on that GPU, so that no environment of another user's
process is read. All other processes are foreign, and keep that GPU from being granted; they count for their users.

One thread serves all connections: it reads what was said, decides once for all of it, and answers every ask.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType

from msgspec.structs import replace

from spool.core.errors import SpoolUnusable, cannot
from spool.core.model import SECOND_NS, Gpu, Grant, Machine
from spool.extras.machine import SOCKET, STATUS, MachineConfig, others_may_change, protocol
from spool.extras.machine.ledger import BeganLine, EndLine, Lease, LeaseJournal, LeaseLedger
from spool.extras.machine.protocol import Connection, Holder, Units
from spool.formats.wire import json_line
from spool.machine import identity
from spool.machine.gpus import GpuWatcher, Ours
from spool.machine.host import Host
from spool.query.shared import GpuShare, UserShare
from spool.store.disk import Disk

log = logging.getLogger(__name__)

LAPSE_NS = 30 * SECOND_NS
"""A lease that its dispatcher does not begin to use lapses after this time."""

_LAPSE_SLACK_NS = 5 * SECOND_NS  # between the last moment for a dispatcher and the end of the lease
_AWAY_NS = 3 * SECOND_NS  # how long a spool must be without a dispatcher before its processes are looked for
_LOOK_EVERY_S = 0.5  # at accounts, leases and hardware, to write `machine.json` and to tell new reasons
_LISTEN_AGAIN_S = 0.5  # after an error
_TELL_EVERY_S = 2.0  # the same while nothing changes
_BACKLOG = 1024
_AT_ONCE = 64  # connections that are accepted before the others are read
_LAST_WORDS = 256  # datagrams that are read of a connection that is closed
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
        self._accounts = protocol.Accounts(config.users)
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
        self._resting: dict[int, float] = {}  # descriptors that are not watched until then (monotonic)
        self._fresh: list[Lease] = []  # asks that have no answer yet
        self._gpus_left_ns = 0  # when a lease with GPUs ended whose processes may go on; 0: none is in doubt
        self._gone: set[int] = set()  # leases whose processes the last look has not seen
        self._sees_processes = True
        self._looked = 0.0  # monotonic
        self._decided = self._published = -1  # versions of the ledger
        self._trouble = ""  # why the journal could not be written
        self._since_ns = 0
        self._leaving = self._bound = False

    def open(self) -> None:
        """Read the journal and listen.

        Raises OSError, SpoolUnusable if the directory is not safe, and LockHeld if another arbiter serves there.
        """
        if others_may_change(os.stat(self._directory)):
            why = "other users can write to it, and could put a socket of theirs there"
            remedy = f"chmod go-w {self._directory}, in a directory of its own"
            raise SpoolUnusable(cannot("serve in", "directory", why, where=self._directory, remedy=remedy))
        self._sees_processes = identity.read_stat(1) is not None
        if not self._sees_processes:
            log.warning(
                "/proc hides processes (hidepid): leases end by their dispatchers alone, even if these are gone"
            )
        self._since_ns = self._clock()
        self._journal.open(self._ledger, self._since_ns)
        self._away = dict.fromkeys((lease.holder for lease in self._ledger.leases.values()), time.monotonic_ns())
        path = os.path.join(self._directory, SOCKET)
        self._disk.discard(path)  # of an arbiter that was killed: there is no other
        self._listener.bind(path)
        self._bound = True
        self._disk.chmod(path, 0o666)
        self._listener.listen(_BACKLOG)
        for each in (self._listener, self._hardware):
            self._epoll.register(each.fileno(), select.EPOLLIN)
        self._publish()
        log.info("serving %s: %d leases are known", self._directory, len(self._ledger.leases))

    def serve(self) -> None:
        """Open, and serve until TERM or INT. Both signals work before the status file appears."""
        identity.take_all()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._leave)
        self.open()
        while not self._leaving:
            self.turn()

    def close(self) -> None:
        """Leave. The leases stay in the journal for the next arbiter."""
        for connection in list(self._connections.values()):
            connection.sock.close()
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
        for fd in [fd for fd, until in self._resting.items() if until <= now]:
            del self._resting[fd]
            self._epoll.register(fd, select.EPOLLIN)
        looks = now >= self._look_at()
        if looks:
            self._look_after_accounts()
            self._look_after_leases()
            self._journal.tidy(self._ledger, self._clock())
        self._decide(anew=looks and bool(self._ledger.asks))  # memory and GPUs change by themselves
        if looks:
            self._looked = now
            for ask in self._ledger.asks.values():
                self._tell(ask)
            self._answer_all()
            self._publish()

    # Waking.

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._leaving = True

    def _look_at(self) -> float:
        changes = self._published != self._ledger.version or bool(self._away)
        soon = changes or any(not lease.begun for lease in self._ledger.leases.values())
        return self._looked + (_LOOK_EVERY_S if soon else _TELL_EVERY_S)

    def _wait_s(self) -> float:
        if self._decided != self._ledger.version:
            return 0.0
        due, now = [self._look_at(), *self._resting.values()], time.monotonic()
        if self._ledger.next_at_ns is not None:
            due.append(now + (self._ledger.next_at_ns - self._clock()) / SECOND_NS)
        return max(min(due) - now, 0.0)

    def _rest(self, fd: int, seconds: float) -> None:
        """Do not watch a descriptor for a while."""
        self._epoll.unregister(fd)
        self._resting[fd] = time.monotonic() + seconds

    # Connections.

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
                self._rest(self._listener.fileno(), _LISTEN_AGAIN_S)
                return
            sock.setblocking(False)
            pid, uid = protocol.peer_of(sock)
            account = self._accounts.of(uid)
            refusal = account.refusal or self._refusal(account, pid)
            if refusal:
                protocol.send_away(sock, refusal)
                continue
            self._epoll.register(sock.fileno(), select.EPOLLIN)
            self._connections[sock.fileno()] = Connection(sock, account, self._accounts.allowances[uid])

    def _refusal(self, account: protocol.Account, pid: int) -> str:
        if pid <= 0:
            return "it is in another pid namespace, where its processes cannot be told from others"
        most = protocol.MOST_CONNECTIONS
        if sum(each.account.uid == account.uid for each in self._connections.values()) >= most:
            return f"{account.name} has {most} dispatchers here already"
        return ""

    def _cut_off(self, connection: Connection, reason: str = "") -> None:
        """Close a connection, saying *reason*. Its leases in use stay, its asks go. A second call does nothing."""
        fd = connection.sock.fileno()
        if fd < 0:
            return
        holder, connection.holder = connection.holder, None
        heard = holder is None or self._hear_last_words(connection, holder)
        self._connections.pop(fd, None)
        if self._resting.pop(fd, None) is None:
            self._epoll.unregister(fd)
        if reason:
            protocol.send_away(connection.sock, reason)
        connection.sock.close()
        if holder is not None:
            del self._by_holder[holder]
            for lease in self._ledger.of(holder):
                if lease.begun or (lease.granted and not heard):
                    self._ledger.use(lease)  # or it may be
                    self._away[holder] = time.monotonic_ns()
                else:
                    self._end(lease)  # it can begin no more

    def _hear_last_words(self, connection: Connection, holder: Holder) -> bool:
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
                if isinstance(order, protocol.Use) and (lease := self._lease(holder, order.lease)) is not None:
                    self._ledger.use(lease)
        return False

    def _read(self, connection: Connection) -> None:
        for _ in range(_DATAGRAMS):
            pause_s = connection.allowance.pause_s()
            if pause_s:
                self._rest(connection.sock.fileno(), pause_s)
                return
            try:
                orders = connection.receive()
                if orders is None:
                    return
                for order in orders:
                    self._hear(connection, order)
                    if connection.sock.fileno() < 0:
                        return
            except (OSError, EOFError):
                self._cut_off(connection)
                return
            except protocol.NotAMessage as error:
                self._cut_off(connection, f"a message of this dispatcher is invalid: {error}"[: protocol.MOST_TEXT])
                return

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
        holder = connection.holder
        match order:
            case protocol.Hello():
                self._hello(connection, order)
            case protocol.Use() if holder is None:
                if len(connection.uses) >= protocol.MOST_LEASES:
                    raise protocol.NotAMessage("it names too many leases")
                connection.uses.append(order)
            case _ if holder is None:
                raise protocol.NotAMessage("it did not say hello")
            case protocol.Use():
                self._use(connection, order)
            case protocol.Ask():
                self._ask(holder, order)
            case protocol.Claim():
                self._claim(connection, holder, order)
            case protocol.Drop():
                if (lease := self._ledger.withdrawable(holder, order.number)) is not None:
                    self._end(lease)
            case protocol.EndLease():
                if (lease := self._lease(holder, order.lease)) is not None:
                    self._end(lease)

    def _lease(self, holder: Holder | None, number: int) -> Lease | None:
        lease = self._ledger.leases.get(number)
        return lease if lease is not None and lease.holder == holder else None

    def _hello(self, connection: Connection, hello: protocol.Hello) -> None:
        if hello.version != protocol.VERSION:
            why = f"it speaks version {hello.version}, the arbiter {protocol.VERSION}: restart the older"
            self._cut_off(connection, why)
            return
        if connection.holder is not None:
            raise protocol.NotAMessage("it said hello before")
        connection.holder = holder = Holder(connection.account.uid, connection.account.name, hello.spool)
        other = self._by_holder.get(holder)
        if other is not None:
            self._cut_off(other)
        self._by_holder[holder] = connection
        self._away.pop(holder, None)
        machine = self._machine()
        pools = tuple((pool.name, pool.total, pool.indices) for pool in machine.resources)
        connection.replies.append(protocol.Welcome(machine.cpus, machine.memory_bytes, pools))
        uses, connection.uses = connection.uses, []
        for use in uses:
            self._use(connection, use)
        named = {use.lease for use in uses}
        for lease in self._ledger.of(holder):
            if lease.number not in named:
                self._end(lease)

    def _use(self, connection: Connection, use: protocol.Use) -> None:
        lease = self._lease(connection.holder, use.lease)
        if lease is None:
            connection.replies.append(protocol.Unknown(use.lease))
        elif self._ledger.use(lease, use.pid, use.ticks):
            self._journal.note(BeganLine(lease.number, lease.pid, lease.ticks), lease)

    def _claim(self, connection: Connection, holder: Holder, claim: protocol.Claim) -> None:
        """Count a run that began without a lease, if it lives."""
        lease = None
        if not self._sees_processes or _is_alive(holder.uid, claim.pid, claim.ticks):
            lease = self._ledger.claim(holder, claim, self._machine(), self._clock())
        if lease is None:
            why = f"it is over, or beyond the quota of {holder.user}"
            connection.replies.append(protocol.Wait(claim.number, why))
            return
        with contextlib.suppress(OSError):  # after a restart it is unknown, and claimed again
            self._journal.granted([lease])
        connection.replies.append(protocol.Granted(claim.number, lease.number, 0))

    def _ask(self, holder: Holder, order: protocol.Ask) -> None:
        if self._ledger.open_asks[holder] >= protocol.MOST_ASKS:
            raise protocol.NotAMessage("it has too many asks open")
        ask = self._ledger.ask(holder, order.number, order.demand, self._clock())
        if ask is not None:
            self._fresh.append(ask)

    def _end(self, lease: Lease) -> None:
        now_ns = self._clock()
        self._ledger.end(lease, now_ns)
        if lease.granted:
            if lease.grant.gpu_uuids:
                self._gpus_left_ns = now_ns
            self._journal.note(EndLine(lease.number), lease)

    # Leases whose dispatchers do not end them.

    def _look_after_leases(self) -> None:
        self._ledger.distrust_overstayers(self._clock())
        oldest_ns = self._boot_clock() - LAPSE_NS - _LAPSE_SLACK_NS
        for lease in [each for each in self._ledger.leases.values() if not each.begun]:
            if lease.since_boot_ns <= oldest_ns:
                log.info("a lease of %s has lapsed: it was not used", lease.holder.user)
                self._end(lease)
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

    # Decisions.

    def _machine(self) -> Machine:
        ledger, now_ns = self._ledger, self._clock()
        leases = ledger.leases.values()
        gpus = bool(
            ledger.asks_for_gpus
            or ledger.squatters
            or self._gpus_left_ns
            or any(lease.grant.gpu_uuids for lease in leases)
        )
        machine = self._hardware.machine(now_ns, leases, gpus=gpus)
        if gpus:
            ledger.squat(self._squatters(machine), now_ns)
            if self._hardware.seen_at_ns > self._gpus_left_ns:
                self._gpus_left_ns = 0
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
        due = ledger.next_at_ns is not None and now_ns >= ledger.next_at_ns
        if self._decided != ledger.version or due or anew or ledger.asks_for_gpus:
            self._grant(ledger.decide(self._machine(), now_ns), now_ns)
            self._decided = ledger.version
            for ask in self._fresh:
                self._tell(ask)
            self._fresh.clear()
        self._answer_all()

    def _grant(self, starts: list[tuple[Lease, Grant]], now_ns: int) -> None:
        """Grant the starts of a decision: first on the disk, then in the answers."""
        since_boot_ns, granted = self._boot_clock(), list[Lease]()
        for lease, grant in starts:
            if self._hardware.may_start_on(grant, now_ns):
                lease.grant, lease.at_ns, lease.since_boot_ns = grant, now_ns, since_boot_ns
                granted.append(lease)
        if not granted:
            return
        try:
            self._journal.granted(granted)
        except OSError as error:
            if not self._trouble:
                log.error("cannot record leases, so nothing is granted: %s", error)
            self._trouble = f"the arbiter cannot record leases: {error.strerror}"
            return
        self._trouble = ""
        for lease in granted:
            self._ledger.grant(lease)
            reply = protocol.Granted(lease.ask, lease.number, since_boot_ns + LAPSE_NS, Units.of(lease.grant))
            self._by_holder[lease.holder].replies.append(reply)

    def _tell(self, ask: Lease) -> None:
        """Tell the dispatcher of an ask that waits why, if that is news."""
        if ask.number not in self._ledger.asks:
            return
        reason = (self._ledger.why(ask) or self._trouble or "granted at any moment")[: protocol.MOST_TEXT]
        if reason != ask.told:
            ask.told = reason
            self._by_holder[ask.holder].replies.append(protocol.Wait(ask.ask, reason))

    def _answer_all(self) -> None:
        for connection in list(self._connections.values()):
            try:
                protocol.send(connection.sock, connection.replies)
            except OSError:  # it is gone, or does not read
                self._cut_off(connection)

    # What everyone may see.

    def _publish(self) -> None:
        """Write `machine.json`; if nothing has changed, it has the time of now."""
        path = os.path.join(self._directory, STATUS)
        if self._published == self._ledger.version and not self._hardware.watches_gpus:
            with contextlib.suppress(OSError):  # it is gone
                os.utime(path)
                return
        now_ns, ledger = self._clock(), self._ledger
        machine = self._machine()
        self._published = ledger.version
        status = protocol.MachineShares(
            written_at_ns=now_ns,
            since_ns=self._since_ns,
            pid=os.getpid(),
            cpus=machine.cpus,
            memory_bytes=machine.memory_bytes,
            resources={pool.name: pool.total for pool in machine.resources},
            users=tuple(user_shares(ledger)),
            gpus=tuple(gpu_shares(machine, ledger)),
            gpu_problem=machine.gpu_problem,
        )
        try:
            self._disk.put(path, json_line(status), mode=0o644)
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


_HOST_EVERY_NS = SECOND_NS // 4
_FRESH_NS = SECOND_NS  # a start on GPUs needs an answer of NVML that is not older


class Hardware:
    """The machine that an arbiter shares out."""

    def __init__(self, config: MachineConfig) -> None:
        self._config = config
        self._host = Host()
        self._totals = (0, 0, 0)  # CPUs, memory, what is available of it
        self._seen_ns = 0  # when these were
        self.watches_gpus = False  # once they have mattered
        self.seen_at_ns = 0  # when the query was made that NVML has answered last; 0: the next look asks again
        self._watcher = GpuWatcher()
        self._ours = Ours(ignores=config.gpu.ignores)

    def machine(self, now_ns: int, leases: Iterable[Lease], *, gpus: bool) -> Machine:
        """Return the machine as it is; *gpus*: whether anything concerns its GPUs."""
        config = self._config
        try:
            if not 0 <= now_ns - self._seen_ns < _HOST_EVERY_NS:
                host = self._host.memory()
                cpus = config.cpus if config.cpus is not None else self._host.cpus()
                self._totals = cpus, config.memory_of(host.total_bytes), host.available_bytes
                self._seen_ns = now_ns
        except OSError:  # out of descriptors: what was seen last counts
            if not self._totals[0]:
                raise
        cpus, memory_bytes, available_bytes = self._totals
        machine = Machine(cpus, memory_bytes, available_bytes, resources=config.resources)
        return self._with_gpus(machine, now_ns, leases) if gpus else machine

    def may_start_on(self, grant: Grant, now_ns: int) -> bool:
        """Whether NVML has shown the GPUs of *grant* since the last lease has left them; else it is asked again."""
        if not grant.gpu_uuids:
            return True
        free = grant.gpu_memory_bytes is not None or not any(map(self._watcher.was_ours, grant.gpu_uuids))
        if free and now_ns - self.seen_at_ns < _FRESH_NS:
            return True
        self.seen_at_ns = 0
        return False

    def fileno(self) -> int:
        """Return the descriptor that is readable when NVML has answered."""
        return self._watcher.fileno()

    def take_answer(self, now_ns: int) -> None:
        """Read NVML's answer, which is there."""
        self._watcher.look(now_ns, self._ours, max_age_ns=self._watcher.every_ns, patience_ns=0)

    def close(self) -> None:
        """End the process that queries NVML."""
        self._watcher.close()

    def _with_gpus(self, machine: Machine, now_ns: int, leases: Iterable[Lease]) -> Machine:
        self.watches_gpus = True
        held: dict[str, list[Lease]] = {}
        users: dict[int, str] = {}
        for lease in leases:
            for uuid in lease.grant.gpu_uuids:
                users[lease.holder.uid] = lease.holder.user
                held.setdefault(uuid, []).append(lease)
        on = {uuid: _granted(each) for uuid, each in held.items()}
        self._ours = Ours(lambda pid: users.get(identity.owner_of(pid)), on, self._config.gpu.ignores)
        age_ns = self._watcher.every_ns if self.seen_at_ns else 0
        look = self._watcher.look(now_ns, self._ours, max_age_ns=age_ns, patience_ns=0)
        self.seen_at_ns = look.seen_at_ns or 0
        gpus = tuple(
            replace(
                gpu,
                taken_bytes=_by_lease(gpu, held.get(gpu.uuid, [])),
                foreign=tuple(replace(process, job=None) for process in gpu.foreign),
                work=(),
            )
            for gpu in look.gpus
        )
        return replace(machine, gpus=gpus, gpu_problem=look.problem)


def _by_lease(gpu: Gpu, leases: list[Lease]) -> tuple[tuple[str, int], ...]:
    """Return what each lease holds of *gpu*: what its user holds there fills the leases one after the other."""
    left, taken = dict(gpu.taken_bytes), []
    for lease in leases:
        rest = left.get(lease.holder.user, 0)
        part = rest if lease.grant.gpu_memory_bytes is None else min(rest, lease.grant.gpu_memory_bytes)
        left[lease.holder.user] = rest - part
        taken.append((lease.name, part))
    return tuple(sorted(taken))


def _granted(leases: Iterable[Lease]) -> dict[str, int | None]:
    """Return what users were granted of the memory of one GPU by its *leases*; None: all of it."""
    found: dict[str, int | None] = {}
    for lease in leases:
        granted, before = lease.grant.gpu_memory_bytes, found.get(lease.holder.user, 0)
        found[lease.holder.user] = None if granted is None or before is None else before + granted
    return found


def user_shares(ledger: LeaseLedger) -> list[UserShare]:
    """Return what each user has, and how many asks of each wait."""
    leases: dict[str, list[Lease]] = {}
    for lease in ledger.leases.values():
        leases.setdefault(lease.holder.user, []).append(lease)
    asks = Counter(ask.holder.user for ask in ledger.asks.values())
    found = []
    for user in sorted(leases.keys() | asks.keys() | ledger.squatters.keys()):
        held, resources = leases.get(user, []), Counter[str]()
        for lease in held:
            resources.update(dict(lease.grant.resources))
        found.append(
            UserShare(
                user=user,
                leases=len(held),
                cpus=sum(lease.grant.cpus for lease in held),
                memory_bytes=sum(lease.grant.memory_bytes or 0 for lease in held),
                gpus=len(ledger.squatters.get(user, frozenset()).union(*(lease.grant.gpu_uuids for lease in held))),
                resources=dict(resources),
                asks=asks[user],
            )
        )
    return found


def gpu_shares(machine: Machine, ledger: LeaseLedger) -> list[GpuShare]:
    """Return which users have each GPU."""
    leases = ledger.leases.values()
    return [
        GpuShare(
            uuid=gpu.uuid,
            index=gpu.index,
            users=tuple(sorted(_granted(each for each in leases if gpu.uuid in each.grant.gpu_uuids).items())),
            without_lease=tuple(sorted(user for user, uuids in ledger.squatters.items() if gpu.uuid in uuids)),
            problem=gpu.problem,
        )
        for gpu in machine.gpus
    ]
