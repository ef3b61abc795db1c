"""A real machine that refuses processes, and records that a job has put something in the place of."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from served import Served
from wrapper_runs import NOBODY

EXECUTORS = ("process", "sh", "tmux")

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
    running = served.path("running", "bomb")
    running.write_text(running.read_text().replace('"1h"', '"1s"'))
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


def test_a_job_has_the_soft_limit_of_a_login(served: Served) -> None:
    """What the dispatcher takes for itself it keeps, and what its starter had counts only as far as it is hard."""
    served.start(prefix=["prlimit", "--nofile=512:4096"])
    served.completes("limits", "ulimit -S -n; ulimit -H -n")
    assert served.log("limits") == "1024\n4096\n"
    assert served.process is not None
    with open(f"/proc/{served.process.pid}/limits", encoding="ascii") as limits:
        assert next(line for line in limits if line.startswith("Max open files")).split()[3:5] == ["4096", "4096"]


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
