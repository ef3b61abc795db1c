"""The whole spool at one moment, read without the lock, and the resulting plan: for `why`, `plan`, `info`, `gpus`.

It sees the same as a dispatcher started now, and the planner answers from it. The running dispatcher's view adds facts
that no look can show: refusals of the machine and the engines, and missing answers.
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from enum import StrEnum

from msgspec import Struct, field
from msgspec.structs import replace

from spool.core import layout
from spool.core.arrays import array_of
from spool.core.errors import InvalidReservation, SpoolError, cannot
from spool.core.gpus import NOBODY, as_if_alone, conflict, is_active, known_gpus, settle
from spool.core.layout import engine_of
from spool.core.model import SECOND_NS, Holding, Machine, Policy, Reservation, Sized, Spec, State, Waiting
from spool.core.runtimes import Progress, TimeLeft
from spool.core.scheduler import Plan, View, decide
from spool.executors import Executors
from spool.formats import reservation
from spool.formats.config import Config
from spool.formats.state import MachineView, StateView
from spool.machine.gpus import LIMIT_NS
from spool.machine.processes import MachineProber
from spool.query.look import Look
from spool.query.rows import cancelled_unseen, in_words, last_view, machine_told
from spool.query.shared import MachineSharing, MachineUse, arbiter_view, shared_machine
from spool.state.load import ArrayNames, OutcomeIndex
from spool.state.past import Sizing, past_of
from spool.state.run import StartBackoff
from spool.state.table import SchedulerState
from spool.state.world import MachineMonitor, on_shared
from spool.store.disk import remedy_for
from spool.store.edited import ReadFailure, Settings, read_stable
from spool.store.spool import Spool


class ReservationState(StrEnum):
    """The state of a reservation at a point in time."""

    PENDING = "pending"
    ACTIVE = "active"
    COMPLETED = "completed"
    CANCELLED = "cancelled"  # its file was removed before its end
    INVALID = "invalid"  # its file is invalid, or it conflicts with an earlier one: no effect


class ReservationStatus(Struct, frozen=True):
    """One present or former file of `reservations/`. `problem` is why it has no effect."""

    name: str
    state: ReservationState
    reservation: Reservation | None = None
    problem: str = ""
    unread: bool = False  # its content is unknown
    removed_at_ns: int | None = None  # None: its file is there

    @property
    def stands(self) -> bool:
        """Whether it has, had or will have an effect."""
        return self.state not in (ReservationState.INVALID, ReservationState.CANCELLED)


class ReservationFiles(Struct, frozen=True):
    """All files of `reservations/`, and the valid reservations, in the order of writing."""

    rows: tuple[ReservationStatus, ...]
    standing: tuple[Reservation, ...]


def read_reservations(spool: Spool, gpus: Collection[int] | None, now_ns: int) -> ReservationFiles:
    """Return every reservation; *gpus* are the indices of the existing GPUs, None if unknown."""
    found = [_read(spool, name) for name in spool.names(layout.RESERVATIONS)]
    read = [one for one in found if isinstance(one, Reservation)]
    standing, refused = settle(read, gpus)
    rows = [one for one in found if isinstance(one, ReservationStatus)]
    for one in standing:
        begun = ReservationState.ACTIVE if is_active(one, now_ns) else ReservationState.COMPLETED
        state = ReservationState.PENDING if now_ns < one.start_at_ns else begun
        rows.append(ReservationStatus(one.name, state, one))
    noes = ((one, refused[one.name]) for one in read if one.name in refused)
    rows += [ReservationStatus(one.name, ReservationState.INVALID, one, in_words(no, now_ns)) for one, no in noes]
    return ReservationFiles(tuple(rows), standing)


def _read(spool: Spool, name: str) -> Reservation | ReservationStatus | None:
    """Return the reservation in a file, what is wrong with the file, or None if it has just been removed."""
    path = spool.layout.job_file(layout.RESERVATIONS, name)
    try:
        seen = read_stable(path)
    except OSError as error:
        spool.note(error, path)
        why = f"cannot be read: {error.strerror or error}; {remedy_for(error)}"
        return ReservationStatus(name, ReservationState.INVALID, problem=why, unread=True)
    if seen is ReadFailure.GONE:
        return None
    if isinstance(seen, ReadFailure):
        why = f"its file is {seen.value}"
    elif not (why := spool.why_not(seen.status, layout.RESERVATIONS, name)):
        try:
            return reservation.parse(seen.data, name=name, created_at_ns=seen.status.st_mtime_ns)
        except InvalidReservation as error:
            why = "; ".join(problem.message for problem in error.problems)
    return ReservationStatus(name, ReservationState.INVALID, problem=why)


def removed_reservations(spool: Spool) -> tuple[ReservationStatus, ...]:
    """Return the reservations whose files were removed, before their end or later."""
    rows: list[ReservationStatus] = []
    directory = spool.layout.at(layout.GONE_RESERVATIONS)
    try:
        listed = sorted(os.listdir(directory))
    except FileNotFoundError:
        return ()
    for filename in listed:
        known = layout.gone_reservation_of(filename)
        seen = read_stable(f"{directory}/{filename}") if known is not None else ReadFailure.NOT_OURS
        if known is None or isinstance(seen, ReadFailure):
            continue
        name, created_at_ns = known
        try:
            one = reservation.parse(seen.data, name=name, created_at_ns=created_at_ns)
        except InvalidReservation:
            continue  # it had no effect while its file existed
        over = one.end_at_ns <= seen.status.st_ctime_ns
        state = ReservationState.COMPLETED if over else ReservationState.CANCELLED
        rows.append(ReservationStatus(name, state, one, removed_at_ns=seen.status.st_ctime_ns))
    return tuple(rows)


def list_reservations(
    spool: Spool, machine: Machine, now_ns: int, *, everything: bool
) -> tuple[list[ReservationStatus], list[int]]:
    """Return the reservations by their beginning, and the indices of the GPUs that there are or that they keep.

    Those that are over, or cancelled, are there only with *everything*.
    """
    rows = read_reservations(spool, known_gpus(machine), now_ns).rows
    over = {one.name for one in rows if one.reservation is not None and one.reservation.end_at_ns <= now_ns}
    shown = [*rows, *removed_reservations(spool)] if everything else [one for one in rows if one.name not in over]
    shown.sort(key=lambda one: (one.reservation.start_at_ns if one.reservation else 0, one.name))
    kept = {index for one in shown if one.stands and one.reservation for index in one.reservation.gpu_indices}
    return shown, sorted(kept | {gpu.index for gpu in machine.gpus})


def check_new(spool: Spool, machine: Machine, new: Reservation, now_ns: int) -> tuple[str, ...]:
    """Return notes on a reservation that could be made: what could not be checked, what looks like a mistake.

    Raises SpoolError if it cannot stand.
    """
    notes = []
    if machine.gpu_problem is not None:
        notes.append(f"cannot check how many GPUs there are: {machine.gpu_problem}")
    gpus = known_gpus(machine)
    files = read_reservations(spool, gpus, now_ns)
    notes += [
        f"whether it conflicts with {row.name} is unknown: {row.name} {row.problem}" for row in files.rows if row.unread
    ]
    why_not = conflict(new, files.standing, gpus)
    if why_not is not None:
        remedy = "`spool reserve list` shows all reservations"
        raise SpoolError(cannot("make", f"reservation {new.name}", in_words(why_not, now_ns), remedy=remedy))
    if new.user is not None and new.user != NOBODY and not _exists(new.user):
        notes.append(f"there is no user {new.user} on this machine")
    return tuple(notes)


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


_GPU_PATIENCE_NS = 3 * SECOND_NS
_LONG_PATIENCE_NS = LIMIT_NS  # for queries about GPUs: long enough to detect that NVML hangs


class Snapshot(Struct, frozen=True):
    """The state of a spool at one moment, and the plan for it. `left_out` says why a job's file cannot be planned.

    `config_problem` says why the configuration cannot be used, `unpinned` what of it has no effect on the CPUs of runs.
    `shared` has the other users of a shared machine. The plan is made without them; `machine` is as it was seen.
    `said` is the running dispatcher's last view, old if that is silent; `left` is what people are told of each run.
    """

    view: View
    machine: Machine
    plan: Plan
    policy: Policy
    now_ns: int
    table: SchedulerState
    config_problem: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    shared: MachineSharing | None = None
    unpinned: str | None = None
    dispatcher: bool = False
    said: StateView | None = None
    left: dict[str, TimeLeft | None] = field(default_factory=dict)

    @property
    def machine_use(self) -> MachineUse | None:
        """What is in use of a shared machine; None if it is not shared, or nothing is known of it."""
        return self.shared.use if self.shared is not None else None

    def last_word(self, name: str) -> str:
        """Return the dispatcher's last reason why a job waits, as it reads now; "" if there is none."""
        job = self.said.jobs.get(name) if self.said is not None else None
        return in_words(job.reason, self.now_ns) if job is not None else ""


