"""The configuration of a machine that users share."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from typing import get_args

import msgspec
import pytest
from msgspec.structs import replace

from cli.test_fuzz import MANY, SEED, variant
from docs.test_format_page import clause
from spool.core.errors import SpoolError
from spool.core.model import Limits, Policy, Pool, Reservation
from spool.extras import machine
from spool.extras.machine import MachineConfig, ledger
from spool.extras.machine.protocol import MachineShares
from spool.formats import config, reservation
from spool.formats.capabilities import Key, KeyTable
from spool.formats.config import Reserve
from spool.query.shared import GpuShare, UserShare
from support import ROOT

S = 1_000_000_000
GIB = 1 << 30
NOON_NS = 1_769_853_600 * S  # 2026-01-31T10:00:00Z

EVERYTHING = """
users = ["alice", "bob@lab.example", "@lab", 1005, "1006", 0]
cpus = 60
memory = "100G"
memory_reserve = "8G"
fair_share = false
resources = { licence = 3, tpu = { indices = [0, 1] } }

[gpu]
use = [0, 2]

[quotas.default_user]
max_running_gpus = 2
max_running_jobs = 20

[quotas.users.alice]
max_running_gpus = "unlimited"
max_running_cpus = 8

[[reservations]]
name = "course"
user = "bob"
gpus = [1, 0]
start = 2026-01-31T11:00:00+01:00
duration = "2h"
comment = "the Friday course"

[[reservations]]
name = "open"
user = "nobody"
gpus = 1
start = "2026-01-31T10:00:00Z"
end = 2026-01-31T12:00:00Z
"""

LEASE = b'["grant",1,1000,"ann","spool",[1,2,0,0,"",[["licence",1]]],["GPU-1"],[0],[["licence",[7]]],1,2,3]'
SHARED = {
    machine.MACHINE: config.CONFIG,
    machine.MACHINE.keys[-2].table: config.CONFIG.keys[-1].table,
    machine.MACHINE.keys[-1].table: reservation.RESERVATION,
}


def test_an_empty_file_serves_every_user() -> None:
    """A file without a word shares the whole machine among all users, without quotas."""
    assert machine.parse(b"") == MachineConfig()
    assert MachineConfig().users == ()
    assert MachineConfig().memory_of(100 * GIB) == 95 * GIB
    assert MachineConfig(memory_bytes=GIB).memory_of(100 * GIB) == GIB


def test_a_key_that_has_gone_stops_no_arbiter() -> None:
    """It is told what to do about it instead."""
    found = machine.parse(b'half_life = "7d"\ncpu_weight = 1\n[gpu]\npoll = "5s"\n')
    assert replace(found, advice=()) == MachineConfig()
    assert [each.partition(" ")[0] for each in found.advice] == ["half_life", "cpu_weight", "gpu.poll"]


def test_its_own_keys_are_read() -> None:
    """What is not as in config.toml arrives in its field, and some of the rest; reservations rank as they stand."""
    hour = 3600 * S
    assert machine.parse(EVERYTHING.encode()) == MachineConfig(
        users=("alice", "bob@lab.example", "@lab", 1005, 1006, 0),
        cpus=60,
        memory_bytes=100 * GIB,
        memory_reserve=Reserve(size_bytes=8 * GIB),
        resources=(Pool("licence", 3), Pool("tpu", 2, (0, 1))),
        policy=Policy(
            fair_share=False,
            gpu_use=("0", "2"),
            default_user_limits=Limits(max_running_jobs=20, max_running_gpus=2),
            user_limits={"alice": Limits(max_running_gpus=config.UNLIMITED, max_running_cpus=8)},
        ),
        reservations=(
            Reservation(
                "course", "bob", None, NOON_NS, NOON_NS + 2 * hour, gpu_indices=(0, 1), comment="the Friday course"
            ),
            Reservation("open", "nobody", None, NOON_NS, NOON_NS + 2 * hour, gpu_count=1, created_at_ns=1),
        ),
    )


def _keys(table: KeyTable | None) -> dict[str, Key]:
    return {key.name: key for key in table.keys}


@pytest.mark.parametrize("table", SHARED, ids=lambda table: str(table and table.name))
def test_a_key_of_both_files_is_one_row(table: KeyTable | None) -> None:
    """What a key means and how it is judged cannot differ between a spool and the machine, where both have it."""
    theirs = _keys(SHARED[table])
    both = {name for name in _keys(table) if name in theirs}
    assert len(both) > 1
    own = {"quotas", "default_user", "users", "user", "start"}  # other limits; and "now" is no time of this file
    for name in both - own:
        assert _keys(table)[name] is theirs[name], name


def test_the_arbiter_s_lines_are_the_page_s() -> None:
    """Clauses 17.5 and 17.6 have each kind of line with as many words as the arbiter writes."""
    found = {word: rest.count(",") for word, rest in re.findall(r'`\["(\w+)"(.*?)\]`', clause("17.5") + clause("17.6"))}
    kinds = get_args(ledger.Line)
    assert found == {str(kind.__struct_config__.tag): len(kind.__struct_fields__) for kind in kinds}


def test_the_machine_s_view_has_the_fields_of_the_page() -> None:
    """What tools read from machine.json is on the page."""
    for view in (MachineShares, UserShare, GpuShare):
        for field in msgspec.structs.fields(view):
            assert f"`{field.name}`" in clause("17.3"), field.name


def test_no_text_of_a_shared_machine_ends_in_a_traceback() -> None:
    """Seeded variants of `machine.toml`, and of a line of the arbiter's journal, by what reads them."""
    dice, told = random.Random(f"{SEED} machine"), (ROOT / "examples" / "machine.toml").read_bytes()
    for _ in range(MANY):
        with suppress(SpoolError):
            machine.parse(variant(told, dice)[0])
        ledger.parse_line(variant(LEASE, dice)[0])
