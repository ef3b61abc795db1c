"""Who starts, who is passed over, and what is said of those that wait."""

from __future__ import annotations

from core.planning import GIB, NOW, S, gpus, job, machine, plan, run, started, why
from spool.core.model import Policy, State


def test_a_small_job_behind_a_large_one_starts():
    """Of 8 and 2 CPUs on a machine of 4, the 2 start and the 8 are told that they never fit."""
    found = plan(job("large", cpus=8, waited=2), job("small", cpus=2, waited=1))
    assert started(found) == ["small"]
    assert why(found, "large") == "never fits: needs 8 CPUs, the machine has 4"


def test_equal_jobs_start_until_the_machine_is_full():
    """Of four jobs of 2 CPUs on a machine of 4, exactly the two first start."""
    found = plan(*(job(f"j{n}", cpus=2, waited=10 - n) for n in range(4)))
    assert started(found) == ["j0", "j1"]
    assert why(found, "j3") == "cpus: needs 2, 0 free (2 runs hold 4)"


def test_what_runs_leaves_only_the_rest():
    """Beside a run of 3 of 4 CPUs a job of 2 waits."""
    found = plan(job("two", cpus=2), running=[run("three", cpus=3)])
    assert started(found) == []
    assert why(found, "two") == "cpus: needs 2, 1 free (1 run holds 3)"


def test_who_waited_too_long_ends_even_if_it_would_fit():
    """A job queued 2s ago with a scheduling timeout of 1s is unschedulable though the machine is empty."""
    found = plan(job("late", waited=2, scheduling_timeout_ns=S))
    assert started(found) == []
    assert [(each.name, each.outcome) for each in found.endings] == [("late", State.UNSCHEDULABLE)]
    assert found.endings[0].reason == "scheduling timeout: waited 2s, the limit is 1s"


def test_the_reason_it_waited_for_goes_with_it():
    """What kept a job waiting is said when its scheduling timeout ends it."""
    found = plan(job("late", waited=2, cpus=2, scheduling_timeout_ns=S), running=[run("r", cpus=3)])
    assert found.endings[0].reason == (
        "scheduling timeout: waited 2s, the limit is 1s; cpus: needs 2, 1 free (1 run holds 3)"
    )


def test_a_scheduling_timeout_of_nothing_never_ends_a_job():
    """Timeout 0 is no timeout."""
    assert started(plan(job("old", waited=10**6, scheduling_timeout_ns=0))) == ["old"]


def test_memory_is_counted_by_request():
    """Beside 12 of 16 GiB granted, 8 GiB wait, with the numbers."""
    found = plan(job("j", memory_bytes=8 * GIB), on=machine(memory=16 * GIB), running=[run("r", memory_bytes=12 * GIB)])
    assert why(found, "j") == "memory: needs 8 GiB, 4 GiB free (1 run holds 12 GiB)"


def test_gpus_alone():
    """With 6 of 8 GPUs taken a job of 4 waits, and one of 2 gets the two idle ones."""
    taken = run("r", on=(0, 1, 2, 3, 4, 5))
    found = plan(job("four", gpus=4), on=machine(gpus=gpus(8)), running=[taken])
    assert why(found, "four").startswith("gpus: needs 4 unshared GPUs; 2 are idle; GPU 0 is in exclusive use by r;")
    found = plan(job("two", gpus=2), on=machine(gpus=gpus(8)), running=[taken])
    assert found.starts[0].grant.gpu_indices == (6, 7)
    assert found.starts[0].grant.gpu_uuids == ("GPU-6", "GPU-7")


def test_nothing_starts_while_paused():
    """A paused spool starts nothing and says so."""
    found = plan(job("j"), paused=True)
    assert (started(found), why(found, "j")) == ([], "spool paused")


def test_lowering_a_priority_loses_nobody():
    """A waiting job whose priority is lowered still starts."""
    from core.planning import view
    from spool.core.scheduler import decide

    seen = view(job("j", priority=200), on=machine(cpus=1), running=[run("r")])
    assert started(decide(seen, NOW, Policy())) == []
    seen.queue.put(job("j", priority=1))
    free = view(on=machine(cpus=1))
    assert started(decide(type(free)(free.machine, seen.queue), NOW, Policy())) == ["j"]


def test_dependencies_open_when_the_last_has_finished():
    """A job waits for what it depends on, is told how far that is, and starts when it has finished."""
    waits = plan(job("b", depends_on="a"), job("a", cpus=8))
    assert why(waits, "b") == "dependency: a is queued (0 of 1 done)"
    assert started(plan(job("b", depends_on="a"), ended={"a": State.FINISHED})) == ["b"]


def test_a_failed_dependency_cancels_the_whole_chain():
    """What can never be satisfied is cancelled, and who depends on that too, held ones included."""
    found = plan(
        job("b", depends_on="a"), job("c", depends_on="b"), ended={"a": State.FAILED}, held=[job("d", depends_on="c")]
    )
    assert [(each.name, each.reason) for each in found.endings] == [
        ("b", "dependency: a ended as failed"),
        ("c", "dependency: b ended as cancelled"),
        ("d", "dependency: c ended as cancelled"),
    ]


def test_a_circle_is_found_and_told():
    """Jobs that wait for each other are told the circle."""
    found = plan(job("a", depends_on="c"), job("b", depends_on="a"), job("c", depends_on="b"))
    assert why(found, "a") == "dependency: a cycle, a waits for c waits for b waits for a"
