"""Dispatchers take turns on one machine: an arbiter and two spools in processes of their own, and who is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from plugins.fake_nvml import FakeNvml
from served import Served
from spool.formats import machine_status
from spool.machine import shared
from support import ROOT, wait_for

ARBITER = """
import sys
from spool.arbiter.server import Arbiter
from spool.formats import machinefile
arbiter = Arbiter(sys.argv[1], machinefile.parse(open(sys.argv[1] + "/machine.toml", "rb").read()))
arbiter.serve()
arbiter.close()
"""
MARKED = "printf 's %s\\n' \"$SPOOL_JOB\" >> marks; {deed}; printf 'e %s\\n' \"$SPOOL_JOB\" >> marks"


class Machine:
    """A machine of two CPUs and a single device, its arbiter, and the spools of two users."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.directory = directory / "machine"
        self.directory.mkdir()
        (self.directory / "machine.toml").write_text(
            f"users = [{os.getuid()}]\ncpus = 2\n[resources]\ndevice = {{ indices = [3] }}\n"
        )
        self.process: subprocess.Popen[bytes] | None = None
        self.marks = directory / "marks"
        self.spools = tuple(Served(directory / name, environment) for name in ("alina", "bob"))
        for spool in self.spools:
            (spool.root / "config.toml").write_text(f'machine = "{self.directory}"\ncpus = 64\nmax_requeues = 0\n')

    def open(self) -> None:
        """Start the arbiter, and wait until it serves."""
        socket = self.directory / shared.SOCKET
        socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", ARBITER, str(self.directory)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **self.environment},
        )
        wait_for(socket.exists, what="the arbiter")

    def kill(self) -> None:
        """Kill the arbiter."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def status(self) -> machine_status.MachineShares:
        """Return what the arbiter says of itself."""
        status = machine_status.parse((self.directory / "machine.json").read_bytes())
        assert status is not None
        return status

    def is_free(self) -> bool:
        """Whether no lease is left."""
        return not any(user.leases for user in self.status().users)

    def most_at_once(self) -> int:
        """Return how many jobs ran at one moment, over all spools; each must have run once."""
        most, running, seen = 0, set[str](), set[str]()
        for line in self.marks.read_text().splitlines():
            word, name = line.split()
            if word == "s":
                assert name not in seen, f"{name} ran twice"
                running.add(name)
                seen.add(name)
            else:
                running.remove(name)
            most = max(most, len(running))
        return most


def _uuid(at: int) -> str:
    return f"GPU-{at:08d}-1111-2222-3333-444444444444"


@pytest.fixture
def machine(tmp_path: Path, fake_nvml: FakeNvml) -> Iterator[Machine]:
    """Give a shared machine with three GPUs, whose arbiter and dispatchers serve."""
    for at in range(3):
        fake_nvml.gpu(_uuid(at), bus=at)
    made = Machine(tmp_path, fake_nvml.variables)
    made.open()
    with made.spools[0] as alina, made.spools[1] as bob:
        alina.start()
        bob.start()
        yield made
    if made.process is not None:
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(30) == 0


def test_two_spools_share_the_cpus_and_a_device(machine: Machine) -> None:
    """Never do more jobs run than there are CPUs, and all of them end; one of them has the device at a time."""
    alina, bob = machine.spools
    for number in range(12):
        deed = MARKED.format(deed="sleep 0.05")
        alina.drop(f"a{number}", deed, resources={"device": 1} if number < 3 else None)
        bob.drop(f"b{number}", deed, resources={"device": 1} if number < 3 else None)
    for spool, letter in zip(machine.spools, "ab", strict=True):
        assert spool.wait_done(*(f"{letter}{number}" for number in range(12)))
        for number in range(12):
            assert spool.outcome(f"{letter}{number}") == "finished"
        grant = tomllib.loads(spool.record(f"{letter}0", "grant.toml") or "")
        assert grant["lease"] > 0
        assert grant["resource_indices"] == {"device": [3]}
    assert machine.most_at_once() == 2
    wait_for(machine.is_free, what="a machine without leases")


def test_who_waits_is_told_who_has_the_room(machine: Machine) -> None:
    """`why` and `plan` say it as the arbiter does, and promise no start."""
    alina, bob = machine.spools
    for name in ("one", "two"):
        alina.drop(name, ["sleep", "1000"])
        alina.pid(name)
    bob.drop("late", ["true"])
    said = bob.wait_reason("late", "machine: cpus: needs 1, 0 free (2 leases of ")
    assert said.endswith(" hold 2)")
    assert bob.state()["machine"]["shared"]["cpus"] == 2
    alina.spool("cancel", "one")
    assert bob.wait_done("late")


def test_who_ran_before_sharing_is_counted(machine: Machine) -> None:
    """What began without a lease keeps its room once its dispatcher joins, also when another dispatcher follows it."""
    alina, bob = machine.spools
    config = alina.root / "config.toml"
    text = config.read_text()
    config.write_text('machine = "off"\n')
    wait_for(lambda: alina.state()["machine"].get("shared") is None, what="a spool that takes no part")
    for name in ("one", "two"):
        alina.drop(name, ["sleep", "1000"])
        alina.pid(name)
    assert machine.is_free()
    config.write_text(text)
    wait_for(lambda: [user.cpus for user in machine.status().users] == [2], what="the claims")
    alina.kill()
    alina.start()
    bob.drop("late", ["true"])
    bob.wait_reason("late", "machine: cpus: needs 1, 0 free (2 leases of ")
    alina.spool("cancel", "one")
    assert bob.wait_done("late")


def test_a_command_in_a_terminal_waits_for_its_turn(machine: Machine) -> None:
    """`spool run --here` asks the arbiter as any job does, and gives its lease back with the end of the command."""
    alina, bob = machine.spools
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
        assert process.communicate(b"my turn\n", timeout=60)[0] == b"my turn\n"
    assert process.returncode == 0
    assert bob.wait_done("here")
    wait_for(machine.is_free, what="a machine without leases")


def test_runs_outlive_the_arbiter_and_nothing_starts_until_it_is_back(machine: Machine) -> None:
    """The new arbiter has the leases of before in its journal, and grants what is left."""
    alina, bob = machine.spools
    alina.drop("long", "sleep 1000")
    pid = alina.pid("long")
    machine.kill()
    bob.drop("late", ["sleep", "1000"])
    bob.wait_reason("late", "machine: the arbiter has not answered since ")
    assert f"start it with `spool machine serve {machine.directory}`" in bob.reason("late")
    assert alina.pid("long") == pid
    machine.open()
    bob.pid("late")
    bob.drop("later", ["true"])
    bob.wait_reason("later", "machine: cpus: needs 1, 0 free")
    alina.spool("cancel", "long")
    assert bob.wait_done("later")


def test_a_dispatcher_that_comes_back_has_its_leases(machine: Machine) -> None:
    """While it is gone its run keeps the room; the next one ends the lease with the run."""
    alina, bob = machine.spools
    for name in ("one", "two"):
        alina.drop(name, f"until [ -e end-{name} ]; do sleep 0.02; done")
        alina.pid(name)
    alina.kill()
    bob.drop("late", ["true"])
    bob.wait_reason("late", "machine: cpus: needs 1, 0 free (2 leases of ")
    alina.start()
    (alina.root.parent / "end-one").touch()
    assert alina.wait_done("one")
    assert bob.wait_done("late")
    alina.kill()
    (alina.root.parent / "end-two").touch()
    wait_for(machine.is_free, what="the end of a lease without a dispatcher")
    alina.start()
    assert alina.wait_done("two")


def test_the_arbiter_says_which_gpus(machine: Machine, fake_nvml: FakeNvml) -> None:
    """A process without a lease keeps a GPU from being granted, and no GPU is granted to two users."""
    alina, bob = machine.spools
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


def test_every_command_says_what_others_have(machine: Machine, fake_nvml: FakeNvml) -> None:
    """`info`, `gpus`, `why` and `plan` agree with the arbiter: the other spool's lease, and no foreign process."""
    alina, bob = machine.spools
    alina.drop("one", 'echo "$CUDA_VISIBLE_DEVICES"; sleep 1000', gpus=1)
    assert alina.says("one", "GPU").strip() == _uuid(0)
    fake_nvml.process(_uuid(0), alina.pid("one"))
    bob.drop("wide", ["true"], cpus=2)
    reason = bob.wait_reason("wide", "machine: cpus: needs 2, 1 free (1 lease of ")
    wait_for(lambda: any(user.leases and user.asks for user in machine.status().users), what="the arbiter to say so")

    def asked(*words: str) -> Any:
        said = bob.spool(*words, "--json")
        assert said.returncode == 0, said.stderr
        return json.loads(said.stdout)

    info = asked("info")
    use = info["shared"]["use"]
    assert (info["cpus"], use["cpus"], use["cpus_granted"], use["gpus_granted"]) == (2, 2, 1, 1)
    assert (use["own"]["leases"], use["own"]["asks"], use["others"]) == (1, 1, [])
    first = asked("gpus")["gpus"][0]
    assert (first["state"], first["foreign"]) == ("leased", [])
    assert [lease["user"] for lease in first["leases"]] == [use["own"]["user"]]
    assert asked("why", "wide")["reasons"] == [{"code": "machine", "text": reason}]
    plan = asked("plan")
    assert (plan["starts"], [each["reason"] for each in plan["waits"]]) == ([], [reason])
    alina.spool("cancel", "one")
    assert bob.wait_done("wide")


