"""A dispatcher that is killed while it starts a command in a terminal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crash.conftest import world as world
from crash.cuts import cuts, each_alike
from crash.world import Ends, Session, World, check, ends_of, world_at
from faulty import FaultyDisk
from spool.core import layout
from spool.dispatcher import launcher, recovery
from spool.executors.base import Launch
from spool.extras.here.launching import own_terminal
from spool.store.spool import Spool


def _caller_looks(session: Session) -> None:
    """Start the wrapper if the dispatcher has told so, as `spool run --here` does."""
    spool = Spool(str(session.world.root))
    run = spool.latest_run("job")
    if run is None or spool.record("job", run, layout.LAUNCH) != own_terminal().encode():
        return
    metadir = spool.layout.metadir("job", run)
    os.unlink(f"{metadir}/{layout.LAUNCH}")
    script = f"{metadir}/{layout.WRAPPER}"
    session.world.launched.append(Launch("job", run, spool.root, metadir, script, keep=False))


def _played(world: World, cut_at: int | None, *, slow: int = 0) -> FaultyDisk:
    disk = FaultyDisk(world.staging, cut_at=cut_at)
    session = Session(world, iter([disk]))
    looks = [*[lambda _: None] * slow, _caller_looks]  # after a cut the next dispatcher is faster than the caller
    session.after_turn = lambda: looks.append(_caller_looks) or looks.pop(0)(session)  # type: ignore[func-returns-value]
    session.after_cut = lambda: looks.insert(0, lambda _: None)
    session.users.submit("job", "ok", f'terminal = "{own_terminal()}"', "requeue = false")
    session.turns(8)
    session.settle()
    session.end()
    session.settle()
    session.end()
    check(world)
    assert ends_of(world) == Ends({"job": ("done",)}, {"job": 1}, {"job": ("finished 1.0",)})
    return disk


def test_a_command_in_a_terminal_runs_once_wherever_the_dispatcher_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any change of the disk: the next one tells the terminal again, or finds the run that goes on."""
    monkeypatch.setattr(launcher, "SILENT_NS", 0)
    monkeypatch.setattr(recovery, "SILENT_NS", 0)
    with world_at(tmp_path / "whole", monkeypatch) as world:
        whole = _played(world, None)
    each_alike(tmp_path, monkeypatch, whole, cuts(whole, 0), _played)


def test_a_run_that_its_terminal_has_not_begun_yet_is_not_lost(world: World) -> None:
    """However often the dispatcher looks at it meanwhile."""
    _played(world, None, slow=5)
