"""Memory and processors, groups, arrays and quotas."""

from __future__ import annotations

import pytest

from core.planning import GIB, NOW, S, code, foretold, job, machine, plan, run, started, view, why
from spool.core.model import Limits, Policy
from spool.core.quotas import limits_of
from spool.core.scheduler import decide


def test_what_the_kernel_could_not_give_is_refused():
    """A start is refused while the memory really available is below the request, whatever the grants say."""
    tight = machine(memory=64 * GIB, memory_available_bytes=23 * GIB // 2)
    found = plan(job("j", memory_bytes=24 * GIB), job("k", memory_bytes=11 * GIB), on=tight)
    assert started(found) == ["k"]
    assert code(plan(job("j", memory_bytes=24 * GIB), on=tight), "j") == "memory"


def test_memory_is_counted_by_request():
    """Beside 12 of 16 GiB granted, 8 GiB wait, whatever of it is in use."""
    found = plan(job("j", memory_bytes=8 * GIB), on=machine(memory=16 * GIB), running=[run("r", memory_bytes=12 * GIB)])
    assert (started(found), found.reason("j").code) == ([], "memory")


def test_two_jobs_of_one_pass_do_not_count_on_the_same_memory():
    """What a job of this pass was granted is no longer available to the next."""
    found = plan(*(job(f"j{n}", memory_bytes=8 * GIB) for n in range(3)), on=machine(memory_available_bytes=20 * GIB))
    assert started(found) == ["j0", "j1"]


def test_without_a_request_memory_is_not_looked_at():
    """A job that states no memory starts whatever is free."""
    full = machine(memory_available_bytes=0)
    assert started(plan(job("j"), job("z", memory_bytes=0), on=full, running=[run("r", memory_bytes=99 * GIB)])) == [
        "j",
        "z",
    ]


def test_a_job_of_no_processors_needs_none():
    """`cpus = 0` starts on a machine whose processors are all granted."""
    assert started(plan(job("j", cpus=0), running=[run("r", cpus=9)])) == ["j"]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"cpus": 16}, "never fits: needs 16 CPUs, the machine has 2"),
        ({"memory_bytes": 65 * GIB}, "never fits: needs 65 GiB, the machine has 64 GiB"),
    ],
)
def test_more_than_the_machine_never_fits(asked, reason):
    """What no waiting can mend is said."""
    assert why(plan(job("j", **asked), on=machine(cpus=2)), "j") == reason


def test_a_group_runs_so_many_at_once():
    """At most `group_limit` members run, and who waits is told."""
    found = plan(*(job(f"j{n}", group="g", group_limit=2) for n in range(3)), job("other"))
    assert started(found) == ["j0", "j1", "other"]
    assert why(found, "j2") == "group g is full: 2 of 2 running"


def test_the_lowest_limit_of_a_group_holds():
    """The limit is the lowest that any waiting or running member states, even one that cannot start itself."""
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
    assert why(found, "s_1") == "array limit: 2 of 2 running"
    edited = [job("s_1", task=("s", 1)), job("s_2", task=("s", 2, 3))]
    assert started(plan(*edited, running=[run("s_9", task=("s", 9, 1))])) == []
    assert started(plan(*edited, running=[run("s_9", task=("s", 9))])) == ["s_1", "s_2"]


BOTH = Policy(
    default_user_limits=Limits(max_running_jobs=2, max_running_gpus=4),
    user_limits={"bob": Limits(max_running_jobs=3)},
    default_project_limits=Limits(max_running_cpus=4),
)


def test_quotas_are_made_up_field_by_field():
    """A named quota overrides only the fields that it states."""
    assert limits_of(BOTH.default_user_limits, BOTH.user_limits, "bob") == Limits(3, 4)
    assert limits_of(BOTH.default_user_limits, BOTH.user_limits, "eve") == Limits(2, 4)


def test_a_quota_counts_what_starts_in_the_same_pass():
    """A user's third job waits when two may run; another user's does not."""
    found = plan(
        *(job(f"a{n}") for n in range(3)), *(job(f"b{n}", user="bob") for n in range(4)), on=machine(9), policy=BOTH
    )
    assert started(found) == ["a0", "a1", "b0", "b1", "b2"]
    assert why(found, "a2") == "quota: alice uses 2 of 2 jobs"


