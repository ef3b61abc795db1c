"""What copies a run's outputs to its terminal."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from spool.core import layout
from spool.executors import first_program
from spool.executors.first_program import Output, Viewer
from spool.formats import wrapper


def test_an_output_is_read_from_where_it_ended(tmp_path: Path) -> None:
    """What a file had before is not shown; what comes is, once, also after the file was cut short.

    A file that is not there yet has nothing to show, and all of it is new when it is.
    """
    path = tmp_path / "log"
    path.write_bytes(b"old\n")
    output = Output(str(path))
    assert output.read() == b""
    with path.open("ab") as file:
        file.write(b"new\n\x00\xff")
    assert output.read() == b"new\n\x00\xff"
    assert output.read() == b""
    path.write_bytes(b"cut\n")
    assert output.read() == b"cut\n"
    output = Output(str(tmp_path / "later"))
    assert output.read() == b""
    (tmp_path / "later").write_bytes(b"all\n")
    assert output.read() == b"all\n"


def test_what_is_no_file_is_never_read(tmp_path: Path) -> None:
    """Of a FIFO or a device not a byte is taken: somebody else waits for them."""
    os.mkfifo(tmp_path / "fifo")
    keeper = os.open(tmp_path / "fifo", os.O_RDWR)
    os.write(keeper, b"for another\n")
    assert Output(str(tmp_path / "fifo")).read() == b""
    assert Output("/dev/zero").read() == b""
    assert os.read(keeper, 100) == b"for another\n"
    os.close(keeper)


def test_a_flood_is_passed_over(tmp_path: Path) -> None:
    """Of more than a person can read the end is shown, and that something is missing."""
    output = Output(str(tmp_path / "log"))
    (tmp_path / "log").write_bytes(b"x" * (5 << 20) + b"end\n")
    shown = output.read()
    assert shown.startswith(b"\n[%d bytes are not shown here]\n" % ((5 << 20) + 4 - (1 << 16)))
    assert shown.endswith(b"xend\n")
    assert len(shown) < 70_000


def test_the_viewer_ends_with_the_run_and_shows_all_of_it(tmp_path: Path) -> None:
    """When the wrapper closes its pipe, what is left in the outputs is shown first."""
    wrapper, theirs = os.pipe()
    screen, terminal = os.pipe2(os.O_NONBLOCK)
    outputs = [Output(str(tmp_path / name)) for name in ("out", "err")]
    (tmp_path / "out").write_bytes(b"out\n")
    (tmp_path / "err").write_bytes(b"err\n")
    os.close(theirs)
    Viewer(outputs, terminal, wrapper).show()
    assert os.read(screen, 100) == b"out\nerr\n"
    for fd in (wrapper, screen, terminal):
        os.close(fd)


def test_a_terminal_that_takes_nothing_does_not_keep_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the run has ended, the viewer gives a terminal that stands still a moment, and then it leaves."""
    monkeypatch.setattr(first_program, "_LAST_S", 0.05)
    wrapper, theirs = os.pipe()
    screen, terminal = os.pipe2(os.O_NONBLOCK)
    (tmp_path / "out").write_bytes(b"")
    output = Output(str(tmp_path / "out"))
    (tmp_path / "out").write_bytes(b"x" * 500_000)
    os.close(theirs)
    with pytest.raises(TimeoutError):
        Viewer([output], terminal, wrapper).show()
    for fd in (wrapper, screen, terminal):
        os.close(fd)


@pytest.mark.parametrize("which", [1, 2])
def test_a_viewer_that_cannot_be_started_leaves_the_job_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The first process of the terminal says what it was refused, and the wrapper does not begin."""
    fork, refused = os.fork, errno.EAGAIN
    forks = iter(range(1, 3))

    def sparing() -> int:
        if next(forks) == which:
            raise OSError(refused, os.strerror(refused))
        return fork()

    monkeypatch.setattr(os, "fork", sparing)
    (tmp_path / "launch").write_text(json.dumps({"outputs": []}))
    with pytest.raises(SystemExit) as left:
        first_program.main(str(tmp_path / "launch"), str(tmp_path / "run.sh"))
    assert left.value.code == wrapper.REFUSED
    said = (tmp_path / layout.REFUSED).read_text()
    assert os.strerror(errno.EAGAIN) in said


def test_a_run_whose_cpus_are_gone_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of the terminal says so, and the wrapper does not begin on other CPUs."""
    monkeypatch.setattr(first_program, "leave_viewer", lambda paths: None)
    own = os.sched_getaffinity(0)
    try:
        for cpus, why in (([65000], "Invalid argument"), ([min(own), 65000], "not all of them can be used")):
            (tmp_path / "launch").write_text(json.dumps({"outputs": [], "cpus": cpus}))
            with pytest.raises(SystemExit) as left:
                first_program.main(str(tmp_path / "launch"), str(tmp_path / "run.sh"))
            assert left.value.code == wrapper.REFUSED
            listed = ",".join(map(str, cpus))
            assert f" {listed}: {why}\n" in (tmp_path / layout.REFUSED).read_text()
    finally:
        os.sched_setaffinity(0, own)
