"""Scanning of the state directories: updates the known jobs, and the reservations, from their files.

Events say where to look first; a look at everything finds what they missed. It only writes the `.error` files beside
bad job files.

A look gives way: when its time in a pass is over, it continues in the next, and jobs seen so far may start before.
Large files, which take long to read, come last. Only the first look of a dispatcher is done in one go.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

from spool.core import layout
from spool.core.errors import InvalidJob, InvalidReservation
from spool.core.gpus import settle
from spool.core.layout import HELD, QUEUED, RUNNING
from spool.core.model import EventName, Reservation, Spec
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context
from spool.dispatcher.wakeup import Hint, NameChange
from spool.formats import jobfile, journal, reservation
from spool.machine.host import why_not_expanded
from spool.state.run import UNREVIEWED, ActiveRun, JobEntry, JobFileVersion
from spool.store.disk import status_of
from spool.store.edited import QUIET_NS, FileText, ReadFailure, in_order_of_making, is_open_in_editor, read_stable
from spool.store.ownership import mover

RECHECK_NS, RECHECK_MAX_NS = 50_000_000, 2_000_000_000  # how soon to try a file again that is being written
_IN_TURN = 256  # files of live runs, in each look at everything
_COARSE_NS = 2_000_000_000  # no file system has a coarser clock: two changes within that time may leave the same mtime
_LARGE = 1 << 16  # bytes: reading a larger file may take as long as a hundred starts
_PATIENCE_NS = 1_000_000_000  # how long such a file waits while there are others to look at
TOGETHER_NS = 10_000_000_000  # one command that moves an array and its tasks takes less
FORGET_NS = 2_000_000_000  # a file that comes back within this time was never gone (how editors save)
_SAY = "report what is wrong with"
_IN_EDITOR = "open in an editor"
_LOOK_AT = "read the file of"
_WITHDRAW = "remove the hold reason of"
_SAME_TEXT = 512  # distinct texts that are remembered: many jobs often share one
_SHORT_TEXT = 1 << 14  # bytes: longer ones are not, since all must fit into memory


class Scanner(Component):
    """Watches the files of jobs. Gives jobs their places in the queue, and starts and stops their clocks."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._layout = context.spool.layout
        self._timer = context.timers.timer("files")
        self._parsed: dict[bytes, tuple[Spec, bytes]] = {}
        # Files that were being written, or whose look failed: when to look again, and after what pause.
        self._recheck: dict[tuple[str, str], tuple[int, int]] = {}
        self._rest: Iterator[None] | None = None  # the rest of a look at everything
        self._large: dict[tuple[str, str], int] = {}  # large files still to be read, and since when
        self._vanished: dict[str, int] = {}
        self._round: list[tuple[str, int]] = []  # runs whose files in running/ are checked next
        self._mark: tuple[object, object] = (None, None)  # of running/ and of the state, at the last look
        self._marked_at_ns = 0  # monotonic: since when they have been so
        self._agree = False  # whether running/ agreed with the known runs then

    # The choice of files.

    def everything(self, until_ns: int | None = None) -> None:
        """Look at every file of the state directories, as if no event had ever been raised.

        Give way at *until_ns*, monotonic; `go_on` does the rest.
        """
        self._rest = self._all(in_one_go=until_ns is None)
        self.go_on(until_ns)

    @property
    def unfinished(self) -> bool:
        """Whether a look has given way, and must be continued."""
        return self._rest is not None or bool(self._large)

    def go_on(self, until_ns: int | None, *, busy: bool = False) -> None:
        """Continue a look that has given way, by at least one step. *busy*: other files come first."""
        while self.unfinished:
            if self._rest is None:
                if until_ns is None:  # the first look: large files come after jobs that can start
                    return
                (place, name), since = next(iter(self._large.items()))
                if busy and time.monotonic_ns() < since + _PATIENCE_NS:
                    return
                del self._large[place, name]
                self.examine(place, name)
            elif next(self._rest, self) is self:
                self._rest = None
            if until_ns is not None and time.monotonic_ns() >= until_ns:
                return

    def _all(self, *, in_one_go: bool) -> Iterator[None]:
        """Look at everything, step by step. Anything may change between two steps, so no state is kept over them."""
        for place in (QUEUED, HELD):
            with self._confinement.spool("list", f"{place}/") as piece:
                found, marks = self._scan(place)
            if piece.failed:
                continue
            jobs = self._state.jobs.values()
            for name in [job.name for job in jobs if (job.queued if place == QUEUED else job.held) is not None]:
                if name not in found:
                    self._set(place, name, None)
            for name in found:
                self.examine(place, name, may_wait=True, marks=marks if in_one_go else None)
                yield
        self._look_at_running()

    def _look_at_running(self) -> None:
        """Read the names in `running/`, and mark live runs whose files may have changed."""
        with self._confinement.spool("list", f"{RUNNING}/"):
            now_ns, runs = time.monotonic_ns(), (self._state.version, len(self._state.live))
            mark = self._spool.mark_of(RUNNING), runs
            if mark != self._mark:
                self._mark, self._marked_at_ns, self._agree = mark, now_ns, False
            if not self._agree:
                files, orders = self._spool.running_files()
                known = {live.name: live.inode for live in self._state.live.values()}
                strays = files.keys() - known.keys() - self._state.arrays.keys()
                changed = [name for name, inode in known.items() if files.get(name) != inode]
                self._changes.suspensions.update(orders)
                self._changes.strays.update(strays)
                self._changes.runs.update(changed)
                is_settled = mark[0] is not None and now_ns - self._marked_at_ns > _COARSE_NS
                self._agree = is_settled and not (strays or changed or orders)
        self._changes.suspensions.update(self._state.runs.suspended)
        self._changes.arrays.update(self._state.arrays)
        # The directory reveals new and removed files. Changes within a file need a look at the file.
        self._round = self._round or list(self._state.live)
        some, self._round = self._round[:_IN_TURN], self._round[_IN_TURN:]
        lives = (live for key in some if (live := self._state.live.get(key)) is not None)
        self._changes.runs.update(live.name for live in lives if self._was_written(live))

    def _was_written(self, live: ActiveRun) -> bool:
        """Whether the job file of a run may have changed since it was last read."""
        try:
            status = status_of(self._layout.job_file(RUNNING, live.name))
        except OSError:  # reported when it is read
            return True
        return status is None or (status.st_ino, status.st_mtime_ns) != (live.inode, live.mtime_ns)

    def hint(self, hint: Hint) -> None:
        """Look at the object of one event, or mark it in `running/`. The dispatcher's own moves need no look."""
        place, filename, change = hint
        if place == RUNNING and (name := layout.job_beside(filename, layout.SUSPENDED_SUFFIX)) is not None:
            self._changes.suspensions.add(name)
            return
        name = (
            layout.job_of(filename)
            or layout.job_of_editor_mark(filename)
            or layout.job_beside(filename, layout.ERROR_SUFFIX)
        )
        if name is None:
            return
        is_file = layout.job_of(filename) is not None
        if place in (QUEUED, HELD):
            if is_file and change is NameChange.GONE and self._known(place, name) is None and not self._is_arrays(name):
                return
            self.examine(place, name, may_wait=True)
            if self._state.live_of(name) is not None:
                self._changes.runs.add(name)
        elif (live := self._state.live_of(name)) is not None:
            # The kernel merges the event of the dispatcher's own move with that of a file put in its place.
            if not is_file or change is not NameChange.CAME or self._was_written(live):
                self._changes.runs.add(name)
        elif name in self._state.arrays:
            self._changes.arrays.add(name)
        elif is_file and change is not NameChange.GONE:
            self._changes.strays.add(name)
        elif is_file and (job := self._state.jobs.get(name)) is not None and job.blocked is not None:
            self._state.unblock(job)  # it may have been the obstacle

    def due(self, now_ns: int) -> None:
        """Look again at files that are not known well yet, and forget those that stayed away. *now_ns* is monotonic."""
        pauses = self._confinement.pauses
        for (place, name), (when, _) in list(self._recheck.items()):
            if when <= now_ns and not pauses(Thing.of_job(name), _LOOK_AT):
                self.examine(place, name, may_wait=True)
        for name, since in list(self._vanished.items()):
            if since + FORGET_NS <= now_ns and name not in self._changes.vanished.names:
                del self._vanished[name]
                self.forget_place(name)
        times = [at for (_, name), (at, _) in self._recheck.items() if not pauses(Thing.of_job(name), _LOOK_AT)]
        times += [since + FORGET_NS for since in self._vanished.values()]
        self._timer.set(min(times, default=None))

    @property
    def awaits_writers(self) -> bool:
        """Whether a file in `queued/` is being written, could not be read just now, or is still to be looked at."""
        lasts = self._confinement.lasts
        waits = (name for place, name in self._recheck if place == QUEUED)
        return self.unfinished or not all(lasts(Thing.of_job(name), _LOOK_AT) for name in waits)

    def examine(
        self, place: str, name: str, *, anew: bool = False, may_wait: bool = False, marks: set[str] | None = None
    ) -> None:
        """Look at one job file; *anew*: as if it had never been seen, because the meaning of its name has changed.

        *may_wait*: a large one is read when there is nothing else to look at. *marks* are the editors' files there, if
        known. After a failure the known version stays, and the look is repeated.
        """
        if self._is_arrays(name):
            return
        with self._confinement.of(Thing.of_job(name), _LOOK_AT) as piece:
            path = self._layout.job_file(place, name)
            status = status_of(path)
            if status is None:  # the case after every move of our own
                self._take(place, name, ReadFailure.GONE)
            else:
                edited = is_open_in_editor(self._layout.at(place), name, marks)
                if anew or self._is_new(place, name, edited, status):
                    if may_wait and status.st_size > _LARGE:
                        self._large.setdefault((place, name), time.monotonic_ns())
                        return
                    file = self._understood(place, name, read_stable(path), edited)
                    is_twice = place == QUEUED and isinstance(file, JobFileVersion) and self._is_twice(name, file)
                    self._take(place, name, ReadFailure.GONE if is_twice else file)
        if piece.failed:  # the look is due when the pause of its trouble is over
            self._recheck[place, name] = (0, 0)

    def _is_twice(self, name: str, file: JobFileVersion) -> bool:
        """Whether a task came together with its array and has begun as a task of that; its file is put away then.

        `mv done/m*.toml queued/` moves both, and each is to run once.
        """
        live, task = self._state.live_of(name), file.spec.task if file.spec is not None else None
        array = self._state.arrays.get(task.array) if task is not None else None
        if live is None or array is None or live.stop is not None or live.inode == file.inode:
            return False
        # The run may come long after the array, which may be large, but not before it.
        before = live.wait.arrived_at_ns < array.arrived_at_ns - TOGETHER_NS
        if before or abs(file.changed_at_ns - array.arrived_at_ns) > TOGETHER_NS:
            return False
        is_there = status_of(self._layout.job_file(RUNNING, name)) is not None  # else this is what was there
        is_same = self._spool.job_text(QUEUED, name) == self._spool.record(name, live.run, layout.SPEC_COPY)
        return is_there and is_same and self._spool.archive_file(name, QUEUED)

    def _is_arrays(self, name: str) -> bool:
        """Whether the name is that of an array in progress, or a file of it waits for its end."""
        if name not in self._state.arrays:
            return False
        self._changes.arrays.add(name)
        return True

    def _is_new(self, place: str, name: str, edited: bool, status: os.stat_result) -> bool:
        """Whether the file has changed since it was last seen, or was never seen."""
        known = self._known(place, name)
        return (
            known is None
            or known.unread
            or (known.inode, known.mtime_ns, known.size) != (status.st_ino, status.st_mtime_ns, status.st_size)
            or (known.invalid and known.changed_at_ns != status.st_ctime_ns)  # it may be readable by now
            or (known.problem == _IN_EDITOR) != edited
            or (place, name) in self._recheck
        )

    def _known(self, place: str, name: str) -> JobFileVersion | None:
        job = self._state.jobs.get(name)
        return None if job is None else job.file(place)

    # The content of files.

    def _understood(
        self, place: str, name: str, seen: FileText | ReadFailure, edited: bool
    ) -> JobFileVersion | ReadFailure:
        """Return the file parsed; if it is unusable, write why beside it."""
        if isinstance(seen, ReadFailure):
            return seen
        problem, mistake = _IN_EDITOR if edited else None, ""
        spec: Spec | None = None
        text: bytes | None = None
        reviewed: journal.Reviewed | None = None
        is_foreign = seen.status.st_uid != self._spool.ownership.owner
        if why := self._spool.why_not(seen.status, place, name):
            if seen.status.st_nlink > 1 and time.time_ns() - seen.status.st_ctime_ns < QUIET_NS:
                return ReadFailure.WRITING  # a submission is removing its other name at this moment
            mistake = f"cannot use job {name}: {why}\n"
        elif not edited:
            try:
                reviewed = self._state.review_of(name, seen.version)
                spec, text = self.parse(name, seen.data, reviewed)
                text = seen.data if is_foreign else text  # its owner could change it and restore its time
            except InvalidJob as error:
                mistake = jobfile.render_errors(name, error.problems)
        told = True
        if mistake:
            problem, told = self._complain(place, name, mistake, to_others=is_foreign)
        identity = (*seen.version, seen.status.st_ctime_ns, seen.status.st_uid)
        # What hooks set in an array is in the files of its tasks.
        is_task = spec is not None and spec.task is not None and spec.task.array in self._state.arrays
        asks = place == QUEUED and EventName.QUEUEING in self._events.asked and not is_task
        if spec is not None and reviewed is None and asks:
            return JobFileVersion(*identity, None, UNREVIEWED, unreviewed=spec, text=text)
        return JobFileVersion(*identity, spec, problem, bool(mistake), unread=not told, text=text)

    def _take(self, place: str, name: str, file: JobFileVersion | ReadFailure) -> None:
        if file in (ReadFailure.GONE, ReadFailure.NOT_OURS):
            self._recheck.pop((place, name), None)
            if self._known(place, name) is not None:
                self._set(place, name, None)
            elif name not in self._state.jobs:  # it may have been cancelled before this look
                self._changes.vanished.add(name)
        elif isinstance(file, ReadFailure):
            self._not_whole(place, name, file)
        else:
            self._recheck.pop((place, name), None)
            self._set(place, name, file)

    def configuration_changed(self) -> None:
        """Read every file again, since the configured defaults have changed."""
        self._parsed.clear()
        for job in list(self._state.jobs.values()):
            for place, file in ((QUEUED, job.queued), (HELD, job.held)):
                if file is not None:
                    self.examine(place, job.name, anew=True)

    def _not_whole(self, place: str, name: str, why: ReadFailure) -> None:
        if why is ReadFailure.WRITING:
            _, last = self._recheck.get((place, name), (0, 0))
            wait = min(max(RECHECK_NS, 2 * last), RECHECK_MAX_NS)
            self._recheck[place, name] = (time.monotonic_ns() + wait, wait)
            self._timer.advance(self._recheck[place, name][0])
            if (job := self._state.jobs.get(name)) is not None:  # keep its place, and do not start its old version
                self._state.refuse_file(job, place, "being written")
            return
        self._recheck.pop((place, name), None)
        status = status_of(self._layout.job_file(place, name))
        if status is None:
            self._set(place, name, None)
            return
        words = f"the file is {why.value}"
        if is_foreign := status.st_uid != self._spool.ownership.owner:
            words = self._spool.why_not(status, place, name) or words
        gist, told = self._complain(place, name, f"cannot use job {name}: {words}\n", to_others=is_foreign)
        identity = (status.st_ino, status.st_mtime_ns, status.st_size, status.st_ctime_ns, status.st_uid)
        self._set(place, name, JobFileVersion(*identity, None, gist, True, why is ReadFailure.UNREADABLE or not told))

    def refuse(self, place: str, job: JobEntry, text: str) -> None:
        """Mark a file that could be read as invalid after all; *text* says why."""
        if job.file(place) is not None:
            self._state.refuse_file(job, place, self._complain(place, job.name, text)[0], invalid=True)

    def _set(self, place: str, name: str, file: JobFileVersion | None) -> None:
        job = self._state.job(name)
        before = job.file(place)
        if place == HELD:
            self._see_why_held(job, file)
        self._state.see_file(job, place, file)
        # Whatever kept it from being read, it may have been invalid before that.
        good = file is None or file.problem in (None, UNREVIEWED)
        if before is not None and before.problem is not None and good:
            self._complain(place, name, None)
        now = time.time_ns()
        if job.queued is None and job.held is None:
            if job.wait is not None and before is not None:
                self._vanished[name] = time.monotonic_ns()
                self._timer.advance(self._vanished[name] + FORGET_NS)
                self._changes.vanished.add(name)
        else:
            self._vanished.pop(name, None)
            self._see_place(job, now)
        self._state.settle(job)

    def _see_place(self, job: JobEntry, now: int) -> None:
        """Give a new job its place, and let its clock run while it is in `queued/`."""
        file = job.queued or job.held
        assert file is not None
        queued = job.queued is not None
        was_parked = self._state.park(job, parked=not queued)
        before = job.wait
        new = job.takes_place(now)
        if new and queued:
            self._events.file(EventName.QUEUED, job, file, now)
        if job.wait == before and (queued or was_parked):
            return
        if not queued:
            self._events.file(EventName.HELD, job, file, now, job.hold_reason)
        elif was_parked:
            self._events.file(EventName.RELEASED, job, file, now)
        self._journal.note_place(job)

    def forget_place(self, name: str) -> None:
        """Forget the place of a job that is in no directory any more: it will not come back as the same submission."""
        job = self._state.jobs.get(name)
        if job is not None and job.queued is None and job.held is None and job.wait is not None:
            self._state.forget_place(job)
            self._journal.note(journal.Left(name))
            self._state.settle(job)

    def _see_why_held(self, job: JobEntry, file: JobFileVersion | None) -> None:
        """Read whether spool itself holds the job; after an edit, a removal or a release it no longer does."""
        another = file is not None and job.held is not None and file.inode != job.held.inode
        why = self._spool.hold_reason(job.name, file.mtime_ns) if file is not None and not another else ""
        if why:
            self._confinement.done(Thing.of_job(job.name), _WITHDRAW)
        elif job.hold_reason or not another:
            with self._confinement.of(Thing.of_job(job.name), _WITHDRAW):
                # One may be unread: the job was edited before the first look at it in held/.
                path = self._spool.layout.reason_file(job.name)
                if job.hold_reason or status_of(path) is not None:
                    self._spool.disk.discard(path)
        job.see_why_held(why)

    def parse(self, name: str, data: bytes, reviewed: journal.Reviewed | None = None) -> tuple[Spec, bytes | None]:
        """Return the spec of job *name*, with what hooks set in it and the configured defaults.

        It comes with the text, as one object shared by all jobs with equal texts; None if this is the first of them.
        Raises InvalidJob.
        """
        defaults = self._settings.config.defaults
        if reviewed is not None and reviewed.keys:
            defaults = jobfile.with_set(defaults, reviewed.keys)
            return jobfile.parse(data, name=name, defaults=defaults, why_no_path=why_not_expanded), None
        known = self._parsed.get(data)
        if known is not None:
            return known
        spec = jobfile.parse(data, name=name, defaults=defaults, why_no_path=why_not_expanded)
        # The same text under another name gives the same spec, except where it depends on the name.
        if spec.depends_on is None and not spec.is_array and len(data) <= _SHORT_TEXT:
            if len(self._parsed) >= _SAME_TEXT:
                self._parsed.clear()
            self._parsed[data] = spec, data
        return spec, None

    def _complain(self, place: str, name: str, text: str | None, *, to_others: bool = False) -> tuple[str, bool]:
        """Write the problems of a job file into the `.error` file beside it, which other users may read if *to_others*.

        Return the first of them, and whether that succeeded: else the next look at everything repeats it. None removes
        that file; a directory of that name is ignored.
        """
        path = self._spool.layout.error_file(place, name)
        with self._confinement.of(Thing.of_job(name), _SAY) as piece:
            if text is not None:
                self._spool.complain(path, text, to_others=to_others)
            else:
                with suppress(IsADirectoryError):
                    self._spool.disk.discard(path)
        return jobfile.gist_of(text), not piece.failed

    # The disk.

    def _scan(self, place: str) -> tuple[dict[str, None], set[str]]:
        """Return the jobs with files there, and the marks of editors. Raises OSError."""
        listed = (os.listdir if self._state.jobs else in_order_of_making)(self._layout.at(place))
        found: dict[str, None] = {}
        marks, complaints, reasons = set[str](), set[str](), set[str]()
        for filename in listed:
            name = layout.job_of(filename)
            if name is not None:
                found[name] = None
            elif filename.startswith("."):
                marks.add(filename)
            elif (name := layout.job_beside(filename, layout.ERROR_SUFFIX)) is not None:
                complaints.add(name)
            elif (name := layout.job_beside(filename, layout.REASON_SUFFIX)) is not None:
                reasons.add(name)
        for name in reasons - found.keys():
            with self._confinement.of(Thing.of_job(name), _WITHDRAW):
                self._spool.disk.discard(self._spool.layout.reason_file(name))
        for name in complaints:
            file = self._known(place, name)
            if name not in found or (file is not None and not file.invalid):
                self._complain(place, name, None)
        return found, marks


