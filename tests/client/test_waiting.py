"""Waiting for many jobs finds what looking at each of them finds."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from spool.client import waiting
from spool.client.waiting import End, Waiter
from spool.core.errors import NoSuchJob
from spool.core.model import Result, State
from spool.formats.run_records import render_result
from spool.store import ownership
from spool.store.spool import Spool

JOBS = [f"j{number}" for number in range(30)]
MOVES = {
    "begin": ("queued", "running"),
    "withdraw": ("queued", "done"),
    "hold": ("queued", "held"),
    "release": ("held", "queued"),
    "again": ("done", "queued"),
}


class _Lives:
    """Jobs that wait, run, end, run again and vanish, by the files that a user and a dispatcher would move."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root = root
        self._random = random.Random(seed)
        self._runs = dict.fromkeys(JOBS, 0)
        for name in JOBS:
            (root / "queued" / f"{name}.toml").write_text('command = "true"\n')
            if self._random.random() < 0.3:  # it has ended before
                self._run(name)
                self._move(name, "done", "queued")

    def step(self) -> None:
        """Do something to one job."""
        name, what = self._random.choice(JOBS), self._random.choice([*MOVES, "run", "end", "retry", "remove", "wrong"])
        place, to = MOVES.get(what, ("running" if what in ("end", "retry") else "queued", ""))
        file = self._root / place / f"{name}.toml"
        if not file.exists():
            return
        match what:
            case "run":
                self._run(name)
            case "end" | "retry":
                self._end(name, again=None if what == "end" else "retry")
                self._move(name, "running", "done" if what == "end" else "queued")
            case "remove":
                file.unlink()
            case "wrong":
                file.with_name(f"{file.name}.error").write_text("- wrong\n")
            case _:
                self._move(name, place, to)

    def _move(self, name: str, place: str, to: str) -> None:
        (self._root / place / f"{name}.toml").rename(self._root / to / f"{name}.toml")

    def _run(self, name: str) -> None:
        self._move(name, "queued", "running")
        self._end(name)
        self._move(name, "running", "done")

    def _end(self, name: str, again: str | None = None) -> None:
        self._runs[name] += 1
        metadir = self._root / "jobs" / name / str(self._runs[name])
        metadir.mkdir(parents=True)
        outcome = self._random.choice([State.FINISHED, State.FAILED, State.CANCELLED])
        result = Result(name, self._runs[name], 1, outcome, "", 1, 2, 3, again=again)
        (metadir / "result.toml").write_bytes(render_result(result))


@pytest.mark.parametrize("seed", range(12))
def test_many_jobs_end_as_each_of_them_does(spool_root: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """After every change of a file, the watch and a look at each job know the same ends, to the last word."""
    monkeypatch.setattr(waiting, "GRACE_NS", 0)
    lives, spool = _Lives(spool_root, seed), Spool(str(spool_root))
    each = {name: Waiter(spool, (name,)) for name in JOBS}
    watch = Waiter(spool, JOBS)
    found: dict[str, End] = {}
    known: dict[str, End] = {}
    for _ in range(300):
        for _ in range(2):  # an end without a record is believed at the second look
            found |= {end.name: end for end in watch.poll()}
            known |= {name: end for name in JOBS for end in each[name].poll()}
        assert found == known
        lives.step()
    assert len(found) == len(JOBS) - len(watch) > len(JOBS) // 2


def test_a_job_is_awaited_once_and_forgotten_on_request(spool_root: Path) -> None:
    """Adding it again changes nothing; what nobody waits for any more is not looked for."""
    for name in JOBS:
        (spool_root / "held" / f"{name}.toml").write_text('command = "true"\n')
    watch = Waiter(Spool(str(spool_root)), JOBS)
    watch.add(JOBS[:3])
    watch.add(["j4"])
    assert len(watch) == len(JOBS)
    assert watch.poll() == []
    for name in JOBS:
        watch.discard(name)
        (spool_root / "held" / f"{name}.toml").unlink()
    assert len(watch) == 0
    assert watch.poll() == []
    (spool_root / "held" / "j0.toml").write_text('command = "true"\n')
    unknown = watch.add(["none", "j0", "none"])
    assert list(unknown) == ["none"]
    assert isinstance(unknown["none"], NoSuchJob)
    assert len(watch) == 1
    assert watch.pause_s > 0


def test_two_changes_at_one_time_are_both_seen(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that changed just before it was read may change again without another time of change."""
    monkeypatch.setattr(waiting, "GRACE_NS", 0)
    queued = spool_root / "queued"
    for name in JOBS:
        (queued / f"{name}.toml").write_text('command = "true"\n')
    now_ns = time.time_ns() + 3600 * 10**9  # later than any look
    for place in ("queued", "held", "running"):
        os.utime(spool_root / place, ns=(now_ns, now_ns))
    watch = Waiter(Spool(str(spool_root)), JOBS)
    assert watch.poll() == []
    (queued / "j0.toml").unlink()
    os.utime(queued, ns=(now_ns, now_ns))
    assert [end.name for end in watch.poll() + watch.poll()] == ["j0"]


@pytest.mark.parametrize("place", ["queued", "held"])
def test_the_end_of_a_job_that_was_moved_away_names_who_can_have_moved_it(
    spool_root: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A cancel by `mv` has the reason of the history: whoever can write to the folder that the file left."""
    monkeypatch.setattr(ownership, "others_write", lambda root, place: True)
    monkeypatch.setattr(waiting, "GRACE_NS", 0)
    file = spool_root / place / "a.toml"
    file.write_text('command = "true"\n')
    watch = Waiter(Spool(str(spool_root)), ["a"])
    assert watch.poll() == []
    file.rename(spool_root / "done" / "a.toml")
    (end,) = watch.poll() + watch.poll()
    assert end.reason == f"cancelled by someone who can write to {place}/ before it started"
