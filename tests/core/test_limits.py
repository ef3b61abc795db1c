"""Memory and processors, groups, arrays and quotas, named resources, and the room of other machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import GIB, NOW, S, code, foretold, gpus, job, machine, numbers, plan, run, started, view, why
from spool.core.constraints import as_run
from spool.core.model import Grant, Limits, Machine, Policy, Pool, Result, Running, State, Waiting
from spool.core.priority import Past
from spool.core.queue import WaitingQueue
from spool.core.quotas import limits_of
from spool.core.resources import CPUS, FreeResources, Runs, could_run
from spool.core.scheduler import View, decide


@pytest.mark.parametrize(
    ("box", "asked", "runs", "starts"),
    [
        # What the kernel could not give is refused, whatever the grants say; each job of a pass counts.
        ({"memory_available_bytes": 23 * GIB // 2}, (24, 11), [], [1]),
        ({"memory_available_bytes": 20 * GIB}, (8, 8, 8), [], [0, 1]),
        # Beside 12 of 16 GiB granted 8 GiB wait, whatever of it is in use.
        ({"memory": 16 * GIB}, (8,), [run("r", memory_bytes=12 * GIB)], []),
        # A job that states no memory starts whatever is free.
        ({"memory_available_bytes": 0}, (None, 0), [run("r", memory_bytes=99 * GIB)], [0, 1]),
    ],
)
def test_memory_is_counted_by_request_and_by_what_is_really_free(box, asked, runs, starts):
    """Both must have room for a job that requests some, and others are not looked at."""
    jobs = [job(f"j{n}", memory_bytes=gib and gib * GIB) for n, gib in enumerate(asked)]
    found = plan(*jobs, on=machine(**box), running=runs)
    assert started(found) == [f"j{n}" for n in starts]
    assert {code(found, each.name) for each in jobs} - {None} == ({"memory"} if len(starts) < len(jobs) else set())


def test_processors_are_counted_as_granted():
    """`cpus = 0` needs none, and nothing is free before the processes that used it are gone."""
    assert started(plan(job("j", cpus=0), running=[run("r", cpus=9)])) == ["j"]
    found = plan(job("j", cpus=4), running=[run("r", cpus=1, stopping=True)])
    assert (code(found, "j"), numbers(found, "j")) == ("cpus", [4, 3, 1, 1])


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"cpus": 16}, "needs 16 CPUs, the machine has 2"),
        ({"memory_bytes": 65 * GIB}, "needs 65 GiB, the machine has 64 GiB"),
    ],
)
def test_more_than_the_machine_never_fits(asked, reason):
    """What no waiting can mend is said."""
    assert why(plan(job("j", **asked), on=machine(cpus=2)), "j") == f"never fits: {reason}"


def test_a_group_runs_so_many_at_once():
    """At most `group_limit` members run, and who waits is told.

    The limit is the lowest that any waiting or running member states, even one that cannot start itself.
    """
    found = plan(*(job(f"j{n}", group="g", group_limit=2) for n in range(3)), job("other"))
    assert started(found) == ["j0", "j1", "other"]
    assert (code(found, "j2"), numbers(found, "j2")) == ("group", [2, 2])
    jobs = [job("a", group="g"), job("b", group="g", group_limit=3)]
    assert started(plan(*jobs, job("c", group="g", group_limit=1, depends_on="x"))) == ["a"]
    assert started(plan(*jobs, running=[run("r", group="g", group_limit=1)])) == []
    assert started(plan(*jobs, held=[job("h", group="g", group_limit=1)])) == ["a", "b"]
    assert started(plan(job("a", group="g"), job("b", group="g"))) == ["a", "b"]


def test_an_array_runs_so_many_tasks_at_once():
    """`%n` limits the running tasks of that array, and of no other."""
    tasks = [job(f"s_{n}", task=("s", n, 2)) for n in range(3)]
    found = plan(*tasks, job("t_0", task=("t", 0, 1)), running=[run("s_9", task=("s", 9, 2), cpus=0)])
    assert started(found) == ["s_0", "t_0"]
    assert (code(found, "s_1"), numbers(found, "s_1")) == ("array", [2, 2])
    edited = [job("s_1", task=("s", 1)), job("s_2", task=("s", 2, 3))]
    assert started(plan(*edited, running=[run("s_9", task=("s", 9, 1))])) == []
    assert started(plan(*edited, running=[run("s_9", task=("s", 9))])) == ["s_1", "s_2"]


BOTH = Policy(
    default_user_limits=Limits(max_running_jobs=2, max_running_gpus=4),
    user_limits={"bob": Limits(max_running_jobs=3)},
    default_project_limits=Limits(max_running_cpus=4),
)


def test_a_quota_counts_what_starts_in_the_same_pass():
    """A user's third job waits when two may run; a named quota overrides only the fields that it states."""
    assert limits_of(BOTH.default_user_limits, BOTH.user_limits, "bob") == Limits(3, 4)
    jobs = [job(f"{user[0]}{n}", user=user) for user in ("alice", "bob") for n in range(4)]
    found = plan(*jobs, on=machine(9), policy=BOTH)
    assert started(found) == ["a0", "a1", "b0", "b1", "b2"]
    assert (code(found, "a2"), numbers(found, "a2")) == ("quota", [2, 2])


