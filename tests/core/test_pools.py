"""Named resources, and the limit of the whole spool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import NOW, S, code, foretold, job, machine, numbers, plan, run, started, why
from spool.core.constraints import as_run
from spool.core.model import Grant, Policy, Pool, Running, Waiting
from spool.core.queue import WaitingQueue
from spool.core.resources import FreeResources, Runs, could_run
from spool.core.scheduler import View, decide

LICENCE = Pool("licence", 3)
TPU = Pool("tpu", 4, (0, 1, 2, 5))
BOX = machine(cpus=8, resources=(LICENCE, TPU))
HOUR = 3600 * S


def wants(**resources: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """Return the field of a request for these resources."""
    return {"resources": tuple(sorted(resources.items()))}


def holds(name: str, *, ran: int = 60, tpu: tuple[int, ...] = (), **keys: object) -> Running:
    """Return a run with `cpus = 0` that holds what it asks for, of `tpu` these indices."""
    found = run(name, ran=ran, cpus=0, **keys)
    grant = replace(found.grant, resources=found.spec.request.resources)
    if tpu:
        named = (*grant.resources, ("tpu", len(tpu)))
        grant = replace(grant, resources=tuple(sorted(named)), resource_indices=(("tpu", tpu),))
    return replace(found, grant=grant)


def test_a_resource_is_given_as_far_as_it_goes():
    """Jobs start while there is enough of what they name; the next waits, and is told how much there is."""
    found = plan(*(job(f"j{n}", **wants(licence=2)) for n in range(2)), job("other"), on=BOX)
    assert started(found) == ["j0", "other"]
    assert found.starts[0].grant == Grant(cpus=1, resources=(("licence", 2),))
    assert (code(found, "j1"), numbers(found, "j1")) == ("resources", [2, 1, 3, 1, 2])


def test_every_resource_that_is_missing_is_told():
    """A job that lacks two resources says so of both, between CPUs and GPUs."""
    found = plan(
        job("j", cpus=9, gpus=1, **wants(licence=3, tpu=4)),
        on=replace(machine(cpus=9, gpus=1), resources=BOX.resources),
        running=[holds("r", **wants(licence=1), tpu=(1,)), run("c", cpus=1, on=(0,))],
    )
    assert [each.code for each in found.all_reasons("j")] == ["cpus", "resources", "gpus"]
    assert [word in str(found.all_reasons("j")[1]) for word in ("licence", "tpu")] == [True, True]


def test_indices_are_granted_one_by_one():
    """A run gets the first free indices in the order of the configuration, and nobody else gets them.

    While a run holds a resource without saying which, its indices are granted to nobody.
    """
    found = plan(job("a", **wants(tpu=2)), job("b", **wants(tpu=1)), on=BOX, running=[holds("r", tpu=(1,))])
    assert [start.grant.resource_indices for start in found.starts] == [(("tpu", (0, 2)),), (("tpu", (5,)),)]
    unknown = holds("r", **wants(tpu=1))
    found = plan(job("j", **wants(tpu=1)), on=BOX, running=[unknown])
    assert (code(found, "j"), numbers(found, "j")) == ("resources", [1, 1, 1])
    assert started(plan(job("j", **wants(licence=1)), on=BOX, running=[unknown])) == ["j"]


@pytest.mark.parametrize(
    ("asked", "has"),
    [
        (wants(licence=4), "the spool has 3"),
        (wants(tpu=5), "the spool has 4"),
        (wants(licens=1), "it defines licence (3), tpu (4)"),
    ],
)
def test_more_than_there_is_never_fits(asked, has):
    """What is unknown, or more than there is, is told with what there is, and holds nobody else up."""
    found = plan(job("j", waited=9000, **asked), job("other"), on=BOX)
    assert (code(found, "j"), why(found, "j").endswith(has), started(found)) == ("never_fits", True, ["other"])
    assert not could_run(job("j", **asked).spec.request, BOX, Policy())


def test_who_waits_for_a_resource_is_protected():
    """Others take no licence that the first in the order will need, unless they have given it back by then."""
    first = job("first", waited=3720, **wants(licence=3))
    runs = [holds("r", **wants(licence=2), ran=0, time_limit_ns=HOUR)]
    late = job("late", time_limit_ns=2 * HOUR, **wants(licence=1))
    found = plan(first, late, job("plain", time_limit_ns=2 * HOUR), on=BOX, running=runs)
    assert (started(found), found.protected, found.protected_until_ns) == (["plain"], "first", NOW + HOUR)
    assert code(found, "late") == "left"
    assert foretold(found, "first").must_end == ("r",)
    in_time = job("in_time", time_limit_ns=HOUR, **wants(licence=1))
    assert started(plan(first, in_time, on=BOX, running=runs)) == ["in_time"]


def test_what_lies_idle_for_a_guess_is_the_resource_that_is_missing():
    """A guess may hold back licences of which none are free; free CPUs are no cost of that."""
    request = job("j", **wants(licence=3)).spec.request
    busy = FreeResources(BOX, Policy(), NOW, Runs([holds("r", **wants(licence=2))]))
    assert busy.lacking(request) == [(1, 3)]
    assert busy.held_back(request, [(job("k", **wants(licence=2)).spec.request, 1)]) == 1 / 3
    assert busy.held_back(request, [(job("k", cpus=4).spec.request, 1)]) == 0
    assert FreeResources(BOX, Policy(), NOW, Runs([run("c", cpus=8)])).lacking(request) == [(0, 8)]


def test_a_resource_that_shrinks_is_taken_from_nobody():
    """Runs keep what they hold; nothing new starts until there is room in what is left."""
    runs = [holds("a", **wants(licence=2)), holds("b", tpu=(1, 2))]
    small = machine(resources=(Pool("licence", 1), Pool("tpu", 2, (2, 7))))
    found = plan(job("l", **wants(licence=1)), job("t", **wants(tpu=1)), on=small, running=runs)
    assert started(found) == []
    assert (numbers(found, "l"), numbers(found, "t")) == ([1, 0, 1, 1, 2], [1, 0, 2, 1, 2])
    found = plan(job("t", **wants(tpu=1)), on=small, running=[holds("b", tpu=(1,))])
    assert found.starts[0].grant.resource_indices == (("tpu", (2,)),)


FULL = Policy(max_running=2)


def test_the_whole_spool_runs_so_many_at_once():
    """Whatever they ask for, no more than `max_running` jobs run, the first in the order first.

    Of several limits the group's comes first, as it may hold when the spool has room again.
    """
    jobs = [job(f"j{n}", waited=9 - n) for n in range(3)]
    found = plan(*jobs, job("first", cpus=0, priority=11), on=BOX, policy=FULL)
    assert (started(found), code(found, "j1"), numbers(found, "j1")) == (["first", "j0"], "max_running", [2, 2])
    runs = [run(f"r{n}", cpus=0, group="g", group_limit=1) for n in range(3)]
    lowered = plan(job("j", group="g", group_limit=1), on=BOX, policy=FULL, running=runs)
    assert [each.code for each in lowered.all_reasons("j")] == ["group", "max_running"]


def test_a_full_spool_takes_no_room_from_who_is_first():
    """While the spool is full nobody is protected, and the next end is expected; when it is not, the first is again."""
    wide, small = job("wide", cpus=8, waited=9000), job("small", time_limit_ns=2 * HOUR)
    runs = [run("a", cpus=4, time_limit_ns=HOUR, ran=0), run("b", cpus=0, time_limit_ns=60 * S, ran=0)]
    found = plan(wide, small, on=BOX, policy=FULL, running=runs)
    assert (started(found), found.protected) == ([], None)
    assert [code(found, name) for name in ("wide", "small")] == ["max_running"] * 2
    assert foretold(plan(small, on=BOX, policy=FULL, running=runs), "small").at_ns == NOW + 60 * S
    found = plan(wide, small, on=BOX, policy=FULL, running=runs[:1])
    assert (started(found), found.protected) == ([], "wide")
    assert started(plan(wide, small, on=BOX, policy=FULL)) == ["wide"]


INDICES = st.lists(st.integers(0, 5), min_size=2, max_size=6, unique=True)
POOLS = st.tuples(
    st.integers(1, 4).map(lambda total: Pool("licence", total)),
    st.one_of(
        st.integers(1, 4).map(lambda total: Pool("tpu", total)),
        INDICES.map(lambda indices: Pool("tpu", len(indices), tuple(indices))),
        INDICES.map(lambda indices: Pool("tpu", len(indices), tuple(indices))),
    ),
)
COMES = st.fixed_dictionaries({"licence": st.sampled_from([0, 0, 1, 2]), "tpu": st.sampled_from([0, 1, 1, 2])})
STEPS = st.one_of(COMES, COMES, st.integers(0, 19), POOLS)  # a job comes, a run ends, the configuration changes


@given(POOLS, st.lists(STEPS, min_size=10, max_size=40))
def test_no_index_is_ever_granted_twice(pools, steps):
    """Over random lives and configurations no two runs hold one index, and no start takes a sum beyond the total."""
    policy = Policy(max_running=6)
    waiting: dict[str, Waiting] = {}
    runs = Runs()
    for at, step in enumerate(steps):
        now = NOW + at * S
        if isinstance(step, dict):
            asked = {name: count for name, count in step.items() if count}
            limit = 5 * S if at % 2 else None
            new = job(f"j{at}", cpus=0, time_limit_ns=limit, arrived=now, clock_at_ns=now, **wants(**asked))
            waiting[new.name] = new
        elif isinstance(step, int):
            runs.remove(f"j{step}")
        else:
            pools = step
        seen = View(machine(resources=pools), WaitingQueue(waiting.values()), running=runs)
        for start in decide(seen, now, policy).starts:
            begun = as_run(waiting.pop(start.name), start.grant, now)
            assert begun.grant.resources == begun.spec.request.resources
            runs.put(begun)
            for pool in pools:
                if pool.name in dict(start.grant.resources):
                    held = [dict(each.grant.resources).get(pool.name, 0) for each in runs.values()]
                    assert sum(held) <= pool.total
                    indices = dict(start.grant.resource_indices).get(pool.name, ())
                    assert len(indices) == (dict(start.grant.resources)[pool.name] if pool.indices else 0)
                    assert set(indices) <= set(pool.indices)
        listed = [index for each in runs.values() for _, some in each.grant.resource_indices for index in some]
        assert len(listed) == len(set(listed))
        assert runs.counts.named == Runs(runs.values()).counts.named
