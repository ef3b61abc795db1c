"""What a user can try against the arbiter of a shared machine, and what must happen: nothing to the others."""

from __future__ import annotations

import contextlib
import grp
import json
import logging
import os
import pwd
import re
import resource
import signal
import socket
import subprocess
import time
from itertools import count
from pathlib import Path

import pytest

from extras.machine.talk import (
    ALICE,
    BOB,
    GIB,
    HOUR_NS,
    MACHINE,
    MALLORY,
    PASSES,
    SECOND_NS,
    STRANGER,
    USERS,
    Clock,
    Driven,
    Speaker,
    driven,
    name_of,
    process_of,
    several_users,
    with_setpriv,
)
from plugins.fake_nvml import FakeNvml
from spool.extras.machine import arbiter as server
from spool.extras.machine import ledger, protocol
from spool.extras.machine.protocol import Ask, Claim, Drop, EndLease, LeaseRequest, Units, Use
from spool.machine import identity
from spool.machine.host import Host, HostMemory
from support import as_user

pytestmark = pytest.mark.usefixtures("brisk")

LICENCES = {"resources": (("licence", 2),)}


def descriptors() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def goes_first(machine: Driven, clock: Clock, holder: Speaker, *asking: Speaker) -> list[bool]:
    """Let users ask for three of four CPUs for an hour, while all are held; return who has them then."""
    taken = holder.takes(4)
    numbers = []
    for each in asking:
        numbers.append(each.asks(3, limit_ns=HOUR_NS))
        clock.now_ns += 5 * SECOND_NS
    clock.now_ns += 600 * SECOND_NS
    holder.tells(EndLease(taken.lease))
    return [each.grant(number) is not None for each, number in zip(asking, numbers, strict=True)]


def elsewhere(own: tuple[int, int], *more: tuple[int, int]) -> list[tuple[int, int]]:
    """Return processes that prove nothing for the user of *own*: others', root's, one that is over, and *more*."""
    return [*more, (1, identity.start_ticks(1) or 0), (own[0], own[1] + 1), (1 << 22, 5)]


# Who is not served.


