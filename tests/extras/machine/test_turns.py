"""Dispatchers take turns on one machine: an arbiter and two spools in processes of their own, and who is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest

from extras.machine.shared_machine import SharedMachine, shared_machine
from plugins.fake_nvml import FakeNvml
from served import overlap
from support import PATIENCE_S, optional, wait_for


def _uuid(at: int) -> str:
    return f"GPU-{at:08d}-1111-2222-3333-444444444444"


@pytest.fixture
def machine(fake_nvml: FakeNvml) -> Iterator[SharedMachine]:
    """Give a machine of two CPUs, a device and three GPUs, whose arbiter and two dispatchers serve."""
    for at in range(3):
        fake_nvml.gpu(_uuid(at), bus=at)
    with shared_machine(2, fake_nvml.variables) as made:
        made.open()
        for user in made.users[:2]:
            user.start()
        yield made


def test_two_spools_share_the_cpus_and_a_device(machine: SharedMachine) -> None:
    """Never do more jobs run than there are CPUs, and all of them end; one of them has the device at a time."""
    alina, bob, _ = machine.users
    names = {alina: [f"a{number}" for number in range(8)], bob: [f"b{number}" for number in range(8)]}
    for spool, jobs in names.items():
        for number, name in enumerate(jobs):
            spool.drop(name, "sleep 0.05", resources={"device": 1} if number < 3 else None)
    for spool, jobs in names.items():
        spool.wait_done(*jobs)
        assert {spool.outcome(name) for name in jobs} == {"finished"}
        grant = tomllib.loads(spool.record(jobs[0], "grant.toml") or "")
        assert grant["lease"] > 0
        assert grant["resource_indices"] == {"device": [7]}
    history = [line for spool in names for line in spool.history()]
    assert overlap(history) <= 2
    assert overlap(line for line in history if line["job"][1:] in "012") == 1
    wait_for(lambda: machine.is_free, what="a machine without leases")


@pytest.mark.skipif(optional("spool.extras.here") is None, reason="`spool run --here` is not there")
def test_a_command_in_a_terminal_waits_for_its_turn(machine: SharedMachine) -> None:
    """`spool run --here` asks the arbiter as any job does, and gives its lease back with the end of the command."""
    alina, bob, _ = machine.users
    for name in ("one", "two"):
        alina.drop(name, ["sleep", "1000"])
        alina.pid(name)
    words = [sys.executable, "-m", "spool", "run", "--here", "--name", "here", "cat"]
    with subprocess.Popen(
        words, env=bob.environment, cwd=bob.root.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        bob.wait_reason("here", "machine: cpus: needs 1, 0 free")
        alina.spool("cancel", "one", "two")
        bob.pid("here")
        assert process.communicate(b"my turn\n", timeout=PATIENCE_S)[0] == b"my turn\n"
    assert process.returncode == 0
    assert bob.wait_done("here")
    wait_for(lambda: machine.is_free, what="a machine without leases")


def test_runs_outlive_the_arbiter_and_nothing_starts_until_it_is_back(machine: SharedMachine) -> None:
    """What waits says so, also while it only hangs; the new arbiter has the leases of before, and grants the rest."""
    alina, bob, _ = machine.users
    alina.drop("long", "sleep 1000")
    pid = alina.pid("long")
    machine.process.send_signal(signal.SIGSTOP)
    bob.drop("soon", ["true"])
    bob.wait_reason("soon", "machine: the arbiter is asked for a lease")
    bob.wait_reason("soon", "machine: the arbiter has not answered ")
    machine.process.send_signal(signal.SIGCONT)
    assert bob.wait_done("soon")
    machine.kill()
    bob.drop("late", ["sleep", "1000"])
    bob.wait_reason("late", "machine: the arbiter has not answered since ")
    assert f"`spool machine serve {machine.directory}`" in bob.reason("late")
    assert alina.pid("long") == pid
    machine.open()
    bob.pid("late")
    bob.drop("later", ["true"])
    bob.wait_reason("later", "machine: cpus: needs 1, 0 free")
    alina.spool("cancel", "long")
    assert bob.wait_done("later")


def test_the_arbiter_says_which_gpus(machine: SharedMachine, fake_nvml: FakeNvml) -> None:
    """A process without a lease keeps a GPU from being granted, and no GPU is granted to two users."""
    alina, bob, _ = machine.users
    fake_nvml.process(_uuid(0), 1)
    alina.drop("one", 'echo "$CUDA_VISIBLE_DEVICES"; sleep 1000', gpus=1)
    assert alina.says("one", "GPU").strip() == _uuid(1)
    bob.drop("other", 'echo "$CUDA_VISIBLE_DEVICES"; sleep 1000', gpus=1)
    assert bob.says("other", "GPU").strip() == _uuid(2)
    assert tomllib.loads(bob.record("other", "grant.toml") or "")["gpu_indices"] == [2]
    bob.drop("late", ["true"], gpus=1, cpus=0)
    bob.wait_reason("late", "machine: gpus: needs 1 unshared GPU; none is idle")
    alina.spool("cancel", "one")
    assert bob.wait_done("late")
    assert tomllib.loads(bob.record("late", "grant.toml") or "")["gpu_uuids"] == [_uuid(1)]


def test_a_single_pass_asks_too(machine: SharedMachine) -> None:
    """`dispatch --once` starts what it is granted."""
    alina = machine.users[0]
    alina.stop()
    alina.drop("a", ["sleep", "1000"])
    assert alina.run("--once") == 0
    assert alina.pid("a")
