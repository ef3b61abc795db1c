"""Recover after a restart: find every run that is not over, and finish what a crash or a power cut interrupted.

The evidence of the files counts. The journal adds the facts that they lack: the places in the queue, and after a power
cut the starts and ends whose file moves did not reach the disk.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile

from msgspec.structs import replace

from spool.core import layout
from spool.core.arrays import Tasks
from spool.core.errors import InvalidFile, InvalidRecord, SpoolUnusable, cannot
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.lifecycle import Liveness, Verdict
from spool.core.model import OUTCOMES, SECOND_NS, Jid, Result, Spec, State
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context
from spool.dispatcher.launcher import SILENT_NS
from spool.formats import journal, run_records
from spool.formats.jobfile import TaskFiles
from spool.formats.journal import Memory
from spool.formats.run_records import ArrayRecord, render_array, render_history, render_result
from spool.machine import identity
from spool.state.load import Loader, load_array
from spool.state.run import ActiveRun
from spool.state.table import Array
from spool.store.arrays import ArrayStore
from spool.store.disk import status_of
from spool.store.locked_spool import LockedSpool

log = logging.getLogger(__name__)

_TAKEN_BACK = "job %s had ended before the power cut; its file goes to done/"
_WITHOUT_RUN = "job %s was in running/ without a run; moved back to queued/"
_RECOVER = "read the records of"
_ADOPT = "use every record of"
_Known = journal.Started | journal.Waits | None
_RESTORE = "restore the result of"
_LATELY_NS = 60 * SECOND_NS  # after this time file systems have written data without a sync


class Recovery(Component):
    """Fills an empty table from a spool.

    A name with unreadable records stays *unsettled*: none of its jobs starts, and reading is tried again. Meanwhile a
    run that the journal knows is watched and limited, according to its job file.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.memory = Memory()
        self._loader: Loader
        self._served_until_ns: int | None = None  # the last sign of work of the previous dispatcher
        self._untold: set[str] = set()  # names with a run that is neither in `running/` nor in the journal
        self.arrays: dict[str, int] = {}  # the newest runs of arrays that need work

    def open(self, memory: Memory) -> None:
        """Begin with the journal's content: put every run that is not known to be over into the table.

        Before that restore the results that a power cut took, and the moves of files that it undid. Raises
        SpoolUnusable if runs of another host may be alive, OSError if `running/` cannot be listed.
        """
        self.memory = memory
        for reviewed in memory.reviewed.values():
            self._state.keys_set(reviewed)
        self._loader = Loader(self._spool, memory, lambda: self._settings.config, self._spool.take_jid)
        self._served_until_ns = self._spool.served_until_ns()
        with self._confinement.service("restore", "the results that a power cut took"):
            self._restore_results(self._prober.boot_id())
        for name in memory.closed:
            self._settling(name, self._finish_move)
        self._find_runs()

    def _restore_results(self, boot_id: str) -> None:
        """Restore the results of the history's last minute, and those that only the journal knows.

        The latter are of runs whose line of history is lost as well: the memory marks them as open, so that their
        paperwork is done again.
        """
        spool = self._spool
        newest = next(spool.accounts_since(None), None)
        since_ns = (newest.told_at_ns or 0) - _LATELY_NS if newest is not None else 0
        known = spool.accounts_since(since_ns) if newest is not None and newest.told_at_ns is not None else iter(())
        for result in list(takewhile(lambda each: (each.told_at_ns or 0) >= since_ns, known)):
            with self._confinement.of(Thing.of_run((result.job, result.run)), _RESTORE):
                if self._was_taken(result, boot_id):
                    self._restore(result)
        for key, (started, over) in self.memory.over.items():
            removed = spool.last_removed_run(started.job) >= started.run
            if started.boot_id != boot_id and over.outcome in OUTCOMES and not removed:
                with self._confinement.of(Thing.of_run(key), _RESTORE):
                    self._restore_known(started, over)

    def _was_taken(self, result: Result, boot_id: str) -> bool:
        """Whether a power cut can have taken a result of the history: if the run began in this boot, there was none.

        A missing metadir beside a later one was removed.
        """
        spool, job, run = self._spool, result.job, result.run
        if not layout.valid_name(job) or not 0 < run <= layout.MOST_RUNS or run <= spool.last_removed_run(job):
            return False
        if spool.result(job, run) is not None:
            return False
        runs = spool.runs(job)
        if run not in runs and runs and runs[-1] > run:
            return False
        known = self.memory.open.get((job, run)) or self.memory.over.get((job, run), (None,))[0]
        grant, jid = spool.grant(job, run), spool.jid(job, run)
        boots = [each.boot_id for each in (known, grant, jid) if each is not None and not isinstance(each, Liveness)]
        return boot_id not in boots

    def _restore_known(self, started: journal.Started, over: journal.Over) -> None:
        """Restore the result of a run that only the journal knows."""
        spool, key = self._spool, (started.job, started.run)
        recorded = spool.result(*key)
        if recorded is None and not over.final:
            spool.ensure_metadir(*key)  # so that the number is taken
        elif recorded is None:
            result = Result(
                job=started.job,
                run=started.run,
                attempt=1,
                outcome=State(over.outcome),
                reason="its records were lost in a power cut",
                submitted_at_ns=started.arrived_at_ns,
                started_at_ns=started.at_ns,
            )
            self._restore(result)
        if over.final and (recorded is None or not spool.accounted(recorded)):  # its paperwork is done again
            self.memory.open[key] = started
            self.memory.closed.pop(started.job, None)

    def _restore(self, result: Result) -> None:
        self._spool.ensure_metadir(result.job, result.run)
        self._spool.put_record(result.job, result.run, layout.RESULT, render_result(result))

    def _find_runs(self) -> None:
        in_running = self._spool.names(RUNNING)
        for name in in_running:
            self._settling(name, self._spool.complete_move)
        known = {*in_running, *(name for name, _ in self.memory.open)}
        for name in self._with_recent_runs() - known:
            if self._settling(name, self._see_untold) and name in self._untold:
                known.add(name)
        for name in sorted(known):
            if not self._settling(name, self._find_run):
                self._watch_unread(name)
        for live in self._state.live.values():
            self._refuse_other_hosts(live)

    def _with_recent_runs(self) -> set[str]:
        """Return the jobs that may have a run since about the last writing of the journal.

        A start without a line in the journal came after that: all earlier starts are known from it. Without a journal
        any job may have one. The status of an entry of `jobs/` is enough, since there may be 100,000.
        """
        journal = status_of(self._spool.layout.at(layout.JOURNAL))
        since_ns = journal.st_mtime_ns - _LATELY_NS if journal is not None else 0
        found = set()
        with suppress(FileNotFoundError), os.scandir(self._spool.layout.at(layout.JOBS)) as entries:
            for entry in entries:
                # The time of change: a directory that was prepared before the start is only renamed by it.
                if entry.stat(follow_symlinks=False).st_ctime_ns >= since_ns and layout.valid_name(entry.name):
                    found.add(entry.name)
        return found

    def _see_untold(self, name: str) -> None:
        """Check whether the newest run of a name is one that is neither in `running/` nor in the journal.

        Its file was claimed, and taken out of `running/` before another dispatcher came. The run of a job that waits
        there was only prepared, and is taken back.
        """
        spool, run = self._spool, self._spool.latest_run(name)
        files = spool.load(name, run, self._prober, leftovers=False) if run is not None else None
        if files is None or files.grant is None or files.result is not None:
            return
        if files.grant.inode is None or not spool.holds(files.grant.inode, name, QUEUED, HELD):
            self._untold.add(name)
        elif files.jid is Liveness.ABSENT:
            spool.take_jid(name, files.run)
        elif files.proof.verdict in (Verdict.RUNNING, Verdict.STOPPING):
            self._untold.add(name)

    def places(self) -> None:
        """Restore the waiting jobs' places in the queue, before the first look finds their files."""
        waiting = set(self._spool.names(QUEUED)) | set(self._spool.names(HELD))
        ran_before = waiting & set(self._spool.jobs_with_runs())
        for name, line in self.memory.waits.items():
            job = self._state.job(name)
            if name not in waiting and job.live is not None and job.live.wait.arrived_at_ns == line.arrived_at_ns:
                continue  # it waits no more: the run began, and the power failed before the journal had it
            self._state.job(name).recall_place(line)
            if name in ran_before:
                self._settling(name, self._find_series)

    def try_again(self) -> list[str]:
        """Try unreadable records again; return the names that are settled now."""
        settled = []
        for name in list(self._state.unsettled):
            if self._confinement.pauses(Thing.of_job(name), _RECOVER):
                continue
            self.arrays.pop(name, None)
            if self._settling(name, self._find_all):
                settled.append(name)
        return settled

    def unsettled_again(self, name: str) -> None:
        """Mark *name* as unsettled: the consequences of its records could not be applied."""
        self._state.unsettle(name, self._confinement.why(name))

    def unfinished_array(self, store: ArrayStore, name: str) -> Array | None:
        """Return an array that is not over, as an earlier dispatcher left it; finish the paperwork of one that is."""
        spool, run = self._spool, self.arrays[name]
        record = spool.array(name, run)
        if record is None:
            return None
        if spool.result(name, run) is not None:
            if (name, run) in self.memory.open:
                store.archive(record.inode or 0, name, spool.record(name, run, layout.SPEC_COPY))
            if spool.requeue_file(name, QUEUED):
                log.warning(_WITHOUT_RUN, name)
            return None
        array = load_array(spool, record)
        if array is None:
            log.error("cannot continue array %s: the file that its run %d was made from is lost", name, run)
            return None
        # Even if it was edited or saved by an editor since, it is the array's file.
        found = (status_of(spool.layout.job_file(place, name)) for place in (RUNNING, HELD))
        if (status := next(filter(None, found), None)) is not None:
            array.file_seen(status.st_ino)
        if record.boot_id != identity.boot_id():
            _mend(spool, array)
        array.resume(store.unissued(name, run))
        return array

    def worth_remembering(self) -> list[journal.Line]:
        """Return the journal lines that the next dispatcher needs about unsettled names."""
        lines: list[journal.Line] = []
        known = self._state.live.keys()
        for name in self._state.unsettled:
            lines += [line for key, line in self.memory.open.items() if key[0] == name and key not in known]
            if (closed := self.memory.closed.get(name)) is not None:
                lines += [closed, journal.Over(name, closed.run, True)]
        return lines

    def _settling(self, name: str, step: Callable[[str], None]) -> bool:
        """Do one step of the recovery of a name; return whether it succeeded, else the name is not settled."""
        with self._confinement.of(Thing.of_job(name), _RECOVER) as piece:
            step(name)
        if piece.failed:
            self.unsettled_again(name)
        elif self._state.unsettled and step == self._find_all:
            self._state.unsettled.pop(name, None)
        return not piece.failed

    def _find_all(self, name: str) -> None:
        self._finish_move(name)
        self._spool.complete_move(name)
        self._find_run(name)
        self._find_series(name)

    # One name.

    def _finish_move(self, name: str) -> None:
        started = self.memory.closed.get(name)
        if started is not None and self._taken_back(name, started):
            log.warning(_TAKEN_BACK, name)
            self._spool.archive(name, QUEUED, None)

    def _find_run(self, name: str) -> None:
        in_running = status_of(self._spool.layout.job_file(RUNNING, name)) is not None
        if self._is_array(name, in_running=in_running):
            return
        live = self._unfinished_run(name, in_running=in_running)
        if live is None:
            return
        known = self._state.live.get(live.key)
        if known is None:
            self._state.add_run(self._state.job(name), live)
        else:
            known.become(live)
            self._state.add_run(self._state.job(known.name), known)  # its grant was not known either

    def _watch_unread(self, name: str) -> None:
        """Watch a run from the journal, as far as that is possible without its records."""
        job = self._state.job(name)
        if job.live is not None:
            return
        live = self._loader.unread_run(name)
        if live is not None and not live.spec.is_array:
            live.began(_started_boot_ns(None, live.started_at_ns))
            with suppress(OSError):  # an engine elsewhere identifies it by records that are unreadable
                live.adopted_as(self._executors.adopt(live.executor, name, live.run, None))
            self._state.add_run(job, live)

    def _find_series(self, name: str) -> None:
        line, job = self.memory.waits.get(name), self._state.jobs.get(name)
        if line is None or job is None:
            return
        # The interrupted end of an earlier submission that never started lacks its line of history: the name waits
        # again, and the journal knows the later submission only.
        spool, result = self._spool, self._spool.newest_result(name)
        is_unstarted = result is not None and result.started_at_ns is None and spool.array(name, result.run) is None
        if result is not None and is_unstarted and not spool.accounted(result):
            self._journal.logs.account(render_history(result, time.time_ns()))
            self._events.end(result, spool.spec(name, result.run))
        self._loader.recall_series(job, line)

    def _is_array(self, name: str, *, in_running: bool) -> bool:
        """Whether the name is an array's: its metadir is not a run's, and will never contain a `jid`."""
        spool = self._spool
        run = spool.latest_run(name)
        if run is not None and spool.array(name, run) is not None:
            self.arrays[name] = run
            return True
        started = self.memory.newest(name)
        if run is not None or started is None:
            return False
        spec = spool.job_spec(RUNNING, name) or spool.job_spec(QUEUED, name)
        if spec is None or not spec.is_array:
            return False
        if started.boot_id == self._prober.boot_id():
            # The metadir was removed: the results of its tasks are on record, and the tasks not issued are lost.
            self._restore_array(started, spec)
            self.arrays[name] = started.run
        elif in_running:
            # A power cut undid the claim, and with it all that was made of the file: it is expanded again.
            spool.requeue_file(name, QUEUED)
        return True

    def _restore_array(self, started: journal.Started, spec: Spec) -> None:
        spool, name = self._spool, started.job
        text = spool.job_text(RUNNING, name) or spool.job_text(QUEUED, name) or b""
        record = ArrayRecord(
            job=name,
            run=started.run,
            tasks=Tasks(name, spec).count,
            inode=started.inode,
            boot_id=started.boot_id,
            submitted_at_ns=started.arrived_at_ns,
            expanded_at_ns=started.at_ns,
        )
        log.warning(
            "array %s: someone removed %s; tasks not created yet are lost",
            name,
            f"jobs/{name}/{started.run}",
        )
        spool.publish_metadir(name, started.run, {layout.SPEC_COPY: text, layout.ARRAY: render_array(record)})

    def _unfinished_run(self, name: str, *, in_running: bool) -> ActiveRun | None:
        spool = self._spool
        started = self.memory.newest(name)
        if started is not None:
            if self._taken_back(name, started):
                # The claim is repeated, so that the end finds the file in its place.
                spool.claim_again(name, QUEUED)
            elif self._end_lost(name, started):
                log.warning("job %s had ended, but the power cut took its result", name)
                spool.claim_again(name, DONE)
            # Within one boot no power cut can have taken it: it was removed, and its run without metadir has begun all
            # the same.
            removed = started.boot_id == self._prober.boot_id() and started.run not in spool.runs(name)
            if not removed and spool.grant(name, started.run) is None:
                self._restore_metadir(name, started.run, started)
            return self._adopt(name, started.run, started)
        run = self._claimed_run(name)
        if run is not None:
            return self._adopt(name, run, None)
        run = spool.latest_run(name)
        if run is not None and spool.result(name, run) is None:
            return self._adopt(name, run, self.memory.waits.get(name))
        if in_running:
            self._without_run(name, run or 0)
        return None

    def _without_run(self, name: str, newest: int) -> None:
        """Handle a file in `running/` that belongs to no run: claimed and not started, put there by hand, or over."""
        over = self.memory.closed.get(name)
        if (
            over is not None
            and over.boot_id != self._prober.boot_id()
            and over.run >= newest
            and self._spool.holds(over.inode, name, RUNNING)
        ):
            log.warning(_TAKEN_BACK, name)
            self._spool.archive(name, RUNNING, None)
        elif self._spool.requeue_file(name, QUEUED):
            log.warning(_WITHOUT_RUN, name)

    def _claimed_run(self, name: str) -> int | None:
        """Return the newest run with a grant, if the file in `running/` was claimed for it."""
        for run in reversed(self._spool.runs(name)):
            grant = self._spool.grant(name, run)
            if grant is not None:
                held = grant.inode is not None and self._spool.holds(grant.inode, name, RUNNING)
                return run if held else None
            if self._spool.result(name, run) is None and self._spool.jid(name, run) is not Liveness.VOID:
                return None  # a power cut emptied it
        return None

    def _taken_back(self, name: str, started: journal.Started) -> bool:
        """Whether a power cut undid the claim of a started job: its file in `queued/` is untouched since."""
        if started.boot_id == self._prober.boot_id():
            return False
        return self._spool.untouched(started.inode, name, QUEUED, started.at_ns)

    def _end_lost(self, name: str, started: journal.Started) -> bool:
        """Whether a power cut has emptied the end of a filed run: it was not cancelled, so it is lost."""
        spool, run = self._spool, started.run
        return (
            started.boot_id != self._prober.boot_id()
            and spool.exit(name, run) is None
            and spool.record(name, run, layout.RESULT) is not None
            and spool.result(name, run) is None
            and spool.stop(name, run) is None
            and spool.holds(started.inode, name, DONE)
        )

    def _restore_metadir(self, name: str, run: int, started: journal.Started) -> None:
        """Restore the records of a run from the journal after a power cut took its metadir."""
        spool, loader = self._spool, self._loader
        record = loader.presumed_grant(name, run, loader.spec(name, run, started.inode), started)
        record = replace(record, granted_at_ns=started.at_ns, boot_id=started.boot_id, inode=started.inode)
        if run in spool.runs(name):
            spool.put_record(name, run, layout.GRANT, run_records.render_grant(record))
            return
        text = spool.job_text(RUNNING, name) or spool.job_text(QUEUED, name) or b""
        spool.publish_metadir(name, run, {layout.SPEC_COPY: text, layout.GRANT: run_records.render_grant(record)})

    def _adopt(self, name: str, run: int, known: _Known) -> ActiveRun:
        """Adopt a run; *known* is its line in the journal, or that of its job while it waited."""
        spool = self._spool
        files = spool.load(name, run, self._prober, leftovers=False)
        live = self._loader.run(files, known)
        handle = self._executors.adopt(live.executor, name, run, None)
        waits = handle.liveness() is Liveness.ALIVE  # elsewhere, until it begins
        if files.proof.verdict in (Verdict.STARTING, Verdict.SILENT) and not waits:
            spool.take_jid(name, run)
            files = spool.load(name, run, self._prober, leftovers=False)
        if isinstance(files.jid, Jid) and live.may_be(files.jid):
            handle.identified(files.jid)
        live.adopted_as(handle)
        live.began(_started_boot_ns(files.jid if live.elsewhere is None else None, live.started_at_ns))
        if files.stop is not None:
            live.stop_on_record(files.stop)
        # An empty jid may be in the middle of being written.
        silent_ns = SILENT_NS if files.jid is Liveness.ABSENT and not live.copied else 0
        served_until_ns = self._served_until_ns if isinstance(known, journal.Started) else None
        live.may_be_silent(time.monotonic_ns() + silent_ns, served_until_ns)
        damaged = spool.damaged(*live.key)  # which cannot be true of it
        if live.jid is None and isinstance(spool.jid(*live.key), Jid):
            damaged.append(layout.JID)
        if damaged:
            why = f"not of this run: {', '.join(damaged)}"
            error = InvalidRecord(cannot("understand", "its records", why, where=f"jobs/{live.name}/{live.run}"))
            self._confinement.failed(Thing.of_run(live.key), _ADOPT, error)
        return live

    def _refuse_other_hosts(self, live: ActiveRun) -> None:
        jid = live.jid
        if jid is None or live.elsewhere is not None or jid.host == identity.host():
            return
        if self._prober.liveness(jid) is not Liveness.ELSEWHERE:
            return
        raise SpoolUnusable(
            cannot(
                "start the dispatcher",
                "for this spool",
                f"run {live.run} of job {live.name} was started on host {jid.host} and may still be alive there",
                where=self._spool.root,
                remedy=f'stop the jobs there; if that host no longer exists, set other_hosts_gone = ["{jid.host}"] '
                "in config.toml",
            )
        )


def _started_boot_ns(jid: Jid | Liveness | None, at_ns: int) -> int:
    """Return when the run started, on the clock since boot, which cannot be set."""
    if isinstance(jid, Jid):
        return jid.start_ticks * identity.TICK_NS
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - max(0, time.time_ns() - at_ns)


def _mend(spool: LockedSpool, array: Array) -> None:
    """Write the tasks again that a power cut left empty; the array's file has all their content."""
    name, run = array.name, array.run
    texts: TaskFiles | None = None
    for position, task in enumerate(array.names):
        paths = [spool.layout.task_file(name, run, task)]
        paths += [spool.layout.job_file(place, task) for place in (QUEUED, HELD)]
        for path in paths:
            if (status := status_of(path)) is None or status.st_size:
                continue
            if texts is None:
                data = spool.record(name, run, layout.SPEC_COPY) or spool.job_text(RUNNING, name) or b""
                try:
                    texts = TaskFiles(name, data, array.spec)
                except InvalidFile:
                    return
            log.warning("array %s: its task %s was lost to a power cut and is written again", name, task)
            spool.disk.put(path, texts.text(position))
