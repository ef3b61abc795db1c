"""Somebody who listens, for the crash tests: what the dispatcher writes down for the listeners, and nobody reads."""

from __future__ import annotations

from collections import Counter

import pytest

from crash.world import World
from spool.core.model import Event, EventName
from spool.dispatcher import launcher, monitor, recovery
from spool.dispatcher.events import ListenerClient
from spool.formats import capabilities
from spool.formats.capabilities import Capability
from spool.formats.config import Config
from spool.store.disk import Disk
from spool.store.logs import EventReader


def nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no process that tells the listeners, and each play make the same changes in the same passes."""
    monkeypatch.setattr(ListenerClient, "tick", lambda _: None)
    monkeypatch.setattr(ListenerClient, "next_due_ns", lambda _: None)
    for name in ("_SOON_NS", "_LATER_NS"):
        monkeypatch.setattr(monitor, name, 0)
    monkeypatch.setattr(launcher, "SILENT_NS", 0)
    monkeypatch.setattr(recovery, "SILENT_NS", 0)


_RECORDER = Capability("recorder", "Hears everything.", listens="crash.events:listens", listener="crash.events:none")


def listens(_: Config) -> bool:
    """Say that it listens, whatever is configured."""
    return True


def want_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have somebody listen who wants to hear of everything."""
    monkeypatch.setattr(capabilities, "_outside", (_RECORDER,))


def events(world: World) -> list[Event]:
    """Return every event that was written down, repeats too."""
    reader = EventReader(str(world.root), "test", Disk(world.staging))
    found, position = [], 0
    while lines := reader.read(position):
        found += [line.event for line in lines if line.event is not None]
        position = lines[-1].end
    reader.close()
    return found


def repeated(world: World) -> list[str]:
    """Return the ids of what was written down more than once; each try to start a job is about the same start."""
    times = Counter(event.id for event in events(world) if event.name is not EventName.SUBMITTING)
    return [number for number, count in times.items() if count > 1]
