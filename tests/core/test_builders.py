"""The builders that tests, ours and others', make their values with."""

from __future__ import annotations

from spool.core.model import SECOND_NS, Dependencies, Grant, Request, State
from spool.testing.fakes import NOW_NS, a_gpu, a_job, a_machine, a_result, a_run, a_spec


def test_what_is_not_said_is_sensible() -> None:
    """A job asks for one processor, a machine is idle, a run has what it asks for, a result is a good end."""
    assert a_job().spec == a_spec()
    assert (a_job().arrived_at_ns, a_job().clock_at_ns) == (NOW_NS, NOW_NS)
    assert [(gpu.index, gpu.memory_free_bytes == gpu.memory_total_bytes) for gpu in a_machine().gpus] == [
        (0, True),
        (1, True),
    ]
    assert a_run().grant == Grant(cpus=1)
    assert (a_result().outcome, a_result().exit_code) == (State.FINISHED, 0)


def test_sizes_and_durations_are_read_as_in_a_job_file() -> None:
    """`"16G"` is binary, `"2h"` is nanoseconds, a number is taken as it is."""
    job = a_job(memory="16G", time_limit="2h", depends_on=["first"])
    assert job.spec.request == Request(memory_bytes=16 << 30)
    assert job.spec.time_limit_ns == 7200 * SECOND_NS
    assert job.spec.depends_on == Dependencies(all=("first",))
    assert a_job(memory=5).spec.request.memory_bytes == 5


def test_a_run_is_on_the_gpus_that_it_is_told_or_on_the_first() -> None:
    """The grant and the request agree, the UUIDs are those of `a_machine`; a GPU with a problem has nothing free."""
    uuids = [gpu.uuid for gpu in a_machine(gpus=3).gpus]
    assert a_run(gpus=2).grant.gpu_uuids == (uuids[0], uuids[1])
    run = a_run(on=[2], gpu_memory="10G")
    assert (run.grant.gpu_uuids, run.grant.gpu_memory_bytes, run.spec.request.gpus) == ((uuids[2],), 10 << 30, 1)
    assert a_gpu(problem="GPU is lost").memory_free_bytes is None
    assert a_gpu(used="30G", taken=[("job", "20G")]).memory_free_bytes == 50 << 30
