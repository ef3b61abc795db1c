"""Which waiting jobs end without a start: those that waited too long, and those whose dependencies are impossible."""

from __future__ import annotations

from collections.abc import Set

from spool.core.dependencies import Names, Verdict, judge
from spool.core.model import State, Waiting
from spool.core.queue import WaitingQueue


def settle(
    queue: WaitingQueue,
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
    watch = queue.watch
    if watch:
        _judge(queue, names, ending)
    names.settled()
    return ending


def _judge(queue: WaitingQueue, names: Names, ending: list[str]) -> None:
    """Judge whoever depends on what has changed, and add to *ending* who ends by that."""
    watch = queue.watch
    todo = list(watch.doubtful | watch.doomed)
    for name in ending:
        todo += watch.dependents(name)
    todo.sort(reverse=True)  # the order decides nothing, and is the same for the same spool
    watch.doubtful = set()
    satisfied: dict[str, None] = {}
    while todo:
        name = todo.pop()
        if name in names.ended_now:
            if name not in watch.doomed:
                watch.doubtful.add(name)  # it was not judged, and is to be if nobody ends it
            continue
        job = watch.job(name)
        if job is None:
            continue
        judgement = watch.judged[name] = judge(job, names)
        watch.doomed.discard(name)
        watch.unseen.discard(name)
        if judgement.verdict is Verdict.SATISFIED:
            satisfied[name] = None
            continue
        satisfied.pop(name, None)
        if name in queue:
            queue.close_dependency(name)
        if judgement.unseen:
            watch.unseen.add(name)
        if judgement.verdict is Verdict.IMPOSSIBLE and job.spec.cancel_on_dependency_failure:
            watch.doomed.add(name)  # to be found again, as long as nobody has ended it
            names.end(name, State.CANCELLED)
            ending.append(name)
            todo += watch.dependents(name)
    for name in names.ended_now:  # whoever was judged by what this pass decides is judged by what comes of it
        watch.touch(name)
        watch.doubtful |= watch.dependents(name) & watch.judged.keys()
    queue.open_dependency(name for name in satisfied if name in queue)


def _is_held(job: Waiting, held_arrays: Set[str]) -> bool:
    return job.spec.task is not None and job.spec.task.array in held_arrays
