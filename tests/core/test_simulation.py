"""What holds at every moment of every schedule, found out on imagined machines."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.planning import GIB, NOW, S, gpus, grant_of, machine, spec
from core.worlds import BOX, POLICIES, comings, over_committed
from spool.core.backfill import as_run
from spool.core.model import Dependencies, Limits, Policy, Reservation, State
from spool.core.resources import could_run
from spool.core.simulation import Coming, Discipline, Pass, Simulation, simulate, under

MANY = settings(max_examples=100, deadline=None)


def passes(jobs, policy, box=BOX):
    """Yield each pass, with the runs that there are once it has been performed and the jobs that go on waiting."""
    for step in Simulation(jobs, box, policy).steps():
        if isinstance(step, Pass):
            view, plan = step.view, step.plan
            gone = {start.name for start in plan.starts} | {ending.name for ending in plan.endings}
            new = [as_run(view.queue[start.name], start.grant, step.now_ns) for start in plan.starts]
            left = [waits for name, waits in view.queue.items() if name not in gone]
            yield step, [*view.running.values(), *new], new, left


@MANY
@given(comings(), POLICIES)
def test_nothing_is_ever_over_committed(jobs, policy):
    """At every moment of every schedule no pool, GPU, group, array or quota is exceeded."""
    for step, runs, new, _ in passes(jobs, policy):
        limits = [each.spec for each in step.view.queue.values()]
        wrong = over_committed(BOX, runs, policy, limits)
        if not any(run.spec.group for run in new):  # a limit that came later stops nobody who runs
            wrong = [what for what in wrong if what != "group"]
        if not any(run.spec.task for run in new):
            wrong = [what for what in wrong if what != "array"]
        assert wrong == []


@MANY
@given(comings(), POLICIES)
def test_whoever_waits_is_told_why_and_nothing_that_fits_waits(jobs, policy):
    """Every job that waits has a reason; unless room is left for another, no choice of GPUs would let it start."""
    for step, runs, _, left in passes(jobs, policy):
        limits = [each.spec for each in step.view.queue.values()]
        standing = over_committed(BOX, runs, policy, limits)
        for waits in left:
            noes = step.plan.all_noes(waits.name)
            assert noes
            assert noes[0] == step.plan.reason(waits.name)
            if noes[0].code == "left":
                assert step.plan.protected not in (None, waits.name)
                continue
            request = waits.spec.request
            for chosen in combinations(range(4), request.gpus):
                one_more = as_run(waits, grant_of(request, chosen), step.now_ns)
                assert over_committed(BOX, [*runs, one_more], policy, limits) != standing or standing


@MANY
@given(comings(), POLICIES)
def test_everything_that_fits_the_machine_starts(jobs, policy):
    """With finite jobs, every job that the machine and the quotas could ever let run does start."""
    quota = policy.default_user_limits
    began = {each.name for each in Simulation(jobs, BOX, policy).run() if each.started_at_ns is not None}
    for each in jobs:
        request = each.spec.request
        possible = (
            could_run(request, BOX, policy)
            and (quota.max_running_gpus is None or request.gpus <= quota.max_running_gpus)
            and (quota.max_running_cpus is None or request.cpus <= quota.max_running_cpus)
        )
        assert (each.name in began) == possible


def could_start_at(waits, runs, policy, now_ns):
    """Return when *waits* could start beside these runs, each of which ends at its limit: tried out, end by end."""
    ends = {run.name: max(run.started_at_ns + run.spec.time_limit_ns, now_ns) for run in runs}
    for moment in sorted({now_ns, *ends.values()}):
        there = [run for run in runs if ends[run.name] > moment]
        for chosen in combinations(range(4), waits.spec.request.gpus):
            one_more = as_run(waits, grant_of(waits.spec.request, chosen), now_ns)
            if not over_committed(BOX, [*there, one_more], policy, []):
                return moment
    return None


@MANY
@given(comings(priority=10, group=None, task=None), POLICIES)
def test_a_protected_job_is_not_delayed_by_those_behind_it(jobs, policy):
    """Limits being stated and kept, what starts behind a protected job in the order does not put its start off.

    Who stands before it may: it has waited longer for its size. A protected job that was promoted has nobody before
    it but those that came earlier.
    """
    jobs = [replace(each, spec=replace(each.spec, time_limit_ns=each.spec.time_limit_ns or 1800 * S)) for each in jobs]
    for step, runs, new, _ in passes(jobs, policy):
        plan, now_ns = step.plan, step.now_ns
        if plan.protected is None:
            continue
        names = [job.name for job, _ in plan.in_order()]
        behind = set(names[names.index(plan.protected) :])
        kept = [run for run in runs if run not in new or run.name not in behind]
        waits = step.view.queue[plan.protected]
        undelayed = could_start_at(waits, kept, policy, now_ns)
        assert undelayed == could_start_at(waits, runs, policy, now_ns) == plan.protected_until_ns


def easy(jobs: list[Coming], cpus: int) -> dict[str, int]:
    """Return when each job starts under EASY backfilling: written as the papers have it, for processors only."""
    start: dict[str, int] = {}
    by_name = {each.name: each for each in jobs}
    now = min(each.submit_at_ns for each in jobs)
    while len(start) < len(jobs):
        running = [name for name, began in start.items() if began + by_name[name].duration_ns > now]
        free = cpus - sum(by_name[name].spec.request.cpus for name in running)
        queue = sorted(
            (each for each in jobs if each.submit_at_ns <= now and each.name not in start),
            key=lambda each: (each.submit_at_ns, each.name),
        )
        while queue and queue[0].spec.request.cpus <= free:
            head = queue.pop(0)
            start[head.name] = now
            running.append(head.name)
            free -= head.spec.request.cpus
        if queue:
            need = queue[0].spec.request.cpus
            room, shadow = free, now
            ends = sorted((start[name] + by_name[name].spec.time_limit_ns, name) for name in running)
            while room < need:
                shadow = ends[0][0]
                while ends and ends[0][0] <= shadow:
                    room += by_name[ends.pop(0)[1]].spec.request.cpus
            extra = room - need
            for each in queue[1:]:
                width = each.spec.request.cpus
                in_time = now + each.spec.time_limit_ns <= shadow
                if width <= free and (in_time or width <= extra):
                    start[each.name] = now
                    free -= width
                    extra -= 0 if in_time else width
        times = [each.submit_at_ns for each in jobs]
        times += [began + by_name[name].duration_ns for name, began in start.items()]
        now = min([at for at in times if at > now], default=now)
    return start


WIDE = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4), st.integers(1, 20), st.integers(0, 10)), min_size=1,
                max_size=12)  # fmt: skip

WIDER = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 2, 5, 8]), st.integers(1, 20), st.integers(0, 10)),
    min_size=4,
    max_size=12,
)


def wide(drawn):
    """Return jobs of processors only."""
    return [
        Coming(f"j{n:02}", spec(cpus=cpus, time_limit_ns=(runs + slack) * S), NOW + at * S, runs * S)
        for n, (at, cpus, runs, slack) in enumerate(drawn)
    ]


@MANY
@given(WIDE)
def test_easy_is_easy_backfilling(drawn):
    """Without a threshold the planner makes the schedule of EASY backfilling, start by start."""
    jobs = wide(drawn)
    found = {each.name: each.started_at_ns for each in simulate(jobs, machine(4), Policy(), Discipline.EASY)}
    assert found == easy(jobs, 4)


@MANY
@given(WIDER)
def test_easy_is_easy_backfilling_with_room_beside_the_first(drawn):
    """The same where several jobs fit beside the one that is protected."""
    jobs = wide(drawn)
    found = {each.name: each.started_at_ns for each in simulate(jobs, machine(9), Policy(), Discipline.EASY)}
    assert found == easy(jobs, 9)


@MANY
@given(WIDE)
def test_fifo_lets_nobody_overtake(drawn):
    """Under `fifo` jobs start in the order in which they came."""
    found = sorted(simulate(wide(drawn), machine(4), Policy(), Discipline.FIFO), key=lambda each: each.name)
    found.sort(key=lambda each: each.submit_at_ns)
    starts = [each.started_at_ns for each in found]
    assert starts == sorted(starts)


def stream(limit_ns=None, wide_limit_ns=None, user="bob"):
    """Return a job of 4 GPUs among many of one GPU that come every 2.5 minutes and run for 10, for half a day."""
    big = Coming("big", spec(cpus=1, gpus=4, time_limit_ns=wide_limit_ns), NOW + S, 600 * S)
    small = spec(cpus=1, gpus=1, time_limit_ns=limit_ns)
    return [big, *(Coming(f"s{n:03}", small, NOW + n * 150 * S, 600 * S, user) for n in range(300))]


@pytest.mark.parametrize(("wide", "user", "at_most"), [(600, "user", 600), (7200, "bob", 1800), (7200, "user", 36_000)])
def test_a_large_job_in_a_stream_of_small_ones_starts(wide, user, at_most):
    """A 4-GPU job is not passed for ever by one-GPU jobs that keep 4 GPUs busy: in ten minutes its turn has come.

    Where it states more than it needs it has to wait longer; but not much longer than the eight hours of work by
    which the others may pass it.
    """
    found = {each.name: each for each in simulate(stream(600 * S, wide * S, user), machine(16, gpus=4), Policy())}
    assert found["big"].waited_ns <= at_most * S


@pytest.mark.parametrize("user", ["bob", "user"])
def test_a_large_job_starts_though_nobody_states_a_limit(user):
    """What guesses may hold back, a tenth of its wait, is enough for the 4-GPU job before the half day is over."""
    found = {each.name: each for each in simulate(stream(None, None, user), machine(16, gpus=4), Policy())}
    assert found["big"].waited_ns <= 7200 * S


def test_fair_share_lets_the_light_pass():
    """Of a long queue of one user another's job that came later takes the place of one that waited little longer."""
    jobs = [Coming(f"a{n}", spec(time_limit_ns=3600 * S), NOW + n * S, 3600 * S, "alice") for n in range(5)]
    jobs.append(Coming("b", spec(time_limit_ns=3600 * S), NOW + 1800 * S, 60 * S, "bob"))
    found = {each.name: each for each in simulate(jobs, machine(1), Policy())}
    assert found["b"].waited_ns == 1800 * S
    unfair = {each.name: each for each in simulate(jobs, machine(1), Policy(fair_share=False))}
    assert unfair["b"].waited_ns == (5 * 3600 - 1800) * S


