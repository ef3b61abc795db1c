"""The client for asyncio: its methods do what the client's do, and one task watches all jobs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import spool
from served import Served
from spool.client.waiting import Waiter
from spool.store.spool import Spool


def test_jobs_are_submitted_awaited_and_followed(served: Served) -> None:
    """One, many, and a sweep; what they return is what the client returns."""

    async def program() -> None:
        client = spool.AsyncClient()
        one = await client.submit("echo a; echo b", name="one", cpus=1)
        end = await client.wait(one)
        assert end.outcome is spool.State.FINISHED
        assert await client.output("one") == b"a\nb\n" == b"".join([piece async for piece in client.follow(one)])
        many = await client.submit_many([f"exit {code}" for code in range(3)])
        ends = await asyncio.gather(*map(client.wait, many))
        assert [end.exit_code for end in ends if end is not None] == [0, 1, 2]
        sweep = await client.sweep("exit {n}", matrix={"n": range(3)})
        found = {task.name async for task in client.as_completed(sweep.tasks())}
        assert found == {task.name for task in sweep.tasks()}
        assert {row.name for row in (await client.jobs()).rows} >= {"one", *map(str, many)}

    asyncio.run(program())


def test_one_task_watches_all_jobs(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, in whatever order they begin to; and no thread for each."""
    watches = 0
    begin = Waiter.__init__

    def counted(self: Waiter, *arguments: object) -> None:
        nonlocal watches
        watches += 1
        begin(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Waiter, "__init__", counted)

    async def program() -> None:
        client = spool.AsyncClient()
        jobs = await client.submit_many([f"while ! test -e {tmp_path}/go; do sleep 0.01; done"] * 40)
        before = threading.active_count()
        waits = [asyncio.create_task(client.wait(job)) for job in jobs]
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1 + len(jobs) + 1
        assert not any(wait.done() for wait in waits)
        assert threading.active_count() <= before + 1
        (tmp_path / "go").touch()
        ends = await asyncio.gather(*waits)
        assert {end.outcome for end in ends if end is not None} == {spool.State.FINISHED}

    asyncio.run(program())
    assert watches == 1


def test_a_timeout_an_unknown_job_and_a_cancellation_leave_the_others_waiting(client: spool.Client) -> None:
    """Each gets its own answer."""

    async def program() -> None:
        twin = spool.AsyncClient()
        waits, done = await twin.submit_many(["true"] * 2, held=True)
        patient = asyncio.create_task(twin.wait(done))
        assert await twin.wait(waits, timeout_s=0.01) is None
        with pytest.raises(spool.NoSuchJob):
            await twin.wait("none")
        given_up = asyncio.create_task(twin.wait(done))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(TimeoutError):
            async for _ in twin.as_completed([waits], timeout_s=0.01):
                pass
        assert not patient.done()
        assert (await twin.cancel(done))[0].kind == "cancelled"
        end = await patient
        assert end.outcome is spool.State.CANCELLED
        with pytest.raises(spool.InvalidValue):
            await twin.submit(3)  # type: ignore[arg-type]

    asyncio.run(program())


def test_a_program_waits_for_one_and_for_all(served: Served) -> None:
    """For the first of them, for each in their order, for none in time; what they return is what the functions do."""

    async def program() -> None:
        client = spool.AsyncClient()
        long = await client.submit("sleep 1000", name="long")
        quick = await client.submit_many(["exit 3", "true"])
        assert await client.wait_any([long, *quick]) in quick
        counts: list[tuple[int, int]] = []
        ends = await client.wait_all(quick, progress=lambda done, total: counts.append((done, total)))
        assert ends == spool.wait_all(quick)
        assert [end.exit_code for end in ends if end is not None] == [3, 0]
        assert counts == [(1, 2), (2, 2)]
        assert await client.wait_any([long], timeout_s=0.01) is None
        assert await client.wait_any([]) is None
        assert await client.wait_all([long, long], timeout_s=0.01) == (None, None)
        assert await client.wait_all([]) == ()
        await client.cancel(long)
        [end] = await client.wait_all([long])
        assert end.outcome is spool.State.CANCELLED
        unknown = spool.Job(Spool(client.client.root), "none")
        with pytest.raises(spool.NoSuchJob):
            await client.wait_all([unknown])
        with pytest.raises(spool.NoSuchJob):
            await client.wait_any([unknown])

    asyncio.run(program())


def test_a_client_serves_one_loop_after_another(client: spool.Client) -> None:
    """What one loop has left unfinished does not hinder the next."""
    twin = spool.AsyncClient()
    waits, done = client.submit_many(["true"] * 2, held=True)
    done.cancel()

    async def left() -> None:
        task = asyncio.create_task(twin.wait(waits))
        await asyncio.sleep(0)
        assert not task.done()

    async def ended() -> spool.End | None:
        return await twin.wait(done)

    asyncio.run(left())
    end = asyncio.run(ended())
    assert end.outcome is spool.State.CANCELLED
