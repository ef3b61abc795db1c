"""The runs of a cluster, for any engine: submitted once, found again, and never declared over because of silence.

An engine is three commands and a table (`language.py`): submit, look, cancel, and the meaning of its words. The rest is
here. Every job of the engine carries a mark, `spool:SPOOL:JOB:RUN`, so that it is found in the engine's own list if its
submission was not answered. A job that is missing from two answers of the engine was never submitted. The commands run
in a helper process, so nothing here waits.

Wrappers report their begin and end by notes in the spool, so the engine is asked only about what they cannot tell. An
exit code of 0 proves the end; any other one may be due to the engine, whose word decides.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial

from spool.core import layout
from spool.core.errors import InvalidRecord, SpoolError, StartRefused, cannot
from spool.core.lifecycle import EngineWord, Liveness, ends_unspoken
from spool.core.model import SECOND_NS, Jid, Machine, SignalTo
from spool.core.reasons import instant
from spool.executors.base import Engine, EngineEnd, Executor, Launch
from spool.executors.process import reset_of_ignored_signals
from spool.extras.commands import Command, CommandEnd, CommandRunner
from spool.extras.engines.language import LANGUAGES, Language, Sighting, what_it_said
from spool.formats.capabilities import loaded
from spool.formats.config import Config
from spool.formats.run_records import Usage, parse_engine, parse_engine_end, parse_rc, render_engine
from spool.formats.wrapper import Surroundings
from spool.store.locked_spool import LockedSpool
from spool.store.spool import Spool

log = logging.getLogger(__name__)

GRACE_NS = 120 * SECOND_NS
"""An exit code may stay unseen this long after the end: caches of network file systems are up to a minute old."""

LOG_GRACE_NS = 30 * SECOND_NS
"""An engine that calls a run cut short has written so to the run's log; its words may stay unseen this long."""

_SOON_NS, _SPACING_NS = 2 * SECOND_NS, 5 * SECOND_NS  # a look after news, and the least interval of looks
_NOTES_NS = SECOND_NS // 2  # the interval of looks for notes
_FULL_NS, _FREED_NS = 30 * SECOND_NS, 2 * SECOND_NS  # a full engine is asked again, and sooner after an end there
_SURE = 2  # answers without a job before it counts as absent
_AGAIN_NS = 30 * SECOND_NS  # a cancel without effect is repeated after this time
_PASSED_ON = frozenset({"HUP", "INT", "QUIT", "TERM", "USR1", "USR2"})  # by the wrapper, to its command
_MARK = re.compile(r"spool:([0-9a-f]+):([^:]+):([0-9]+)(?![0-9:])", re.ASCII)
_BY_SIGNALS = frozenset({EngineWord.CANCELLED, EngineWord.TIMEOUT, EngineWord.PREEMPTED, EngineWord.NODE_LOST})
_VAGUE = frozenset({EngineWord.FAILED, EngineWord.FORGOTTEN})

Key = tuple[str, int]


