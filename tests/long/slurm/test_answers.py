"""Slurm's commands that answer late, wrongly, in part or not at all: every job runs once, and each end is found."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from long.slurm.cluster import Cluster, path_with
from served import Served
from support import wait_for

LEDGER = "echo $SPOOL_JOB >> ledger; "

# A dispatcher that gives Slurm's commands up after 3s instead of a minute.
_IMPATIENT = """
from spool.extras.engines import slurm
from spool.cli.main import main
slurm._WITHIN_S = 3.0
raise SystemExit(main())
"""


class Impatient(Served):
    """A spool whose dispatcher does not wait long for Slurm's commands."""

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", _IMPATIENT, "--spool", str(self.root), "dispatch", *arguments]


@pytest.fixture
def spool(slurm: Cluster, tmp_path: Path) -> Iterator[Impatient]:
    """Give a spool on Slurm with an impatient dispatcher, which the test starts."""
    with Impatient(tmp_path / "spool", executor="slurm") as made:
        (made.root / "config.toml").write_text('autostart = false\ndisk_floor = "0M"\n[slurm]\npoll = "200ms"\n')
        made.environment["TEST"] = str(tmp_path)
        yield made


def _instead_of(spool: Served, program: str, text: str) -> None:
    spool.environment["PATH"] = path_with(spool.root.parent / "before", program, text)


def _begun(spool: Served) -> Counter[str]:
    return Counter((spool.root.parent / "ledger").read_text().split())


def _is_over(slurm: Cluster) -> bool:
    return not {job["state"] for job in slurm.jobs()} & {"PENDING", "RUNNING", "COMPLETING"}


# sbatch.


def test_a_submission_that_arrives_after_it_was_given_up_never_begins(spool: Impatient, slurm: Cluster) -> None:
    """Sbatch hangs or fails, the job waits again and runs; then the first submission arrives in Slurm after all."""
    arrives = spool.root.parent / "arrives"
    late = f"""setsid sh -c 'until [ -e {arrives} ]; do sleep 0.1; done; exec "$@"' - "$real" "$@" > /dev/null 2>&1 &"""
    timed_out = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    text = f"""
    case "$*" in
    *:hangs:1\\ *) {late} sleep 60 ;;
    *:fails:1\\ *) {late} echo '{timed_out}' >&2; exit 1 ;;
    esac
    exec "$real" "$@"
    """
    _instead_of(spool, "sbatch", text)
    spool.start()
    names = ("hangs", "fails")
    for name in names:
        spool.drop(name, f"{LEDGER} true")
    spool.wait_done(*names)
    for name in names:
        assert (spool.record(name, "jid", 1), spool.outcome(name, 2)) == ("void\n", "finished")
        assert (spool.result(name, 2) or {})["attempt"] == 1
    arrives.touch()
    wait_for(lambda: Counter(job["name"] for job in slurm.jobs())["hangs"] == 2, 60, "the late job")
    wait_for(lambda: Counter(job["name"] for job in slurm.jobs())["fails"] == 2, 60, "the other late job")
    wait_for(lambda: _is_over(slurm), 60, "the end of all")
    spool.looked()
    assert _begun(spool) == {"hangs": 1, "fails": 1}
    assert [event["outcome"] for event in spool.history() if event["job"] in names] == ["finished", "finished"]


def test_whatever_sbatch_prints_its_job_is_found(spool: Impatient, slurm: Cluster) -> None:
    """Warnings around the id, a cluster after it, two numbers, rubbish, nothing: one job in Slurm for each run."""
    text = """
    id=$("$real" "$@") || exit
    case "$*" in
    *:warns:1\\ *) printf 'sbatch: warning: 2 partitions are full\\n\\n%s\\nthank you\\n' "$id" ;;
    *:federated:1\\ *) echo "${id%;*};far-away" ;;
    *:numbers:1\\ *) printf '1\\n%s\\n' "$id" ;;
    *:rubbish:1\\ *) printf '\\377\\376\\0 1\\n\\033[31m12' ;;
    *:hushed:1\\ *) ;;
    *:complains:1\\ *) echo "$id"; echo "sbatch: error: something else" >&2 ;;
    esac
    """
    _instead_of(spool, "sbatch", text)
    spool.start()
    names = ("warns", "federated", "numbers", "rubbish", "hushed", "complains")
    for name in names:
        spool.drop(name, f"{LEDGER} echo $SLURM_JOB_ID")
    spool.wait_done(*names)
    assert _begun(spool) == dict.fromkeys(names, 1)
    assert Counter(job["name"] for job in slurm.jobs() if job["name"] in names) == dict.fromkeys(names, 1)
    for name in names:
        assert spool.outcome(name) == "finished"
        assert (spool.record(name, "engine") or "").split()[2] == spool.log(name).strip()


