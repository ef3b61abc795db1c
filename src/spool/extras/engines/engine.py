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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from spool.core import layout
from spool.core.arrays import array_of
from spool.core.errors import InvalidRecord, SpoolError, StartRefused, cannot
from spool.core.lifecycle import Liveness
from spool.core.model import Jid, Machine
from spool.core.reasons import some_of
from spool.executors import why_not_imported
from spool.executors.base import Home, Launch
from spool.executors.process import reset_of_ignored_signals
from spool.extras.engines import GROUP
from spool.extras.engines.language import LANGUAGES, ArrayRefused, Language, Sighting, printable, settings_of
from spool.extras.engines.run import QUICK_NS, SPACING_NS, Cluster, ClusterRun, Phase, Portion, mark_of
from spool.formats.capabilities import loaded
from spool.formats.config import Config
from spool.formats.wrapper import Surroundings
from spool.machine.commands import Command, CommandEnd, CommandRunner
from spool.store.spool import Spool

log = logging.getLogger(__name__)

_NOTES_NS, _SELDOM_NOTES_NS = SPACING_NS // 4, 2 * SPACING_NS  # the interval of looks for notes
_LONGEST_PAUSE_NS = 60 * SPACING_NS  # before a silent engine is asked again
_IDS = 200  # of one cancel command


