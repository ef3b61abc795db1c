"""The real dispatcher, killed again and again with SIGKILL while it runs real commands and people do what they like."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from spool.client.requests import Requests
from spool.client.submit import submit
from spool.core import layout
from spool.core.errors import SpoolError
from spool.core.layout import DONE, HELD, PLACES, QUEUED, RUNNING
from spool.core.model import Result, State
from spool.store.spool import Spool
from support import PATIENCE_S, ROOT, make_spool

ROUNDS = int(os.environ.get("STORM_ROUNDS", "14"))
SEED = int(os.environ.get("STORM_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
NAMES = [f"job{number}" for number in range(24)]
CPUS = 2
SERVE = "import sys; from spool.dispatcher.service import serve; serve(sys.argv[1], until_idle=len(sys.argv) > 2)"

# Says when it begins and ends, also when it is stopped; each line is one write, so their order is that of the events.
JOB = """\
command = '''
say() {{ echo "$1 $SPOOL_JOB $SPOOL_RUN $SPOOL_ATTEMPT {number}" >> {ledger}; }}
trap 'say E; exit 143' TERM
say B
sleep {seconds} & wait $!
say E
exit {code}
'''
kill_grace = "5s"
{more}
"""


class Storm:
    """One spool, its dispatchers, and what was done to it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.root = make_spool(root)
        self.ledger = root.parent / "ledger"
        self.ledger.touch()
        (root / layout.CONFIG).write_text(f'cpus = {CPUS}\ndisk_floor = "0M"\n')
        self.spool = Spool(str(root))
        self.requests = Requests(self.spool, "somebody")
        self.submitted: dict[str, str] = {}  # number of the submission -> job
        self.withdrawn: set[str] = set()
        self.log = open(root.parent / "log", "wb")  # noqa: SIM115  (as long-lived as the storm)

    # The dispatchers.

    def dispatcher(self, *more: str) -> subprocess.Popen[bytes]:
        """Start one."""
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        return subprocess.Popen(
            [sys.executable, "-c", SERVE, str(self.root), *more],
            env=environment,
            stderr=self.log,
            start_new_session=True,
        )

    def rage(self) -> None:
        """Let a dispatcher live for a moment, people be busy, and kill it."""
        dispatcher = self.dispatcher()
        try:
            deadline = time.monotonic() + self.random.choice((0.15, 0.3, 0.6, 1.0)) * (0.5 + self.random.random())
            while time.monotonic() < deadline:
                self.do_something()
                time.sleep(self.random.random() * 0.02)
            assert dispatcher.poll() is None, f"the dispatcher died by itself: {self.log_tail()}"
        finally:
            dispatcher.send_signal(signal.SIGKILL)
            dispatcher.wait()
        for _ in range(self.random.randint(0, 5)):
            self.do_something()

    def settle(self) -> None:
        """Let everything come to its end."""
        for _ in range(3):
            for name in NAMES:
                if self.path(HELD, name).exists() and not self.path(QUEUED, name).exists():
                    self.requests.release(name)
            assert self.dispatcher("until idle").wait(PATIENCE_S) == 0, self.log_tail()

    def log_tail(self) -> str:
        """Return what the dispatchers said last."""
        self.log.flush()
        return Path(self.log.name).read_text()[-3000:]

    # What people do.

    def path(self, place: str, name: str) -> Path:
        """Return where a job file lies."""
        return Path(self.spool.layout.job_file(place, name))

    def numbers(self, name: str, *places: str) -> set[str]:
        """Return the submissions whose files lie under that name; looks twice, as the dispatcher moves them."""
        found = set()
        for place in (*places, *places):
            try:
                found |= set(re.findall(r"SPOOL_ATTEMPT (\d+)", self.path(place, name).read_text()))
            except FileNotFoundError:
                continue
        return found

    def do_something(self) -> None:
        """Do one thing to one job; that it cannot be done is no matter."""
        name = self.random.choice(NAMES)
        deeds = (
            (self.submit, 12),
            (self.cancel, 2),
            (self.delete, 2),
            (self.edit, 1),
            (self.requests.hold, 2),
            (self.requests.release, 3),
            (self.requests.requeue, 2),
        )
        deed = self.random.choices([deed for deed, _ in deeds], [weight for _, weight in deeds])[0]
        try:
            deed(name)
        except (SpoolError, FileExistsError, FileNotFoundError):
            return

    def _text(self, name: str) -> bytes:
        number = str(len(self.submitted) + 1)
        self.submitted[number] = name
        code = self.random.choice((0, 0, 0, 1))
        more = self.random.choice(("", "retry = { max = 1 }", "requeue = false", f"cpus = {CPUS}"))
        seconds = self.random.choice((0, 0.01, 0.05, 0.2))
        return JOB.format(number=number, ledger=self.ledger, seconds=seconds, code=code, more=more).encode()

    def submit(self, name: str) -> None:
        """Submit a job, unless one of that name waits."""
        text = self._text(name)
        try:
            submit(str(self.root), [(name, text)], held=self.random.random() < 0.1)
        except FileExistsError:
            self.submitted.popitem()  # nothing was accepted

    def cancel(self, name: str) -> None:
        """Cancel a job, wherever it is."""
        self.withdrawn |= self.numbers(name, QUEUED, HELD, RUNNING)
        self.requests.cancel(name)

    def delete(self, name: str) -> None:
        """Delete the file of a job that runs or waits."""
        place = self.random.choice((QUEUED, RUNNING))
        self.withdrawn |= self.numbers(name, QUEUED, HELD, RUNNING)
        self.path(place, name).unlink()

    def edit(self, name: str) -> None:
        """Replace a file that waits by another version of it."""
        before = self.numbers(name, QUEUED)
        if before:
            staged = self.root / ".tmp" / "edited"
            staged.write_bytes(self._text(name))
            self.withdrawn |= before
            os.rename(staged, self.path(QUEUED, name))

    # What must hold.

    def check(self) -> None:
        """Assert it."""
        begun: list[tuple[str, int]] = []
        finished = set()
        open_runs: dict[str, int] = {}
        numbers = set()
        for line in self.ledger.read_text().splitlines():
            event, name, run, _, number = line.split()
            key = (name, int(run))
            if event == "E":
                finished.add(key)
                open_runs.pop(name, None)
                continue
            assert name not in open_runs, f"run {run} of {name} began while run {open_runs[name]} went on"
            open_runs[name] = int(run)
            assert len(open_runs) <= CPUS, f"{open_runs} at once"
            begun.append(key)
            numbers.add(number)
        assert not open_runs, f"neither ended nor stopped: {open_runs}"
        assert not [key for key, count in Counter(begun).items() if count > 1], "a run was begun twice"
        lines = list(Spool(str(self.root)).accounts_since(None))
        accounted = Counter((line.job, line.run) for line in lines)
        assert not [key for key, count in accounted.items() if count > 1], "a run has two lines of history"
        assert not set(begun) - set(accounted), "a run has no line of history"
        for result in lines:
            key = (result.job, result.run)
            assert result.outcome is not State.FINISHED or (key in set(begun) and key in finished), (
                f"{key} did not finish"
            )
            assert result.outcome is not State.LOST, f"nothing was lost, but for {key}"
        left = {place: sorted(self.spool.names(place)) for place in PLACES if place != DONE}
        assert not any(left.values()), f"something is left: {left}"
        unstarted = {number for number, name in self.submitted.items() if number not in numbers}
        lost = sorted((self.submitted[number], number) for number in unstarted - self.withdrawn - self._ended(lines))
        assert not lost, f"submissions got lost: {lost} in {self.root}; {self.log_tail()}"
        assert not os.listdir(self.root / layout.STAGING)
        assert not _processes_of(self.root)

    def _ended(self, lines: list[Result]) -> set[str]:
        """Return the submissions whose end is on record, begun or not."""
        texts: defaultdict[str, str] = defaultdict(str)
        for line in lines:
            data = self.spool.record(line.job, line.run, layout.SPEC_COPY) or b""
            texts[line.job] += data.decode()
        return {number for text in texts.values() for number in re.findall(r"SPOOL_ATTEMPT (\d+)", text)}


def _processes_of(root: Path) -> list[str]:
    mark = b"SPOOL_DIR=" + os.fsencode(root) + b"\0"
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def test_jobs_survive_any_number_of_dispatchers(tmp_path: Path) -> None:
    """Dispatchers die at any moment and people move files at any moment: each run is made once, and none is lost."""
    print(f"STORM_SEED={SEED}")
    storm = Storm(tmp_path / "spool", SEED)
    try:
        for _ in range(ROUNDS):
            storm.rage()
        storm.settle()
        print(f"{len(storm.submitted)} submissions, {storm.ledger.read_text().count('B ')} starts")
        storm.check()
    except AssertionError as error:
        raise AssertionError(f"STORM_SEED={SEED}: {error}") from error
    finally:
        storm.log.close()
