"""What a power cut took of the results of the last half minute, written down again.

The journal and the history are synced within 50 ms, the metadirs when the file system comes to it. A result that is
lost while its line of history is there would leave those waiting that depend on the job, and would begin its tries
anew; a metadir that is lost would give its number away a second time.
"""

from __future__ import annotations

from itertools import takewhile

from spool.core import layout
from spool.core.model import OUTCOMES, SECOND_NS, Result, State
from spool.dispatcher.confinement import Confinement, Thing
from spool.formats import journal
from spool.formats.history import render_result
from spool.formats.journal import Memory
from spool.store.locked_spool import LockedSpool

_RESTORE = "restore the result of"
_LATELY_NS = 60 * SECOND_NS  # by then file systems have written what nobody asked them to sync


def restore_results(spool: LockedSpool, memory: Memory, boot_id: str, confinement: Confinement) -> None:
    """Restore the results that the history knows, and those that only the journal knows.

    The latter are of runs whose line of history is lost as well: *memory* is told that they are open, so that their
    paperwork is done again.
    """
    for result in _lately(spool):
        with confinement.of(Thing.of_run((result.job, result.run)), _RESTORE):
            if result.run > spool.last_removed_run(result.job) and spool.result(result.job, result.run) is None:
                _restore(spool, result)
    for key, (started, over) in memory.over.items():
        if started.boot_id != boot_id and over.outcome in OUTCOMES:
            with confinement.of(Thing.of_run(key), _RESTORE):
                _restore_known(spool, memory, started, over)


def _restore_known(spool: LockedSpool, memory: Memory, started: journal.Started, over: journal.Over) -> None:
    """Restore the result of a run that only the journal knows."""
    key = started.job, started.run
    recorded = spool.result(*key)
    if recorded is not None:
        if over.final and not spool.accounted(recorded):  # its line is lost: its paperwork is done again
            memory.open[key] = started
            memory.closed.pop(started.job, None)
        return
    if not over.final:
        _metadir(spool, *key)
        return
    result = Result(
        job=started.job,
        run=started.run,
        attempt=1,
        outcome=State(over.outcome),
        reason="its records were lost in a power cut",
        submitted_at_ns=started.arrived_at_ns,
        started_at_ns=started.at_ns,
    )
    _restore(spool, result)
    memory.open[key] = started
    memory.closed.pop(started.job, None)


def _lately(spool: LockedSpool) -> list[Result]:
    """Return what ended in the last minute before the last end of all."""
    newest = next(spool.accounts_since(None), None)
    if newest is None or newest.ended_at_ns is None:
        return []
    since_ns = newest.ended_at_ns - _LATELY_NS
    return list(takewhile(lambda known: (known.ended_at_ns or 0) >= since_ns, spool.accounts_since(since_ns)))


def _restore(spool: LockedSpool, result: Result) -> None:
    _metadir(spool, result.job, result.run)
    spool.put_record(result.job, result.run, layout.RESULT, render_result(result))


def _metadir(spool: LockedSpool, job: str, run: int) -> None:
    """See to it that the number is taken."""
    spool.disk.ensure_directory(spool.layout.runs(job))
    spool.disk.ensure_directory(spool.layout.metadir(job, run))
