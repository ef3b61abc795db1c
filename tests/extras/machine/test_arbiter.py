"""What an arbiter keeps over kills, clocks, full disks and crossing messages; and what it touches, with what rights."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import json

from extras.machine.talk import (
    ALICE,
    BOB,
    HOUR_NS,
    MACHINE,
    MALLORY,
    SECOND_NS,
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
from spool.core.errors import LockHeld, SpoolUnusable
from spool.core.model import Request
from spool.extras.machine import arbiter as server
from spool.extras.machine import ledger, protocol
from spool.extras.machine.protocol import REPLIES, Drop, EndLease, LeaseRequest, NotAMessage, Use, read
from spool.machine import identity
from support import PATIENCE_S, ROOT, as_user, wait_for

pytestmark = pytest.mark.usefixtures("brisk")


def test_a_hello_hears_the_totals_and_ends_what_it_does_not_name(machine: Driven) -> None:
    """The welcome has the totals by which a dispatcher plans; a lease that a dispatcher no longer names is over."""
    machine.dispatcher("a").takes(4)
    [welcome] = machine.dispatcher("a").all(protocol.Welcome)
    assert (welcome.cpus, welcome.memory_bytes, welcome.pools) == (4, 4 << 30, (("licence", 2, ()),))
    machine.dispatcher("b").takes(4)


# Leases that are not used, and clocks.


def test_an_unused_lease_lapses(place: Path) -> None:
    """A suspended dispatcher's lease lapses after 30s and 5 more, and nothing is changed by what it says then.

    One whose use has begun does not, whatever time passes.
    """
    boot = Clock(HOUR_NS)
    with driven(place, MACHINE, boot_clock=boot) as machine:
        alice, mallory, begun = machine.users(ALICE, MALLORY, ALICE)
        begun.uses(1)
        lease = mallory.takes(3)
        assert lease.begin_before_ns <= boot.now_ns + 30 * SECOND_NS
        wanted = alice.ask(3)
        boot.now_ns += 34 * SECOND_NS
        time.sleep(server._LOOK_EVERY_S)
        machine.settle()
        assert alice.grant(wanted) is None
        boot.now_ns += 2 * SECOND_NS
        machine.until(lambda: alice.grant(wanted) is not None)
        mallory.tells(Use(lease.lease), Use(lease.lease, os.getpid(), 1))
        assert machine.held() == {name_of(ALICE): 4}
        boot.now_ns += HOUR_NS
        machine.until(lambda: machine.held() == {name_of(ALICE): 1})
        assert mallory.waits(4, 30)


def test_a_grant_can_be_read_after_a_year_of_uptime(place: Path) -> None:
    """The clock since boot has more than the 53 bits of other numbers, and so may a time limit."""
    clock = Clock(400 * 24 * HOUR_NS)
    with driven(place, MACHINE, boot_clock=clock) as machine:
        lease = machine.dispatcher(uid=ALICE).takes(limit_ns=300 * 24 * HOUR_NS)
        assert lease.begin_before_ns > clock.now_ns


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("step_ns", [-24 * HOUR_NS, -HOUR_NS, HOUR_NS, 10_000 * 24 * HOUR_NS])
@pytest.mark.parametrize("restart", [False, True], ids=["", "restart"])
def test_a_clock_that_is_set_ends_no_lease(place: Path, step_ns: int, restart: bool) -> None:
    """The wall clock goes back or forward: a lease stays, begun or not, with and without its dispatcher."""
    clock = Clock(time.time_ns())
    with driven(place, MACHINE, clock=clock) as machine, process_of(ALICE):  # one that may be the wrapper
        mallory, unused, away = machine.users(MALLORY, ALICE, ALICE)
        unused.takes(2)
        away.uses(2)
        clock.now_ns += step_ns
        if restart:
            machine.restart()
            mallory = machine.dispatcher("spool", MALLORY)
        else:
            away.close()
        assert mallory.waits(1, 30)


# The journals.


@pytest.mark.parametrize("damage", ["cut", "garbage", "zeros", "binary", "nothing", "another file", "of another boot"])
def test_a_damaged_journal_stops_nothing(machine: Driven, damage: str) -> None:
    """Lines that are cut or garbage are skipped, whole ones count; a journal of another boot, or none, has no lease."""
    [alice] = machine.users(ALICE)
    for _ in range(3):
        alice.uses()
    path = machine.directory / "leases.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    text, left = {
        "cut": (b"".join(lines)[:-40], 2),
        "garbage": (b"".join([*lines[:2], b'["grant",1,"no"]\n{{{{\n["end"]\n', *lines[2:]]), 3),
        "zeros": (b"".join([*lines, bytes(5000)]), 3),
        "binary": (b"".join([*lines, bytes(range(256)) * 20]), 3),
        "nothing": (b"", 0),
        "another file": (b"x" * 100, 0),
        "of another boot": (b"".join(lines).replace(identity.boot_id().encode(), b"0" * 36), 0),
    }[damage]
    path.write_bytes(text)
    machine.restart()
    assert machine.held() == ({name_of(ALICE): left} if left else {})
    bob = machine.dispatcher("bob", BOB)
    bob.takes(4 - left)
    assert not left or bob.waits(4 - left + 1)


def test_what_cannot_be_recorded_is_not_granted(machine: Driven) -> None:
    """With a full disk nothing is granted, the reason says so, ends still count, and it goes on once there is room."""
    [alice] = machine.users(ALICE)
    alice.uses(3)
    file = machine.directory / "leases.jsonl"
    before = file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        number = alice.ask(1)
        machine.turns(6)
        found = len(alice.all(protocol.Granted)), "cannot record leases" in alice.why(number), file.read_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found == (1, True, before)
    machine.until(lambda: alice.grant(number) is not None)
    machine.restart()
    assert machine.held() == {name_of(ALICE): 4}


def test_a_number_is_not_used_again(place: Path) -> None:
    """After a restart at an earlier time of the wall clock, no lease has the number of an older one."""
    clock = Clock(begin_ns := time.time_ns())
    with driven(place, MACHINE, clock=clock) as machine:
        numbers = []
        for _ in range(4):
            [alice] = machine.users(ALICE)
            for _ in range(3):
                numbers.append(alice.takes().lease)
                alice.tells(EndLease(numbers[-1]))
            clock.now_ns = begin_ns
            machine.restart()
        assert len(set(numbers)) == 12


@several_users
@pytest.mark.parametrize("ended", [False, True], ids=["in use", "over"])
def test_a_restart_counts_no_use_twice(place: Path, ended: bool) -> None:
    """What a lease has used counts once, whether the arbiter was restarted while it was held or after its end."""
    clock = Clock(time.time_ns())

    def kept() -> float:
        [line] = (place / "usage.jsonl").read_bytes().splitlines()
        return ledger.parse_line(line).used

    with driven(place, f"{USERS}cpus = 4\n", clock=clock) as machine:
        [bob] = machine.users(BOB)
        lease = bob.uses(4)
        clock.now_ns += HOUR_NS
        if ended:
            bob.tells(EndLease(lease.lease))
        machine.restart()
        assert kept() == pytest.approx(4 * 180, rel=0.01)
        clock.now_ns += HOUR_NS
        machine.restart()
        assert kept() == pytest.approx(4 * 180 * (1 if ended else 2), rel=0.01)


# The directory.


def test_what_lies_in_the_way_is_said_or_replaced(place: Path) -> None:
    """A directory in the place of the socket is an error that names it; a link in the place of a file is replaced.

    A second arbiter for the same directory does not begin, and the first one goes on.
    """
    place.mkdir()
    target = place.parent / "target"
    target.write_text("kept")
    for name in ("machine.json", "leases.jsonl", "usage.jsonl"):
        (place / name).symlink_to(target)
    with driven(place, MACHINE) as machine:
        with pytest.raises(LockHeld, match="another arbiter"):
            Driven(place, MACHINE)
        machine.dispatcher("alice", ALICE).takes()
        machine.held()
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


# Messages that cross.


def test_a_lease_for_a_withdrawn_ask_is_over(machine: Driven) -> None:
    """Drop and grant cross: the lease, which no run uses, is free again at once, and another ask gets it.

    One that is in use stays.
    """
    alice, mallory = machine.users(ALICE, MALLORY)
    number, wanted = mallory.asks(4), alice.asks(4)
    mallory.tells(Drop(number))
    lease, crossed = alice.grant(wanted), mallory.grant(number)
    assert lease is not None
    mallory.tells(Use(crossed.lease), EndLease(crossed.lease), Drop(number))
    alice.tells(Use(lease.lease), Drop(wanted))
    assert mallory.waits(1)
    assert machine.held() == {name_of(ALICE): 4}


def test_an_ask_does_not_outlive_its_connection(machine: Driven) -> None:
    """What was asked for before a reconnect is answered on no later connection, and keeps nothing."""
    alice, bob = machine.users(ALICE, BOB)
    lease, number = bob.takes(4), alice.asks(4)
    alice.close()
    again = machine.dispatcher("spool-0", ALICE)
    bob.tells(EndLease(lease.lease))
    assert again.grant(number) is None
    assert again.all(protocol.Wait) == []
    bob.takes(4)


def test_what_can_begin_no_more_ends_with_the_connection(machine: Driven) -> None:
    """A dispatcher that is gone keeps the leases that it has begun, also by its last word, and no other."""
    alice, bob = machine.users(ALICE, BOB)
    first, last, _ = alice.takes(1), alice.takes(1), alice.takes(2)
    alice.say(Use(first.lease))
    alice.asks(9)  # its answer stays unread, so that the kernel says "reset" before it gives the last words
    alice.say(Use(last.lease), Drop(77))
    alice.sock.close()
    machine.settle()
    assert machine.held() == {name_of(ALICE): 2}
    bob.takes(2)


# What reads its datagrams.


def test_a_lease_is_for_the_kinds_of_gpus_that_the_job_names() -> None:
    """Several types and the least memory reach the arbiter; the lines of its older journals have neither."""
    asked = LeaseRequest(1, gpus=1, gpu_type="A100", gpu_min_memory_bytes=40 << 30, other_gpu_types=("H100",))
    assert json.decode(json.encode(asked), type=LeaseRequest) == asked
    assert asked.request() == Request(1, gpus=1, gpu_types=("A100", "H100"), gpu_min_memory_bytes=40 << 30)
    older = json.decode(b'[2,1024,1,0,"A100",[],0,""]', type=LeaseRequest)
    assert older.request() == Request(2, 1024, 1, gpu_types=("A100",))


@pytest.mark.parametrize(
    "said",
    [
        b'[["hello",2,"\xff\xfe"]]',
        b"\xff",
        b"[" * 60_000,
        b"",
        b'[["end",1e400]]',
        [["grant", 1, 1, 1, [["GPU-" + "0" * 200]]]],
        [["grant", 1, 1, 1, [["GPU-0,GPU-1"], [0]]]],
        [["grant", 1, 1, 1, [[f"GPU-{n}" for n in range(1000)]]]],
        [["grant", 1, 1, 1, [[], list(range(5000))]]],
        [["grant", 1, 1, 1, [[], [], [[f"r{n}", [1]] for n in range(100)]]]],
        [["welcome", 1, 1, [[f"r{n}", 1, []] for n in range(5000)]]],
        [["welcome", 1, 1, [["licence", 3, [1, 2]]]]],
        [["wait", 1, ""]] * 1000,
    ],
)
def test_no_answer_is_larger_than_a_machine(said: object) -> None:
    """What an arbiter says is bounded in each of its parts, and its totals agree with its indices; bytes are text."""
    with pytest.raises(NotAMessage):
        read(REPLIES, said if isinstance(said, bytes) else json.encode(said))


# What the arbiter touches, and with what rights.

SYSTEMS_OWN = re.compile(r"/$|/(proc|sys|etc|usr|lib|lib64|dev|run|var)$|/(proc|sys|etc|usr|lib|lib64)/|/dev/null$")
NSS = re.compile(r"/(run|var/run|var/lib)/(systemd|userdb|host|nscd|sss)(/|$)|/run/userdb")
CALL = re.compile(r'\d+ +(\w+)\((?:(?:\d+|AT_FDCWD)<([^>]*)>,? ?)?(?:\{sa_family=AF_UNIX, sun_path=)?(?:"([^"]*)")?')


@contextlib.contextmanager
def serving(place: Path, before: list[str], owner: int = 0, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run an arbiter as a process of its own in a directory of *owner*; *before* runs it."""
    place.mkdir()
    (place / "machine.toml").write_text(MACHINE)
    os.chown(place, owner or -1, -1)
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "spool", "machine", "serve", str(place)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1", **environment},
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


