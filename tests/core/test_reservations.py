"""GPUs kept for somebody: by count and by index, now and soon, and which reservations cannot stand together."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import NOW, S, at, code, foretold, gpus, job, machine, numbers, plan, run, started, why
from spool.core.gpus import GpuSlots, Moment, choose, conflict, is_active, overlap
from spool.core.model import ForeignProcess, Policy, Reservation

HOUR = 3600 * S


def keep(what: int | tuple[int, ...], user: str | None = "alice", start: str = "11:00", end: str = "16:00",
         name: str = "demo", project: str | None = None) -> Reservation:  # fmt: skip
    """Return a reservation of so many GPUs, or of these, between two clock times of the day."""
    count, indices = (what, ()) if isinstance(what, int) else (None, what)
    return Reservation(name, user, project, at(start), at(end), count, indices)


def decide(*jobs, kept, of=4, **values):
    """Plan on a machine of *of* GPUs."""
    kept = kept if isinstance(kept, tuple) else (kept,)
    return plan(*jobs, on=machine(cpus=64, gpus=of), reservations=kept, **values)


def singles(number: int, user: str = "bob", **values):
    """Return so many one-GPU jobs."""
    return [job(f"{user}{n}", user=user, gpus=1, **values) for n in range(number)]


def given_gpus(found):
    """Return which GPUs each start gets."""
    return {start.name: start.grant.gpu_indices for start in found.starts}


@pytest.mark.parametrize(
    ("kept", "user", "on", "starts"),
    [
        ({}, "bob", (), 2),
        ({}, "bob", (0,), 2),  # what the holder uses is kept no more
        ({}, "bob", (0, 1, 2), 1),
        ({}, "alice", (), 4),  # a reservation is no limit for its holder
        ({"user": "nobody"}, "nobody", (), 2),  # a reservation for `nobody` keeps GPUs from everybody
    ],
)
def test_a_count_holds_against_all_others_together(kept, user, on, starts):
    """Of one-GPU jobs two start while 2 of 4 GPUs are reserved for somebody else, less those that he uses."""
    runs = [run("r", user="alice", on=on)] if on else []
    assert len(started(decide(*singles(5, user), kept=keep(2, **kept), running=runs))) == starts


def test_the_holder_may_use_the_reservation_and_the_rest():
    """Also with one job, and whatever it reserves; a job that asks for no GPU is not concerned."""
    assert started(decide(job("j", gpus=4), kept=keep(2))) == ["j"]
    assert started(decide(job("j", gpus=3), kept=keep((0,)))) == ["j"]
    assert started(decide(job("j", user="bob"), kept=keep((0, 1, 2, 3)))) == ["j"]


def test_a_projects_reservation():
    """A reservation may be a project's."""
    kept = keep(2, user=None, project="vision")
    assert len(started(decide(*singles(4, project="vision"), kept=kept))) == 4
    found = decide(*singles(4), kept=kept)
    assert started(found) == ["bob0", "bob1"]
    assert (code(found, "bob2"), numbers(found, "bob2")) == ("reserved", [2, 16, 0])


def test_an_index_is_for_the_holder_only():
    """Only the holder's jobs start on reserved indices, and take these first; what the machine lacks keeps nothing."""
    kept = keep((0, 2))
    found = decide(*singles(3), kept=kept)
    assert given_gpus(found) == {"bob0": (1,), "bob1": (3,)}
    assert (code(found, "bob2"), numbers(found, "bob2")) == ("reserved", [0, 2, 16, 0])
    assert started(decide(job("j", user="bob", gpus=4), kept=keep((7,)))) == ["j"]
    assert given_gpus(decide(*singles(3, "alice"), kept=kept)) == {"alice0": (0,), "alice1": (2,), "alice2": (1,)}


def test_shared_gpus_in_use_take_nothing_more():
    """A job that shares a GPU which is in use already takes nothing from a reservation by count."""
    gib = 1 << 30
    sharing = run("s", user="bob", on=(0,), gpu_memory_bytes=gib)
    jobs = [job(f"j{n}", user="bob", gpus=1, gpu_memory_bytes=gib) for n in range(3)]
    found = decide(*jobs, kept=keep(3), running=[sharing])
    assert given_gpus(found) == {"j0": (0,), "j1": (0,), "j2": (0,)}
    spread = decide(*jobs, kept=keep(3), running=[sharing], policy=Policy(gpu_strategy="spread"))
    assert given_gpus(spread) == {"j0": (0,), "j1": (0,), "j2": (0,)}


def test_the_end_belongs_to_nobody():
    """A reservation holds from its start up to, not including, its end."""
    kept = keep((0, 1, 2, 3), start="11:00", end="13:00")
    assert [is_active(kept, at(clock)) for clock in ("10:59", "11:00", "12:59", "13:00")] == [False, True, True, False]
    assert started(decide(*singles(1), kept=kept, now=at("13:00"))) == ["bob0"]
    assert overlap(kept, keep(1, start="12:59", end="14:00"))
    assert not overlap(kept, keep(1, start="13:00", end="14:00"))


