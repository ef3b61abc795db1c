"""Lines of the history that tell of ends long ago: each reader finds what it looks for, and reads no more for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spool.core.model import SECOND_NS, Policy, Result
from spool.core.priority import Past
from spool.formats import run_records as codec
from spool.formats.run_records import render_history
from spool.query.jobs import JobLister
from spool.query.machine import _ended
from spool.state import past
from spool.state.past import past_of
from spool.store.history import History
from spool.store.spool import Spool
from views import an_end

HOUR_NS = 3600 * SECOND_NS
NOW_NS = 1_800_000_000 * SECOND_NS


def ended(name: str, hours_ago: float) -> Result:
    """Return a run that ended so long ago."""
    return an_end(NOW_NS, name, hours_ago=hours_ago)


@pytest.fixture
def spool(spool_root: Path) -> Spool:
    """Give a spool whose dispatcher was away for three days while a run ended, and served on after that."""
    lines = [render_history(ended(f"before-{n}", 100 - n / 100)) for n in range(300)]
    lines += [render_history(ended("fresh", 2))]
    lines += [render_history(ended(f"late-{n}", 90), NOW_NS - 2 * HOUR_NS) for n in range(300)]
    lines += [render_history(ended("fresher", 1))]
    lines += [render_history(ended("late-too", 90), NOW_NS - HOUR_NS)]
    (spool_root / "history.jsonl").write_bytes(b"".join(lines))
    return Spool(str(spool_root))


def test_a_look_back_does_not_end_at_a_late_line(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended within some hours is found behind lines of ends long ago, and what is older is not parsed for it.

    A look back over the last minutes parses only the lines that were written since, and those of an hour more.
    """
    found = [known.job for known in spool.accounts_since(NOW_NS - 3 * HOUR_NS)]
    assert {"fresh", "fresher"} <= set(found)
    assert not any(name.startswith("before") for name in found)
    parsed: list[bytes] = []
    parse = codec.parse_history_line
    monkeypatch.setattr("spool.store.spool.parse_history_line", lambda line: (parsed.append(line), parse(line))[1])
    assert [known.job for known in spool.accounts_since(NOW_NS - SECOND_NS)] == ["late-too", "fresher"]
    assert len(parsed) == 3


def test_a_late_line_is_found_by_its_end(spool: Spool) -> None:
    """Whether the history has the line of an end long ago is found out, though its line is new."""
    assert spool.accounted(ended("late-7", 90))
    assert not spool.accounted(ended("late-1000", 90))


def test_a_reader_from_the_front_begins_early_enough(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that looks for its place in a long file by halves and steps finds the runs behind late lines."""
    monkeypatch.setattr("spool.store.history._STEP", 4096)
    monkeypatch.setattr("spool.store.history._GLANCE", 2048)
    found = [run.job for run in History(spool.root).since(NOW_NS - 3 * HOUR_NS)]
    assert {"fresh", "fresher"} <= set(found)
    assert "before-0" not in found


def test_rotated_files_are_read_by_when_they_were_written(spool: Spool) -> None:
    """A file that begins with a late line is as new as that line, and neither left out nor put before older ones."""
    root = Path(spool.root)
    (root / "history.jsonl").rename(root / "history.jsonl.1")
    late, fresh = render_history(ended("latest", 95), NOW_NS - HOUR_NS // 2), render_history(ended("last", 0.1))
    (root / "history.jsonl").write_bytes(late + fresh)
    found = [run.job for run in History(spool.root).since(NOW_NS - 3 * HOUR_NS)]
    assert {"fresh", "fresher", "last"} <= set(found)


def test_the_past_is_learnt_from_behind_late_lines(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fair share, learnt run times, `spool info` and `spool ls` know what ended lately, though late lines follow."""
    learnt: list[str] = []
    monkeypatch.setattr(Past, "learn", lambda _, user, result: learnt.append(result.job))
    monkeypatch.setattr(past, "HALF_LIFE_NS", HOUR_NS)
    past_of(spool, NOW_NS, Policy())
    assert {"fresh", "fresher"} <= set(learnt)
    assert not any(name.startswith("before") for name in learnt)
    for name in ("fresh", "fresher", "late-too"):
        Path(spool.root, "done", f"{name}.toml").write_text('command = "true"\n')
    assert sum(_ended(spool, (), NOW_NS).values()) == 2
    assert {row.name for row in JobLister(spool, NOW_NS).listing().rows} == {"fresh", "fresher"}