def snapshot(
    spool: Spool, now_ns: int | None = None, *, with_gpus: bool = False, with_tasks: bool = False, quiet: bool = False
) -> Snapshot:
    """Return the state of the spool and the machine, and the plan for this moment.

    The GPUs are read if a job wants one, or always with *with_gpus*; the view of a dispatcher that watches them takes
    precedence, so that all answers agree. *with_tasks*, the tasks that arrays have not issued yet wait like the others.
    *quiet*: the caller tells of `config_problem`, which otherwise is logged.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    settings = Settings(spool.root, quiet=quiet)
    table = SchedulerState(
        executors=Executors(config=lambda: settings.config),
        newest_result=spool.newest_result,
    )
    dispatcher = spool.dispatcher_lives()
    last, silent_ns = last_view(spool, now_ns) if dispatcher else (None, None)
    said = last if silent_ns is None else None
    table.executors.believe(said.executors if said is not None else {})
    prober = MachineProber(frozenset(settings.config.other_hosts_gone))
    left_out = Look(spool, settings.config, now_ns).fill(table, prober)
    refusal = _load_refusals(table, said)
    left_out |= dict.fromkeys((*table.arrays, *table.array_files), "it is an array; its tasks are planned one by one")
    told = said.machine.told() if said is not None and said.machine is not None else None
    world = MachineMonitor(spool, table, settings, with_gpus=with_gpus, told=lambda: told)
    with closing(world):
        machine = world.machine(now_ns, patience_ns=_LONG_PATIENCE_NS if with_gpus else _GPU_PATIENCE_NS)
    shared = shared_machine(spool, now_ns, settings.config)
    machine = _as_shared(machine, settings.config, shared, said.machine if said is not None else None)
    machine = replace(machine, refusal=refusal)
    policy = settings.config.policy
    alone = machine if shared is None else as_if_alone(machine)
    table.fit(alone, policy)
    arrays = _ForeseenNames(spool, table, _expand(table, now_ns)) if with_tasks else ArrayNames(spool, table)
    if table.queue or table.held or table.runs:  # otherwise no estimate needs the history
        table.remember(past_of(spool, now_ns, policy, sizes=table.sizing is not None))
        if table.sizing is not None and with_tasks:
            _expand(table, now_ns)  # they have their sizes now
    ended = OutcomeIndex(spool, table)
    for name in () if dispatcher else cancelled_unseen(spool, table.queue.watch.names() - table.jobs.keys()):
        ended.record(name, State.CANCELLED)
    view = table.view(
        alone,
        ended=ended,
        arrays=arrays,
        reservations=read_reservations(spool, world.gpu_indices, now_ns).standing,
        paused=spool.paused,
        holding=(said.held_back if said is not None else None) or Holding(),
    )
    plan = decide(view, now_ns, policy)
    unpinned = world.why_not_pinned(is_shared=shared is not None)
    found = Snapshot(view, machine, plan, policy, now_ns, table, settings.problem, left_out, shared, unpinned)
    return replace(found, dispatcher=dispatcher, said=last, left={} if with_gpus else _left(spool, view, now_ns))


def _left(spool: Spool, view: View, now_ns: int) -> dict[str, TimeLeft | None]:
    """Return the time that people are told remains of the runs."""
    found = {}
    for name, run in view.running.items():
        from spool.client.output import progress_of  # without runs it is not needed

        progress = Progress()
        with suppress(OSError):  # reported where its row comes from
            progress = progress_of(spool, name, run.run)
        found[name] = view.past.run_times.left(run, progress, now_ns)
    return found


class _ForeseenNames(ArrayNames):
    """The tasks of every array, of those too that nothing has *expanded* yet."""

    def __init__(self, spool: Spool, table: SchedulerState, expanded: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(spool, table)
        self._expanded = expanded

    def __getitem__(self, name: str) -> tuple[str, ...]:
        return self._expanded.get(name) or super().__getitem__(name)


def _expand(table: SchedulerState, now_ns: int) -> dict[str, tuple[str, ...]]:
    """Let each task wait that an array has not issued yet; return the tasks of the arrays that nothing has expanded."""
    found: dict[str, list[str]] = {}
    for task in table.tasks_to_come(now_ns):
        table.queue.put(task)
        found.setdefault(array_of(task.name), []).append(task.name)
    return {name: tuple(tasks) for name, tasks in found.items() if name in table.array_files}


def _load_refusals(table: SchedulerState, said: StateView | None) -> str:
    """Apply the machine's refusals of jobs, and return why it starts nothing, if so."""
    if said is None:
        return ""
    for name, refused in said.refused.items():
        job = table.jobs.get(name)
        if job is not None:
            table.recall_refusal(job, StartBackoff(1, refused.why, refused.until_ns))
    return said.machine.refusal if said.machine is not None else ""


