"""What of the machine a decision is made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spool.core.model import Machine, Request, Spec, Waiting
from spool.dispatcher.settings import Settings
from spool.dispatcher.table import Table
from spool.dispatcher.world import World
from spool.store.spool import Spool
from support import make_spool

GIB = 1 << 30
MACHINE = Machine(4, 8 * GIB, 3 * GIB, disk_free_bytes=50 * GIB)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Give the world of an empty spool, whose disk is short below 1 GiB."""
    spool = Spool(str(make_spool(tmp_path / "spool")))
    return World(spool, Table(), Settings(spool))


def test_numbers_that_nobody_asks_about_make_no_other_decision(world: World) -> None:
    """With no job that asks for memory and room on the disk, it is the same machine whatever is free."""
    other = replace(MACHINE, memory_available_bytes=GIB, disk_free_bytes=40 * GIB)
    assert world.what_counts(MACHINE) == world.what_counts(other)


def test_free_memory_counts_where_a_job_waits_for_some(world: World) -> None:
    """A job that asks for memory may start as soon as there is more."""
    spec = Spec(command="true", request=Request(memory_bytes=4 * GIB))
    world._table.queue.put(Waiting("a", spec, "alice", 0))
    other = replace(MACHINE, memory_available_bytes=5 * GIB)
    assert world.what_counts(MACHINE) != world.what_counts(other)


def test_the_disk_counts_where_it_is_short(world: World) -> None:
    """Below the floor, and on the way out of it, another number is another machine."""
    short, shorter = replace(MACHINE, disk_free_bytes=GIB // 2), replace(MACHINE, disk_free_bytes=GIB // 4)
    assert world.what_counts(short) != world.what_counts(shorter)
    assert world.what_counts(short) != world.what_counts(MACHINE)
