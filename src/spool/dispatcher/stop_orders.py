"""Orders to stop runs: asked about where a hook may refuse, told, recorded, and handed to the terminator."""

from __future__ import annotations

import logging
from contextlib import suppress

from spool.core.model import Stop, StopKind
from spool.dispatcher.admission import Admission
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Context
from spool.dispatcher.journal import stopping_line
from spool.dispatcher.monitor import Monitor
from spool.dispatcher.terminator import Terminator
from spool.state.run import ActiveRun

log = logging.getLogger(__name__)

_RECORD = "record the stop of"


class StopOrders:
    """Takes in what is to be stopped, by whom and why."""

    def __init__(self, context: Context, admission: Admission, monitor: Monitor, terminator: Terminator) -> None:
        self._context = context
        self._admission = admission
        self._monitor = monitor
        self._terminator = terminator
        self._unrecorded: dict[tuple[str, int], ActiveRun] = {}  # runs that are stopped, which no record says yet

    def order(self, live: ActiveRun, stop: Stop) -> None:
        """Record that *live* is to be stopped, and begin to stop it; unless that may be refused, and is not settled.

        It is stopped also where that cannot be recorded: the record is tried again.
        """
        if not self._admission.may_stop(live, stop):
            return
        live.stop_ordered(stop)
        self._terminator.add(live)
        self._context.state.recount(live)
        with suppress(OSError):  # what is to be told stays noted
            self._monitor.stopping(live, stop)
            if stop.kind is StopKind.CANCEL and self._context.journal.has_notes:
                self._context.journal.commit()  # the next dispatcher is not to ask again about a run that ends already
        self._record(live)
        log.info("job %s run %d: stopping (%s by %s)", live.name, live.run, stop.kind, stop.by)

    def resume(self, live: ActiveRun) -> None:
        """Go on stopping a run that an earlier dispatcher was to stop, unless that is to be asked about first."""
        if live.stop is not None and self._admission.may_stop(live, live.stop):
            self._monitor.stopping(live, live.stop)
            self._terminator.add(live, live.stop.at_ns)

    def record_again(self) -> None:
        """Try again to record the stops that no record says yet."""
        for key, live in list(self._unrecorded.items()):
            if key in self._context.state.live and live.result is None:
                self._record(live)
            else:
                del self._unrecorded[key]

    def forget(self, live: ActiveRun) -> None:
        """Let go of a run whose paperwork is done."""
        self._unrecorded.pop(live.key, None)

    def _record(self, live: ActiveRun) -> None:
        stop, confinement, spool = live.stop, self._context.confinement, self._context.spool
        if stop is None or confinement.pauses(Thing.of_run(live.key), _RECORD):
            return
        known = live.key in self._unrecorded
        with confinement.of(Thing.of_run(live.key), _RECORD) as piece:
            written = spool.order_stop(live.name, live.run, stop)
            live.stop_on_record(None if written else spool.stop(live.name, live.run))
            self._unrecorded.pop(live.key, None)
        if piece.failed and not known:  # until then the journal tells the next dispatcher
            self._unrecorded[live.key] = live
            self._context.journal.note(stopping_line(live))
