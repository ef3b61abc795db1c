"""The dispatchers of three users and the arbiter of their machine are killed again and again while jobs run."""

from __future__ import annotations

import os
import random
import time

import pytest

from extras.machine.shared_machine import SharedMachine, User, logs, shared_machine

SEEDS = int(os.environ.get("TURNS_SEEDS", "1"))
FIRST = int(os.environ.get("TURNS_FIRST", "1"))
JOBS = int(os.environ.get("TURNS_JOBS", "60"))
AWAY_S = float(os.environ.get("TURNS_AWAY", "0.5"))
"""A killed dispatcher stays away for up to this long."""


class Storm:
    """What happens to one machine, by one seed."""

    def __init__(self, machine: SharedMachine, seed: int) -> None:
        self.dice = random.Random(seed)
        self.machine = machine
        self.back_at: dict[str, float] = {}  # when what was killed comes back, by the name of the user, "" the arbiter
        self.kills: dict[str, int] = {"dispatcher": 0, "arbiter": 0}

    def give_jobs(self, count: int) -> None:
        """Hand *count* jobs to the users."""
        dice = self.dice
        for number in range(count):
            user = dice.choice(self.machine.users)
            deed = f"sleep {dice.choice((0.01, 0.03, 0.1, 0.2))}" if dice.random() < 0.7 else ""
            cpus = dice.choice((1, 1, 1, 2, self.machine.cpus // 2, self.machine.cpus))
            device = dice.random() < 0.15
            user.give(f"{user.root.parent.name}-{number}", cpus, device=device, deed=deed)

    def rage(self) -> None:
        """Kill one of them, and let those return whose time has come."""
        now = time.monotonic()
        for user in self.machine.users:
            name = user.root.parent.name
            if user.process is None and self.back_at[name] <= now:
                user.serve()
        if self.machine.process is None and self.back_at[""] <= now:
            self.machine.serve()
        victims: list[User | SharedMachine] = [user for user in self.machine.users if user.process is not None]
        if self.machine.process is not None and self.dice.random() < 0.25:
            victims = [self.machine]
        if victims:
            self.kill(self.dice.choice(victims))

    def kill(self, victim: User | SharedMachine) -> None:
        """Kill a dispatcher or the arbiter."""
        now = time.monotonic()
        if isinstance(victim, User):
            process = victim.process
            assert process.poll() is None, f"a dispatcher died by itself\n{logs(self.machine)}"
            victim.kill()
            self.kills["dispatcher"] += 1
            self.back_at[victim.root.parent.name] = now + self.dice.random() * AWAY_S
        else:
            assert victim.process.poll() is None, f"the arbiter died by itself\n{logs(self.machine)}"
            victim.kill()
            self.kills["arbiter"] += 1
            self.back_at[""] = now + self.dice.random() * 0.3

    def settle(self) -> None:
        """Let all of them return."""
        for user in self.machine.users:
            if user.process is None:
                user.serve()
        if self.machine.process is None:
            self.machine.serve()


@pytest.mark.timeout(400 + JOBS)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_no_storm_overcommits_loses_or_repeats(seed: int) -> None:
    """Each job runs once, the CPUs and the device are never given twice, and no lease and no process is left."""
    with shared_machine(cpus=4) as machine:
        storm = Storm(machine, seed)
        storm.give_jobs(JOBS)
        machine.serve()
        for user in machine.users:
            user.serve()
        begun = time.monotonic()
        while not all(user.is_done for user in machine.users):
            time.sleep(storm.dice.uniform(0.3, 2.5))
            storm.rage()
            assert time.monotonic() < begun + 300 + JOBS, f"it does not come to an end\n{logs(machine)}"
        storm.settle()
        try:
            machine.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {storm.kills}: {error}\n{logs(machine)}") from None
        print(f"seed {seed}: {JOBS} jobs, {storm.kills}, {time.monotonic() - begun:.0f} s")
