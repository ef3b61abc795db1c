"""A decision that was carried out leaves nothing to decide until something changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import NOW, S, view
from core.worlds import BOX, NAMES, POLICIES, waiting
from spool.core.backfill import as_run
from spool.core.model import Running, Waiting
from spool.core.scheduler import Plan, View, decide


def carry_out(seen: View, jobs: list[Waiting], plan: Plan, at_ns: int) -> list[Running]:
    """Start what the plan starts, as the dispatcher takes it in."""
    started = []
    by_name = {job.name: job for job in jobs}
    for start in plan.starts:
        run = replace(as_run(by_name[start.name], start.grant, at_ns), run=1)
        seen.queue.remove(run.name)
        seen.running.put(run)
        seen.past.begin(run.user, run.spec.project, run.grant, at_ns)
        started.append(run)
    return started


@given(
    before=st.lists(waiting([f"old{number}" for number in range(4)]), max_size=4, unique_by=lambda job: job.name),
    jobs=st.lists(waiting(NAMES), max_size=8, unique_by=lambda job: job.name),
    policy=POLICIES,
    ran_s=st.sampled_from([1, 100, 5000]),
)
def test_who_does_not_start_now_does_not_start_in_the_same_moment(before, jobs, policy, ran_s):
    """Of the same instant a second decision starts nobody and ends nobody: the dispatcher need not make it."""
    earlier = view(*before, on=BOX)
    runs = carry_out(earlier, before, decide(earlier, NOW - ran_s * S, policy), NOW - ran_s * S)
    seen = view(*jobs, on=BOX, running=runs)
    plan = decide(seen, NOW, policy)
    if plan.endings:
        return
    carry_out(seen, jobs, plan, NOW)
    again = decide(replace(seen, holding=plan.holding), NOW, policy)
    assert (again.starts, again.endings) == ((), ())