def test_a_quota_of_gpus():
    """GPUs are counted whole, shared or not, with what the job itself needs."""
    box = machine(cpus=64, gpus=8)
    runs = [run("r", on=(0, 1, 2)), run("s", on=(3,), gpu_memory_bytes=GIB)]
    assert why(plan(job("j", gpus=1), on=box, running=runs[:1], policy=Policy()), "j") == "None"
    quota = Policy(default_user_limits=Limits(max_running_gpus=4))
    assert numbers(plan(job("j", gpus=1), on=box, running=runs, policy=quota), "j") == [4, 4]
    assert code(plan(job("j", gpus=2), on=box, running=runs[:1], policy=quota), "j") == "quota"
    assert code(plan(job("j", gpus=5), on=box, policy=quota), "j") == "never_fits"
    lowered = Policy(default_user_limits=Limits(max_running_gpus=3))
    assert started(plan(job("cpu"), on=box, running=runs, policy=lowered)) == ["cpu"]


def test_a_quota_of_memory():
    """Memory counts as granted; a job that requests none is not held back."""
    quota = Policy(default_user_limits=Limits(max_running_memory_bytes=4 * GIB))
    jobs = [job(f"j{gib}", memory_bytes=gib * GIB or None) for gib in (0, 1, 2, 5)]
    found = plan(*jobs, on=machine(cpus=64), running=[run("r", memory_bytes=3 * GIB)], policy=quota)
    assert started(found) == ["j0", "j1"]
    assert (code(found, "j2"), code(found, "j5")) == ("quota", "never_fits")


def test_a_job_satisfies_its_users_and_its_projects_quota():
    """Both must have room; the project's is told by its name."""
    found = plan(job("j", user="bob", project="vision", cpus=2), on=machine(9), policy=BOTH,
                 running=[run("r", user="eve", project="vision", cpus=3)])  # fmt: skip
    assert (code(found, "j"), numbers(found, "j")) == ("quota", [3, 4, 2])


def test_more_jobs_queued_than_allowed_wait_for_the_earlier_ones():
    """Of the files of a user, or of a project, only the first so many are considered; one over it is told why."""
    policy = Policy(default_user_limits=Limits(max_queued_jobs=2), project_limits={"p": Limits(max_queued_jobs=1)})
    jobs = [job(f"j{n}", waited=9 - n, priority=10 + n) for n in range(4)]
    others = [job(f"p{n}", user=f"u{n}", project="p", waited=9 - n) for n in range(2)]
    seen = view(*jobs, *others, on=machine(cpus=9))
    found = decide(seen, NOW, policy)
    assert started(found) == ["j1", "j0", "p0"]
    assert (numbers(found, "j3"), numbers(found, "p1")) == ([4, 2], [2, 1])
    seen.queue.remove("j0")
    seen.queue.remove("j1")
    assert started(decide(seen, NOW, policy)) == ["j3", "j2", "p0"]


@pytest.mark.parametrize(
    "most", [{"max_running_jobs": 0}, {"max_running_cpus": 1}, {"max_queued_jobs": 0}, {"max_running_gpus": 0}]
)
def test_more_than_a_quota_ever_allows_never_fits(most):
    """No end of another job helps, so none is promised, and a dispatcher that is to end once nothing waits ends."""
    found = plan(job("j", cpus=2, gpus=1), on=machine(gpus=2), policy=Policy(default_user_limits=Limits(**most)))
    reason = found.reason("j")
    assert (reason.code, str(reason)[:6], found.stuck) == ("never_fits", "quota:", True)
    assert foretold(found, "j") is None


def test_memory_outside_spool_is_nobodys_to_promise():
    """What the kernel could not give now is hoped for when a run ends; where none runs, nobody knows."""
    tight = machine(memory_available_bytes=10 * GIB)
    asked = job("j", memory_bytes=24 * GIB)
    assert foretold(plan(asked, on=tight, running=[run("r", time_limit_ns=160 * S)]), "j").at_ns == NOW + 100 * S
    assert foretold(plan(asked, on=tight), "j") is None


@pytest.mark.parametrize(("ran", "more"), [(60, 3540), (3599, 1), (3600, 3600), (20_000, 8800)])
def test_a_run_of_which_nothing_is_known_takes_an_hour_then_twice_as_long(ran, more):
    """Where nothing has ended yet, a run without a limit is taken to last an hour, then two, four, eight."""
    expected = foretold(plan(job("j", cpus=4), running=[run("r", ran=ran)]), "j")
    assert (expected.at_ns, expected.guessed) == (NOW + more * S, True)


