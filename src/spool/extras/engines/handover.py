"""In which portions runs are handed over to an engine, and when.

Tasks of one array with one request go together, as one array of the engine: a cluster takes a thousand of them as
quickly as one job. More of an array follows when few of its tasks are left that wait there. An engine that takes no
more for now is asked again when a run there has ended, with as many as have ended, or after a while.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from msgspec import Struct, field

from spool.core import layout
from spool.core.model import SECOND_NS
from spool.executors.base import Launch
from spool.extras.engines.language import EngineArray, Language

_AT_ONCE = 8  # unanswered submissions
_BURST_S = 10  # seconds' worth of submissions that may be sent at once
_LINGER_NS, _LINGER_AT_MOST_NS = SECOND_NS // 10, SECOND_NS  # for more of an array: its tasks come in many passes
_AGAIN_NS = 30 * SECOND_NS  # a full engine is asked again after this time, though nothing has ended there
_FREED_NS = 5 * SECOND_NS  # an engine may count a job for this long after its end
_FEW = 8  # more of an array follows when no more of it waits there than one FEWth of the runs allowed

Key = tuple[str, int]


class Portion(Struct, frozen=True):
    """The runs of one submission: one, or many tasks of an array."""

    launches: tuple[Launch, ...]
    array: EngineArray | None = None

    @property
    def launch(self) -> Launch:
        """The first, which stands for all."""
        return self.launches[0]

    @property
    def keys(self) -> list[Key]:
        """The jobs and their runs."""
        return [(launch.job, launch.run) for launch in self.launches]


class Siblings(Struct, frozen=True):
    """The tasks of an array that were handed over and have not ended."""

    alive: int = 0
    waiting: int = 0  # of these


class _Group(Struct, eq=False):
    """Runs that may be handed over together: tasks of one array, or a single run."""

    array: str | None
    at_once: int | None
    since_ns: int
    last_ns: int
    serial: int
    launches: dict[Key, Launch] = field(default_factory=dict)


class HandOver:
    """The runs that are still to be handed over. *clock* is monotonic; *siblings* counts the tasks of an array."""

    def __init__(
        self,
        language: Language,
        siblings: Callable[[str], Siblings],
        clock: Callable[[], int],
    ) -> None:
        self._policy, self._width, self._array_tasks = language.policy, language.array_width, language.array_tasks
        self._siblings, self._clock = siblings, clock
        self.full = ""  # why the engine takes no more for now
        self._groups: dict[int, dict[object, _Group]] = {}  # by priority
        self._serial = 0
        self._tokens, self._tokens_at_ns = 0.0, clock()
        self._most: int | None = None  # the largest portion that may be tried; None: any
        self._again_ns: int | None = None  # when a full engine is asked again; None: it is not full
        self._freed_ns = -_FREED_NS  # when a run last ended there

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, launch: Launch) -> None:
        """Queue a run, after all others of its priority."""
        self._serial += 1
        self._put(launch, self._serial)

    def withdraw(self, key: Key) -> bool:
        """Drop a run; return whether it was still queued."""
        for priority, groups in self._groups.items():
            for name, group in groups.items():
                if group.launches.pop(key, None) is not None:
                    self._drop_empty(priority, name, group)
                    return True
        return False

    def take(self, sending: int) -> Portion | None:
        """Return the next portion to submit, while *sending* others are unanswered; None: not now."""
        now_ns = self._clock()
        self._refill(now_ns)
        if self._tokens < 1 or sending >= (_AT_ONCE if self._again_ns is None else 1):
            return None
        if self._again_ns is not None and self._most == 0:
            if now_ns < self._again_ns:
                return None
            self._most = 1
        for priority in sorted(self._groups, reverse=True):
            for name, group in self._groups[priority].items():
                portion = self._portion(group, now_ns)
                if portion is not None:
                    for key in portion.keys:
                        del group.launches[key]
                    self._drop_empty(priority, name, group)
                    self._tokens -= 1
                    return portion
        return None

    def due_ns(self) -> int | None:
        """Return when :meth:`take` may have a portion without further news."""
        now_ns = self._clock()
        ready_ns = min((self._ready_ns(group) for group in self._all()), default=None)
        if ready_ns is None:
            return None
        self._refill(now_ns)
        if self._tokens < 1:
            ready_ns = max(ready_ns, now_ns + int((1 - self._tokens) / self._policy().submit_per_second * 1e9))
        if self._again_ns is not None and self._most == 0:
            ready_ns = max(ready_ns, self._again_ns)
        return ready_ns

    def accepted(self, portion: Portion) -> None:
        """Process the news that the engine has taken a portion."""
        if self._again_ns is None:
            return
        if self._most is not None and self._clock() >= self._again_ns:
            self._again_ns = self._most = None  # not because a run has ended: the limit was raised
        elif self._most is not None:
            self._most = max(self._most - len(portion.launches), 0)
        self.full = ""

    def refused(self, portion: Portion, wanted: Collection[Key], why: str) -> None:
        """Queue the runs of *portion* again, in their place, as far as *wanted*: the engine takes no more now."""
        number, now_ns = len(portion.launches), self._clock()
        if number == 1:
            self.full, self._most = why, 0
            is_late = now_ns < self._freed_ns + _FREED_NS
            self._again_ns = now_ns + (SECOND_NS if is_late else _AGAIN_NS)
        else:  # it may take fewer
            self._again_ns, self._most = self._again_ns or now_ns + _AGAIN_NS, number // 2
        for launch in portion.launches:
            if (launch.job, launch.run) in wanted:
                self._put(launch, 0)
        self._groups = {
            priority: dict(sorted(groups.items(), key=lambda pair: pair[1].serial))
            for priority, groups in self._groups.items()
        }

    def of_array(self, array: str) -> list[Key]:
        """Return the runs of an array that are still here."""
        return [key for group in self._all() if group.array == array for key in group.launches]

    def limit(self, array: str, at_once: int | None) -> None:
        """Set how many tasks of an array may run at once, for those that are still here."""
        for group in self._all():
            if group.array == array:
                group.at_once = at_once

    def run_ended(self) -> None:
        """Process the news that a run there has ended, so that there is room for another."""
        self._freed_ns = self._clock()
        if self._again_ns is not None and self._most is not None:
            self._most += 1

    def _put(self, launch: Launch, serial: int) -> None:
        spec, now_ns = launch.spec, self._clock()
        name: object = (launch.job, launch.run)
        array, priority = None, 0
        if spec is not None:
            priority, task = spec.priority, spec.task
            if task is not None and launch.job == f"{task.array}_{task.index}":
                array, request = task.array, (spec.request, spec.time_limit_ns, spec.preemptible, spec.parts)
                name = array, launch.run, request
        groups = self._groups.setdefault(priority, {})
        group = groups.get(name)
        if group is None:
            group = groups[name] = _Group(array, launch.at_once, now_ns, now_ns, serial)
        group.launches[launch.job, launch.run] = launch
        group.last_ns, group.at_once = now_ns, launch.at_once

    def _drop_empty(self, priority: int, name: object, group: _Group) -> None:
        if not group.launches:
            del self._groups[priority][name]
            if not self._groups[priority]:
                del self._groups[priority]

    def _all(self) -> Iterator[_Group]:
        return (group for groups in self._groups.values() for group in groups.values())

    def _refill(self, now_ns: int) -> None:
        per_second = self._policy().submit_per_second
        earned = (now_ns - self._tokens_at_ns) / 1e9 * per_second
        self._tokens, self._tokens_at_ns = min(per_second * _BURST_S, self._tokens + earned), now_ns

    def _ready_ns(self, group: _Group) -> int:
        if group.array is None or self._width() is None:
            return group.since_ns
        return min(group.last_ns + _LINGER_NS, group.since_ns + _LINGER_AT_MOST_NS)

    def _portion(self, group: _Group, now_ns: int) -> Portion | None:
        """Return what can be handed over of *group* now."""
        width = self._width()
        if group.array is None:
            return Portion((next(iter(group.launches.values())),))
        siblings, at_once = self._siblings(group.array), group.at_once
        if width is None:
            is_full = at_once is not None and siblings.alive >= at_once
            return None if is_full else Portion((next(iter(group.launches.values())),))
        if now_ns < self._ready_ns(group):
            return None
        by_index = {
            launch.spec.task.index: launch for launch in group.launches.values() if launch.spec and launch.spec.task
        }
        first = next(iter(by_index)) // width * width
        elements = sorted(index - first for index in by_index if first <= index < first + width)
        if at_once is not None and siblings.alive:  # these are in an array with a limit of its own
            elements, at_once = elements[: max(0, at_once - siblings.alive)], None
        elif siblings.waiting > self._policy().max_in_flight // _FEW and elements[-1] != width - 1:
            return None  # a portion that may still grow, and would only wait there
        elements = elements[: self._most][: self._array_tasks()]
        if not elements:
            return None
        chosen = [by_index[first + element] for element in elements]
        if len(chosen) == 1:
            return Portion((chosen[0],))
        jobs = f"{chosen[0].spool_dir}/{layout.JOBS}"
        limit = at_once if at_once is not None and at_once < len(elements) else None
        return Portion(tuple(chosen), EngineArray(group.array, chosen[0].run, first, width, elements, jobs, limit))
