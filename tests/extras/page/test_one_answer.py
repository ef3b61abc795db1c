"""The page says the same of the jobs as the commands."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cli.records import serve
from cli.test_outlook import first_and_next
from crash.test_one_answer import Compared, live
from extras.page.pages import page_of
from query.test_counts import COUNTED, a_second_job, an_array_with_tasks
from spool.core.layout import DONE
from spool.core.model import SECOND_NS, State
from spool.extras.page.content import ContentReader
from spool.query.jobs import counts, list_jobs
from spool.store.tolerant import TolerantSpool


class OnThePage(Compared):
    """A life after every event of which the page is compared with the list."""

    def compare(self, *, fresh: bool) -> None:
        """Assert that the page counts the jobs of the list, where the dispatcher has just told of them."""
        if fresh:
            root = str(self.world.root)
            active = [row for row in list_jobs(TolerantSpool(root), everything=True).rows if row.place != DONE]
            told = ContentReader(root).read(time.time_ns(), served=True).counts
            assert told == {state.value: number for state, number in counts(active).items()}, f"page: {active}"


def test_the_page_counts_the_jobs_of_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every event of a random life it has as many jobs in each state as `ls`."""
    live(tmp_path, monkeypatch, OnThePage)


def test_an_array_is_counted_as_its_tasks_and_a_second_job_as_one(
    spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page counts no job for an array, and one for what waits for the run of its name to end."""
    now = time.time_ns()
    serve(monkeypatch, spool_root, an_array_with_tasks(spool_root, "running"), at_ns=now)
    assert ContentReader(str(spool_root)).read(now, served=True).counts == COUNTED
    serve(monkeypatch, spool_root, a_second_job(spool_root), at_ns=now)
    told = ContentReader(str(spool_root)).read(now, served=True).counts
    assert told == {State.RUNNING: 1, State.QUEUED: 1}


@pytest.mark.usefixtures("own_process_stands_for_wrappers")
def test_the_page_foresees_what_the_commands_do(spool_root: Path) -> None:
    """Where a dispatcher serves, it has the start behind the end of a run."""
    now = time.time_ns() // SECOND_NS * SECOND_NS
    with first_and_next(spool_root, now):
        page = page_of(spool_root, now)
    assert "Starts" in page
    assert "in 50m00s" in page
