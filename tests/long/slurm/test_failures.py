"""What a cluster, its commands and the dispatcher do at the wrong moment: every run begins once, and none is lost."""

from __future__ import annotations

import json
import os
import pwd
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from long.slurm.cluster import Cluster, path_with
from long.slurm.conftest import spool_on_slurm
from served import Served, alive, pids_in
from spool.query.rows import in_words
from support import ROOT, wait_for

KILLS = int(os.environ.get("SLURM_KILLS", "4"))
AWAY_S = float(os.environ.get("SLURM_AWAY_S", "2"))
SEED = int(os.environ.get("SLURM_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)

# Each line is one write, so that their order is that of what happened.
LEDGER = 'echo "B $SPOOL_JOB $SPOOL_RUN" >> ledger; {command}; echo "E $SPOOL_JOB $SPOOL_RUN" >> ledger'


def _job(command: str) -> str:
    return LEDGER.format(command=command)


def _ledger(served: Served) -> list[list[str]]:
    path = served.root.parent / "ledger"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def _check_once(served: Served, names: list[str]) -> None:
    """Assert that each job has begun once, in one run, and finished."""
    begun = Counter((name, run) for event, name, run in _ledger(served) if event == "B")
    assert [key for key, times in begun.items() if times > 1] == []
    assert sorted(name for name, _ in begun) == sorted(names)
    lines = [line for line in served.history() if line["job"] in set(names)]
    assert sorted((line["job"], line["outcome"]) for line in lines) == sorted((name, "finished") for name in names)


def _instead_of(served: Served, program: str, text: str) -> None:
    """Put a script before one of Slurm's programs, for dispatchers that start from now on; `$real` is the program."""
    served.environment["PATH"] = path_with(served.root.parent / "before", program, text)


def _states(slurm: Cluster) -> Counter[str]:
    return Counter(job["state"] for job in slurm.jobs())


def _is_over(slurm: Cluster) -> bool:
    return not _states(slurm).keys() & {"PENDING", "RUNNING", "COMPLETING"}


# The dispatcher.


def test_a_new_dispatcher_takes_over_what_waits_what_runs_and_what_has_ended(unserved: Served, slurm: Cluster) -> None:
    """Jobs outlive the dispatcher: it is killed, and the next one knows them all and starts none again."""
    unserved.start()
    slurm.set_nodes("drain", "n4")
    unserved.drop("waits", _job("true"), executor_options=["--nodelist=n4"])
    unserved.drop("runs", _job("until [ -e go ]; do sleep 0.1; done"))
    unserved.drop("ends", _job("until [ -e end ]; do sleep 0.1; done"))
    unserved.until(lambda: _states(slurm)["RUNNING"] == 2 and _states(slurm)["PENDING"] == 1, "all to be in Slurm")
    unserved.kill()
    (unserved.root.parent / "end").touch()
    wait_for(lambda: ["E", "ends", "1"] in _ledger(unserved), 60)
    unserved.start()
    unserved.wait_done("ends")
    assert unserved.places("runs") == unserved.places("waits") == ["running"]
    (unserved.root.parent / "go").touch()
    slurm.resume("n4")
    unserved.wait_done("runs", "waits")
    _check_once(unserved, ["waits", "runs", "ends"])


def test_a_submission_whose_answer_is_lost_is_found_again(unserved: Served, slurm: Cluster) -> None:
    """The job is in Slurm but sbatch hangs, the dispatcher is killed: the next one finds the job by its comment."""
    # It ends with the test and no sooner: the end of a dispatcher must not be its end.
    _instead_of(unserved, "sbatch", '"$real" "$@"; until [ -e "$SPOOL_TEST_OVER" ]; do sleep 0.1; done')
    over = unserved.root.parent / "over"
    unserved.environment["SPOOL_TEST_OVER"] = str(over)
    slurm.set_nodes("drain", "n4")
    try:
        unserved.start()
        unserved.drop("once", _job("true"), executor_options=["--nodelist=n4"])
        unserved.until(lambda: _states(slurm)["PENDING"] == 1, "it to wait in Slurm")
        unserved.kill()
        (unserved.root / "jobs" / "once" / "1" / "engine").unlink(missing_ok=True)  # a look may have found it by then
        unserved.start()
        unserved.until(lambda: unserved.record("once", "engine"), "it to be found")
        slurm.resume("n4")
        unserved.wait_done("once")
    finally:
        over.touch()
    _check_once(unserved, ["once"])
    assert len([job for job in slurm.jobs() if job["name"] == "once"]) == 1


def test_a_submission_that_arrives_twice_runs_once_and_is_cancelled_where_it_runs(
    unserved: Served, slurm: Cluster
) -> None:
    """Sbatch submits again what was not answered: the second job leaves at once, and the first one is the run's."""
    first = '"$real" "$@" > /dev/null; until "${real%sbatch}squeue" -h -o %T | grep -q RUNNING; do sleep 0.1; done'
    _instead_of(unserved, "sbatch", f'{first}; exec "$real" "$@"')
    unserved.start()
    unserved.drop("twice", _job("trap 'echo told; exit 9' TERM; echo up; while :; do sleep 0.1; done"))
    unserved.says("twice", "up")
    ended = ("twice", "FAILED")
    unserved.until(lambda: ended in [(job["name"], job["state"]) for job in slurm.jobs()], "the second to leave")
    unserved.until(lambda: (unserved.record("twice", "engine") or "").split()[2:], "the id")
    unserved.looked()
    assert unserved.places("twice") == ["running"]
    assert unserved.spool("cancel", "twice").returncode == 0
    unserved.wait_done("twice")
    assert (unserved.outcome("twice"), unserved.log("twice")) == ("cancelled", "up\ntold\n")
    assert _states(slurm)["RUNNING"] == 0
    assert [event for event, *_ in _ledger(unserved)] == ["B"]


def test_what_was_never_submitted_waits_again(unserved: Served, slurm: Cluster) -> None:
    """The dispatcher is killed before sbatch has reached Slurm: the run is void, and the next one is not a retry."""
    _instead_of(unserved, "sbatch", "kill -KILL $$")
    unserved.start()
    unserved.drop("late", _job("true"))
    wait_for(lambda: unserved.runs("late"), 60)
    unserved.kill()
    (unserved.root.parent / "before" / "sbatch").unlink()
    unserved.start()
    result = unserved.wait_done("late")
    assert (result["outcome"], result["attempt"]) == ("finished", 1)
    first = unserved.runs("late")[0]
    assert (unserved.record("late", "jid", first) or "void\n") == "void\n"
    assert len([event for event, *_ in _ledger(unserved) if event == "B"]) == 1


def test_a_submission_that_arrives_after_it_was_given_up_never_begins(impatient: Served, slurm: Cluster) -> None:
    """Sbatch hangs or fails, the job waits again and runs; then the first submission arrives in Slurm after all."""
    arrives, names = impatient.root.parent / "arrives", ["hangs", "fails"]
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
    for name in names:
        impatient.drop(name, _job("true"))
    impatient.wait_done(*names)
    for name in names:
        assert (impatient.record(name, "jid", 1), impatient.outcome(name, 2)) == ("void\n", "finished")
        assert (impatient.result(name, 2) or {})["attempt"] == 1
    arrives.touch()
    for name in names:
        wait_for(lambda name=name: [job["name"] for job in slurm.jobs()].count(name) == 2, 60, "the late job")
    wait_for(lambda: _is_over(slurm), 60, "the end of all")
    impatient.looked()
    _check_once(impatient, names)


def test_a_job_that_waits_and_is_left_out_of_two_answers_runs_once(impatient: Served, slurm: Cluster) -> None:
    """Squeue says that it is gone: it waits again, and what Slurm has of it after all never begins."""
    hidden = impatient.root.parent / "hidden"
    _instead_of(impatient, "squeue", f'if [ -e {hidden} ]; then "$real" "$@" | head -n 1; else exec "$real" "$@"; fi')
    slurm.set_nodes("drain", "n4")
    impatient.start()
    impatient.drop("waits", _job("true"), executor_options=["--nodelist=n4"])
    impatient.wait_reason("waits", "PENDING")
    hidden.touch()
    impatient.until(lambda: len(impatient.runs("waits")) > 1, "the second run")
    hidden.unlink()
    slurm.resume("n4")
    impatient.wait_done("waits")
    wait_for(lambda: _is_over(slurm), 60, "the end of all")
    _check_once(impatient, ["waits"])


# Late, or failed before or after Slurm has the job; an answer of squeue may fail or break off.
_ROUGH_SBATCH = """
n=$(od -An -N1 -tu1 /dev/urandom) && sleep 0.$((n % 4))
lost="sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
case $((n % 16)) in
0) echo "$lost" >&2; exit 1 ;;
1) "$real" "$@" > /dev/null; echo "$lost" >&2; exit 1 ;;
2) kill -s KILL $$ ;;
esac
"$real" "$@"; code=$?; sleep 0.$((n % 3)); exit $code
"""
_ROUGH_SQUEUE = """
case $(($(od -An -N1 -tu1 /dev/urandom) % 12)) in
0) echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1 ;;
1) "$real" "$@" | head -c 700 ;;
*) exec "$real" "$@" ;;
esac
"""


@pytest.mark.timeout(600)
def test_jobs_survive_the_deaths_of_dispatchers_on_a_rough_day(unserved: Served, slurm: Cluster) -> None:
    """Dispatchers die while Slurm's commands are late, fail and lie: each job, and task of an array, runs once."""
    print(f"SLURM_SEED={SEED}")
    chance = random.Random(SEED)
    _instead_of(unserved, "sbatch", _ROUGH_SBATCH)
    _instead_of(unserved, "squeue", _ROUGH_SQUEUE)
    names = [f"job{number:03d}" for number in range(3 * KILLS)]
    for number, name in enumerate(names):
        unserved.drop(name, _job(f"sleep 0.{number % 5}"))
    for name, limit in (("all", ""), ("some", "%7")):
        unserved.drop(name, _job("sleep 0.$((SPOOL_ARRAY_INDEX % 5))"), array=f"0-19{limit}")
    for _ in range(KILLS):
        unserved.start()
        time.sleep(0.2 + chance.random())
        unserved.kill()
    unserved.start()
    unserved.patience = 300
    unserved.wait_done(*names, "all", "some")
    _check_once(unserved, [*names, *(f"{name}_{index}" for name in ("all", "some") for index in range(20))])


@pytest.mark.timeout(900)
def test_arrays_survive_the_deaths_of_dispatchers_controllers_and_nodes(impatient: Served, slurm: Cluster) -> None:
    """Each task ends well once; one that began twice had lost its first run, and never lived beside it."""
    print(f"SLURM_SEED={SEED}")
    chance = random.Random(SEED)
    names = [f"sweep{number}" for number in range(3)]
    for number, name in enumerate(names):
        percent = "%9" if number == 1 else ""
        impatient.drop(name, _job(f"sleep {number}.$((SPOOL_ARRAY_INDEX % 7))"), array=f"0-19{percent}")
    impatient.start()
    for _ in range(KILLS):
        time.sleep(0.3 + 2 * chance.random())
        victim = chance.choice(["dispatcher", "controller", "node", "both"])
        if victim in ("dispatcher", "both"):
            impatient.kill()
        if victim in ("controller", "both"):
            slurm.kill_controller()
            time.sleep(2 * chance.random())
            slurm.start_controller()
        if victim == "node":
            node = chance.choice(["n1", "n2"])
            slurm.kill_node(node)
            time.sleep(2 * chance.random())
            slurm.start_node(node)
        if victim in ("dispatcher", "both"):
            impatient.start()
    impatient.patience = 600
    impatient.wait_done(*names)
    ledger = _ledger(impatient)
    begun = Counter((name, run) for event, name, run in ledger if event == "B")
    assert [key for key, times in begun.items() if times > 1] == [], f"SLURM_SEED={SEED}"
    ended = Counter(name for event, name, _ in ledger if event == "E")
    tasks = {f"{name}_{index}" for name in names for index in range(20)}
    odd = [line for line in impatient.history() if line["job"] in tasks and ended[str(line["job"])] != 1]
    assert ended == dict.fromkeys(tasks, 1), f"SLURM_SEED={SEED}: {odd}"
    last = {(line["job"], line["run"]): line["outcome"] for line in impatient.history()}
    for task in ended:
        runs = [run for name, run in begun if name == task]
        assert [last[task, int(run)] for run in runs] == ["lost"] * (len(runs) - 1) + ["finished"], f"SLURM_SEED={SEED}"


# The controller and its memory.


@pytest.mark.timeout(300)
def test_jobs_finish_while_the_controller_is_away(impatient: Served, slurm: Cluster) -> None:
    """The controller is killed: jobs that run go on to their ends, nothing is concluded, nothing is submitted twice."""
    served = impatient.start()
    names = [f"job{number}" for number in range(6)]
    for name in names:
        served.drop(name, _job("until [ -e go ]; do sleep 0.1; done"))
    served.until(lambda: _states(slurm)["RUNNING"] == 6, "all to run")
    slurm.kill_controller()
    try:
        (served.root.parent / "go").touch()
        served.drop("new", _job("true"))
        served.until(lambda: any("Slurm has not answered" in each for each in _problems(served)), "it to be told")
        served.drop("late", _job("true"))
        served.until(lambda: "late" in served.state()["jobs"], "it to be seen")
        told = served.state()["jobs"]["late"]["reason"]
        assert "Slurm has not answered since" in told
        said = json.loads(served.spool("why", "late", "--json").stdout)["reasons"]
        assert [each["text"] for each in said] == [in_words(told, time.time_ns())]
        time.sleep(AWAY_S)
        assert {event["outcome"] for event in served.history()} <= {"finished"}
        assert served.outcome("new") is None
    finally:
        slurm.start_controller()
    served.wait_done(*names, "new", "late")
    _check_once(served, [*names, "new", "late"])


def _problems(served: Served) -> list[str]:
    state = served.state()
    reasons = [str(job.get("reason", "")) for job in state["jobs"].values()]
    return [*map(str, state["problems"]), *reasons]


@pytest.mark.timeout(300)
def test_ends_are_told_apart_when_slurm_has_forgotten_them(unserved: Served, slurm: Cluster) -> None:
    """When no dispatcher lived until Slurm had forgotten the jobs, what each left says how it ended.

    What left nothing, because it was cancelled before it began, is handed over again and runs once.
    """
    slurm.forget_after(2)
    slurm.set_nodes("drain", "n4")
    unserved.start()
    until_killed = "echo up; until [ -e go ]; do sleep 0.1; done"
    unserved.drop("well", until_killed)
    unserved.drop("badly", f"{until_killed}; exit 5")
    unserved.drop("theirs", "echo up; while :; do sleep 0.1; done")
    unserved.drop("waits", _job("true"), executor_options=["--nodelist=n4"])
    for name in ("well", "badly", "theirs"):
        unserved.says(name, "up")
    unserved.wait_reason("waits", "PENDING")
    unserved.kill()
    (unserved.root.parent / "go").touch()
    for name in ("theirs", "waits"):
        slurm.command("scancel", f"--name={name}")
    wait_for(lambda: not slurm.jobs(), 120, "Slurm to forget all")
    slurm.resume("n4")
    unserved.start()
    unserved.wait_done("well", "badly", "theirs", "waits")
    outcomes = {name: unserved.outcome(name) for name in ("well", "badly", "theirs")}
    assert outcomes == {"well": "finished", "badly": "failed", "theirs": "cancelled"}
    assert [unserved.runs(name) for name in outcomes] == [[1], [1], [1]]
    run = unserved.runs("waits")[-1]
    assert (unserved.outcome("waits", run), unserved.record("waits", "jid", 1)) == ("finished", "void\n")
    assert _ledger(unserved) == [["B", "waits", str(run)], ["E", "waits", str(run)]]


# Nodes.


@pytest.mark.timeout(300)
def test_a_job_of_a_node_that_went_away_runs_again_when_the_node_is_back(served: Served, slurm: Cluster) -> None:
    """A node loses its slurmd and is set down, but the command lives on: no second run begins before it is gone."""
    command = 'echo $$; [ "$SPOOL_RUN" = 1 ] || exit 0; while :; do sleep 0.1; done'
    served.drop("moved", command, executor_options=["--nodelist=n2"])
    pid = pids_in(served.says("moved", "\n"))[0]
    slurm.kill_node("n2")
    slurm.set_nodes("down", "n2")
    served.until(lambda: [j for j in slurm.jobs() if j["name"] == "moved" and j["state"] == "NODE_FAIL"], "NODE_FAIL")
    for _ in range(3):
        served.looked()
    assert alive(pid)
    assert served.runs("moved") == [1]
    assert served.outcome("moved") is None
    slurm.start_node("n2")
    served.until(lambda: served.runs("moved") == [1, 2], "the second run")
    assert not alive(pid)
    slurm.resume("n2")
    served.wait_done("moved")
    assert [served.outcome("moved", run) for run in (1, 2)] == ["lost", "finished"]


# Spools.


def _another_user() -> list[str]:
    """Return what runs a command as a user who is not root; nothing where that one cannot run this Python."""
    user = pwd.getpwnam("games")
    become = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    says = "import spool, subprocess, sys; sys.exit(subprocess.call([sys.executable, '-V']))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [*become, sys.executable, "-c", says]
    tried = subprocess.run(command, env=environment, capture_output=True, check=False)
    return become if tried.returncode == 0 else []


def test_two_spools_have_jobs_of_the_same_name(served: Served, slurm: Cluster) -> None:
    """The second is another user's, if one can run spool: each runs as its user, and a cancel ends one of them."""
    become = _another_user()
    home = Path(tempfile.mkdtemp(prefix="spool-theirs-", dir="/tmp"))
    try:
        with spool_on_slurm(home / "spool") as theirs:
            command = "id -un; until [ -e go ]; do sleep 0.1; done"
            if become:
                for path in [home, *home.rglob("*")]:
                    shutil.chown(path, "games", "games")
            theirs.start(prefix=become)
            served.drop("same", command)
            job = theirs.drop("same", command)
            if become:
                shutil.chown(job, "games", "games")
            assert [spool.says("same", "\n") for spool in (served, theirs)] == [
                "root\n",
                "games\n" if become else "root\n",
            ]
            assert served.record("same", "engine") != theirs.record("same", "engine")
            assert served.spool("cancel", "same").returncode == 0
            served.wait_done("same")
            assert theirs.places("same") == ["running"]
            (home / "go").touch()
            theirs.wait_done("same")
            assert (served.outcome("same"), theirs.outcome("same")) == ("cancelled", "finished")
    finally:
        shutil.rmtree(home)


def test_a_spool_that_is_moved_runs_no_job_twice(unserved: Served, slurm: Cluster) -> None:
    """What runs leaves its exit code wherever its directory is; what waits fails at the old place and is sent again."""
    slurm.set_nodes("drain", "n4")
    unserved.start()
    unserved.drop("waits", _job("true"), executor_options=["--nodelist=n4"])
    for name, code in (("good", 0), ("bad", 3)):
        unserved.drop(name, LEDGER.format(command=f"until [ -e go ]; do sleep 0.1; done; exit {code}"))
    unserved.until(lambda: len(_ledger(unserved)) == 2, "both to run")
    unserved.wait_reason("waits", "PENDING")
    unserved.kill()
    old, unserved.root = unserved.root, unserved.root.parent / "elsewhere"
    old.rename(unserved.root)
    unserved.environment["SPOOL_DIR"] = str(unserved.root)
    (unserved.root.parent / "go").touch()
    unserved.start()
    slurm.resume("n4")
    unserved.wait_done("good", "bad", "waits")
    results = [unserved.result(name) for name in ("good", "bad")]
    assert [(each["outcome"], each["exit_code"]) for each in results if each] == [("finished", 0), ("failed", 3)]
    assert [unserved.runs("good"), unserved.runs("bad")] == [[1], [1]]
    assert unserved.outcome("waits", unserved.runs("waits")[-1]) == "finished"
    begun = sorted(name for event, name, _ in _ledger(unserved) if event == "B")
    assert begun == ["bad", "good", "waits"]
    assert not old.exists()