@several_users
@pytest.mark.parametrize("uid", [STRANGER, 65534, 1, 100_001, (1 << 32) - 2])  # nobody, the system's, a subordinate uid
@pytest.mark.parametrize("users", [USERS, "", 'users = ["@lab"]\n'], ids=["listed", "every account", "a group"])
def test_a_uid_that_is_not_served_is_refused_unheard(
    place: Path, uid: int, users: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer under another uid hears a refusal, and nothing that it says is parsed. A uid has 32 bits."""
    with driven(place, f"{users}cpus = 4\n") as machine, caplog.at_level(logging.WARNING):
        peer = machine.speaker(uid)
        peer.say_bytes(b"nonsense")
        machine.turns(2)
        assert not peer.listen()
        [refused] = peer.all(protocol.Refused)
        assert "users" in refused.reason or "no account" in refused.reason
        assert "cut off" not in caplog.text
        assert machine.held() == {}
    with driven(place, f"users = [{uid}]\ncpus = 1\n") as machine:
        machine.dispatcher(uid=uid).takes()


@several_users
def test_what_is_anothers_cannot_be_changed(machine: Driven) -> None:
    """Mallory names alice's spool, lease and ask wherever a number goes: all of it stays alice's."""
    alice, bob, mallory = (machine.dispatcher("spool", uid) for uid in (ALICE, BOB, MALLORY))
    lease, waiting = alice.takes(3), alice.asks(2)
    mallory.tells(Use(lease.lease), Use(lease.lease, os.getpid(), 1), EndLease(lease.lease), Drop(waiting))
    mallory.close()
    again = machine.dispatcher("spool", MALLORY, Use(lease.lease, 1, 1))
    again.tells(EndLease(lease.lease))
    assert again.all(protocol.Unknown) == [protocol.Unknown(lease.lease)]
    assert alice.listen()
    assert machine.held() == {name_of(ALICE): 3}
    assert bob.waits(2)
    alice.tells(EndLease(lease.lease))
    assert alice.grant(waiting) is not None


def test_a_connection_speaks_for_one_spool(machine: Driven) -> None:
    """A second hello on the same connection cuts it off; what it has asked for and not begun is free."""
    mallory, alice = machine.users(MALLORY, ALICE)
    mallory.takes(4)
    mallory.hello("two")
    machine.settle()
    assert not mallory.listen()
    alice.takes(4)


# Holding what was never granted.


def test_no_lease_arises_from_a_hello(machine: Driven) -> None:
    """A hello that names 1,000 leases that it never had gives none, and the newer of two connections is the spool's."""
    [alice] = machine.users(ALICE)
    older, newer = machine.speaker(MALLORY), machine.speaker(MALLORY)
    for mallory in (older, newer):
        mallory.hello("spool", *[Use(number, os.getpid(), 1) for number in range(1000)])
        machine.settle()
    assert not older.listen()
    assert [each.lease for each in newer.all(protocol.Unknown)] == list(range(1000))
    assert machine.held() == {}
    alice.takes(4)


def test_a_hello_that_never_comes_is_cut_off(machine: Driven) -> None:
    """A connection names no more leases than a user may have; what it names before its hello changes nothing."""
    known, endless = machine.dispatcher("spool", MALLORY), machine.speaker(MALLORY)
    lease = known.takes()
    for first in range(0, protocol.MOST_LEASES, 200):
        endless.say(*map(Use, range(first, first + 200)))
        machine.turns(PASSES)
    assert endless.listen()
    endless.say(Use(1))
    machine.turns(PASSES)
    assert not endless.listen()
    known.tells(Use(lease.lease))
    assert machine.held() == {name_of(MALLORY): 1}


# Claims, of runs that began without a lease.


def claims(speaker: Speaker, *claims: tuple[LeaseRequest, Units, tuple[int, int]]) -> list[int]:
    """Say hello and some claims, and return the leases that they become, 0 for none."""
    speaker.hello()
    speaker.tells(*[Claim(number, demand, units, *of) for number, (demand, units, of) in enumerate(claims, 1001)])
    leases = [speaker.grant(number) for number in range(1001, 1001 + len(claims))]
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
        [lease] = claims(alice, (demand, Units(), process))
        assert lease
        assert machine.dispatcher("bob", BOB).waits(2)
        assert machine.held() == {name_of(ALICE): 3}
        machine.restart()
        bob, alice = machine.dispatcher("bob", BOB), machine.dispatcher("spool", ALICE, Use(lease, *process))
        assert bob.waits(2)
        [share] = [each for each in machine.status().users if each.leases]
        assert (share.memory_bytes, share.resources) == (3 << 30, {"licence": 1})
        alice.close()
        assert bob.waits(2, 30)
    bob.takes(4)


@with_setpriv
def test_a_claim_takes_no_more_than_the_quota(place: Path) -> None:
    """Beyond her quota, and beyond the machine, a claim of mallory's takes no room, and nobody's lease ends."""
    quota = "[quotas.default_user]\nmax_running_cpus = 3\nmax_running_jobs = 2\n"
    with driven(place, MACHINE + quota) as machine, process_of(MALLORY) as process:
        bob, mallory = machine.dispatcher("bob", BOB), machine.speaker(MALLORY)
        bob.takes(1)
        all_of_it = LeaseRequest(1 << 20, memory_bytes=1 << 50, resources=(("licence", 1 << 20),))
        found = claims(mallory, *[(all_of_it, Units(), process)] * 3)
        assert list(map(bool, found)) == [True, True, False]
        assert machine.held() == {name_of(BOB): 1, name_of(MALLORY): 3}
        shares = {share.user: share for share in machine.status().users}
        assert shares[name_of(MALLORY)].memory_bytes == 4 << 30
        assert mallory.grant(mallory.asks(1)) is None
        assert bob.listen()


@with_setpriv
def test_a_claim_takes_a_process_of_its_user(machine: Driven) -> None:
    """Without a living process of her own mallory claims nothing."""
    with process_of(ALICE) as hers, process_of(MALLORY) as own:
        processes = elsewhere(own, hers, (0, 0))
        found = claims(machine.speaker(MALLORY), *[(LeaseRequest(4), Units(), each) for each in processes])
    assert found == [0] * 5
    machine.dispatcher("alice", ALICE).takes(4)


@with_setpriv
@pytest.mark.usefixtures("nvml")
def test_a_claim_has_its_gpus_and_no_others(place: Path) -> None:
    """A GPU of a run from before is not granted, whether it computes or not; one that does not exist is no other's."""
    with process_of(ALICE) as process, driven(place, MACHINE) as machine:
        units = Units(("GPU-a", "GPU-z", "GPU-y"))
        assert claims(machine.speaker(ALICE), (LeaseRequest(1, gpus=3), units, process)) != [0]
        bob = machine.dispatcher("bob", BOB)
        assert bob.takes(1, gpus=1).units.gpu_uuids == ("GPU-b",)
        late = bob.ask(1, gpus=1)
        machine.until(lambda: name_of(ALICE) in bob.why(late))
        had = {name_of(ALICE): 3, name_of(BOB): 1}
        machine.until(lambda: {each.user: each.gpus for each in machine.status().users} == had)


# Processes of others.


@with_setpriv
@pytest.mark.usefixtures("at_once")
def test_a_process_of_another_keeps_no_lease(machine: Driven) -> None:
    """A wrapper that is alice's process, root's, or another one of that pid proves nothing for mallory."""
    alice = machine.dispatcher("alice", ALICE)
    with process_of(ALICE) as hers, process_of(MALLORY) as own:
        for process in elsewhere(own, hers):
            mallory = machine.dispatcher("spool", MALLORY)
            mallory.tells(Use(mallory.takes(4).lease, *process))
            mallory.close()
            alice.tells(EndLease(alice.takes(4).lease))


@with_setpriv
@pytest.mark.usefixtures("at_once")
def test_the_session_of_a_wrapper_keeps_its_lease(machine: Driven) -> None:
    """While alice's dispatcher is gone, her lease stays as long as her wrapper, or a process of its session.

    Whatever mallory says, and though the wrapper was killed. Then the lease ends.
    """
    alice, mallory = machine.users(ALICE, MALLORY)
    lease = alice.takes(4)
    wrapper = subprocess.Popen(
        [*as_user(ALICE), "sh", "-c", "sleep 300 & echo $!; read _"],
        start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with wrapper:
        child = int(wrapper.stdout.readline())
        alice.tells(Use(lease.lease, wrapper.pid, identity.start_ticks(wrapper.pid) or 0))
        alice.close()
        mallory.say(Use(lease.lease, 1 << 22, 5), EndLease(lease.lease))
        assert mallory.waits(1, 30)
        wrapper.kill()
        wrapper.wait()
        assert mallory.waits(1, 30)
        os.kill(child, signal.SIGKILL)
        mallory.takes(4)


# Nonsense.

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
    "another user": f'[{_HELLO},["ask",1,[1],"{ALICE}"]]',
    "a user's word": f'[{_HELLO}],["uid",{ALICE}]',
    "a path for a spool": '[["hello",2,"../spool"]]',
    "an object for a spool": f'[["hello",2,{{"uid":{ALICE}}}]]',
    "what only the arbiter says": '[["grant",1,1,1]]',
    "an object": '{"hello":1}',
    "empty": b"",
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_cuts_off(machine: Driven, nonsense: str | bytes) -> None:
    """Whatever does not parse cuts off its sender, who hears that alone; the others are answered as before."""
    alice, mallory = machine.dispatcher("alice", ALICE), machine.speaker(MALLORY)
    mallory.say_bytes(nonsense if isinstance(nonsense, bytes) else nonsense.encode())
    assert alice.is_answered()
    assert machine.turns(PASSES, lambda: not mallory.listen()) <= PASSES
    assert all(isinstance(each, protocol.Refused) for each in mallory.heard)
    alice.takes(4, **LICENCES)


def test_another_version_is_told_so(machine: Driven) -> None:
    """Its hello may have fields that this version does not have; the answer says what to do."""
    older = machine.speaker()
    older.say_bytes(b'[["hello",1,"spool",[[7]],false]]')
    machine.settle()
    [refused] = older.all(protocol.Refused)
    assert " version 1, " in refused.reason


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
    alice, mallory = machine.users(ALICE, MALLORY)
    numbers = [mallory.ask(**more) for more in IMPOSSIBLE]
    assert alice.is_answered()
    assert all(mallory.grant(number) is not None or mallory.why(number) for number in numbers)
    mallory.say(*[EndLease(each.lease) for each in mallory.all(protocol.Granted)])
    alice.takes(4, **LICENCES)


# Floods.


def is_full(speaker: Speaker, *orders: protocol.Order) -> bool:
    """Say something; return whether the socket takes no more: what was said before is not read."""
    try:
        speaker.say(*orders)
    except BlockingIOError:
        return True
    return False


@several_users
def test_a_flood_of_asks_delays_nobody(machine: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mallory says as much as sockets take, on every connection she may have: bob is answered in the same pass.

    She is not read, and not cut off. On a new connection she has said it all the same.
    """
    monkeypatch.setattr(protocol, "_PER_SECOND", 1)  # so that she has said too much however slow this machine is
    bob, *flood = machine.users(BOB, *[MALLORY] * protocol.MOST_CONNECTIONS)
    numbers = count(1)
    for _ in range(30):
        for mallory in flood:
            some = [each for n in (next(numbers) for _ in range(100)) for each in (Ask(n, LeaseRequest(1)), Drop(n))]
            while not is_full(mallory, *some):
                pass
        assert bob.is_answered()
    assert all(mallory.listen() and is_full(mallory, Drop(0)) for mallory in flood)
    flood[0].close()
    machine.turns(PASSES)
    again = machine.speaker(MALLORY)
    again.hello("again")
    assert bob.is_answered()
    assert not again.all(protocol.Welcome)


@several_users
def test_asks_of_one_user_are_bounded(machine: Driven) -> None:
    """More asks than a spool may have open cut it off, and no other spool."""
    bob, mallory, other = machine.users(BOB, MALLORY, MALLORY)
    lease, most = bob.takes(4), protocol.MOST_ASKS
    mallory.say(*[Ask(number, LeaseRequest(1)) for number in range(most)])
    late = other.asks(1)
    assert len(mallory.all(protocol.Wait)) == most
    bob.tells(EndLease(lease.lease))
    mallory.say(*[EndLease(each.lease) for each in mallory.all(protocol.Granted)], *map(Drop, range(most)))
    machine.until(lambda: other.grant(late) is not None)
    mallory.tells(*[Ask(number, LeaseRequest(9)) for number in range(most)])
    assert mallory.listen()
    mallory.tells(Ask(most, LeaseRequest(9)))
    assert not mallory.listen()
    assert other.listen()


@several_users
def test_leases_of_one_user_are_bounded(machine: Driven) -> None:
    """Of leases that take nothing, a user gets no more than some thousands, and others get theirs."""
    bob, mallory = machine.users(BOB, MALLORY)
    numbers, most = count(1), protocol.MOST_LEASES
    for _ in range(most // 200 + 1):
        mallory.tells(*[Ask(next(numbers), LeaseRequest(0)) for _ in range(200)])
        assert mallory.listen()
    assert len(mallory.all(protocol.Granted)) == most
    assert f"has {most} leases already" in mallory.all(protocol.Wait)[-1].reason
    assert bob.is_answered()
    bob.takes(4)
    mallory.tells(EndLease(mallory.all(protocol.Granted)[0].lease))
    assert len(mallory.all(protocol.Granted)) > most  # on a slow machine, leases that did not begin have run out too


@several_users
def test_a_flood_of_connections_keeps_nobody_out(machine: Driven) -> None:
    """Behind 200 connections of mallory, bob's new dispatcher joins within the passes that those take."""
    before = descriptors()
    with contextlib.ExitStack() as stack:
        flood = [
            stack.enter_context(contextlib.closing(Speaker(str(machine.directory / "socket"), MALLORY)))
            for _ in range(200)
        ]
        bob = machine.speaker(BOB)
        bob.hello()
        number, most = bob.ask(1), 200 // server._AT_ONCE + 1 + PASSES
        assert machine.turns(most, lambda: bob.grant(number) is not None) <= most
        served = [mallory for mallory in flood if mallory.listen()]
        assert len(served) == protocol.MOST_CONNECTIONS
        assert descriptors() <= before + len(flood) + len(served) + 2
        refused = {each.reason for mallory in flood for each in mallory.all(protocol.Refused)}
        assert refused == {f"{name_of(MALLORY)} has {protocol.MOST_CONNECTIONS} dispatchers here already"}
    machine.turns(PASSES)
    assert descriptors() <= before + 2


def test_coming_and_going_leaves_nothing(machine: Driven) -> None:
    """Hundreds of connections that say hello for new spools, ask and leave: no descriptor, ask or lease stays."""
    [alice] = machine.users(ALICE)
    before = descriptors()
    for number in range(300):
        with contextlib.closing(Speaker(str(machine.directory / "socket"), MALLORY)) as mallory:
            mallory.hello(f"spool{number}")
            mallory.ask(1)
            if number % 3:
                machine.arbiter.turn()
        if number % 10 == 0:
            assert alice.is_answered()
    machine.settle()
    machine.settle()
    assert descriptors() <= before + 1
    assert machine.held() == {}
    alice.takes(4)


def test_a_deaf_peer_is_cut_off(machine: Driven) -> None:
    """Who asks and does not listen is cut off once the answers find no room, and what it got and cannot use is free."""
    alice, mallory = machine.users(ALICE, MALLORY)
    mallory.takes(4)
    mallory.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)

    def is_cut_off() -> bool:
        try:
            return is_full(mallory, *[Use(1)] * 2000) and False
        except OSError:
            return True

    machine.until(is_cut_off)
    assert alice.is_answered()
    alice.takes(4)


def test_a_peer_that_closes_one_direction_is_cut_off(machine: Driven) -> None:
    """A peer that can hear nothing, or say nothing, is gone; what it says behind its hello is not heard."""
    alice, mute = machine.users(ALICE, MALLORY)
    deaf = machine.speaker(MALLORY)
    deaf.sock.shutdown(socket.SHUT_RD)
    deaf.say(protocol.Hello(protocol.VERSION, "deaf"), Ask(1, LeaseRequest(4)), Ask(2, LeaseRequest(9)))
    mute.ask(4)
    mute.sock.shutdown(socket.SHUT_WR)
    machine.settle()
    machine.settle()
    assert not mute.listen()
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        deaf.say(Drop(1))
    assert machine.held() == {}
    alice.takes(4)


def test_without_descriptors_those_who_are_there_are_served(
    machine: Driven, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arbiter that cannot accept a connection serves the others, does not spin, and accepts it later."""
    monkeypatch.setattr(server, "_LISTEN_AGAIN_S", 0.2)
    [alice] = machine.users(ALICE)
    machine.turns(1)
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
            assert all(alice.is_answered() for _ in range(3))
            machine.turns(5)
            passed = time.monotonic() - before
        assert 1 <= caplog.text.count("cannot accept") <= passed / 0.2 + 1
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    machine.until(lambda: bool(late.all(protocol.Welcome)))


def test_a_long_talk_keeps_the_journals_short(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changing what uses a lease, and taking and ending leases without end, does not fill the disk."""
    monkeypatch.setattr(ledger, "_COMPACT_AFTER", 100)
    with driven(place, MACHINE) as machine:
        [mallory] = machine.users(MALLORY)
        lease = mallory.takes()
        for number in range(20):
            mallory.tells(*[Use(lease.lease, 1 + n % 2, number) for n in range(200)])
        for _ in range(120):
            mallory.say(EndLease(mallory.takes().lease))
        machine.settle()
        machine.turns(PASSES)
        assert len((place / "leases.jsonl").read_bytes().splitlines()) < 600
        machine.restart()
        assert len((place / "usage.jsonl").read_bytes().splitlines()) == 1
        assert machine.held() == {name_of(MALLORY): 1}


# Taking all and giving nothing back; using what was not granted.


@several_users
def test_a_hog_has_no_more_than_its_quota(place: Path) -> None:
    """Mallory asks for all and ends nothing: she has her quota, alice starts beside her, and both files name her."""
    with driven(place, f"{MACHINE}[quotas.default_user]\nmax_running_cpus = 3\n") as machine:
        for mallory in machine.users(*[MALLORY] * 4):
            for _ in range(5):
                mallory.ask(1)
        alice = machine.dispatcher("alice", ALICE)
        alice.takes(1)
        assert machine.held() == {name_of(MALLORY): 3, name_of(ALICE): 1}
        assert f"(3 leases of {name_of(MALLORY)} hold 3" in alice.why(alice.asks(2))


def test_memory_that_is_used_outside_is_not_granted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What mallory uses without a lease is not free: the memory that is really available decides."""
    monkeypatch.setattr(Host, "memory", lambda self: HostMemory(4 << 30, 1 << 30))
    with driven(place, f"{USERS}cpus = 4\n") as machine:
        [alice] = machine.users(ALICE)
        assert "memory" in alice.why(alice.asks(1, memory_bytes=2 << 30))
        alice.takes(1, memory_bytes=1 << 29)


@with_setpriv
@pytest.mark.usefixtures("at_once")
def test_who_sits_on_a_gpu_is_named_and_counted(place: Path, nvml: FakeNvml) -> None:
    """Mallory ends her lease and computes on: all can see it, and the GPU counts for her quota and her fair share."""
    clock, quota = Clock(time.time_ns()), "[quotas.default_user]\nmax_running_gpus = 1\n"
    with process_of(MALLORY) as (pid, _), driven(place, f"{MACHINE}{quota}", clock=clock) as machine:
        [mallory] = machine.users(MALLORY)
        lease = mallory.uses(1, gpus=1)
        assert lease.units.gpu_uuids == ("GPU-a",)
        nvml.process("GPU-a", pid, GIB)
        clock.now_ns += 6 * SECOND_NS
        mallory.say(EndLease(lease.lease))
        machine.until(lambda: any(gpu.without_lease for gpu in machine.status().gpus))
        assert [gpu.without_lease for gpu in machine.status().gpus] == [(name_of(MALLORY),), ()]
        assert [(share.user, share.gpus) for share in machine.status().users] == [(name_of(MALLORY), 1)]
        alice, bob = machine.dispatcher("alice", ALICE), machine.dispatcher("bob", BOB)
        more = mallory.ask(1, gpus=1)
        assert alice.takes(1, gpus=1).units.gpu_uuids == ("GPU-b",)
        machine.until(lambda: "GPUs" in mallory.why(more))
        late = bob.ask(1, gpus=1)
        machine.until(lambda: str(pid) in bob.why(late) and name_of(MALLORY) in bob.why(late))
        assert "without a lease" in bob.why(late)
        clock.now_ns += 10 * HOUR_NS
        machine.settle()
        nvml.leave(pid)
        clock.now_ns += 6 * SECOND_NS
        machine.until(lambda: bob.grant(late) is not None)
        machine.until(lambda: not any(gpu.without_lease for gpu in machine.status().gpus))
        machine.restart()
        lines = map(ledger.parse_line, (place / "usage.jsonl").read_bytes().splitlines())
        assert {line.user: line.used for line in lines}[name_of(MALLORY)] == pytest.approx(36_000, rel=0.05)


@with_setpriv
@pytest.mark.usefixtures("at_once")
def test_a_reason_is_renewed_when_a_gpu_changes(place: Path, nvml: FakeNvml) -> None:
    """Whoever waits for a GPU hears who uses it now, though no lease and no ask has changed."""
    clock = Clock(time.time_ns())
    with process_of(STRANGER) as (first, _), process_of(STRANGER) as (second, _):
        nvml.process("GPU-a", first, GIB)
        with driven(place, MACHINE, clock=clock) as machine:
            [alice] = machine.users(ALICE)
            number = alice.ask(1, gpus=2)
            machine.until(lambda: f"pid {first}" in alice.why(number))
            machine.turns(3)
            nvml.leave(first)
            nvml.process("GPU-a", second, GIB)
            clock.now_ns += 6 * SECOND_NS
            machine.until(lambda: f"pid {second}" in alice.why(number))
            assert name_of(STRANGER) in alice.why(number)


# Lies, and what others would like to have forgotten.


@several_users
def test_a_limit_that_is_a_lie_counts_once(place: Path) -> None:
    """After one lease that outlives its limit by hours, mallory's limits no longer put her ahead of alice."""
    clock = Clock(time.time_ns())
    with driven(place, f"{USERS}cpus = 1\nfair_share = false\n", clock=clock) as machine:
        alice, mallory = machine.users(ALICE, MALLORY)
        lie = mallory.uses(1, limit_ns=60 * SECOND_NS)
        long = alice.asks(1, limit_ns=HOUR_NS)
        clock.now_ns += 5 * HOUR_NS
        machine.settle()
        mallory.say(EndLease(lie.lease))
        short = mallory.asks(1, limit_ns=60 * SECOND_NS)
        assert mallory.grant(short) is None
        alice.say(EndLease(alice.grant(long).lease))
        mallory.tells(Drop(short))
        clock.now_ns += HOUR_NS
        machine.restart()  # nor do they after a restart of the arbiter
        bob, alice, mallory = machine.users(BOB, ALICE, MALLORY)
        taken, long = bob.takes(1), alice.ask(1, limit_ns=HOUR_NS // 2)
        short = mallory.asks(1, limit_ns=60 * SECOND_NS)
        clock.now_ns += 600 * SECOND_NS
        bob.tells(EndLease(taken.lease))
        assert (alice.grant(long) is not None, mallory.grant(short)) == (True, None)


@several_users
def test_nobody_can_erase_the_past_of_another(place: Path) -> None:
    """However many leases mallory takes and ends, what is kept of bob is as before, and after a restart it counts."""
    clock = Clock(time.time_ns())
    with driven(place, f"{USERS}cpus = 4\n", clock=clock) as machine:
        bob, mallory = machine.users(BOB, MALLORY)
        lease = bob.uses(4)
        clock.now_ns += 10 * HOUR_NS
        bob.say(EndLease(lease.lease))
        numbers = count(1)
        for _ in range(5):
            mallory.tells(*[Ask(next(numbers), LeaseRequest(0)) for _ in range(200)])
            mallory.tells(*[EndLease(each.lease) for each in mallory.all(protocol.Granted)])
            mallory.heard.clear()
        machine.restart()
        text = (place / "usage.jsonl").read_text()
        assert len(text.splitlines()) <= 2
        assert f'"{name_of(BOB)}"' in text
        alice, bob, mallory = machine.users(ALICE, BOB, MALLORY)
        assert goes_first(machine, clock, alice, bob, mallory) == [False, True]


# What others can read.


@several_users
def test_a_users_text_reaches_nobody(machine: Driven, caplog: pytest.LogCaptureFixture) -> None:
    """Resource names, GPU types, spools and nonsense of mallory's are in no file for all, and in no other's reason."""
    alice, mallory = machine.dispatcher("alice", ALICE), machine.dispatcher("evilword", MALLORY)
    mallory.takes(1, like="deadbeef")
    for more in (
        {"cpus": 1, "resources": (("evilword", 0),)},
        {"cpus": 1, "resources": (("evilword <b>", 1), ("licence", 1))},
        {"cpus": 1, "gpus": 1, "gpu_type": "evilword"},
        {"cpus": 3, "like": "deadbeef"},
    ):
        mallory.ask(**more)
    number = alice.ask(4)
    with caplog.at_level(logging.DEBUG):
        for nonsense in ("\u202eevil\u009b31m\u001b[2J", "x" * 50_000):
            machine.speaker(MALLORY).say_bytes(json.dumps([[nonsense]], ensure_ascii=False).encode())
        machine.held()
        machine.settle()
    shown = (machine.directory / "machine.json").read_text() + alice.why(number)
    assert name_of(MALLORY) in shown
    assert not re.search(r"evilword|deadbeef|lease\d", shown)
    assert caplog.text == ""  # a flood of it fills no journal


@several_users
def test_only_machine_json_is_for_all(machine: Driven) -> None:
    """Others can read machine.json and speak to the socket; who holds which lease, and since when, is not theirs."""
    machine.dispatcher("alice", ALICE).takes()
    machine.held()
    modes = {path.name: path.lstat().st_mode & 0o777 for path in machine.directory.iterdir()}
    journals = {"leases.jsonl": 0o600, "usage.jsonl": 0o640, ".lock": 0o600}
    assert modes == {"socket": 0o666, "machine.json": 0o644, **journals}
    told = json.loads((machine.directory / "machine.json").read_text())
    assert told["users"] == [{"user": name_of(ALICE), "leases": 1, "cpus": 1}]


# Accounts that change.


class Accounts:
    """The accounts of a machine, which a test changes; each is looked up anew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names = {ALICE: "alice", BOB: "bob", MALLORY: "mallory"}
        self.members = ["alice", "bob", "mallory"]
        monkeypatch.setattr(protocol, "_KNOWN_FOR_S", 0.0)
        monkeypatch.setattr(pwd, "getpwuid", self._entry)
        monkeypatch.setattr(grp, "getgrnam", lambda name: grp.struct_group((name, "x", 4000, self.members)))

    def _entry(self, uid: int) -> pwd.struct_passwd:
        return pwd.struct_passwd((self.names[uid], "x", uid, uid, "", "/", "/bin/sh"))


@with_setpriv
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("how", ["leaves the group", "is deleted"])
def test_who_is_no_longer_served_gets_nothing_more(place: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A user who leaves the group, or is deleted, hears a refusal and gets no lease; what runs keeps its lease."""
    accounts = Accounts(monkeypatch)
    with driven(place, 'users = [0, "@lab"]\ncpus = 4\n') as machine, process_of(MALLORY) as (pid, ticks):
        mallory, bob = machine.dispatcher("spool", MALLORY), machine.dispatcher("bob", BOB)
        lease = mallory.takes(2)
        mallory.say(Use(lease.lease, pid, ticks))
        taken, waiting = bob.takes(2), mallory.asks(1)
        accounts.members.remove("mallory")
        if how == "is deleted":
            del accounts.names[MALLORY]
        machine.until(lambda: not mallory.listen())
        assert mallory.all(protocol.Refused)
        bob.say(EndLease(taken.lease))
        machine.turns(10)
        assert mallory.grant(waiting) is None
        assert bob.waits(3, 20)
        os.kill(pid, signal.SIGSTOP)  # stopped is not gone
        assert bob.waits(3, 20)
        os.kill(pid, signal.SIGCONT)
        again = machine.speaker(MALLORY)
        again.hello("spool", Use(lease.lease))
        machine.until(lambda: not again.listen())
        assert [type(each) for each in again.heard] == [protocol.Refused]


@with_setpriv
@pytest.mark.usefixtures("at_once")
def test_the_next_owner_of_a_uid_begins_anew(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leases of a uid that is given to another end by proof, not by the new owner, whose score is new."""
    clock, accounts = Clock(time.time_ns()), Accounts(monkeypatch)
    with driven(place, 'users = [0, "@lab"]\ncpus = 4\n', clock=clock) as machine:
        with process_of(MALLORY) as process:
            mallory, bob = machine.dispatcher("spool", MALLORY), machine.dispatcher("bob", BOB)
            lease = mallory.takes(4)
            mallory.tells(Use(lease.lease, *process))
            clock.now_ns += 100 * HOUR_NS
            accounts.names[MALLORY] = "norbert"
            accounts.members.append("norbert")
            machine.until(lambda: not mallory.listen())
            norbert = machine.dispatcher("spool", MALLORY)  # whose hello names no lease
            norbert.say(EndLease(lease.lease))
            assert bob.waits(1, 20)
            assert machine.held() == {"mallory": 4}
        bob.say(EndLease(bob.takes(4).lease))
        machine.restart()
        norbert, bob, alice = machine.users(MALLORY, BOB, ALICE)
        assert goes_first(machine, clock, alice, norbert, bob) == [True, False]
