"""The runs of a cluster, for any engine: submitted once, found again, and never declared over because of silence.

An engine is three commands and a table (`language.py`): submit, look, cancel, and the meaning of its words. The rest is
here. Every job of the engine carries a mark, `spool:SPOOL:JOB:RUN`, so that it is found in the engine's own list if its
submission was not answered. A job that is missing from two answers of the engine was never submitted. The commands run
in a helper process, so nothing here waits.

Wrappers report their begin and end by notes in the spool, so the engine is asked only about what they cannot tell.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from spool.core import layout
from spool.core.arrays import array_of
from spool.core.errors import InvalidRecord, SpoolError, StartRefused, cannot
from spool.core.layout import Layout
from spool.core.lifecycle import EngineWord, Liveness
from spool.core.model import SECOND_NS, Jid, Machine
from spool.core.reasons import instant, some_of
from spool.executors import why_not_imported
from spool.executors.base import Home, Launch
from spool.executors.process import reset_of_ignored_signals
from spool.extras.engines import GROUP
from spool.extras.engines.handover import HandOver, Portion, Siblings
from spool.extras.engines.language import ArrayRefused, Language, Sighting, printable
from spool.extras.engines.run import GRACE_NS, ClusterRun, LookAnswer, Phase, mark_of
from spool.extras.engines.settings import settings_of
from spool.formats.capabilities import loaded
from spool.formats.config import Config
from spool.formats.freetext import MOST_READ
from spool.formats.run_records import parse_jid
from spool.formats.wrapper import Surroundings
from spool.machine.commands import Command, CommandEnd, CommandRunner

log = logging.getLogger(__name__)

QUICK_NS = 2 * SECOND_NS
"""The first look follows this long after news; without further news, each next one after twice as long."""

_LOOKS, _LOOKS_WITHIN_NS = 6, 60 * SECOND_NS  # after this number of looks in that time, the next are further apart
_SPACING_NS, _WIDE_SPACING_NS = SECOND_NS, 5 * SECOND_NS
_NOTES_NS, _SELDOM_NOTES_NS = SECOND_NS // 4, 2 * SECOND_NS  # the interval of looks for notes
_LONGEST_PAUSE_NS = 60 * SECOND_NS  # before a silent engine is asked again
_IDS = 200  # of one cancel command
_GHOSTS_NS = 300 * SECOND_NS  # a submission that was given up may still arrive this long


class ClusterEngine:
    """All runs of one engine. *clock* is monotonic."""

    tells = True

    def __init__(
        self,
        language: Language,
        home: Home | None,
        runner: CommandRunner | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._home = home
        self.name = language.name
        self.title = language.title
        self.cluster: str | None = None  # the one that answers; None: no answer yet
        self._language = language
        self._clock = clock
        self._runner = runner or CommandRunner()
        self._runs: dict[tuple[str, int], ClusterRun] = {}
        self._handover = HandOver(language, self._siblings, clock)
        self._families: dict[str, dict[ClusterRun, None]] = {}  # the tasks of each array that are not queued any more
        self._answers: dict[int, Callable[[CommandEnd], None]] = {}  # the handler of each answer
        self._answered: deque[Callable[[], None]] = deque()  # handlers of the answers that have come
        self._news: dict[tuple[str, int], ClusterRun] = {}
        self._cancels: dict[tuple[str | None, bool, str], dict[str, ClusterRun]] = {}  # to send
        self._looks = 0  # the number of requested looks
        self._looking = False
        self._look_at_ns = 0
        self._looked_at_ns: deque[int] = deque(maxlen=_LOOKS)
        self._calm_ns = QUICK_NS  # before the next look, without news
        self._notes_at_ns = self._noted_ns = clock()  # the next look for notes; the last note
        self._unseen: dict[tuple[ClusterRun, str], None] = {}  # records that were reported, and cannot be seen yet
        self._silent_since: float | None = None  # wall clock
        self._why_silent = ""
        self._pause_ns = 0  # before the next try while it is silent
        self._doubt = False  # a submission was not answered: the next one waits for a look
        self._ghosts_until_ns = clock() + _GHOSTS_NS
        self._back: dict[str, int] = {}  # nodes that answer again, and since when
        self._sending = 0
        self._missing = False  # its commands, at the last lookup
        self._paused = False

    @property
    def home(self) -> Home:
        """The spool whose runs it has."""
        assert self._home is not None, "nothing is handed over or adopted without a spool"
        return self._home

    # For the executor.

    def unavailable(self) -> str | None:
        """Return why nothing can be submitted now; None if it can."""
        why = self._language.missing()
        self._missing = why is not None
        if why is not None:
            return why
        return self.away or None

    def start(self, launch: Launch) -> ClusterRun:
        """Queue a run for submission."""
        run = ClusterRun(self, (launch.job, launch.run))
        try:
            self.home.identity()
        except OSError as error:
            raise StartRefused(f"the spool has no name for {self.title}: {error.strerror}") from error
        run.phase = Phase.QUEUED
        self._handover.add(launch)
        self._runs[run.key] = run
        return run

    def close(self) -> None:
        """Stop the helper; it finishes its current command."""
        self._runner.close()

    # For the dispatcher.

    @property
    def silent(self) -> bool:
        """Whether it does not answer."""
        return self._silent_since is not None

    def machine(self) -> Machine:
        """Return its resources: it finds room for every request."""
        policy = self._language.policy()
        is_asked = self.cluster is not None or self.silent
        limits_arrays = self._language.has_arrays and (not is_asked or self._language.array_width() is not None)
        return Machine.of_an_engine(policy.max_in_flight, policy.max_pending, limits_arrays=limits_arrays)

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
        return "spool paused" if self._paused else self._handover.full

    def keep_back(self, arrays: Collection[str], *, paused: bool) -> None:
        """Hand over nothing while *paused*, and take back the tasks of held *arrays* that have not begun."""
        self._paused = paused
        for array in arrays:
            self._take_back(run for run in self._families.get(array, ()) if run.may_be_taken_back)
            self._take_back(self._runs[key] for key in self._handover.of_array(array))

    def _take_back(self, runs: Iterable[ClusterRun]) -> None:
        """Declare runs absent: if their wrappers have not begun, they never will, and are cancelled as ghosts."""
        for run in list(runs):
            self._handover.withdraw(run.key)
            run.withdraw()
            self._news[run.key] = run
            self.look_soon(QUICK_NS)

    def limit_array(self, array: str, at_once: int | None) -> None:
        """Apply a new limit of running tasks to an array, for the tasks there and for those that follow.

        The limit holds for one array there: what waits in others is taken back, and follows once there is room.
        """
        self._handover.limit(array, at_once)
        there: dict[str | None, list[ClusterRun]] = {}
        for run in self._families.get(array, ()):
            if run.is_open and run.id is not None:
                there.setdefault(self._language.array_of(run.id), []).append(run)
        waiting = {job: [run for run in runs if run.may_be_taken_back] for job, runs in there.items()}
        kept = max(waiting, key=lambda job: (job is not None, len(waiting[job])), default=None)
        for job, runs in waiting.items():
            if at_once is not None and job != kept:
                self._take_back(runs)
            elif job is not None and (command := self._language.limit_array(job, at_once)) is not None:
                self._order(command, lambda done: None)

    def adopt(self, job: str, run: int, jid: Jid | None) -> ClusterRun:
        """Return a run that another dispatcher has started, or was about to. Raises OSError."""
        known = self._runs.get((job, run))
        if known is None:
            known = ClusterRun(self, (job, run), first_look=self._looks + 1)
            known.remember()
            if self.home.jid(job, run) is Liveness.VOID:
                known.was_given_up()
            self._runs[job, run] = known
            self._family(job)[known] = None
        if jid is not None:
            known.identified(jid)
        return known

    def terminate(self, runs: Mapping[ClusterRun, bool]) -> Collection[ClusterRun]:
        """Ask each to end, once, and force those that are True; return those that are gone."""
        now_ns = self._clock()
        return [run for run, kill in runs.items() if run.press(kill=kill, now_ns=now_ns)]

    def suspend(self, runs: Mapping[ClusterRun, bool]) -> Collection[ClusterRun]:
        """Leave them unchanged: no engine lets its users suspend jobs; it reports those that it suspends itself."""
        return list(runs)

    def fileno(self) -> int:
        """Return a descriptor that is readable when an answer has come."""
        return self._runner.fileno()

    def due_ns(self) -> int | None:
        """Return when it has work of its own to do."""
        times = [self._runner.due_ns()]
        if self._news or self._answered or (self._cancels and self._silent_since is None):
            times.append(self._clock())
        if not self._looking and self._wants_to_look():
            times.append(self._look_at_ns)
        if self._runs:
            times.append(self._notes_at_ns)
        if self._may_submit():
            times.append(self._handover.due_ns())
        return min((each for each in times if each is not None), default=None)

    def work(self) -> Collection[ClusterRun]:
        """Process the answers of the commands, and start further commands."""
        for number, done in self._runner.work():
            if (take := self._answers.pop(number, None)) is not None:
                self._answered.append(partial(take, done))
        while self._answered:  # an error with one does not lose the others: the next call goes on
            self._answered.popleft()()
        self._read_notes()
        self._submit()
        self._send_cancels()
        if not self._looking and self._wants_to_look() and self._clock() >= self._look_at_ns:
            self._look()
        news, self._news = self._news, {}
        return list(news.values())

    # For its runs.

    def forget(self, run: ClusterRun) -> None:
        """Drop a run that is over."""
        if self._runs.get(run.key) is run:
            del self._runs[run.key]
            if not self._handover.withdraw(run.key):
                self._handover.run_ended()
        self._family(run.key[0]).pop(run, None)
        for record in (layout.JID, layout.RC):
            self._unseen.pop((run, record), None)
        if run.phase is Phase.ABSENT or run.waits_again:
            self._ghosts_until_ns = self._clock() + _GHOSTS_NS

    def withdraw(self, run: ClusterRun) -> None:
        """Drop a run from the queue of submissions."""
        if self._handover.withdraw(run.key):
            run.withdraw()

    def order_cancel(self, run: ClusterRun, signal: str | None, *, only_waiting: bool = False) -> None:
        """Order that a run is cancelled, or receives a signal."""
        assert run.id is not None
        # An id known only from a record may be any job's: that job is ended only if it also has the name of this one.
        name = "" if run.is_ours else run.key[0]
        if name and self._language.array_of(run.id) is not None:
            name = array_of(name)
        self._cancels.setdefault((signal, only_waiting, name), {})[run.id] = run

    def order_signal(self, run: ClusterRun, signal: str) -> None:
        """Order that the wrapper of a run receives a signal. Raises OSError if it is told by a record."""
        if self._language.signals:
            self.order_cancel(run, signal)
        else:
            self.home.add_to_record(*run.key, layout.SIGNALS, f"{signal}\n".encode())

    def look_soon(self, after_ns: int) -> None:
        """Look after *after_ns* at the latest, because there is news; further apart after many looks."""
        now_ns, poll_ns = self._clock(), self._language.policy().poll_ns
        last_ns = self._looked_at_ns[-1] if self._looked_at_ns else now_ns
        at_ns = max(now_ns + min(after_ns, poll_ns), last_ns + self._spacing_ns(now_ns))
        self._calm_ns, self._look_at_ns = QUICK_NS, min(self._look_at_ns, at_ns)

    def _spacing_ns(self, now_ns: int) -> int:
        """Return the least interval of looks: it is wider after many of them."""
        is_much = len(self._looked_at_ns) == _LOOKS and now_ns - self._looked_at_ns[0] < _LOOKS_WITHIN_NS
        return min(_WIDE_SPACING_NS if is_much else _SPACING_NS, self._language.policy().poll_ns)

    @property
    def logs_ends(self) -> bool:
        """Whether it writes to the log of a run how it has ended it."""
        return self._language.logs_ends

    def now_ns(self) -> int:
        """Return the time of its clock."""
        return self._clock()

    def records(self, run: ClusterRun) -> frozenset[str]:
        """Return the names of its records: listing its metadir makes network file systems refresh their caches."""
        try:
            return frozenset(os.listdir(f"{self.home.root}/{layout.JOBS}/{run.key[0]}/{run.key[1]}"))
        except FileNotFoundError:
            return frozenset()

    def last_words(self, run: ClusterRun) -> tuple[EngineWord, str] | None:
        """Return how the engine has ended it, according to its `engine.log`."""
        text = self.home.record_end(*run.key, layout.ENGINE_LOG)
        return self._language.last_words(text.decode("utf-8", "replace"))

    def is_back(self, node: str) -> bool:
        """Whether nothing of its old jobs is left on a lost node: it has been back for long enough, or was given up."""
        if not node or node in self._language.nodes_given_up():
            return True
        # Its jobs go on until it has heard from the controller, and end no sooner than the grace there is over.
        return node in self._back and self._clock() >= self._back[node] + GRACE_NS

    # Submitting.

    def _may_submit(self) -> bool:
        return self.cluster is not None and self._silent_since is None and not self._doubt and not self._paused

    def _family(self, job: str) -> dict[ClusterRun, None]:
        """Return the runs of the tasks that may be of the same array as *job*."""
        return self._families.setdefault(array_of(job), {})

    def _siblings(self, array: str) -> Siblings:
        there = [run for run in self._families.get(array, ()) if run.is_open]
        return Siblings(len(there), sum(run.waits is not None for run in there))

    def _submit(self) -> None:
        """Submit as many runs as allowed."""
        while self._may_submit() and (portion := self._handover.take(self._sending)) is not None:
            runs = [self._runs[key] for key in portion.keys]
            try:
                command = self._command(portion, runs[0])
            except SpoolError as error:
                for run in runs:
                    run.submitted(error, 0)
                    self._news[run.key] = run
                continue
            self._sending += 1
            for run in runs:
                run.phase = Phase.SENT
                self._family(run.key[0])[run] = None
            self._order(command, partial(self._submitted, portion, runs))

    def _command(self, portion: Portion, first: ClusterRun) -> Command:
        if (spec := portion.launch.spec) is not None and (options := spec.part("engines")):
            self._language.check_options(options)
        if (array := portion.array) is None:
            return self._language.submit(portion.launch, first.mark)
        mark = f"spool:{self.home.identity()}:{array.name}:{array.run}:{array.first}"
        return self._language.submit_array(portion.launch, mark, array)

    def _submitted(self, portion: Portion, runs: Sequence[ClusterRun], done: CommandEnd) -> None:
        self._sending -= 1
        answer = self._language.submitted(done)
        if isinstance(answer, ArrayRefused):  # its limits were changed
            self._order(self._language.identify(), self._learned)
        if isinstance(answer, StartRefused):
            self._is_full(portion, runs, str(answer))
            return
        if isinstance(answer, str):
            self._handover.accepted(portion)
            self.look_soon(QUICK_NS)
        elif answer is None:
            self._doubt, self._look_at_ns = True, min(self._look_at_ns, self._clock())
            log.warning("job %s run %d: %s has not answered: %s", *runs[0].key, self.title, _line(done))
        for at, run in enumerate(runs):
            known = answer
            if isinstance(answer, str) and portion.array is not None:
                known = self._language.element(answer, portion.array.elements[at])
            run.submitted(known, self._looks + 1)
            if self._runs.get(run.key) is run:
                self._news[run.key] = run

    def _learned(self, done: CommandEnd) -> None:
        self._language.cluster(done)

    def _is_full(self, portion: Portion, runs: Sequence[ClusterRun], why: str) -> None:
        """Submit runs later, in their place: the engine has too many jobs."""
        was_full = bool(self._handover.full)
        wanted = [run for run in runs if self._runs.get(run.key) is run]
        self._handover.refused(portion, [run.key for run in wanted], why)
        if self._handover.full and not was_full:
            log.warning("%s", why)
        for run in wanted:
            run.phase = Phase.QUEUED
            self._family(run.key[0]).pop(run, None)
            self._news[run.key] = run

    # Notes.

    def _read_notes(self) -> None:
        """Read the notes of wrappers: which have begun, and which have ended."""
        now_ns = self._clock()
        if not self._runs or now_ns < self._notes_at_ns:
            return
        with suppress(OSError):  # the engine tells the same, later
            for job, number, record in self.home.notes():
                if (noted := self._runs.get((job, number))) is not None:
                    self._noted_ns, self._unseen[noted, record] = now_ns, None
        for run, record in list(self._unseen):
            with suppress(OSError, InvalidRecord):  # such as a stale answer of a network file system
                if run.told(record):
                    del self._unseen[run, record]
                    self._news[run.key] = run
        pause_ns = (now_ns - self._noted_ns) // 20
        self._notes_at_ns = now_ns + min(max(pause_ns, _NOTES_NS), _SELDOM_NOTES_NS)

    # Looking.

    def _wants_to_look(self) -> bool:
        if self._runs:
            return True
        return not self._missing and (self._silent_since is not None or self._clock() < self._ghosts_until_ns)

    def _look(self) -> None:
        self._looking = True
        if self.cluster is None:
            self._order(self._language.identify(), self._identified)
            return
        self._looks += 1
        self._looked_at_ns.append(self._clock())
        self._ask(self._looks, list(self._language.look()), [])

    def _ask(self, number: int, commands: list[Command], answers: list[CommandEnd]) -> None:
        """Ask the questions of one look, one after the other: a job that ends meanwhile is in the later answer."""

        def take(done: CommandEnd) -> None:
            answers.append(done)
            if len(answers) < len(commands) and not self._language.is_silence(done):
                self._ask(number, commands, answers)
            else:
                self._looked(number, answers)

        self._order(commands[len(answers)], take)

    def _identified(self, done: CommandEnd) -> None:
        self._looking = False
        self.cluster = self._language.cluster(done)
        if self.cluster is None:
            self._is_silent(done)
            return
        for run in self._runs.values():
            if run.phase is Phase.KNOWN:
                run.remember()
            if run.foreign:
                log.error("job %s run %d is of cluster %s, and %s answers", *run.key, run.foreign, self.cluster)

    def _looked(self, number: int, answers: Sequence[CommandEnd]) -> None:
        """Process one answer about all jobs."""
        self._looking = False
        is_whole = len(answers) == len(self._language.look())
        seen = self._language.seen(answers) if is_whole else None
        if seen is None:
            self._is_silent(answers[-1])
            return
        if self._silent_since is not None:
            log.info("%s answers again", self.title)
            self._tell_waiting()
        self._silent_since, self._pause_ns, self._doubt = None, 0, False
        now_ns, poll_ns, identity = self._clock(), self._language.policy().poll_ns, self.home.identity()
        self._look_at_ns = now_ns + max(min(self._calm_ns, poll_ns), self._spacing_ns(now_ns))
        self._calm_ns = min(2 * self._calm_ns, poll_ns)
        look = LookAnswer(number, self._looked_at_ns[-1], now_ns, self._language.memory_ns())
        by_key: dict[tuple[str, int], list[Sighting]] = {}
        arrays: dict[str, tuple[str, int]] = {}  # listed ones: their names and runs
        unmarked: dict[str, Sighting] = {}  # their marks may have been changed
        for each in seen:
            if (mark := mark_of(each)) is None:
                unmarked[each.id] = each
            elif mark.spool == identity:
                if (key := mark.key(each.element)) is not None:
                    by_key.setdefault(key, []).append(each)
                if mark.first is not None:
                    arrays[self._language.array_of(each.id) or each.id] = mark.name, mark.run
        for run in self._runs.values():
            found = by_key.pop(run.key, [])
            if run.id in unmarked and not run.foreign:
                found = [*found, unmarked[run.id]]
            expected = run.phase in (Phase.UNSURE, Phase.KNOWN) and run.first_look <= number
            if expected and run.observe(found, look, is_dropped=not found and self._has_its_array(run, arrays)):
                self._news[run.key] = run
        with suppress(OSError):  # unreadable records are read after the next look
            self._end_ghosts(by_key)
        lost = {run.lost_node for run in self._runs.values() if run.lost_node}
        self._back = {node: since_ns for node, since_ns in self._back.items() if node in lost}
        if lost:
            self._order(self._language.nodes(sorted(lost)), self._nodes_seen)

    def _has_its_array(self, run: ClusterRun, arrays: Mapping[str, tuple[str, int]]) -> bool:
        """Whether other elements of the array of *run* are listed."""
        array = self._language.array_of(run.id) if run.id is not None else None
        return array is not None and arrays.get(array) == (array_of(run.key[0]), run.key[1])

    def _nodes_seen(self, done: CommandEnd) -> None:
        back = self._language.nodes_back(done)
        if back is not None:
            now_ns = self._clock()
            self._back = {node: self._back.get(node, now_ns) for node in back}
            self._news |= {run.key: run for run in self._runs.values() if run.lost_node}

    def _is_silent(self, done: CommandEnd) -> None:
        """Conclude nothing, and ask again, less and less often."""
        before = self.away
        if self._silent_since is None:
            self._silent_since = time.time()
            log.error("%s does not answer: %s", self.title, _line(done))
        self._why_silent = _line(done)
        if self.away != before:
            self._tell_waiting()
        self.cluster = None  # another one may answer next
        self._pause_ns = min(max(2 * self._pause_ns, self._language.policy().poll_ns), _LONGEST_PAUSE_NS)
        self._look_at_ns = self._clock() + self._pause_ns

    def _tell_waiting(self) -> None:
        """Let the runs that have not begun have another reason."""
        self._news |= {run.key: run for run in self._runs.values() if run.waits is not None}

    def _end_ghosts(self, by_key: Mapping[tuple[str, int], Iterable[Sighting]]) -> None:
        """Cancel jobs that must never begin: late arrivals of runs that were given up, and requeued jobs."""
        ghosts = []
        for (job, run), found in by_key.items():
            living = [each for each in found if each.word is None]
            if living and layout.valid_name(job):
                ghosts += [each.id for each in living if self._never_begins(job, run, each)]
        if ghosts:
            log.warning("%s: cancelling %s, which can never begin", self.title, some_of(ghosts))
            self._order(self._language.cancel(ghosts, None, only_waiting=False), lambda done: None)

    def _never_begins(self, job: str, run: int, seen: Sighting) -> bool:
        """Whether a live job is of a run that was given up, or that is over and waits again."""
        if self.home.jid(job, run) is Liveness.VOID:
            return True
        return not seen.begun and self.home.record(job, run, layout.RESULT) is not None

    # Cancelling.

    def _send_cancels(self) -> None:
        if self._silent_since is not None:
            return
        for how, runs in self._cancels.items():
            signal, only_waiting, name = how
            for ids in _parts(list(runs), _IDS):
                told = {each: runs[each] for each in ids}
                command = self._language.cancel(ids, signal, only_waiting=only_waiting, name=name)
                self._order(command, lambda done, how=how, told=told: self._cancelled(how, told, done))  # type: ignore[misc]
        self._cancels = {}

    def _cancelled(self, how: tuple[str | None, bool, str], told: Mapping[str, ClusterRun], done: CommandEnd) -> None:
        self.look_soon(_SPACING_NS)
        if self._language.is_silence(done):
            again = {each: run for each, run in told.items() if run.ending is None and run.key in self._runs}
            if again:
                self._cancels.setdefault(how, {}).update(again)
                self._is_silent(done)

    def _order(self, command: Command, take: Callable[[CommandEnd], None]) -> None:
        self._answers[self._runner.order(command)] = take


class ClusterExecutor:
    """Submits wrappers to an engine that speaks *language*, for the spool *home*."""

    def __init__(self, language: Language, home: Home | None, runner: CommandRunner | None = None) -> None:
        """Create the executor. Without a *home*, no run can be submitted or adopted."""
        self.name = language.name
        runner = runner or CommandRunner(lambda: language.environment(os.environ))
        self.engine = ClusterEngine(language, home, runner)
        self._language = language

    def unavailable(self) -> str | None:
        """Return that its programs are missing, or that it does not answer."""
        return self.engine.unavailable()

    def surroundings(self) -> Surroundings:
        """Return what the wrapper's text needs to know: a node provides the rest."""
        program, reset = reset_of_ignored_signals()
        return Surroundings(
            pid_namespace="-", host="-", env_program=program, reset=reset, engine=self._language.surroundings
        )

    def start(self, launch: Launch) -> ClusterRun:
        """Queue the wrapper for submission."""
        return self.engine.start(launch)

    def close(self) -> None:
        """Stop the helper."""
        self.engine.close()

    def attach(self, spool_dir: str, job: str, run: int, *, read_only: bool) -> tuple[str, ...]:
        """Return the command that opens a shell beside the run's processes, on its node. Raises SpoolError."""
        what, title = f"job {job}", self.engine.title
        if read_only:
            remedy = f"`spool log -f {job}` shows its output"
            raise SpoolError(cannot("attach to", what, f"a job in {title} has no terminal to watch", remedy=remedy))
        jid_file = Layout(spool_dir).record(job, run, layout.JID)
        with suppress(FileNotFoundError), open(jid_file, "rb", opener=_unblocked) as record:
            jid = parse_jid(record.read(MOST_READ))
            if jid is not None and jid.engine is not None:
                command = self._language.attach(jid.engine.partition(":")[2])
                if command is None:
                    raise SpoolError(cannot("attach to", what, f"it runs in {title}, and has no terminal"))
                return command
        remedy = f"`spool why {job}` shows what it waits for"
        raise SpoolError(cannot("attach to", what, f"it has not started in {title}", remedy=remedy))

    def forget(self, spool_dir: str, runs: Iterable[tuple[str, int]]) -> None:
        """Do nothing: nothing is kept."""


