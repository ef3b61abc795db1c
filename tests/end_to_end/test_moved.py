"""A spool that is moved to another place of its file system while its jobs run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

from served import Served, alive
from support import wait_for

EXECUTORS = ("process", "sh", "tmux")

WORK = "echo begun >> {here}/ledger; until [ -e {here}/go ]; do sleep 0.02; done; exit {code}"


def _begin(served: Served, **codes: int) -> None:
    """Have a job for each exit code run."""
    served.serves("cpus = 4\nautostart = false\n")
    for name, code in codes.items():
        keys = {"stdout": str(served.root.parent / "out")} if code else {}
        served.begun(name, WORK.format(here=served.root.parent, code=code), **keys)
        served.until(lambda name=name: served.record(name, "status") == "running\n", "its command")  # type: ignore[misc]


FIRST = {
    "it leaves": Served.stop,
    "it is killed": Served.kill,
    "it finds its spool gone": lambda served: None,
}


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