# squeue.

_SQUEUE = """
mode=$(cat "$TEST/mode" 2> /dev/null)
echo "$mode" >> "$TEST/asked"
case $mode in
half) "$real" "$@" | head -c 45 ;;
titles) "$real" "$@" | head -n 1 ;;
error) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" ;;
nothing) ;;
bytes) printf '\\377\\376\\t\\377\\t\\t\\t\\n'; "$real" "$@"; printf '9\\tRUNNING\\t\\377\\tn1\\t\\377\\n' ;;
many)
    "$real" "$@"
    awk 'BEGIN { for (i = 1; i <= 10000; i++) printf "9%06d\\tPENDING\\tPriority\\t\\ttheirs\\n", i }'
    ;;
hangs) sleep 60 ;;
*) exec "$real" "$@" ;;
esac
"""


@pytest.mark.timeout(300)
def test_an_answer_of_squeue_that_is_not_whole_ends_no_job(spool: Impatient) -> None:
    """Half a table, an error as its text, nothing, other bytes, 10,000 lines, silence: what runs goes on running."""
    _instead_of(spool, "squeue", _SQUEUE)
    mode, asked = spool.root.parent / "mode", spool.root.parent / "asked"
    spool.start()
    spool.drop("runs", f"{LEDGER} echo up; until [ -e go ]; do sleep 0.1; done")
    spool.says("runs", "up")
    for word in ("half", "many", "error", "bytes", "nothing", "titles", "hangs"):
        mode.write_text(word)
        spool.until(lambda word=word: asked.read_text().split().count(word) > 1, f"two answers of {word}")
        assert spool.places("runs") == ["running"], word
    assert "does not answer" in spool.said()
    answered = spool.said().count("answers again")
    mode.write_text("")
    spool.until(lambda: spool.said().count("answers again") > answered, "an answer")  # no squeue hangs any more
    (spool.root.parent / "go").touch()
    spool.wait_done("runs")
    assert spool.outcome("runs") == "finished"
    assert _begun(spool) == {"runs": 1}


def test_a_job_that_waits_and_is_left_out_of_two_answers_runs_once(spool: Impatient, slurm: Cluster) -> None:
    """Squeue says that it is gone: it waits again, and what Slurm has of it after all never begins."""
    _instead_of(spool, "squeue", _SQUEUE)
    mode = spool.root.parent / "mode"
    slurm.set_nodes("drain", "n4")
    spool.start()
    spool.drop("waits", f"{LEDGER} true", executor_options=["--nodelist=n4"])
    spool.wait_reason("waits", "PENDING")
    mode.write_text("titles")
    spool.until(lambda: len(spool.runs("waits")) > 1, "the second run")
    mode.write_text("")
    slurm.resume("n4")
    spool.wait_done("waits")
    wait_for(lambda: _is_over(slurm), 60, "the end of all")
    assert _begun(spool) == {"waits": 1}


# scancel.


@pytest.mark.timeout(300)
def test_a_cancel_that_fails_is_repeated(spool: Impatient, slurm: Cluster) -> None:
    """Scancel fails twice, for want of an answer or with a refusal: the jobs are ended all the same."""
    text = """
    for each; do job=$each; done
    why="Access denied"
    mkdir "$TEST/once-$job" 2> /dev/null && echo "scancel: error: Kill job error on job id $job: $why" >&2 && exit 1
    mkdir "$TEST/twice-$job" 2> /dev/null && echo "scancel: error: Unable to contact slurm controller" >&2 && exit 1
    exec "$real" "$@"
    """
    _instead_of(spool, "scancel", text)
    spool.start()
    spool.drop("runs", "echo up; while :; do sleep 0.1; done", kill_grace="2s")
    spool.says("runs", "up")
    assert spool.spool("cancel", "runs").returncode == 0
    spool.wait_done("runs")
    assert spool.outcome("runs") == "cancelled"
    wait_for(lambda: _is_over(slurm), 60, "its end in Slurm")