THERE = {"far": Machine.of_an_engine(1)}


def far_job(name: str, **values: object) -> Waiting:
    """Return a job for the other machine."""
    return replace(job(name, **values), elsewhere="far")  # type: ignore[arg-type]


def far_run(name: str, **values: object) -> Running:
    """Return a run on the other machine."""
    return replace(run(name, **values), elsewhere="far")  # type: ignore[arg-type]


def test_what_runs_elsewhere_holds_nothing_here_and_what_runs_here_nothing_there():
    """Each is full for its own jobs only, whatever these ask for.

    Nobody foretells a start elsewhere: only the engine there knows whom it will have.
    """
    there = far_run("there", cpus=8, on=(0, 1), time_limit_ns=S)
    found = plan(job("near", cpus=4), far_job("far", cpus=4, gpus=1), running=[there], elsewhere=THERE)
    assert (started(found), code(found, "far")) == (["near"], "max_in_flight")
    assert foretold(found, "far") is None
    jobs = job("near", gpus=1), far_job("far", cpus=999, gpus=2)
    found = plan(*jobs, on=machine(gpus=gpus(1)), running=[run("here", on=(0,))], elsewhere=THERE)
    (start,) = found.starts
    assert (start.name, start.grant.gpus_elsewhere, start.grant.gpu_indices) == ("far", 2, ())
    assert code(found, "near") == "gpus"


def test_no_room_is_left_across_machines():
    """A job here that room is kept free for keeps nobody waiting there, and nobody there has room left here."""
    running = [run("here", cpus=3, time_limit_ns=100 * S), far_run("there", cpus=8, time_limit_ns=100 * S)]
    long, wide = {"cpus": 1, "time_limit_ns": 1000 * S}, {"cpus": 4, "waited": 50}
    two = {"far": Machine.of_an_engine(2)}
    found = plan(job("wide", **wide), job("long", **long), far_job("far", cpus=0), running=running, elsewhere=two)
    assert (found.protected, started(found)) == ("wide", ["far"])
    assert code(found, "long") == "left"
    found = plan(far_job("wide", **wide), job("long", **long), running=running, elsewhere=THERE)
    assert (found.protected, started(found)) == (None, ["long"])


def test_work_elsewhere_passes_nobody_here():
    """What ran on another machine had nothing that a job here waits for."""
    ended = Result("x", 1, 1, State.FINISHED, "", NOW, NOW, NOW + S, grant=Grant(4))
    past = Past(Policy())
    for executor, cpus in (("slurm", 0), ("process", 4)):
        past.learn("bob", replace(ended, executor=executor))
        assert (past.passed[CPUS].later(0) if past.passed else 0) == cpus * S


RUNS = st.builds(
    lambda name, cpus, on, far: (far_run if far else run)(name, cpus=cpus, on=on),
    st.sampled_from("abcd"),
    st.integers(0, 3),
    st.sampled_from([(), (0,)]),
    st.booleans(),
)


@given(st.lists(st.one_of(RUNS, st.sampled_from("abcd")), max_size=20))
def test_the_sums_of_each_machine_are_those_of_its_own_runs(steps):
    """However runs came and went: processors and GPUs of this machine, a number there, all runs together by owner."""
    kept = Runs()
    for step in steps:
        if isinstance(step, str):
            kept.remove(step)
        else:
            kept.put(step)
    here = Runs(each for each in kept.values() if each.elsewhere is None)
    assert (kept.counts.cpus, kept.counts.cpu_holders) == (here.counts.cpus, here.counts.cpu_holders)
    assert kept.with_gpus == here.with_gpus
    assert kept.engines["far"].runs == len(kept) - len(here)
    assert kept.counts.runs == len(kept)
    assert sum(use.cpus for use in kept.counts.users.values()) == sum(each.grant.cpus for each in kept.values())


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
    assert (started(found), found.protected, found.protection.at_ns) == (["plain"], "first", NOW + HOUR)
    assert code(found, "late") == "left"
    assert foretold(found, "first").must_end == ("r",)
    in_time = job("in_time", time_limit_ns=HOUR, **wants(licence=1))
    assert started(plan(first, in_time, on=BOX, running=runs)) == ["in_time"]


def test_what_lies_idle_for_a_guess_is_the_resource_that_is_missing():
    """A guess may hold back licences of which none are free; free CPUs are no cost of that."""
    request = job("j", **wants(licence=3)).spec.request
    busy = FreeResources(BOX, Policy(), NOW, Runs([holds("r", **wants(licence=2))]))
    assert busy.scarce(request) == [("licence", 1, 3)]
    assert busy.held_back(request, [(job("k", **wants(licence=2)).spec.request, 1)]) == 1 / 3
    assert busy.held_back(request, [(job("k", cpus=4).spec.request, 1)]) == 0
    assert FreeResources(BOX, Policy(), NOW, Runs([run("c", cpus=8)])).scarce(request) == [(CPUS, 0, 8)]


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