class UnusableEngineError(SpoolError, ImportError):
    """An installed package offers an engine that cannot be loaded."""


def executor(name: str, config: Callable[[], Config], home: Home | None) -> ClusterExecutor:
    """Return what hands runs to the engine of that name. Raises UnusableEngineError."""
    if name in _LANGUAGES:
        return ClusterExecutor(loaded(_LANGUAGES[name])(config), home)
    return ClusterExecutor(_of_a_package(name, config), home)


_LANGUAGES = {
    "slurm": "spool.extras.engines.slurm:SlurmLanguage",
    "sge": "spool.extras.engines.sge:SgeLanguage",
}


def _of_a_package(name: str, config: Callable[[], Config]) -> Language:
    """Return the language of an engine that an installed package offers. Raises UnusableEngineError."""
    from importlib import metadata  # on this call, because it is slow to import

    (entry, *_) = metadata.entry_points(group=GROUP, name=name)
    where = entry.value
    try:
        language = entry.load()(lambda: settings_of(config()).of_packages.get(name, {}))
    except (ImportError, OSError) as error:
        raise UnusableEngineError(f"{where}: {why_not_imported(error)}") from error
    except (Exception, SystemExit) as error:
        raise UnusableEngineError(f"{where}: {type(error).__name__}: {error}") from error
    if not isinstance(language, Language):
        raise UnusableEngineError(f"{where} gives no {Language.__module__}.Language")
    for called in (language.name, language.surroundings.engine):
        if called != name:
            raise UnusableEngineError(f"{where} calls itself {called!r}, and its entry point {name!r}")
    return language


def _unblocked(path: str, flags: int) -> int:
    """Open a record without blocking: a job may have put a FIFO in its place."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _line(done: CommandEnd) -> str:
    """Return a command's message, on one line."""
    return printable(" ".join((done.err or done.out).split())) or f"exit status {done.status}"


def _parts(ids: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]
