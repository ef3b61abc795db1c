"""A spool of two users at a moment at which much happens, whose clock stands still: for pictures and transcripts."""

from __future__ import annotations

import datetime
import os
import pwd
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec import Struct

from cli.records import end
from spool.core.gpuuse import STEP_NS, STEPS, RecentUse
from spool.core.model import SECOND_NS, Grant, Request, Result, State
from spool.core.units import parse_duration, parse_size
from spool.formats import journal, run_records
from spool.formats.journal import Waits
from spool.formats.state import GpuUseView, GpuView, JobView, MachineView, StateView
from spool.machine import host, identity
from spool.machine.host import MACHINE_FILE, Host, HostMemory
from spool.machine.processes import MachineProber
from spool.query.snapshot import snapshot
from spool.store.lock import Lock
from spool.store.ownership import name_of
from spool.store.spool import Spool
from support import make_spool
from views import an_end, lay

NOW_NS = int(datetime.datetime(2026, 3, 14, 15, 0, tzinfo=datetime.UTC).timestamp()) * SECOND_NS
MINUTE = 60 * SECOND_NS
G = 1 << 30
_GPUS = ((77, 97), (74, 94), (46, 88), (28, 61))  # GiB in use, and how much it computes
_BAR = "\repoch 8/12: {0:3d}%|{1:20}| {2}/1200 [00:09<00:14, 52.4it/s]"


class Job(Struct, frozen=True):
    """A job of the prepared spool: its file, how long ago it came and started, and what it says."""

    text: str
    user: str
    came: int  # minutes ago
    began: int | None = None
    gpus: tuple[int, ...] = ()
    percent: int | None = None


JOBS = {
    "finetune_llm": Job('gpus = 2\ncpus = 8\nmemory = "64G"\ntime_limit = "8h"\npriority = 60\n', "alice",
                        200, 192, (0, 1), 88),
    "train_vit_base": Job('gpus = 1\ncpus = 8\nmemory = "32G"\ntime_limit = "4h"\npriority = 50\n', "bob",
                          70, 65, (2,), 63),
    "train_resnet50": Job('gpus = 1\ncpus = 4\nmemory = "16G"\ntime_limit = "6h"\n', "alice", 50, 48, (3,), 27),
    "index_papers": Job('cpus = 2\nmemory = "4G"\n', "bob", 141, 140),
    "distill_vit": Job('gpus = 2\ncpus = 2\nmemory = "16G"\ntime_limit = "2h"\n', "bob", 55),
    **{f"sweep_lr_{at}": Job('gpus = 1\ncpus = 2\ntime_limit = "1h"\npriority = 5\n', "alice", 40) for at in (1, 2, 3)},
    "evaluate_vit": Job('depends_on = ["train_vit_base"]\ntime_limit = "30m"\n', "bob", 35),
    "nightly_backup": Job('start_after = "2026-03-15T03:00:00Z"\npriority = 0\n', "alice", 300),
    "retrain_all": Job("gpus = 4\n", "alice", 20),
}  # fmt: skip
ENDED = (
    ("tokenize", "alice", State.FINISHED, 250, 38, "exit code 0"),
    ("preprocess", "bob", State.FINISHED, 150, 12, "exit code 0"),
    ("smoke_test", "bob", State.FAILED, 80, 1, "exit code 3"),
)


