"""`spool demo`: a small study with real jobs and programs, in a temporary spool."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import click

from spool.cli import render
from spool.cli.group import Verb
from spool.cli.render import charts, tell
from spool.client import autostart
from spool.client.output import last_line_of
from spool.client.requests import Requests
from spool.client.submit import make_spool, submit
from spool.core import layout
from spool.core.errors import ExitCode
from spool.core.layout import QUEUED, RUNNING
from spool.core.model import SECOND_NS, Result, State
from spool.formats import toml
from spool.store.disk import Disk
from spool.store.ownership import this_user
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


class Demonstration:
    """The study in its own spool below *directory*, with a dispatcher that leaves when all is done."""

    def __init__(self, directory: str) -> None:
        self.root, workdir = f"{directory}/spool", f"{directory}/study"
        os.mkdir(workdir, 0o700)
        make_spool(self.root)
        self.spool = Spool(self.root)
        Disk(self.spool.layout.at(layout.STAGING)).put(self.spool.layout.at(layout.CONFIG), _CONFIGURATION)
        self._begun_at_ns = time.time_ns()
        jobs = job_files(workdir)
        self.names = list(jobs)
        submit(self.root, jobs.items())
        with open(self.spool.layout.at(layout.LOG), "ab") as log:
            self.dispatcher = subprocess.Popen(
                autostart.command(self.root, "--until-idle"),
                env=autostart.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def told(self) -> Iterator[str]:
        """Yield a line for each run that ends, as it happens, until the dispatcher has left.

        Its clock does not go back: runs are told in the order in which their ends were noticed.
        """
        ended, over, at_ns = 0, False, self._begun_at_ns
        while not over:
            over = self.dispatcher.poll() is not None
            results = self.results()
            for result in results[ended:]:
                at_ns = max(at_ns, result.ended_at_ns or time.time_ns())
                yield f"{(at_ns - self._begun_at_ns) / SECOND_NS:5.1f}s  {result.job:8} {_how(result)}"
            ended = len(results)
            time.sleep(_POLL_S)

    def results(self) -> list[Result]:
        """Return the results of all ended runs, in the order of the history."""
        return [*self.spool.accounts_since(None)][::-1]

    def end(self) -> None:
        """End the remaining runs, and the dispatcher."""
        if self.dispatcher.poll() is not None:
            return
        requests = Requests(self.spool, this_user())
        for name in {*self.spool.names(QUEUED), *self.spool.names(RUNNING)}:
            requests.cancel(name, "the demo has ended")
        try:
            self.dispatcher.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.dispatcher.kill()
            self.dispatcher.wait()


def _how(result: Result) -> str:
    """Return how a run ended."""
    if result.outcome is not State.FINISHED:
        return f"{result.outcome}: {result.reason}"
    if result.started_at_ns is None or result.ended_at_ns is None:
        return result.outcome.value
    return f"{result.outcome} after {(result.ended_at_ns - result.started_at_ns) / SECOND_NS:.2f}s"


def went_well(results: list[Result]) -> bool:
    """Whether the study had the intended outcome: all finished, except the endless job and its dependent."""
    last = {result.job: result.outcome for result in results}
    expected = {"endless": State.TIMEOUT, "publish": State.CANCELLED}
    return all(outcome is expected.get(name, State.FINISHED) for name, outcome in last.items())


_NEXT = (
    ("submit -- sleep 30", "your first job; the spool and the dispatcher are made for you"),
    ("ls", "the jobs; `spool why`, `spool log` and `spool cancel` take a name"),
    ("submit --help", "CPUs, memory, GPUs, time limits, arrays, dependencies"),
)


@click.command(cls=Verb)
@click.option("--keep", is_flag=True, help="Keep the spool and its results, and print where they are.")
def command(keep: bool) -> int:
    """Run a demo with real jobs in a temporary spool.

    Thirteen jobs: one makes data; others count, pack and sum it; four estimate pi; one fails and is retried; one never
    ends and hits its time limit, so the job that depends on it is cancelled. It takes a few seconds and leaves nothing
    behind.
    """
    directory = tempfile.mkdtemp(prefix="spool-demo-")
    study: Demonstration | None = None
    try:
        study = Demonstration(directory)
        render.say(f"{len(study.names)} jobs in {study.root}/queued")
        render.say()
        for line in study.told():
            render.say(line, at_once=True)
        if study.dispatcher.returncode not in (ExitCode.DONE, ExitCode.JOBS_FAILED):
            said = study.spool.file(layout.LOG) or b""
            for line in ("the dispatcher failed:", *said.decode("utf-8", "replace").splitlines()):
                tell(line)
            return 1
        _picture(study)
        render.say()
        for name in study.names:
            run = study.spool.latest_run(name)
            if run is not None and (line := last_line_of(study.spool, name, run)):
                render.say(f"{name:8}  {line}")
        render.say()
        program = "spool" if shutil.which("spool") is not None else sys.argv[0]  # `.venv/bin/spool demo`
        render.pairs((f"{program} {words}", why) for words, why in _NEXT)
        return 0 if went_well(study.results()) else 1
    finally:
        if study is not None:
            study.end()
        if keep:
            render.say()
            render.say(f"kept: {directory}; look at it with `spool --spool {directory}/spool ls`")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def _picture(study: Demonstration) -> None:
    if (drawing := charts()) is None:
        return
    runs: dict[str, list[Result]] = {name: [] for name in study.names}
    results = study.results()
    for result in results:
        runs.setdefault(result.job, []).append(result)
    begin_ns = min((result.submitted_at_ns for result in results if result.submitted_at_ns), default=0)
    end_ns = max((result.ended_at_ns for result in results if result.ended_at_ns), default=begin_ns)
    render.say()
    for line in drawing.gantt(runs, begin_ns, end_ns, min(120, shutil.get_terminal_size().columns)):
        render.say(drawn=line)
