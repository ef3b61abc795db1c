"""The walls of conftest.py hold: shown by a small test run of its own, whose tests break out in every way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT, processes

# No other run of these tests on the machine has the same.
CHILD, DAEMON = f"61.{os.getpid():07}", f"62.{os.getpid():07}"
OUTBREAKS = """
import os
import subprocess
from pathlib import Path

REAL = {real!r}


def test_leaves_a_child():
    subprocess.Popen(["sleep", "{child}"])
    wait_for_sleep(b"{child}")


def test_leaves_a_daemon():
    subprocess.run(["/bin/sh", "-c", "setsid sleep {daemon} < /dev/null > /dev/null 2>&1 &"], check=True)
    wait_for_sleep(b"{daemon}")


def wait_for_sleep(seconds):
    while not any(command == b"sleep\\0" + seconds + b"\\0" for command in commands()):
        pass  # until it is the program that it becomes, and setsid no more: while it changes it has no environment


def commands():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            pass


def test_looks_into_the_real_spool():
    os.listdir(REAL)


def test_writes_into_the_real_spool_and_swallows_errors():
    try:
        (Path(REAL) / "queued" / "x.toml").write_text("")
    except Exception:
        pass


def test_lets_a_child_make_a_real_spool():
    subprocess.run(["mkdir", REAL], check=True)


def test_good_a_home_of_its_own():
    assert os.path.expanduser("~/.spool") != REAL
    os.mkdir(os.path.expanduser("~/.spool"))


def test_good_the_home_is_another_each_time():
    assert not os.path.exists(os.path.expanduser("~/.spool"))


def test_good_nothing_of_the_users_environment():
    assert [n for n in os.environ if n.startswith("SPOOL_") or n in ("TMUX", "XDG_RUNTIME_DIR")] == []


def test_good_a_fresh_spool(spool_root):
    assert os.environ["SPOOL_DIR"] == str(spool_root)
    assert sorted(os.listdir(spool_root)) == [".tmp", "done", "held", "jobs", "queued", "reservations", "running"]


def test_good_a_child_that_is_waited_for(tmp_path):
    subprocess.run(["true"], check=True)
"""


@pytest.fixture(scope="module", params=[[], ["-n", "1"]], ids=["", "in a worker"])
def outcome(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    """Run the outbreaks behind a copy of the walls, with a made-up `$HOME`, and return what pytest said."""
    place = tmp_path_factory.mktemp("walls")
    for name in ("conftest.py", "support.py"):
        shutil.copy(ROOT / "tests" / name, place)
    conftest, real = place / "conftest.py", place / "real"
    real.mkdir()
    conftest.write_text(conftest.read_text().replace("_LEAVE_S = ", "_LEAVE_S = 0 * "))
    outbreaks = OUTBREAKS.replace("{real!r}", repr(str(real / ".spool")))
    (place / "test_outbreaks.py").write_text(outbreaks.replace("{child}", CHILD).replace("{daemon}", DAEMON))
    # The plugins that other packages bring are none of ours, and some of old packages cannot be loaded any more.
    options = ["-rA", "--tb=line", "-p", "no:cacheprovider", "-p", "no:libtmux", "-W", "ignore"]
    # Nor does this run remove what others have left in the directory that they all have else.
    options += [f"--basetemp={place / 'base'}", "--import-mode=importlib", *request.param]
    inherited = {**os.environ, "HOMES_BEFORE_THE_TESTS": "", "PYTEST_ADDOPTS": ""}
    environment = {name: value for name, value in inherited.items() if value} | {
        "HOME": str(real), "PYTHONPATH": os.pathsep.join(sys.path), "SPOOL_DIR": "/nowhere", "TMUX": "x",
        "XDG_RUNTIME_DIR": "/nowhere", "COLUMNS": "400",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={place}", f"--override-ini=pythonpath={place}"]
    return subprocess.run([*command, place], cwd=place, env=environment, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.parametrize(
    ("test", "seconds"), [("leaves_a_child", CHILD), ("leaves_a_daemon", DAEMON)], ids=["child", "daemon"]
)
def test_a_process_that_is_left_behind_is_an_error_and_is_ended(outcome: str, test: str, seconds: str) -> None:
    """A child, or a daemon that has left session and parent, fails its test by name, and lives no longer."""
    assert re.search(rf"ERROR test_outbreaks.py::test_{test} - Failed: processes left behind.*sleep {seconds}", outcome)
    sleeping = [Path(f"/proc/{pid}/cmdline") for pid in processes()]
    assert not any(f"sleep\0{seconds}\0".encode() == read(path) for path in sleeping)


@pytest.mark.parametrize("test", ["looks_into_the_real_spool", "writes_into_the_real_spool_and_swallows_errors"])
def test_the_real_spool_cannot_be_reached(outcome: str, test: str) -> None:
    """Reading or writing below the real ~/.spool fails the test, even one that swallows every error."""
    assert re.search(rf"FAILED test_outbreaks.py::test_{test} - conftest\S*RealSpoolTouched", outcome), outcome


def test_a_real_spool_that_a_child_made_is_noticed(outcome: str) -> None:
    """A child process that the walls cannot stop is still told on."""
    error = "ERROR test_outbreaks.py::test_lets_a_child_make_a_real_spool - Failed: the test made a real spool"
    assert error in outcome


def test_well_behaved_tests_notice_nothing(outcome: str) -> None:
    """A home of its own for each, a clean environment, a fresh spool: all of these pass, without an error after."""
    good = set(re.findall(r"^PASSED test_outbreaks.py::(test_good\w+)", outcome, re.MULTILINE))
    assert good == set(re.findall(r"def (test_good\w+)", OUTBREAKS)), outcome
    assert not re.search(r"^(ERROR|FAILED) test_outbreaks.py::test_good", outcome, re.MULTILINE), outcome


def read(path: Path) -> bytes:
    """Return the content of *path*, nothing if it is gone."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