SOON = keep((0, 1), start="14:00", end="16:00")


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (2 * HOUR, None),
        (2 * HOUR + 1, "and this job could run until 14:00"),
        (190 * 60 * S, "and this job could run until 15:10"),
        (None, "and this job has no time limit"),
    ],
)
def test_what_will_be_needed_is_given_only_to_who_ends_before(limit, said):
    """Before a reservation its GPUs go only to jobs whose time limits end is before its start; else that is told."""
    for kept, what in ((SOON, "GPUs 0, 1"), (keep(2, start="14:00"), "2 GPUs")):
        found = decide(job("j", user="bob", gpus=4, time_limit_ns=limit), kept=kept)
        assert why(found, "j") == (f"reserved: {what} for alice from 14:00, {said}" if said else "None")


@pytest.mark.parametrize(("now", "starts"), [("01:59", True), ("02:00", False), ("14:00", False)])
def test_jobs_without_a_limit_start_long_before(now, starts):
    """More than 12 hours before a reservation one may start on its GPUs, and later not any more."""
    found = decide(job("j", user="bob", gpus=4), kept=SOON, now=at(now))
    assert (started(found) == ["j"]) is starts


def test_others_avoid_what_will_be_needed():
    """A job that may use any GPU takes one that no reservation will need."""
    assert given_gpus(decide(job("j", user="bob", gpus=1, time_limit_ns=HOUR), kept=SOON)) == {"j": (2,)}


@pytest.mark.parametrize(("limit", "starts"), [(HOUR, 2), (None, 0)])
def test_runs_that_end_in_time_count_for_what_is_to_come(limit, starts):
    """GPUs of runs that end, by their limit, before a reservation begins are there for it."""
    runs = [run("r", user="bob", on=(0, 1), time_limit_ns=limit)]
    assert len(started(decide(*singles(2), kept=keep(2, start="14:00"), running=runs))) == starts


def test_only_free_gpus_count_for_a_reservation():
    """A GPU that somebody outside spool uses, or that is not well, is none of those that stay free."""
    cards = gpus(4)
    for changes in ({"foreign": (ForeignProcess(7, "python", 1),)}, {"problem": "hot"}):
        box = machine(cpus=9, gpus=(replace(cards[0], **changes), *cards[1:]))
        assert len(started(plan(*singles(4), on=box, reservations=(keep(2),)))) == 1


def test_only_a_job_that_finds_room_is_told_of_reservations():
    """Without room on the GPUs, that is the reason, and reservations are not in the way."""
    found = decide(job("j", user="bob", gpus=2), kept=keep(2), running=[run("r", on=(0, 1, 2))])
    assert [each.code for each in found.all_reasons("j")] == ["gpus"]


def test_gpus_are_chosen_so_that_every_moment_is_kept():
    """Where the wanted order runs into two reservations, cheaper GPUs are taken instead."""
    cards = GpuSlots(machine(gpus=3), Policy()).cards
    bound = [Moment(1, {}, frozenset({"GPU-0", "GPU-1"}), 1, ()), Moment(2, {}, frozenset({"GPU-0", "GPU-2"}), 1, ())]
    assert [card.gpu.index for card in choose(cards, 2, bound)] == [1, 2]
    assert [card.gpu.index for card in choose(cards, 1, bound)] == [0]
    assert choose(cards, 3, bound) is None


def test_two_reservations_bind_moment_by_moment():
    """Two reservations one after the other need their GPUs one after the other, not twice as many.

    GPUs reserved by index are not those that are counted for somebody else.
    """
    one, two = keep(2, start="13:00", end="14:00"), keep(2, "eve", start="14:00", end="15:00", name="two")
    assert len(started(decide(*singles(4), kept=(one, two)))) == 2
    assert len(started(decide(*singles(4), kept=(one, keep(2, "eve", start="13:30", end="15:00", name="two"))))) == 0
    kept = (keep((0, 1)), keep(1, "bob", name="two"))
    assert len(started(decide(*singles(4, "eve"), kept=kept))) == 1
    assert len(started(decide(*singles(4, "bob"), kept=kept))) == 2


