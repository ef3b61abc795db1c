"""A program that uses the public face, for the type checkers: `mypy tests/public_types.py`, `pyright` likewise."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

import spool

client = spool.Client("spool", make=True)
assert_type(client.root, str)
job = client.submit(["sleep", "1"], name="a", cpus=2, memory="1G", env={"KEY": "value"})
assert_type(job, spool.Job)
assert_type(client.submit("sleep 1"), spool.Job)
assert_type(client.submit_many(["true", ("echo", "a"), {"command": "true", "cpus": 1}], gpus=1), tuple[spool.Job, ...])
assert_type(client.sweep("train {lr}", matrix={"lr": (0.1, 1), "seed": range(3)}, cpus=1), spool.Job)
assert_type(client.job("a"), spool.Job)
assert_type(spool.job("a", "spool"), spool.Job)
assert_type(client.cancel("a"), tuple[spool.Change, ...])
assert_type(client.hold(job).place, str)
assert_type(client.release("a"), spool.Change)
assert_type(client.requeue("a"), spool.Change)
assert_type(client.output("a", run=1), bytes)
assert_type(client.jobs(spool.JobFilter(names=("a*",), user="me"), everything=True), spool.JobList)
assert_type([row.state for row in client.jobs().rows], list[spool.State])
assert_type(client.jobs().rows[0].parameters, tuple[tuple[str, str], ...])
assert_type(client.jobs(forecast=True).rows[0].start_at_ns, int | None)
assert_type(client.jobs().rows[0].left_ns, int | None)
assert_type(client.jobs().to_dataframe(), Any)
assert_type(client.why(job).start_at_ns, int | None)
assert_type(client.gpus(), spool.GpuList)
assert_type(client.plan(), spool.Preview)
assert_type(client.stats(), spool.Statistics)
assert_type(client.hold(job).kind, spool.ChangeKind)
assert_type(client.gpus().gpus[0].gpu.index, int)
assert_type(client.plan().waits[0].reason, str)
assert_type(client.stats(spool.RunFilter(since_at_ns=0), by="day").total.runs, int)
end = client.wait("a", timeout_s=0.5)
assert_type(end, spool.End | None)
if end is not None:
    assert_type(end.outcome, spool.State)
    assert_type(end.exit_code, int | None)

assert_type(job.name, str)
assert_type(job.wait(), spool.End | None)
assert_type(job.outcome, spool.State | None)
assert_type(job.output(1), bytes)
assert_type(job.tail(), str)
assert_type(job.follow(), Iterator[bytes])
assert_type(job.cancel("why"), tuple[spool.Change, ...])
assert_type(job.why(), spool.Explanation)
assert_type(job.runs(), tuple[spool.RunDetails, ...])
assert_type(job.runs()[0].record.run, int)
assert_type(job.row(), spool.JobRow)
assert_type(job.tasks(), tuple[spool.Job, ...])
assert_type(job.parameters, dict[str, str])


class Future:
    """What stands for a job, as the futures of an executor do."""

    @property
    def job(self) -> spool.Job:
        """The job."""
        return job


assert_type(spool.wait_any([job], timeout_s=1), spool.Job | None)
assert_type(spool.wait_all([job, Future()], progress=True), tuple[spool.End | None, ...])
assert_type(spool.as_completed([job], timeout_s=1, progress=print), Iterator[spool.Job])
assert_type(next(spool.as_completed([Future()])), Future)
assert_type(spool.WaitedJobs([job]).poll(), list[tuple[spool.Job, spool.End]])


async def asynchronous() -> None:
    """Use the client of asyncio."""
    twin = spool.AsyncClient("spool")
    one = await twin.submit("true", cpus=1)
    assert_type(one, spool.Job)
    assert_type(await twin.wait(one, timeout_s=1), spool.End | None)
    assert_type(await twin.submit_many(["true"]), tuple[spool.Job, ...])
    assert_type(twin.as_completed([one]), AsyncIterator[spool.Job])
    assert_type(twin.client, spool.Client)


assert_type(spool.__version__, str)
failures: list[type[spool.SpoolError]] = [
    spool.NoSuchJob,
    spool.InvalidJob,
    spool.InvalidValue,
    spool.NotAllSubmitted,
    spool.SpoolUnusable,
]
