"""A spool as anybody may read it. Nothing here changes anything, and nothing here needs a dispatcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from spool.core import layout
from spool.core.errors import InvalidRecord, SpoolUnusable
from spool.core.layout import Layout
from spool.core.lifecycle import Evidence, Liveness, Proof, prove
from spool.core.model import SECOND_NS, Jid, Result, Stop
from spool.formats import ends, records
from spool.formats.tasks import ArrayRecord, parse_array
from spool.store.lock import dispatcher_lives

T = TypeVar("T")

_MAX_RECORD = 4 << 20
_HISTORY_SLACK_NS = 3600 * SECOND_NS  # lines are in order but for a clock that was set


class Spool:
    """The look at a spool. Every read takes the disk as it is at that moment; what is missing is None."""

    def __init__(self, root: str) -> None:
        self.layout = Layout(os.path.realpath(root))  # one spool, one mark on its processes, whatever it was called
        self.root = self.layout.root

    @classmethod
    def open(cls, root: str) -> Spool:
        """Return the spool at *root*; SpoolUnusable if there is none."""
        if not os.path.isdir(f"{root}/{layout.QUEUED}"):
            raise SpoolUnusable(f"cannot open spool: {root}: no spool there; make one with `spool init`")
        return cls(root)

    # Job files.

    def names(self, place: str) -> list[str]:
        """Return the jobs whose files lie in the state directory *place*, unsorted."""
        try:
            listed = os.listdir(self.layout.at(place))
        except FileNotFoundError:
            return []
        return [name for name in map(layout.job_of, listed) if name is not None]

    def places(self, name: str) -> list[str]:
        """Return the state directories in which job *name* has a file now."""
        return [place for place in layout.PLACES if os.path.lexists(self.layout.job_file(place, name))]

    def holds(self, inode: int, name: str, *places: str, mtime_ns: int | None = None) -> bool:
        """Whether the file of that inode lies under job *name* in one of *places*.

        With *mtime_ns* it is told from a new file that was given the inode of a deleted one, as happens at once.
        """
        for place in places:
            try:
                status = os.lstat(self.layout.job_file(place, name))
            except OSError:
                continue
            if status.st_ino == inode and mtime_ns in (None, status.st_mtime_ns):
                return True
        return False

    def untouched(self, inode: int, name: str, place: str, since_ns: int) -> bool:
        """Whether the file of that inode lies under job *name* in *place* and was last moved or changed before."""
        try:
            status = os.lstat(self.layout.job_file(place, name))
        except OSError:
            return False
        return status.st_ino == inode and status.st_ctime_ns <= since_ns

    def job_text(self, place: str, name: str) -> bytes | None:
        """Return the bytes of a job file, None if it is not there."""
        return read_bytes(self.layout.job_file(place, name))

    def problem_text(self, name: str) -> str | None:
        """Return what `NAME.toml.error` says of a bad job file."""
        for place in (layout.QUEUED, layout.HELD):
            if (data := read_bytes(self.layout.error_file(place, name))) is not None:
                return data.decode("utf-8", "replace")
        return None

    # Runs.

    def runs(self, name: str) -> list[int]:
        """Return the numbers of the runs of job *name*, ascending."""
        try:
            return sorted(int(run) for run in os.listdir(self.layout.runs(name)) if run.isdecimal())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def jobs_with_runs(self) -> list[str]:
        """Return every name that was ever started here, but for what `spool gc` removed."""
        try:
            return os.listdir(self.layout.at(layout.JOBS))
        except FileNotFoundError:
            return []

    def latest_run(self, name: str) -> int | None:
        """Return the newest run of job *name* that was not taken back before it began."""
        for run in reversed(self.runs(name)):
            if self.record(name, run, layout.JID) != records.VOID_JID:
                return run
        return None

    def is_stopping(self, name: str) -> bool:
        """Whether the newest run of job *name* was ordered to stop, and its end is not recorded yet."""
        run = self.latest_run(name)
        return run is not None and self.stop(name, run) is not None and self.result(name, run) is None

    def record(self, name: str, run: int, record: str) -> bytes | None:
        """Return the content of one record of a run, None if there is none."""
        return read_bytes(self.layout.record(name, run, record))

    def result(self, name: str, run: int) -> Result | None:
        """Return how a run ended, as the dispatcher recorded it."""
        return self._parsed(name, run, layout.RESULT, ends.parse_result)

    def stop(self, name: str, run: int) -> Stop | None:
        """Return why and by whom a run is being stopped."""
        return self._parsed(name, run, layout.STOP, records.parse_stop)

    def grant(self, name: str, run: int) -> records.GrantRecord | None:
        """Return what a run was given."""
        return self._parsed(name, run, layout.GRANT, records.parse_grant)

    def array(self, name: str, run: int) -> ArrayRecord | None:
        """Return what was expanded, if the metadir is an array's and no run's."""
        return self._parsed(name, run, layout.ARRAY, parse_array)

    def exit_code(self, name: str, run: int) -> int | None:
        """Return the exit code that the wrapper left, 128+n for signal n."""
        return self._parsed(name, run, layout.RC, records.parse_rc)

    def failure(self, name: str, run: int) -> str | None:
        """Return why the wrapper could not run the command."""
        data = self.record(name, run, layout.FAILURE)
        return data.decode("utf-8", "replace").strip() or None if data else None

    def _parsed(self, name: str, run: int, record: str, parse: Callable[[bytes], T | None]) -> T | None:
        """Return a record's value. One that a power cut left empty or senseless says as little as none at all."""
        data = self.record(name, run, record)
        try:
            return parse(data) if data else None
        except InvalidRecord:
            return None

    def jid(self, name: str, run: int) -> Jid | Liveness:
        """Return the wrapper's identity, or that there is none (ABSENT) or never will be (VOID)."""
        data = self.record(name, run, layout.JID)
        if data == records.VOID_JID:
            return Liveness.VOID
        try:
            jid = records.parse_jid(data) if data else None
        except InvalidRecord:
            jid = None
        return Liveness.ABSENT if jid is None else jid

    def evidence(self, name: str, run: int, prober: Prober) -> Evidence:
        """Gather the evidence of one run, in the order that does not lie: jid, alive?, rc."""
        jid = self.jid(name, run)
        if isinstance(jid, Liveness):
            liveness = jid
            if jid is Liveness.ABSENT:
                grant = self.grant(name, run)
                host = grant.host if grant is not None else None
                if grant is None or not grant.boot_id or grant.boot_id == prober.boot_id():
                    pass
                elif host is None or prober.liveness(Jid(1, 0, grant.boot_id, "-", host)) is Liveness.REBOOTED:
                    liveness = Liveness.REBOOTED  # started before this boot; its jid did not reach the disk
        else:
            liveness = prober.liveness(jid)
        rc = self.exit_code(name, run)
        stop = self.stop(name, run)
        result = self.result(name, run)
        return Evidence(
            liveness=liveness,
            rc=rc,
            stop=stop.kind if stop else None,
            recorded=result.outcome if result else None,
            grace=True,
        )

    def prove(self, name: str, run: int, prober: Prober) -> Proof:
        """Return what the evidence of a run proves now."""
        return prove(self.evidence(name, run, prober))

    def accounted(self, result: Result) -> bool:
        """Whether the history has the line of *result* already."""
        return self.account_of(result.job, result.run, result.ended_at_ns) is not None

    def account_of(self, job: str, run: int, since_ns: int | None) -> Result | None:
        """Return what the history says of a run that ended after *since_ns*. Looks no further back than that."""
        return next((known for known in self.accounts_since(since_ns) if (known.job, known.run) == (job, run)), None)

    def accounts_since(self, since_ns: int | None) -> Iterator[Result]:
        """Yield what the history says of the runs that ended after *since_ns*, and of some before, newest first."""
        for line in history_lines(self.root):
            try:
                known = ends.parse_history_line(line)
            except InvalidRecord:
                continue
            if (known.ended_at_ns or 0) < (since_ns or 0) - _HISTORY_SLACK_NS:
                return
            yield known

    # The dispatcher.

    def dispatcher_lives(self) -> bool:
        """Whether a dispatcher serves this spool now."""
        return dispatcher_lives(self.layout.at(layout.LOCK))

    @property
    def paused(self) -> bool:
        """Whether nothing is to start."""
        return os.path.lexists(self.layout.at(layout.PAUSED))


class Prober(Protocol):
    """What a look needs to know of the machine; `spool.machine.identity` has the real one."""

    def boot_id(self) -> str:
        """Return the id of this boot."""

    def liveness(self, jid: Jid) -> Liveness:
        """Return what became of the process *jid*."""


def read_bytes(path: str, limit: int = _MAX_RECORD) -> bytes | None:
    """Return the content of a small file, None if it is not there or not a file. Never blocks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.read(fd, 65536)
        if len(data) == 65536:
            while len(data) < limit and (more := os.read(fd, 1 << 20)):
                data += more
    except OSError:
        return None
    finally:
        os.close(fd)
    return data


def history_lines(root: str, block: int = 1 << 20) -> Iterator[bytes]:
    """Yield the lines of the accounting, newest first, without a torn last one."""
    try:
        fd = os.open(f"{root}/{layout.HISTORY}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        end = os.fstat(fd).st_size
        tail = b""
        while end > 0:
            start = max(0, end - block)
            text = os.pread(fd, end - start, start) + tail
            end = start
            lines = text.split(b"\n")
            tail = lines[0]
            yield from (line for line in reversed(lines[1:]) if line)
        if tail:
            yield tail
    finally:
        os.close(fd)
