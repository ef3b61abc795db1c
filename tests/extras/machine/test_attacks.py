"""What a user can try against the arbiter of a shared machine, and what must happen: nothing to the others.

With root the users are real: the kernel tells the arbiter who speaks. Without, what needs one user only is tested.
"""

from __future__ import annotations

import contextlib
import grp
import json
import logging
import os
import pwd
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from extras.machine.talk import Driven, Speaker, driven
from plugins.fake_nvml import GIB, FakeNvml
from spool.core.errors import LockHeld, SpoolUnusable
from spool.extras.machine import arbiter as server
from spool.extras.machine import journal, peers, protocol, status
from spool.extras.machine.protocol import Claim, Drop, EndLease, LeaseRequest, Units, Use
from spool.extras.machine.status import MachineShares
from spool.machine import identity
from spool.machine.host import Host, HostMemory
from support import PATIENCE_S, ROOT, wait_for

IS_ROOT = os.getuid() == 0
ALICE, BOB, MALLORY = (12345, 12347, 12346) if IS_ROOT else (os.getuid(),) * 3
STRANGER = 12399
SECOND_NS = 1_000_000_000
HOUR_NS = 3600 * SECOND_NS

several_users = pytest.mark.skipif(not IS_ROOT, reason="takes root, to speak as several users")
with_setpriv = pytest.mark.skipif(
    not IS_ROOT or shutil.which("setpriv") is None, reason="takes root and setpriv, for processes of several users"
)

USERS = f"users = [0, {ALICE}, {BOB}, {MALLORY}]\n" if IS_ROOT else f"users = [{ALICE}]\n"
POOLS = "[resources]\nlicence = 2\n"
MACHINE = f'{USERS}cpus = 4\nmemory = "4G"\n{POOLS}'

PASSES = 3
"""Passes of the arbiter until an ask is answered, whatever the others do: it is heard in the next, or the one after."""


@pytest.fixture
def place() -> Iterator[Path]:
    """Give a directory below /tmp that every user can reach."""
    base = Path(tempfile.mkdtemp(prefix="spool-arbiter-", dir="/tmp"))
    base.chmod(0o755)
    try:
        yield base / "run"
    finally:
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def machine(place: Path) -> Iterator[Driven]:
    """Give an arbiter of four CPUs, 4 GiB and two licences."""
    with driven(place, MACHINE) as found:
        yield found


