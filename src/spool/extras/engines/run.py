"""The runs of a cluster: which go to it together, and when; what the engine reports of each, and what follows.

Tasks of one array with one request go together, as one array of the engine: a cluster takes a thousand of them as
quickly as one job. More of an array follows when few of its tasks are left that wait there. An engine that takes no
more for now is asked again when a run there has ended, with as many as have ended, or after a while.

An exit code of 0 proves the end; any other one may be due to the engine, whose word decides. An engine that does not
answer proves nothing.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from enum import Enum
from functools import lru_cache

from msgspec import Struct, field

from spool.core import layout
from spool.core.arrays import array_of
from spool.core.errors import SpoolError
from spool.core.lifecycle import EngineWord, Liveness, ends_unspoken
from spool.core.model import SECOND_NS, Jid, SignalTo
from spool.core.reasons import instant
from spool.executors.base import Engine, EngineEnd, Home, Launch, Usage
from spool.extras.engines.language import EngineArray, Language, Sighting
from spool.formats.run_records import parse_engine, parse_engine_end, parse_rc, render_engine

log = logging.getLogger(__name__)

QUICK_NS = 2 * SECOND_NS
"""The first look follows this long after news; without further news, each next one after twice as long."""

SPACING_NS = SECOND_NS
"""The least interval of looks; it is wider after many of them."""

GRACE_NS = 120 * SECOND_NS
"""An exit code may stay unseen this long after the end: caches of network file systems are up to a minute old."""

LOG_GRACE_NS = 30 * SECOND_NS
"""An engine that calls a run cut short has written so to the run's log; its words may stay unseen this long."""

_LOOKS, _LOOKS_WITHIN_NS, _WIDE_SPACING_NS = 6, 60 * SECOND_NS, 5 * SECOND_NS  # after this number in that time
_GHOSTS_NS = 300 * SECOND_NS  # a submission that was given up may still arrive this long
_SURE = 2  # answers without a job before it counts as absent
_AGAIN_NS = 30 * SECOND_NS  # a cancel without effect is repeated after this time
_PASSED_ON = frozenset({"HUP", "INT", "QUIT", "TERM", "USR1", "USR2"})  # by the wrapper, to its command
_MARK = re.compile(r"spool:([0-9a-f]+):([^:]+):([0-9]+)(?::([0-9]+))?(?![0-9:])", re.ASCII)
_BY_SIGNALS = frozenset({EngineWord.CANCELLED, EngineWord.TIMEOUT, EngineWord.PREEMPTED, EngineWord.NODE_LOST})
_VAGUE = frozenset({EngineWord.FAILED, EngineWord.FORGOTTEN})

_AT_ONCE = 8  # unanswered submissions
_BURST_S = 10  # seconds' worth of submissions that may be sent at once
_LINGER_NS, _LINGER_AT_MOST_NS = SECOND_NS // 10, SECOND_NS  # for more of an array: its tasks come in many passes
_ASK_AGAIN_NS = 30 * SECOND_NS  # a full engine is asked again after this time, though nothing has ended there
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
            self._again_ns = now_ns + (SECOND_NS if is_late else _ASK_AGAIN_NS)
        else:  # it may take fewer
            self._again_ns, self._most = self._again_ns or now_ns + _ASK_AGAIN_NS, number // 2
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


