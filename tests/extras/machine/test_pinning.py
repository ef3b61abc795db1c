"""A machine with `cpu_pinning`: the arbiter hands out the CPUs, so that no two spools have one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from extras.machine.talk import Driven, driven
from extras.machine.test_attacks import BOB, MACHINE, brisk, granted, place, several_users  # noqa: F401
from spool.core.model import Core
from spool.core.pinning import cpus_in
from spool.extras.machine import protocol
from spool.extras.machine.protocol import EndLease, Units, Use
from spool.machine.host import Host

PINNING = f"cpu_pinning = true\n{MACHINE}"
CORES = (Core((0, 2), 0), Core((1, 3), 1), Core((4, 5), 1))


@pytest.fixture
def machine(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:  # noqa: F811
    """Give an arbiter that may give four of six CPUs, to be used by one run each."""
    monkeypatch.setattr(Host, "cores", lambda self: CORES)
    with driven(place, PINNING) as found:
        yield found


def cpus(lease: protocol.Granted) -> tuple[int, ...]:
    """Return the CPUs of a lease."""
    return cpus_in(lease.units.cpu_list)


@pytest.mark.parametrize("uid", [None, pytest.param(BOB, marks=several_users)])
def test_no_two_spools_have_a_cpu_also_after_a_restart(machine: Driven, uid: int | None) -> None:
    """Two spools of one user, or of two; a new arbiter knows from its journal which CPUs are out."""
    one, two = machine.dispatcher("a"), machine.dispatcher("b", uid)
    first, second = granted(machine, one, 2), granted(machine, two, 1)
    assert cpus(first) == (0, 2)
    assert len(cpus(second)) == 1
    assert not set(cpus(first)) & set(cpus(second))
    one.say(Use(first.lease))
    two.say(Use(second.lease))
    machine.until(lambda: all(each.begun for each in machine.arbiter._ledger.leases.values()))
    machine.restart()
    back = machine.speaker()
    back.hello("a", Use(first.lease))
    machine.until(lambda: bool(back.all(protocol.Welcome)))
    third = granted(machine, back, 1)
    assert not set(cpus(third)) & {*cpus(first), *cpus(second)}
    back.say(EndLease(first.lease))
    assert cpus(granted(machine, back, 2)) == (0, 2)


def test_the_machine_has_no_more_cpus_than_can_be_given_to_one_run_each(
    machine: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cpus` above those counts as those."""
    monkeypatch.setattr(Host, "cores", lambda self: CORES[:1])
    machine.restart()
    speaker = machine.dispatcher("a")
    [welcome] = speaker.all(protocol.Welcome)
    assert welcome.cpus == 2


def test_without_pinned_cpus_a_grant_names_none(machine: Driven, tmp_path: Path) -> None:
    """Without the key no CPUs are named; with it, not for `cpus = 0`."""
    assert granted(machine, machine.dispatcher("a"), 0).units == Units()
    with driven(tmp_path / "other", MACHINE) as other:
        assert granted(other, other.dispatcher("a"), 2).units == Units()
