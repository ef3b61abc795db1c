"""What the dispatcher makes of the counters of CPU packages, sample by sample."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from crash.world import Session
from spool.core import layout
from spool.core.cpuenergy import EnergySample
from spool.core.model import SECOND_NS, CpuEnergy, Suspension
from spool.dispatcher import cpuenergy, limits
from spool.dispatcher.cpuenergy import CpuEnergyRecorder
from spool.state.run import ActiveRun
from spool.store.disk import SpoolTrouble

S = SECOND_NS
J = 1_000_000  # in µJ


class Clock:
    """The time of the recorder, and counters that go on with it, by 40 W."""

    ranges_uj = (262_143_328_850,)

    def __init__(self) -> None:
        self.now_ns, self.samples, self.broken = 1000 * S, 0, False

    def monotonic_ns(self) -> int:
        """Return the time."""
        return self.now_ns

    def sample(self) -> EnergySample | None:
        """Return what the counters show."""
        self.samples += 1
        used_uj = self.now_ns * 40 * J // S
        return None if self.broken else EnergySample(self.now_ns, self.now_ns, (used_uj,))


class Watched:
    """A run with one of four CPUs, and what records its energy."""

    def __init__(self, session: Session, clock: Clock) -> None:
        session.users.submit("train", "run 1000")
        session.turns(5)
        live = session.now.state.jobs["train"].live
        self.live: ActiveRun = live
        self.clock, self.context = clock, session.now.context
        self.recorder = self.new_recorder()

    def new_recorder(self) -> CpuEnergyRecorder:
        """Return what the next dispatcher would have."""
        counters: Any = self.clock
        return CpuEnergyRecorder(self.context, counters)

    def after(self, seconds: float) -> CpuEnergy | None:
        """Return the energy of the run after a turn that much later."""
        self.clock.now_ns += round(seconds * S)
        self.recorder.turn()
        return self.live.cpu_energy

    @property
    def record(self) -> CpuEnergy | None:
        """What the metadir has."""
        return self.context.spool.cpu_energy("train", 1)


@pytest.fixture
def run(session: Session, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Give a dispatcher with one run, on a machine with four CPUs."""
    watched = Watched(session, Clock())
    for module in (cpuenergy, limits):
        monkeypatch.setattr(module, "time", watched.clock)
    monkeypatch.setattr(cpuenergy, "cpus_of_machine", lambda: 4)
    return watched


def test_a_run_is_counted_from_its_start_to_its_end(run: Watched) -> None:
    """Samples are taken every 30 seconds while it goes on, and none after it."""
    run.recorder.watch_run(run.live)
    assert run.after(29) is None
    assert run.after(1) == CpuEnergy(300_000, 30 * S)
    run.clock.now_ns += 3 * S
    run.recorder.ended([run.live])
    assert run.live.cpu_energy == CpuEnergy(330_000, 33 * S)
    assert run.clock.samples == 3
    run.after(27)
    assert run.clock.samples == 4  # the timer of the last run is found to be for none
    run.after(30)
    assert run.clock.samples == 4


def test_many_starts_and_ends_at_a_time_share_a_sample(run: Watched) -> None:
    """The counters are read at most every tenth of a second."""
    for _ in range(50):
        run.recorder.watch_run(run.live)
        run.recorder.ended([run.live])
    assert run.clock.samples == 1
    assert run.live.cpu_energy is None


def test_a_run_elsewhere_or_without_a_cpu_is_not_counted(run: Watched) -> None:
    """Nothing is read for it."""
    run.live.executor = "slurm"
    run.recorder.watch_run(run.live)
    run.recorder.ended([run.live])
    assert run.after(60) is None
    assert run.clock.samples == 0


def test_what_cannot_be_read_for_a_time_is_unknown(run: Watched) -> None:
    """It counts again from the second sample after that."""
    run.recorder.watch_run(run.live)
    run.clock.broken = True
    assert run.after(30) is None
    run.clock.broken = False
    assert run.after(30) is None
    assert run.after(30) == CpuEnergy(300_000, 30 * S)


def test_the_record_is_written_rarely_and_when_the_dispatcher_leaves(run: Watched) -> None:
    """After the first sample, then every five minutes; a killed dispatcher loses what came since."""
    run.recorder.watch_run(run.live)
    assert run.record is None
    run.after(30)
    assert run.record == CpuEnergy(300_000, 30 * S)
    for _ in range(9):
        run.after(30)
    assert run.record == CpuEnergy(300_000, 30 * S)
    run.after(30)
    assert run.record == CpuEnergy(3_300_000, 330 * S)
    run.clock.now_ns += 2 * S
    run.recorder.leave()
    assert run.record == CpuEnergy(3_320_000, 332 * S)


def test_another_dispatcher_goes_on_from_the_record(run: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time without a dispatcher is unknown, however short; a record that makes no sense counts as none."""
    monkeypatch.setattr(ActiveRun, "adopted", True)
    run.recorder.watch_run(run.live)
    run.after(30)
    run.recorder, run.live.cpu_energy = run.new_recorder(), None
    run.clock.now_ns += 10 * S
    run.recorder.watch_run(run.live)
    assert run.after(30) == CpuEnergy(600_000, 60 * S)
    Path(run.context.spool.layout.record("train", 1, layout.CPU_ENERGY)).write_text("cpu_energy_estimate_mj = -1\n")
    run.recorder, run.live.cpu_energy = run.new_recorder(), None
    run.recorder.watch_run(run.live)
    assert run.after(30) == CpuEnergy(300_000, 30 * S)


def test_the_time_around_a_suspension_does_not_count(run: Watched) -> None:
    """Nor does the time that the run is suspended."""
    run.recorder.watch_run(run.live)
    run.after(30)
    run.live.suspends(Suspension(0, S, S))
    run.after(30)
    run.after(30)
    run.live.suspends(Suspension(50 * S))
    assert run.after(30) == CpuEnergy(300_000, 30 * S)
    assert run.after(30) == CpuEnergy(600_000, 60 * S)


@pytest.mark.parametrize("error", [SpoolTrouble(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "EIO")])
def test_a_disk_that_refuses_the_record_costs_nothing_but_the_record(
    run: Watched, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """What was added up stays in mind, and the counters are not read more often because of it."""

    def refuse(*_: object) -> None:
        raise error

    run.recorder.watch_run(run.live)
    with monkeypatch.context() as patched, suppress(SpoolTrouble):
        patched.setattr(run.context.spool, "put_note", refuse)
        run.after(30)
    assert run.record is None
    samples = run.clock.samples
    run.after(1)
    assert run.clock.samples == samples
    assert run.after(29) == CpuEnergy(600_000, 60 * S)


def test_a_run_that_never_began_is_forgotten(run: Watched) -> None:
    """Its start was taken back: no sample is taken for it any more."""
    run.recorder.watch_run(run.live)
    run.context.state.live.pop(run.live.key)
    for _ in range(3):
        run.after(30)
    assert run.clock.samples == 2
    assert run.live.cpu_energy is None
    run.context.state.live[run.live.key] = run.live