@contextmanager
def imagined(home: Path, now_ns: int | None = NOW_NS) -> Iterator[Path]:
    """Have this process be alice's, at home in *home*, with the clock stopped or not; yield where her spool will be."""
    alice = pwd.struct_passwd(("alice", "x", os.getuid(), os.getgid(), "", str(home), "/bin/sh"))
    root = home / ".spool"
    variables = {"HOME": str(home), "SPOOL_DIR": str(root), "TZ": "UTC", "TERM": "xterm-256color"}
    cached = (name_of, host._login)  # what these know of the account
    for function in cached:
        function.cache_clear()
    with (
        mock.patch.dict(os.environ, {**variables, "COLORTERM": "truecolor"}),
        mock.patch.object(pwd, "getpwuid", return_value=alice),
        mock.patch.object(Host, "memory", return_value=HostMemory(256 * G, 140 * G)),
        mock.patch.object(os, "stat", _unshared(os.stat)),
        ExitStack() as afterwards,
    ):
        if now_ns is not None:
            afterwards.enter_context(mock.patch.object(time, "time_ns", return_value=now_ns))
        for function in cached:
            afterwards.callback(function.cache_clear)
        for name in ("NO_COLOR", "FORCE_COLOR"):
            os.environ.pop(name, None)
        time.tzset()
        yield root


@contextmanager
def prepared() -> Iterator[Path]:
    """Yield the spool, with its dispatcher's lock held by this process."""
    with tempfile.TemporaryDirectory() as directory, imagined(Path(directory)) as root:
        make_spool(root)
        (root / "config.toml").write_text('cpus = 32\nmemory = "256G"\nautostart = false\n')
        own = identity.of_process(os.getpid())
        assert own is not None
        for name, job in JOBS.items():
            _put(root, name, job, run_records.render_jid(own))
        ended = [_result(*each) for each in ENDED]
        for one in ended:
            metadir = end(root, one, told=False)
            (metadir / "log").write_text(f"this is {one.job}\n")
            for path in (root / f"done/{one.job}.toml", metadir / "job.toml"):
                path.write_text('command = "true"\n')
                os.utime(path, ns=(one.ended_at_ns, one.ended_at_ns))
        waits = [
            Waits(name, NOW_NS - job.came * MINUTE, 0, NOW_NS - job.came * MINUTE)
            for name, job in JOBS.items()
            if job.began is None
        ]
        (root / ".journal").write_bytes(journal.render(waits))
        lock = Lock(str(root / ".lock"))
        with mock.patch.object(MachineProber, "is_wrapper", return_value=True):
            _show(root, {}, ended)
            plan = snapshot(Spool(str(root)), NOW_NS).plan
            _show(root, {name: str(plan.reason(name) or "") for name in JOBS}, ended)
            yield root
        lock.release()


