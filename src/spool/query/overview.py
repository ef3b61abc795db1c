"""A spool at one moment, for a view that stays open: its jobs, the machine and its GPUs, and what is wrong.

All of it is read again only after changes.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from msgspec import Struct
from msgspec.structs import replace

from spool.core import layout
from spool.core.gpus import stranger
from spool.core.gpuuse import RecentUse
from spool.core.model import SECOND_NS, Gpu, Machine, State
from spool.core.units import show_size
from spool.formats.state import MachineView, StateView
from spool.query.jobs import counts, list_jobs
from spool.query.listing import UNKNOWN, Outlook, OutlookReader
from spool.query.rows import JobFilter, JobList, JobRow, in_words, last_view, with_progress
from spool.query.shared import MachineSharing, lease_words, leases_on, problems_of, shared_machine, without_users
from spool.query.snapshot import machine_now
from spool.store.edited import Settings
from spool.store.spool import Spool
from spool.store.tolerant import TolerantSpool

_ENDED = 200  # ended jobs
_GPUS_EVERY_NS = 60 * SECOND_NS  # if no dispatcher watches them, so that NVML is queried
_AT_LEAST_EVERY_NS = 10 * SECOND_NS  # for facts without a file event: a dead or silent dispatcher
_WATCHED = (layout.STATE, layout.PAUSED, layout.CONFIG, layout.HISTORY, *layout.PLACES)


class GpuGlance(Struct, frozen=True):
    """One GPU. `jobs` are its runs, `remarks` its problem, what others have of it by lease, and its foreign users.

    `recent` is its utilisation in the steps of the last half hour, in percent.
    """

    gpu: Gpu
    jobs: tuple[str, ...]
    remarks: tuple[str, ...]
    recent: tuple[int | None, ...] = ()


class Overview(Struct, frozen=True):
    """The spool at one moment: active and waiting jobs, the last ended ones (newest first), and the machine.

    `view` is that of the running dispatcher; None without a dispatcher.
    """

    active: tuple[JobRow, ...]
    ended: tuple[JobRow, ...]
    view: StateView | None
    gpus: tuple[GpuGlance, ...]
    gpu_problem: str | None
    found: JobList  # whether a dispatcher is running, whether it is paused, …
    problems: tuple[str, ...]
    at_ns: int
    shared: MachineSharing | None = None  # None: the machine is this spool's alone
    outlook: Outlook = UNKNOWN  # of the active jobs

    @property
    def machine(self) -> MachineView | None:
        """The machine, as that dispatcher sees it."""
        return self.view.machine if self.view is not None else None

    def count(self, *states: State) -> int:
        """Return how many jobs are in one of *states*."""
        found = counts(self.active)
        return sum(found[state] for state in states)


class OverviewReader:
    """Reads one spool on each call. Not for several threads at once."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._mark: object = None
        self._last: Overview | None = None
        self._machine = Machine(0, 0)
        self._asked_at_ns = 0
        self._settings = Settings(root)
        self._outlook = OutlookReader()

    def look(self, now_ns: int) -> Overview | None:
        """Return the present view; None if it has not changed since the last call. Raises SpoolUnusable."""
        spool = TolerantSpool.open(self._root)
        self._settings.reload()
        shared = shared_machine(spool, now_ns, self._settings.config)
        changes = (_changed_at(spool.layout.at(name)) for name in _WATCHED)
        mark = (spool.service(), *changes, shared.gist if shared is not None else None)
        last = self._last
        if last is None or mark != self._mark or now_ns - last.at_ns >= _AT_LEAST_EVERY_NS:
            self._mark, self._last = mark, self._read(spool, now_ns, shared)
            return self._last
        active = tuple(with_progress(spool, row) for row in last.active)
        if active == last.active:
            return None
        self._last = replace(last, active=active)
        return self._last

    def _read(self, spool: Spool, now_ns: int, shared: MachineSharing | None) -> Overview:
        found = list_jobs(spool, JobFilter(recent=_ENDED))
        view, _ = last_view(spool, now_ns) if found.dispatcher else (None, None)
        machine = view.machine if view is not None else None
        active = tuple(row for row in found.rows if not row.state.ended)
        recent = view.recent.as_of(now_ns) if view is not None else RecentUse()
        told = machine.told() if machine is not None else None
        if told is None and now_ns - self._asked_at_ns >= _GPUS_EVERY_NS:
            self._machine, self._asked_at_ns = machine_now(spool, now_ns), now_ns
        gpus = told.gpus if told is not None else self._machine.gpus
        jobs = {each.uuid: each.jobs for each in machine.gpus} if machine is not None else {}
        refusal = in_words(machine.refusal, now_ns) if machine is not None else ""
        unread = spool.told() if isinstance(spool, TolerantSpool) else []
        problems = (refusal, *problems_of(shared), *found.problems, *unread)
        return Overview(
            active=active,
            ended=tuple(row for row in reversed(found.rows) if row.state.ended),
            view=view,
            gpus=tuple(_glance(gpu, jobs.get(gpu.uuid, ()), shared, recent) for gpu in gpus),
            gpu_problem=told.problem if told is not None else self._machine.gpu_problem,
            found=found,
            problems=tuple(dict.fromkeys(filter(None, problems))),
            at_ns=now_ns,
            shared=shared,
            outlook=self._outlook.look(spool, active, now_ns, served=found.serves),
        )


def _changed_at(path: str) -> tuple[int, int, int] | None:
    """Return a value that changes when the file, or the names in the directory, may have changed."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _glance(gpu: Gpu, jobs: Collection[str], shared: MachineSharing | None, recent: RecentUse) -> GpuGlance:
    leases = leases_on(gpu, shared, [None for _ in jobs])
    gpu = replace(gpu, foreign=without_users(gpu.foreign, leases)) if leases else gpu
    others = [lease_words(lease) for lease in leases]
    others += [stranger(one, show_size(one.memory_bytes or 0) if one.memory_bytes else "") for one in gpu.foreign]
    return GpuGlance(gpu, tuple(jobs), tuple(filter(None, (gpu.problem, *others))), recent.gpus.get(gpu.uuid, ()))
