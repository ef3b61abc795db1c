"""In which portions runs are handed over to an engine, and when.

Tasks of one array with one request go together, as one array of the engine: a cluster takes a thousand of them as
quickly as one job. More of an array follows when few of its tasks are left that wait there. An engine that takes no
more for now is asked again when a run there has ended, with as many as have ended, or after a while.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

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
    def keys(self) -> list[Key]:
        """The jobs and their runs."""
        return [(launch.job, launch.run) for launch in self.launches]


class _Group(Struct, eq=False):
    """Runs that may be handed over together: tasks of one array, or a single run."""

    array: str | None
    place: tuple[int, int]  # among all groups: by priority, then in their order
    since_ns: int
    last_ns: int
    at_once: int | None = None
    launches: dict[Key, Launch] = field(default_factory=dict)


class HandOver:
    """The runs that are still to be handed over. *clock* is monotonic.

    *siblings* says how many tasks of an array were handed over and have not ended, and how many of these wait there.
    """

    def __init__(
        self, language: Language, siblings: Callable[[str], tuple[int, int]], clock: Callable[[], int]
    ) -> None:
        self._language, self._siblings, self._clock = language, siblings, clock
        self.full = ""  # why the engine takes no more for now
        self._groups: dict[object, _Group] = {}
        self._names: dict[Key, object] = {}  # of the group of each run
        self._serial = 0
        self._tokens, self._tokens_at_ns = 0.0, clock()
        self._most: int | None = None  # the largest portion that may be tried; None: any
        self._again_ns: int | None = None  # when a full engine is asked again; None: it is not full
        self._freed_ns = -_FREED_NS  # when a run last ended there

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, launch: Launch, *, first: bool = False) -> None:
        """Queue a run, before or after all others of its priority."""
        spec, now_ns = launch.spec, self._clock()
        name: object = (launch.job, launch.run)
        array, task = None, spec.task if spec is not None else None
        priority = spec.priority if spec is not None else 0
        if spec is not None and task is not None and launch.job == f"{task.array}_{task.index}":
            array, request = task.array, (spec.request, spec.time_limit_ns, spec.preemptible, spec.parts)
            name = array, launch.run, priority, request
        self._serial += 1
        group = self._groups.get(name)
        if group is None:
            place = -priority, 0 if first else self._serial
            group = self._groups[name] = _Group(array, place, now_ns, now_ns)
        key = launch.job, launch.run
        group.launches[key], self._names[key] = launch, name
        group.last_ns, group.at_once = now_ns, launch.at_once

    def withdraw(self, key: Key) -> bool:
        """Drop a run; return whether it was still queued."""
        name = self._names.pop(key, None)
        if name is None:
            return False
        group = self._groups[name]
        del group.launches[key]
        if not group.launches:
            del self._groups[name]
        return True

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
        for group in sorted(self._groups.values(), key=lambda group: group.place):
            if (portion := self._portion(group, now_ns)) is not None:
                for key in portion.keys:
                    self.withdraw(key)
                self._tokens -= 1
                return portion
        return None

    def due_ns(self) -> int | None:
        """Return when :meth:`take` may have a portion without further news."""
        now_ns = self._clock()
        ready_ns = min(map(self._ready_ns, self._groups.values()), default=None)
        if ready_ns is None:
            return None
        self._refill(now_ns)
        if self._tokens < 1:
            per_second = self._language.policy().submit_per_second
            ready_ns = max(ready_ns, now_ns + int((1 - self._tokens) / per_second * 1e9))
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
                self.add(launch, first=True)

    def of_array(self, array: str) -> list[Key]:
        """Return the runs of an array that are still here."""
        return [key for group in self._groups.values() if group.array == array for key in group.launches]

    def limit(self, array: str, at_once: int | None) -> None:
        """Set how many tasks of an array may run at once, for those that are still here."""
        for group in self._groups.values():
            if group.array == array:
                group.at_once = at_once

    def run_ended(self) -> None:
        """Process the news that a run there has ended, so that there is room for another."""
        self._freed_ns = self._clock()
        if self._again_ns is not None and self._most is not None:
            self._most += 1

    def _refill(self, now_ns: int) -> None:
        per_second = self._language.policy().submit_per_second
        earned = (now_ns - self._tokens_at_ns) / 1e9 * per_second
        self._tokens, self._tokens_at_ns = min(per_second * _BURST_S, self._tokens + earned), now_ns

    def _ready_ns(self, group: _Group) -> int:
        if group.array is None or self._language.array_width is None:
            return group.since_ns
        return min(group.last_ns + _LINGER_NS, group.since_ns + _LINGER_AT_MOST_NS)

    def _portion(self, group: _Group, now_ns: int) -> Portion | None:
        """Return what can be handed over of *group* now."""
        width, at_once = self._language.array_width, group.at_once
        alive, waiting = self._siblings(group.array) if group.array is not None else (0, 0)
        if group.array is None or width is None:
            is_full = at_once is not None and group.array is not None and alive >= at_once
            return None if is_full else Portion((next(iter(group.launches.values())),))
        if now_ns < self._ready_ns(group):
            return None
        by_index = {
            launch.spec.task.index: launch for launch in group.launches.values() if launch.spec and launch.spec.task
        }
        first = next(iter(by_index)) // width * width
        elements = sorted(index - first for index in by_index if first <= index < first + width)
        if at_once is not None and alive:  # these are in an array with a limit of its own
            elements, at_once = elements[: max(0, at_once - alive)], None
        elif waiting > self._language.policy().max_in_flight // _FEW and elements[-1] != width - 1:
            return None  # a portion that may still grow, and would only wait there
        elements = elements[: self._most][: self._language.array_tasks]
        if not elements:
            return None
        chosen = [by_index[first + element] for element in elements]
        if len(chosen) == 1:
            return Portion((chosen[0],))
        jobs = f"{chosen[0].spool_dir}/{layout.JOBS}"
        limit = at_once if at_once is not None and at_once < len(elements) else None
        return Portion(tuple(chosen), EngineArray(group.array, chosen[0].run, first, width, elements, jobs, limit))
