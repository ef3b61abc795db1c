"""Whole days on imagined machines, decision by decision, against pages that were read and agreed with once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from core.planning import GIB, NOW, S, at, machine, spec
from spool.core.model import Limits, Policy, Reservation
from spool.core.reasons import in_words
from spool.extras.simulate.simulation import Pass, SimulatedJob, Simulation

PAGES = Path(__file__).parent / "golden"
MINUTE = 60 * S


def coming(name: str, clock: str, minutes: int, user: str = "alice", **asked: object) -> SimulatedJob:
    """Return a job that comes when the clock shows *clock* and would run for *minutes*."""
    return SimulatedJob(name, spec(**asked), at(clock), minutes * MINUTE, user)


DAYS = {
    # Room is kept free for the wide one from the moment at which it does not fit, and what ends in time fills the gap.
    # Then who has waited longest for its size goes first: a short one before those that came earlier.
    "a_wide_job_in_a_stream": (
        [
            coming("wide", "12:01", 10, cpus=4, time_limit_ns=15 * MINUTE),
            *(coming(f"small{n}", f"12:{4 * n:02}", 20, cpus=1, time_limit_ns=25 * MINUTE) for n in range(12)),
            *(
                coming(f"short{n}", clock, 2, cpus=1, time_limit_ns=3 * MINUTE)
                for n, clock in enumerate(["12:10", "12:41"])
            ),
        ],
        machine(cpus=4),
        Policy(fair_share=False),
        (),
    ),
    # Two of four GPUs are kept for bob by count from 13:00 to 14:00; alice's jobs come all the time.
    "a_reservation_by_count": (
        [
            *(coming(f"a{n}", "12:50", 30, gpus=1, cpus=0, time_limit_ns=40 * MINUTE) for n in range(3)),
            *(coming(f"b{n}", "13:10", 25, "bob", gpus=1, cpus=0) for n in range(2)),
            *(coming(f"late{n}", "13:25", 10, gpus=1, cpus=0, time_limit_ns=20 * MINUTE) for n in range(4)),
        ],
        machine(cpus=4, gpus=4),
        Policy(fair_share=False),
        (Reservation("demo", "bob", None, at("13:00"), at("14:00"), gpu_count=2),),
    ),
    # Sharing by memory, an exclusive job that has to wait for its end, a quota, a group and a dependency on two jobs.
    "sharing_quotas_and_groups": (
        [
            coming("s1", "12:00", 30, gpus=1, cpus=1, gpu_memory_bytes=30 * GIB),
            coming("s2", "12:01", 30, gpus=1, cpus=1, gpu_memory_bytes=30 * GIB),
            coming("s3", "12:02", 30, "carol", gpus=1, cpus=1, gpu_memory_bytes=30 * GIB),
            coming("alone", "12:03", 10, "carol", gpus=1, cpus=1),
            coming("g1", "12:04", 20, cpus=1, group="g", group_limit=1),
            coming("g2", "12:05", 20, cpus=1, group="g", group_limit=1),
            coming("third", "12:06", 5, "dave", cpus=1, depends_on=("s1", "g1")),
            coming("quota", "12:07", 5, cpus=1, priority=50),
        ],
        machine(cpus=8, gpus=1),
        Policy(fair_share=False, user_limits={"alice": Limits(max_running_jobs=3)}),
        (),
    ),
}


def replay(name: str) -> Iterator[str]:
    """Yield a line for every start, and one for every job that is left waiting with another reason than before."""
    jobs, box, policy, reservations = DAYS[name]
    said: dict[str, str] = {}
    for step in Simulation(jobs, box, policy, reservations=reservations).steps():
        if not isinstance(step, Pass):
            continue
        clock = datetime.fromtimestamp(step.now_ns // S, UTC).strftime("%H:%M:%S")
        for start in step.plan.starts:
            on = f" on GPU {', '.join(map(str, start.grant.gpu_indices))}" if start.grant.gpu_indices else ""
            yield f"{clock} {start.name} starts{on}"
        started = {start.name for start in step.plan.starts}
        for waits in sorted(set(step.view.queue) - started):
            reason = in_words(str(step.plan.reason(waits)), step.now_ns, UTC)
            if said.get(waits) != reason:
                said[waits] = reason
                yield f"{clock} {waits} waits: {reason}"


@pytest.mark.parametrize("name", DAYS)
def test_a_day_goes_as_it_went_when_it_was_read(name: str) -> None:
    """With a frozen clock every start, every grant and every reason of a day is the one on its page."""
    assert at("12:00") == NOW
    assert "\n".join(replay(name)) + "\n" == (PAGES / f"{name}.txt").read_text(encoding="utf-8")
