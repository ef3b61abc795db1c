"""What the dispatcher makes of looks at the GPUs of a run, where the disk is full or it is cut off."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from crash.world import Session
from spool.core import layout
from spool.core.model import SECOND_NS, EventName, Gpu, GpuWork, Machine, StopKind
from spool.dispatcher.monitor import GpuUseRecorder
from spool.state.run import ActiveRun
from spool.store.disk import SpoolTrouble

MINUTE = 60 * SECOND_NS
FULL = SpoolTrouble(errno.ENOSPC, "No space left on device")


class Looks:
    """A run with one GPU, and what looks at it see."""

    def __init__(self, session: Session, action: str) -> None:
        session.users.submit("train", "run 1000", 'gpu_idle = "30m"', f'gpu_idle_action = "{action}"')
        session.turns(5)
        self.dispatcher = session.now
        live = self.dispatcher.state.jobs["train"].live
        self.live: ActiveRun = live
        live.grant = replace(live.grant, gpu_uuids=("GPU-0",))
        self.dispatcher.events.wanted = frozenset(EventName)  # only now, so that no process of the listeners starts
        self.dispatcher.state.recount(live)
        self.at_ns = live.started_at_ns
        self.recorder = self.new_recorder()

    def new_recorder(self) -> GpuUseRecorder:
        """Return what the next dispatcher would have."""
        self.world: Any = SimpleNamespace(gpus_at_ns=None)
        return GpuUseRecorder(self.dispatcher.context, self.world, self.dispatcher.stops.order)

    def look(self, percent: int, after_ns: int = 5 * SECOND_NS) -> None:
        """See the run compute for that much of the last moments."""
        self.at_ns += after_ns
        self.world.gpus_at_ns = self.at_ns
        gpu = Gpu("GPU-0", 0, "H100", 80 << 30, 80 << 30, work=(GpuWork("train", percent, 0),))
        self.recorder.turn(Machine(4, 16 << 30, gpus=(gpu,)))

    def idle_for(self, minutes: int) -> None:
        """Look often enough that all of that time counts."""
        for _ in range(minutes * 12):
            self.look(0)

    def told(self) -> list[str]:
        """Return the ids of the events of idle GPUs that were written down."""
        lines = Path(self.dispatcher.spool.layout.at(layout.EVENTS)).read_text().splitlines()[1:]
        return [event["id"] for event in map(json.loads, lines) if event["name"] == "gpu_idle"]

    def record(self) -> str:
        """Return the record of the run."""
        return Path(self.dispatcher.spool.layout.record("train", 1, layout.GPUS)).read_text()


def test_one_that_is_cut_off_before_the_record_tells_it_again_by_the_same_name(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event comes first, and the record last: never is it left out, and a repeat is known by its id."""
    run = Looks(session, "warn")
    run.idle_for(29)
    run.recorder.leave()
    with monkeypatch.context() as cut:
        cut.setattr(run.dispatcher.context.spool, "put_note", lambda *_: None)
        run.idle_for(2)
    assert run.told() == ["train:1:gpu_idle:1"]
    run.recorder = run.new_recorder()
    watch = run.dispatcher.context.spool.gpu_watch("train", 1)
    assert not watch.is_told
    run.live.gpus_watched(watch)
    run.idle_for(3)
    assert run.told() == ["train:1:gpu_idle:1"] * 2
    assert "is_told = true" in run.record()
    run.idle_for(40)
    assert len(run.told()) == 2


def test_a_full_disk_keeps_no_idle_run_alive(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be told stays noted, and is written down once there is room; the stop does not wait for that."""
    run = Looks(session, "stop")

    def full(*_: object) -> None:
        raise FULL

    with monkeypatch.context() as disk:
        disk.setattr(run.dispatcher.logs, "tell", full)
        run.idle_for(30)
    assert (run.live.stop.kind, run.live.stop.by) == (StopKind.CANCEL, "spool")
    assert "told = 0" in run.record()
    run.dispatcher.events.flush()
    assert run.told() == ["train:1:gpu_idle:1"]


def test_a_disk_that_refuses_the_record_costs_nothing_but_the_record(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was added up stays in mind, and is written down by a later look."""
    run = Looks(session, "warn")

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "gpus.toml")

    with monkeypatch.context() as disk:
        disk.setattr(run.dispatcher.context.spool, "put_note", broken)
        run.look(80)
        assert "GPU use" in run.dispatcher.confinement.why("train")
    run.look(80)
    run.recorder.leave()
    assert run.live.gpu_watch.gpus[0].watched_ns == 10 * SECOND_NS


def test_a_clock_set_back_leaves_no_idle_gpu_unwatched(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks go on to count though their times are before the start of the run."""
    run = Looks(session, "warn")
    run.look(0)
    day_ns = 24 * 60 * MINUTE
    run.at_ns -= day_ns
    now_ns = run.dispatcher.context.clock()
    monkeypatch.setattr(run.recorder, "_clock", lambda: now_ns - day_ns)
    run.look(0)
    run.idle_for(30)
    assert run.told() == ["train:1:gpu_idle:1"]