class Cluster(Engine):
    """What the runs of one engine share: their spool, what the engine has said of itself, and the orders to it.

    *clock* is monotonic.
    """

    tells = True

    def __init__(
        self, language: Language, home: Home | None, clock: Callable[[], int], gone: Callable[[], Collection[str]]
    ) -> None:
        self._home, self._gone = home, gone
        self.name, self.title = language.name, language.title
        self.language, self.now_ns = language, clock
        self.cluster: str | None = None  # the one that answers; None: no answer yet
        self.runs: dict[Key, ClusterRun] = {}
        self.handover = HandOver(language, self._siblings, clock)
        self._families: dict[str, dict[ClusterRun, None]] = {}  # the tasks of each array that are not queued any more
        self._cancels: dict[tuple[str | None, bool, str], dict[str, ClusterRun]] = {}  # to send
        self._looks: deque[int] = deque(maxlen=_LOOKS)  # when the last were requested
        self._look_at_ns = 0
        self._calm_ns = QUICK_NS  # before the next look, without news
        self._silent_since: float | None = None  # wall clock
        self._why_silent = ""
        self._ghosts_until_ns = clock() + _GHOSTS_NS
        self._back: dict[str, int] = {}  # nodes that answer again, and since when
        self.paused = False

    @property
    def home(self) -> Home:
        """The spool whose runs it has."""
        assert self._home is not None, "nothing is handed over or adopted without a spool"
        return self._home

    @property
    def silent(self) -> bool:
        """Whether it does not answer."""
        return self._silent_since is not None

    @property
    def away(self) -> str:
        """Why nothing is known of its jobs: it does not answer; "" if it does."""
        if self._silent_since is None:
            return ""
        since = instant(round(self._silent_since * SECOND_NS))
        return f"{self.title} has not answered since {since}: {self._why_silent}"

    @property
    def full(self) -> str:
        """Why it accepts no more for now, "" if it does."""
        return "spool paused" if self.paused else self.handover.full

    def family(self, job: str) -> dict[ClusterRun, None]:
        """Return the runs of the tasks that may be of the same array as *job*."""
        return self._families.setdefault(array_of(job), {})

    def _siblings(self, array: str) -> tuple[int, int]:
        there = [run for run in self._families.get(array, ()) if run.is_open]
        return len(there), sum(run.waits is not None for run in there)

    def drop(self, run: ClusterRun) -> None:
        """Forget a run that is over."""
        if self.runs.get(run.key) is run:
            del self.runs[run.key]
            if not self.handover.withdraw(run.key):
                self.handover.run_ended()
        self.family(run.key[0]).pop(run, None)
        if run.phase is Phase.ABSENT or run.waits_again:
            self._ghosts_until_ns = self.now_ns() + _GHOSTS_NS

    def order_cancel(self, run: ClusterRun, signal: str | None, *, only_waiting: bool = False) -> None:
        """Order that a run is cancelled, or receives a signal."""
        assert run.id is not None
        # An id known only from a record may be any job's: that job is ended only if it also has the name of this one.
        name = "" if run.is_ours else run.key[0]
        if name and self.language.array_of(run.id) is not None:
            name = array_of(name)
        self._cancels.setdefault((signal, only_waiting, name), {})[run.id] = run

    def order_signal(self, run: ClusterRun, signal: str) -> None:
        """Order that the wrapper of a run receives a signal. Raises OSError if it is told by a record."""
        if self.language.signals:
            self.order_cancel(run, signal)
        else:
            self.home.add_to_record(*run.key, layout.SIGNALS, f"{signal}\n".encode())

    def look_soon(self, after_ns: int) -> None:
        """Look after *after_ns* at the latest, because there is news; further apart after many looks."""
        now_ns, poll_ns = self.now_ns(), self.language.policy().poll_ns
        last_ns = self._looks[-1] if self._looks else now_ns
        at_ns = max(now_ns + min(after_ns, poll_ns), last_ns + self._spacing_ns(now_ns))
        self._calm_ns, self._look_at_ns = QUICK_NS, min(self._look_at_ns, at_ns)

    def _spacing_ns(self, now_ns: int) -> int:
        """Return the least interval of looks: it is wider after many of them."""
        is_much = len(self._looks) == _LOOKS and now_ns - self._looks[0] < _LOOKS_WITHIN_NS
        return min(_WIDE_SPACING_NS if is_much else SPACING_NS, self.language.policy().poll_ns)

    def records(self, run: ClusterRun) -> frozenset[str]:
        """Return the names of its records: listing its metadir makes network file systems refresh their caches."""
        try:
            return frozenset(os.listdir(f"{self.home.root}/{layout.JOBS}/{run.key[0]}/{run.key[1]}"))
        except FileNotFoundError:
            return frozenset()

    def last_words(self, run: ClusterRun) -> tuple[EngineWord, str] | None:
        """Return how the engine has ended a run, according to its `engine.log`. Raises OSError."""
        text = self.home.record_end(*run.key, layout.ENGINE_LOG)
        return self.language.last_words(text.decode("utf-8", "replace"))

    def is_back(self, node: str) -> bool:
        """Whether nothing of its old jobs is left on a lost node: it has been back for long enough, or was given up."""
        if not node or node in self._gone():
            return True
        # Its jobs go on until it has heard from the controller, and end no sooner than the grace there is over.
        return node in self._back and self.now_ns() >= self._back[node] + GRACE_NS