def _unshared(stat: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
    """Return *stat* as it is on a machine that nobody shares."""

    def stats(path: object, **more: Any) -> os.stat_result:
        return stat("/nowhere" if path == MACHINE_FILE else path, **more)

    return stats


def _put(root: Path, name: str, job: Job, jid: bytes) -> None:
    text = f'command = "python3 {name}.py"\n{job.text}'
    place = "running" if job.began is not None else "held" if name == "retrain_all" else "queued"
    path = root / place / f"{name}.toml"
    path.write_text(text)
    came_ns = NOW_NS - job.came * MINUTE
    os.utime(path, ns=(came_ns, came_ns))
    if job.began is None:
        return
    metadir = root / "jobs" / name / "1"
    metadir.mkdir(parents=True)
    (metadir / "job.toml").write_text(text)
    record = run_records.GrantRecord(
        name, 1, grant=_grant(job), user=job.user, submitted_at_ns=came_ns, granted_at_ns=NOW_NS - job.began * MINUTE
    )
    (metadir / "grant.toml").write_bytes(run_records.render_grant(record))
    (metadir / "jid").write_bytes(jid)
    said = "".join(f"epoch {at}/12  loss 0.{97 - 9 * at}  accuracy 0.{61 + 4 * at}\n" for at in range(1, 8))
    done = job.percent or 0
    said += _BAR.format(done, "█" * (done // 5), 12 * done)
    (metadir / "log").write_text(said if job.percent is not None else "reading papers/2026-03\n")


def _stated(job: Job, key: str) -> str:
    found = re.search(rf"^{key} = \"?([^\"\n]*)", job.text, re.MULTILINE)
    return found[1] if found else ""


def _grant(job: Job) -> Grant:
    return Grant(int(_stated(job, "cpus") or 1), _memory(job), tuple(f"GPU-{at}" for at in job.gpus), job.gpus)


def _memory(job: Job) -> int | None:
    return parse_size(_stated(job, "memory")) if _stated(job, "memory") else None


def _result(name: str, user: str, outcome: State, ago: int, ran: int, reason: str) -> Result:
    at_ns = NOW_NS - ago * MINUTE
    return an_end(
        NOW_NS, name, hours_ago=0, user=user, outcome=outcome, reason=reason, ended_at_ns=at_ns,
        started_at_ns=at_ns - ran * MINUTE, submitted_at_ns=at_ns - (ran + 3) * MINUTE,
        exit_code=int(reason.rpartition(" ")[2]), request=Request(4), grant=Grant(4),
        cpu_time_ns=ran * 3 * MINUTE, peak_memory_bytes=2 * G,
    )  # fmt: skip


def _show(root: Path, reasons: dict[str, str], ended: list[Result]) -> None:
    """Write what a dispatcher would show of it."""
    live = {name: job for name, job in JOBS.items() if job.began is not None}
    gpus = tuple(
        GpuView(
            uuid=f"GPU-{at}", index=at, name="NVIDIA H100 80GB HBM3", memory_total_bytes=80 * G,
            memory_free_bytes=(80 - used) * G, utilisation_percent=percent,
            jobs=tuple(name for name, job in live.items() if at in job.gpus),
        )
        for at, (used, percent) in enumerate(_GPUS)
    )  # fmt: skip
    machine = MachineView(
        cpus=32, cpus_free=32 - sum(_grant(job).cpus for job in live.values()), memory_bytes=256 * G,
        memory_free_bytes=256 * G - sum(_memory(job) or 0 for job in live.values()), gpus_at_ns=NOW_NS, gpus=gpus,
    )  # fmt: skip
    began = {f"GPU-{at}": job.began for job in live.values() for at in job.gpus}
    recent = RecentUse(
        until_ns=(NOW_NS // STEP_NS + 1) * STEP_NS,
        gpus={
            uuid: tuple(
                max(2, percent - (17 * step * step) % 29 - (40 if step < 40 and at == 3 else 0))
                for step in range(STEPS)
            )
            for at, (uuid, (_, percent)) in enumerate(zip(sorted(began), _GPUS, strict=True))
        },
    )
    jobs = {name: _view(name, job, reasons.get(name, "")) for name, job in JOBS.items()}
    view = StateView(
        version=1, at_ns=NOW_NS, heartbeat_ns=NOW_NS, pid=os.getpid(), host="gpu-box", boot_id=identity.boot_id(),
        started_at_ns=NOW_NS - 500 * MINUTE, machine=machine, jobs=jobs, recent=recent,
    )  # fmt: skip
    lay(root, view, ended)
    os.utime(root / "state.json", ns=(NOW_NS, NOW_NS))


def _view(name: str, job: Job, reason: str) -> JobView:
    grant, limit = _grant(job), _stated(job, "time_limit")
    percents = [_GPUS[at][1] for at in job.gpus]
    state = State.RUNNING if job.began is not None else State.HELD if name == "retrain_all" else State.QUEUED
    return JobView(
        state=state, run=1 if job.began is not None else None, cpus=grant.cpus, memory_bytes=grant.memory_bytes,
        gpus=int(_stated(job, "gpus") or 0), gpu_uuids=grant.gpu_uuids, user=job.user,
        gpu_use=tuple(GpuUseView(percent=each, mean_percent=each - 4.0, watched_ns=MINUTE) for each in percents),
        submitted_at_ns=NOW_NS - job.came * MINUTE,
        started_at_ns=None if job.began is None else NOW_NS - job.began * MINUTE,
        reason="" if state is State.RUNNING else "held" if state is State.HELD else reason,
        priority=int(_stated(job, "priority") or 10), time_limit_ns=parse_duration(limit) if limit else None,
    )  # fmt: skip
