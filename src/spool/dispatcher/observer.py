"""What a pass sees before it decides: the files that events or the clock give reason to look at, and the settings."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from spool.core import layout
from spool.core.layout import HELD, QUEUED, RESERVATIONS, RUNNING
from spool.core.model import SECOND_NS
from spool.dispatcher.timers import Pace

if TYPE_CHECKING:
    from spool.dispatcher.loop import Dispatcher

log = logging.getLogger(__name__)

POLL_NS = SECOND_NS  # between looks where no event tells of a change of the files
# A look at everything may cost one part in so many of a processor: a net beneath the events, or all there is.
_SHARE_BESIDE_EVENTS = 1000
_SHARE_WITHOUT_EVENTS = 20
BUDGET_NS = 20_000_000  # so long a look may keep a pass from what can start; then it gives way


class Observer:
    """The part of a dispatcher that looks. It has no state of its own but the pause and the pace of its looks."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._of = dispatcher
        self._spool = dispatcher.spool
        self._paused_since_ns: int | None = None
        self.next_due_ns = 0
        self._pace = Pace(_SHARE_BESIDE_EVENTS)
        self._pause_ns = 0  # for how long the look that has begun is not to be followed by another

    @property
    def unfinished(self) -> bool:
        """Whether a look has given way to what can start, and is to go on."""
        return self._of.scanner.unfinished or bool(self._of.watcher.hints)

    @property
    def paused(self) -> bool:
        """Whether nothing is to start."""
        return self._paused_since_ns is not None

    def open(self) -> None:
        """Begin to watch the directories."""
        watch, at = self._of.watcher, self._spool.layout.at
        directories = {place: at(place) for place in (QUEUED, HELD, RUNNING, RESERVATIONS)} | {"": self._spool.root}
        watch.start(directories, modes_of=(QUEUED, HELD))  # a file there may be made readable
        watch.also(layout.HOOKS, at(layout.HOOKS))
        if watch.problem is not None:
            log.warning("%s; looking every %d s or so instead", watch.problem, POLL_NS // SECOND_NS)
        self._of.wakeup.watch_files(watch.fileno(), watch.read)

    def see(self) -> None:
        """Look where there is reason to."""
        of, now = self._of, time.monotonic_ns()
        hints, of.watcher.hints = of.watcher.hints, []
        reload = of.wakeup.reload_asked()
        due_ns = of.reservations.next_due_ns()
        booked = due_ns is not None and now >= due_ns
        until = now + BUDGET_NS
        for at, (place, filename) in enumerate(hints, 1):
            if place == RESERVATIONS:
                booked = True
            elif layout.HOOKS in (place, filename):
                reload = True
            elif place:
                of.scanner.hint(place, filename)
                if time.monotonic_ns() >= until:
                    of.watcher.hints[:0] = hints[at:]
                    break
            elif filename in (layout.CONFIG, layout.PAUSED):
                reload = True
        if reload:
            self._reload()
        if booked:
            self._see_bookings()
        looks = of.watcher.lost or (now >= self.next_due_ns and not of.scanner.unfinished)
        if looks:
            self._rescan(now, until)
        elif of.scanner.unfinished:
            with self._pace:
                of.scanner.go_on(until, busy=bool(of.watcher.hints))
            self._put_off(now)
        of.scanner.due(now)
        of.reservations.tell_again()
        if looks:  # then the file of every run is looked at, too
            with self._pace:
                of.filemoves.see()
            self._put_off(now)
        else:
            of.filemoves.see()

    def look_at_everything(self, until_ns: int | None = None) -> None:
        """Look as if no event had ever been raised; give way at *until_ns*, monotonic."""
        self._of.keep_room()
        self._of.scanner.everything(until_ns)
        self._of.wakeup.look_at_children()
        self.next_due_ns = time.monotonic_ns() + POLL_NS
        self._see_bookings()
        self._reload()

    def see_pause(self) -> None:
        """See whether the spool is paused; a time paused does not count as waiting."""
        of, paused = self._of, self._spool.paused
        if paused and self._paused_since_ns is None:
            now_ns = of.clock()
            self._paused_since_ns = min(self._spool.paused_at_ns or now_ns, now_ns)  # there may have been no dispatcher
            of.table.version += 1
        elif not paused and self._paused_since_ns is not None:
            since_ns, self._paused_since_ns = self._paused_since_ns, None
            of.table.version += 1
            for job in of.table.jobs.values():
                spec = job.queued.spec if job.queued is not None else None
                # Only these have a clock that somebody looks at.
                if spec is None or spec.scheduling_timeout_ns is None or job.wait is None:
                    continue
                if job.wait.clock_at_ns is not None:
                    job.wait = job.wait.without(since_ns, of.clock())
                    of.scanner.clocks.remember(job)
                    of.table.settle(job)

    def failed(self, name: str, why: str) -> None:
        """Pause the spool, where it is so configured, because a job has failed for good."""
        if self._of.settings.config.policy.on_failure == "pause" and not self.paused:
            log.warning("job %s has failed for good: the spool is paused", name)
            self._spool.pause(f"job {name}: {why}")
            self.see_pause()

    def _reload(self) -> None:
        of = self._of
        grace_ns, executor = of.settings.config.kill_grace_ns, of.settings.executor
        reloaded = of.settings.reload()
        if reloaded:
            log.info("the configuration has changed")
            if of.settings.config.kill_grace_ns != grace_ns:
                of.scanner.configuration_changed()
            if of.settings.executor != executor:
                of.launcher.tell_executors_problems()
            of.world.configuration_changed()
            of.logs.strict = of.settings.config.durability == "strict"
            of.table.version += 1
        of.watcher.also(layout.HOOKS, self._spool.layout.at(layout.HOOKS))
        of.events.look()
        was_paused, before = self.paused, of.status.problems
        problems = (of.settings.problem, of.watcher.problem, *of.events.problems)
        of.status.problems = [problem for problem in problems if problem]
        self.see_pause()
        if reloaded or self.paused != was_paused or of.status.problems != before:
            of.status.changed()
        else:
            of.status.refresh()

    def _see_bookings(self) -> None:
        if self._of.reservations.look():
            self._of.table.version += 1

    def _rescan(self, now: int, until: int) -> None:
        of = self._of
        of.watcher.lost = False
        of.table.unblock()
        of.table.queue.look_again()
        share = _SHARE_BESIDE_EVENTS if of.watcher.problem is None else _SHARE_WITHOUT_EVENTS
        self._pace, self._pause_ns = Pace(share), 0
        with self._pace:
            self.look_at_everything(until)
            of.launcher.ask_executors_again()
        self._put_off(now)

    def _put_off(self, now: int) -> None:
        """Say when the next look at everything is due, by what this one has cost so far."""
        of = self._of
        self._pause_ns += self._pace.pause_ns
        every_ns = of.settings.config.look_every_ns if of.watcher.problem is None else POLL_NS
        self.next_due_ns = now + max(every_ns, self._pause_ns)