class Phase(Enum):
    """How far a run has come on its way to its engine."""

    QUEUED = "it is still to be handed over"
    SENT = "it is being handed over"
    UNSURE = "it is unknown whether it was handed over"
    KNOWN = "the engine has it, or had it"
    ABSENT = "the engine does not have it, and never had it"


class ClusterRun:
    """A run of a cluster, according to its engine and its records."""

    exit_status: None = None
    is_child = lingers = doubtful = by_others = False
    resists = ""
    holds_memory = True

    def __init__(self, engine: Cluster, key: Key, *, first_look: int = 0) -> None:
        self.engine = engine
        self.key = key
        self.jid: Jid | None = None
        self.id: str | None = None
        self.is_ours = False  # the engine has confirmed it: by its answer to the submission, or by the mark
        self.refusal: str | None = None
        self.ending: EngineEnd | None = None
        self.blocked = False  # it waits there for something other than room
        self.phase = Phase.UNSURE
        self.first_look = first_look  # that can report it
        self.foreign = ""  # the cluster that has it, if another one answers
        self.halted: str | None = None
        self.waits_again = False  # it has begun, and was requeued: the engine's job never begins
        self.alive_at_ns: int | None = None  # when the engine last reported that it had begun and not ended
        self._said = ""
        self._begun = False
        self._spoke = 0  # the first look that had it waiting though its wrapper had registered
        self._node = ""
        self._misses = 0  # looks in a row without it
        self._waited_ns: int | None = None  # when this dispatcher last knew that the engine had it waiting
        self._dropped = False  # the engine had it waiting just before, and then its array without it
        self._ended_ns = 0  # when its end was first seen
        self._forced = False
        self._explained = False
        self._exit: int | None = None  # its exit code, if its wrapper has reported that
        self._settled = False  # its exit code was seen, which a wrapper writes last
        self._stuck = ""  # the engine keeps it, and cannot start it: why
        self._recorded = False
        self._complained = False  # that its record cannot be written
        self._written_end: EngineEnd | None = None  # in its record, because it had not begun
        self._asked: tuple[str, int] = ("", 0)  # the kind of the last cancel, and its time

    @property
    def has_begun(self) -> bool:
        """Whether its engine or its wrapper has said so."""
        return self._begun or self.jid is not None

    @property
    def waits(self) -> str | None:
        """Why it has not begun yet, in its engine's words."""
        if self.has_begun:
            return None
        if self.engine.away:
            return self.engine.away
        if self.phase is Phase.KNOWN:
            return f"{self.engine.title}: {self._said}" if self._said else f"{self.engine.title} has it"
        return (self.phase is Phase.QUEUED and self.engine.full) or str(self.phase.value)

    @property
    def is_open(self) -> bool:
        """Whether it was handed over, or is just now, and has not ended as far as known."""
        return self.phase not in (Phase.QUEUED, Phase.ABSENT) and self.ending is None and self._exit is None

    @property
    def may_be_taken_back(self) -> bool:
        """Whether it was handed over, as far as known, and has not begun."""
        return self.is_open and self.phase is not Phase.SENT and not self.has_begun

    @property
    def engine_id(self) -> str | None:
        """The id of its job in the engine, which has accepted it; None: not known yet."""
        return self.id

    def identified(self, jid: Jid) -> None:
        """Record the wrapper's identity, and so which of the engine's jobs it is: a submission may arrive twice."""
        self.jid = jid
        engine, _, known = (jid.engine or "").partition(":")
        if engine == self.engine.name and known and known != "unknown" and known != self.id:
            is_sent = self.phase is Phase.SENT  # and begins before its submission is answered
            self._becomes(known)
            self.is_ours = is_sent

    def liveness(self) -> Liveness:
        """Return the state of the wrapper: alive until the engine says otherwise."""
        if self.phase is Phase.ABSENT:
            return Liveness.ABSENT
        if self._exit == 0 and not self._asked[0]:
            return Liveness.GONE  # whatever the engine says of it; one that was stopped is over when the engine says so
        if self.phase is not Phase.KNOWN or self.ending is None:
            return Liveness.ALIVE
        if self._settled:
            return Liveness.GONE
        found, ended = self.engine.records(self), self.id
        if self._look_for_jid() and self.id != ended:
            return Liveness.ALIVE  # the job that ended was the other one, which came too late
        ending = self._explain(self.ending, found)
        if ending is None or not (self._forced or self._is_settled(ending, found)):
            return Liveness.ALIVE
        is_told = self._forced or ending == self._written_end or layout.JID in found
        if not is_told and ends_unspoken(ending.word):
            # Its jid is taken next, which only says that it never begins: a later dispatcher needs the reason.
            self._put_record((ending.word, ending.said))
            self._written_end = ending
        return Liveness.GONE

    def watch(self) -> None:
        """Return None: no descriptor shows its end, only the engine's answers do."""

    def left_behind(self, exit_code: int | None = None) -> bool:
        """Return False: the engine ends leftovers on a node."""
        return False

    def signal(self, signal_name: str, to: SignalTo) -> int:
        """Let the wrapper pass a signal on to its command, whatever *to* says; return how many runs are signalled."""
        if self.id is None or self.ending is not None or self.foreign:
            return 0
        if signal_name not in _PASSED_ON:
            log.warning("job %s run %d: %s cannot be sent through %s", *self.key, signal_name, self.engine.title)
            return 0
        self.engine.order_signal(self, signal_name)
        return 1

    def usage(self) -> Usage:
        """Return nothing: only the engine's accounting knows, and not every cluster has one."""
        return Usage()

    def close(self) -> None:
        """Release the run."""
        self.engine.drop(self)

    # For its engine.

    @property
    def mark(self) -> str:
        """The mark that identifies its job in the engine."""
        return f"spool:{self.engine.home.identity()}:{self.key[0]}:{self.key[1]}"

    @property
    def lost_node(self) -> str:
        """The node that must come back before it is certain that nothing of the run is left; "" if none."""
        return self._node if self.ending is not None and self.ending.word is EngineWord.NODE_LOST else ""

    def told(self, record: str) -> bool:
        """Read a record that its wrapper has reported; return whether it can be seen. Raises OSError."""
        if record == layout.JID:
            return self._look_for_jid()
        if self._exit is None:
            self._exit = parse_rc(self.engine.home.record(*self.key, layout.RC) or b"")
            if self._exit or self._asked[0]:
                self.engine.look_soon(SECOND_NS)  # the engine may have ended it
        return self._exit is not None

    def submitted(self, answer: str | SpoolError | None, next_look: int) -> None:
        """Process the engine's answer to its submission."""
        self.first_look = next_look
        if self.id is not None:
            return  # its wrapper has registered first
        if isinstance(answer, str):
            self._becomes(answer)
            self.is_ours, self._waited_ns = True, self.engine.now_ns()
        elif answer is not None:
            self.phase, self.refusal = Phase.ABSENT, str(answer)
        else:
            self.phase = Phase.UNSURE

    def remember(self, *, is_void: bool = False) -> None:
        """Read what an earlier dispatcher has recorded of it.

        If that has taken its jid (*is_void*), it never begins: it had ended, or the engine did not have it.
        """
        data = self.engine.home.record(*self.key, layout.ENGINE) or b""
        record, end = parse_engine(data), parse_engine_end(data)
        if record is not None and record[0] == self.engine.name and self.id in (None, record[2]):
            self._written_end = EngineEnd(*end) if end is not None else None
            self.id, self.phase, self._recorded = record[2], Phase.KNOWN, True
            known = self.engine.cluster
            self.foreign = record[1] if known is not None and record[1] not in ("-", known) else ""
        if is_void:
            self.ending = self._written_end
            self.phase = Phase.ABSENT if self.ending is None else self.phase

    def observe(self, found: Sequence[Sighting], look: int, asked_ns: int, *, is_dropped: bool = False) -> bool:
        """Process the sightings of it in the answer to that look; return whether they are news.

        *is_dropped*: others of its array are there, and it is not.
        """
        before = (self.phase, self._said, self._begun, self.blocked)
        if len(found) > 1:
            with suppress(OSError):  # the next answer has both again
                self._look_for_jid()
        # Of the jobs with its mark it is that of its wrapper's jid, else that of the answer to its submission.
        living = [each for each in found if each.word is None]
        if self.id is None:
            own = living or found[-1:]
        else:
            own = [each for each in found if each.id == self.id] or (living if self.jid is None else [])
        if own:
            self._seen(own[0], look, asked_ns)
        else:
            self._missed(is_dropped=is_dropped)
        return self.ending is not None or before != (self.phase, self._said, self._begun, self.blocked)

    def _seen(self, seen: Sighting, look: int, asked_ns: int) -> None:
        title = self.engine.title
        if seen.id != self.id:
            log.info("job %s run %d: found again as %s %s", *self.key, title, seen.id)
            self._becomes(seen.id)
        elif not self._recorded:
            self._record()
        if not self.is_ours and (mark := mark_of(seen.mark)) is not None and mark.spool == self.engine.home.identity():
            self.is_ours = mark.key(seen.element) == self.key
        is_new = seen.said != self._said
        self._misses, self._said, self.foreign = 0, seen.said, ""
        self._begun, self._node = self._begun or seen.begun, seen.node or self._node
        self._waited_ns = asked_ns if seen.word is None and not seen.begun else None
        self.blocked = seen.blocked and not self.has_begun
        self.halted = title if seen.halted else ""
        if seen.begun or seen.word is not None:
            self._spoke = 0
        elif not self._spoke and (self._begun or is_new):
            with suppress(OSError):  # the next answer repeats it
                self._spoke = look if self._look_for_jid() and seen.id == self.id else 0
        self.waits_again = 0 < self._spoke < look  # its wrapper had registered before that: a run begins only once
        if seen.stuck and not self._stuck:
            self._stuck = f"{title} cannot start it: {seen.said}"
            self.engine.order_cancel(self, None)
        if seen.word is not None:
            self._ends(seen.word, f"says {seen.said}")
        elif self.waits_again:
            self._ends(EngineWord.FAILED, f"has put it back: {seen.said}")
        else:
            self.ending, self._ended_ns, self._settled = None, 0, False
            self.alive_at_ns = time.time_ns() if seen.begun else None

    def _missed(self, *, is_dropped: bool) -> None:
        self._misses += 1
        if self._misses == 1:  # was it waiting so shortly before that it would be listed had it begun and ended?
            known_ns, waited_ns, now_ns = self.engine.language.memory_ns, self._waited_ns, self.engine.now_ns()
            self._dropped = known_ns is not None and waited_ns is not None and now_ns - waited_ns < known_ns
        self._dropped &= is_dropped
        if self._misses < _SURE or self.foreign:
            return
        if self.id is None:
            self.phase = Phase.ABSENT
        elif self.ending is None and self._dropped and not self.has_begun:
            # It had not begun, or the engine would still list how it has ended.
            self._ends(EngineWord.CANCELLED, f"has taken {self.id} out of its array")
        elif self.ending is None:
            self._ends(EngineWord.FORGOTTEN, f"does not know job {self.id} any more")

    def press(self, *, kill: bool, now_ns: int) -> bool:
        """Continue to end it; return whether nothing of it is left."""
        if self.phase is Phase.QUEUED and self.engine.handover.withdraw(self.key):
            self.phase = Phase.ABSENT
        if self.ending is not None and kill:
            self._forced = True  # its exit code is no longer waited for
        if self.liveness() is not Liveness.ALIVE:
            return True
        if self.ending is not None or self.foreign or self.engine.silent:
            return False
        # A suspended job does not receive TERM there, and only administrators continue it; a cancel does both.
        how = "kill" if kill or self.halted else "ask" if self.has_begun else "withdraw"
        if not self._was_asked(how, now_ns):
            if self._look_for_jid() and how == "withdraw":
                how = "ask"
            if self.id is not None and not self._was_asked(how, now_ns):
                if how == "ask":
                    self.engine.order_signal(self, "TERM")
                else:
                    self.engine.order_cancel(self, None, only_waiting=how == "withdraw")
                self._asked = how, now_ns  # not before: a full disk may keep the order from its record
        return False

    def _was_asked(self, how: str, now_ns: int) -> bool:
        """Whether this was ordered, and need not be repeated yet; the wrapper is signalled once."""
        asked, at_ns = self._asked
        return asked == how and (how == "ask" or now_ns - at_ns < _AGAIN_NS)

    def _look_for_jid(self) -> bool:
        """Return whether the wrapper has registered. Raises OSError."""
        if self.jid is None and isinstance(found := self.engine.home.jid(*self.key), Jid):
            self.identified(found)
        return self.jid is not None

    def _becomes(self, job_id: str) -> None:
        """Record which of the engine's jobs it is, also on disk for the next dispatcher."""
        self.id, self.phase, self._recorded, self.is_ours = job_id, Phase.KNOWN, False, False
        self.ending, self._ended_ns, self._misses = None, 0, 0  # these facts are about another job
        self._settled, self._forced, self._asked, self._written_end = False, False, ("", 0), None
        self._record()

    def _record(self) -> None:
        """Write its id to its record; without that the next dispatcher finds it by its mark."""
        try:
            self._put_record()
            self._recorded, self._complained = True, False
        except OSError as error:  # the next look tries again
            if not self._complained:
                log.error("job %s run %d: cannot write its record %s: %s", *self.key, layout.ENGINE, error.strerror)
            self._complained = True

    def _put_record(self, end: tuple[EngineWord, str] | None = None) -> None:
        line = render_engine(self.engine.name, self.engine.cluster or "-", self.id or "-", end)
        self.engine.home.put_record(*self.key, layout.ENGINE, line)

    def _ends(self, word: EngineWord, how: str) -> None:
        """Record that the engine reports its end, for the first time or again."""
        if self._stuck and self.jid is None:
            self.phase, self.refusal = Phase.ABSENT, self._stuck
            return
        self._ended_ns = self._ended_ns or self.engine.now_ns()
        if self.ending is None or word is not EngineWord.FORGOTTEN:
            self.ending, self._explained = EngineEnd(word, f"{self.engine.title} {how}"), False

    def _explain(self, ending: EngineEnd, found: Collection[str]) -> EngineEnd | None:
        """Return how the engine has ended it: by its log, if the engine's word is too vague, or may be mistaken.

        An engine that was restarted may call a run cancelled that has ended by itself. If it has cut a run short, it
        says so in the log of the run. None: not known yet. Raises OSError.
        """
        if self._explained:
            return ending
        words, was_asked = self.engine.last_words(self), self._forced or self._asked[0]
        denies_it = self.engine.language.logs_ends and not was_asked and words is None
        is_void = words is not None and self.jid is None and words[0] is EngineWord.NOT_STARTED
        if words is not None and (is_void or ending.word in _VAGUE):
            ending = EngineEnd(words[0], f"{self.engine.title} wrote {words[1]!r}")
        elif ending.word in _VAGUE:
            ending = self._written_end or ending
        elif ending.word in _BY_SIGNALS and layout.RC in found and denies_it:
            if self.engine.now_ns() < self._ended_ns + LOG_GRACE_NS:
                return None
            ending = EngineEnd(EngineWord.FAILED, ending.said)
        self.ending, self._explained = ending, True
        return ending

    def _is_settled(self, end: EngineEnd, found: Collection[str]) -> bool:
        """Whether its records are certainly complete; *found* are their names. Raises OSError."""
        code = layout.RC in found and self.engine.home.record(*self.key, layout.RC)
        self._settled = bool(code) or layout.REFUSED in found
        if self._settled:
            return True
        if self.jid is None and layout.JID not in found and end.word is not EngineWord.COMPLETED:
            return True  # taking the jid settles whether that is so
        if end.word is EngineWord.NODE_LOST:
            return self.engine.is_back(self._node)
        unexplained = end.word in _VAGUE or end.word is EngineWord.COMPLETED
        return not unexplained or self.engine.now_ns() >= self._ended_ns + GRACE_NS


class Mark(Struct, frozen=True):
    """What identifies a job of the engine as one of spool's: a run, or the runs of the tasks of an array."""

    spool: str
    name: str  # of the job, or of the array
    run: int
    first: int | None  # the index of the task that is element 0

    def key(self, element: int | None) -> Key | None:
        """Return the job and the run of a job, or of an element; None: it has no element."""
        if self.first is None:
            return self.name, self.run
        return None if element is None else (f"{self.name}_{self.first + element}", self.run)


@lru_cache(64)  # the elements of an array have one
def mark_of(text: str) -> Mark | None:
    """Return the mark of a sighting, which may have an addition."""
    match = _MARK.match(text)
    if match is None:
        return None
    return Mark(match[1], match[2], int(match[3]), int(match[4]) if match[4] is not None else None)