def machine_now(spool: Spool, now_ns: int, *, with_gpus: bool = True, patience_ns: int = _LONG_PATIENCE_NS) -> Machine:
    """Return the machine, and *with_gpus* its GPUs, independent of all jobs.

    The wait for NVML is limited to *patience_ns*.
    """
    told, settings = machine_told(spool, now_ns), Settings(spool.root)
    gpus = told.told() if told is not None else None
    world = MachineMonitor(spool, SchedulerState(), settings, with_gpus=with_gpus, told=lambda: gpus)
    with closing(world):
        machine = world.machine(now_ns, patience_ns=patience_ns)
    return _as_shared(machine, settings.config, shared_machine(spool, now_ns, settings.config), told)


def _as_shared(machine: Machine, config: Config, shared: MachineSharing | None, told: MachineView | None) -> Machine:
    """Return the machine with what its arbiter leaves to the spool, by what the dispatcher has *told* of that."""
    said = told.shared if told is not None else None
    return machine if shared is None else on_shared(machine, config, said or arbiter_view(shared))


def next_request(spool: Spool, name: str, user: str, spec: Spec) -> Sized | None:
    """Return what the next run of a job of *user* with that *spec* requests; None: what its file states."""
    if not spec.is_sized:
        return None
    now_ns, config, request = time.time_ns(), Settings(spool.root).config, spec.request
    past = past_of(spool, now_ns, config.policy, sizes=True)
    sizing = Sizing(spool.newest_result)
    sizing.fit(machine_now(spool, now_ns, with_gpus=bool(request.gpus and request.gpu_memory_auto)), config.policy)
    elsewhere = engine_of(spec.executor or config.executor)
    return sizing.of(Waiting(name, spec, user, now_ns, elsewhere=elsewhere), past)
