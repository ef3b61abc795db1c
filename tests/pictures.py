"""Draw the pictures of the documentation anew: `python tests/pictures.py docs/pictures [WHICH]...`.

WHICH are `screens`, what the commands print about a prepared spool with two users, whose clock stands still; `session`,
the first minute with a real spool; and `page`, the status page, which needs Chromium. Without any it is all of them.
"""

from __future__ import annotations

import asyncio
import datetime
import fcntl
import io
import itertools
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from msgspec import Struct
from rich.segment import Segment
from rich.style import Style

from long.browser import Browser
from spool.cli import main
from spool.core.gpuuse import STEP_NS, STEPS, RecentUse
from spool.core.model import SECOND_NS, Grant, Request, Result, State
from spool.core.units import parse_duration, parse_size
from spool.extras.page.content import ContentReader
from spool.extras.page.document import render
from spool.extras.top.app import Top
from spool.formats import journal, run_records
from spool.formats.journal import Waits
from spool.formats.state import GpuUseView, GpuView, JobView, MachineView, StateView, parse_state
from spool.machine import identity
from spool.machine.marks import MachineProber
from spool.query.snapshot import snapshot
from spool.store.lock import hold
from spool.store.ownership import this_user
from spool.store.spool import Spool
from support import ROOT, make_spool, printed_on
from terminal import Line, lines_of, session, still
from views import an_end, lay

NOW_NS = int(datetime.datetime(2026, 3, 14, 15, 0, tzinfo=datetime.UTC).timestamp()) * SECOND_NS
MINUTE = 60 * SECOND_NS
G = 1 << 30
_HOME = "/home/alice"  # in the pictures
THEMES = ("dark", "light")
TOP = {40: 30, 80: 24, 100: 30, 200: 40}  # the lines of the screen by its columns
_GPUS = ((77, 97), (74, 94), (46, 88), (28, 61))  # GiB in use, and how much it computes
_SAYS = {"distill_vit": ("waited 55m00s", "in ~")}  # what of a job is only there once all of it was asked for
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
def _prepared() -> Iterator[Path]:
    """Yield a spool at a moment at which much happens, with the clock stopped there and its dispatcher's lock held."""
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(time, "time_ns", return_value=NOW_NS):
        os.environ |= {"HOME": directory, "TZ": "UTC", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        for name in ("NO_COLOR", "FORCE_COLOR"):
            os.environ.pop(name, None)
        time.tzset()
        root = make_spool(Path(directory) / ".spool")
        os.environ["SPOOL_DIR"] = str(root)
        (root / "config.toml").write_text('cpus = 32\nmemory = "256G"\nautostart = false\n')
        own = identity.of_process(os.getpid())
        assert own is not None
        for name, job in JOBS.items():
            _put(root, name, job, run_records.render_jid(own))
        ended = [_result(*each) for each in ENDED]
        for one in ended:
            (root / f"done/{one.job}.toml").write_text('command = "true"\n')
        waits = [
            Waits(name, NOW_NS - job.came * MINUTE, 0, NOW_NS - job.came * MINUTE)
            for name, job in JOBS.items()
            if job.began is None
        ]
        (root / ".journal").write_bytes(journal.render(waits))
        lock = hold(str(root / ".lock"))
        with mock.patch.object(MachineProber, "is_wrapper", return_value=True):
            _show(root, {}, ended)
            plan = snapshot(Spool(str(root)), NOW_NS).plan
            _show(root, {name: str(plan.reason(name) or "") for name in JOBS}, ended)
            yield root
        lock.release()


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
        queued=tuple([3] * 14 + [4] * 6 + [8, 9, 9, 10, 10, 10, 11, 11] + [10] * 8 + [9] * 6 + [8] * 6 + [6] * 12),
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
        since_ns=NOW_NS - job.came * MINUTE, started_at_ns=None if job.began is None else NOW_NS - job.began * MINUTE,
        reason="" if state is State.RUNNING else "held" if state is State.HELD else reason,
        priority=int(_stated(job, "priority") or 10), time_limit_ns=parse_duration(limit) if limit else None,
    )  # fmt: skip


