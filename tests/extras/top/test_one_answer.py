"""The screen says the same of the jobs as the commands."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cli.records import serve
from cli.test_outlook import MINUTE, first_and_next
from crash.test_one_answer import Compared, live, same
from query.test_counts import COUNTED, an_array_with_tasks
from spool.core.layout import DONE
from spool.core.model import SECOND_NS, Machine, State
from spool.extras.top import reading
from spool.extras.top.reading import OverviewReader
from spool.query.jobs import list_jobs
from spool.store.tolerant import TolerantSpool


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
    monkeypatch.setattr(reading, "machine_now", lambda *_: Machine(2, 1 << 30))  # NVML is a process of its own
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