class ClusterEngine(Cluster):
    """The executor that submits wrappers to an engine that speaks *language*, and all its runs, of the spool *home*.

    Without a *home*, no run can be submitted or adopted. *clock* is monotonic; *gone* gives the nodes that the
    administrator has declared gone.
    """

    def __init__(
        self,
        language: Language,
        home: Home | None,
        runner: CommandRunner | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        gone: Callable[[], Collection[str]] = tuple,
    ) -> None:
        super().__init__(language, home, clock, gone)
        self._runner = runner or CommandRunner(lambda: language.environment(os.environ))
        self._answers: dict[int, Callable[[CommandEnd], object]] = {}  # the handler of each answer
        self._answered: deque[Callable[[], object]] = deque()  # handlers of the answers that have come
        self._news: dict[tuple[str, int], ClusterRun] = {}
        self._look_number = 0  # of the last requested look
        self._looking = False
        self._notes_at_ns = self._noted_ns = clock()  # the next look for notes; the last note
        self._unseen: dict[tuple[ClusterRun, str], None] = {}  # records that were reported, and cannot be seen yet
        self._pause_ns = 0  # before the next try while it is silent
        self._doubt = False  # a submission was not answered: the next one waits for a look
        self._sending = 0
        self._missing = False  # its commands, at the last lookup

    # As an executor.

    @property
    def engine(self) -> ClusterEngine:
        """Itself: it has the runs that it starts."""
        return self

    def unavailable(self) -> str | None:
        """Return why nothing can be submitted now: its programs are missing, or it does not answer."""
        why = self.language.missing()
        self._missing = why is not None
        return why or self.away or None

    def surroundings(self) -> Surroundings:
        """Return what the wrapper's text needs to know: a node provides the rest."""
        program, reset = reset_of_ignored_signals()
        there = self.language.surroundings
        return Surroundings(pid_namespace="-", host="-", env_program=program, reset=reset, engine=there)

    def start(self, launch: Launch) -> ClusterRun:
        """Queue a run for submission."""
        run = ClusterRun(self, (launch.job, launch.run))
        try:
            self.home.identity()
        except OSError as error:
            raise StartRefused(f"the spool has no name for {self.title}: {error.strerror}") from error
        run.phase = Phase.QUEUED
        self.handover.add(launch)
        self.runs[run.key] = run
        return run

    def close(self) -> None:
        """Stop the helper; it finishes its current command."""
        self._runner.close()

    def attach(self, spool_dir: str, job: str, run: int, *, read_only: bool) -> tuple[str, ...]:
        """Return the command that opens a shell beside the run's processes, on its node. Raises SpoolError."""
        jid = Spool(spool_dir).jid(job, run)
        why, remedy = f"it has not started in {self.title}", f"`spool why {job}` shows what it waits for"
        if read_only:
            why = f"a job in {self.title} has no terminal to watch"
            remedy = f"`spool log -f {job}` shows its output"
        elif isinstance(jid, Jid) and jid.engine is not None:
            if self.language.shell:
                return tuple(word.format(jid.engine.partition(":")[2]) for word in self.language.shell)
            why, remedy = f"it runs in {self.title}, and has no terminal", ""
        raise SpoolError(cannot("attach to", f"job {job}", why, remedy=remedy))

    def forget(self, spool_dir: str, runs: Iterable[tuple[str, int]]) -> None:
        """Do nothing: nothing is kept."""

    # As the place of its runs.

    def machine(self) -> Machine:
        """Return its resources: it finds room for every request."""
        policy = self.language.policy()
        is_asked = self.cluster is not None or self.silent
        limits_arrays = self.language.has_arrays and (not is_asked or self.language.array_width is not None)
        return Machine.of_an_engine(policy.max_in_flight, policy.max_pending, limits_arrays=limits_arrays)

    def keep_back(self, arrays: Collection[str], *, paused: bool) -> None:
        """Hand over nothing while *paused*, and take back the tasks of held *arrays* that have not begun."""
        self.paused = paused
        for array in arrays:
            self._take_back(run for run in self._families.get(array, ()) if run.may_be_taken_back)
            self._take_back(self.runs[key] for key in self.handover.of_array(array))

    def _take_back(self, runs: Iterable[ClusterRun]) -> None:
        """Declare runs absent: if their wrappers have not begun, they never will, and are cancelled as ghosts."""
        for run in list(runs):
            self.handover.withdraw(run.key)
            run.phase = Phase.ABSENT
            self._news[run.key] = run
            self.look_soon(QUICK_NS)

    def limit_array(self, array: str, at_once: int | None) -> None:
        """Apply a new limit of running tasks to an array, for the tasks there and for those that follow.

        The limit holds for one array there: what waits in others is taken back, and follows once there is room.
        """
        self.handover.limit(array, at_once)
        waiting: dict[str | None, list[ClusterRun]] = {}
        for run in self._families.get(array, ()):
            if run.is_open and run.id is not None:
                there = waiting.setdefault(self.language.array_of(run.id), [])
                there += [run] if run.may_be_taken_back else []
        kept = max(waiting, key=lambda job: (job is not None, len(waiting[job])), default=None)
        for job, runs in waiting.items():
            if at_once is not None and job != kept:
                self._take_back(runs)
            elif job is not None and (command := self.language.limit_array(job, at_once)) is not None:
                self._order(command)

    def adopt(self, job: str, run: int, jid: Jid | None) -> ClusterRun:
        """Return a run that another dispatcher has started, or was about to. Raises OSError."""
        known = self.runs.get((job, run))
        if known is None:
            known = ClusterRun(self, (job, run), first_look=self._look_number + 1)
            known.remember(is_void=self.home.jid(job, run) is Liveness.VOID)
            self.runs[job, run] = known
            self.family(job)[known] = None
        if jid is not None:
            known.identified(jid)
        return known

    def terminate(self, runs: Mapping[ClusterRun, bool]) -> Collection[ClusterRun]:
        """Ask each to end, once, and force those that are True; return those that are gone."""
        now_ns = self.now_ns()
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
        if self._news or self._answered or (self._cancels and not self.silent):
            times.append(self.now_ns())
        if not self._looking and self._wants_to_look():
            times.append(self._look_at_ns)
        if self.runs:
            times.append(self._notes_at_ns)
        if self._may_submit():
            times.append(self.handover.due_ns())
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
        if not self._looking and self._wants_to_look() and self.now_ns() >= self._look_at_ns:
            self._look()
        news, self._news = self._news, {}
        return list(news.values())

    def _order(self, command: Command, take: Callable[[CommandEnd], object] = lambda done: None) -> None:
        self._answers[self._runner.order(command)] = take

    # Submitting.

    def _may_submit(self) -> bool:
        return self.cluster is not None and not self.silent and not self._doubt and not self.paused

    def _submit(self) -> None:
        """Submit as many runs as allowed."""
        while self._may_submit() and (portion := self.handover.take(self._sending)) is not None:
            runs = [self.runs[key] for key in portion.keys]
            try:
                command = self._submission(portion, runs[0])
            except SpoolError as error:
                for run in runs:
                    run.submitted(error, 0)
                    self._news[run.key] = run
                continue
            self._sending += 1
            for run in runs:
                run.phase = Phase.SENT
                self.family(run.key[0])[run] = None
            self._order(command, partial(self._submitted, portion, runs))

    def _submission(self, portion: Portion, first: ClusterRun) -> Command:
        launch, array = portion.launches[0], portion.array
        if (spec := launch.spec) is not None and (options := spec.part("engines")):
            self.language.check_options(options)
        if array is None:
            return self.language.from_here(self.language.submit(launch, first.mark))
        mark = f"spool:{self.home.identity()}:{array.name}:{array.run}:{array.first}"
        return self.language.from_here(self.language.submit_array(launch, mark, array))

    def _submitted(self, portion: Portion, runs: Sequence[ClusterRun], done: CommandEnd) -> None:
        self._sending -= 1
        answer = self.language.submitted(done)
        if isinstance(answer, ArrayRefused):  # its limits were changed
            self._order(self.language.identify(), self.language.cluster)
        if isinstance(answer, StartRefused):
            self._is_full(portion, runs, str(answer))
            return
        if isinstance(answer, str):
            self.handover.accepted(portion)
            self.look_soon(QUICK_NS)
        elif answer is None:
            self._doubt, self._look_at_ns = True, min(self._look_at_ns, self.now_ns())
            log.warning("job %s run %d: %s has not answered: %s", *runs[0].key, self.title, _line(done))
        for at, run in enumerate(runs):
            known = answer
            if isinstance(answer, str) and portion.array is not None:
                known = self.language.element(answer, portion.array.elements[at])
            run.submitted(known, self._look_number + 1)
            if self.runs.get(run.key) is run:
                self._news[run.key] = run

    def _is_full(self, portion: Portion, runs: Sequence[ClusterRun], why: str) -> None:
        """Submit runs later, in their place: the engine has too many jobs."""
        was_full = bool(self.handover.full)
        wanted = [run for run in runs if self.runs.get(run.key) is run]
        self.handover.refused(portion, [run.key for run in wanted], why)
        if self.handover.full and not was_full:
            log.warning("%s", why)
        for run in wanted:
            run.phase = Phase.QUEUED
            self.family(run.key[0]).pop(run, None)
            self._news[run.key] = run

    # Notes.

    def _read_notes(self) -> None:
        """Read the notes of wrappers: which have begun, and which have ended."""
        now_ns = self.now_ns()
        if not self.runs or now_ns < self._notes_at_ns:
            return
        with suppress(OSError):  # the engine tells the same, later
            for job, number, record in self.home.notes():
                if record in (layout.JID, layout.RC) and (noted := self.runs.get((job, number))) is not None:
                    self._noted_ns, self._unseen[noted, record] = now_ns, None
        for run, record in list(self._unseen):
            with suppress(OSError, InvalidRecord):  # such as a stale answer of a network file system
                is_over = self.runs.get(run.key) is not run
                if is_over or run.told(record):
                    del self._unseen[run, record]
                    self._news |= {} if is_over else {run.key: run}
        pause_ns = (now_ns - self._noted_ns) // 20
        self._notes_at_ns = now_ns + min(max(pause_ns, _NOTES_NS), _SELDOM_NOTES_NS)

    # Looking.

    def _wants_to_look(self) -> bool:
        return bool(self.runs) or (not self._missing and (self.silent or self.now_ns() < self._ghosts_until_ns))

    def _look(self) -> None:
        self._looking = True
        if self.cluster is None:
            self._order(self.language.identify(), self._identified)
            return
        self._look_number += 1
        self._looks.append(self.now_ns())
        self._ask(list(self.language.look()), [])

    def _ask(self, commands: list[Command], answers: list[CommandEnd]) -> None:
        """Ask the questions of one look, one after the other: a job that ends meanwhile is in the later answer."""

        def take(done: CommandEnd) -> None:
            answers.append(done)
            if len(answers) < len(commands) and not self.language.is_silence(done):
                self._ask(commands, answers)
            else:
                self._looked(answers, is_whole=len(answers) == len(commands))

        self._order(commands[len(answers)], take)

    def _identified(self, done: CommandEnd) -> None:
        self._looking = False
        self.cluster = self.language.cluster(done)
        if self.cluster is None:
            self._is_silent(done)
            return
        for run in self.runs.values():
            if run.phase is Phase.KNOWN:
                run.remember()
            if run.foreign:
                log.error("job %s run %d is of cluster %s, and %s answers", *run.key, run.foreign, self.cluster)

    def _looked(self, answers: Sequence[CommandEnd], *, is_whole: bool) -> None:
        """Process one answer about all jobs."""
        self._looking = False
        seen = self.language.seen(answers) if is_whole else None
        if seen is None:
            self._is_silent(answers[-1])
            return
        if self.silent:
            log.info("%s answers again", self.title)
            self._tell_waiting()
        self._silent_since, self._pause_ns, self._doubt = None, 0, False
        now_ns, poll_ns = self.now_ns(), self.language.policy().poll_ns
        self._look_at_ns = now_ns + max(min(self._calm_ns, poll_ns), self._spacing_ns(now_ns))
        self._calm_ns = min(2 * self._calm_ns, poll_ns)
        by_key = self._observe(seen)
        with suppress(OSError):  # unreadable records are read after the next look
            self._end_ghosts(by_key)
        lost = {run.lost_node for run in self.runs.values() if run.lost_node}
        self._back = {node: since_ns for node, since_ns in self._back.items() if node in lost}
        if lost:
            self._order(self.language.nodes(sorted(lost)), self._nodes_seen)

    def _observe(self, seen: Iterable[Sighting]) -> dict[tuple[str, int], list[Sighting]]:
        """Let each run have the sightings of it; return the other ones of this spool, by their jobs and runs."""
        identity = self.home.identity()
        by_key: dict[tuple[str, int], list[Sighting]] = {}
        arrays: dict[str, tuple[str, int]] = {}  # listed ones: their names and runs
        unmarked: dict[str, Sighting] = {}  # their marks may have been changed
        for each in seen:
            if (mark := mark_of(each.mark)) is None:
                unmarked[each.id] = each
            elif mark.spool == identity:
                if (key := mark.key(each.element)) is not None:
                    by_key.setdefault(key, []).append(each)
                if mark.first is not None:
                    arrays[self.language.array_of(each.id) or each.id] = mark.name, mark.run
        for run in self.runs.values():
            found = by_key.pop(run.key, [])
            if run.id in unmarked and not run.foreign:
                found = [*found, unmarked[run.id]]
            array = self.language.array_of(run.id) if run.id is not None and not found else None
            is_dropped = array is not None and arrays.get(array) == (array_of(run.key[0]), run.key[1])
            expected = run.phase in (Phase.UNSURE, Phase.KNOWN) and run.first_look <= self._look_number
            if expected and run.observe(found, self._look_number, self._looks[-1], is_dropped=is_dropped):
                self._news[run.key] = run
        return by_key

    def _nodes_seen(self, done: CommandEnd) -> None:
        if (back := self.language.nodes_back(done)) is not None:
            now_ns = self.now_ns()
            self._back = {node: self._back.get(node, now_ns) for node in back}
            self._news |= {run.key: run for run in self.runs.values() if run.lost_node}

    def _is_silent(self, done: CommandEnd) -> None:
        """Conclude nothing, and ask again, less and less often."""
        before, self._why_silent = self.away, _line(done)
        if not self.silent:
            self._silent_since = time.time()
            log.error("%s does not answer: %s", self.title, self._why_silent)
        if self.away != before:
            self._tell_waiting()
        self.cluster = None  # another one may answer next
        self._pause_ns = min(max(2 * self._pause_ns, self.language.policy().poll_ns), _LONGEST_PAUSE_NS)
        self._look_at_ns = self.now_ns() + self._pause_ns

    def _tell_waiting(self) -> None:
        """Let the runs that have not begun have another reason."""
        self._news |= {run.key: run for run in self.runs.values() if run.waits is not None}

    def _end_ghosts(self, by_key: Mapping[tuple[str, int], Iterable[Sighting]]) -> None:
        """Cancel jobs that must never begin: late arrivals of runs that were given up, and requeued jobs."""
        ghosts = []
        for (job, run), found in by_key.items():
            living = [each for each in found if each.word is None]
            if living and layout.valid_name(job):
                is_void = self.home.jid(job, run) is Liveness.VOID  # or over, and its job waits again
                is_over = not is_void and self.home.record(job, run, layout.RESULT) is not None
                ghosts += [each.id for each in living if is_void or (is_over and not each.begun)]
        if ghosts:
            log.warning("%s: cancelling %s, which can never begin", self.title, some_of(ghosts))
            self._order(self.language.cancel(ghosts, None, only_waiting=False))

    # Cancelling.

    def _send_cancels(self) -> None:
        if self.silent:
            return
        cancels, self._cancels = self._cancels, {}
        for how, runs in cancels.items():
            signal, only_waiting, name = how
            for start in range(0, len(runs), _IDS):
                told = dict(list(runs.items())[start : start + _IDS])
                command = self.language.cancel(list(told), signal, only_waiting=only_waiting, name=name)
                self._order(command, partial(self._cancelled, how, told))

    def _cancelled(self, how: tuple[str | None, bool, str], told: Mapping[str, ClusterRun], done: CommandEnd) -> None:
        self.look_soon(SPACING_NS)
        again = {each: run for each, run in told.items() if run.ending is None and run.key in self.runs}
        if again and self.language.is_silence(done):
            self._cancels.setdefault(how, {}).update(again)
            self._is_silent(done)


class UnusableEngineError(SpoolError, ImportError):
    """An installed package offers an engine that cannot be loaded."""


def executor(name: str, config: Callable[[], Config], home: Home | None) -> ClusterEngine:
    """Return what hands runs to the engine of that name. Raises UnusableEngineError."""
    language = loaded(LANGUAGES[name])(config) if name in LANGUAGES else _of_a_package(name, config)
    return ClusterEngine(language, home, gone=lambda: config().other_hosts_gone)


def _of_a_package(name: str, config: Callable[[], Config]) -> Language:
    """Return the language of an engine that an installed package offers. Raises UnusableEngineError."""
    from importlib import metadata  # on this call, because it is slow to import

    (entry, *_) = metadata.entry_points(group=GROUP, name=name)
    where = entry.value
    try:
        language = entry.load()(lambda: settings_of(config()).get(name, {}))
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


def _line(done: CommandEnd) -> str:
    """Return what a command has said, on one line."""
    nothing = "it printed nothing" if not done.status else f"it printed nothing, exit status {done.status}"
    return printable(" ".join((done.err or done.out).split())) or nothing
