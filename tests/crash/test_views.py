"""What a command sees of a spool is what its dispatcher sees, through whole random lives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from crash.lives import MOVES, NAMES, SEED, Life, live_each
from crash.world import World
from spool.core import layout
from spool.core.forecast import forecast
from spool.core.layout import DONE, HELD, QUEUED, RESERVATIONS
from spool.core.model import Holding, Machine
from spool.core.resources import Runs
from spool.core.scheduler import Plan, Start, View, decide
from spool.dispatcher.loop import Dispatcher
from spool.dispatcher.planner import ForeseenPlan, Planner
from spool.query import snapshot
from spool.store.spool import Spool

LIVES = int(os.environ.get("LIVES", "4"))
# Lives in which they once saw different things: where a submission was cancelled beside another that went on, where a
# run without a limit was being stopped, where a job ended without a start beside a held file of its name, and where one
# ended without a start whose name had been that of an array.
KNOWN = (433978201, 3799372599, 998351494, 134140516)


def facts(view: View, arrays: Any) -> dict[str, object]:
    """Return all of a view that decides. Left out is what no file says.

    * `executor_problem`: that a start was tried in vain, which is tried again after the next look;
    * `holding`: for how long room was left on a guess; without it `decide` may leave it for longer;
    * `past`, which is compared where it matters, by the plan;
    * a cancel that somebody is asked about: the order to stop lies on the disk, and the run goes on.
    """
    return {
        "running": dict(view.running),
        "queue": {name: replace(view.queue[name], executor_problem=None) for name in view.queue},
        "held": {name: replace(job, executor_problem=None) for name, job in view.held.items()},
        "arrays": {name: (array.names, array.held, array.unissued) for name, array in arrays.items()},
        "held_arrays": view.held_arrays,
        "reservations": view.reservations,
        "paused": view.paused,
    }


def plan(view: View, now_ns: int, policy: Any) -> dict[str, object]:
    """Return what is decided, with every reason."""
    made = decide(view, now_ns, policy)
    names = [*view.queue, *view.held]
    return {
        "starts": made.starts,
        "endings": made.endings,
        "noes": {name: [reason.code for reason in made.all_reasons(name)] for name in names},
        "expected": {name: told for name, told in forecast(made).items() if told.at_ns and not told.guessed},
    }


def compare(world: World, now: Dispatcher) -> None:
    """Assert that a look at the files sees what the dispatcher sees, and decides the same."""
    clock, policy = now.clock(), now.settings.config.policy
    machine = Machine(cpus=world.cpus, memory_bytes=1 << 30)
    own = now.planner.view(machine, clock, paused=now.pause.paused, holding=Holding())
    seen = snapshot.snapshot(Spool(str(world.root)), clock)
    same(facts(seen.view, seen.table.arrays), facts(own, now.state.arrays))
    assert seen.policy == policy
    if all(job.executor_problem is None for job in (*own.queue.values(), *own.held.values())):
        same(plan(replace(seen.view, machine=machine), clock, policy), plan(own, clock, policy))


def compare_kept(now: Dispatcher) -> None:
    """Assert that what the dispatcher keeps of its runs is what a look at all of them would find."""
    runs = now.state.live
    assert now.supervisor._polled == {key: live for key, live in runs.items() if now.supervisor._unwatched(live)}
    missing = {key for key, live in runs.items() if live.file_missing_ns is not None and not live.is_over}
    assert {key for key, live in now.filemoves._missing.items() if runs.get(key) is live} >= missing
    holding = {live.name: live.running for live in runs.values() if live.holds_room}
    assert dict(now.state.runs) == holding
    fresh = Runs(holding.values())
    for sums in ("cpus", "memory_bytes", "groups", "arrays", "users", "projects", "runs"):
        assert getattr(now.state.runs.counts, sums) == getattr(fresh.counts, sums), sums


def same(files: dict[str, object], own: dict[str, object]) -> None:
    """Assert that both are equal, and name what is not."""
    for key, value in files.items():
        other = own[key]
        if key == "expected":
            assert isinstance(value, dict)
            assert isinstance(other, dict)
            both = value.keys() & other.keys()
            value, other = ({name: each[name] for name in both} for each in (value, other))
        if isinstance(value, dict) and isinstance(other, dict):
            for name in value.keys() | other.keys():
                assert not (why := difference(value.get(name), other.get(name))), f"{key} {name}: {why}"
        assert value == other, key


def difference(files: object, own: object) -> str:
    """Return in which fields two values differ."""
    if files == own or type(files) is not type(own) or not isinstance(files, Struct):
        return "" if files == own else f"{files}, and of its own: {own}"
    pairs = [(name, getattr(files, name), getattr(own, name)) for name in files.__struct_fields__]
    return "; ".join(f"{name} {one}, and of its own: {other}" for name, one, other in pairs if one != other)


def compare_foreseen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Start, ...]]:
    """Have every plan that was foreseen compared with the one that is made where it is used; return their starts."""
    used: list[tuple[Start, ...]] = []
    renew, has_come = Planner.renew, ForeseenPlan.has_come
    asked: list[ForeseenPlan] = []

    def note(foreseen: ForeseenPlan, *about: Any) -> bool:
        asked[:] = [foreseen] if has_come(foreseen, *about) else []
        return bool(asked)

    def compared(planner: Planner, now_ns: int, *, paused: bool) -> Plan | None:
        asked.clear()
        holding = planner.plan.holding if planner.plan is not None else Holding()
        made = renew(planner, now_ns, paused=paused)
        if asked:
            assert made is asked[0].plan
            assert planner.machine is not None
            view = planner.view(planner.machine, now_ns, paused=paused, holding=holding)
            anew = decide(view, now_ns, planner._settings.config.policy)
            names = [*view.queue, *view.held]
            assert (made.starts, made.endings, made.protected) == (anew.starts, anew.endings, anew.protected)
            assert [made.all_reasons(name) for name in names] == [anew.all_reasons(name) for name in names]
            used.append(made.starts)
        return made

    monkeypatch.setattr(ForeseenPlan, "has_come", note)
    monkeypatch.setattr(Planner, "renew", compared)
    return used


class Watched(Life):
    """A life with arrays, leftovers, dependencies, reservations and pauses, in which all views are compared."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        (world.root / layout.CONFIG).write_text('disk_floor = "0M"\nkill_grace = "7s"\ncpus = 2\n')
        self.session.survives_errors = False
        self.session.after_turn = self._compare
        self.compared = 0
        self._cuts = -1

    def _compare(self) -> None:
        cuts = self.session.cuts + len(self.session.errors)
        now = self.session.now
        # On a busy machine a look gives way; what it has not come to yet the dispatcher cannot know.
        if now is not None and cuts == self._cuts and now.observer._rescans and not now.observer.unfinished:
            compare(self.world, self.session.now)
            compare_kept(self.session.now)
            self.compared += 1
        self._cuts = cuts

    def submit(self, name: str) -> None:
        """Submit a job of any kind."""
        users = self.session.users
        if not all(self._free(place, name) for place in (QUEUED, HELD)) or self.random.random() < 0.4:
            super().submit(name)
            return
        line = self.random.choice(
            (
                'scheduling_timeout = "1h"',
                'time_limit = "1h"',
                'start_after = "1h"',
                f'depends_on = ["{self.random.choice(NAMES)}"]',
                'array = "0-2"',
                'memory = "700M"',
                "priority = 20",
            )
        )
        place = HELD if self.random.random() < 0.1 else QUEUED
        users.submit(name, self.random.choice(("leave", "hang", "ok", "fail")), line, place=place)

    def move(self, name: str) -> None:
        """Move a file; or hold an array, pause, or keep a GPU for somebody."""
        root, deed = self.world.root, self.random.randrange(6)
        if deed == 0:
            path = root / layout.PAUSED
            path.unlink() if path.exists() else path.touch()
        elif deed == 1:
            end = self.random.choice(("2100-01-01 00:00", "2101-01-01 00:00"))
            text = f'user = "{name}"\ngpus = [{self.random.randrange(3)}]\nend = "{end}"\n'
            staged = root / ".tmp" / f"user.{name}"
            staged.write_text(text)
            os.rename(staged, root / RESERVATIONS / f"{name}.toml")
        else:
            old, new = self.random.choice(MOVES)
            if new == DONE or self._free(new, name):
                self.told.append(f"    {old} -> {new}")
                self.session.users.move(name, old, new)

    def live(self, events: int) -> None:
        """Do so many things."""
        for _ in range(events):
            name = self.random.choice(NAMES)
            deed = self.random.choice((self.submit, self.submit, self.move, self.move, self.remove, self.kill))
            self.told.append(f"{deed.__name__} {name}")
            deed(name)
            self.session.turns(self.random.randint(1, 3))

    def check(self) -> None:
        """Assert that the views were compared."""
        assert self.compared


def test_a_look_at_the_files_sees_what_the_dispatcher_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each pass of a random life the files say the same runs, queue, arrays, reservations and plan.

    A plan that was foreseen is the one that would be made.
    """
    foreseen = compare_foreseen(monkeypatch)
    live_each(tmp_path, monkeypatch, Watched, (*KNOWN, *range(SEED, SEED + LIVES)), 30)
    assert any(foreseen)
