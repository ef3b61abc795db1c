"""A small study with real programs, for `spool demo`: its job files, its dispatcher, and its results."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from msgspec import Struct

from spool.client import autostart
from spool.client.requests import Requests
from spool.client.submit import make_spool, submit
from spool.core import layout
from spool.core.errors import ExitCode, InvalidRecord
from spool.core.layout import QUEUED, RUNNING
from spool.core.model import Result, State
from spool.formats import toml
from spool.formats.run_records import parse_history_line
from spool.store.disk import Disk
from spool.store.ownership import this_user
from spool.store.reading import history_lines
from spool.store.spool import Spool

_CONFIGURATION = b"# four jobs at once, however many processors there are: most of them only wait\ncpus = 4\n"
_POLL_S = 0.03
_SEEDS = (1, 2, 3, 4)

_DATA = """\
import random
random.seed(7)
words = [''.join(random.choices('abcdefgh', k=random.randint(2, 4))) for _ in range(300)]
with open('words', 'w') as out:
    for _ in range(150_000):
        out.write(words[int(random.paretovariate(1.1)) % 300] + '\\n')
print('150000 words written')
"""
_PI = """\
import random, sys
seed, n = int(sys.argv[1]), 1_000_000
random.seed(seed)
inside = sum(random.random() ** 2 + random.random() ** 2 < 1 for _ in range(n))
with open(f'pi.{seed}', 'w') as out:
    print(4 * inside / n, file=out)
print(f'seed {seed}: {4 * inside / n:.5f}')
"""
_MEAN = """\
import glob
found = [float(open(path).read()) for path in glob.glob('pi.[0-9]')]
text = f'pi is about {sum(found) / len(found):.5f}, from {len(found)} seeds'
print(text)
print(text, file=open('pi.mean', 'w'))
"""
_FLAKY = """\
if [ "$SPOOL_ATTEMPT" = 1 ]; then echo "the server does not answer" >&2; exit 69; fi
echo "answered at attempt $SPOOL_ATTEMPT" | tee answer
"""
_REPORT = 'cat top answer sum pi.mean > report && echo "a report of $(wc -l < report) lines"'


def job_files(workdir: str) -> dict[str, bytes]:
    """Return the study's job files."""
    python = sys.executable
    jobs: dict[str, dict[str, object]] = {
        "data": {"command": [python, "-c", _DATA]},
        "count": {"command": "sort words | uniq -c | sort -rn | head -n 3 | tee top", "depends_on": ["data"]},
        "pack": {"command": "gzip -9 -n -k -f words && ls -s words words.gz", "depends_on": ["data"]},
        "sum": {"command": "sha256sum words.gz | tee sum", "depends_on": ["pack"]},
        **{f"pi_{seed}": {"command": [python, "-c", _PI, str(seed)]} for seed in _SEEDS},
        "mean": {"command": [python, "-c", _MEAN], "depends_on": [f"pi_{seed}" for seed in _SEEDS]},
        "server": {"command": _FLAKY, "priority": 20, "retry": {"max": 2, "delay": "700ms"}},
        "endless": {"command": "echo searching; exec sleep 1000", "time_limit": "2s", "kill_grace": "1s"},
        "publish": {"command": "echo never", "depends_on": ["endless"]},
        "report": {
            "command": _REPORT,
            "depends_on": {"all": ["count", "sum", "mean", "server"], "ended": ["endless"]},
        },
    }
    return {name: toml.write({**keys, "workdir": workdir}) for name, keys in jobs.items()}


class DemoEvent(Struct, frozen=True):
    """One event: a run began (`result` is None) or ended."""

    at_ns: int
    name: str
    result: Result | None = None


class Demonstration:
    """The study in its own spool below *directory*, with a dispatcher that leaves when all is done."""

    def __init__(self, directory: str) -> None:
        self.root = os.path.join(directory, "spool")
        self.workdir = os.path.join(directory, "study")
        self.begun_at_ns = 0
        self._dispatcher: subprocess.Popen[bytes] | None = None

    def begin(self) -> list[str]:
        """Create the spool, submit the jobs, start the dispatcher; return the names in the order of submission."""
        os.mkdir(self.workdir, 0o700)
        make_spool(self.root)
        disk = Disk(f"{self.root}/{layout.STAGING}")
        disk.put(f"{self.root}/{layout.CONFIG}", _CONFIGURATION)
        self.begun_at_ns = time.time_ns()
        jobs = job_files(self.workdir)
        submit(self.root, jobs.items())
        disk.put(f"{self.root}/{layout.LOG}", b"")
        with open(f"{self.root}/{layout.LOG}", "ab") as log:
            self._dispatcher = subprocess.Popen(
                autostart.command(self.root, "--until-idle"),
                env=autostart.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return list(jobs)

    def happenings(self) -> Iterator[DemoEvent]:
        """Yield the events, as they happen, until the dispatcher has left."""
        assert self._dispatcher is not None
        spool = Spool(self.root)
        began: set[tuple[str, int]] = set()
        ended = 0
        while True:
            over = self._dispatcher.poll() is not None
            for name in spool.names(RUNNING):
                run = spool.latest_run(name)
                if run is not None and (name, run) not in began:
                    began.add((name, run))
                    yield DemoEvent(time.time_ns(), name)
            results = self.results()
            for result in results[ended:]:
                yield DemoEvent(result.ended_at_ns or time.time_ns(), result.job, result)
            ended = len(results)
            if over:
                return
            time.sleep(_POLL_S)

    def results(self) -> list[Result]:
        """Return the results of all ended runs, in the order of the history."""
        found = []
        for line in history_lines(self.root):
            try:
                found.append(parse_history_line(line))
            except InvalidRecord:
                continue
        return found[::-1]

    def last_line(self, name: str) -> str:
        """Return the last line of a job's newest output."""
        spool = Spool(self.root)
        run = spool.latest_run(name)
        text = spool.record(name, run, layout.JOB_LOG) if run is not None else None
        lines = (text or b"").decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    @property
    def failed(self) -> str | None:
        """Return the dispatcher's message, if it has failed."""
        if self._dispatcher is None or self._dispatcher.returncode in (None, ExitCode.DONE, ExitCode.JOBS_FAILED):
            return None
        with open(f"{self.root}/{layout.LOG}", encoding="utf-8", errors="replace") as log:
            return log.read()

    def end(self) -> None:
        """End the remaining runs, and the dispatcher."""
        if self._dispatcher is None or self._dispatcher.poll() is not None:
            return
        spool = Spool(self.root)
        requests = Requests(spool, this_user())
        for name in {*spool.names(QUEUED), *spool.names(RUNNING)}:
            requests.cancel(name, "the demo has ended")
        try:
            self._dispatcher.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._dispatcher.kill()
            self._dispatcher.wait()


def went_well(results: list[Result]) -> bool:
    """Whether the study had the intended outcome: all finished, except the endless job and its dependent."""
    last = {result.job: result.outcome for result in results}
    expected = {"endless": State.TIMEOUT, "publish": State.CANCELLED}
    return all(outcome is expected.get(name, State.FINISHED) for name, outcome in last.items())