class ClusterEngine(Engine, Executor):
    """The executor that submits wrappers to an engine that speaks *language*, and all its runs, of the spool *home*.

    Without a *home*, no run can be submitted or adopted. *clock* is monotonic; *gone* gives the nodes that the
    administrator has declared gone.
    """

    tells = True

    def __init__(
        self,
        language: Language,
        home: LockedSpool | None,
        runner: CommandRunner | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        gone: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.name, self.title = language.name, language.title
        self.language, self.now_ns = language, clock
        self.engine: ClusterEngine = self  # it has the runs that it starts
        self.cluster: str | None = None  # the one that answers; None: no answer yet
        self.runs: dict[Key, ClusterRun] = {}
        self.full = ""  # why it accepts no more for now
        self.away = ""  # why nothing is known of its jobs: it does not answer
        self._home, self._gone = home, gone
        self._runner = runner or CommandRunner(lambda: language.environment(os.environ))
        self._news: dict[Key, ClusterRun] = {}
        self._queue: dict[Key, Launch] = {}  # the runs that are still to be handed over
        self._submit_at_ns = clock()  # the next one of these
        self._sending = False
        self._doubt = False  # a submission was not answered: the next one waits for a look
        self._cancels: dict[str | None, dict[str, ClusterRun]] = {}  # to send, by their signals; None ends them
        self._look_number = 0  # of the last requested look
        self._looked_ns = clock() - _SPACING_NS  # when it was requested
        self._look_at_ns = 0
        self._looking = False
        self._notes_at_ns = clock()
        self._unseen: dict[tuple[ClusterRun, str], None] = {}  # records that were reported, and cannot be seen yet
        self._since = ""  # when it was first silent
        self._back: dict[str, int] = {}  # nodes that answer again, and since when

    # As an executor.

    def unavailable(self) -> str | None:
        """Return why nothing can be submitted now: its programs are missing, or it does not answer."""
        return self.language.missing() or self.away or None

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
        self.runs[run.key], self._queue[run.key] = run, launch
        return run

    def close(self) -> None:
        """Stop the helper; it finishes its current command."""
        self._runner.close()

    def attach(self, spool_dir: str, job: str, run: int, *, read_only: bool) -> tuple[str, ...]:
        """Return the command that opens a shell beside the run's processes, on its node. Raises SpoolError."""
        jid = Spool(spool_dir).jid(job, run)
        there = jid.engine.partition(":")[2] if isinstance(jid, Jid) and jid.engine is not None else None
        if there is not None and self.language.shell and not read_only:
            return tuple(word.format(there) for word in self.language.shell)
        why, remedy = "has no terminal to watch", f"`spool log -f {job}` shows its output"
        if there is None:
            why, remedy = "has not started", f"`spool why {job}` shows what it waits for"
        raise SpoolError(cannot("attach to", f"job {job}", f"it {why} in {self.title}", remedy=remedy))

    # As the place of its runs.

    @property
    def home(self) -> LockedSpool:
        """The spool whose runs it has."""
        assert self._home is not None, "nothing is handed over or adopted without a spool"
        return self._home

    @property
    def silent(self) -> bool:
        """Whether it does not answer."""
        return bool(self.away)

    def machine(self) -> Machine:
        """Return its resources: it finds room for every request."""
        policy = self.language.policy()
        return Machine.of_an_engine(policy.max_in_flight, policy.max_pending)

    def adopt(self, job: str, run: int, jid: Jid | None) -> ClusterRun:
        """Return a run that another dispatcher has started, or was about to. Raises OSError."""
        known = self.runs.get((job, run))
        if known is None:
            known = ClusterRun(self, (job, run), first_look=self._look_number + 1)
            known.remember(is_void=self.home.jid(job, run) is Liveness.VOID)
            self.runs[job, run] = known
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
        times = [self._runner.due_ns(), self.now_ns() if self._news else None, *(at_ns for at_ns, _ in self._duties())]
        return min((each for each in times if each is not None), default=None)

    def work(self) -> Collection[ClusterRun]:
        """Process the answers of the commands, and start further commands."""
        self._runner.work()
        for at_ns, do in self._duties():  # each may change what is left to do
            if self.now_ns() >= at_ns:
                do()
        news, self._news = self._news, {}
        return list(news.values())

    def _duties(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Yield the next steps, each with the time at which it is due."""
        if self.runs:
            yield self._notes_at_ns, self._read_notes
        if self._queue and self.cluster is not None and not (self.silent or self._doubt or self._sending):
            yield self._submit_at_ns, self._submit
        if self._cancels and not self.silent:
            yield self.now_ns(), self._send_cancels
        if not self._looking and (self.runs or self.silent):
            yield self._look_at_ns, self._look

    # Submitting.

    def _submit(self) -> None:
        """Submit the first run of the highest priority of those that can be submitted at all."""
        while self._queue:
            key = max(self._queue, key=lambda key: spec.priority if (spec := self._queue[key].spec) is not None else 0)
            run, launch = self.runs[key], self._queue.pop(key)
            try:
                if launch.spec is not None and (options := launch.spec.part("engines")):
                    self.language.check_options(options)
                command = self.language.from_here(self.language.submit(launch, run.mark))
            except SpoolError as error:
                run.submitted(error, 0)
                self._news[key] = run
                continue
            run.phase, self._sending = Phase.SENT, True
            self._submit_at_ns = self.now_ns() + self.language.submit_ns
            self._runner.order(command, partial(self._submitted, run, launch))
            return

    def _submitted(self, run: ClusterRun, launch: Launch, done: CommandEnd) -> None:
        self._sending = False
        answer, is_wanted = self.language.submitted(done), self.runs.get(run.key) is run
        if is_wanted:
            self._news[run.key] = run
        if isinstance(answer, StartRefused):
            if not self.full:
                log.warning("%s", answer)
            self.full, self._submit_at_ns = str(answer), self.now_ns() + _FULL_NS
            if is_wanted:
                run.phase, self._queue = Phase.QUEUED, {run.key: launch, **self._queue}
            return
        self.full = ""
        if isinstance(answer, str):
            self.look_soon()
        elif answer is None:
            self._doubt, self._look_at_ns = True, min(self._look_at_ns, self.now_ns())
            log.warning("job %s run %d: %s has not answered: %s", *run.key, self.title, what_it_said(done))
        run.submitted(answer, self._look_number + 1)

    def withdraw(self, key: Key) -> bool:
        """Hand a run over no more; return whether it was still to be."""
        return self._queue.pop(key, None) is not None

    def drop(self, run: ClusterRun) -> None:
        """Forget a run that is over."""
        if self.runs.get(run.key) is run:
            del self.runs[run.key]
            if not self.withdraw(run.key) and self.full:
                self._submit_at_ns = min(self._submit_at_ns, self.now_ns() + _FREED_NS)

    # Notes.

    def _read_notes(self) -> None:
        """Read the notes of wrappers: which have begun, and which have ended."""
        self._notes_at_ns = self.now_ns() + _NOTES_NS
        with suppress(OSError):  # the engine tells the same, later
            for job, number, record in self.home.notes():
                if record in (layout.JID, layout.RC) and (noted := self.runs.get((job, number))) is not None:
                    self._unseen[noted, record] = None
        for run, record in list(self._unseen):
            with suppress(OSError, InvalidRecord):  # such as a stale answer of a network file system
                is_over = self.runs.get(run.key) is not run
                if is_over or run.told(record):
                    del self._unseen[run, record]
                    self._news |= {} if is_over else {run.key: run}

    # Looking.

    def look_soon(self) -> None:
        """Look soon, because there is news; further apart while there is always news."""
        look_ns = self.language.look_ns
        at_ns = max(self.now_ns() + min(_SOON_NS, look_ns), self._looked_ns + min(_SPACING_NS, look_ns))
        self._look_at_ns = min(self._look_at_ns, at_ns)

    def _look(self) -> None:
        self._looking = True
        if self.cluster is None:
            self._runner.order(self.language.identify(), self._identified)
            return
        self._look_number += 1
        self._looked_ns = self.now_ns()
        self._ask(list(self.language.look()), [])

    def _ask(self, commands: list[Command], answers: list[CommandEnd]) -> None:
        """Ask the questions of one look, one after the other: a job that ends meanwhile is in the later answer."""

        def take(done: CommandEnd) -> None:
            answers.append(done)
            if len(answers) < len(commands) and not self.language.is_silence(done):
                self._ask(commands, answers)
            else:
                self._looked(answers, is_whole=len(answers) == len(commands))

        self._runner.order(commands[len(answers)], take)

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
        self._looking = False
        seen = self.language.seen(answers) if is_whole else None
        if seen is None:
            self._is_silent(answers[-1])
            return
        if self.silent:
            log.info("%s answers again", self.title)
            self._tell_waiting()
        self.away, self._doubt = "", False
        self._look_at_ns = self.now_ns() + self.language.look_ns
        self._observe(seen)
        lost = {run.lost_node for run in self.runs.values() if run.lost_node}
        self._back = {node: since_ns for node, since_ns in self._back.items() if node in lost}
        if lost:
            self._runner.order(self.language.nodes(sorted(lost)), self._nodes_seen)

    def _observe(self, seen: Iterable[Sighting]) -> None:
        """Let each run have the sightings of it. What was given up and arrives late never begins: its jid is void."""
        by_key: dict[Key, list[Sighting]] = {}
        unmarked: dict[str, Sighting] = {}  # their marks may have been changed
        for each in seen:
            if (match := _MARK.match(each.mark)) is None:
                unmarked[each.id] = each
            elif match[1] == self.home.identity():
                by_key.setdefault((match[2], int(match[3])), []).append(each)
        for run in self.runs.values():
            found = by_key.get(run.key, [])
            if run.engine_id in unmarked and not run.foreign:
                found = [*found, unmarked[run.engine_id]]
            expected = run.phase in (Phase.UNSURE, Phase.KNOWN) and run.first_look <= self._look_number
            if expected and run.observe(found):
                self._news[run.key] = run

    def _nodes_seen(self, done: CommandEnd) -> None:
        if (back := self.language.nodes_back(done)) is not None:
            now_ns = self.now_ns()
            self._back = {node: self._back.get(node, now_ns) for node in back}
            self._news |= {run.key: run for run in self.runs.values() if run.lost_node}

    def is_back(self, node: str) -> bool:
        """Whether nothing of its old jobs is left on a lost node: it has been back for long enough, or was given up."""
        if not node or node in self._gone():
            return True
        # Its jobs go on until it has heard from the controller, and end no sooner than the grace there is over.
        return node in self._back and self.now_ns() >= self._back[node] + GRACE_NS

    def _is_silent(self, done: CommandEnd) -> None:
        """Conclude nothing, and ask again."""
        why, before = what_it_said(done), self.away
        if not self.silent:
            self._since = instant(time.time_ns())
            log.error("%s does not answer: %s", self.title, why)
        self.away = f"{self.title} has not answered since {self._since}: {why}"
        if self.away != before:
            self._tell_waiting()
        self.cluster = None  # another one may answer next
        self._look_at_ns = self.now_ns() + self.language.look_ns

    def _tell_waiting(self) -> None:
        """Let the runs that have not begun have another reason."""
        self._news |= {run.key: run for run in self.runs.values() if run.waits is not None}

    # Cancelling.

    def order_cancel(self, run: ClusterRun, signal: str | None = None) -> None:
        """Order that a run is cancelled, or receives a signal."""
        assert run.engine_id is not None
        self._cancels.setdefault(signal, {})[run.engine_id] = run

    def order_signal(self, run: ClusterRun, signal: str) -> None:
        """Order that the wrapper of a run receives a signal. Raises OSError if it is told by a record."""
        if self.language.signals:
            self.order_cancel(run, signal)
        else:
            self.home.add_to_record(*run.key, layout.SIGNALS, f"{signal}\n".encode())

    def _send_cancels(self) -> None:
        cancels, self._cancels = self._cancels, {}
        for signal, runs in cancels.items():
            self._runner.order(self.language.cancel(list(runs), signal), partial(self._cancelled, signal, runs))

    def _cancelled(self, signal: str | None, told: Mapping[str, ClusterRun], done: CommandEnd) -> None:
        self.look_soon()
        again = {each: run for each, run in told.items() if run.ending is None and run.key in self.runs}
        if again and self.language.is_silence(done):
            self._cancels.setdefault(signal, {}).update(again)
            self._is_silent(done)


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
    holds_memory = True

    def __init__(self, engine: ClusterEngine, key: Key, *, first_look: int = 0) -> None:
        self.engine = engine
        self.key = key
        self.jid: Jid | None = None
        self.engine_id: str | None = None  # of its job there, which the engine has accepted
        self.refusal: str | None = None
        self.ending: EngineEnd | None = None
        self.blocked = False  # it waits there for something other than room
        self.phase = Phase.UNSURE
        self.first_look = first_look  # that can report it
        self.foreign = ""  # the cluster that has it, if another one answers
        self.halted: str | None = None
        self.resists = ""
        self.alive_at_ns: int | None = None  # when the engine last reported that it had begun and not ended
        self._is_ours = False  # the engine has confirmed the id: by its answer to the submission, or by the mark
        self._said = ""
        self._begun = False
        self._node = ""
        self._misses = 0  # looks in a row without it
        self._ended_ns = 0  # when its end was first seen
        self._forced = False
        self._explained = False
        self._exit: int | None = None  # its exit code, if its wrapper has reported that
        self._settled = False  # its exit code was seen, which a wrapper writes last
        self._stuck = ""  # the engine keeps it, and cannot start it: why
        self._recorded = False
        self._written_end: EngineEnd | None = None  # in its record, because it had not begun
        self._asked: tuple[str, int] = ("", 0)  # the kind of the last cancel, and its time

    @property
    def has_begun(self) -> bool:
        """Whether its engine or its wrapper has said so."""
        return self._begun or self.jid is not None or self._exit is not None

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

    def identified(self, jid: Jid) -> None:
        """Record the wrapper's identity, and so which of the engine's jobs it is: a submission may arrive twice."""
        self.jid = jid
        engine, _, known = (jid.engine or "").partition(":")
        if engine == self.engine.name and known and known != "unknown" and known != self.engine_id:
            is_sent = self.phase is Phase.SENT  # and begins before its submission is answered
            self._becomes(known)
            self._is_ours = is_sent

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
        try:  # listing its metadir makes network file systems refresh their caches
            found = frozenset(os.listdir(f"{self.engine.home.root}/{layout.JOBS}/{self.key[0]}/{self.key[1]}"))
        except FileNotFoundError:
            found = frozenset()
        ended = self.engine_id
        if self._look_for_jid() and self.engine_id != ended:
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
        if self.engine_id is None or self.ending is not None or not self._may_be_told():
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
                self.engine.look_soon()  # the engine may have ended it
        return self._exit is not None

    def submitted(self, answer: str | SpoolError | None, next_look: int) -> None:
        """Process the engine's answer to its submission."""
        self.first_look = next_look
        if self.engine_id is not None:
            return  # its wrapper has registered first
        if isinstance(answer, str):
            self._becomes(answer)
            self._is_ours = True
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
        if record is not None and record[0] == self.engine.name and self.engine_id in (None, record[2]):
            self._written_end = EngineEnd(*end) if end is not None else None
            self.engine_id, self.phase, self._recorded = record[2], Phase.KNOWN, True
            known = self.engine.cluster
            self.foreign = record[1] if known is not None and record[1] not in ("-", known) else ""
        if is_void:
            self.ending = self._written_end
            self.phase = Phase.ABSENT if self.ending is None else self.phase

    def observe(self, found: Sequence[Sighting]) -> bool:
        """Process the sightings of it in the answer to a look; return whether they are news."""
        before = (self.phase, self._said, self._begun, self.blocked, self._is_ours)
        if len(found) > 1:
            with suppress(OSError):  # the next answer has both again
                self._look_for_jid()
        # Of the jobs with its mark it is that of its wrapper's jid, else that of the answer to its submission.
        living = [each for each in found if each.word is None]
        if self.engine_id is None:
            own = living or found[-1:]
        else:
            own = [each for each in found if each.id == self.engine_id] or (living if self.jid is None else [])
        if own:
            self._seen(own[0])
        else:
            self._missed()
        return self.ending is not None or before != (self.phase, self._said, self._begun, self.blocked, self._is_ours)

    def _seen(self, seen: Sighting) -> None:
        title = self.engine.title
        if seen.id != self.engine_id:
            log.info("job %s run %d: found again as %s %s", *self.key, title, seen.id)
            self._becomes(seen.id)
        elif not self._recorded:
            self._record()
        self._is_ours |= _MARK.match(seen.mark) is not None
        self._misses, self._said, self.foreign = 0, seen.said, ""
        self._begun, self._node = self._begun or seen.begun, seen.node or self._node
        self.blocked = seen.blocked and not self.has_begun
        self.halted = title if seen.halted else ""
        if seen.stuck and not self._stuck:
            self._stuck = f"{title} cannot start it: {seen.said}"
            self.engine.order_cancel(self)
        if seen.word is not None:
            self._ends(seen.word, f"says {seen.said}")
        else:
            self.ending, self._ended_ns, self._settled = None, 0, False
            self.alive_at_ns = time.time_ns() if seen.begun else None

    def _missed(self) -> None:
        self._misses += 1
        if self.foreign:
            return
        if self._misses < _SURE:
            self.engine.look_soon()
        elif self.engine_id is None:
            self.phase = Phase.ABSENT
        elif self.ending is None:
            self._ends(EngineWord.FORGOTTEN, f"does not know job {self.engine_id} any more")

    def press(self, *, kill: bool, now_ns: int) -> bool:
        """Continue to end it; return whether nothing of it is left."""
        if self.phase is Phase.QUEUED and self.engine.withdraw(self.key):
            self.phase = Phase.ABSENT
        if self.ending is not None and kill:
            self._forced = True  # its exit code is no longer waited for
        if self.liveness() is not Liveness.ALIVE:
            return True
        if self.ending is not None or self.engine.silent:
            return False
        # A suspended job does not receive TERM there, and only administrators continue it; a cancel does both.
        how = "kill" if kill or self.halted or not (self.has_begun or self._look_for_jid()) else "ask"
        asked, asked_ns = self._asked  # a cancel is repeated now and then, and the wrapper is signalled once
        is_asked = asked == how and (how == "ask" or now_ns - asked_ns < _AGAIN_NS)
        if self.engine_id is not None and not is_asked and self._may_be_told():
            if how == "ask":
                self.engine.order_signal(self, "TERM")
            else:
                self.engine.order_cancel(self)
            self._asked = how, now_ns  # not before: a full disk may keep the order from its record
        return False

    def _may_be_told(self) -> bool:
        """Whether its id is certainly that of its job: one that is known from a record alone may be any job's."""
        is_sure = self._is_ours and not self.foreign
        self.resists = "" if is_sure else f"{self.engine.title} does not show that job {self.engine_id} is this run"
        return is_sure

    def _look_for_jid(self) -> bool:
        """Return whether the wrapper has registered. Raises OSError."""
        if self.jid is None and isinstance(found := self.engine.home.jid(*self.key), Jid):
            self.identified(found)
        return self.jid is not None

    def _becomes(self, job_id: str) -> None:
        """Record which of the engine's jobs it is, also on disk for the next dispatcher."""
        self.engine_id, self.phase, self._recorded, self._is_ours = job_id, Phase.KNOWN, False, False
        self.ending, self._ended_ns, self._misses = None, 0, 0  # these facts are about another job
        self._settled, self._forced, self._asked, self._written_end = False, False, ("", 0), None
        self._record()

    def _record(self) -> None:
        """Write its id to its record; without that the next dispatcher finds it by its mark."""
        with suppress(OSError):  # the next look tries again
            self._put_record()
            self._recorded = True

    def _put_record(self, end: tuple[EngineWord, str] | None = None) -> None:
        line = render_engine(self.engine.name, self.engine.cluster or "-", self.engine_id or "-", end)
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
        log_end = self.engine.home.record_end(*self.key, layout.ENGINE_LOG).decode("utf-8", "replace")
        words, was_asked = self.engine.language.last_words(log_end), self._forced or self._asked[0]
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


def executor(name: str, config: Callable[[], Config], home: LockedSpool | None) -> ClusterEngine:
    """Return what hands runs to the engine of that name."""
    return ClusterEngine(loaded(LANGUAGES[name])(config), home, gone=lambda: config().other_hosts_gone)