_KEEP = "save the text of"
_REMOVED_NS = 1_000_000_000  # an editor that saves removes the file for a moment


class Reservations(Component):
    """`reservations/*.toml`, read again when the directory has changed, or a file was being written."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._timer = context.timers.timer("files")  # when to read a file again that was being written
        self._pause_ns = 0  # the pause before that
        self._told: dict[str, str | None] = {}  # what was written beside each file; None: nothing
        self.files: dict[str, Reservation | str] = {}  # or what is wrong with it
        self.standing: tuple[Reservation, ...] = ()  # the valid ones, now or in future, in the order of writing
        self._gpus: frozenset[int] | None = None
        self._removed: dict[str, tuple[int, Reservation]] = {}  # when noticed, monotonic, and its value
        self._names: frozenset[str] | None = None  # the files of the last look; None: none has succeeded

    @property
    def due(self) -> bool:
        """Whether a file that was being written must be read again."""
        return self._timer.at_ns is not None and time.monotonic_ns() >= self._timer.at_ns

    def look(self) -> None:
        """Read the files."""
        last, self._pause_ns = self._pause_ns, 0
        self._timer.set(None)
        found: dict[str, Reservation | str] = {}
        with self._confinement.service("list", f"{layout.RESERVATIONS}/") as listing:
            names = self._spool.names(layout.RESERVATIONS)
        if listing.failed:  # keep the valid ones as they were
            return
        for name in names:
            seen: FileText | ReadFailure = ReadFailure.UNREADABLE
            with self._confinement.of(Thing("reservation", name), "read") as piece:
                seen = read_stable(self._spool.layout.job_file(layout.RESERVATIONS, name))
                if seen is ReadFailure.UNREADABLE:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{layout.RESERVATIONS}/{name}.toml")
            if isinstance(seen, FileText):
                found[name] = self._understood(name, seen)
            elif name in self.files and (piece.failed or seen is ReadFailure.WRITING):  # keep it as it was
                found[name] = self.files[name]
            if seen is ReadFailure.WRITING:
                self._pause_ns = min(max(RECHECK_NS, 2 * last), RECHECK_MAX_NS)
                self._timer.set(time.monotonic_ns() + self._pause_ns)
        self._see_removed(found)
        self._names = frozenset(names)
        self._confinement.keep("reservation", {*names, *self._told, *self._removed})
        self.files = found
        self._settle()

    def _understood(self, name: str, seen: FileText) -> Reservation | str:
        if why := self._spool.why_not(seen.status, layout.RESERVATIONS, name):
            return f"- {why}\n"
        try:
            return reservation.parse(seen.data, name=name, created_at_ns=seen.status.st_mtime_ns)
        except InvalidReservation as error:
            return "".join(f"- {problem.message}\n" for problem in error.problems)

    def _see_removed(self, found: Collection[str]) -> None:
        """Keep the texts of valid reservations whose files are gone."""
        now = time.monotonic_ns()
        for one in self.standing:
            if one.name not in found:
                self._removed.setdefault(one.name, (now, one))
        for name, (since_ns, one) in list(self._removed.items()):
            if name in found:  # it was changed
                del self._removed[name]
            elif now >= since_ns + _REMOVED_NS and not self._confinement.pauses(Thing("reservation", name), _KEEP):
                with self._confinement.of(Thing("reservation", name), _KEEP) as piece:
                    self._spool.keep_reservation(name, one.created_at_ns, reservation.render(one))
                if not piece.failed:
                    del self._removed[name]
        if self._removed:
            self._timer.advance(now + _REMOVED_NS)

    def why_gone(self, name: str, created_at_ns: int) -> str:
        """Return why that reservation is no more; "" while its file is there, is unread or may come back."""
        if self._names is None or name in self._removed:
            return ""
        if name not in self._names:
            return f"by {mover(self._spool.root, layout.RESERVATIONS)}: its file was removed"
        now = self.files.get(name)
        is_other = isinstance(now, str) or (now is not None and now.created_at_ns != created_at_ns)
        return "its file was changed" if is_other else ""

    @property
    def ask_for_gpus(self) -> bool:
        """Whether there are reservations, and the GPUs are not known yet."""
        return self._gpus is None and bool(self.files)

    def machine_has(self, gpus: frozenset[int] | None) -> None:
        """Set the indices of the existing GPUs; None if they are not known (yet)."""
        if gpus != self._gpus:
            self._gpus = gpus
            self._settle()

    def _settle(self) -> None:
        """Determine the valid reservations, and report the problems of the others beside their files."""
        standing, refused = settle((one for one in self.files.values() if isinstance(one, Reservation)), self._gpus)
        if standing != self.standing:
            self.standing = standing
            self._state.changed()
        wrong = {name: found for name, found in self.files.items() if isinstance(found, str)}
        wrong |= {name: f"- {why}\n" for name, why in refused.items()}
        for name in self._told.keys() | self.files.keys():
            thing, why = Thing("reservation", name), wrong.get(name)
            if self._told.get(name, "") == why or self._confinement.pauses(thing, _SAY):
                continue
            with self._confinement.of(thing, _SAY) as piece:
                path = self._spool.layout.error_file(layout.RESERVATIONS, name)
                if why is not None:
                    end = "This file disappears when it is fixed or removed.\n"
                    self._spool.complain(path, f"The reservation {name} is not in force:\n{why}{end}")
                elif status_of(path) is not None:
                    self._spool.disk.discard(path)
            if not piece.failed:  # else the next look tries again
                self._told[name] = why
        self._told = {name: why for name, why in self._told.items() if name in self.files or why is not None}
