"""The planner alone: how long `decide` takes over very many waiting jobs of mixed shapes."""

from __future__ import annotations

import time
from random import Random

from spoolbench.figures import Samples, Size

RUNNING = 1000
GPUS = 64
CPUS = 4096
NOW_NS = 1_800_000_000 * 10**9
HOUR_NS = 3600 * 10**9
GIB = 1 << 30


def planner(size: Size) -> Samples:
    """Time whole passes, and how they grow. Nothing of the disk and no process is involved."""
    found: Samples = {}
    for metric, count in (("plan_small", size.deep // 100), ("plan_middle", size.deep // 10), ("plan_pass", size.deep)):
        samples = _passes(count, 2 if size.deep < 1000 else 5)
        found[metric] = samples.pop("pass")
    return found | samples


def _passes(count: int, times: int) -> Samples:
    from spool.core.model import Gpu, Machine, Policy, Running
    from spool.core.queue import WaitingQueue
    from spool.core.resources import Runs
    from spool.core.scheduler import View, decide

    random = Random(count)
    jobs = [_job(random, number) for number in range(count)]
    running = Runs(_run(random, number) for number in range(RUNNING))
    gpus = tuple(Gpu(_uuid(index), index, "NVIDIA H100 80GB HBM3", 80 << 30, 80 << 30) for index in range(GPUS))
    machine = Machine(CPUS, 8 << 40, 8 << 40, gpus=gpus)
    begun = time.perf_counter()
    queue = WaitingQueue(jobs)
    found: Samples = {"plan_index": [_ms_since(begun)], "pass": [], "plan_again": [], "plan_reasons": []}
    for _ in range(times):
        begun = time.perf_counter()
        plan = decide(View(machine=machine, queue=queue, running=running), NOW_NS, Policy())
        found["pass"].append(_ms_since(begun))
        begun = time.perf_counter()
        for job in jobs:
            str(plan.reason(job.name) or "")
        found["plan_reasons"].append(_ms_since(begun))
        # What a pass costs once all that fits has started: the state that a busy dispatcher is in.
        started = [queue[start.name] for start in plan.starts]
        for job, start in zip(started, plan.starts, strict=True):
            running.put(Running(job.name, 1, job.user, job.spec, start.grant, NOW_NS))
            queue.remove(job.name)
        begun = time.perf_counter()
        decide(View(machine=machine, queue=queue, running=running), NOW_NS, Policy())
        found["plan_again"].append(_ms_since(begun))
        for job in started:
            running.remove(job.name)
            queue.put(job)
    return found


def _ms_since(begun: float) -> float:
    return (time.perf_counter() - begun) * 1e3


def _uuid(index: int) -> str:
    return f"GPU-{index:08}"


def _job(random: Random, number: int):  # type: ignore[no-untyped-def]
    from spool.core.model import Request, Spec, Waiting

    gpus = random.choice((0, 0, 0, 1, 1, 2, 4, 8))
    request = Request(
        cpus=random.choice((1, 1, 2, 4, 8, 16)),
        memory_bytes=random.choice((None, GIB, 4 * GIB, 16 * GIB, 64 * GIB)),
        gpus=gpus,
        gpu_memory_bytes=random.choice((None, 10 * GIB, 20 * GIB, 40 * GIB)) if gpus else None,
    )
    limit_ns = random.choice((None, HOUR_NS // 6, HOUR_NS, 8 * HOUR_NS, 24 * HOUR_NS))
    priority = random.choice((10, 10, 10, 50, 100))
    spec = Spec("true", request=request, time_limit_ns=limit_ns, priority=priority)
    user = random.choice(("alice", "bob", "carol", "dave"))
    arrived_at_ns = NOW_NS - random.randrange(3600) * 10**9
    return Waiting(f"job{number}", spec, user, arrived_at_ns, clock_at_ns=arrived_at_ns)


def _run(random: Random, number: int):  # type: ignore[no-untyped-def]
    from spool.core.model import Grant, Request, Running, Spec

    on = (number % GPUS,) if number < GPUS else ()  # each has one run that shares it, the others want processors only
    has = Request(random.choice((1, 2, 4)), 2 * GIB, len(on), 30 * GIB if on else None)
    spec = Spec("true", request=has, time_limit_ns=random.choice((None, HOUR_NS, 24 * HOUR_NS)))
    user = random.choice(("alice", "bob", "carol", "dave"))
    grant = Grant(has.cpus, has.memory_bytes, tuple(map(_uuid, on)), on, gpu_memory_bytes=has.gpu_memory_bytes)
    return Running(f"run{number}", 1, user, spec, grant, NOW_NS - random.randrange(3600) * 10**9)
