"""How the end of a run is proved, whoever died and wherever the spool moved; what follows; a machine that refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from served import Served, alive
from support import wait_for
from wrapper_runs import NOBODY

EXECUTORS = ("process", "sh", "tmux")


def test_a_dispatcher_may_be_started_by_a_job(served: Served, tmp_path: object) -> None:
    """A dispatcher of another spool that a job starts gives its jobs their own marks, and ends with that job."""
    inner = Served(served.root.parent / "inner")
    inner.drop("nested", "echo $SPOOL_JOB $SPOOL_DIR")
    served.drop(
        "outer",
        [sys.executable, "-m", "spool", "--spool", str(inner.root), "dispatch", "--until-idle"],
        env={"PYTHONPATH": served.environment["PYTHONPATH"]},
    )
    assert served.run() == 0
    assert served.result("outer")["outcome"] == "finished", served.log("outer")
    assert inner.log("nested") == f"nested {inner.root}\n"


def test_the_dispatcher_of_a_spool_may_be_started_by_a_job_of_it(served: Served) -> None:
    """A job that starts the very dispatcher of its spool: cancelling that job does not end the dispatcher."""
    served.drop("starter", "echo up; exec sleep 1000", kill_grace="1s")
    assert served.run("--once") == 0
    served.says("starter", "up")
    served.environment |= {"SPOOL_DIR": str(served.root), "SPOOL_JOB": "starter", "SPOOL_RUN": "1"}
    served.start()
    served.cancels("starter")
    served.looked()
    assert served.lives()


# Retries.


def test_a_retry_reads_its_file_anew(shared: Served) -> None:
    """What was edited in running/ counts for the next try."""
    path = shared.path("running", "mended")
    shared.up("mended", "echo up; until [ -e mend-go ]; do sleep 0.02; done; exit 1", retry={"max": 5})
    path.write_bytes(shared.text("echo mended"))
    (shared.root.parent / "mend-go").touch()
    shared.wait_done("mended")
    assert shared.log("mended", 2) == "mended\n"
    assert shared.runs("mended") == [1, 2]


def test_a_new_submission_begins_its_tries_anew(shared: Served) -> None:
    """`mv done/x queued/` after all tries: attempt 1 again, with the next run number."""
    shared.completes("renewed", "echo $SPOOL_ATTEMPT; exit 1", retry={"max": 1})
    shared.move("renewed", "done", "queued")
    wait_for(lambda: shared.outcome("renewed", 4))
    shared.wait_done("renewed")
    assert [shared.log("renewed", run).strip() for run in (1, 2, 3, 4)] == ["1", "2", "1", "2"]


def test_why_a_job_never_ran_stands_in_its_log(shared: Served) -> None:
    """Of one that could not start what was in the way, and of one that ended before it began what ended it.

    The first kind has failed with the usual code, and its reason says in words what was wrong.
    """
    shared.drop("nowhere", "true", workdir="/nonexistent/dir")
    shared.drop("unprepared", "echo never", prolog="echo prepares; exit 3")
    shared.drop("not-found", ["no-such-program-xyz", "1"])
    shared.drop("after", "true", depends_on="nowhere")
    shared.drop("late", "true", cpus=9999, scheduling_timeout="1s")
    shared.wait_done("nowhere", "unprepared", "not-found", "after", "late")
    told = {"nowhere": "workdir: /nonexistent/dir", "unprepared": "prolog", "after": "nowhere", "late": "unschedulable"}
    assert {name: shared.log(name).splitlines()[-1] for name in told if told[name] not in shared.log(name)} == {}
    for name in ("nowhere", "unprepared", "after", "late"):
        said = shared.spool("log", name)
        assert (said.returncode, said.stdout) == (0, shared.log(name))
    shared.completes("unheard", "true", stdout="/proc/nowhere/out")
    assert "stdout: /proc/nowhere/out" in shared.spool("log", "unheard").stderr
    told = {"nowhere": (125, "/nonexistent/dir: no such directory"), "unheard": (125, "/proc/nowhere/out")}
    told |= {"not-found": (127, "no-such-program-xyz: not found in PATH"), "unprepared": (3, "ended with exit code 3")}
    for name, (code, why) in told.items():
        result = shared.result(name)
        assert (result["outcome"], result["exit_code"]) == ("failed", code)
        assert result["reason"].startswith("could not start: ")
        assert why in result["reason"]
    assert "never" not in shared.log("unprepared")


def test_a_prolog_that_is_cancelled_has_not_failed(shared: Served) -> None:
    """Its log says nothing of the exit code with which it was stopped."""
    shared.drop("called-off", "true", prolog="echo prepares; exec sleep 1000")
    shared.says("called-off", "prepares")
    shared.spool("cancel", "called-off")
    shared.wait_done("called-off")
    assert shared.log("called-off") == "prepares\n"


@pytest.mark.executors("sh")
def test_a_time_limit_counts_from_the_begin_of_the_command(live: Served) -> None:
    """However long the wrapper needs before that; from then on the limit is in force."""
    fifos = {name: str(live.root.parent / name) for name in ("short", "long")}
    for name, command in (("short", "true"), ("long", "sleep 1000")):
        os.mkfifo(fifos[name])  # whoever opens it waits for a reader
        live.begun(name, command, stdout=fifos[name], time_limit="2s", cpus=0)
    live.completes("other", "sleep 1000", time_limit="2s", cpus=0)
    readers = [os.open(fifo, os.O_RDONLY | os.O_NONBLOCK) for fifo in fifos.values()]
    live.wait_done("short", "long")
    for reader in readers:
        os.close(reader)
    assert [live.outcome(name) for name in ("other", "short", "long")] == ["timeout", "finished", "timeout"]


# Root has no limit on its processes. Somebody has, who may read what only root may: the interpreter may lie there.
_SOMEBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
_SOMEBODY += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
_TAKES_ALL = "import os, time\ntry:\n    while os.fork(): pass\n    time.sleep(99)\nexcept OSError:\n"
_TAKES_ALL += "    print('full', flush=True)\n    time.sleep(99)\n"


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="takes root and setpriv")
def test_a_fork_bomb_fails_no_other_job_and_is_stopped_at_its_limit(served: Served) -> None:
    """A job that takes every process leaves the others queued with that reason, uncounted, and is ended by no other."""
    (served.root / "config.toml").write_text('cpus = 8\nexecutor = "process"\naccept_from = ["root"]\n')
    for path in (served.root, *served.root.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    served.start(prefix=[*_SOMEBODY, "prlimit", "--nproc=40"])
    served.drop("bomb", [sys.executable, "-c", _TAKES_ALL], time_limit="1h", kill_grace="200ms", workdir="/")
    served.says("bomb", "full")
    others = [f"other-{number}" for number in range(4)]
    for name in others:
        served.drop(name, ["sleep", "0"], workdir="/", requeue=False)
    assert served.wait_reason("other-3", "refused").startswith("refused: ")
    served.shorten("bomb")
    assert served.wait_outcome("bomb") == "timeout"
    served.wait_done(*others)
    assert [line["outcome"] for line in served.history()] == ["timeout"] + 4 * ["finished"]
    assert not any(line.get("requeues") or line.get("attempt", 1) > 1 for line in served.history())


@pytest.mark.parametrize("make", ["mkdir $SPOOL_METADIR/rc", "mkfifo $SPOOL_METADIR/rc", "ln -s x $SPOOL_METADIR/rc"])
def test_a_job_that_leaves_no_place_for_its_exit_code_ends_at_its_limit(shared: Served, make: str) -> None:
    """The wrapper that cannot write it is stopped like any other, and the outcome is why it was."""
    name = make.split()[0]
    shared.drop(name, f"{make}; exit 7", time_limit="500ms")
    assert shared.wait_done(name)["outcome"] == "timeout"


@pytest.mark.executors("process", "sh")
@pytest.mark.parametrize("words", ["sh: 1: Cannot fork", "bash: fork: Resource temporarily unavailable"])
def test_a_shell_that_could_not_fork_is_told_as_that_and_has_failed(served: Served, words: str) -> None:
    """A text whose shell ends for want of a process may have done anything: it has failed, and its reason says why."""
    served.drop("short", f"echo '{words}' >&2; exit 2")
    served.drop("other", f"echo '{words}' >&2; echo on; exit 2")
    served.start()
    served.wait_done("short", "other")
    ends = [served.result(name) for name in ("short", "other")]
    assert [end["outcome"] for end in ends if end is not None] == ["failed", "failed"]
    said = "exit code 2: its shell says that the machine refused it a process"
    assert [end["reason"] for end in ends if end is not None] == [said, "exit code 2"]


@pytest.mark.skipif(os.path.basename(os.path.realpath("/bin/sh")) != "dash", reason="takes a /bin/sh that is dash")
@pytest.mark.executors("process")
def test_a_text_for_bash_that_sh_has_run_is_told_as_that(served: Served) -> None:
    """The reason names the option that has bash run it; what sh itself lacks, and what a program says, is not that."""
    texts = ["a=(1 2)", "[[ 1 = 1 ]]", "source /dev/null", "set -o pipefail", "cat <<< x", "echo ${a^^}"]
    texts += ["for ((i = 0; i < 3; i++)); do echo; done", "[ a == b ]"]
    others = ["nosuch", "echo 'sh: 1: source: not found'; exit 2", "if", "exit 127"]
    names = [f"text-{number}" for number in range(len(texts + others))]
    for name, text in zip(names, texts + others, strict=True):
        served.drop(name, text)
    served.start()
    served.wait_done(*names)
    told = [end["reason"].endswith("--set shell=/bin/bash") for end in map(served.result, names) if end is not None]
    assert told == [True] * len(texts) + [False] * len(others)


WORK = "echo begun >> {here}/ledger; until [ -e {here}/go ]; do sleep 0.02; done; exit {code}"


def _begin(served: Served, **codes: int) -> None:
    """Have a job for each exit code run."""
    served.serves("cpus = 4\nautostart = false\n")
    for name, code in codes.items():
        keys = {"stdout": str(served.root.parent / "out")} if code else {}
        served.begun(name, WORK.format(here=served.root.parent, code=code), **keys)
        served.until(lambda name=name: served.record(name, "status") == "running\n", "its command")  # type: ignore[misc]


FIRST = {"it leaves": Served.stop, "it is killed": Served.kill, "it finds its spool gone": lambda served: None}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("ends", ["before", "after"])
def test_a_spool_that_is_moved_runs_no_job_again(served: Served, first: Callable[[Served], None], ends: str) -> None:
    """Jobs that end before or after the next dispatcher begins have ended with their exit code, in one run each."""
    _begin(served, good=0, bad=3)
    first(served)
    here = served.root.parent
    old, served.root = served.root, here / "elsewhere"
    old.rename(served.root)
    served.environment["SPOOL_DIR"] = str(served.root)
    if served.process is not None:
        assert served.process.wait(60) != 0
        served.process = None
    rcs = [served.root / "jobs" / name / "1" / "rc" for name in ("good", "bad")]
    if ends == "before":
        (here / "go").touch()
        wait_for(lambda: all(rc.exists() for rc in rcs), what="their ends")
    served.start()
    (here / "go").touch()
    served.wait_done("good", "bad")
    results = [served.result(name) for name in ("good", "bad")]
    assert [(each["outcome"], each["exit_code"]) for each in results if each] == [("finished", 0), ("failed", 3)]
    assert [served.runs("good"), served.runs("bad")] == [[1], [1]]
    assert (here / "ledger").read_text() == "begun\n" * 2
    assert not os.path.lexists(old)


@pytest.mark.parametrize("stdout", [None, "out"])
def test_a_job_is_cancelled_after_a_move(served: Served, stdout: str | None) -> None:
    """The next dispatcher knows the processes of a run that began at the old place, wherever its output goes."""
    here = served.root.parent
    served.start()
    served.drop("long", "sleep 1000 & echo $!; wait", **({"stdout": str(here / stdout)} if stdout else {}))
    pid = served.pid("long")
    served.until(lambda: served.record("long", "status") == "running\n", "its command")
    served.kill()
    served.root = served.root.rename(here / "elsewhere")
    output = here / stdout if stdout else served.root / "jobs" / "long" / "1" / "log"
    child = int(wait_for(lambda: output.read_text(), what="its output"))
    served.environment["SPOOL_DIR"] = str(served.root)
    served.start()
    assert alive(pid)
    assert served.places("long") == ["running"]
    assert served.spool("cancel", "long").returncode == 0
    served.wait_done("long")
    assert (served.outcome("long"), served.runs("long")) == ("cancelled", [1])
    assert not alive(child)


@pytest.mark.parametrize("requeue", [True, False])
def test_a_copy_of_a_spool_holds_the_runs_of_the_original(served: Served, requeue: bool) -> None:
    """They run again in the copy once they are released, and end in the original as if there were no copy."""
    here, original = served.root.parent, served.root
    served.start()
    served.begun("long", WORK.format(here=here, code=0), requeue=requeue)
    served.until(lambda: (here / "ledger").exists(), "its command")
    subprocess.run(["cp", "-a", original, here / "copy"], check=True)
    with Served(here / "copy", executor=served.executor) as copy:
        assert f"began in {original}" in copy.spool("ls").stdout  # without a dispatcher
        copy.start()
        copy.wait_place("long", "held")
        copy.wait_reason("long", f"began in {original}")
        for command in (("ls",), ("info",), ("why", "long")):
            assert f"began in {original}" in copy.spool(*command).stdout
        copy.restart()
        copy.wait_reason("long", f"began in {original}")
        assert (here / "ledger").read_text() == "begun\n"
        (here / "go").touch()
        served.wait_done("long")
        assert (served.outcome("long"), served.runs("long")) == ("finished", [1])
        assert copy.spool("release", "long").returncode == 0
        copy.wait_done("long")
        assert [copy.outcome("long", run) for run in (1, 2)] == ["lost", "finished"]
    assert (here / "ledger").read_text() == "begun\n" * 2


def test_a_copy_does_not_take_the_start_of_a_run_for_its_own(served: Served) -> None:
    """A run whose wrapper had not registered when the spool was copied may have begun in the original since."""
    here, original = served.root.parent, served.root
    served.start()
    served.begun("long", WORK.format(here=here, code=0))
    subprocess.run(["cp", "-a", original, here / "copy"], check=True)
    for record in ("jid", "status", "log"):
        (here / "copy" / "jobs" / "long" / "1" / record).unlink(missing_ok=True)
    with Served(here / "copy", executor=served.executor) as copy:
        copy.start()
        copy.wait_place("long", "held")
        assert copy.runs("long") == [1]
    (here / "go").touch()
    served.wait_done("long")