@pytest.fixture
def nvml(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Give a driver that the arbiter asks."""
    for name, value in fake_nvml.variables.items():
        monkeypatch.setenv(name, value)
    return fake_nvml


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pass in which nothing happens be a short one; no spool is away, however long a test takes for a step."""
    monkeypatch.setattr(server, "_AWAY_NS", HOUR_NS)
    monkeypatch.setattr(server, "_TELL_EVERY_S", 0.05)
    monkeypatch.setattr(server, "_LOOK_EVERY_S", 0.05)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the arbiter look after leases, and write, in every pass; a spool is away as soon as its dispatcher is."""
    monkeypatch.setattr(server, "_AWAY_NS", 0)
    monkeypatch.setattr(server, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(server, "_TELL_EVERY_S", 0.01)


class Clock:
    """A clock that a test sets."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        """Return the time, which passes a little."""
        self.now_ns += 1000
        return self.now_ns


def turns(machine: Driven, most: int, until: Callable[[], bool] = lambda: False) -> int:
    """Let the arbiter make passes until something is so; return how many it took, *most* + 1 if that is not enough."""
    for number in range(1, most + 1):
        machine.arbiter.turn()
        if until():
            return number
    return most + 1


def granted(machine: Driven, speaker: Speaker, cpus: int = 1, **more: object) -> protocol.Granted:
    """Ask for a lease and return it."""
    number = speaker.ask(cpus, **more)
    machine.until(lambda: speaker.grant(number) is not None)
    lease = speaker.grant(number)
    assert lease is not None
    return lease


def begun(machine: Driven, speaker: Speaker, cpus: int = 1, **more: object) -> protocol.Granted:
    """Take a lease and begin to use it."""
    lease = granted(machine, speaker, cpus, **more)
    machine.told(speaker, Use(lease.lease))
    return lease


def is_answered_at_once(machine: Driven, speaker: Speaker, passes: int = PASSES) -> bool:
    """Ask for nothing and withdraw it; return whether there was an answer within some passes."""
    number = speaker.ask(0)
    took = turns(machine, passes, lambda: speaker.grant(number) is not None or bool(speaker.why(number)))
    speaker.say(Drop(number))
    return took <= passes


def waits(machine: Driven, speaker: Speaker, cpus: int, passes: int = 6) -> bool:
    """Ask for a lease; return whether it is still not there after some passes. The ask is withdrawn."""
    number = speaker.ask(cpus)
    took = turns(machine, passes, lambda: speaker.grant(number) is not None)
    machine.told(speaker, Drop(number))
    return took > passes


def status_of(machine: Driven) -> MachineShares:
    """Return what everyone can read."""
    found = status.parse((machine.directory / "machine.json").read_bytes())
    assert found is not None
    return found


def held(machine: Driven) -> dict[str, int]:
    """Return the CPUs of each user, once that is written."""
    changes = machine.arbiter
    for _ in range(3):
        changes.turn()
    return {each.user: each.cpus for each in status_of(machine).users if each.cpus}


def name_of(uid: int) -> str:
    """Return the name of a user as the arbiter has it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def descriptors() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def process_of(uid: int) -> Iterator[tuple[int, int]]:
    """Run a process of a user that leads a session; give its pid, and when it began. Another user takes setpriv."""
    as_user = [] if uid == os.getuid() else ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    process = subprocess.Popen([*as_user, "sleep", "300"], start_new_session=True)
    try:
        comm = Path(f"/proc/{process.pid}/comm")
        wait_for(lambda: identity.owner_of(process.pid) == uid and comm.read_text() == "sleep\n", what="the process")
        yield process.pid, identity.start_ticks(process.pid) or 0
        assert process.poll() is None, "it was killed"
    finally:
        process.kill()
        process.wait()


def welcomed(machine: Driven, speaker: Speaker) -> protocol.Welcome:
    """Return the one welcome that it has heard, once all is answered."""
    machine.settle()
    [found] = speaker.all(protocol.Welcome)
    return found


def goes_first(machine: Driven, clock: Clock, holder: Speaker, *asking: Speaker) -> list[bool]:
    """Let users ask for three of four CPUs for an hour, while all are held; return who has them then."""
    taken = granted(machine, holder, 4)
    numbers = []
    for each in asking:
        numbers.append(machine.asked(each, 3, limit_ns=HOUR_NS))
        clock.now_ns += 5 * SECOND_NS
    clock.now_ns += 600 * SECOND_NS
    machine.told(holder, EndLease(taken.lease))
    return [each.grant(number) is not None for each, number in zip(asking, numbers, strict=True)]


def elsewhere(own: tuple[int, int], *more: tuple[int, int]) -> list[tuple[int, int]]:
    """Return processes that prove nothing for the user of *own*: others', root's, one that is over, and *more*."""
    return [*more, (1, identity.start_ticks(1) or 0), (own[0], own[1] + 1), (1 << 22, 5)]


# 5: who is not served.


@several_users
@pytest.mark.parametrize(
    "uid",
    [STRANGER, 65534, 1, 100_001, (1 << 32) - 2],
    ids=["another user", "nobody", "a system account", "a subordinate uid", "the last uid"],
)
@pytest.mark.parametrize(
    "users", [USERS, "", 'users = ["@lab"]\n'], ids=["users are listed", "every account", "a group"]
)
def test_a_uid_that_is_not_served_is_refused_unheard(
    place: Path, uid: int, users: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer under another uid hears a refusal, and nothing that it says is parsed."""
    with driven(place, f"{users}cpus = 4\n") as machine:
        peer = machine.speaker(uid)
        peer.say_bytes(b"nonsense")
        with caplog.at_level(logging.WARNING):
            turns(machine, 2)
        assert not peer.listen()
        [refused] = peer.all(protocol.Refused)
        assert "users" in refused.reason or "no account" in refused.reason
        assert "cut off" not in caplog.text
        assert held(machine) == {}


@several_users
def test_root_in_a_namespace_of_her_own_is_still_mallory(place: Path) -> None:
    """In a user namespace where she is root, mallory is refused as who she is."""
    says = f"""if True:
        import socket
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect({str(place / "socket")!r})
        print(sock.recv(1000).decode())
    """
    me = ["setpriv", f"--reuid={MALLORY}", f"--regid={MALLORY}", "--clear-groups"]
    unshare = [*me, "unshare", "--user", "--map-root-user", sys.executable, "-I", "-c"]
    try:
        done = subprocess.run([*unshare, "import os; assert not os.getuid()"], check=False, capture_output=True)
    except FileNotFoundError:
        done = None
    if done is None or done.returncode:
        pytest.skip("this user cannot make a user namespace, or run this Python there")
    with driven(place, "users = [0]\n") as machine:
        process = subprocess.Popen([*unshare, says], stdout=subprocess.PIPE, text=True)
        machine.until(lambda: process.poll() is not None)
        assert process.stdout is not None
        with process.stdout as said:
            [[word, reason]] = json.loads(said.read())
    assert word == "refused"
    assert str(MALLORY) in reason


@several_users
def test_a_uid_has_32_bits(place: Path) -> None:
    """An account with a uid beyond 2^31 is served if it is listed."""
    with driven(place, "users = [3000000000]\ncpus = 1\n") as machine:
        granted(machine, machine.dispatcher(uid=3_000_000_000))


# 6: saying what is another's.


@several_users
def test_what_is_anothers_cannot_be_changed(machine: Driven) -> None:
    """Mallory names alice's spool, lease and ask wherever a number goes: all of it stays alice's."""
    alice, bob, mallory = (machine.dispatcher("spool", uid) for uid in (ALICE, BOB, MALLORY))
    lease = granted(machine, alice, 3)
    waiting = machine.asked(alice, 2)
    machine.told(mallory, Use(lease.lease), Use(lease.lease, os.getpid(), 1), EndLease(lease.lease), Drop(waiting))
    mallory.close()
    again = machine.speaker(MALLORY)
    again.hello("spool", Use(lease.lease, 1, 1))
    welcomed(machine, again)
    assert again.all(protocol.Unknown) == [protocol.Unknown(lease.lease)]
    machine.told(again, EndLease(lease.lease))
    assert alice.listen()
    assert held(machine) == {name_of(ALICE): 3}
    assert waits(machine, bob, 2)
    machine.told(alice, EndLease(lease.lease))
    assert alice.grant(waiting) is not None


@several_users
@pytest.mark.parametrize(
    "text",
    [
        f'[["hello",2,"spool"]],["uid",{ALICE}]',
        f'[["hello",2,"spool"],["ask",1,[1],"{ALICE}"]]',
        '[["hello",2,"../spool"]]',
        f'[["hello",2,{{"uid":{ALICE}}}]]',
    ],
)
def test_no_message_names_a_user(machine: Driven, text: str) -> None:
    """A field for another user cuts off who sends it."""
    mallory = machine.speaker(MALLORY)
    mallory.say_bytes(text.encode())
    machine.settle()
    assert not mallory.listen()


def test_a_connection_speaks_for_one_spool(machine: Driven) -> None:
    """A hello for another spool on the same connection cuts it off; what it has asked for and not begun is free."""
    mallory, alice = machine.dispatcher("one", MALLORY), machine.dispatcher("alice", ALICE)
    granted(machine, mallory, 4)
    mallory.hello("two")
    machine.settle()
    assert not mallory.listen()
    granted(machine, alice, 4)


# 7: holding what was never granted.


def test_a_hello_hears_the_totals_and_ends_what_it_does_not_name(machine: Driven) -> None:
    """The welcome has the totals by which a dispatcher plans; a lease that a dispatcher no longer names is over."""
    granted(machine, machine.dispatcher("a"), 4)
    welcome = welcomed(machine, machine.dispatcher("a"))
    assert (welcome.cpus, welcome.memory_bytes, welcome.pools) == (4, 4 << 30, (("licence", 2, ()),))
    granted(machine, machine.dispatcher("b"), 4)


def test_no_lease_arises_from_a_hello(machine: Driven) -> None:
    """A hello that names 1,000 leases that it never had gives none, and the newer of two connections is the spool's."""
    alice = machine.dispatcher("alice", ALICE)
    older, newer = machine.speaker(MALLORY), machine.speaker(MALLORY)
    holds = [Use(number, os.getpid(), 1) for number in range(1000)]
    for mallory in (older, newer):
        mallory.hello("spool", *holds)
        machine.settle()
    assert not older.listen()
    assert [each.lease for each in newer.all(protocol.Unknown)] == list(range(1000))
    assert held(machine) == {}
    granted(machine, alice, 4)


def test_a_hello_that_never_comes_is_cut_off(machine: Driven) -> None:
    """A connection names no more leases than a user may have; what it names before its hello changes nothing."""
    known = machine.dispatcher("spool", MALLORY)
    lease = granted(machine, known)
    endless = machine.speaker(MALLORY)
    for first in range(0, protocol.MOST_LEASES, 200):
        endless.say(*map(Use, range(first, first + 200)))
        turns(machine, PASSES)
    assert endless.listen()
    endless.say(Use(1))
    turns(machine, PASSES)
    assert not endless.listen()
    machine.told(known, Use(lease.lease))
    assert held(machine) == {name_of(MALLORY): 1}


# 7a: claims, of runs that began without a lease.


def claims(machine: Driven, speaker: Speaker, *claims: Claim) -> list[int]:
    """Say hello and some claims, and return the leases that they become, 0 for none."""
    speaker.hello()
    speaker.say(*claims)
    machine.settle()
    leases = [speaker.grant(claim.number) for claim in claims]
    return [each.lease if each is not None else 0 for each in leases]


@with_setpriv
@pytest.mark.usefixtures("at_once")
def test_a_run_from_before_takes_its_room(machine: Driven) -> None:
    """What began without a lease is not granted again, after a restart neither, until its process is gone.

    Then it is over, though its dispatcher is gone, too.
    """
    with process_of(ALICE) as process:
        alice = machine.speaker(ALICE)
        demand = LeaseRequest(3, memory_bytes=3 << 30, resources=(("licence", 1), ("unknown", 1)))
        [lease] = claims(machine, alice, Claim(1, demand, Units(), *process))
        assert lease
        assert waits(machine, machine.dispatcher("bob", BOB), 2)
        assert held(machine) == {name_of(ALICE): 3}
        machine.restart()
        bob, alice = machine.dispatcher("bob", BOB), machine.speaker(ALICE)
        alice.hello("spool", Use(lease, *process))
        assert waits(machine, bob, 2)
        [share] = [each for each in status_of(machine).users if each.leases]
        assert (share.memory_bytes, share.resources) == (3 << 30, {"licence": 1})
        alice.close()
        assert waits(machine, bob, 2, 30)
    granted(machine, bob, 4)


@with_setpriv
def test_a_claim_takes_no_more_than_the_quota(place: Path) -> None:
    """Beyond her quota, and beyond the machine, a claim of mallory's takes no room, and nobody's lease ends."""
    quota = "[quotas.default_user]\nmax_running_cpus = 3\nmax_running_jobs = 2\n"
    with driven(place, f'{USERS}cpus = 4\nmemory = "4G"\n{POOLS}{quota}') as machine, process_of(MALLORY) as process:
        bob, mallory = machine.dispatcher("bob", BOB), machine.speaker(MALLORY)
        granted(machine, bob, 1)
        all_of_it = LeaseRequest(1 << 20, memory_bytes=1 << 50, resources=(("licence", 1 << 20),))
        each = [Claim(number, all_of_it, Units(cpu_list="0-4095"), *process) for number in (11, 12, 13)]
        first, second, third = claims(machine, mallory, *each)
        assert first
        assert second
        assert not third
        assert held(machine) == {name_of(BOB): 1, name_of(MALLORY): 3}
        shares = {share.user: share for share in status_of(machine).users}
        assert shares[name_of(MALLORY)].memory_bytes == 4 << 30
        number = machine.asked(mallory, 1)
        assert mallory.grant(number) is None
        assert bob.listen()


@with_setpriv
def test_a_claim_takes_a_process_of_its_user(machine: Driven) -> None:
    """Without a living process of her own mallory claims nothing."""
    with process_of(ALICE) as hers, process_of(MALLORY) as own:
        mallory = machine.speaker(MALLORY)
        processes = elsewhere(own, hers, (0, 0))
        found = claims(
            machine, mallory, *[Claim(n, LeaseRequest(4), Units(), *each) for n, each in enumerate(processes)]
        )
    assert found == [0] * 5
    granted(machine, machine.dispatcher("alice", ALICE), 4)


@with_setpriv
def test_a_claim_has_its_gpus_and_no_others(place: Path, nvml: FakeNvml) -> None:
    """A GPU of a run from before is not granted, whether it computes or not; one that does not exist counts nowhere."""
    nvml.gpu("GPU-a", bus=0)
    nvml.gpu("GPU-b", bus=1)
    with process_of(ALICE) as process, driven(place, MACHINE) as machine:
        claim = Claim(1, LeaseRequest(1, gpus=3), Units(("GPU-a", "GPU-z", "GPU-y")), *process)
        assert claims(machine, machine.speaker(ALICE), claim) != [0]
        bob = machine.dispatcher("bob", BOB)
        assert granted(machine, bob, 1, gpus=1).units.gpu_uuids == ("GPU-b",)
        late = bob.ask(1, gpus=1)
        machine.until(lambda: name_of(ALICE) in bob.why(late))
        machine.until(lambda: bool(status_of(machine).gpus))
        assert {share.user: share.gpus for share in status_of(machine).users} == {name_of(ALICE): 1, name_of(BOB): 1}


# 8: processes of others.


@with_setpriv
@pytest.mark.usefixtures("at_once")
def test_a_process_of_another_keeps_no_lease(machine: Driven) -> None:
    """A wrapper that is alice's process, root's, or another one of that pid proves nothing for mallory."""
    alice = machine.dispatcher("alice", ALICE)
    with process_of(ALICE) as hers, process_of(MALLORY) as own:
        for pid, ticks in elsewhere(own, hers):
            mallory = machine.dispatcher("spool", MALLORY)
            lease = granted(machine, mallory, 4)
            machine.told(mallory, Use(lease.lease), Use(lease.lease, pid, ticks))
            mallory.close()
            machine.told(alice, EndLease(granted(machine, alice, 4).lease))


@with_setpriv
@pytest.mark.usefixtures("at_once")
def test_a_process_of_another_frees_no_lease(machine: Driven) -> None:
    """While alice's dispatcher is gone her lease stays as long as its wrapper, whatever mallory says; then it ends."""
    alice, mallory = machine.dispatcher("alice", ALICE), machine.dispatcher("spool", MALLORY)
    lease = granted(machine, alice, 4)
    with process_of(ALICE) as (pid, ticks):
        machine.told(alice, Use(lease.lease, pid, ticks))
        alice.close()
        mallory.say(Use(lease.lease, 1 << 22, 5), EndLease(lease.lease))
        assert waits(machine, mallory, 1, 30)
    granted(machine, mallory, 4)


@with_setpriv
@pytest.mark.usefixtures("at_once")
def test_the_session_of_a_wrapper_keeps_its_lease(machine: Driven) -> None:
    """A lease is not over while a process of its wrapper's session lives, though the wrapper was killed."""
    alice, bob = machine.dispatcher("alice", ALICE), machine.dispatcher("bob", BOB)
    lease = granted(machine, alice, 4)
    me = ["setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--clear-groups"]
    wrapper = subprocess.Popen(
        [*me, "sh", "-c", "sleep 300 & echo $!; read _"],
        start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with wrapper:
        child = int(wrapper.stdout.readline())
        ticks = identity.start_ticks(wrapper.pid)
        assert ticks is not None
        machine.told(alice, Use(lease.lease, wrapper.pid, ticks))
        alice.close()
        wrapper.kill()
        wrapper.wait()
        assert waits(machine, bob, 1, 30)
        os.kill(child, signal.SIGKILL)
        granted(machine, bob, 4)


# 9: nonsense.

_HELLO = '["hello",2,"spool"]'
NONSENSE = {
    "less than nothing": f'[{_HELLO},["ask",1,[-1]]]',
    "not a number": f'[{_HELLO},["ask",1,[NaN]]]',
    "2^63": f'[{_HELLO},["ask",1,[{1 << 63}]]]',
    "a number without end": f'[{_HELLO},["ask",1,[{"9" * 50_000}]]]',
    "17 resources": f'[{_HELLO},["ask",1,[1,0,0,0,"",{json.dumps([[f"r{n:02}", 1] for n in range(17)])}]]]',
    "a resource twice": f'[{_HELLO},["ask",1,[0,0,0,0,"",[["licence",2],["licence",2]]]]]',
    "a terminal's escape": f'[{_HELLO},["ask",1,[1,0,0,0,"\\u001b[31m"]]]',
    "an ask before hello": '[["ask",1,[1]]]',
    "60 kB": f"[{_HELLO}{' ' * 60_000}]",
    "257 messages": f"[{','.join([_HELLO] * 257)}]",
    "nested": "[" * 30_000,
    "invalid UTF-8": b'[["hello",2,"\xff\xfe"]]',
    "half a datagram": f"[{_HELLO}"[:-3],
    "no message": "[[]]",
    "another word": '[["kill",1]]',
    "what only the arbiter says": '[["grant",1,1,1]]',
    "an object": '{"hello":1}',
    "empty": b"",
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_cuts_off(machine: Driven, nonsense: str | bytes) -> None:
    """Whatever does not parse cuts off its sender with all it has said; the others are answered as before."""
    alice = machine.dispatcher("alice", ALICE)
    mallory = machine.speaker(MALLORY)
    mallory.say_bytes(nonsense if isinstance(nonsense, bytes) else nonsense.encode())
    assert is_answered_at_once(machine, alice)
    assert turns(machine, PASSES, lambda: not mallory.listen()) <= PASSES
    assert mallory.heard == []
    granted(machine, alice, 4, resources=(("licence", 2),))


IMPOSSIBLE = [
    {"cpus": 1_000_000},
    {"cpus": 1, "memory_bytes": 1 << 50},
    {"cpus": 0, "gpus": 1 << 20},
    {"cpus": 0, "gpus": 0, "gpu_memory_bytes": 1 << 50, "gpu_type": "H100"},
    {"cpus": 0, "gpus": 3, "gpu_type": "*[(\\"},
    {"cpus": 0, "resources": (("licence", 1 << 20),)},
    {"cpus": 0, "resources": (("no such thing", 0),)},
    {"cpus": 0, "resources": (("", 1), (" ", 0), ("licence", 0))},
    {"cpus": 1, "limit_ns": (1 << 63) - 1},
    {"cpus": 0, "limit_ns": 1, "like": "0" * 16},
]


def test_an_impossible_request_waits_alone(machine: Driven) -> None:
    """What nobody can have is answered like anything else, and keeps nobody from what there is."""
    alice, mallory = machine.dispatcher("alice", ALICE), machine.dispatcher("spool", MALLORY)
    numbers = [mallory.ask(**more) for more in IMPOSSIBLE]
    assert is_answered_at_once(machine, alice)
    assert all(mallory.grant(number) is not None or mallory.why(number) for number in numbers)
    for each in mallory.all(protocol.Granted):
        mallory.say(EndLease(each.lease))
    granted(machine, alice, 4, resources=(("licence", 2),))


def test_a_grant_can_be_read_after_a_year_of_uptime(place: Path) -> None:
    """The clock since boot has more than the 53 bits of other numbers, and so may a time limit."""
    clock = Clock(400 * 24 * HOUR_NS)
    with driven(place, MACHINE, boot_clock=clock) as machine:
        lease = granted(machine, machine.dispatcher(uid=ALICE), limit_ns=300 * 24 * HOUR_NS)
        assert lease.begin_before_ns > clock.now_ns


# 10: floods.


@several_users
def test_a_flood_of_asks_delays_nobody(machine: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mallory says as much as sockets take, on every connection she may have: bob is answered in the same pass."""
    monkeypatch.setattr(peers, "_PER_SECOND", 1)  # so that she has said too much however slow this machine is
    bob = machine.dispatcher("bob", BOB)
    flood = [machine.dispatcher(f"spool{number}", MALLORY) for number in range(peers.MOST_CONNECTIONS)]
    numbers = count(1)
    heard = 0
    for _ in range(30):
        for mallory in flood:
            with contextlib.suppress(BlockingIOError):
                while True:
                    pairs = [
                        (protocol.Ask(n, protocol.LeaseRequest(1)), Drop(n))
                        for n, _ in zip(numbers, range(100), strict=False)
                    ]
                    mallory.say(*[each for pair in pairs for each in pair])
                    heard += 1
        assert is_answered_at_once(machine, bob)
    assert all(mallory.listen() for mallory in flood)  # not read, and not cut off
    refill = [mallory for mallory in flood if _is_full(mallory)]
    assert refill == flood


def _is_full(speaker: Speaker) -> bool:
    """Whether a socket takes no more: what was said before is not read."""
    try:
        speaker.say(Drop(0))
    except BlockingIOError:
        return True
    return False


@several_users
def test_who_comes_back_has_said_it_all_the_same(machine: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has said too much is not read on a new connection either, and others are."""
    monkeypatch.setattr(peers, "_PER_SECOND", 200)  # it must be silent for longer than this machine may stall
    bob = machine.dispatcher("bob", BOB)
    mallory = machine.dispatcher("spool", MALLORY)
    drops = [Drop(number) for number in range(protocol.MOST_MESSAGES)]
    with contextlib.suppress(BlockingIOError):
        while True:
            mallory.say(*drops)
    turns(machine, 5)
    mallory.close()
    again = machine.speaker(MALLORY)
    again.hello("spool")
    for _ in range(100):
        with contextlib.suppress(BlockingIOError):
            again.say(*drops)
    heard = turns(machine, 1, lambda: bool(again.all(protocol.Welcome)))
    assert heard > 1
    assert is_answered_at_once(machine, bob)


@several_users
def test_asks_of_one_user_are_bounded(machine: Driven) -> None:
    """More asks than a spool may have open cut it off, and over all spools of a user only some take part in a decision.

    The others come after them.
    """
    bob, mallory = machine.dispatcher("bob", BOB), machine.dispatcher("spool", MALLORY)
    lease = granted(machine, bob, 4)
    most = protocol.MOST_ASKS
    asks = [protocol.Ask(number, protocol.LeaseRequest(1)) for number in range(most + 1)]
    mallory.say(*asks[:most])
    other = machine.dispatcher("other", MALLORY)
    late = machine.asked(other, 1)
    assert len(mallory.all(protocol.Wait)) == most
    assert "other starts come first" in other.why(late)
    machine.told(bob, EndLease(lease.lease))
    for each in mallory.all(protocol.Granted):
        mallory.say(EndLease(each.lease))
    mallory.say(*[Drop(number) for number in range(most)])
    machine.until(lambda: other.grant(late) is not None)
    machine.told(mallory, *[protocol.Ask(number, protocol.LeaseRequest(9)) for number in range(most)])
    assert mallory.listen()
    machine.told(mallory, protocol.Ask(most, protocol.LeaseRequest(9)))
    assert not mallory.listen()
    assert other.listen()


@several_users
def test_leases_of_one_user_are_bounded(machine: Driven) -> None:
    """Of leases that take nothing, a user gets no more than can be named in a hello, and others get theirs."""
    bob, mallory = machine.dispatcher("bob", BOB), machine.dispatcher("spool", MALLORY)
    numbers = count(1)
    most = protocol.MOST_LEASES
    for _ in range(most // 200 + 1):
        asks = [protocol.Ask(next(numbers), protocol.LeaseRequest(0)) for _ in range(200)]
        machine.told(mallory, *asks)
        assert mallory.listen()
    assert len(mallory.all(protocol.Granted)) == most
    assert "other starts come first" in mallory.all(protocol.Wait)[-1].reason
    assert is_answered_at_once(machine, bob)
    granted(machine, bob, 4)
    machine.told(mallory, EndLease(mallory.all(protocol.Granted)[0].lease))
    assert len(mallory.all(protocol.Granted)) == most + 1


@several_users
def test_a_flood_of_connections_keeps_nobody_out(machine: Driven) -> None:
    """Behind 200 connections of mallory, bob's new dispatcher joins within the passes that those take."""
    before = descriptors()
    flood = [Speaker(str(machine.directory / "socket"), MALLORY) for _ in range(200)]
    try:
        bob = machine.speaker(BOB)
        bob.hello()
        number = bob.ask(1)
        most = 200 // server._AT_ONCE + 1 + PASSES
        assert turns(machine, most, lambda: bob.grant(number) is not None) <= most
        served = [mallory for mallory in flood if mallory.listen()]
        assert len(served) == peers.MOST_CONNECTIONS
        assert descriptors() <= before + len(flood) + len(served) + 2
        refused = {each.reason for mallory in flood for each in mallory.all(protocol.Refused)}
        assert refused == {f"{name_of(MALLORY)} has {peers.MOST_CONNECTIONS} dispatchers here already"}
    finally:
        for mallory in flood:
            mallory.close()
    turns(machine, PASSES)
    assert descriptors() <= before + 2


def test_coming_and_going_leaves_nothing(machine: Driven) -> None:
    """Hundreds of connections that say hello for new spools, ask and leave: no descriptor, ask or lease stays."""
    alice = machine.dispatcher("alice", ALICE)
    before = descriptors()
    for number in range(300):
        mallory = Speaker(str(machine.directory / "socket"), MALLORY)
        mallory.hello(f"spool{number}")
        mallory.ask(1)
        if number % 3:
            machine.arbiter.turn()
        mallory.close()
        if number % 10 == 0:
            assert is_answered_at_once(machine, alice)
    machine.settle()
    machine.settle()
    assert descriptors() <= before + 1
    assert held(machine) == {}
    granted(machine, alice, 4)


def test_a_deaf_peer_is_cut_off(machine: Driven) -> None:
    """Who asks and does not listen is cut off once the answers find no room, and what it got and cannot use is free."""
    alice, mallory = machine.dispatcher("alice", ALICE), machine.dispatcher("spool", MALLORY)
    granted(machine, mallory, 4)
    mallory.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)

    def says() -> bool:
        try:
            for _ in range(20):
                mallory.say(*[Use(1)] * 100)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return False

    machine.until(says)
    assert is_answered_at_once(machine, alice)
    granted(machine, alice, 4)


def test_a_peer_that_closes_one_direction_is_cut_off(machine: Driven) -> None:
    """A peer that can hear nothing, or say nothing, is gone; what it says behind its hello is not heard."""
    alice = machine.dispatcher("alice", ALICE)
    deaf, mute = machine.speaker(MALLORY), machine.dispatcher("mute", MALLORY)
    deaf.sock.shutdown(socket.SHUT_RD)
    deaf.say(
        protocol.Hello(protocol.VERSION, "deaf"),
        protocol.Ask(1, protocol.LeaseRequest(4)),
        protocol.Ask(2, protocol.LeaseRequest(9)),
    )
    mute.ask(4)
    mute.sock.shutdown(socket.SHUT_WR)
    machine.settle()
    machine.settle()
    assert not mute.listen()
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        deaf.say(Drop(1))
    assert held(machine) == {}
    granted(machine, alice, 4)


def test_without_descriptors_those_who_are_there_are_served(
    machine: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arbiter that cannot accept a connection serves the others, does not spin, and accepts it later."""
    monkeypatch.setattr(server, "_LISTEN_AGAIN_S", 0.2)
    alice = machine.dispatcher("alice", ALICE)
    turns(machine, 1)
    late = machine.speaker(BOB)
    late.hello("late")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 20, hard))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        with caplog.at_level(logging.WARNING):
            before = time.monotonic()
            for _ in range(3):
                assert is_answered_at_once(machine, alice)
            turns(machine, 5)
            passed = time.monotonic() - before
        tried = caplog.text.count("cannot accept")
        assert 1 <= tried <= passed / 0.2 + 1
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    machine.until(lambda: bool(late.all(protocol.Welcome)))


def test_a_long_talk_keeps_the_journals_short(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changing what uses a lease, and taking and ending leases without end, does not fill the disk."""
    monkeypatch.setattr(journal, "_COMPACT_AFTER", 100)
    with driven(place, MACHINE) as machine:
        mallory = machine.dispatcher("spool", MALLORY)
        lease = granted(machine, mallory)
        for number in range(20):
            machine.told(mallory, *[Use(lease.lease, 1 + n % 2, number) for n in range(200)])
        for _ in range(120):
            mallory.say(EndLease(granted(machine, mallory).lease))
        machine.settle()
        turns(machine, PASSES)
        assert len((place / "leases.jsonl").read_bytes().splitlines()) < 600
        machine.restart()
        assert len((place / "usage.jsonl").read_bytes().splitlines()) == 1
        assert held(machine) == {name_of(MALLORY): 1}


# 11: taking all and giving nothing back.


@several_users
def test_a_hog_has_no_more_than_its_quota(place: Path) -> None:
    """Mallory asks for all and ends nothing: she has her quota, alice starts beside her, and both files name her."""
    quota = "[quotas.default_user]\nmax_running_cpus = 3\n"
    with driven(place, f'{USERS}cpus = 4\nmemory = "4G"\n{quota}') as machine:
        spools = [machine.dispatcher(f"spool{number}", MALLORY) for number in range(4)]
        for mallory in spools:
            for _ in range(5):
                mallory.ask(1)
        alice = machine.dispatcher("alice", ALICE)
        granted(machine, alice, 1)
        assert held(machine) == {name_of(MALLORY): 3, name_of(ALICE): 1}
        number = machine.asked(alice, 2)
        assert re.search(rf"cpus: needs 2, 0 free \(3 leases of {name_of(MALLORY)} hold 3", alice.why(number))


# 12: using what was not granted.


def test_memory_that_is_used_outside_is_not_granted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What mallory uses without a lease is not free: the memory that is really available decides."""
    monkeypatch.setattr(Host, "memory", lambda self: HostMemory(4 << 30, 1 << 30))
    with driven(place, f"{USERS}cpus = 4\n") as machine:
        alice = machine.dispatcher("alice", ALICE)
        number = machine.asked(alice, 1, memory_bytes=2 << 30)
        assert alice.grant(number) is None
        assert "memory" in alice.why(number)
        granted(machine, alice, 1, memory_bytes=1 << 29)


GPUS = '[gpu]\npoll = "1s"\n'


@with_setpriv
@pytest.mark.usefixtures("at_once")
def test_who_sits_on_a_gpu_is_named_and_counted(place: Path, nvml: FakeNvml) -> None:
    """Mallory ends her lease and computes on: all can see it, and the GPU counts for her quota and her fair share."""
    nvml.gpu("GPU-a", bus=0)
    nvml.gpu("GPU-b", bus=1)
    clock = Clock(time.time_ns())
    quota = "[quotas.default_user]\nmax_running_gpus = 1\n"
    with process_of(MALLORY) as (pid, _), driven(place, f"{MACHINE}{GPUS}{quota}", clock=clock) as machine:
        mallory = machine.dispatcher("spool", MALLORY)
        lease = granted(machine, mallory, 1, gpus=1)
        assert lease.units.gpu_uuids == ("GPU-a",)
        nvml.process("GPU-a", pid, GIB)
        machine.told(mallory, Use(lease.lease))
        clock.now_ns += 2 * SECOND_NS
        mallory.say(EndLease(lease.lease))
        machine.until(lambda: any(gpu.without_lease for gpu in status_of(machine).gpus))
        assert [gpu.without_lease for gpu in status_of(machine).gpus] == [(name_of(MALLORY),), ()]
        assert [(share.user, share.gpus) for share in status_of(machine).users] == [(name_of(MALLORY), 1)]
        alice, bob = machine.dispatcher("alice", ALICE), machine.dispatcher("bob", BOB)
        more = mallory.ask(1, gpus=1)
        assert granted(machine, alice, 1, gpus=1).units.gpu_uuids == ("GPU-b",)
        machine.until(lambda: "GPUs" in mallory.why(more))
        late = bob.ask(1, gpus=1)
        machine.until(lambda: f"({pid}"[1:] in bob.why(late) and name_of(MALLORY) in bob.why(late))
        assert "without a lease" in bob.why(late)
        clock.now_ns += 10 * HOUR_NS
        machine.settle()
        nvml.leave(pid)
        clock.now_ns += 2 * SECOND_NS
        machine.until(lambda: bob.grant(late) is not None)
        machine.until(lambda: not any(gpu.without_lease for gpu in status_of(machine).gpus))
        machine.restart()
        used = {}
        for line in map(journal.parse_line, (place / "usage.jsonl").read_bytes().splitlines()):
            used[line.user] = line.used
        assert used[name_of(MALLORY)] == pytest.approx(36_000, rel=0.05)


@with_setpriv
@pytest.mark.usefixtures("at_once")
def test_a_reason_is_renewed_when_a_gpu_changes(place: Path, nvml: FakeNvml) -> None:
    """Whoever waits for a GPU hears who uses it now, though no lease and no ask has changed."""
    nvml.gpu("GPU-a", bus=0)
    clock = Clock(time.time_ns())
    with process_of(STRANGER) as (first, _), process_of(STRANGER) as (second, _):
        nvml.process("GPU-a", first, GIB)
        with driven(place, f"{MACHINE}{GPUS}", clock=clock) as machine:
            alice = machine.dispatcher("alice", ALICE)
            number = alice.ask(1, gpus=1)
            machine.until(lambda: f"pid {first}" in alice.why(number))
            for _ in range(3):
                machine.arbiter.turn()
            nvml.leave(first)
            nvml.process("GPU-a", second, GIB)
            clock.now_ns += 2 * SECOND_NS
            machine.until(lambda: f"pid {second}" in alice.why(number))
            assert name_of(STRANGER) in alice.why(number)


# 13: a limit that is a lie.


@several_users
def test_a_limit_that_is_a_lie_counts_once(place: Path) -> None:
    """After one lease that outlives its limit by hours, mallory's limits no longer put her ahead of alice."""
    clock = Clock(time.time_ns())
    with driven(place, f"{USERS}cpus = 1\nfair_share = false\n", clock=clock) as machine:
        alice, mallory = machine.dispatcher("alice", ALICE), machine.dispatcher("spool", MALLORY)
        lie = granted(machine, mallory, 1, limit_ns=60 * SECOND_NS)
        machine.told(mallory, Use(lie.lease))
        long = machine.asked(alice, 1, limit_ns=HOUR_NS)
        clock.now_ns += 5 * HOUR_NS
        machine.settle()
        mallory.say(EndLease(lie.lease))
        short = machine.asked(mallory, 1, limit_ns=60 * SECOND_NS)
        assert mallory.grant(short) is None
        first = alice.grant(long)
        # Nor do they after a restart of the arbiter.
        alice.say(EndLease(first.lease))
        machine.told(mallory, Drop(short))
        clock.now_ns += HOUR_NS
        machine.restart()
        bob, alice, mallory = (machine.dispatcher("spool", uid) for uid in (BOB, ALICE, MALLORY))
        taken = granted(machine, bob, 1)
        long = alice.ask(1, limit_ns=HOUR_NS // 2)
        short = machine.asked(mallory, 1, limit_ns=60 * SECOND_NS)
        clock.now_ns += 600 * SECOND_NS
        machine.told(bob, EndLease(taken.lease))
        assert alice.grant(long) is not None
        assert mallory.grant(short) is None


# 13a: what others would like to have forgotten.


@several_users
def test_nobody_can_erase_the_past_of_another(place: Path) -> None:
    """However many leases mallory takes and ends, what is kept of bob is as before, and after a restart it counts."""
    clock = Clock(time.time_ns())
    with driven(place, f"{USERS}cpus = 4\n", clock=clock) as machine:
        bob, mallory = machine.dispatcher("bob", BOB), machine.dispatcher("spool", MALLORY)
        lease = begun(machine, bob, 4)
        clock.now_ns += 10 * HOUR_NS
        bob.say(EndLease(lease.lease))
        numbers = count(1)
        for _ in range(5):
            machine.told(mallory, *[protocol.Ask(next(numbers), protocol.LeaseRequest(0)) for _ in range(200)])
            mallory.say(*[EndLease(each.lease) for each in mallory.all(protocol.Granted)])
            mallory.heard.clear()
            machine.settle()
        machine.restart()
        text = (place / "usage.jsonl").read_text()
        assert len(text.splitlines()) <= 2
        assert f'"{name_of(BOB)}"' in text
        alice, bob, mallory = (machine.dispatcher("spool", uid) for uid in (ALICE, BOB, MALLORY))
        assert goes_first(machine, clock, alice, bob, mallory) == [False, True]


@several_users
@pytest.mark.parametrize("ended", [False, True], ids=["in use", "over"])
def test_a_restart_counts_no_use_twice(place: Path, ended: bool) -> None:
    """What a lease has used counts once, whether the arbiter was restarted while it was held or after its end."""
    clock = Clock(time.time_ns())

    def kept() -> float:
        [line] = (place / "usage.jsonl").read_text().splitlines()
        user = journal.parse_line(line.encode())
        return user.used

    with driven(place, f'{USERS}cpus = 4\ncpu_weight = 1\nhalf_life = "1000d"\n', clock=clock) as machine:
        bob = machine.dispatcher("bob", BOB)
        lease = begun(machine, bob, 4)
        clock.now_ns += HOUR_NS
        if ended:
            machine.told(bob, EndLease(lease.lease))
        machine.restart()
        assert kept() == pytest.approx(4 * 3600, rel=0.01)
        clock.now_ns += HOUR_NS
        machine.restart()
        assert kept() == pytest.approx(4 * 3600 * (1 if ended else 2), rel=0.01)


# 14: leases that are not used.


def test_an_unused_lease_lapses(place: Path) -> None:
    """A suspended dispatcher's lease lapses after 30s and 5 more, and nothing is changed by what it says then.

    One whose use has begun does not, whatever time passes.
    """
    boot = Clock(HOUR_NS)
    with driven(place, MACHINE, boot_clock=boot) as machine:
        alice, mallory = machine.dispatcher("alice", ALICE), machine.dispatcher("spool", MALLORY)
        begun(machine, machine.dispatcher("begun", ALICE), 1)
        lease = granted(machine, mallory, 3)
        assert lease.begin_before_ns <= boot.now_ns + 30 * SECOND_NS
        wanted = alice.ask(3)
        boot.now_ns += 34 * SECOND_NS
        time.sleep(server._LOOK_EVERY_S)
        machine.settle()
        assert alice.grant(wanted) is None
        boot.now_ns += 2 * SECOND_NS
        machine.until(lambda: alice.grant(wanted) is not None)
        mallory.say(Use(lease.lease), Use(lease.lease, os.getpid(), 1))
        machine.settle()
        assert held(machine) == {name_of(ALICE): 4}
        boot.now_ns += HOUR_NS
        machine.until(lambda: held(machine) == {name_of(ALICE): 1})
        assert waits(machine, mallory, 4, 30)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("step_ns", [-24 * HOUR_NS, -HOUR_NS, HOUR_NS, 10_000 * 24 * HOUR_NS])
@pytest.mark.parametrize("restart", [False, True], ids=["", "restart"])
def test_a_clock_that_is_set_ends_no_lease(place: Path, step_ns: int, restart: bool) -> None:
    """The wall clock goes back or forward: a lease stays, begun or not, with and without its dispatcher."""
    clock = Clock(time.time_ns())
    with driven(place, MACHINE, clock=clock) as machine:
        mallory = machine.dispatcher("spool", MALLORY)
        unused, away = machine.dispatcher("unused", ALICE), machine.dispatcher("away", ALICE)
        granted(machine, unused, 2)
        begun(machine, away, 2)
        with process_of(ALICE):  # one that may be the wrapper
            clock.now_ns += step_ns
            if restart:
                machine.restart()
                mallory = machine.dispatcher("spool", MALLORY)
            else:
                away.close()
            assert waits(machine, mallory, 1, 30)


# 16: the journal.


@pytest.mark.parametrize("damage", ["cut", "garbage", "zeros", "binary", "nothing", "another file", "of another boot"])
def test_a_damaged_journal_stops_nothing(machine: Driven, damage: str) -> None:
    """Lines that are cut or garbage are skipped, whole ones count; a journal of another boot, or none, has no lease."""
    alice = machine.dispatcher("alice", ALICE)
    for _ in range(3):
        begun(machine, alice)
    path = machine.directory / "leases.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    text = {
        "cut": b"".join(lines)[:-40],
        "garbage": b"".join([*lines[:2], b'["grant",1,"no"]\n{{{{\n["end"]\n', *lines[2:]]),
        "zeros": b"".join([*lines, bytes(5000)]),
        "binary": b"".join([*lines, bytes(range(256)) * 20]),
        "nothing": b"",
        "another file": b"x" * 100,
        "of another boot": b"".join(lines).replace(identity.boot_id().encode(), b"0" * 36),
    }[damage]
    path.write_bytes(text)
    machine.restart()
    left = {"cut": 2, "nothing": 0, "another file": 0, "of another boot": 0}.get(damage, 3)
    assert held(machine) == ({name_of(ALICE): left} if left else {})
    bob = machine.dispatcher("bob", BOB)
    granted(machine, bob, 4 - left)
    assert not left or waits(machine, bob, 4 - left + 1)


def test_what_cannot_be_recorded_is_not_granted(machine: Driven) -> None:
    """With a full disk nothing is granted, the reason says so, ends still count, and it goes on once there is room."""
    alice = machine.dispatcher("alice", ALICE)
    begun(machine, alice, 3)
    journal = machine.directory / "leases.jsonl"
    before = journal.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        number = alice.ask(1)
        turns(machine, 6)
        grants = len(alice.all(protocol.Granted))
        why = alice.why(number)
        kept = journal.read_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert grants == 1
    assert "cannot record leases" in why
    assert kept == before
    machine.until(lambda: alice.grant(number) is not None)
    machine.restart()
    assert held(machine) == {name_of(ALICE): 4}


def test_a_number_is_not_used_again(place: Path) -> None:
    """After a restart at an earlier time of the wall clock, no lease has the number of an older one."""
    begin_ns = time.time_ns()
    clock = Clock(begin_ns)
    with driven(place, MACHINE, clock=clock) as machine:
        numbers = set()
        for _ in range(4):
            alice = machine.dispatcher("alice", ALICE)
            for _ in range(3):
                lease = granted(machine, alice).lease
                assert lease not in numbers
                numbers.add(lease)
                alice.say(EndLease(lease))
            machine.settle()
            clock.now_ns = begin_ns
            machine.restart()


def test_one_arbiter_serves_a_directory(machine: Driven, place: Path) -> None:
    """A second arbiter for the same directory does not begin, and the first one goes on."""
    with pytest.raises(LockHeld, match="another arbiter"):
        Driven(place, MACHINE)
    alice = machine.dispatcher("alice", ALICE)
    granted(machine, alice, 4)


def test_what_lies_in_the_way_is_said_or_replaced(place: Path) -> None:
    """A directory in the place of the socket is an error that names it; a link in the place of a file is replaced."""
    place.mkdir()
    target = place.parent / "target"
    target.write_text("kept")
    for name in ("machine.json", "leases.jsonl", "usage.jsonl"):
        (place / name).symlink_to(target)
    with driven(place, MACHINE) as machine:
        granted(machine, machine.dispatcher("alice", ALICE))
        held(machine)
        assert not (place / "machine.json").is_symlink()
        assert not (place / "leases.jsonl").is_symlink()
    (place / "socket").mkdir()
    with pytest.raises(OSError, match="socket"):
        Driven(place, MACHINE)
    assert target.read_text() == "kept"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_directory_of_all_is_not_served(place: Path, mode: int) -> None:
    """Where others could put a socket of theirs, no arbiter begins."""
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(SpoolUnusable, match="other users can write"):
        Driven(place, MACHINE)


# 17: messages that cross.


def test_a_lease_for_a_withdrawn_ask_is_over(machine: Driven) -> None:
    """Drop and grant cross: the lease, which no run uses, is free again at once, and another ask gets it.

    One that is in use stays.
    """
    alice, mallory = machine.dispatcher("alice", ALICE), machine.dispatcher("spool", MALLORY)
    number = machine.asked(mallory, 4)
    wanted = machine.asked(alice, 4)
    machine.told(mallory, Drop(number))
    lease = alice.grant(wanted)
    assert lease is not None
    crossed = mallory.grant(number)
    machine.told(mallory, Use(crossed.lease), EndLease(crossed.lease), Drop(number))
    machine.told(alice, Use(lease.lease), Drop(wanted))
    assert waits(machine, mallory, 1)
    assert held(machine) == {name_of(ALICE): 4}


def test_an_ask_does_not_outlive_its_connection(machine: Driven) -> None:
    """What was asked for before a reconnect is answered on no later connection, and keeps nothing."""
    alice, bob = machine.dispatcher("alice", ALICE), machine.dispatcher("bob", BOB)
    lease = granted(machine, bob, 4)
    number = machine.asked(alice, 4)
    alice.close()
    again = machine.dispatcher("alice", ALICE)
    machine.told(bob, EndLease(lease.lease))
    assert again.grant(number) is None
    assert again.all(protocol.Wait) == []
    granted(machine, bob, 4)


def test_what_can_begin_no_more_ends_with_the_connection(machine: Driven) -> None:
    """A dispatcher that is gone keeps the leases that it has begun, also by its last word, and no other."""
    alice, bob = machine.dispatcher("alice", ALICE), machine.dispatcher("bob", BOB)
    first, last, _ = granted(machine, alice, 1), granted(machine, alice, 1), granted(machine, alice, 2)
    alice.say(Use(first.lease))
    machine.asked(alice, 9)  # its answer stays unread, so that the kernel says "reset" before it gives the last words
    alice.say(Use(last.lease), Drop(77))
    alice.sock.close()
    machine.settle()
    assert held(machine) == {name_of(ALICE): 2}
    granted(machine, bob, 2)


# 19: what others can read.

_MARKS = ("evilword", "deadbeef")


@several_users
def test_a_users_text_reaches_nobody(machine: Driven, caplog: pytest.LogCaptureFixture) -> None:
    """Resource names, GPU types, spools and nonsense of mallory's are in no file for all, and in no other's reason."""
    alice, mallory = machine.dispatcher("alice", ALICE), machine.dispatcher("evilword", MALLORY)
    granted(machine, mallory, 1, like="deadbeef")
    for more in (
        {"cpus": 1, "resources": (("evilword", 0),)},
        {"cpus": 1, "resources": (("evilword <b>", 1), ("licence", 1))},
        {"cpus": 1, "gpus": 1, "gpu_type": "evilword"},
        {"cpus": 3, "like": "deadbeef"},
    ):
        mallory.ask(**more)
    number = alice.ask(4)
    with caplog.at_level(logging.DEBUG):
        rude = machine.speaker(MALLORY)
        rude.say_bytes(json.dumps([["\u202eevil\u009b31m\u001b[2J"]], ensure_ascii=False).encode())
        ruder = machine.speaker(MALLORY)
        ruder.say_bytes(json.dumps([["x" * 50_000]]).encode())
        held(machine)
        machine.settle()
    shown = (machine.directory / "machine.json").read_text() + alice.why(number)
    assert name_of(MALLORY) in shown
    assert not [mark for mark in (*_MARKS, "lease\\d") if re.search(mark, shown)]
    assert caplog.text.isascii()
    assert "\x1b" not in caplog.text
    assert "was cut off" in caplog.text
    assert max(map(len, caplog.messages)) < 400
    assert caplog.text.count("was cut off") == 1  # a flood of it fills no journal


@several_users
def test_only_machine_json_is_for_all(machine: Driven) -> None:
    """Others can read machine.json and speak to the socket; who holds which lease, and since when, is not theirs."""
    granted(machine, machine.dispatcher("alice", ALICE))
    held(machine)
    modes = {path.name: path.lstat().st_mode & 0o777 for path in machine.directory.iterdir()}
    assert modes == {
        "socket": 0o666,
        "machine.json": 0o644,
        "leases.jsonl": 0o600,
        "usage.jsonl": 0o640,
        ".lock": 0o600,
    }
    status = json.loads((machine.directory / "machine.json").read_text())
    assert status["users"] == [{"user": name_of(ALICE), "leases": 1, "cpus": 1}]


# 20: accounts that change.


class Directory:
    """The accounts of a machine, which a test changes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names = {ALICE: "alice", BOB: "bob", MALLORY: "mallory"}
        self.members = ["alice", "bob", "mallory"]
        monkeypatch.setattr(peers, "_KNOWN_FOR_S", 0.0)
        monkeypatch.setattr(pwd, "getpwuid", self._entry)
        monkeypatch.setattr(grp, "getgrnam", lambda name: grp.struct_group((name, "x", 4000, self.members)))

    def _entry(self, uid: int) -> pwd.struct_passwd:
        if uid not in self.names:
            raise KeyError(uid)
        return pwd.struct_passwd((self.names[uid], "x", uid, uid, "", "/", "/bin/sh"))


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Directory:
    """Give accounts that a test changes, each looked up anew."""
    return Directory(monkeypatch)


@with_setpriv
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("how", ["leaves the group", "is deleted"])
def test_who_is_no_longer_served_gets_nothing_more(place: Path, directory: Directory, how: str) -> None:
    """A user who leaves the group, or is deleted, hears a refusal and gets no lease; what runs keeps its lease."""
    with driven(place, 'users = [0, "@lab"]\ncpus = 4\n') as machine, process_of(MALLORY) as (pid, ticks):
        mallory, bob = machine.dispatcher("spool", MALLORY), machine.dispatcher("bob", BOB)
        lease = granted(machine, mallory, 2)
        mallory.say(Use(lease.lease, pid, ticks))
        taken = granted(machine, bob, 2)
        waiting = machine.asked(mallory, 1)
        directory.members.remove("mallory")
        if how == "is deleted":
            del directory.names[MALLORY]
        machine.until(lambda: not mallory.listen())
        assert mallory.all(protocol.Refused)
        bob.say(EndLease(taken.lease))
        turns(machine, 10)
        assert mallory.grant(waiting) is None
        assert waits(machine, bob, 3, 20)
        os.kill(pid, signal.SIGSTOP)  # stopped is not gone
        assert waits(machine, bob, 3, 20)
        os.kill(pid, signal.SIGCONT)
        again = machine.speaker(MALLORY)
        again.hello("spool", Use(lease.lease))
        machine.until(lambda: not again.listen())
        assert again.all(protocol.Refused)
        assert again.all(protocol.Welcome) == []


@with_setpriv
@pytest.mark.usefixtures("at_once")
def test_the_next_owner_of_a_uid_begins_anew(place: Path, directory: Directory) -> None:
    """The leases of a uid that is given to another end by proof, not by the new owner, whose score is new."""
    clock = Clock(time.time_ns())
    with driven(place, 'users = [0, "@lab"]\ncpus = 4\n', clock=clock) as machine:
        with process_of(MALLORY) as (pid, ticks):
            mallory, bob = machine.dispatcher("spool", MALLORY), machine.dispatcher("bob", BOB)
            lease = granted(machine, mallory, 4)
            machine.told(mallory, Use(lease.lease, pid, ticks))
            clock.now_ns += 100 * HOUR_NS
            directory.names[MALLORY] = "norbert"
            directory.members.append("norbert")
            machine.until(lambda: not mallory.listen())
            norbert = machine.dispatcher("spool", MALLORY)  # whose hello names no lease
            norbert.say(EndLease(lease.lease))
            assert waits(machine, bob, 1, 20)
            assert held(machine) == {"mallory": 4}
        bob.say(EndLease(granted(machine, bob, 4).lease))
        machine.restart()
        norbert, bob, alice = (machine.dispatcher("spool", uid) for uid in (MALLORY, BOB, ALICE))
        assert goes_first(machine, clock, alice, norbert, bob) == [True, False]


# 21 and 22: what the arbiter touches, and with what rights.

SYSTEMS_OWN = re.compile(r"/$|/(proc|sys|etc|usr|lib|lib64|dev|run|var)$|/(proc|sys|etc|usr|lib|lib64)/|/dev/null$")
NSS = re.compile(r"/(run|var/run|var/lib)/(systemd|userdb|host|nscd|sss)(/|$)|/run/userdb")


@contextlib.contextmanager
def serving(
    place: Path, before: list[str], environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run an arbiter as a process of its own; *before* runs it."""
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "spool", "machine", "serve", str(place)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/",
    )  # fmt: skip
    try:
        wait_for(lambda: (place / "machine.json").exists() or process.poll() is not None, what="the arbiter")
        assert process.poll() is None, process.communicate()[0]
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE_S)
        process.stdout.close()


def hear(speaker: Speaker, kind: type[protocol.PeerMessage]) -> protocol.PeerMessage:
    """Wait for a message of an arbiter that runs by itself."""
    return wait_for(lambda: speaker.all(kind), what=str(kind))[-1]


def converse(place: Path) -> None:
    """Take, use and end a lease, and leave another one to an arbiter that runs by itself."""
    speaker, rude = Speaker(str(place / "socket"), ALICE), Speaker(str(place / "socket"), MALLORY)
    try:
        speaker.hello()
        rude.say_bytes(b"nonsense")
        speaker.ask(1)
        lease = hear(speaker, protocol.Granted)
        speaker.say(Use(lease.lease), Use(lease.lease, os.getpid(), identity.start_ticks(os.getpid()) or 0))
        speaker.ask(99)
        hear(speaker, protocol.Wait)
        speaker.close()
        speaker = Speaker(str(place / "socket"), ALICE)
        speaker.hello("spool", Use(lease.lease))
        hear(speaker, protocol.Welcome)
        speaker.say(EndLease(lease.lease))
        speaker.ask(4)
        hear(speaker, protocol.Granted)
    finally:
        speaker.close()
        rude.close()


@pytest.mark.skipif(shutil.which("strace") is None, reason="takes strace")
def test_the_arbiter_opens_nothing_of_a_user(place: Path) -> None:
    """While it serves, it opens its own files, /proc and the account database, executes nothing and signals nobody."""
    place.mkdir()
    (place / "machine.toml").write_text(MACHINE)
    trace = place.parent / "trace"
    with serving(
        place,
        ["strace", "-f", "-qq", "-y", "-o", str(trace), "-e", "trace=%file,%process,kill,tkill,tgkill,connect,listen"],
    ) as process:
        converse(place)
        found = status.parse((place / "machine.json").read_bytes())
        os.kill(found.pid, signal.SIGTERM)
        process.wait(PATIENCE_S)
    lines = trace.read_text().splitlines()
    [begin] = [number for number, line in enumerate(lines) if " listen(" in line]
    wrong = []
    for line in lines[begin + 1 :]:
        call = re.match(
            r'\d+ +(\w+)\((?:(?:\d+|AT_FDCWD)<([^>]*)>,? ?)?(?:\{sa_family=AF_UNIX, sun_path=)?(?:"([^"]*)")?', line
        )
        if call is None or call[1] == "exit_group":
            continue
        path = (
            None if call[3] is None else os.path.join("/" if call[2] is None else call[2], call[3]).rstrip("/") or "/"
        )
        if path is None or not (Path(path).is_relative_to(place) or SYSTEMS_OWN.match(path) or NSS.match(path)):
            wrong.append(line)
    assert wrong == []


@with_setpriv
def test_the_arbiter_needs_no_capability_and_no_home(place: Path) -> None:
    """Under a uid of its own, without capabilities, new privileges or a home, it serves users."""
    tried = subprocess.run(
        ["setpriv", "--reuid=12350", "--regid=12350", "--clear-groups", sys.executable, "-c", "import spool"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, check=False, cwd="/",
    )  # fmt: skip
    if tried.returncode:
        pytest.skip("another user cannot run this Python")
    place.mkdir()
    (place / "machine.toml").write_text(MACHINE)
    os.chown(place, 12350, 12350)
    bare = ["--clear-groups", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    with serving(place, ["setpriv", "--reuid=12350", "--regid=12350", *bare], {"HOME": "/nonexistent"}) as process:
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert {line.split()[1] for line in status.splitlines() if line.startswith("Cap")} == {"0" * 16}
        converse(place)
        assert process.poll() is None
    assert {path.stat().st_uid for path in place.iterdir() if path.name != "machine.toml"} == {12350}
