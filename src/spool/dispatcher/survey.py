"""A look at the whole spool without the lock, for commands that plan and change nothing: `why`, `plan`.

It sees what a dispatcher that was started now would see, and the planner answers from it. The live dispatcher is not
asked: its last answer may be old, and there may be none.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

from spool.core import layout
from spool.core.errors import InvalidJob
from spool.core.layout import HELD, QUEUED, RUNNING
from spool.core.lifecycle import Verdict
from spool.core.model import Grant, Jid, Machine, Policy, Reservation, Running
from spool.core.plan import Plan, View, decide
from spool.dispatcher.arraynames import ArrayNames
from spool.dispatcher.booked import booked, local_zone
from spool.dispatcher.expand import new_array
from spool.dispatcher.finish import series_after
from spool.dispatcher.memory import Memory, recall
from spool.dispatcher.settings import Settings
from spool.dispatcher.start import spec_of_text
from spool.dispatcher.table import FRESH, INVALID, JobFile, Live, Series, Table, Wait, this_user
from spool.dispatcher.usage import Usage
from spool.dispatcher.world import Outcomes, World
from spool.executors import problem_with
from spool.formats import jobfile, journal
from spool.machine.identity import MachineProber
from spool.store.spool import Spool, read_bytes
from spool.store.whole import NotWhole, Seen, read_whole

_GPU_PATIENCE_S = 3.0
_LONG_PATIENCE_S = 12.0  # for who asks for the GPUs: longer than it takes to say that NVML hangs
_OVER = frozenset({Verdict.ENDED, Verdict.VOID})


@dataclass(frozen=True, slots=True)
class Survey:
    """What was seen at one moment, and what follows from it. `left_out` says why a job's file cannot be planned."""

    view: View
    plan: Plan
    policy: Policy
    now_ns: int
    table: Table
    config_problem: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)


