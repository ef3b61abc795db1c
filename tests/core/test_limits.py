"""Memory and processors, groups, arrays and quotas, and the room of other machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import GIB, NOW, S, code, foretold, gpus, job, machine, numbers, plan, run, started, view, why
from spool.core.model import Limits, Policy, Request, Running, Waiting
from spool.core.priority import Past
from spool.core.quotas import limits_of
from spool.core.resources import Runs
from spool.core.scheduler import decide
from spool.testing.fakes import a_result


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


THERE = {"far": machine(cpus=8, gpus=gpus(2))}


def far_job(name: str, **values: object) -> Waiting:
    """Return a job for the other machine."""
    return replace(job(name, **values), elsewhere="far")  # type: ignore[arg-type]


def far_run(name: str, **values: object) -> Running:
    """Return a run on the other machine."""
    return replace(run(name, **values), elsewhere="far")  # type: ignore[arg-type]


def test_what_runs_elsewhere_holds_nothing_here_and_what_runs_here_nothing_there():
    """Of two full machines each is full for its own jobs only, GPUs and all; the one there says what never fits.

    Nobody foretells a start elsewhere: only the machine there knows whom it will have.
    """
    full = [far_run("there", cpus=8, on=(0, 1))]
    found = plan(job("near", cpus=4), far_job("far", cpus=4, gpus=1), running=full, elsewhere=THERE)
    assert (started(found), code(found, "far")) == (["near"], "cpus")
    jobs = job("near", gpus=1), far_job("far", cpus=8, gpus=2), far_job("huge", cpus=9)
    found = plan(*jobs, on=machine(gpus=gpus(1)), running=[run("here", on=(0,))], elsewhere=THERE)
    assert (started(found), found.starts[0].grant.gpu_indices) == (["far"], (0, 1))
    assert (code(found, "near"), code(found, "huge")) == ("gpus", "never_fits")
    found = plan(far_job("far", cpus=8), running=[far_run("there", cpus=8, time_limit_ns=S)], elsewhere=THERE)
    assert foretold(found, "far") is None


def test_no_room_is_left_across_machines():
    """A job here that room is kept free for keeps nobody waiting there, and nobody there has room left here."""
    running = [run("here", cpus=3, time_limit_ns=100 * S), far_run("there", cpus=8, time_limit_ns=100 * S)]
    long, wide = {"cpus": 1, "time_limit_ns": 1000 * S}, {"cpus": 4, "waited": 50}
    found = plan(job("wide", **wide), job("long", **long), far_job("far", cpus=0), running=running, elsewhere=THERE)
    assert (found.protected, started(found)) == ("wide", ["far"])
    assert code(found, "long") == "left"
    found = plan(far_job("wide", **wide), job("long", **long), running=running, elsewhere=THERE)
    assert (found.protected, started(found)) == (None, ["long"])


def test_work_elsewhere_passes_nobody_here():
    """What ran on another machine had nothing that a job here waits for."""
    past, result = Past(Policy()), a_result(ran="1s", request=Request(cpus=4))
    for executor, cpus in (("slurm", 0), ("process", 4)):
        past.learn("bob", replace(result, executor=executor))
        assert past.passed.later(0).cpus == cpus * S


RUNS = st.builds(
    lambda name, cpus, on, far: (far_run if far else run)(name, cpus=cpus, on=on),
    st.sampled_from("abcd"),
    st.integers(0, 3),
    st.sampled_from([(), (0,)]),
    st.booleans(),
)


@given(st.lists(st.one_of(RUNS, st.sampled_from("abcd")), max_size=20))
def test_the_sums_of_each_machine_are_those_of_its_own_runs(steps):
    """However runs came and went: processors and GPUs by machine, all runs together by owner."""
    kept = Runs()
    for step in steps:
        if isinstance(step, str):
            kept.remove(step)
        else:
            kept.put(step)
    here = Runs(each for each in kept.values() if each.elsewhere is None)
    there = Runs(replace(each, elsewhere=None) for each in kept.values() if each.elsewhere is not None)
    far = kept.elsewhere.get("far", Runs())
    for index, own in ((kept, here), (far, there)):
        assert (index.counts.cpus, index.counts.cpu_holders) == (own.counts.cpus, own.counts.cpu_holders)
        assert index.with_gpus == own.with_gpus
    assert dict(far) == dict(there)
    assert kept.counts.runs == len(kept)
    assert sum(use.cpus for use in kept.counts.users.values()) == here.counts.cpus + there.counts.cpus
