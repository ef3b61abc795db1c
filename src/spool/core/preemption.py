"""Which run is stopped so that a short job can start: preemption of jobs that allow it.

A preemptible run is stopped only if it is long, has run for a while, and the plan without it starts a waiting job that
states a short limit. A guess stops nothing. Its own job waits again at its place, and the short job goes ahead of it.
"""

from __future__ import annotations

from contextlib import ExitStack

from msgspec import Struct
from msgspec.structs import replace

from spool.core.model import Policy, Running, Waiting
from spool.core.playback import machine_left_by
from spool.core.scheduler import Plan, View, decide

_JOBS = 16  # short jobs that are looked at, the first in the order
_PLANS = 8  # plans that are made to find a run
_TIMES = 2  # a run that holds more than this many times what the job asks for leaves too much idle until it is back


class Preemption(Struct, frozen=True):
    """The run of the job *victim* is stopped, so that the job *winner* can start."""

    victim: str
    winner: str


def preemptible_at_ns(run: Running, expected_ns: int, policy: Policy) -> int | None:
    """Return from when on *run* may be preempted; None if it may not be.

    *expected_ns* is its expected run time. A run that exceeds it is long once it has run for long enough.
    """
    if not run.spec.preemptible or run.elsewhere is not None or run.stopping or run.suspended:
        return None
    times = [run.started_at_ns + policy.preempt_after_ns]
    if run.preempted_at_ns is not None:
        times.append(run.preempted_at_ns + policy.preempt_every_ns)
    if expected_ns < policy.preempt_long_ns:
        if run.spec.time_limit_ns is not None:
            return None
        times.append(run.counts_from_ns + policy.preempt_long_ns)
    return max(times)


def may_yield(view: View, now_ns: int, policy: Policy) -> list[Running]:
    """Return the runs that may be preempted now: of the lowest priority first, then the smallest, then the latest."""
    found = []
    for name in view.running.preemptible:
        run = view.running[name]
        from_ns = preemptible_at_ns(run, view.running.run_times.of_run(run).ns, policy)
        if from_ns is not None and from_ns <= now_ns:
            found.append(run)
    found.sort(
        key=lambda run: (run.spec.priority, len(run.grant.gpu_uuids), run.grant.cpus, -run.started_at_ns, run.name)
    )
    return found


def is_of_size(run: Running, job: Waiting) -> bool:
    """Whether *run* holds little enough to be preempted for *job*: in GPUs, and for a job without GPUs in CPUs."""
    request = job.request
    if request.gpus or run.grant.gpu_uuids:
        return len(run.grant.gpu_uuids) <= _TIMES * request.gpus
    return run.grant.cpus <= _TIMES * max(request.cpus, 1)


def preempt(plan: Plan) -> Preemption | None:
    """Return the run to stop now, None if there is none.

    Runs that are being preempted already count as gone, so nothing is stopped twice for the same job.
    """
    view, now_ns, policy = plan.view, plan.now_ns, plan.policy
    victims = [] if view.paused else may_yield(view, now_ns, policy)
    if not victims:
        return None
    leaving = [run for name in view.running.preemptible if (run := view.running[name]).preempted_for is not None]
    with ExitStack() as imagined:
        if leaving:
            view = _without(view, leaving, imagined)
            plan = decide(view, now_ns, policy)
        plans = 0
        for job in plan.short_in_line(policy.preempt_short_ns, _JOBS):
            for run in victims:
                if run.spec.priority > job.spec.priority or not is_of_size(run, job):
                    continue
                if not plan.fits_without(run, job):
                    continue
                with ExitStack() as trial:
                    then = decide(_without(view, [run], trial), now_ns, policy)
                if any(start.name == job.name for start in then.starts):
                    return Preemption(run.name, job.name)
                plans += 1
                if plans == _PLANS:
                    return None
    return None


def _without(view: View, runs: list[Running], imagined: ExitStack) -> View:
    """Return *view* as if these runs had left; until *imagined* ends, they are not in its index of runs.

    Their jobs count as held: the outcome of a run that is preempted decides nothing, and its job waits again behind the
    one that it was preempted for.
    """
    machine, held = view.machine, dict(view.held)
    for run in runs:
        imagined.enter_context(view.running.without(run.name))
        machine = machine_left_by(machine, run)
        arrived_at_ns = run.arrived_at_ns or run.started_at_ns
        held[run.name] = Waiting(run.name, run.spec, run.user, arrived_at_ns, sized=run.sized)
    return replace(view, machine=machine, held=held)