def survey(spool: Spool, now_ns: int | None = None, *, with_gpus: bool = False) -> Survey:
    """Look at the spool and the machine, and decide what would happen at this moment.

    The GPUs are looked at where a job wants one, and *with_gpus* in any case.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    settings = Settings(spool)
    table = Table()
    table.executor_problem = cache(lambda name: problem_with(name or settings.executor))
    memory = recall(list(journal.parse(read_bytes(spool.layout.at(layout.JOURNAL), 1 << 31) or b"")))
    prober = MachineProber(frozenset(settings.config.other_hosts_gone))
    _see_arrays(spool, table, now_ns)
    _see_runs(spool, table, memory, prober)
    left_out = _see_files(spool, table, memory, settings, now_ns)
    left_out |= dict.fromkeys((*table.arrays, *table.array_files), "it is an array; its tasks are planned one by one")
    world = World(spool, table, settings, with_gpus=with_gpus)
    try:
        machine = _machine(world, now_ns, _LONG_PATIENCE_S if with_gpus else _GPU_PATIENCE_S)
    finally:
        world.close()
    policy = settings.config.policy
    view = View(
        machine=machine,
        queue=table.queue,
        held=table.held,
        running=tuple(live.view for live in table.live.values()),
        ended=Outcomes(spool, table.array_state),
        arrays=ArrayNames(spool, table),
        held_arrays=table.held_arrays,
        reservations=_reservations(spool, machine, now_ns),
        usage=Usage(spool, table).at(now_ns, policy),
        paused=spool.paused,
        zone=local_zone(),
    )
    return Survey(view, decide(view, now_ns, policy), policy, now_ns, table, settings.problem, left_out)


def _see_arrays(spool: Spool, table: Table, now_ns: int) -> None:
    """Put every array in progress into *table*."""
    running = set(spool.names(RUNNING))
    for name in running.union(spool.names(HELD)):
        run = spool.latest_run(name)
        record = spool.array(name, run) if run is not None else None
        if run is None or record is None or spool.result(name, run) is not None:
            continue
        spec = spec_of_text(spool.record(name, run, layout.SPEC_COPY), name)
        if spec is None:
            continue
        array = new_array(spec, record, 0, record.user or this_user())
        array.held_since_ns = None if name in running else now_ns
        with suppress(OSError):
            files = os.listdir(f"{spool.layout.metadir(name, run)}/{layout.TASKS}")
            array.unissued = {task for task in map(layout.job_of, files) if task is not None}
        table.arrays[name] = array


def _see_runs(spool: Spool, table: Table, memory: Memory, prober: MachineProber) -> None:
    """Put every run that is alive or not proved gone into *table*."""
    for name in {*spool.names(RUNNING), *(name for name, _ in memory.open)}:
        run = None if name in table.arrays else spool.latest_run(name)
        if run is None or spool.prove(name, run, prober).verdict in _OVER:
            continue
        record = spool.grant(name, run)
        text = spool.record(name, run, layout.SPEC_COPY)
        spec = spec_of_text(text, name) or spec_of_text(spool.job_text(RUNNING, name), name)
        if spec is None:
            continue
        grant = record.grant if record is not None else Grant(cpus=spec.request.cpus)
        at_ns = (record.granted_at_ns if record is not None else None) or time.time_ns()
        attempt = record.attempt if record is not None else 1
        user = (record.user if record is not None else None) or this_user()
        jid = spool.jid(name, run)
        stop = spool.stop(name, run)
        live = Live(
            name=name,
            run=run,
            spec=spec,
            grant=grant,
            user=user,
            wait=Wait((record.submitted_at_ns if record is not None else None) or at_ns),
            series=Series(attempt, record.requeues if record is not None else 0),
            inode=(record.inode if record is not None else None) or 0,
            started_at_ns=at_ns,
            started_boot_ns=0,
            executor=record.executor if record is not None else "process",
            view=Running(name, run, user, spec, grant, at_ns, attempt, stop is not None),
            jid=jid if isinstance(jid, Jid) else None,
            stop=stop,
        )
        table.add_run(table.job(name), live)


def _see_files(spool: Spool, table: Table, memory: Memory, settings: Settings, now_ns: int) -> dict[str, str]:
    """Put every waiting and held job into *table*; return why those that cannot be planned are left out."""
    left_out: dict[str, str] = {}
    ran_before = set(spool.jobs_with_runs())
    for place in (QUEUED, HELD):
        for name in spool.names(place):
            if name in table.arrays:
                continue
            seen = read_whole(spool.layout.job_file(place, name))
            if isinstance(seen, NotWhole):
                if seen not in (NotWhole.GONE, NotWhole.NOT_OURS):
                    left_out[name] = f"its file is {seen.value}"
                continue
            file = _file(spool, place, name, seen, settings)
            if file.spec is None:
                left_out[name] = file.problem or INVALID
            job = table.job(name)
            if place == QUEUED:
                job.queued = file
            else:
                job.held = file
            line = memory.waits.get(name)
            if line is not None:
                job.wait = Wait(line.arrived_at_ns, line.waited_ns_before, line.clock_at_ns)
                if name in ran_before:
                    job.series = _series(spool, name, line.arrived_at_ns)
            else:
                job.wait = Wait(min(seen.ctime_ns, now_ns), 0, now_ns if place == QUEUED else None)
            table.settle(job)
    return left_out


def _file(spool: Spool, place: str, name: str, seen: Seen, settings: Settings) -> JobFile:
    identity = (seen.inode, seen.mtime_ns, seen.size, seen.ctime_ns, seen.uid)
    directory = spool.layout.at(place)
    if any(os.path.lexists(f"{directory}/{mark}") for mark in layout.editor_marks(name)):
        return JobFile(*identity, None, "its file is open in an editor")
    try:
        spec = jobfile.parse(seen.data, name=name, default_kill_grace_ns=settings.config.kill_grace_ns)
    except InvalidJob as error:
        return JobFile(*identity, None, "; ".join(problem.message for problem in error.problems))
    return JobFile(*identity, spec)


def _series(spool: Spool, name: str, arrived_at_ns: int) -> Series:
    """Return how far the submission that waits has come."""
    run = spool.latest_run(name)
    result = spool.result(name, run) if run is not None else None
    if result is None or result.again is None or result.submitted_at_ns != arrived_at_ns:
        return FRESH
    stop = spool.stop(name, result.run)
    return series_after(result, stop.kind if stop is not None else None)


def machine_now(spool: Spool, now_ns: int) -> Machine:
    """Return the machine and its GPUs, as they are apart from all jobs."""
    world = World(spool, Table(), Settings(spool), with_gpus=True)
    try:
        return _machine(world, now_ns, _LONG_PATIENCE_S)
    finally:
        world.close()


def _machine(world: World, now_ns: int, patience_s: float) -> Machine:
    """Return the machine; NVML, asked for the first time, may take a while to answer."""
    machine = world.machine(now_ns)
    deadline = time.monotonic() + patience_s
    while machine.gpu_problem is not None and not machine.gpus and world.gpus is not None:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([world.gpus.fileno()], [], [], left)[0]:
            break
        world.take_gpu_answer()
        again = world.machine(now_ns)
        if again.gpu_problem == machine.gpu_problem and not again.gpus:
            break  # that is the answer
        machine = again
    return machine


def _reservations(spool: Spool, machine: Machine, now_ns: int) -> tuple[Reservation, ...]:
    """Return the reservations that hold or will hold: those that were written first, and what fits beside them."""
    return tuple(one.reservation for one in booked(spool, machine, now_ns) if one.stands and one.reservation)
