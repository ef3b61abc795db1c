"""Looks at files: those named by events or due by the clock, and at all of them once in a while."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from spool.core import layout
from spool.core.layout import HELD, QUEUED, RESERVATIONS, RUNNING
from spool.core.model import SECOND_NS
from spool.dispatcher.context import Component, Context
from spool.dispatcher.filemoves import FileMoves
from spool.dispatcher.inotify import DirectoryWatcher, Hint
from spool.dispatcher.reservations import Reservations
from spool.dispatcher.scanner import Scanner
from spool.dispatcher.wakeup import Pace

log = logging.getLogger(__name__)

POLL_NS = SECOND_NS  # between looks if no event reports changes of files
# A look at everything may use one part in N of a processor: a safety net beside the events, or the only source.
_SHARE_BESIDE_EVENTS = 1000
_SHARE_WITHOUT_EVENTS = 20
BUDGET_NS = 20_000_000  # how long a look may delay the starts of a pass before it gives way
_LEAST_SPARES, _MOST_SPARES = 2, 256


class Observer(Component):
    """Turns file events into looks of the scanner, and paces the looks at everything."""

    def __init__(
        self,
        context: Context,
        watcher: DirectoryWatcher,
        scanner: Scanner,
        filemoves: FileMoves,
        reservations: Reservations,
    ) -> None:
        super().__init__(context)
        self._watcher = watcher
        self._scanner = scanner
        self._filemoves = filemoves
        self._reservations = reservations
        self._timer = context.timers.timer("files")  # when the next look at everything is due
        self._pace = Pace(_SHARE_BESIDE_EVENTS)
        self._pause_ns = 0  # the least pause after the present look at everything
        self._hints: list[Hint] = []
        self._rescans = True  # whether the next look is at everything
        self._reservations_changed = False
        self._directories_changed = False  # whether one of the spool's directories has appeared or gone

    @property
    def unfinished(self) -> bool:
        """Whether a look has given way to starts, and must be continued."""
        return self._scanner.unfinished or bool(self._hints or self._watcher.hints)

    @property
    def has_work(self) -> bool:
        """Whether a file may have changed, or the last look has left something to do."""
        watcher, changes, called_off = self._watcher, self._changes, self._filemoves.called_off
        if self._hints or watcher.hints or watcher.lost or changes.runs.names or changes.strays.names:
            return True
        return bool(changes.vanished.names or called_off or self._reservations.untold) or self._scanner.has_work

    def open(self) -> None:
        """Begin to watch the directories."""
        at = self._spool.layout.at
        directories = {place: at(place) for place in (QUEUED, HELD, RUNNING, RESERVATIONS)} | {"": self._spool.root}
        self._watcher.start(directories, modes_of=(QUEUED, HELD))  # a file there may be made readable
        self._watcher.also(layout.HOOKS, at(layout.HOOKS))
        self._watch_notes()
        if self._watcher.problem is not None:
            log.warning("%s; checking about every %d s instead", self._watcher.problem, POLL_NS // SECOND_NS)

    def keep_room(self) -> None:
        """Reserve disk space for the stops of all runs."""
        with self._confinement.service("keep room for", "stops on a full disk"):
            runs = len(self._state.live)
            self._spool.keep_spares(min(max(_LEAST_SPARES, runs), _MOST_SPARES))

    def listen(self) -> bool:
        """Read the file events; return whether the configuration, the pause or the listeners may have changed."""
        now = time.monotonic_ns()
        reload = False
        for hint in self._watcher.take_hints():
            place, filename, _ = hint
            if place == RESERVATIONS:
                self._reservations_changed = True
            elif place == layout.NOTES:
                name, _, record = filename.rpartition(".")
                if record == layout.LEFTOVERS:
                    self._changes.leftovers.add(name.rpartition(".")[0])
                    self._spool.discard_note(filename)
            elif layout.HOOKS in (place, filename):
                reload = True
            elif place:
                self._hints.append(hint)
            elif filename in (layout.CONFIG, layout.PAUSED):
                reload = True
            elif filename in layout.DIRECTORIES:
                self._directories_changed = True
        due = self._timer.at_ns is None or now >= self._timer.at_ns
        lost = self._watcher.take_lost() or self._directories_changed
        self._rescans = lost or (due and not self._scanner.unfinished)
        return reload or self._rescans

    def look(self) -> bool:
        """Look at everything that may have changed; return whether that was a look at everything."""
        now = time.monotonic_ns()
        until = now + BUDGET_NS
        if self._rescans:
            self._keep_directories()
        hints, self._hints = self._hints, []
        for at, hint in enumerate(hints, 1):
            self._scanner.hint(hint)
            if time.monotonic_ns() >= until:
                self._hints = hints[at:]
                break
        if self._reservations_changed or self._reservations.due or self._rescans:
            self._look_at_reservations()
        if self._rescans:
            self._rescan(now, until)
        elif self._scanner.unfinished:
            with self._pace:
                self._scanner.go_on(until, busy=bool(self._hints))
            self._put_off(now)
        self._scanner.due(now)
        self._reservations.tell_again()
        if self._rescans:  # includes the file of every run
            with self._pace:
                self._filemoves.see()
            self._put_off(now)
        else:
            self._filemoves.see()
        return self._rescans

    def _keep_directories(self) -> None:
        """Recreate removed directories of the spool, and watch the present ones."""
        self._directories_changed = False
        with self._confinement.spool("keep", "the directories of the spool"):
            if self._spool.keep_directories():
                log.warning("directories of the spool were removed; created them again")
                self._watch_notes()
        self._watcher.renew()

    def _watch_notes(self) -> None:
        """Clear the notes of wrappers, and watch for more: who looks at everything needs none of before."""
        with suppress(OSError):  # without notes, looks at everything find what they tell
            self._spool.notes()
        self._watcher.also(layout.NOTES, self._spool.layout.at(layout.NOTES))

    def look_at_everything(self, until_ns: int | None = None) -> None:
        """Look as if no event had ever been raised; give way at *until_ns*, monotonic."""
        self.keep_room()
        self._scanner.everything(until_ns)
        self._timer.set(time.monotonic_ns() + POLL_NS)

    def look_at_first(self) -> None:
        """Look at everything in one go, before the first start."""
        self.look_at_everything()
        self._look_at_reservations()

    def _look_at_reservations(self) -> None:
        self._reservations_changed = False
        if self._reservations.look():
            self._state.changed()

    def _rescan(self, now: int, until: int) -> None:
        self._state.unblock_all()
        self._state.queue.look_again()
        share = _SHARE_BESIDE_EVENTS if self._watcher.problem is None else _SHARE_WITHOUT_EVENTS
        self._pace, self._pause_ns = Pace(share), 0
        with self._pace:
            self.look_at_everything(until)
        self._put_off(now)

    def _put_off(self, now: int) -> None:
        """Set when the next look at everything is due, by the cost of this one so far."""
        self._pause_ns += self._pace.pause_ns
        every_ns = self._settings.config.look_every_ns if self._watcher.problem is None else POLL_NS
        self._timer.set(now + max(every_ns, self._pause_ns))


class Pause(Component):
    """The pause of starts, by a user or after a failed job. The file `paused` orders it."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._since_ns = 0
        self.paused = False

    def see(self) -> bool:
        """Check whether the spool is paused; return whether that has changed. Paused time does not count as waiting."""
        context, paused = self._context, self._spool.paused
        if paused == self.paused:
            return False
        self.paused = paused
        context.state.changed()
        now_ns = context.clock()
        if paused:
            self._since_ns = min(context.spool.paused_at_ns or now_ns, now_ns)  # there may have been no dispatcher
            return True
        for job in list(context.state.jobs.values()):
            if context.state.discount(job, self._since_ns, now_ns):
                context.journal.note_place(job)
        return True

    def failed(self, name: str, why: str) -> None:
        """Pause the spool, if so configured, because a job has failed for good."""
        if self._settings.config.policy.on_failure == "pause" and not self.paused:
            log.warning("job %s has finally failed: the spool is paused", name)
            self._spool.pause(f"job {name}: {why}")
            self.see()
