"""Slurm's commands that answer late, wrongly, in part or not at all: every job runs once, and each end is found."""

from __future__ import annotations

from collections import Counter

import pytest

from long.slurm.cluster import Cluster, path_with
from served import Served
from support import wait_for

LEDGER = "echo $SPOOL_JOB >> ledger; "


def _instead_of(spool: Served, program: str, text: str) -> None:
    spool.environment["PATH"] = path_with(spool.root.parent / "before", program, text)


def _begun(spool: Served) -> Counter[str]:
    return Counter((spool.root.parent / "ledger").read_text().split())


def _is_over(slurm: Cluster) -> bool:
    return not {job["state"] for job in slurm.jobs()} & {"PENDING", "RUNNING", "COMPLETING"}


# sbatch.


def test_a_submission_that_arrives_after_it_was_given_up_never_begins(impatient: Served, slurm: Cluster) -> None:
    """Sbatch hangs or fails, the job waits again and runs; then the first submission arrives in Slurm after all."""
    arrives = impatient.root.parent / "arrives"
    late = f"""setsid sh -c 'until [ -e {arrives} ]; do sleep 0.1; done; exec "$@"' - "$real" "$@" > /dev/null 2>&1 &"""
    timed_out = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    text = f"""
    case "$*" in
    *:hangs:1\\ *) {late} sleep 60 ;;
    *:fails:1\\ *) {late} echo '{timed_out}' >&2; exit 1 ;;
    esac
    exec "$real" "$@"
    """
    _instead_of(impatient, "sbatch", text)
    impatient.start()
    names = ("hangs", "fails")
    for name in names:
        impatient.drop(name, f"{LEDGER} true")
    impatient.wait_done(*names)
    for name in names:
        assert (impatient.record(name, "jid", 1), impatient.outcome(name, 2)) == ("void\n", "finished")
        assert (impatient.result(name, 2) or {})["attempt"] == 1
    arrives.touch()
    wait_for(lambda: Counter(job["name"] for job in slurm.jobs())["hangs"] == 2, 60, "the late job")
    wait_for(lambda: Counter(job["name"] for job in slurm.jobs())["fails"] == 2, 60, "the other late job")
    wait_for(lambda: _is_over(slurm), 60, "the end of all")
    impatient.looked()
    assert _begun(impatient) == {"hangs": 1, "fails": 1}
    assert [event["outcome"] for event in impatient.history() if event["job"] in names] == ["finished", "finished"]


def test_whatever_sbatch_prints_its_job_is_found(impatient: Served, slurm: Cluster) -> None:
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
    _instead_of(impatient, "sbatch", text)
    impatient.start()
    names = ("warns", "federated", "numbers", "rubbish", "hushed", "complains")
    for name in names:
        impatient.drop(name, f"{LEDGER} echo $SLURM_JOB_ID")
    impatient.wait_done(*names)
    assert _begun(impatient) == dict.fromkeys(names, 1)
    assert Counter(job["name"] for job in slurm.jobs() if job["name"] in names) == dict.fromkeys(names, 1)
    for name in names:
        assert impatient.outcome(name) == "finished"
        assert (impatient.record(name, "engine") or "").split()[2] == impatient.log(name).strip()


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
def test_an_answer_of_squeue_that_is_not_whole_ends_no_job(impatient: Served) -> None:
    """Half a table, an error as its text, nothing, other bytes, 10,000 lines, silence: what runs goes on running."""
    _instead_of(impatient, "squeue", _SQUEUE)
    mode, asked = impatient.root.parent / "mode", impatient.root.parent / "asked"
    impatient.start()
    impatient.drop("runs", f"{LEDGER} echo up; until [ -e go ]; do sleep 0.1; done")
    impatient.says("runs", "up")
    for word in ("half", "many", "error", "bytes", "nothing", "titles", "hangs"):
        mode.write_text(word)
        impatient.until(lambda word=word: asked.read_text().split().count(word) > 1, f"two answers of {word}")
        assert impatient.places("runs") == ["running"], word
    assert "does not answer" in impatient.said()
    answered = impatient.said().count("answers again")
    mode.write_text("")
    impatient.until(lambda: impatient.said().count("answers again") > answered, "an answer")  # no squeue hangs any more
    (impatient.root.parent / "go").touch()
    impatient.wait_done("runs")
    assert impatient.outcome("runs") == "finished"
    assert _begun(impatient) == {"runs": 1}


def test_a_job_that_waits_and_is_left_out_of_two_answers_runs_once(impatient: Served, slurm: Cluster) -> None:
    """Squeue says that it is gone: it waits again, and what Slurm has of it after all never begins."""
    _instead_of(impatient, "squeue", _SQUEUE)
    mode = impatient.root.parent / "mode"
    slurm.set_nodes("drain", "n4")
    impatient.start()
    impatient.drop("waits", f"{LEDGER} true", executor_options=["--nodelist=n4"])
    impatient.wait_reason("waits", "PENDING")
    mode.write_text("titles")
    impatient.until(lambda: len(impatient.runs("waits")) > 1, "the second run")
    mode.write_text("")
    slurm.resume("n4")
    impatient.wait_done("waits")
    wait_for(lambda: _is_over(slurm), 60, "the end of all")
    assert _begun(impatient) == {"waits": 1}


# scancel.


@pytest.mark.timeout(300)
def test_a_cancel_that_fails_is_repeated(impatient: Served, slurm: Cluster) -> None:
    """Scancel fails twice, for want of an answer or with a refusal: the jobs are ended all the same."""
    text = """
    for each; do job=$each; done
    why="Access denied"
    mkdir "$TEST/once-$job" 2> /dev/null && echo "scancel: error: Kill job error on job id $job: $why" >&2 && exit 1
    mkdir "$TEST/twice-$job" 2> /dev/null && echo "scancel: error: Unable to contact slurm controller" >&2 && exit 1
    exec "$real" "$@"
    """
    _instead_of(impatient, "scancel", text)
    impatient.start()
    impatient.drop("runs", "echo up; while :; do sleep 0.1; done", kill_grace="2s")
    impatient.says("runs", "up")
    assert impatient.spool("cancel", "runs").returncode == 0
    impatient.wait_done("runs")
    assert impatient.outcome("runs") == "cancelled"
    wait_for(lambda: _is_over(slurm), 60, "its end in Slurm")