class _Terminal(io.StringIO):
    """A terminal that keeps what is printed."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def _printed(words: Sequence[str], columns: int) -> list[Line]:
    """Return what a command prints on a terminal of that width, below its own line."""
    out = _Terminal()
    with mock.patch.object(sys, "stdout", out), mock.patch.dict(os.environ, {"COLUMNS": str(columns), "LINES": "50"}):
        main.run(list(words))
    return [_prompt(" ".join(("spool", *words))), *lines_of(out.getvalue())]


def _prompt(command: str) -> Line:
    return [Segment("$ ", Style(dim=True)), Segment(command, Style(bold=True))]


async def _tops(root: Path, wanted: Sequence[tuple[str, int, str]]) -> list[str]:
    """Return the pictures of `spool top` for each theme, number of columns and job under the cursor, all at once."""
    screens = await asyncio.gather(*(_top(root, *each) for each in wanted))
    return [still(lines, columns, theme) for lines, (theme, columns, _) in zip(screens, wanted, strict=True)]


async def _top(root: Path, theme: str, columns: int, at: str) -> list[Line]:
    app = Top(str(root))
    async with app.run_test(size=(columns, TOP.get(columns, 30))) as pilot:
        app.theme = f"textual-{theme}"
        while app._seen is None or len(app._seen.active) < len(JOBS):
            await pilot.pause(0.1)
        while app._row is None or app._row.name != at:
            await pilot.press("down")
        pauses, lines = 0, list[Line]()
        while pauses < 20 or not all(word in _text(lines) for word in _SAYS.get(at, ())):
            await pilot.pause(0.1)
            pauses, lines = pauses + 1, [list(strip) for strip in app.screen._compositor.render_strips()]
        return lines


def _text(lines: Sequence[Line]) -> str:
    return "\n".join("".join(segment.text for segment in line) for line in lines)


def _screens(into: Path) -> None:
    with _prepared() as root:
        for columns in TOP:
            printed = {"ls": _printed(["ls"], columns), "why": _printed(["why", "distill_vit"], columns)}
            for (name, lines), theme in itertools.product(printed.items(), THEMES):
                (into / f"{name}-{columns}-{theme}.svg").write_text(still(lines, columns, theme), encoding="utf-8")
        wanted = [(theme, columns, "train_vit_base") for columns in TOP for theme in THEMES]
        *drawn, one = asyncio.run(_tops(root, [*wanted, ("dark", 140, "distill_vit")]))
        for (theme, columns, _), text in zip(wanted, drawn, strict=True):
            (into / f"top-{columns}-{theme}.svg").write_text(text, encoding="utf-8")
        (into / "top.svg").write_text(one, encoding="utf-8")


def _page(into: Path) -> None:
    """Have Chromium draw the status page."""
    with _prepared() as root:
        page = root.parent / "status.html"
        text = render(ContentReader(str(root)).read(NOW_NS, served=True), 3600, 0).decode()
        text = text.replace(str(root.parent), _HOME).replace(str(NOW_NS // 10**6), str(int(time.time() * 1000)))
        page.write_text(text, encoding="utf-8")
        with Browser() as browser:
            browser.screen(1000, 1250)
            browser.open(page)
            browser.picture(into / "page.png", whole=False)


SESSION = (
    ("spool submit --name hello -c 'echo \"hello from $SPOOL_JOB\"'", 2.0),
    ("spool wait hello && spool log hello", 2.5),
    ("spool submit --name train --cpus 2 --time-limit 1m -- ./train.sh", 2.0),
    ("spool submit --name evaluate --depends-on train -- ./evaluate.sh", 2.0),
    ("spool ls", 5.0),
    ("spool why evaluate", 5.0),
    ("spool wait evaluate && spool log evaluate", 4.0),
)
_TRAIN = "#!/bin/sh\necho epoch 3/8 > $SPOOL_METADIR/progress\nuntil [ -e ~/seen ]; do sleep 0.02; done\n"
_TYPED = 6  # letters at once


def _session(into: Path) -> None:
    """Play the first minute with spool, in a home of its own, and draw it."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        (home / "bin").mkdir()
        (home / "bin/spool").write_text(f'#!/bin/sh\nexec {sys.executable} -m spool "$@"\n')
        (home / "train.sh").write_text(_TRAIN)
        (home / "evaluate.sh").write_text("#!/bin/sh\necho accuracy 0.93\n")
        for path in (home / "bin/spool", home / "train.sh", home / "evaluate.sh"):
            path.chmod(0o755)
        environment = {
            "HOME": directory, "PATH": f"{home}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"),
            "TERM": "xterm-256color", "LANG": "C.UTF-8", "TZ": "UTC",
        }  # fmt: skip
        try:
            frames = list(_played(home, environment))
        finally:
            subprocess.run([home / "bin/spool", "cancel", "--all"], env=environment, capture_output=True, check=False)
            _end_dispatcher(home)
    for theme in THEMES:
        (into / f"session-{theme}.svg").write_text(session(frames, 80, theme), encoding="utf-8")


def _played(home: Path, environment: dict[str, str]) -> Iterator[tuple[float, Sequence[Line]]]:
    screen: list[Line] = []
    for command, seconds in SESSION:
        for at in range(0, len(command), _TYPED):
            yield 0.12, [*screen, _prompt(command[:at])]
        yield 0.5, [*screen, _prompt(command)]
        if "wait evaluate" in command:
            (home / "seen").touch()  # `train` runs until here, however fast this machine is
        screen += [_prompt(command), *lines_of(_in_terminal(command, home, environment))]
        yield seconds, [*screen, _prompt("")]
    yield 3.0, screen


def _in_terminal(command: str, home: Path, environment: dict[str, str]) -> str:
    """Return what a command of the shell prints on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = subprocess.Popen(
        ["sh", "-c", command],
        cwd=home,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    printed = printed_on(ours)
    process.wait()
    text = printed.decode().replace("\r\n", "\n")
    text = re.sub(r"[^\n]*\r\x1b\[K", "", text)  # what was drawn over
    return text.replace(str(home), _HOME).replace(f"{this_user()}'s", "alice's")


def _end_dispatcher(home: Path) -> None:
    state = home / ".spool/state.json"
    if state.exists() and (view := parse_state(state.read_bytes())) is not None:
        with suppress(ProcessLookupError):
            os.kill(view.pid, signal.SIGTERM)
        while Spool(str(home / ".spool")).dispatcher_lives():
            time.sleep(0.1)


WHICH = {"screens": _screens, "session": _session, "page": _page}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for which in sys.argv[2:] or WHICH:
        WHICH[which](folder)
