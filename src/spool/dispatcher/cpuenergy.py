"""The estimated CPU energy of runs; only a dispatcher that may read the counters of the packages needs it."""

from __future__ import annotations

import logging
import time

from spool.core import layout
from spool.core.cpuenergy import EnergyMeter, EnergyShare
from spool.core.model import SECOND_NS
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Context
from spool.dispatcher.limits import SumsWriter
from spool.formats.run_records import render_cpu_energy
from spool.machine.powercap import PackageCounters, cpus_of_machine
from spool.state.run import ActiveRun

log = logging.getLogger(__name__)

_WRITE_EVERY_NS = 300 * SECOND_NS
_FRESH_NS = SECOND_NS // 10  # a sample serves all starts and ends in this time
_READ, _WRITE = "read the CPU energy of", "write the CPU energy of"


class CpuEnergyRecorder:
    """Estimates the CPU energy of the runs on this machine.

    It reads the counters when a run starts or ends, and often enough in between that no wrap of a counter is missed.
    The sums are in the metadir (`cpu_energy.toml`), written once in a while, so that a restart of the dispatcher keeps
    them.
    """

    def __init__(self, context: Context, counters: PackageCounters) -> None:
        self._context = context
        self._counters = counters
        self._timer = context.timers.timer("cpu energy")
        self._meter = EnergyMeter(counters.ranges_uj)
        self._shares: dict[tuple[str, int], EnergyShare] = {}
        self._sums = SumsWriter(context, layout.CPU_ENERGY, _WRITE, _WRITE_EVERY_NS)

    def watch_run(self, live: ActiveRun) -> None:
        """Count the energy of a run from now on, beyond what an earlier dispatcher has recorded."""
        if live.elsewhere is not None or not live.grant.cpus:
            return
        if live.adopted and live.cpu_energy is None:
            with self._context.confinement.of(Thing.of_run(live.key), _READ):
                live.cpu_energy_counted(self._context.spool.cpu_energy(live.name, live.run))
        if live.key in self._shares:
            return
        self._sample()
        of = max(cpus_of_machine(), self._context.settings.config.cpus or 0)
        meter = self._meter
        self._shares[live.key] = EnergyShare(live.grant.cpus, of, meter.total_uj, meter.known_ns, live.suspension)
        self._timer.advance(time.monotonic_ns() + meter.every_ns)

    def ended(self, runs: list[ActiveRun]) -> None:
        """Count the last energy of runs that are over."""
        ours = [live for live in runs if live.key in self._shares]
        if ours:
            self._sample()
        for live in ours:
            self._count(live)
            del self._shares[live.key]

    def turn(self) -> None:
        """Take a sample if it is time."""
        now_ns = time.monotonic_ns()
        if self._timer.at_ns is None or self._timer.at_ns > now_ns:
            return
        self._sample()
        known = [(key, self._context.state.live.get(key)) for key in self._shares]
        runs = [live for _, live in known if live is not None]
        for key in [key for key, live in known if live is None]:  # it never began
            del self._shares[key]
        for live in runs:
            self._count(live)
        self._timer.set(now_ns + self._meter.every_ns if self._shares else None)
        self._sums.forget_ended()
        for live in runs:  # last: a full disk ends this
            if self._sums.is_due(live):
                self._write(live)

    def leave(self) -> None:
        """Write the sums since the last writing."""
        if self._shares:
            self._sample()
        for key in self._shares:
            live = self._context.state.live.get(key)
            if live is not None and live.result is None:
                self._count(live)
                self._write(live)

    def _sample(self) -> None:
        last = self._meter.last
        if last is None or time.monotonic_ns() - last.at_ns >= _FRESH_NS:
            self._meter = self._meter.after(self._counters.sample())

    def _count(self, live: ActiveRun) -> None:
        share, energy = self._shares[live.key].counted(self._meter, live.suspension, live.cpu_energy)
        self._shares[live.key] = share
        live.cpu_energy_counted(energy)

    def _write(self, live: ActiveRun) -> None:
        if live.cpu_energy is not None:
            self._sums.write(live, render_cpu_energy(live.cpu_energy))