def test_a_reservation_wakes_at_its_edges():
    """The plan asks to be made again when a reservation comes into the horizon, begins and ends.

    A job that it keeps waiting is expected when it is over.
    """
    waits = job("j", user="bob", gpus=4)
    kept = keep(2, start="14:00", end="16:00")
    for now, then in (("01:00", "02:00"), ("02:00", "14:00"), ("14:00", "16:00"), ("16:00", None)):
        found = decide(waits, kept=kept, now=at(now))
        assert found.next_at_ns == (then and at(then))
    assert foretold(decide(waits, kept=keep(2)), "j").at_ns == at("16:00")


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        (keep(2, name="n"), None),
        (keep(3, name="n"), "11:00:00Z 5 GPUs would be reserved beside demo"),
        (keep(3, name="n", start="16:00", end="17:00"), None),
        (keep(3, name="n", start="09:00", end="11:01"), "11:00:00Z 5 GPUs would be reserved beside demo"),
        (keep((0, 1), name="n"), None),
        (keep((0, 1, 2), name="n"), "11:00:00Z 5 GPUs would be reserved beside demo"),
        (keep((4,), name="n"), "there is no GPU 4"),
        (keep(0, name="n"), "at least one GPU"),
        (keep((), name="n"), "no GPUs"),
        (keep(1, name="n", start="12:00", end="12:00"), "its end is before its start"),
        (keep(4, name="demo"), None),  # it takes the place of that one
    ],
)
def test_a_conflict_by_count(new, problem):
    """Beside 2 of 4 GPUs from 11:00 to 16:00 a reservation stands if there are enough at every moment."""
    found = conflict(new, [keep(2)], range(4))
    assert found is None if problem is None else problem in found


def test_a_conflict_by_index():
    """The same GPU cannot be kept for two at once, and the first that has it is named."""
    twice = conflict(keep((1, 2), "bob", name="n"), [keep((2, 3))], range(4))
    assert re.search(r"T11:00:00Z GPU 2 .* alice \(demo\)", twice)
    assert conflict(keep((0, 1), "bob", name="n"), [keep((2, 3))], range(4)) is None
    assert conflict(keep((101,), name="n"), [], {101, 102}) is None
    assert "GPU 3" in conflict(keep((3,), name="n"), [], {101, 102})


WHAT = st.one_of(st.integers(1, 4), st.sets(st.integers(0, 3), min_size=1))
SPANS = st.tuples(st.integers(0, 6), st.integers(1, 4), WHAT)


@given(st.lists(SPANS, max_size=5))
def test_what_does_not_conflict_is_possible_at_every_moment(drawn):
    """Reservations accepted one after the other never ask for more than there is, nor for the same GPU twice."""
    accepted: list[Reservation] = []
    for number, (start, length, what) in enumerate(drawn):
        count, indices = (what, ()) if isinstance(what, int) else (None, tuple(sorted(what)))
        new = Reservation(f"r{number}", "u", None, start, start + length, count, indices)

        def possible(moment: int, new: Reservation = new) -> bool:
            at_once = [each for each in (*accepted, new) if is_active(each, moment)]
            listed = [index for each in at_once for index in each.gpu_indices]
            return len(set(listed)) == len(listed) and len(listed) + sum(each.gpu_count or 0 for each in at_once) <= 4

        verdict = conflict(new, accepted, range(4))
        assert (verdict is None) == all(possible(moment) for moment in range(start, start + length))
        if verdict is None:
            accepted.append(new)


KEPT = st.lists(
    st.tuples(
        st.integers(-3, 5),
        st.integers(1, 6),
        st.sampled_from(["alice", "bob"]),
        st.one_of(st.integers(1, 2), st.sets(st.integers(0, 3), min_size=1, max_size=2)),
    ),
    max_size=3,
)
ASKED = st.lists(
    st.tuples(st.sampled_from(["alice", "bob", "eve"]), st.integers(1, 3), st.sampled_from([None, 1, 2, 5])), max_size=6
)


@given(KEPT, ASKED)
def test_a_reservation_finds_its_gpus_free(kept, asked):
    """At the beginning of every reservation, limits being kept, its GPUs are free of others' jobs started before."""
    reservations: list[Reservation] = []
    for number, (start, length, user, what) in enumerate(kept):
        count, indices = (what, ()) if isinstance(what, int) else (None, tuple(sorted(what)))
        new = Reservation(f"r{number}", user, None, NOW + start * HOUR, NOW + (start + length) * HOUR, count, indices)
        if conflict(new, reservations, range(4)) is None:
            reservations.append(new)
    jobs = [
        job(f"j{n}", user=user, gpus=number, time_limit_ns=None if limit is None else limit * HOUR)
        for n, (user, number, limit) in enumerate(asked)
    ]
    found = decide(*jobs, kept=tuple(reservations))
    by_name = {each.name: each for each in jobs}
    for moment in {NOW, *(each.start_at_ns for each in reservations if each.start_at_ns > NOW)}:
        active = [each for each in reservations if is_active(each, moment)]
        there = [
            (by_name[start.name].user, set(start.grant.gpu_indices))
            for start in found.starts
            if (limit := by_name[start.name].spec.time_limit_ns) is None or NOW + limit > moment
        ]
        for holder in {each.user for each in active}:
            count = sum(each.gpu_count or 0 for each in active if each.user == holder)
            indices = {index for each in active if each.user == holder for index in each.gpu_indices}
            others = set().union(*(taken for user, taken in there if user != holder))
            assert not others & indices
            assert not others or len(others) <= 4 - count - len(indices)