def test_an_arbiter_that_hangs_does_not_answer(machine: Machine) -> None:
    """What waits says so, and starts when it goes on."""
    alina, _ = machine.spools
    assert machine.process is not None
    machine.process.send_signal(signal.SIGSTOP)
    alina.drop("late", ["true"])
    alina.wait_reason("late", "machine: the arbiter is asked for a lease")
    alina.wait_reason("late", "machine: the arbiter has not answered ")
    machine.process.send_signal(signal.SIGCONT)
    assert alina.wait_done("late")


def test_a_single_pass_asks_too(machine: Machine) -> None:
    """`dispatch --once` starts what it is granted."""
    alina, _ = machine.spools
    alina.stop()
    alina.drop("a", ["sleep", "1000"])
    assert alina.run("--once") == 0
    assert alina.pid("a")


@pytest.mark.parametrize("seed", [1, 2])
def test_no_kill_overcommits_the_machine_or_loses_a_job(machine: Machine, seed: int) -> None:
    """Dispatchers and the arbiter are killed at random: each job runs once, and no lease is left."""
    alina, bob = machine.spools
    dice = random.Random(seed)
    for number in range(20):
        deed = MARKED.format(deed="sleep 0.1")
        alina.drop(f"a{number}", deed)
        bob.drop(f"b{number}", deed)
    marks = machine.marks
    for count in range(4, 72, 8):
        wait_for(lambda count=count: marks.exists() and marks.read_bytes().count(b"\n") >= count, what="progress")
        match dice.randrange(3):
            case 0:
                machine.kill()
                machine.open()
            case chosen:
                machine.spools[chosen - 1].kill()
                machine.spools[chosen - 1].start()
    for spool, letter in zip(machine.spools, "ab", strict=True):
        names = [f"{letter}{number}" for number in range(20)]
        spool.wait_done(*names)
        assert {spool.outcome(name, spool.runs(name)[-1]) for name in names} == {"finished"}
    assert machine.most_at_once() <= 2
    wait_for(machine.is_free, what="a machine without leases")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is only one CPU here")
def test_the_runs_of_two_spools_never_have_one_cpu(machine: Machine) -> None:
    """With `cpu_pinning` in machine.toml every run is pinned, to CPUs that no other spool's run has."""
    file = machine.directory / "machine.toml"
    file.write_text("cpu_pinning = true\n" + file.read_text())
    machine.kill()
    machine.open()
    text = "python3 -c 'import os; print(\"has\", *os.sched_getaffinity(0))'; until [ -e end ]; do sleep 0.02; done"
    told = []
    for spool in machine.spools:
        (spool.root / "config.toml").write_text(f"cpu_pinning = true\n{(spool.root / 'config.toml').read_text()}")
        spool.drop("job", text, workdir=str(machine.directory))
        told.append(spool.says("job", "\n").split()[1:])
        assert f'cpu_list = "{told[-1][0]}"' in (spool.record("job", "grant.toml") or "")
    assert [len(cpus) for cpus in told] == [1, 1]
    assert told[0] != told[1]
    words = "cpu_pinning has no effect in config.toml: this machine is shared"
    wait_for(lambda: words in machine.spools[0].said(), what="the problem")
    (machine.directory / "end").touch()
    for spool in machine.spools:
        assert spool.wait_done("job")