def converse(place: Path) -> None:
    """Take, use and end a lease, and leave another one to an arbiter that runs by itself."""

    def hear(speaker: Speaker, kind: type[protocol.PeerMessage]) -> protocol.PeerMessage:
        return wait_for(lambda: speaker.all(kind), what=str(kind))[-1]

    with contextlib.ExitStack() as stack:
        first, rude, second = (
            stack.enter_context(contextlib.closing(Speaker(str(place / "socket"), uid)))
            for uid in (ALICE, MALLORY, ALICE)
        )
        first.hello()
        rude.say_bytes(b"nonsense")
        first.ask(1)
        lease = hear(first, protocol.Granted)
        first.say(Use(lease.lease), Use(lease.lease, os.getpid(), identity.start_ticks(os.getpid()) or 0))
        first.ask(99)
        hear(first, protocol.Wait)
        first.close()
        second.hello("spool", Use(lease.lease))
        hear(second, protocol.Welcome)
        second.say(EndLease(lease.lease))
        second.ask(4)
        hear(second, protocol.Granted)


@pytest.mark.skipif(shutil.which("strace") is None, reason="takes strace")
def test_the_arbiter_opens_nothing_of_a_user(place: Path) -> None:
    """While it serves, it opens its own files, /proc and the account database, executes nothing and signals nobody."""
    trace = place.parent / "trace"
    calls = "trace=%file,%process,kill,tkill,tgkill,connect,listen"
    with serving(place, ["strace", "-f", "-qq", "-y", "-o", str(trace), "-e", calls]) as process:
        converse(place)
        found = protocol.parse_status((place / "machine.json").read_bytes())
        os.kill(found.pid, signal.SIGTERM)
        process.wait(PATIENCE_S)
    lines = trace.read_text().splitlines()
    [begin] = [number for number, line in enumerate(lines) if " listen(" in line]
    wrong = []
    for line in lines[begin + 1 :]:
        call = CALL.match(line)
        if call is None or call[1] == "exit_group":
            continue
        path = os.path.normpath(os.path.join(call[2] or "/", call[3])) if call[3] is not None else None
        if path is None or not (Path(path).is_relative_to(place) or SYSTEMS_OWN.match(path) or NSS.match(path)):
            wrong.append(line)
    assert wrong == []


@with_setpriv
def test_the_arbiter_needs_no_capability_and_no_home(place: Path) -> None:
    """Under a uid of its own, without capabilities, new privileges or a home, it serves users."""
    account = as_user(12350)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    tried = [*account, sys.executable, "-c", "import spool"]
    if subprocess.run(tried, env=environment, capture_output=True, check=False, cwd="/").returncode:
        pytest.skip("another user cannot run this Python")
    bare = ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    with serving(place, [*account, *bare], 12350, HOME="/nonexistent") as process:
        told = Path(f"/proc/{process.pid}/status").read_text()
        assert {line.split()[1] for line in told.splitlines() if line.startswith("Cap")} == {"0" * 16}
        converse(place)
        assert process.poll() is None
    assert {path.stat().st_uid for path in place.iterdir() if path.name != "machine.toml"} == {12350}
