"""What a screen that stays open reads: the jobs of the commands, and anew only where something has changed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from calling import put_job
from spool.core.errors import SpoolUnusable
from spool.core.model import SECOND_NS, State
from spool.formats.state import MachineView, StateView, render_state
from spool.query.overview import OverviewReader
from spool.query.shared import UserShare
from spool.store.lock import Lock
from views import BOB, Arbiter


def test_nothing_is_read_anew_while_nothing_changes(spool_root: Path) -> None:
    """The second look is None; a file that comes, the pause and ten seconds are each a reason to look."""
    reader = OverviewReader(str(spool_root))
    now = time.time_ns()
    first = reader.look(now)
    assert first.active == ()
    assert reader.look(now + SECOND_NS) is None
    put_job(spool_root, "one")
    second = reader.look(now + 2 * SECOND_NS)
    assert [row.name for row in second.active] == ["one"]
    assert second.found.unserved
    (spool_root / "paused").touch()
    third = reader.look(now + 3 * SECOND_NS)
    assert third.found.paused
    assert reader.look(now + 12 * SECOND_NS) is None
    assert reader.look(now + 13 * SECOND_NS) is not None


def test_a_dispatcher_that_went_is_noticed_though_no_file_changed(spool_root: Path) -> None:
    """The lock is asked at every look: what state.json says of the machine counts only while its writer lives."""
    lock = Lock(str(spool_root / ".lock"))
    now = time.time_ns()
    machine = MachineView(cpus=8, cpus_free=3, memory_bytes=1 << 30, memory_free_bytes=0, gpus_at_ns=now)
    (spool_root / "state.json").write_bytes(render_state(StateView(version=1, at_ns=now, pid=1, machine=machine)))
    reader = OverviewReader(str(spool_root))
    seen = reader.look(now)
    assert seen.machine is not None
    assert seen.machine.cpus_free == 3
    assert reader.look(now + 1) is None
    lock.release()
    seen = reader.look(now + 2)
    assert seen.machine is None
    assert not seen.found.dispatcher


def test_a_spool_that_is_gone_is_an_error_and_may_come_back(spool_root: Path) -> None:
    """A look at a spool that was moved away raises; once it is there again, it is read."""
    put_job(spool_root, "one")
    reader = OverviewReader(str(spool_root))
    assert reader.look(time.time_ns()) is not None
    spool_root.rename(spool_root.with_name("elsewhere"))
    with pytest.raises(SpoolUnusable):
        reader.look(time.time_ns())
    spool_root.with_name("elsewhere").rename(spool_root)
    put_job(spool_root, "two", place="held")
    seen = reader.look(time.time_ns())
    assert (seen.count(State.QUEUED), seen.count(State.HELD), seen.count(State.QUEUED, State.HELD)) == (1, 1, 2)


def test_what_other_users_have_is_news_and_the_time_is_none(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another lease is a reason to look; that the arbiter renews its file is none, until it no longer does."""
    arbiter = Arbiter(spool_root, monkeypatch)
    arbiter.says(BOB)
    now = time.time_ns()
    reader = OverviewReader(str(spool_root))
    assert [share.user for share in reader.look(now).shared.use.others] == ["bob"]
    arbiter.says(BOB, written_at_ns=2)
    assert reader.look(now + SECOND_NS) is None
    arbiter.says(BOB, UserShare(user="carol", asks=1))
    assert reader.look(now + 2 * SECOND_NS).problems == ()
    arbiter.says(problem="the arbiter has not answered for 6s")
    assert " 6s;" in reader.look(now + 3 * SECOND_NS).problems[0]
