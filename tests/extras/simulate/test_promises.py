"""What users are promised: nobody waits for ever, and nothing lies idle for long because of a guess."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.planning import GIB, NOW, S, gpus, machine, spec
from spool.core.model import Machine, Policy, Request, Spec
from spool.extras.simulate.simulation import Outcome, Pass, SimulatedJob, Simulation, simulate

HOUR = 3600 * S
DAY = 24 * HOUR


def became(jobs: list[SimulatedJob], box: Machine, policy: Policy | None = None) -> dict[str, Outcome]:
    """Return what becomes of each job."""
    return {each.job.name: each for each in simulate(jobs, box, policy or Policy())}


@pytest.mark.parametrize("users", [("a", "b", "c"), ("a", "a", "a")])
def test_nothing_idles_for_weeks_for_a_guess_that_recedes(users):
    """Beside a run of a month of which nobody knows the end, small jobs start at once though a wide one waits.

    One of 8 CPUs runs for 30 days, another job wants all 8, and an hourly job takes one for ten minutes; nobody states
    a limit. The wide job starts ten minutes after the long one has ended, at the latest.
    """
    month = 30 * DAY + 100 * S
    jobs = [
        SimulatedJob("long", spec(cpus=1), NOW, month, users[0]),
        SimulatedJob("wide", spec(cpus=8), NOW + S, HOUR, users[1]),
        *(SimulatedJob(f"s{n}", spec(cpus=1), NOW + 2 * S + n * HOUR, 600 * S, users[2]) for n in range(5 * 7 * 24)),
    ]
    found = became(jobs, machine(8))
    assert found["wide"].started_at_ns <= NOW + month + 600 * S
    waits = [each.waited_ns for name, each in found.items() if name.startswith("s")]
    assert (
        sum(wait > 0 for wait in waits) <= 2
    )  # those that come while the wide one waits for the last of them, or runs
    assert max(waits) <= HOUR + 600 * S


def test_a_long_job_among_short_ones_starts():
    """A job of a day starts within twelve hours though jobs of an hour, three of which wait at any time, keep coming.

    All of them need the whole machine. Eight hours of later work may pass it, and the three that came before it.
    """
    jobs = [SimulatedJob(f"first{n}", spec(cpus=8, time_limit_ns=HOUR), NOW, HOUR) for n in range(3)]
    jobs.append(SimulatedJob("day", spec(cpus=8, time_limit_ns=DAY), NOW + S, DAY))
    jobs += [SimulatedJob(f"s{n}", spec(cpus=8, time_limit_ns=HOUR), NOW + 2 * S + n * HOUR, HOUR) for n in range(240)]
    assert became(jobs, machine(8))["day"].waited_ns <= 12 * HOUR
    assert became(jobs, machine(8), Policy(promotes=False))["day"].waited_ns > 48 * HOUR


@pytest.mark.parametrize(("first", "most"), [(120, 5), (100, 21)])
def test_a_heavy_users_small_jobs_do_not_starve(first, most):
    """A user with by far the most usage gets 10-minute jobs through a queue that is never empty, within five hours.

    The others' jobs of an hour wait for ten hours and more, so theirs are the higher scores for most of that time. A
    job of ten hours that the user was served while they waited makes them wait for twice as long, and no more.
    """
    jobs = [SimulatedJob(f"h{n}", spec(time_limit_ns=10 * HOUR), NOW, 10 * HOUR, "heavy") for n in range(10)]
    hour = spec(time_limit_ns=HOUR)
    jobs += [SimulatedJob(f"l{n}", hour, NOW + 90 * HOUR + n * HOUR, HOUR, f"light{n % 5}") for n in range(200)]
    small = spec(time_limit_ns=600 * S)
    jobs += [SimulatedJob(f"small{n}", small, NOW + (first + n * 5) * HOUR, 600 * S, "heavy") for n in range(20)]
    found = became(jobs, machine(1))
    assert max(each.waited_ns for name, each in found.items() if name.startswith("small")) <= most * HOUR
    assert max(each.waited_ns for name, each in found.items() if name.startswith("l")) >= 10 * HOUR


def test_a_flood_of_short_jobs_does_not_hold_the_others_up_for_days():
    """Of 1,500 five-minute jobs, 16 hours of work for 8 GPUs, the others wait a tenth as long as without fair share.

    They come every hour for half an hour on one GPU or two. Each job of the flood is shorter than any of theirs.
    """
    jobs = [
        SimulatedJob(f"f{n}", spec(cpus=1, gpus=1, time_limit_ns=300 * S), NOW, 300 * S, "flood") for n in range(1500)
    ]
    for n in range(30):
        wants = spec(cpus=1, gpus=1 + n % 2, time_limit_ns=HOUR)
        jobs.append(SimulatedJob(f"o{n}", wants, NOW + n * HOUR, HOUR // 2, f"user{n % 3}"))
    waits = []
    for policy in (Policy(), Policy(fair_share=False)):
        found = became(jobs, machine(cpus=16, gpus=8), policy)
        waits.append(sum(each.waited_ns for name, each in found.items() if name.startswith("o")) / 30)
    assert waits[0] < waits[1] / 10


# Over random streams of long jobs on a machine with processors, memory and GPUs.

BOX = machine(cpus=4, memory=8 * GIB, gpus=gpus(2))
LONGEST = 40 * HOUR

REQUESTS = st.builds(
    Request,
    cpus=st.sampled_from([1, 1, 1, 2, 4]),
    memory_bytes=st.sampled_from([None, None, GIB, 5 * GIB, 8 * GIB]),
    gpus=st.sampled_from([0, 0, 0, 1, 2]),
)
PROCESSORS = st.builds(Request, cpus=st.sampled_from([1, 1, 1, 2, 3, 4]))


@st.composite
def streams(draw: st.DrawFn, requests: st.SearchStrategy[Request], stated: float) -> list[SimulatedJob]:
    """Draw jobs of minutes to days that come over a week; that part of them states a limit, and keeps it."""
    jobs, at = [], NOW
    users = draw(st.sampled_from(["a", "ab", "abc"]))
    for number in range(draw(st.integers(2, 40))):
        runs = draw(st.sampled_from([60, 600, 3600, 4 * 3600, 10 * 3600, 30 * 3600])) * S
        limit = min(runs * draw(st.sampled_from([1, 1, 2, 10])), LONGEST)
        says = stated == 1 or (stated > 0 and draw(st.booleans()))
        what = Spec("true", request=draw(requests), time_limit_ns=limit if says else None)
        jobs.append(
            SimulatedJob(f"{draw(st.sampled_from('xyz'))}{number:02}", what, at, runs, draw(st.sampled_from(users)))
        )
        at += draw(st.sampled_from([0, 1, 600, 3600, 3 * 3600])) * S
    return jobs


def amounts(request: Request) -> tuple[int, int, int]:
    """Return what *request* takes of processors, memory and GPUs."""
    return request.cpus, request.memory_bytes or 0, request.gpus


def watched(jobs: list[SimulatedJob], policy: Policy) -> Iterator[tuple[Pass, list[str]]]:
    """Yield each pass, with those that wait and were passed: worked out plainly from all that has run before.

    That is who lacks a pool that later arrivals have used for 8h in all, and 15 % of its wait, and twice what its user
    was served of it beyond that, while others wait; none behind its like that 8 hours of work would pass, and did not.
    """
    came = {each.name: each for each in jobs}
    asks = {each.name: amounts(each.spec.request) for each in jobs}
    whole = (BOX.cpus, BOX.memory_bytes, len(BOX.gpus))
    ended: list[Outcome] = []
    for step in Simulation(jobs, BOX, policy).steps():
        if isinstance(step, Outcome):
            ended.append(step)
            continue
        running = [asks[name] for name in step.view.running]
        free = [total - sum(each[pool] for each in running) for pool, total in enumerate(whole)]
        spans = [(each.job, each.started_at_ns or 0, each.ended_at_ns or 0) for each in ended]
        spans += [(came[name], run.started_at_ns, step.now_ns) for name, run in step.view.running.items()]
        competing = policy.fair_share and len({each.user for each in step.view.queue.values()}) > 1
        passed, alike = [], set()
        for name, waits in sorted(step.view.queue.items(), key=lambda each: (each[1].arrived_at_ns, each[0])):
            like = waits.user, waits.spec.request, waits.spec.time_limit_ns or name.rstrip("0123456789")
            if like in alike:
                continue
            asked = [pool for pool in range(3) if asks[name][pool]]
            lacked = [pool for pool in asked if asks[name][pool] > free[pool]] or asked
            later = [each.job for each in ended if each.job.submit_at_ns > waits.arrived_at_ns]
            own = [
                sum(
                    asks[each.name][pool] * max(end - max(begin, waits.arrived_at_ns), 0)
                    for each, begin, end in spans
                    if competing and each.user == waits.user
                )
                for pool in range(3)
            ]
            enough = max(8 * HOUR, int(0.15 * (step.now_ns - waits.arrived_at_ns)))
            work = [sum(each.duration_ns * asks[each.name][pool] for each in later) for pool in range(3)]
            needed = [enough * all_of + 2 * max(0, own[pool] - enough * all_of) for pool, all_of in enumerate(whole)]
            if any(work[pool] > needed[pool] for pool in lacked):
                passed.append(name)
            elif enough == 8 * HOUR:
                alike.add(like)
        yield step, passed


@given(st.sampled_from([1, 0.5, 0]).flatmap(lambda stated: streams(REQUESTS, stated)), st.booleans())
def test_who_was_passed_by_too_much_goes_first(jobs, fair):
    """At every moment at which somebody was passed by too much, the first to arrive of those stands before all others.

    So at most the work of 8 hours, or 15 % of the wait, of the whole machine passes a job, and what runs by then;
    afterwards only those pass it that came earlier, and what does not delay it.
    """
    for step, passed in watched(jobs, Policy(fair_share=fair)):
        if passed:
            first, standing = step.plan.in_order()[0]
            assert standing.was_passed
            assert first.arrived_at_ns <= min(step.view.queue[name].arrived_at_ns for name in passed)


@given(streams(REQUESTS, 1), st.builds(Policy, fair_share=st.booleans()))
def test_who_was_passed_starts_soon(jobs, policy):
    """Limits being stated, a job that was passed by too much starts within one longest run, and one for each before it.

    Before it are those that came earlier and still wait.
    """
    longest = max(each.spec.time_limit_ns or 0 for each in jobs)
    until: dict[str, int] = {}
    for step, passed in watched(jobs, policy):
        for name, waits in step.view.queue.items():
            if name not in passed:
                until.pop(name, None)
                continue
            earlier = sum(each.arrived_at_ns <= waits.arrived_at_ns for each in step.view.queue.values())
            assert step.now_ns <= until.setdefault(name, step.now_ns + earlier * longest)


@given(st.data())
def test_guesses_hold_back_a_tenth_of_a_wait_at_most(data):
    """What lies idle for a job because of guesses, and others could use, is a tenth of the machine in its wait at most.

    In seconds of the whole machine; two more are allowed for, which are what the clock of a plan may be late.
    """
    jobs = data.draw(streams(PROCESSORS, data.draw(st.sampled_from([0.5, 0]))))
    comes = NOW + data.draw(st.sampled_from([1, 5, 20])) * HOUR
    many = Spec("true", time_limit_ns=data.draw(st.sampled_from([None, LONGEST])))
    jobs += [SimulatedJob(f"many{n}", many, comes + n, HOUR, "many") for n in range(data.draw(st.integers(0, 20)))]
    arrived = {each.name: each.submit_at_ns for each in jobs}
    held: dict[str, float] = {}
    holding: tuple[str, float, int] | None = None  # for whom, how much in a second, since when
    for step, _ in watched(jobs, Policy()):
        plan, queue, now_ns = step.plan, step.view.queue, step.now_ns
        if holding is not None:
            name, rate, since_ns = holding
            held[name] = held.get(name, 0.0) + rate * (now_ns - since_ns) / S
            assert held[name] <= 0.1 * (now_ns - arrived[name]) / S + 2
        holding = None
        if plan.protected is not None and plan.protection.guessed:
            gone = {start.name: start.grant.cpus for start in plan.starts}
            free = BOX.cpus - sum(run.grant.cpus for run in step.view.running.values()) - sum(gone.values())
            left = [name for name in queue if (why := plan.reason(name)) is not None and why.code == "left"]
            wanted = sum(queue[name].spec.request.cpus for name in left)
            holding = plan.protected, min(free, wanted) / BOX.cpus, now_ns
