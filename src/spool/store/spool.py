"""Read access to a spool. Nothing here changes a spool or needs a dispatcher."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from spool.core import layout
from spool.core.errors import InvalidJob, InvalidRecord, NoSuchJob, SpoolUnusable, cannot
from spool.core.gpuuse import GpuWatch
from spool.core.layout import LOCAL_EXECUTORS, Layout
from spool.core.lifecycle import WITHOUT_JID, Evidence, Exit, LastSigns, Liveness, Prober, RunEnd, end_of
from spool.core.model import (
    DEFAULT_KILL_GRACE_NS,
    SECOND_NS,
    Jid,
    JobDefaults,
    Result,
    Spec,
    Stop,
    Suspension,
    in_force,
)
from spool.formats import run_records
from spool.formats.run_records import (
    ArrayRecord,
    GrantRecord,
    RunFiles,
    Usage,
    parse_array,
    parse_history_line,
    parse_result,
)
from spool.formats.wire import MOST_READ, one_line
from spool.store.disk import read_file, status_of
from spool.store.lock import serving
from spool.store.reading import (
    end_of_file,
    history_lines,
    is_too_long,
    read_bytes,
    read_record,
    read_with_status,
    refuse_link,
)

if TYPE_CHECKING:
    from spool.store.ownership import Ownership

T = TypeVar("T")
_Named = TypeVar("_Named", Result, GrantRecord, ArrayRecord)

_LINES = frozenset(
    {
        *(layout.JID, layout.ENDED, layout.RC, layout.STOP, layout.STATUS, layout.ENGINE, layout.SUSPENDED),
        *(layout.FAILURE, layout.REFUSED, layout.KEPT, layout.SIGNAL, layout.PROGRESS, layout.USAGE),
    }
)
_SELDOM = frozenset({layout.STOP, layout.REFUSED, layout.KEPT, layout.SUSPENDED, layout.GPUS, layout.FAILURE})
_OUTLASTS = re.compile(rb"spool_outlast|\nspool_start ")  # in the text of a wrapper that waits for its leftovers
_SIGNS = (  # signs of life: files that a run and its wrapper write
    layout.JID, layout.STATUS, layout.JOB_LOG, layout.JOB_STDERR, layout.PROGRESS, layout.SIGNAL, layout.FAILURE,
    layout.USAGE, layout.ENDED,
)  # fmt: skip
_MOST_LINES = 1_000  # newest lines of the history to search in place of a damaged record
_UNTOLD = "the system did not let its command start"  # used if the disk had no room for the reason
_RUN = re.compile(r"[1-9][0-9]{0,8}")
_HISTORY_SLACK_NS = 3600 * SECOND_NS  # tolerance in the order of lines, for a clock that was set
_CLOCKS_AGREE_NS = 5 * SECOND_NS  # tolerance: a start takes a moment too

MISSED_NS = 60 * SECOND_NS
"""A dispatcher may have missed this much before it was killed."""


class Service(Enum):
    """Whether a dispatcher serves a spool."""

    NONE = "not running"
    SERVED = "running"
    ASTRAY = "running, but its .lock was deleted or replaced"


class Spool:
    """A view of a spool. Every read takes the disk as it is at that moment; missing files give None.

    An existing file that cannot be read raises OSError: nothing may be concluded from it. A record that is not a
    regular file (a directory, a link, a FIFO) counts as empty.
    """

    unread: Mapping[str, OSError] = MappingProxyType({})  # what could not be read: only a `TolerantSpool` goes on then

    def __init__(self, root: str) -> None:
        # Its real path, so that processes have one mark, whatever path was given.
        self.layout: Layout = Layout(os.path.realpath(root))
        self.root: str = self.layout.root
        self.strict: Spool = self  # the same spool, raising every error
        self._ownership: Ownership | None = None

    @classmethod
    def open(cls, root: str) -> Spool:
        """Return the spool at *root*; SpoolUnusable if there is none, OSError if that cannot be told."""
        queued = f"{root}/{layout.QUEUED}"
        try:
            if stat.S_ISDIR(os.stat(queued).st_mode):
                return cls(root)
        except OSError as error:
            if isinstance(error, PermissionError):
                raise SpoolUnusable(cannot("open", "spool", str(error.strerror), where=root)) from None
        if os.path.isdir(f"{root}/{layout.RUNNING}"):  # a directory of it was taken away, or replaced
            why = "it is not a directory; move it somewhere else" if os.path.lexists(queued) else "it is missing"
            raise SpoolUnusable(cannot("open", "spool", why, where=queued, remedy="`spool init` makes it again"))
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(queued)  # raises OSError if that cannot be told
        raise SpoolUnusable(f"cannot open spool: {root}: no spool there; create one with `spool init`")

    # Job files.

    def names(self, place: str) -> list[str]:
        """Return the jobs with files in the state directory *place*, unsorted."""
        return self.names_and_others(place)[0]

    def names_and_others(self, place: str) -> tuple[list[str], list[str]]:
        """Return the result of `names`, and the names of all other files there."""
        try:
            listed = os.listdir(self.layout.at(place))
        except FileNotFoundError:
            return [], []
        names = layout.jobs_of(listed)
        if len(names) == len(listed):
            return names, []
        return names, [filename for filename in listed if layout.job_of(filename) is None]

    def places(self, name: str) -> list[str]:
        """Return the state directories in which job *name* has a file now."""
        return [place for place in layout.PLACES if status_of(self.layout.job_file(place, name)) is not None]

    def no_such_job(self, verb: str, thing: str, name: str) -> NoSuchJob:
        """Return the error for an unknown job *name*: cannot *verb* *thing*, with a suggestion."""
        if self.is_to_come(name):
            why = f"{name.rpartition('_')[0]} has not issued that task yet"
            return NoSuchJob(cannot(verb, thing, why, remedy=f"`spool why {name}` says when it may start"))
        from spool.formats.validation import closest  # only a mistake needs it

        known = {*self.jobs_with_runs(), *(each for place in layout.PLACES for each in self.names(place))}
        near = closest(name, known - {name}, like=0.75)  # a run of it may have been taken back
        remedy = f"did you mean {near}?" if near else "`spool ls --all` lists the jobs"
        return NoSuchJob(cannot(verb, thing, "the spool has no job of that name", remedy=remedy))

    def is_to_come(self, name: str) -> bool:
        """Whether *name* is a task that its array, in progress or not expanded yet, has still to issue."""
        from spool.core.arrays import Tasks, array_of  # few names are in doubt

        array = array_of(name)
        if not array or self.places(name):
            return False
        record = self.newest_array(array)
        if record is not None and self.result(array, record.run) is None:
            return status_of(self.layout.task_file(array, record.run, name)) is not None
        spec = self.job_spec(layout.QUEUED, array) or self.job_spec(layout.HELD, array)
        return spec is not None and name in Tasks(array, spec).names()

    def holds(self, inode: int, name: str, *places: str, mtime_ns: int | None = None) -> bool:
        """Whether the file of that inode is that of job *name* in one of *places*.

        *mtime_ns* distinguishes it from a new file that reuses the inode of a deleted one, as happens at once.
        """
        for place in places:
            status = status_of(self.layout.job_file(place, name))
            if status is not None and status.st_ino == inode and mtime_ns in (None, status.st_mtime_ns):
                return True
        return False

    def untouched(self, inode: int, name: str, place: str, since_ns: int) -> bool:
        """Whether job *name* has the file of that inode in *place*, last moved or changed before *since_ns*."""
        status = status_of(self.layout.job_file(place, name))
        return status is not None and status.st_ino == inode and status.st_ctime_ns <= since_ns

    def job_text(self, place: str, name: str) -> bytes | None:
        """Return the bytes of a job file, None if there is none; only the beginning if it `is_too_long`."""
        return read_record(self.layout.job_file(place, name))

    @property
    def ownership(self) -> Ownership:
        """The rules for whose job files count."""
        if self._ownership is None:
            from spool.store.ownership import Ownership  # not needed to list waiting jobs

            self._ownership = Ownership(self.root, self._accept_from)
        return self._ownership

    def _accept_from(self) -> Sequence[str]:
        """Return the users whose job files the configuration accepts besides the owner; none if it is broken."""
        from spool.store.glance import config_if

        said = config_if(self.root, b"accept_from")
        return said.accept_from if said is not None else ()

    def order(self, place: str, name: str) -> bytes | None:
        """Return the bytes of a job file that counts; None if it is missing or not accepted (FORMAT 16).

        It uses one descriptor: a file that replaces it meanwhile is not read instead.
        """
        found = read_with_status(self.layout.job_file(place, name))
        return None if found is None or self.why_not(found[0], place, name) else found[1]

    def why_no_order(self, place: str, name: str) -> str:
        """Return why a job file does not count, "" if it does or does not exist."""
        path = self.layout.job_file(place, name)
        try:
            found = read_with_status(path, 0)
        except PermissionError:
            status = status_of(path)
            return self.why_not(status, place, name) if status is not None else ""
        return self.why_not(found[0], place, name) if found is not None else ""

    def why_not(self, status: os.stat_result, place: str, name: str) -> str:
        """Return why a job file of that *status*, from its descriptor, does not count; "" if it does."""
        return self.ownership.why_not(status, place, layout.file_of(name))

    def job_spec(self, place: str, name: str, defaults: JobDefaults | None = None) -> Spec | None:
        """Return the spec in a job file, completed by *defaults*; None if it is missing or invalid."""
        return spec_of(self.job_text(place, name), name, defaults)

    def problem_text(self, name: str) -> str | None:
        """Return the content of `NAME.toml.error` for a bad job file."""
        for place in (layout.QUEUED, layout.HELD):
            if (data := read_bytes(self.layout.error_file(place, name))) is not None:
                return data.decode("utf-8", "replace")
        return None

    # Runs.

    def runs(self, name: str) -> list[int]:
        """Return the numbers of the runs of job *name*, ascending."""
        try:
            found = sorted(int(run) for run in os.listdir(self.layout.runs(name)) if _RUN.fullmatch(run))
        except FileNotFoundError:
            return []
        self.check_own_runs(name)
        return found

    def check_own_runs(self, name: str) -> None:
        """Raise OSError if the directory of a job's runs is a link."""
        refuse_link(self.layout.runs(name))

    def check_own(self, name: str, run: int) -> None:
        """Raise OSError if the directory of a run, or of its job, is a link: it is another run's.

        Every record is read and written after this check, so a record counts only for the run of its directory.
        """
        self.check_own_runs(name)
        refuse_link(self.layout.metadir(name, run))

    def own_record(self, name: str, run: int, record: str) -> str:
        """Return the path of a record, in a directory that is the run's own."""
        self.check_own(name, run)
        return self.layout.record(name, run, record)

    def jobs_with_runs(self) -> list[str]:
        """Return every name that was ever started here, except those that `spool gc` removed."""
        with suppress(FileNotFoundError):
            return [name for name in os.listdir(self.layout.at(layout.JOBS)) if not name.startswith(".")]
        return []

    def latest_run(self, name: str) -> int | None:
        """Return the newest run of job *name* that was not withdrawn before it began."""
        for run in reversed(self.runs(name)):
            if self.record(name, run, layout.JID) != run_records.VOID_JID:
                return run
        return None

    def newest_result(self, name: str) -> Result | None:
        """Return the recorded result of the newest run of job *name*."""
        run = self.latest_run(name)
        return self.result(name, run) if run is not None else None

    def newest_array(self, name: str) -> ArrayRecord | None:
        """Return the record of the newest expansion of *name*; None if its newest run is not one."""
        run = self.latest_run(name)
        return self.array(name, run) if run is not None else None

    def is_stopping(self, name: str) -> bool:
        """Whether the newest run of job *name* was ordered to stop or left its exit code, without a recorded end."""
        run = self.latest_run(name)
        if run is None or self.result(name, run) is not None:
            return False
        return self.record(name, run, layout.STOP) is not None or self.exit(name, run) is not None

    def merely_goes_on(self, name: str, run: int) -> bool:
        """Whether *run* is the newest of job *name*, without an order to stop it or any sign of its command's end."""
        traces = (layout.STOP, layout.ENDED, layout.RC, layout.RESULT)
        return self.latest_run(name) == run and all(self.record(name, run, each) is None for each in traces)

    def record(self, name: str, run: int, record: str) -> bytes | None:
        """Return the content of one record of a run, None if it does not exist."""
        path = self.layout.record(name, run, record)
        if record in _SELDOM and status_of(path) is None:  # one system call, where a failing open takes two
            return None
        self.check_own(name, run)
        if record in _LINES:
            return read_record(path, MOST_READ)
        data = read_record(path)
        # A copy of a job file that is too long counts as empty.
        return b"" if record == layout.SPEC_COPY and is_too_long(data) else data

    def record_end(self, name: str, run: int, record: str) -> bytes:
        """Return the end of a growing record, b"" if it does not exist. Raises OSError."""
        return end_of_file(self.own_record(name, run, record))

    def dated_record(self, name: str, run: int, record: str) -> tuple[bytes, int] | None:
        """Return the content of a one-line record, and when it was last changed; None if it is not a regular file."""
        found = read_with_status(self.own_record(name, run, record), MOST_READ)
        return None if found is None else (found[1], found[0].st_mtime_ns)

    def spec(self, name: str, run: int, *, kill_grace_ns: int = DEFAULT_KILL_GRACE_NS) -> Spec | None:
        """Return the spec in a run's copy of its job file, with the defaults of its start; None if it was lost.

        *kill_grace_ns* is today's default.
        """
        text = self.record(name, run, layout.SPEC_COPY)
        return spec_of(text, name, self.defaults(name, run, kill_grace_ns)) if text else None

    def defaults(self, name: str, run: int, kill_grace_ns: int = DEFAULT_KILL_GRACE_NS) -> JobDefaults:
        """Return the defaults in force at the start of a run."""
        text = self.record(name, run, layout.DEFAULTS)
        if not text:
            return JobDefaults(kill_grace_ns)
        from spool.formats import jobfile  # as in `_spec`

        return jobfile.recorded_defaults(text, kill_grace_ns)

    def spec_in_force(self, name: str, run: int, *, kill_grace_ns: int = DEFAULT_KILL_GRACE_NS) -> Spec | None:
        """Return the spec of a live run, with the changeable keys from its present job file."""
        copy, defaults = self.record(name, run, layout.SPEC_COPY), self.defaults(name, run, kill_grace_ns)
        spec, text = spec_of(copy, name, defaults), self.order(layout.RUNNING, name)
        if spec is None or text is None or text == copy:
            return spec
        edited = spec_of(text, name, defaults)
        return spec if edited is None else in_force(spec, edited)

    def result(self, name: str, run: int) -> Result | None:
        """Return the recorded result of a run."""
        return self._own(name, run, layout.RESULT, parse_result)

    def known_end(self, name: str, run: int) -> Result | InvalidRecord | None:
        """Return the end of a run; None: no end is recorded.

        If its record cannot be parsed, the history's line counts; without that line, return the error.
        """
        try:
            data = self.record(name, run, layout.RESULT)
            found = None if data is None else parse_result(data)
            if found is not None and (found.job, found.run) != (name, run):
                raise InvalidRecord(cannot("understand", "a result record", f"it is of run {found.run} of {found.job}"))
            return found
        except InvalidRecord as error:
            known = islice(self.accounts_since(None), _MOST_LINES)
            return next((each for each in known if (each.job, each.run) == (name, run)), error)

    def known_end_of(self, files: RunFiles) -> Result | InvalidRecord | None:
        """Return the same for a run whose files are loaded: while its wrapper lives, no record of an end counts."""
        if files.result is not None or files.evidence.liveness is Liveness.ALIVE:
            return files.result
        return self.known_end(files.name, files.run)

    def stop(self, name: str, run: int, *, late: bool = False) -> Stop | None:
        """Return the order to stop a run; one after its command's end changes nothing, and counts only if *late*."""
        found = self._parsed(name, run, layout.STOP, run_records.parse_stop)
        if found is not None and not late and (left := self.command_exit(name, run)) is not None:
            ordered = status_of(self.layout.record(name, run, layout.STOP))
            if ordered is not None and ordered.st_mtime_ns > left.at_ns:
                return None
        return found

    def grant(self, name: str, run: int, jid: Jid | Liveness | None = None) -> GrantRecord | None:
        """Return the grant of a run, with its executor: a *jid* that names no engine is of this machine."""
        found = self._own(name, run, layout.GRANT, run_records.parse_grant)
        if found is None or found.executor in LOCAL_EXECUTORS:
            return found
        jid = self.jid(name, run) if jid is None else jid
        return replace(found, executor=LOCAL_EXECUTORS[0]) if isinstance(jid, Jid) and jid.engine is None else found

    def array(self, name: str, run: int) -> ArrayRecord | None:
        """Return the record of an expansion, if the metadir is an array's; a run has a grant instead."""
        found = self._own(name, run, layout.ARRAY, parse_array)
        return None if found is None or self.record(name, run, layout.GRANT) is not None else found

    def command_exit(self, name: str, run: int) -> Exit | None:
        """Return the exit code of the command of a run, whose epilog may go on, and the time of its end likewise."""
        return self.exit(name, run, layout.ENDED) or self.exit(name, run)

    def exit(self, name: str, run: int, record: str = layout.RC) -> Exit | None:
        """Return the exit code that the wrapper left, and its time by the clock of the file system."""
        found = self.dated_record(name, run, record)
        with suppress(InvalidRecord):
            if found is not None and found[0] and (code := run_records.parse_rc(found[0])) is not None:
                return Exit(code, found[1])
        return None

    def has_leftovers(self, name: str, run: int) -> bool:
        """Whether the wrapper of a run waits, or waited when it was killed, for what its command has left behind."""
        return status_of(self.own_record(name, run, layout.LEFTOVERS)) is not None

    def outlasted(self, name: str, run: int, *, exited: bool = False) -> bool:
        """Whether the wrapper of a run, which is gone, has ended by itself, and so after all that it had started.

        *exited*: it is known to have ended by itself; then its command has begun, or it has left nothing. One that an
        earlier version of spool had started ended with its command.
        """

        def is_there(record: str) -> bool:
            return status_of(self.layout.record(name, run, record)) is not None

        if is_there(layout.LEFTOVERS):
            return False
        if not is_there(layout.RC):
            return exited and not is_there(layout.STATUS)
        return exited or _OUTLASTS.search(self.record(name, run, layout.WRAPPER) or b"") is not None

    def usage(self, name: str, run: int) -> Usage:
        """Return the resource use of a run, as the wrapper recorded it."""
        return run_records.parse_usage(self.record(name, run, layout.USAGE) or b"")

    def failure(self, name: str, run: int) -> str | None:
        """Return why the wrapper could not run the command."""
        return one_line(self.record(name, run, layout.FAILURE) or b"") or None

    def last_words(self, name: str, run: int) -> bytes:
        """Return the end of a run's log, b"" if it writes to files of its own; at most 256 bytes."""
        with suppress(OSError):
            apart = status_of(self.layout.record(name, run, layout.JOB_STDERR)) is not None
            return end_of_file(self.own_record(name, run, layout.JOB_STDERR if apart else layout.JOB_LOG), 256)
        return b""

    def gpu_watch(self, name: str, run: int) -> GpuWatch | None:
        """Return the GPU use of a run, as a dispatcher last recorded it."""
        return self._parsed(name, run, layout.GPUS, run_records.parse_gpus)

    def refusal(self, name: str, run: int) -> str | None:
        """Return why the machine did not let the command of a run begin; a full disk may have truncated it."""
        data = self.record(name, run, layout.REFUSED)
        return None if data is None else one_line(data) or _UNTOLD

    def cancel_denial(self, name: str, run: int) -> str:
        """Return why a run was not cancelled, "" if there is no such record."""
        return one_line(self.record(name, run, layout.KEPT) or b"")

    def hold_reason(self, name: str, mtime_ns: int) -> str:
        """Return why spool itself held a job, whose file was last changed at *mtime_ns*; "" if it did not."""
        path = self.layout.reason_file(name)
        try:
            if os.stat(path).st_mtime_ns < mtime_ns:  # edited since
                return ""
        except OSError:
            return ""
        return one_line(read_bytes(path, MOST_READ) or b"")

    def suspension(self, name: str, run: int) -> Suspension:
        """Return the suspensions of a run, as the dispatcher recorded them."""
        return self._parsed(name, run, layout.SUSPENDED, run_records.parse_suspended) or Suspension()

    def suspend_order(self, name: str) -> str | None:
        """Return the user and reason in `NAME.toml.suspended`; None if the run is not suspended.

        Anything but a regular file suspends nothing.
        """
        path = self.layout.suspend_file(name)
        status = status_of(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        return one_line(read_record(path, MOST_READ) or b"")

    def mark_of(self, place: str) -> tuple[int, int] | None:
        """Return a value that changes when a file enters or leaves a state directory; None if there is no directory."""
        try:
            status = os.stat(self.layout.at(place))
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def running_files(self) -> tuple[dict[str, int], list[str]]:
        """Return the inode of each job file in `running/`, as listed, and the jobs whose runs are suspended."""
        files, suspended = dict[str, int](), list[str]()
        try:
            with os.scandir(self.layout.at(layout.RUNNING)) as listed:
                for entry in listed:
                    if (name := layout.job_of(entry.name)) is not None:
                        files[name] = entry.inode()
                    elif (name := layout.job_beside(entry.name, layout.SUSPENDED_SUFFIX)) is not None:
                        suspended.append(name)
        except FileNotFoundError:
            pass
        return files, suspended

    @property
    def place(self) -> str:
        """The inode of the directory of all runs, which a move keeps and a copy does not, and the path of the spool.

        Raises OSError.
        """
        return f"{os.stat(self.layout.at(layout.JOBS)).st_ino} {one_line(os.fsencode(self.root))}"

    def why_copied(self, grant: GrantRecord | None) -> str:
        """Return why a run with that record, in this spool, is that of another one; "" if it is not.

        A run without a recorded place is this spool's. Raises OSError.
        """
        if grant is None or grant.place is None:
            return ""
        inode, _, path = grant.place.partition(" ")
        if inode == self.place.partition(" ")[0]:
            return ""
        return f"run {grant.run} began in {path}; this spool is a copy of that, where it may have gone on"

    def has_begun(self, name: str, run: int) -> bool:
        """Whether a record shows that a run has begun, whether its jid exists or not."""
        traces = (layout.STATUS, layout.JOB_LOG, layout.FAILURE, layout.RC)
        self.check_own(name, run)
        return any(status_of(self.layout.record(name, run, trace)) is not None for trace in traces)

    def _parsed(self, name: str, run: int, record: str, parse: Callable[[bytes], T | None]) -> T | None:
        """Return a record's value. A record that a power cut left empty or damaged counts as missing."""
        data = self.record(name, run, record)
        with suppress(InvalidRecord):
            return parse(data) if data else None
        return None

    def _own(self, name: str, run: int, record: str, parse: Callable[[bytes], _Named | None]) -> _Named | None:
        """Return the value of a record that names its run. One of another run is damaged and counts as missing."""
        found = self._parsed(name, run, record, parse)
        return found if found is not None and (found.job, found.run) == (name, run) else None

    def damaged(self, name: str, run: int) -> list[str]:
        """Return the records of a run that exist and cannot be true, sorted."""
        read: dict[str, Callable[[str, int], object]] = {
            layout.ARRAY: self.array,
            layout.GRANT: self.grant,
            layout.RESULT: self.result,
            layout.STOP: lambda *key: self.stop(*key, late=True),
            layout.RC: self.exit,
        }
        return sorted(each for each in read if self.record(name, run, each) is not None and not read[each](name, run))

    def jid(self, name: str, run: int) -> Jid | Liveness:
        """Return the wrapper's identity, or that there is none (ABSENT) or never will be (VOID)."""
        data = self.record(name, run, layout.JID)
        if data == run_records.VOID_JID:
            refused = any(self.record(name, run, each) is not None for each in (layout.REFUSED, layout.ENGINE))
            if refused or not self.has_begun(name, run):  # otherwise it is damage
                return Liveness.VOID
        with suppress(InvalidRecord):
            return (run_records.parse_jid(data) if data else None) or Liveness.ABSENT
        return Liveness.ABSENT

    def spoke_at_ns(self, name: str, run: int, granted_at_ns: int | None = None) -> int | None:
        """Return when the wrapper of a run wrote its identity; None if it has not.

        The time comes from the clock of the file system. If that differs from ours, the time since the grant at
        *granted_at_ns* counts.
        """
        spoke = status_of(self.own_record(name, run, layout.JID))
        if spoke is None or spoke.st_size <= len(run_records.VOID_JID):
            return None
        return spoke.st_mtime_ns - self._ahead_ns(name, run, granted_at_ns)

    def end(self, name: str, run: int, signs: LastSigns, now_ns: int) -> RunEnd:
        """Return when a run that is over ended. Reads the files for anything missing in *signs*.

        A recent exit code needs no second look: the clocks agree. A reading error only costs precision.
        """
        exit_ns, wrote_ns = signs.exit_at_ns, None
        with suppress(OSError):
            if exit_ns is not None and not signs.granted_at_ns <= exit_ns <= now_ns < exit_ns + _CLOCKS_AGREE_NS:
                exit_ns -= self._ahead_ns(name, run, signs.granted_at_ns)
            elif exit_ns is None and not signs.watched:
                wrote_ns = self._wrote_ns(name, run, signs.granted_at_ns)
        return end_of(signs, now_ns, exit_ns=exit_ns, wrote_ns=wrote_ns)

    def served_until_ns(self) -> int | None:
        """Return when the last dispatcher was last at work; None if unknown."""
        with suppress(OSError):
            if (state := status_of(self.layout.at(layout.STATE))) is not None:
                return state.st_mtime_ns
        return None

    def _wrote_ns(self, name: str, run: int, granted_at_ns: int) -> int | None:
        """Return when a run or its wrapper last wrote into the metadir, by our clock; None: it never did."""
        self.check_own(name, run)
        signs = [status_of(self.layout.record(name, run, record)) for record in _SIGNS]
        moments = [status.st_mtime_ns for status in signs if status is not None]
        return max(moments) - self._ahead_ns(name, run, granted_at_ns) if moments else None

    def _ahead_ns(self, name: str, run: int, granted_at_ns: int | None) -> int:
        """Return how far the file system's clock is ahead of ours, by which the grant was dated; 0: they agree."""
        granted = status_of(self.layout.record(name, run, layout.GRANT)) if granted_at_ns is not None else None
        ahead_ns = granted.st_mtime_ns - (granted_at_ns or 0) if granted is not None else 0
        return ahead_ns if abs(ahead_ns) > _CLOCKS_AGREE_NS else 0

    def engine(self, name: str, run: int) -> tuple[str, str, str] | None:
        """Return the engine of a run, its cluster and its id there; None if not known yet."""
        return self._parsed(name, run, layout.ENGINE, run_records.parse_engine)

    def ran_from_ns(self, record: GrantRecord) -> int | None:
        """Return when a run began, at its start here or when its wrapper reported elsewhere; None if it has not."""
        if record.executor in LOCAL_EXECUTORS:
            return record.granted_at_ns
        return self.spoke_at_ns(record.job, record.run, record.granted_at_ns)

    def load(self, name: str, run: int, prober: Prober, *, leftovers: bool = True) -> RunFiles:
        """Return what the files of a run say, and what they prove. Its records are read here in the only safe order.

        With *leftovers*, processes that outlived a killed wrapper count, too.
        """
        jid = self.jid(name, run)
        grant = self.grant(name, run, jid)
        liveness = self._liveness(name, run, jid, lambda: grant, prober)
        left, stop, result, refusal, evidence = self._signs(name, run, liveness)
        if leftovers and liveness is Liveness.GONE and result is None and not self.outlasted(name, run):
            some_left = prober.has_left_processes(self.root, name, run)
            said = WITHOUT_JID if some_left and left is None and not isinstance(jid, Jid) else ""
            evidence = replace(evidence, leftovers=some_left, said=said)
        suspension = self.suspension(name, run)
        if grant is not None:
            array, began_ns = None, self.ran_from_ns(grant)
        else:
            array = self.array(name, run)
            began_ns = array.expanded_at_ns if array is not None else None
        return RunFiles(name, run, jid, grant, array, left, stop, result, refusal, suspension, began_ns, evidence)

    def evidence(self, name: str, run: int, prober: Prober) -> Evidence:
        """Return the evidence of a run whose other records are known, without a search for leftover processes."""
        jid = self.jid(name, run)
        liveness = self._liveness(name, run, jid, lambda: self.grant(name, run, jid), prober)
        return self._signs(name, run, liveness)[-1]

    def _liveness(
        self, name: str, run: int, jid: Jid | Liveness, granted: Callable[[], GrantRecord | None], prober: Prober
    ) -> Liveness:
        """Return the state of the process that *jid* names, if it can be the wrapper of the run."""
        if isinstance(jid, Jid):
            found = prober.liveness(jid)
            if found is Liveness.ALIVE and not prober.is_wrapper(jid, self.root, name, run):
                return Liveness.GONE  # that process is not the run's wrapper: the jid proves nothing
            if found in (Liveness.ELSEWHERE, Liveness.REBOOTED):
                grant = granted()
                if grant is not None and grant.boot_id == prober.boot_id() and not grant.may_be_of(jid):
                    return Liveness.GONE
            return found
        grant = granted() if jid is Liveness.ABSENT else None
        if jid is not Liveness.ABSENT or (grant is not None and grant.executor not in LOCAL_EXECUTORS):
            return jid  # it may wait there for days, through restarts of this machine
        if grant is None or not grant.boot_id or grant.boot_id == prober.boot_id():
            if not self.has_begun(name, run) and not self.why_copied(grant):
                return jid
            # It comes before every sign of a beginning. So it was written since, or it was removed; or this spool is a
            # copy, and the original may have it by now.
            written = self.jid(name, run)
            return Liveness.GONE if written is jid else self._liveness(name, run, written, granted, prober)
        if grant.host is None or prober.liveness(Jid(1, 0, grant.boot_id, "-", grant.host)) is Liveness.REBOOTED:
            return Liveness.REBOOTED  # started before this boot; its jid did not reach the disk
        return jid

    def _signs(
        self, name: str, run: int, liveness: Liveness
    ) -> tuple[Exit | None, Stop | None, Result | None, str | None, Evidence]:
        """Return what a run left, the order to stop it, its result, its refusal, and all of it as evidence."""
        left, stop = self.exit(name, run), self.stop(name, run)
        known = left or (self.command_exit(name, run) if liveness is not Liveness.ELSEWHERE else None)
        # A result is written after the last process ended: beside a living wrapper it is not the dispatcher's.
        result = self.result(name, run) if liveness is not Liveness.ALIVE else None
        refusal = self.refusal(name, run) if known is None else None
        evidence = Evidence(
            liveness=liveness,
            rc=known.code if known is not None else None,
            rc_at_ns=left.at_ns if left is not None else None,
            stop=stop.kind if stop else None,
            recorded=result.outcome if result else None,
            grace=True,
            refused=refusal is not None,
            leftovers=liveness is Liveness.ALIVE and left is not None and self.has_leftovers(name, run),
        )
        return left, stop, result, refusal, evidence

    def accounted(self, result: Result) -> bool:
        """Whether the history already has the line of *result*."""
        return self.account_of(result.job, result.run, result.ended_at_ns) is not None

    def account_of(self, job: str, run: int, since_ns: int | None) -> Result | None:
        """Return the result in the history of a run that ended after *since_ns*. Reads no older lines."""
        return next((known for known in self.accounts_since(since_ns) if (known.job, known.run) == (job, run)), None)

    def accounts_since(self, since_ns: int | None) -> Iterator[Result]:
        """Yield the results in the history of runs that ended after *since_ns*, and of some before, newest line first.

        A line may be far younger than the end of its run, and never older.
        """
        for line in self.history():
            try:
                known = parse_history_line(line)
            except InvalidRecord:
                continue
            told_at_ns = known.told_at_ns  # a power cut may have truncated it
            if told_at_ns is not None and told_at_ns < (since_ns or 0) - _HISTORY_SLACK_NS:
                return
            yield known

    # The spool as a whole.

    def note(self, error: OSError, where: str) -> None:
        """Record an error that the reader has worked around; *where* names the place."""

    def file(self, name: str, limit: int = 1 << 31) -> bytes | None:
        """Return the content of a file of the spool itself, None if it does not exist."""
        return read_file(self.layout.at(name), limit)

    def history(self) -> Iterator[bytes]:
        """Yield the lines of the accounting, newest first."""
        return history_lines(self.root)

    # The dispatcher.

    def service(self) -> Service:
        """Return whether a dispatcher serves this spool now, and whether its lock was lost."""
        is_served = serving(self.layout.at(layout.LOCK))
        return Service.ASTRAY if is_served is None else Service.SERVED if is_served else Service.NONE

    def dispatcher_lives(self) -> bool:
        """Whether a dispatcher serves this spool now."""
        return self.service() is not Service.NONE

    @property
    def paused(self) -> bool:
        """Whether starts are paused."""
        return os.path.lexists(self.layout.at(layout.PAUSED))

    @property
    def paused_at_ns(self) -> int | None:
        """When starts were paused; None if they are not."""
        status = status_of(self.layout.at(layout.PAUSED))
        return status.st_ctime_ns if status is not None else None


def spec_of(text: bytes | None, name: str, defaults: JobDefaults | None = None) -> Spec | None:
    """Return the spec in the text of a job file, completed by *defaults*; None if it is missing or invalid."""
    from spool.formats import jobfile  # imported here, because most commands do not need it

    with suppress(InvalidJob):
        return jobfile.parse(text, name=name, defaults=defaults or JobDefaults()) if text else None
    return None