def test_a_quota_of_gpus():
    """GPUs are counted whole, shared or not, with what the job itself needs."""
    box = machine(cpus=64, gpus=8)
    runs = [run("r", on=(0, 1, 2)), run("s", on=(3,), gpu_memory_bytes=GIB)]
    assert why(plan(job("j", gpus=1), on=box, running=runs[:1], policy=Policy()), "j") == "None"
    quota = Policy(default_user_limits=Limits(max_running_gpus=4))
    assert why(plan(job("j", gpus=1), on=box, running=runs, policy=quota), "j") == "quota: alice uses 4 of 4 GPUs"
    assert code(plan(job("j", gpus=2), on=box, running=runs[:1], policy=quota), "j") == "quota"
    assert code(plan(job("j", gpus=5), on=box, policy=quota), "j") == "never_fits"
    lowered = Policy(default_user_limits=Limits(max_running_gpus=3))
    assert started(plan(job("cpu"), on=box, running=runs, policy=lowered)) == ["cpu"]


def test_a_quota_of_memory():
    """Memory counts as granted; a job that requests none is not held back."""
    quota = Policy(default_user_limits=Limits(max_running_memory_bytes=4 * GIB))
    box, runs = machine(cpus=64, memory=64 * GIB), [run("r", memory_bytes=3 * GIB)]
    found = plan(job("fits", memory_bytes=GIB), job("free"), on=box, running=runs, policy=quota)
    assert started(found) == ["fits", "free"]
    assert code(plan(job("j", memory_bytes=2 * GIB), on=box, running=runs, policy=quota), "j") == "quota"
    assert code(plan(job("j", memory_bytes=5 * GIB), on=box, policy=quota), "j") == "never_fits"


def test_a_job_satisfies_its_users_and_its_projects_quota():
    """Both must have room; the project's is told by its name."""
    found = plan(job("j", user="bob", project="vision", cpus=2), on=machine(9), policy=BOTH,
                 running=[run("r", user="eve", project="vision", cpus=3)])  # fmt: skip
    assert why(found, "j") == "quota: project vision uses 3 of 4 CPUs, needs 2"


def test_more_jobs_queued_than_allowed_wait_for_the_earlier_ones():
    """Of a user's files only the first so many are considered; one over it stays, and is told why."""
    policy = Policy(default_user_limits=Limits(max_queued_jobs=2))
    jobs = [job(f"j{n}", waited=9 - n, priority=10 + n) for n in range(4)]
    seen = view(*jobs, job("other", user="bob"), on=machine(cpus=9))
    found = decide(seen, NOW, policy)
    assert started(found) == ["j1", "j0", "other"]
    assert why(found, "j3") == "quota: alice has 4 queued jobs, the limit is 2"
    seen.queue.remove("j0")
    seen.queue.remove("j1")
    assert started(decide(seen, NOW, policy)) == ["j3", "j2", "other"]


def test_a_projects_queue_is_limited_too():
    """The limit of queued jobs holds for projects as well."""
    policy = Policy(project_limits={"p": Limits(max_queued_jobs=1)})
    found = plan(job("a", project="p", waited=2), job("b", project="p", user="bob", waited=1), policy=policy)
    assert (started(found), why(found, "b")) == (["a"], "quota: project p has 2 queued jobs, the limit is 1")


@pytest.mark.parametrize(
    "most", [{"max_running_jobs": 0}, {"max_running_cpus": 1}, {"max_queued_jobs": 0}, {"max_running_gpus": 0}]
)
def test_more_than_a_quota_ever_allows_never_fits(most):
    """No end of another job helps, so none is promised, and a dispatcher that is to end once nothing waits ends."""
    found = plan(job("j", cpus=2, gpus=1), on=machine(gpus=2), policy=Policy(default_user_limits=Limits(**most)))
    reason = found.reason("j")
    assert (reason.code, str(reason)[:6], found.stuck) == ("never_fits", "quota:", True)
    assert foretold(found, "j") is None


def test_a_stopping_run_keeps_its_grant():
    """Nothing is free before the processes that used it are gone."""
    found = plan(job("j", cpus=4), running=[run("r", cpus=1, stopping=True)])
    assert why(found, "j") == "cpus: needs 4, 3 free (1 run holds 1)"


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
