"""Notice the ends of runs, and when one has begun elsewhere."""

from __future__ import annotations

import time
from contextlib import suppress
from enum import Enum

from spool.core.lifecycle import Liveness, Prober
from spool.core.model import SECOND_NS
from spool.core.phases import GONE, Active, Gone, Outlived, Unread
from spool.dispatcher.conclusions import Concluder
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context
from spool.dispatcher.terminator import Terminator
from spool.dispatcher.wakeup import Wakeup, boot_clock
from spool.state.run import ActiveRun

POLL_NS = SECOND_NS  # where no event reports an end, or a change of the files
_FIND_OUT = "find out the end of"


class News(Enum):
    """What an engine tells of a run."""

    ACCEPTED = "its engine has it"
    BEGUN = "it has begun: its time limit counts from now on"
    WAITS = "why it waits there has changed"


class Supervisor(Component):
    """Finds the runs that have no processes left."""

    def __init__(self, context: Context, prober: Prober, terminator: Terminator, wakeup: Wakeup) -> None:
        super().__init__(context)
        self._terminator = terminator
        self._wakeup = wakeup
        self.concluder = Concluder(context, prober)
        self._timer = context.timers.timer("ends", always=True)
        self.suspects: set[tuple[str, int]] = set()  # runs whose end must be checked
        self._polled: dict[tuple[str, int], ActiveRun] = {}  # runs whose end no event reports
        self._ended: list[ActiveRun] = []  # found, and not returned yet
        self._news: list[tuple[News, ActiveRun]] = []  # of runs elsewhere, and not returned yet
        self._poll_at_ns = 0

    def watch(self, live: ActiveRun) -> None:
        """Watch for the end of a run from now on; call it once events report that, or cannot."""
        if self._unwatched(live):
            self._polled[live.key] = live
            self._timer.set(self._poll_at_ns)

    def suspect(self, live: ActiveRun) -> None:
        """Let the next call of :meth:`collect` look at the evidence of *live*."""
        self.suspects.add(live.key)

    def look_for_leftovers(self) -> None:
        """Look for runs whose commands have left processes behind, as if no wrapper had left a note of that."""
        for live in self._state.live.values():
            with suppress(OSError):
                if isinstance(live.phase, Active) and live.elsewhere is None and self._has_leftovers(live):
                    self.suspects.add(live.key)

    def collect(self) -> list[ActiveRun]:
        """Return the runs that are over, with known ends. The room of a run is free once no process is left."""
        now = time.monotonic_ns()
        reap_at_ns = self._executors.local.due_ns()
        if self._wakeup.children_ended() or (reap_at_ns is not None and now >= reap_at_ns):
            self.suspects |= {run.key for run in self._executors.local.reap()}
        self.suspects |= self._wakeup.ended_runs()  # first: nothing else tells of them
        for name in list(self._changes.leftovers.names):
            self._changes.leftovers.done(name)
            job = self._state.jobs.get(name)
            if job is None or job.live is None:
                continue
            self.suspects.add(job.live.key)
            if isinstance(job.live.phase, Active) and self.concluder.lacks_metadir(job.live):
                self._confinement.attempt(Thing.of_run(job.live.key), _FIND_OUT, self._outlive, job.live)
        if self._executors.engines:
            with self._confinement.service("ask", "the engines of runs elsewhere"):
                self.suspects |= {run.key for run in self._executors.work()}
        if now >= self._poll_at_ns:
            self.suspects |= self._polled.keys()
            self._poll_at_ns = now + POLL_NS
        gone: list[ActiveRun] = []
        if self._terminator.runs:
            with self._confinement.service("look at", "the processes of runs that are stopped"):
                for live in (run.live for run in self._terminator.runs.values()):
                    if live.jid is None and live.elsewhere is None:
                        with suppress(OSError):  # a search may miss its children, which get their mark late
                            self.concluder.identify(live)
                gone = self._terminator.tick()
        for live in gone:
            self._terminator.forget(live)
            live.see(GONE)
            self._state.recount(live)  # its grant is free for the next run
            self.suspects.add(live.key)
        for key in list(self.suspects):
            if self._confinement.attempt(Thing.of_run(key), _FIND_OUT, self._look_at, key):  # else once more
                self.suspects.discard(key)
        self._timer.set(self._poll_at_ns if self._polled else None)
        if (reap_at_ns := self._executors.local.due_ns()) is not None:
            self._timer.advance(reap_at_ns)
        ended, self._ended = self._ended, []
        return ended

    def take_news(self) -> list[tuple[News, ActiveRun]]:
        """Return what engines have told of their runs since the last call."""
        news, self._news = self._news, []
        return news

    def _look_at(self, key: tuple[str, int]) -> None:
        run = self._state.live.get(key)
        if run is None or run.is_over:
            self._polled.pop(key, None)
            return
        if isinstance(run.phase, Unread):
            return
        held_room, over = run.holds_room, False
        try:
            over = self._over(run)
        finally:  # its room is free, even if its end cannot be read
            if over or (held_room and not run.holds_room):
                self._state.recount(run)
        if over:
            self._ended.append(run)
            self._wakeup.forget(run)
            self._terminator.forget(run)
            if run.handle is not None:
                run.handle.close()
        elif self._unwatched(run):
            self._wakeup.watch_run(run)  # its jid may be known by now
        if not self._unwatched(run):
            self._polled.pop(key, None)

    def _unwatched(self, live: ActiveRun) -> bool:
        """Whether no event reports the end of a run."""
        return not live.is_over and not self._wakeup.watches(live)

    def _over(self, live: ActiveRun) -> bool:
        """Whether nothing of the run is left; processes that outlived its wrapper receive the order to end."""
        handle, left = live.handle, None
        if handle is not None and isinstance(live.phase, Active | Outlived):
            found = handle.liveness()
            if found is Liveness.ABSENT:
                self.concluder.identify(live)
                found = handle.liveness()
            if found is Liveness.ALIVE and live.elsewhere is None:  # elsewhere it is only presumed
                live.seen_alive()
                if self._has_leftovers(live):
                    self._outlive(live)
                    return False
            if live.elsewhere is not None:
                if live.accepted_as(handle.engine_id):
                    self._news.append((News.ACCEPTED, live))
                self._note_begin(live)
                if handle.halted is not None and handle.halted != (live.suspended_by if live.suspended else ""):
                    self._changes.suspensions.add(live.name)
                if found is Liveness.ALIVE and self.concluder.was_given_up(live):
                    found = Liveness.ABSENT  # its engine may have it, but it never begins
                if found is Liveness.ALIVE:
                    return self.concluder.was_recorded(live)  # however long it waits there before its wrapper registers
                if found is Liveness.ABSENT:
                    live.see(GONE)  # its engine has answered that it does not know it
            unknown = live.adopted and live.jid is None and live.elsewhere is None
            if unknown and (live in self._terminator or handle.left_behind()):
                return False  # its jid was removed: it is alive while any process of it is
            # The wrapper never registered: any process with the run's mark may be the wrapper.
            silent = found is Liveness.ABSENT and time.monotonic_ns() >= live.unregistered_until_ns
            if found is Liveness.GONE or silent:
                left = self._spool.exit(*live.key) if handle.is_child else None
                if handle.left_behind(left.code if left is not None else None):
                    self._outlive(live)
                    return False
                live.see(GONE)
        if isinstance(live.phase, Gone) and handle is not None:
            live.measured(handle.usage())
        over = self.concluder.conclude(live, left)
        if not over and isinstance(live.phase, Gone) and handle is not None and handle.liveness() is Liveness.ALIVE:
            self._terminator.add(live)  # its wrapper has begun after the look that found nothing of it
        return over

    def _has_leftovers(self, live: ActiveRun) -> bool:
        """Whether the command of a run has ended, and its wrapper waits for what that has left behind."""
        return self._spool.exit(*live.key) is not None and self._spool.has_leftovers(*live.key)

    def _outlive(self, live: ActiveRun) -> None:
        """End what a command has left behind, which has ended by now, or what a killed wrapper has."""
        if not live.is_outlived:
            left = self._spool.exit(*live.key)
            live.see(Outlived(left.at_ns if left is not None else self._clock()))
            self._state.recount(live)  # its end is known better now
        self._terminator.hurry(live)

    def _note_begin(self, live: ActiveRun) -> None:
        """Count the time of a run elsewhere from the start of its wrapper, as far as clocks agree."""
        if live.submitted is None:
            return
        if (spoke_ns := self._spool.spoke_at_ns(*live.key, live.started_at_ns)) is not None:
            now_ns = time.time_ns()
            at_ns = min(max(spoke_ns, live.started_at_ns), now_ns)
            live.began_elsewhere(at_ns, boot_clock() - (now_ns - at_ns))
            self._state.recount(live)
            self._news.append((News.BEGUN, live))
        if live.heard():
            self._news.append((News.WAITS, live))
            self._state.recount(live)
