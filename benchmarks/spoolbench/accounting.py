"""What is left of runs that have ended: `spool stats` over a long history, and `spool gc` of them, as processes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from random import Random

from spoolbench.engines import SpoolEngine
from spoolbench.figures import Samples, Size
from spoolbench.tools import Scratch

_FIRST = 1_790_000_000 * 10**9
_EVERY = 20 * 10**9  # one run ends every 20 s: a million are eight months


def accounting(engine: SpoolEngine, scratch: Scratch, size: Size) -> Samples:
    """Write a history of many runs, with eight GPUs and three users, and add it up. No dispatcher is involved."""
    engine.prepare(1)
    write(engine.root / "history.jsonl", size.history)
    last_day = str(_render(_FIRST + _EVERY * size.history - 86_400 * 10**9))
    calls = {
        "stats": [],
        "stats_by": ["--by", "user"],
        "stats_day": ["--by", "day"],
        "stats_since": ["--since", last_day],
    }
    found: Samples = {metric: [] for metric in (*calls, "stats_rss")}
    for _ in range(size.rounds):
        for metric, words in calls.items():
            code, seconds = engine.run([*engine.command, "stats", *words])
            if code:
                raise RuntimeError(f"spool stats ends with {code}")
            found[metric].append(seconds)
    found["stats_rss"].append(_peak_mib([*engine.command, "stats", "--by", "user"], engine.env))
    return found


def collecting(engine: SpoolEngine, scratch: Scratch, size: Size) -> Samples:
    """Remove `size.ended` ended runs: each of a job of its own, and all of one job. No dispatcher is involved."""
    found: Samples = {}
    for metric, jobs in (("gc_jobs", size.ended), ("gc_runs", 1)):
        engine.prepare(1)
        end(engine.root, jobs, size.ended // jobs)
        code, seconds = engine.run([*engine.command, "gc", "--older-than", "1s"])
        if code or any((engine.root / "done").iterdir()):
            raise RuntimeError(f"spool gc ends with {code}, or not all has gone")
        found[metric] = [seconds]
    return found


def end(root: Path, jobs: int, runs: int) -> None:
    """Write what *runs* runs of each of *jobs* jobs leave: eight small files each."""
    from spool.core.model import Result, State
    from spool.formats.run_records import render_result

    for job in range(jobs):
        (root / "done" / f"job_{job}.toml").write_text('command = "true"\n')
        for run in range(1, runs + 1):
            metadir = root / "jobs" / f"job_{job}" / str(run)
            metadir.mkdir(parents=True)
            result = Result(f"job_{job}", run, 1, State.FINISHED, "exit code 0", ended_at_ns=_FIRST, exit_code=0)
            (metadir / "result.toml").write_bytes(render_result(result))
            for record in ("job.toml", "grant.toml", "run.sh", "jid", "status", "rc", "log"):
                (metadir / record).write_text("1\n")
    os.sync()  # else the first sync of the removal waits for all of it


def _peak_mib(argv: list[str], env: dict[str, str]) -> float:
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"spool stats ends with {process.returncode}")
    return usage.ru_maxrss / 1024


def write(path: Path, count: int) -> None:
    """Write the lines, as a dispatcher does."""
    from spool.core.model import Grant, Request, Result, State
    from spool.formats.run_records import render_history

    random = Random(count)
    outcomes = (*[State.FINISHED] * 8, State.FAILED, State.TIMEOUT)
    now = _FIRST
    with path.open("wb") as file:
        for number in range(count):
            now += random.randrange(2 * _EVERY)
            ran, waited = (int(random.expovariate(1 / mean) * 1e9) for mean in (1200, 600))
            first, gpus = random.randrange(8), random.choice((0, 0, 1, 1, 2, 4))
            indices = tuple((first + at) % 8 for at in range(gpus))
            uuids = tuple(f"GPU-{index:08x}-1111-2222-3333-444444444444" for index in indices)
            cpus = random.choice((1, 2, 4, 8))
            result = Result(
                f"job_{number}",
                1,
                1,
                random.choice(outcomes),
                "exit code 0",
                submitted_at_ns=now - ran - waited,
                started_at_ns=now - ran,
                ended_at_ns=now,
                exit_code=0,
                peak_memory_bytes=random.randrange(1 << 33),
                cpu_time_ns=int(ran * cpus * random.random()),
                user=random.choice(("alice", "bob", "carol")),
                project=random.choice(("vision", "text", None)),
                tags=("nightly",) if number % 5 == 0 else (),
                request=Request(cpus, 1 << 33, gpus),
                grant=Grant(cpus, 1 << 33, uuids, indices),
                executor="process",
                host="node",
            )
            file.write(render_history(result))


def _render(at_ns: int) -> str:
    from spool.formats.wire import render_instant

    return render_instant(at_ns, digits=0)
