"""What a screen that stays open reads: the jobs of the commands, and anew only where something has changed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from calling import put_job
from cli.records import serve
from cli.test_outlook import MINUTE, first_and_next
from crash.test_one_answer import Compared, live, same
from query.test_counts import COUNTED, an_array_with_tasks
from spool.core.errors import SpoolUnusable
from spool.core.layout import DONE
from spool.core.model import SECOND_NS, Machine, State
from spool.formats.state import MachineView, StateView, render_state
from spool.query import overview
from spool.query.jobs import list_jobs
from spool.query.overview import OverviewReader
from spool.query.shared import UserShare
from spool.store.lock import Lock
from spool.store.tolerant import TolerantSpool
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


class OnScreen(Compared):
    """A life after every event of which the screen is compared with the list."""

    def compare(self, *, fresh: bool) -> None:
        """Assert that the screen has the jobs of the list."""
        root = str(self.world.root)
        seen = OverviewReader(root).look(time.time_ns())
        assert seen is not None
        rows = list_jobs(TolerantSpool(root), everything=True).rows
        active = {(row.name, row.place): row for row in rows if not row.state.ended and row.place != DONE}
        assert {(row.name, row.place) for row in seen.active if row.place != DONE} == set(active), "top"
        for row in seen.active:
            if row.place != DONE:
                same(f"top {row.name}", row, active[row.name, row.place])


def test_the_screen_has_the_jobs_of_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every event of a random life it shows the rows of `ls`."""
    monkeypatch.setattr(overview, "machine_now", lambda *_: Machine(2, 1 << 30))  # NVML is a process of its own
    live(tmp_path, monkeypatch, OnScreen)


def test_an_array_is_counted_as_its_tasks(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The screen counts two tasks that run and one that waits, and no job for their array."""
    now = time.time_ns()
    serve(monkeypatch, spool_root, an_array_with_tasks(spool_root, "running"), at_ns=now)
    seen = OverviewReader(str(spool_root)).look(now)
    assert {state: seen.count(state) for state in State if seen.count(state)} == COUNTED


@pytest.mark.usefixtures("own_process_stands_for_wrappers")
def test_the_screen_foresees_what_the_commands_do(spool_root: Path) -> None:
    """Where a dispatcher serves, it has the end of the run and the start behind it; else it promises nothing."""
    now = time.time_ns() // SECOND_NS * SECOND_NS
    with first_and_next(spool_root, now):
        seen = OverviewReader(str(spool_root)).look(now)
    on_screen = {row.name: seen.outlook.of(row, now) for row in seen.active}
    assert on_screen["first"].left_ns == 50 * MINUTE
    assert on_screen["next"].start_at_ns == now + 50 * MINUTE
    assert on_screen["next"].outlook(now + MINUTE) == "in 49m00s"
    assert OverviewReader(str(spool_root)).look(now).outlook.starts == {}  # nothing serves it any more
