"""What the files say: runs and arrays in progress, and the outcomes of ended jobs that others depend on.

A dispatcher that begins reads it, and a command too.

`Spool.load` reads and proves a run. What its files lack comes from the journal, or is presumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, suppress

from msgspec.structs import replace

from spool.core import layout, lifecycle
from spool.core.arrays import Tasks, array_of, outcome_of
from spool.core.errors import InvalidRecord
from spool.core.layout import DONE, HELD, LOCAL_EXECUTORS, QUEUED, RUNNING
from spool.core.model import SECOND_NS, Grant, Jid, Spec, State
from spool.formats.config import Config
from spool.formats.journal import Memory, Started, Waits
from spool.formats.run_records import ArrayRecord, GrantRecord, RunFiles, parse_history_line
from spool.state.run import ActiveRun, Attempts, JobEntry, attempts_so_far
from spool.state.table import Array, SchedulerState, new_array
from spool.store.spool import Spool

FEW = 4096
"""The number of cached names that no job depends on."""


_BEGIN = b'{"job":"'  # of each line of the history


class ArrayNames(Mapping[str, tuple[str, ...]]):
    """The tasks of every expanded array. Those of an ended array are read on demand.

    A cancelled array stands for itself alone: its unissued tasks have no records.
    """

    def __init__(self, spool: Spool, table: SchedulerState) -> None:
        self._spool = spool
        self._table = table
        self._known: dict[str, tuple[str, ...]] = {}  # () for a job that is not an array

    def __getitem__(self, name: str) -> tuple[str, ...]:
        array = self._table.arrays.get(name)
        if array is not None:
            return array.names
        if name in self._table.jobs:  # it waits, is held or runs, and is not an array in progress
            raise KeyError(name)
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= FEW + 2 * len(self._table.queue.watch.names()):
                self._known.clear()  # names that still matter are read again
            known = self._known[name] = self._read(name)
        if not known:
            raise KeyError(name)
        return known

    def __iter__(self) -> Iterator[str]:
        """Iterate over the arrays in progress; the rules only call `get`."""
        return iter(self._table.arrays)

    def __len__(self) -> int:
        return len(self._table.arrays)

    def forget(self, name: str) -> None:
        """Forget the tasks of a name that has begun again."""
        self._known.pop(name, None)

    def _read(self, name: str) -> tuple[str, ...]:
        with suppress(OSError):  # its outcome cannot be read either, which is reported
            record = self._spool.newest_array(name)
            result = self._spool.result(name, record.run) if record is not None else None
            cancelled = result is not None and result.outcome is State.CANCELLED
            spec = self._spool.spec(name, record.run) if record is not None and not cancelled else None
            return Tasks(name, spec).names() if spec is not None else ()
        return ()


class OutcomeIndex(Mapping[str, State]):
    """The newest outcome of each ended job, read on demand from its records, or from the history once they are gone.

    `arrays` has the tasks of arrays. It forgets each name that begins or ends: what was an array may now be one job.
    """

    def __init__(
        self,
        spool: Spool,
        table: SchedulerState | None = None,
        reading: Callable[[str], AbstractContextManager[object]] = lambda _: suppress(OSError),
        matters: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """*table* has the state of arrays that have not ended though no queue has them.

        An unreadable record counts as missing for now. The records of a job are read inside `with reading(name)`, which
        ends that work on an error, and may report it. *matters* tells whether a waiting job depends on a name; outcomes
        of other names are not kept for ever.
        """
        self._spool = spool
        self._reading = reading
        table = table if table is not None else SchedulerState()
        self._standing = table.array_state
        self._watched = table.queue.watch.names
        self._going_on = table.arrays
        self._matters = matters
        self.arrays = ArrayNames(spool, table)
        self._known: dict[str, State] = {}
        self._missing: dict[str, int] = {}
        self._told: dict[str, State | None] = {}  # by the history; None: it does not tell of that name
        self.failures = 0  # final outcomes recorded that are neither success nor a user's wish
        self._most = FEW  # names kept before those that matter are known

    def __getitem__(self, name: str) -> State:
        if (state := self._standing(name)) is not None:
            return state
        state = self._known.get(name)
        if state is None:
            # The rules ask for an unknown name at every pass; the disk is not read as often.
            if self._missing.get(name, 0) > time.monotonic_ns():
                raise KeyError(name)
            self._forget_some()
            state = self._read(name)
            if state is None:
                self._missing[name] = time.monotonic_ns() + 5 * SECOND_NS
                raise KeyError(name)
            self._known[name] = state
        return state

    def __iter__(self):  # type: ignore[no-untyped-def]
        """Iterate over the known names; the rules only call `get`."""
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def record(self, name: str, state: State) -> None:
        """Record the final outcome of a job."""
        self.failures += state not in (State.FINISHED, State.CANCELLED)
        self._forget_some()
        self._known[name] = state
        self._missing.pop(name, None)
        if not self._told.keys().isdisjoint((name, array_of(name))):
            self._told[name] = state
        self.arrays.forget(name)

    def _forget_some(self) -> None:
        """Forget the names that no waiting job depends on, once there are many: their records have the same."""
        if len(self._known) + len(self._missing) < self._most:
            return
        matters = self._matters
        self._known = {name: state for name, state in self._known.items() if matters(name)}
        self._missing = {name: at_ns for name, at_ns in self._missing.items() if matters(name)}
        self._told.clear()
        self._most = FEW + 2 * (len(self._known) + len(self._missing))

    def forget(self, name: str) -> None:
        """Forget the outcome of a job that waits or runs again."""
        self._known.pop(name, None)
        self.arrays.forget(name)

    def _read(self, name: str) -> State | None:
        result = None
        with self._reading(name):
            run = self._spool.latest_run(name)
            if run is None:
                return self._of_history(name) or self._withdrawn(name)
            result = self._spool.result(name, run)
        return result.outcome if result is not None and result.again is None else None

    def _withdrawn(self, name: str) -> State | None:
        """Return CANCELLED for a task that never ran, and never will: its file was taken away, or never made."""
        array = array_of(name)
        if (going_on := self._going_on.get(array)) is not None:
            return going_on.ended.get(name)
        record = self._spool.newest_array(array) if array else None
        if record is None or self._spool.result(array, record.run) is None:
            return None
        spec = self._spool.spec(array, record.run)
        return State.CANCELLED if spec is not None and name in Tasks(array, spec).names() else None

    def _of_history(self, name: str) -> State | None:
        """Return the outcome of a job without records; one reading serves all names that jobs depend on."""
        if self._told.keys().isdisjoint((name, array_of(name))):
            names = {name, *self._watched()}
            self._told |= dict.fromkeys(names) | _ends_in_history(self._spool, names)
        return self._told.get(name)


def _ends_in_history(spool: Spool, names: Set[str]) -> dict[str, State]:
    """Return how *names*, and the tasks of those that are arrays, ended for good by their newest lines.

    An array has no line. One that `spool gc` removed ended as its tasks did.
    """
    newest: dict[str, State | None] = {}
    wanted = {name.encode() for name in names}
    for line in spool.history():
        job = line[len(_BEGIN) : line.find(b'"', len(_BEGIN))]
        if job in wanted or job.rpartition(b"_")[0] in wanted:
            with suppress(InvalidRecord):
                result = parse_history_line(line)
                newest.setdefault(result.job, result.outcome if result.again is None else None)
    ended = {name: state for name, state in newest.items() if state is not None}
    removed = spool.file(layout.LAST_RUNS) or b""
    for name in names - newest.keys():
        tasks = [task for task in newest if array_of(task) == name]
        if tasks and ended.keys() >= set(tasks) and f'"{name}":'.encode() in removed:
            ended[name] = outcome_of([ended[task] for task in tasks], len(tasks))
    return ended


class Loader:
    """Finds the runs that are not over. All of it raises OSError for records that cannot be read."""

    def __init__(
        self,
        spool: Spool,
        memory: Memory,
        config: Callable[[], Config],
        settle: Callable[[str, int], bool] | None = None,
    ) -> None:
        """*settle* withdraws a run that was prepared and never claimed, as for `attempts_so_far`."""
        self._spool = spool
        self._memory = memory
        self._config = config
        self._settle = settle

    def run(self, files: RunFiles, known: Started | Waits | None) -> ActiveRun:
        """Return a run from its files; *known* is its line in the journal, or that of its job while it waited."""
        granted, key = files.grant, (files.name, files.run)
        started = known if isinstance(known, Started) else None
        inode = (granted.inode if granted else None) or (started.inode if started else 0)
        spec = self.spec(*key, inode)
        record = granted or self.presumed_grant(*key, spec, known)
        live = ActiveRun.of_records(
            record if started is None else replace(record, boot_id=started.boot_id),
            spec,
            granted_at_ns=record.granted_at_ns or (started.at_ns if started else time.time_ns()),
            stop=files.stop or self._memory.stopping.get(key),
            inode=inode,
        )
        if spec.preemptible and record.submitted_at_ns is not None:
            before = self._attempts(key[0], record.submitted_at_ns, before=key[1])
            live.attempts = replace(live.attempts, preempted=before.preempted)  # its own records do not have that
        live.copied = self._spool.why_copied(granted)
        live.stop_answered(self._spool.cancel_denial(*key))
        live.suspends(files.suspension, self._spool.suspend_order(files.name) or "")
        return live

    def unread_run(self, name: str) -> ActiveRun | None:
        """Return the newest run of that name in the journal, without its records; None if there is none."""
        started = self._memory.newest(name)
        if started is None:
            return None
        config, spec = self._config(), None
        with suppress(OSError):
            spec = self._spool.job_spec(RUNNING, name, config.defaults)
        spec = spec or Spec(command="true")
        record = GrantRecord(
            name,
            started.run,
            grant=Grant(spec.request.cpus, spec.request.memory_bytes, resources=spec.request.resources),
            executor=spec.executor or config.executor,
            boot_id=started.boot_id,
            submitted_at_ns=started.arrived_at_ns,
        )
        stop = self._memory.stopping.get((name, started.run))
        live = ActiveRun.of_records(record, spec, granted_at_ns=started.at_ns, stop=stop, inode=started.inode)
        live.phase = lifecycle.UNREAD
        return live

    def spec(self, name: str, run: int, inode: int) -> Spec:
        """Return the spec of a run: from its copy of the job file, or from the job file, wherever it is."""
        spool, defaults = self._spool, self._config().defaults
        spec = spool.spec_in_force(name, run, kill_grace_ns=defaults.kill_grace_ns)
        for place in (RUNNING, QUEUED, HELD, DONE):
            if spec is None and (place == RUNNING or spool.holds(inode, name, place)):
                spec = spool.job_spec(place, name, defaults)
        # If a job file is no longer readable, only the run's stop and end remain to be handled.
        return spec or Spec(command="true")

    def presumed_grant(self, name: str, run: int, spec: Spec, known: Started | Waits | None) -> GrantRecord:
        """Return what is assumed in place of a `grant.toml` that a power cut took or emptied."""
        jid, engine = self._spool.jid(name, run), self._spool.engine(name, run)
        executor = engine[0] if engine is not None else spec.executor or self._config().executor
        if isinstance(jid, Jid):
            executor = jid.engine.partition(":")[0] if jid.engine is not None else LOCAL_EXECUTORS[0]
        record = GrantRecord(
            name,
            run,
            executor=executor,
            grant=Grant(cpus=spec.request.cpus, resources=spec.request.resources),
        )
        if known is None:
            return record
        so_far = self._attempts(name, known.arrived_at_ns, before=run)
        return replace(record, attempt=so_far.attempt, requeues=so_far.requeues, submitted_at_ns=known.arrived_at_ns)

    def recall_series(self, job: JobEntry, line: Waits) -> None:
        """Restore the attempts of the submission that waits by that *line* of the journal."""
        if job.live is None:
            job.attempts = self._attempts(job.name, line.arrived_at_ns)
        elif job.live.wait.arrived_at_ns == line.arrived_at_ns:
            job.attempts = job.live.attempts

    def _attempts(self, name: str, arrived_at_ns: int, *, before: int | None = None) -> Attempts:
        return attempts_so_far(self._spool, name, arrived_at_ns, before=before, settle=self._settle)


def load_array(spool: Spool, record: ArrayRecord) -> Array | None:
    """Return an array without the states of its tasks; None if the job file that it was made from is lost."""
    spec = spool.spec(record.job, record.run)
    if spec is None or not spec.is_array:
        spec = spool.job_spec(RUNNING, record.job)
    return new_array(spec, record) if spec is not None and spec.is_array else None
