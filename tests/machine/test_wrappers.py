"""Which process is the wrapper of a run: what the process itself shows, not what a record says of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from spool.core.errors import InvalidRecord
from spool.formats import run_records
from spool.machine.processes import is_wrapper
from support import wait_for


class _Started(Protocol):
    def __call__(self, *words: str, run: str = "", output: Path | None = None) -> int: ...


@pytest.fixture
def started() -> Iterator[_Started]:
    """Give a function that starts a process, with the marks of a run as `SPOOL:JOB:RUN`, and returns its pid."""
    with ExitStack() as those:

        def start(*words: str, run: str = "", output: Path | None = None) -> int:
            marks = dict(zip(("SPOOL_DIR", "SPOOL_JOB", "SPOOL_RUN"), run.split(":"), strict=False)) if run else {}
            to = those.enter_context(output.open("wb")) if output is not None else subprocess.DEVNULL
            environment = {key: value for key, value in os.environ.items() if not key.startswith("SPOOL_")} | marks
            process = those.enter_context(subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=to))
            those.callback(process.kill)
            shown = Path(f"/proc/{process.pid}/environ")
            wait_for(shown.read_bytes, what="the new program, which has its environment a moment after its start")
            return process.pid

        yield start


def test_the_marks_in_its_environment_decide(tmp_path: Path, started: _Started) -> None:
    """The wrapper of a run is none of another job, run or spool; a stranger and this process are none at all."""
    root = os.path.realpath(tmp_path)
    pid = started("cat", run=f"{root}:a:1")
    assert is_wrapper(pid, root, "a", 1)
    assert not is_wrapper(pid, root, "a", 2)
    assert not is_wrapper(pid, root, "b", 1)
    assert not is_wrapper(pid, f"{root}/other", "a", 1)
    for pid in (started("cat"), os.getpid(), 1):
        assert not is_wrapper(pid, str(tmp_path), "a", 1)


def test_a_wrapper_that_holds_its_metadir_is_known_wherever_that_moved(tmp_path: Path, started: _Started) -> None:
    """Its script and its marks name the place where the spool was, and its output may be elsewhere."""
    root = os.path.realpath(tmp_path)
    metadir = Path(root, "before", "jobs", "a", "1")
    metadir.mkdir(parents=True)
    pid = started("sh", "-c", 'exec 8< "$1"; echo; cat', "sh", str(metadir), run=f"{root}/before:a:1")
    wait_for(lambda: os.path.exists(f"/proc/{pid}/fd/8"), what="what it holds")
    Path(root, "before").rename(Path(root, "after"))
    assert is_wrapper(pid, f"{root}/after", "a", 1)
    assert not is_wrapper(pid, f"{root}/after", "a", 2)


def test_a_wrapper_without_marks_is_known_by_script_output_or_child(tmp_path: Path, started: _Started) -> None:
    """One that was run by hand names the script or holds the log; one of an earlier version says that it waited."""
    root = os.path.realpath(tmp_path)
    metadir = Path(root, "jobs", "a", "1")
    metadir.mkdir(parents=True)
    (metadir / "run.sh").write_text("read -r line\n")
    assert is_wrapper(started("sh", f"{metadir}/run.sh"), root, "a", 1)
    assert is_wrapper(started("cat", output=metadir / "log"), root, "a", 1)
    waited = "read -r spool_told && . /proc/self/fd/8"
    assert is_wrapper(started("sh", "-c", waited, "sh", "ready"), root, "a", 1)
    with_child = ": spool_told; SPOOL_DIR=$1 SPOOL_JOB=a SPOOL_RUN=1 cat; :"
    pid = started("sh", "-c", with_child, "sh", root)
    wait_for(lambda: not is_wrapper(pid, root, "a", 2), what="the child, which has the marks of another run than that")
    assert is_wrapper(pid, root, "a", 1)


@pytest.mark.parametrize("pid", [0, 1 << 31, 10**18])
def test_a_pid_that_no_process_can_have_is_none(pid: int) -> None:
    """A `jid` with such a number cannot be understood."""
    with pytest.raises(InvalidRecord):
        run_records.parse_jid(f"{pid} 1 boot ns host\n".encode())


@pytest.mark.parametrize("number", [-1, -(1 << 63)])
def test_a_number_that_nothing_has_is_unknown(number: int) -> None:
    """In a grant it counts as absent: it neither frees nor takes room."""
    record = run_records.parse_grant(
        f'job = "a"\nrun = 1\ncpus = {number}\ngranted_at_ns = {number}\ngpu_indices = [{number}, 2]\n'.encode()
    )
    assert (record.grant.cpus, record.granted_at_ns, record.grant.gpu_indices) == (0, None, (2,))
