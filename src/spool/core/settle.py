"""Which waiting jobs end without a start: those that waited too long, and those whose dependencies are impossible."""

from __future__ import annotations

from collections.abc import Mapping, Set

from spool.core.dependencies import Names, Verdict, judge, referred, units
from spool.core.model import State, Waiting
from spool.core.queue import WaitingQueue


def settle(
    queue: WaitingQueue,
    held: Mapping[str, Waiting],
    names: Names,
    now_ns: int,
    *,
    paused: bool,
    held_arrays: Set[str] = frozenset(),
) -> list[str]:
    """Note in *names* every job that ends now, file the others by what their dependencies come to, return who ends.

    A job that ends takes with it those that depend on it, held ones too, and so on down the chain.
    """
    ending = [] if paused else queue.overdue(now_ns)
    if held_arrays:
        ending = [name for name in ending if not _is_held(queue[name], held_arrays)]
    for name in ending:
        names.end(name, State.UNSCHEDULABLE)
    held_watch = _held_watch(held)
    watch = queue.watch
    if not watch and not held_watch:
        return ending
    todo = list(watch.doubtful | watch.doomed)
    todo += [name for waiters in held_watch.values() for name in waiters]
    for name in ending:
        todo += _dependents(name, queue, held_watch)
    todo.sort(reverse=True)  # the order decides nothing, and is the same for the same spool
    watch.doubtful = set()
    satisfied: dict[str, None] = {}
    while todo:
        name = todo.pop()
        waits = name in queue
        if name in names.ended_now:
            if waits and name not in watch.doomed:
                watch.doubtful.add(name)  # it was not judged, and is to be if nobody ends it
            continue
        job = queue.get(name) or held.get(name)
        if job is None or job.spec.depends_on is None:
            continue
        judgement = judge(job, names)
        verdict = judgement.verdict
        if verdict is Verdict.SATISFIED:
            if waits:
                watch.doomed.discard(name)
                satisfied[name] = None
            continue
        if waits:
            queue.close_dependency(name)
            watch.doomed.discard(name)
            if judgement.unseen:
                watch.doubtful.add(name)  # its outcome may become known without another sign
        if verdict is Verdict.IMPOSSIBLE and job.spec.cancel_on_dependency_failure:
            if waits:
                watch.doomed.add(name)  # to be found again, as long as nobody has ended it
            names.end(name, State.CANCELLED)
            ending.append(name)
            todo += _dependents(name, queue, held_watch)
    queue.open_dependency(satisfied)
    return ending


def _is_held(job: Waiting, held_arrays: Set[str]) -> bool:
    return job.spec.task is not None and job.spec.task.array in held_arrays


def _held_watch(held: Mapping[str, Waiting]) -> dict[str, list[str]]:
    """Return which held jobs depend on which names."""
    watch: dict[str, list[str]] = {}
    for job in held.values():
        if job.spec.depends_on is not None:
            for name in referred(job):
                watch.setdefault(name, []).append(job.name)
    return watch


def _dependents(name: str, queue: WaitingQueue, held: Mapping[str, list[str]]) -> list[str]:
    found = list(queue.watch.dependents(name))
    for unit in units(name):
        found += held.get(unit, ())
    return found
