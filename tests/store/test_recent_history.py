"""The runs of the last while, of which each look reads only what is new."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from spool.core.model import SECOND_NS
from spool.formats.run_records import read_ended_runs, render_history
from spool.store import history
from spool.store.history import RecentHistory
from spool.store.spool import Spool
from spool.testing.fakes import a_result

HOUR_NS = 3600 * SECOND_NS
NOW_NS = 1_800_000_000 * SECOND_NS


def line(name: str, hours_ago: float) -> bytes:
    """Return the line of a run that ended so long ago."""
    return render_history(a_result(name, submitted_at_ns=NOW_NS - int(hours_ago * HOUR_NS) - SECOND_NS, ran="1s"))


def append(root: Path, *lines: bytes) -> None:
    """Append lines to the history."""
    with (root / "history.jsonl").open("ab") as file:
        file.write(b"".join(lines))


def names(recent: RecentHistory, now_ns: int = NOW_NS) -> list[str]:
    """Return the jobs of the runs of a look."""
    return [run.job for run in recent.look(now_ns)]


@pytest.fixture
def recent(spool_root: Path) -> RecentHistory:
    """Give the runs of a day."""
    return RecentHistory(str(spool_root), 24 * HOUR_NS, 10_000)


def test_what_is_appended_is_seen(spool_root: Path, recent: RecentHistory) -> None:
    """A look has the runs of the looks before and those since, each once, in their order.

    A line that is being written is read once it is whole; one that a crash left is no run, and hides none.
    """
    text = line("slow", 1)
    assert names(recent) == []
    append(spool_root, b'{"job": "torn\n', b"\0\0\n", line("a", 3), line("b", 2), text[:40])
    assert names(recent) == ["a", "b"]
    append(spool_root, text[40:], line("c", 1))
    for _ in range(2):
        assert names(recent) == ["a", "b", "slow", "c"]
    (spool_root / "history.jsonl").write_bytes(text)  # a shorter file is another history
    assert names(recent) == ["slow"]


def test_only_what_is_new_is_read(spool_root: Path, recent: RecentHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look at a history of thousands of lines reads the one line that was appended."""
    append(spool_root, *(line(f"job-{n}", 5) for n in range(3000)))
    assert len(names(recent)) == 3000
    read: list[bytes] = []
    parse = history.read_ended_runs
    monkeypatch.setattr(history, "read_ended_runs", lambda text: (read.append(text), parse(text))[1])
    append(spool_root, line("new", 1))
    assert names(recent)[-1] == "new"
    assert b"".join(read) == line("new", 1)


def test_what_is_old_or_too_much_is_forgotten(spool_root: Path, recent: RecentHistory) -> None:
    """A run is dropped when it ended longer ago than the span; of too many the newest stay."""
    append(spool_root, line("old", 30), line("a", 20), line("b", 1))
    assert names(recent) == ["a", "b"]
    assert names(recent, NOW_NS + 10 * HOUR_NS) == ["b"]
    assert names(RecentHistory(str(spool_root), 24 * HOUR_NS, 1)) == ["b"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_rotated_history_is_read_once_more(spool_root: Path, recent: RecentHistory, packed: bool) -> None:
    """After the history was rotated away, what it said of the last while is still known."""
    append(spool_root, line("a", 3), line("b", 2))
    assert names(recent) == ["a", "b"]
    current = spool_root / "history.jsonl"
    if packed:
        (spool_root / "history.jsonl.1.gz").write_bytes(gzip.compress(current.read_bytes()))
        current.unlink()
    else:
        os.rename(current, spool_root / "history.jsonl.1")
    assert names(recent) == ["a", "b"]
    append(spool_root, line("c", 1))
    assert names(recent) == ["a", "b", "c"]
    assert names(RecentHistory(str(spool_root), 24 * HOUR_NS, 1000)) == ["a", "b", "c"]


def test_what_is_no_file_is_an_empty_history(spool_root: Path) -> None:
    """A directory or a FIFO in its place has no runs, and nobody waits for it."""
    (spool_root / "history.jsonl").mkdir()
    assert names(RecentHistory(str(spool_root), 24 * HOUR_NS, 1000)) == []
    (spool_root / "history.jsonl").rmdir()
    os.mkfifo(spool_root / "history.jsonl")
    assert names(RecentHistory(str(spool_root), 24 * HOUR_NS, 1000)) == []


def test_a_line_whose_times_are_lost_hides_nothing_before_it(spool_root: Path) -> None:
    """It is of a result that a power cut has cut off: it is passed on, and is no reason to read no further."""
    cut_off = render_history(replace(a_result("cut", ran="1s"), started_at_ns=None, ended_at_ns=None))
    append(spool_root, line("old", 30), line("before", 0.5), cut_off)
    found = [known.job for known in Spool(str(spool_root)).accounts_since(NOW_NS - HOUR_NS)]
    assert found == ["cut", "before"]


def test_what_is_kept_of_a_run_is_shared_and_read_once(spool_root: Path) -> None:
    """Runs that are kept share their texts, keep no second copy of their times, and say the same as those just read."""
    append(spool_root, *(line(f"job-{n}", 5) for n in range(3)))
    fresh = read_ended_runs((spool_root / "history.jsonl").read_bytes())[0]
    kept = list(RecentHistory(str(spool_root), 24 * HOUR_NS, 1000).look(NOW_NS))
    for one, other in zip(kept, fresh, strict=True):
        for name in ("job", "user", "outcome", "submitted_at_ns", "started_at_ns", "ended_at_ns", "project", "cpus"):
            assert getattr(one, name) == getattr(other, name)
    assert len({id(run.user) for run in kept}) == len({id(run.outcome) for run in kept}) == 1
    assert all(getattr(run, name) is None for run in kept for name in ("submitted_at", "started_at", "ended_at"))
