"""The arbiter grants what fits and no more, whoever says what, and knows its leases again after a kill."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from extras.machine.talk import Driven, driven
from spool.extras.machine import protocol

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
    assert bob.grant(second) is not None
    assert bob.grant(third) is None
    assert "cpus: needs 1, 0 free (2 leases of" in bob.why(third)
    alice.say(protocol.EndLease(granted.lease))
    machine.settle()
    assert bob.grant(third) is not None


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
