"""Jobs for another machine: they find their room there, and are held to the limits here."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import S, code, foretold, gpus, job, machine, plan, run, started
from spool.core.model import Policy, Request, Running, Waiting
from spool.core.priority import Past
from spool.core.runs import Runs
from spool.testing.builders import a_result

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