def test_higher_priority_is_not_held_back():
    """Priority is absolute: a job of higher priority is not held back for a protected one."""
    jobs = [
        Coming("r", spec(cpus=3, time_limit_ns=3600 * S), NOW, 3600 * S),
        Coming("big", spec(cpus=4), NOW + S, S),
        Coming("low", spec(cpus=1, time_limit_ns=9000 * S), NOW + 2 * S, 9000 * S),
        Coming("high", spec(cpus=1, priority=11, time_limit_ns=9000 * S), NOW + 3 * S, 9000 * S),
    ]
    found = {each.name: each for each in simulate(jobs, machine(4), Policy())}
    assert found["high"].waited_ns == 0
    assert found["low"].started_at_ns > found["big"].started_at_ns > found["high"].started_at_ns


def test_runs_end_at_their_limit():
    """A job that would run longer than its limit ends there, as a timeout."""
    (found,) = simulate([Coming("j", spec(time_limit_ns=S), NOW, 5 * S)], machine(), Policy())
    assert (found.state, found.ended_at_ns) == (State.TIMEOUT, NOW + S)


def test_dependencies_and_instants_hold_in_the_simulator():
    """What a job waits for happens there too, and what never happens leaves it waiting."""
    jobs = [
        Coming("arr_0", spec(task=("arr", 0)), NOW, 5 * S),
        Coming("b", spec(depends_on="arr"), NOW, S),
        Coming("t", spec(time_limit_ns=S), NOW, 2 * S),
        Coming("c", spec(depends_on=Dependencies(failed=("t",))), NOW, S),
        Coming("d", spec(depends_on="t"), NOW, S),
        Coming("e", spec(start_after_ns=NOW + 9 * S), NOW, S),
        Coming("f", spec(depends_on="nobody"), NOW, S),
        Coming("late", spec(cpus=9, scheduling_timeout_ns=S), NOW, S),
    ]
    found = {each.name: each for each in simulate(jobs, machine(), Policy())}
    starts = {name: each.waited_ns and each.waited_ns // S for name, each in found.items()}
    assert starts == {"arr_0": 0, "b": 5, "t": 0, "c": 1, "d": None, "e": 9, "f": None, "late": None}
    assert [found[name].state for name in ("d", "f", "late")] == [State.CANCELLED, State.QUEUED, State.UNSCHEDULABLE]
    assert found["late"].ended_at_ns == NOW + S + 1
    assert found["f"].waited_ns is None


def test_reservations_hold_in_the_simulator():
    """A job waits for the end of a reservation, and the simulator wakes for it."""
    kept = Reservation("r", "alice", None, NOW, NOW + 60 * S, 1)
    jobs = [Coming("j", spec(gpus=1), NOW, S, "bob")]
    (found,) = simulate(jobs, machine(gpus=1), Policy(), reservations=[kept])
    assert found.started_at_ns == NOW + 60 * S


def test_nothing_comes_of_nothing():
    """Without jobs there are no outcomes."""
    assert list(simulate([], machine(), Policy())) == []
    assert under(Discipline.SPOOL, Policy()) == Policy()


def test_shared_gpus_are_packed_in_time():
    """Two jobs of half a card run together, a third follows when one has ended."""
    half = spec(gpus=1, gpu_memory_bytes=4 * GIB)
    jobs = [Coming(f"j{n}", half, NOW, (n + 1) * S) for n in range(3)]
    box = machine(gpus=gpus(1, total=8 * GIB))
    assert [each.started_at_ns - NOW for each in simulate(jobs, box, Policy())] == [0, 0, S]


def test_a_quota_holds_back_nobody_else():
    """A job that its user's quota keeps waiting holds nobody back."""
    policy = Policy(default_user_limits=Limits(max_running_cpus=2))
    jobs = [
        Coming("r", spec(cpus=2), NOW, 60 * S, "alice"),
        Coming("waits", spec(cpus=2), NOW + S, S, "alice"),
        Coming("other", spec(cpus=2), NOW + 2 * S, S, "bob"),
    ]
    found = {each.name: each.waited_ns for each in simulate(jobs, machine(4), policy)}
    assert found == {"r": 0, "waits": 59 * S, "other": 0}


def test_under_every_discipline_a_user_teaches_by_runs_with_a_limit():
    """How long a job without a limit is expected to run is learnt from all runs of its user, stated or not."""
    jobs = [
        Coming("stated", spec(time_limit_ns=3600 * S), NOW, 600 * S, "alice"),
        Coming("other", spec(time_limit_ns=3600 * S), NOW, 650 * S, "bob"),
        Coming("last", spec(), NOW + 700 * S, S, "bob"),
    ]
    for discipline in (Discipline.EASY, Discipline.LXF, Discipline.SPOOL):
        steps = Simulation(jobs, machine(4), under(discipline, Policy())).steps()
        views = [step.view for step in steps if isinstance(step, Pass)]
        assert views[-1].past.run_times.guess("bob", "x", spec().request).ns == (650 + 1) * S // 2
