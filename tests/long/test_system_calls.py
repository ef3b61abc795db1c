"""What the dispatcher asks of the system for one job of many: each call on a file of the spool has its reason.

A look that is added shows up here; one that is no longer made leaves its row behind, which is noticed too. Counted is
the main thread of a dispatcher that drains jobs which wait, on two processors, and tells nobody.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from served import HOUR_NS, LOOKS, Served
from spool.formats.wrapper import load
from support import wait_for

JOBS = 200
SLACK = 0.15  # of a call a job: what comes once in a while, such as the writing of state.json

# How often, at most and at least, and why. J is a job, START and NEW are names in the staging directory. A start may
# have been made ready while there was nothing else to do: then some of its files were written earlier.
EXPECTED = {
    # A start.
    "openat jobs/J": (2, 1, "the runs of the job; and when it is foreseen"),
    "newfstatat jobs/.last-runs.json": (2, 1, "`spool gc` may have removed runs of a new name: their numbers are gone"),
    "mkdir .tmp/START": (1, 1, "a metadir appears whole"),
    "mkdir jobs/J": (1, 1, "the directory of its job"),
    "newfstatat .tmp/START": (2, 0, "what was made ready is still there: when that was, and whether it is so"),
    **{
        f"{call} .tmp/START/{record}": (1, 1, "a record of the run")
        for call in ("openat", "write", "close")
        for record in ("job.toml", "run.sh")
    },
    **{f"{call} .tmp/START/grant.toml": (2, 1, "a record of the run, created ahead") for call in ("openat", "close")},
    "write .tmp/START/grant.toml": (1, 1, "a record of the run"),
    f"newfstatat .wrapper/{load().name}": (1, 1, "the constant, which run.sh reads, may have been removed"),
    "rename .tmp/START": (1, 1, "the metadir is published"),
    "renameat2 queued/J.toml": (1, 1, "the claim"),
    "newfstatat running/J.toml": (3, 2, "what was claimed was parsed, and is still there; what is filed is a file"),
    "write .journal": (2, 0.5, "the start, before its launch; the end; each for all runs of a pass"),
    # An end.
    **{f"{call} jobs/J/1/rc": (1, 1, "the exit code") for call in ("openat", "read", "close")},
    "newfstatat jobs/J/1/rc": (1, 1, "when it was written, which is the end of the run; of the same descriptor"),
    "newfstatat jobs/J": (3, 2, "no link stands for its directory: for the exit code, the result, a second start"),
    "newfstatat jobs/J/1": (3, 2, "no link stands for the metadir: for the exit code, the result, and a late jid"),
    **{
        f"{call} jobs/J/1/jid": (1, 0, "who the wrapper is, where a busy machine ran something else before it said so")
        for call in ("newfstatat", "openat", "read", "close")
    },
    "newfstatat jobs/J/1/metrics": (1, 1, "the result has the figures that the job has reported: there are none"),
    "newfstatat jobs/J/1/stop": (1, 1, "somebody may have ordered a stop in the last moment"),
    **{f"{call} .tmp/NEW": (1, 1, "the result appears whole") for call in ("openat", "write", "close", "rename")},
    "write history.jsonl": (1, 0.3, "a line for each run of a pass"),
    "renameat2 running/J.toml": (1, 1, "the file is filed"),
    # At times.
    "newfstatat .lock": (1, 0, "somebody may have taken the spool away: every 50 ms"),
}
# On no file of the spool: spawning, waiting, events, signals, and locks between threads.
OTHERS = 22.0

pytestmark = pytest.mark.usefixtures("installed")  # a shell's run has other records


def test_each_call_for_a_job_has_its_reason(served: Served) -> None:
    """A drained job costs the calls of the table on files of its spool, and few others."""
    found, others = _expected(served)
    missing = [call for call, (_, least, _) in EXPECTED.items() if found[call] < least - SLACK]
    assert missing == []
    assert sum(others.values()) <= OTHERS, others


def test_a_job_costs_what_it_does_beside_few_however_many_run(served: Served) -> None:
    """Nothing is asked of the runs that go on: one call looks at all children."""
    _, others = _expected(served, beside=150)
    assert sum(others.values()) <= OTHERS + 2


def _expected(served: Served, beside: int = 0) -> tuple[Counter[str], Counter[str]]:
    """Drain jobs under strace; return the calls for each on files of the spool, all expected, and all others.

    *beside*: how many others run on.
    """
    trace = served.root.parent / "strace"
    (served.root / "config.toml").write_text(f"cpus = {2 + beside}\n")
    served.changes[LOOKS] = HOUR_NS
    for number in range(beside):
        served.drop(f"long{number}", ["sleep", "1000"])
    if beside:
        served.start()
        wait_for(lambda: sum(1 for _ in (served.root / "jobs").glob("*/1/jid")) == beside, 60, what="what runs on")
    (served.root / "paused").touch()
    for number in range(JOBS):
        served.drop(f"job{number}", ["true"])
    if not beside:
        served.start()
    time.sleep(1.5)  # the second look at everything is over, and the next is an hour away
    with _traced(served.process.pid, trace):
        (served.root / "paused").unlink()
        wait_for(lambda: len(list((served.root / "done").iterdir())) == JOBS, 120, what="all jobs")
    found, others = _counted(trace.read_text(errors="replace"), served.root)
    assert {call: each for call, each in found.items() if each > SLACK + EXPECTED.get(call, (0, 0, ""))[0]} == {}
    return found, others


@contextmanager
def _traced(pid: int, trace: Path) -> Iterator[None]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    words = ["strace", "-y", "-s", "0", "-o", str(trace), "-p", str(pid)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as strace:
        try:
            said = strace.stderr.readline()
            if "attached" not in said:
                pytest.skip(f"nobody may be traced here: {said.strip()}")
            yield
        finally:
            strace.terminate()


def _counted(trace: str, root: Path) -> tuple[Counter[str], Counter[str]]:
    spool, others = Counter[str](), Counter[str]()
    for line in trace.splitlines():
        match = re.match(r"(\w+)\((.*)", line)
        if match is None:
            continue  # a signal
        path = re.search(rf'["<]{re.escape(str(root))}/([^">]+)[">]', match[2])
        if path is None:
            others[match[1]] += 1
            continue
        name = re.sub(r"\bjob\d+\b", "J", path[1])
        name = re.sub(r"^\.tmp/\d+\.run\.\d+(/1\b)?", ".tmp/START", name)
        name = re.sub(r"^\.tmp/\d+\.\d+$", ".tmp/NEW", name)
        spool[f"{match[1]} {name}"] += 1
    return _shares(spool), _shares(others)


def _shares(counts: Counter[str]) -> Counter[str]:
    shares: Counter[str] = Counter()
    shares.update({call: round(count / JOBS, 2) for call, count in counts.items()})  # type: ignore[dict-item]
    return shares
