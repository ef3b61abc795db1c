"""The arbiter grants what fits and no more, whoever says what, and knows its leases again after a kill."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from extras.machine.talk import Driven, driven
from spool.formats import arbiter_protocol as protocol
from spool.formats import machine_status

ME = os.getuid()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Driven]:
    """Give an arbiter of two CPUs and 4 GiB that serves this user."""
    with driven(tmp_path / "run", f'users = [{ME}]\ncpus = 2\nmemory = "4G"\n[resources]\nlicence = 1\n') as found:
        yield found


def test_welcome_says_what_the_machine_has(machine: Driven) -> None:
    """The first answer has the totals by which a dispatcher plans."""
    [welcome] = machine.dispatcher().all(protocol.Welcome)
    assert (welcome.cpus, welcome.memory_bytes, welcome.pools) == (2, 4 << 30, (("licence", 1, ()),))


def test_what_fits_is_granted_and_the_rest_waits_with_a_reason(machine: Driven) -> None:
    """Two spools share two CPUs; the third ask is told who holds them, and is granted when one is over."""
    alice, bob = machine.dispatcher("a"), machine.dispatcher("b")
    first, second = alice.ask(1), bob.ask(1)
    machine.settle()
    third = bob.ask(1)
    machine.settle()
    granted = alice.grant(first)
    assert granted is not None
    assert bob.grant(second) is not None
    assert bob.grant(third) is None
    assert "cpus: needs 1, 0 free (2 leases of" in bob.why(third)
    alice.say(protocol.EndLease(granted.lease))
    machine.settle()
    assert bob.grant(third) is not None


def test_leases_survive_the_arbiter(machine: Driven) -> None:
    """A new arbiter grants nothing that an earlier one has granted, before or after the dispatcher is back."""
    alice = machine.dispatcher("a")
    number = alice.ask(2)
    machine.settle()
    lease = alice.grant(number)
    assert lease is not None
    machine.restart()
    bob = machine.dispatcher("b")
    wanted = bob.ask(1)
    machine.settle()
    assert bob.grant(wanted) is None
    again = machine.speaker()
    again.hello("a", protocol.Hold(lease.lease, os.getpid(), 1), protocol.Hold(7))
    machine.settle()
    [welcome] = again.all(protocol.Welcome)
    assert welcome.unknown == (7,)
    assert bob.grant(wanted) is None
    again.say(protocol.EndLease(lease.lease))
    machine.settle()
    assert bob.grant(wanted) is not None


def test_a_hello_without_a_lease_ends_it(machine: Driven) -> None:
    """What a dispatcher does not name any more is over."""
    alice = machine.dispatcher("a")
    number = alice.ask(2)
    machine.settle()
    assert alice.grant(number) is not None
    machine.dispatcher("a")
    bob = machine.dispatcher("b")
    wanted = bob.ask(2)
    machine.settle()
    assert bob.grant(wanted) is not None


def test_machine_json_says_who_has_what(machine: Driven) -> None:
    """Everyone can read who has how much, and no name of a job."""
    alice = machine.dispatcher("a")
    number = alice.ask(1, memory_bytes=1 << 30, resources=(("licence", 1),))
    machine.until(lambda: alice.grant(number) is not None)
    path = machine.directory / "machine.json"

    def shown() -> bool:
        status = machine_status.parse(path.read_bytes())
        return status is not None and [(each.leases, each.cpus, each.memory_bytes) for each in status.users] == [
            (1, 1, 1 << 30)
        ]

    machine.until(shown)
    assert path.stat().st_mode & 0o777 == 0o644
