"""The walls around every test: no real home, no spool of the user's, no process left behind."""

from __future__ import annotations

import gc
import os
import pwd
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from spool.client.draft import begin_as_after_login, may_be_secret
from spool.executors import compiled
from support import end, left_behind, make_spool, processes

if (Path(__file__).parent / "plugins" / "fake_nvml.py").exists():
    pytest_plugins = ["plugins.commands", "plugins.fake_nvml", "plugins.serving", "plugins.variants", "receivers"]

# No deadline, for that would be a timed assertion. New examples each time, whose blob finds them again anywhere; but in
# CI the same ones for the same test, so that a change is judged by what it changes.
_PROFILE: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],  # it leans on the pace of the machine
}
hypothesis.settings.register_profile("ci", max_examples=40, derandomize=True, database=None, **_PROFILE)
hypothesis.settings.register_profile("new", max_examples=40, derandomize=False, **_PROFILE)
hypothesis.settings.register_profile("thorough", max_examples=2000, derandomize=False, **_PROFILE)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "new"))

# Without compiled files each worker and each command that a test starts would compile all that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

gc.disable()  # until the tests are collected: it would walk over all their syntax trees again and again

# What would let a test reach the user's own spool, tmux server, service manager or GPUs, or change what jobs find.
_UNWANTED = (
    "TMUX",
    "TMUX_PANE",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_STATE_HOME",
    "XDG_CACHE_HOME",
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "EDITOR",
    "VISUAL",
)
_UNWANTED += tuple(
    name for name, value in os.environ.items() if may_be_secret(name, value)
)  # `--export ALL` tells of them
_LEAVE_S = 30.0  # how long a process that is about to end may take; not how long one may stay

# A shell cannot trap what was ignored when it began: under nohup, or in the background of a script, no wrapper would
# pass signals on.
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_HOMES = "HOMES_BEFORE_THE_TESTS"
_numbers = count(1)


def _real_spools() -> tuple[str, ...]:
    """Return the spools that a user of these tests may have: below `$HOME`, and below the home of the account.

    Once told they are remembered in the environment: a worker of xdist, or a run of pytest that a test starts, finds a
    `$HOME` that is none.
    """
    if _HOMES not in os.environ:
        homes = {os.path.expanduser("~")}
        with suppress(KeyError):  # an id without an account, as in a container
            homes.add(pwd.getpwuid(os.getuid()).pw_dir)
        os.environ[_HOMES] = os.pathsep.join(sorted(homes | {os.path.realpath(home) for home in homes}))
    return tuple(os.path.join(home, ".spool") for home in os.environ[_HOMES].split(os.pathsep) if os.path.isabs(home))


REAL_SPOOLS = _real_spools()


class RealSpoolTouched(BaseException):
    """A test reached for the real `~/.spool`. Not an Exception, so that no program can swallow it."""


def _guard(event: str, arguments: tuple[object, ...]) -> None:
    """Refuse everything that names a path in a real `~/.spool` (an audit hook: it sees every call of this process)."""
    if event == "open" or event.startswith(("os.", "shutil.", "pathlib.")):
        for argument in arguments:
            path = os.fsdecode(argument) if isinstance(argument, bytes) else argument
            if isinstance(path, str) and path.startswith(REAL_SPOOLS):
                for spool in REAL_SPOOLS:
                    if path == spool or path.startswith(spool + "/"):
                        raise RealSpoolTouched(f"{event} {path}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave `tests/long` to who asks for it, or for something in it."""
    long = Path(__file__).parent / "long"
    if collection_path != long:
        return None
    asked = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
    return None if any(path.is_relative_to(long) for path in asked) else True


def pytest_collection_finish() -> None:
    """Collect garbage again, and never that of the collection."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    """Begin each test as after a login: what is submitted takes the limits of its submitter along."""
    begin_as_after_login()


def pytest_configure(config: pytest.Config) -> None:
    """Take the real home away before anything is collected, for what fixtures of the session start too."""
    for name in [
        name for name in os.environ if name in _UNWANTED or (name.startswith("SPOOL_") and name != "SPOOL_RECORD")
    ]:
        del os.environ[name]
    home = tempfile.mkdtemp(prefix="spool-tests-home-")
    config.add_cleanup(lambda: _remove_if_empty(Path(home)))
    os.environ["HOME"] = home
    if not any(home.startswith(real + os.sep) for real in REAL_SPOOLS):
        sys.addaudithook(_guard)
    if not hasattr(config, "workerinput") and compiled.find().broken:
        with suppress(compiled.NotBuiltError):  # one that is older than its source; else the tests go without it
            compiled.build()


@pytest.fixture(autouse=True)
def walls(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the test a home of its own, and see afterwards that no process of it lives and no real spool appeared."""
    base = tmp_path_factory.getbasetemp()
    home = base / f"home-{next(_numbers)}"
    home.mkdir()
    before = processes()
    absent = [spool for spool in REAL_SPOOLS if not _exists(spool)]
    # The tests' own changes of the environment are undone before this fixture looks around; ours stay until then.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOME", str(home))
        environment.setenv("TMUX_TMPDIR", str(home))
        yield
        monkeypatch.undo()
    mark = os.fsencode(f"{base}/")
    left = left_behind(processes() - before, mark)
    deadline = time.monotonic() + _LEAVE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = left_behind(left, mark)
    named = dict(left)
    while left:  # those that they start meanwhile, too
        end(left, mark)
        time.sleep(0.01)
        left = left_behind(processes() - before, mark)
        named |= left
    _remove_if_empty(home)
    if named:
        pytest.fail("processes left behind (ended now): " + "; ".join(f"{p}: {c}" for p, c in named.items()))
    if appeared := [spool for spool in absent if _exists(spool)]:
        pytest.fail(f"the test made a real spool: {appeared}")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record the sizes of all reads of this process."""
    sizes: list[int] = []

    def counted(read: Callable[..., bytes]) -> Callable[..., bytes]:
        def counting(*args: int) -> bytes:
            data = read(*args)
            sizes.append(len(data))
            return data

        return counting

    monkeypatch.setattr(os, "read", counted(os.read))
    monkeypatch.setattr(os, "pread", counted(os.pread))
    return sizes


@pytest.fixture
def spool_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty spool, named by SPOOL_DIR."""
    root = make_spool(tmp_path / "spool")
    monkeypatch.setenv("SPOOL_DIR", str(root))
    return root


def _exists(path: str) -> bool:
    """Whether *path* is there; by a call that raises no audit event."""
    try:
        os.stat(path)
    except OSError:
        return False
    return True


def _remove_if_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError:
        return
