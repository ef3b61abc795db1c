"""`spool.Executor`: what `concurrent.futures` promises, and what a call keeps of it when processes are killed."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import called
import spool
from served import Served
from spool.client.gc import plan_removal, remove_planned
from spool.client.requests import Requests
from spool.client.waiting import End, Waiter
from spool.core.errors import InvalidJob, InvalidRecord, InvalidValue, SpoolError, SpoolUnusable
from spool.core.model import State
from spool.extras.functions import calls
from spool.extras.functions.executor import (
    CallResult,
    Cancelled,
    Executor,
    Future,
    JobFailed,
    Lost,
    OutOfMemory,
    RemoteError,
    TimedOut,
)
from spool.formats import keys
from spool.formats.config import RetentionPolicy
from spool.python.client import CallKeys, JobKeys
from spool.store.disk import Disk
from spool.store.spool import Spool
from support import PATIENCE_S, ROOT, wait_for
from test_examples import folder
from test_examples import served as served_examples


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give a spool with a dispatcher, for all tests of a process."""
    with Served(tmp_path_factory.mktemp("calls") / "spool") as found:
        yield found.start()


@pytest.fixture
def executor(served: Served) -> Iterator[Executor]:
    """Give an executor of that spool."""
    with Executor(served.root, cpus=1) as made:
        yield made


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Executor]:
    """Give an executor of a spool without a dispatcher, so that every call waits."""
    root = tmp_path / "spool"
    Executor(root).shutdown()
    (root / "config.toml").write_text("autostart = false\n")
    made = Executor(root, name="call")
    yield made
    made.shutdown(wait=False, cancel_futures=True)


class Refused:
    """Stands for a function that the system refuses, *times* times or always; then it is *behind*."""

    def __init__(self, error: int, behind: Callable[..., object] | None = None, times: int = -1) -> None:
        self.error = error
        self.behind = behind
        self.left = times
        self.times = 0

    def __get__(self, owner: object, kind: object = None) -> Callable[..., object]:
        """Bind as a method does."""
        return lambda *args, **kwargs: self(owner, *args, **kwargs)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Refuse, or call what is behind."""
        if self.behind is not None and self.times == self.left:
            return self.behind(*args, **kwargs)
        self.times += 1
        raise OSError(self.error, os.strerror(self.error))


def again(served: Served, name: str) -> object:
    """Return the result of a call as another process finds it, by its name alone."""
    return spool.job(name, served.root).result(timeout_s=PATIENCE_S)


# What comes back.


def test_a_call_is_a_job_with_its_files(served: Served, executor: Executor) -> None:
    """Its value comes back here and anywhere, and the run has the call and the return beside its log."""
    heard = list[int]()
    future = executor.submit(called.double, number=21)
    future.add_done_callback(lambda ended: heard.append(ended.result()))
    assert future.result(PATIENCE_S) == 42
    wait_for(lambda: heard == [42])
    assert future.exception() is None
    assert future.name.startswith("double-")
    assert again(served, future.name) == 42
    metadir = served.root / "jobs" / future.name / "1"
    assert {"call", "return", "log"} <= set(os.listdir(metadir))
    assert json.loads((metadir / "call").read_bytes().partition(b"\n")[0])["function"] == "double"
    assert (metadir / "return").stat().st_mode & 0o077 == 0
    wait_for((served.root / "done" / f"{future.name}.toml").exists)


def test_what_no_module_has_is_sent_by_value(executor: Executor) -> None:
    """A lambda, a closure and a local class."""
    base = 5

    class Local:
        def __init__(self, number: int) -> None:
            self.number = number

    assert executor.submit(lambda number: number + base, 2).result(PATIENCE_S) == 7
    assert executor.submit(lambda: Local(3)).result(PATIENCE_S).number == 3


def test_an_exception_comes_back_with_its_traceback_and_its_log(served: Served, executor: Executor) -> None:
    """As the type that was raised, with the traceback from the function on as its cause."""
    future = executor.submit(called.fail, "no such thing")
    with pytest.raises(LookupError, match=r"^no such thing") as raised:
        future.result(PATIENCE_S)
    assert future.exception() is raised.value
    assert "called.py" in str(raised.value.__cause__)
    assert "calls.py" not in str(raised.value.__cause__)
    assert raised.value.__notes__ == [f"the last lines of the log of job {future.name}:\nsaid before"]
    assert "LookupError: no such thing" in (served.root / "jobs" / future.name / "1" / "log").read_text()
    with pytest.raises(LookupError, match="no such thing"):
        again(served, future.name)


def test_an_exception_that_no_pickle_holds_comes_back_in_words(executor: Executor) -> None:
    """With its type and its text."""
    with pytest.raises(RemoteError, match="1 is not 2") as raised:
        executor.submit(called.raise_odd).result(PATIENCE_S)
    assert raised.value.type == "called.OddError"
    assert "OddError: 1 is not 2" in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (threading.Lock, SpoolError, "cannot return a lock: it cannot be pickled"),
        (partial(sys.exit, 3), SystemExit, "^3"),
    ],
)
def test_what_ends_without_a_value_is_an_exception(
    executor: Executor, function: Callable[[], object], kind: type[BaseException], words: str
) -> None:
    """A value that cannot be pickled says its type, and `sys.exit` in a function ends no one else's program."""
    with pytest.raises(kind, match=words):
        executor.submit(function).result(PATIENCE_S)


def test_a_killed_worker_breaks_its_own_call_alone(executor: Executor) -> None:
    """The executor goes on."""
    dead, alive = executor.submit(called.die), executor.submit(called.double, 1)
    with pytest.raises(JobFailed, match=f"job {dead.name} returned nothing: failed: ") as raised:
        dead.result(PATIENCE_S)
    assert raised.value.end.outcome is State.FAILED
    assert alive.result(PATIENCE_S) == 2
    assert executor.submit(called.double, 2).result(PATIENCE_S) == 4


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (State.OUT_OF_MEMORY, OutOfMemory),
        (State.TIMEOUT, TimedOut),
        (State.CANCELLED, Cancelled),
        (State.LOST, Lost),
        (State.FAILED, JobFailed),
        (State.UNSCHEDULABLE, JobFailed),
        (State.INVALID, JobFailed),
    ],
)
def test_each_outcome_without_a_return_has_its_type(spool_root: Path, outcome: State, kind: type[JobFailed]) -> None:
    """So that a program can tell them apart."""
    error = CallResult(Spool(str(spool_root)), "gone", End("gone", outcome, reason="why", run=1)).error()
    assert type(error) is kind
    assert isinstance(error, concurrent.futures.CancelledError) is (outcome is State.CANCELLED)
    assert not isinstance(error, TimeoutError)  # that is for the patience of the caller
    assert str(error) == f"job gone returned nothing: {outcome}: why"


# Futures.


def test_a_call_that_waits_can_be_cancelled(alone: Executor) -> None:
    """Its job is withdrawn, its callbacks are called, and `wait` and `as_completed` see it."""
    future = alone.submit(called.double, 1)
    heard: list[Future[int]] = []
    future.add_done_callback(heard.append)  # type: ignore[arg-type]
    assert not future.running()
    assert not future.done()
    assert future.cancel()
    assert future.cancel()
    assert future.cancelled()
    assert future.done()
    assert heard == [future]
    assert concurrent.futures.wait([future], timeout=0).done == {future}
    assert list(concurrent.futures.as_completed([future], timeout=0)) == [future]
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    with pytest.raises(concurrent.futures.CancelledError):
        future.exception()


def test_a_call_that_runs_or_has_ended_cannot_be_cancelled(executor: Executor, tmp_path: Path) -> None:
    """`cancel` returns False and changes nothing."""
    go = tmp_path / "go"
    future = executor.submit(called.until, str(go), 5)
    wait_for(lambda: (tmp_path / "go.waits").exists() and future.running())
    assert not future.cancel()
    with pytest.raises(TimeoutError):
        future.result(0)
    with pytest.raises(TimeoutError):
        future.exception(0)
    go.touch()
    assert future.result(PATIENCE_S) == 5
    assert not future.cancel()
    assert not future.cancelled()


@pytest.mark.parametrize("how", ["cancelled", "removed"])
def test_a_waiting_job_that_is_taken_away_is_cancelled_or_lost(alone: Executor, how: str) -> None:
    """A cancel counts as one of the future, and nothing waits for ever for a job whose files are gone."""
    future = alone.submit(called.double, 1)
    if how == "cancelled":
        Requests(Spool(alone.root), "user").cancel(future.name)
    else:
        (Path(alone.root) / "queued" / f"{future.name}.toml").unlink()
    wait_for(future.done)
    assert future.cancelled() or (how == "removed" and isinstance(future.exception(), Lost))


@pytest.mark.parametrize("step", ["add", "poll"])
def test_a_program_out_of_descriptors_sees_its_calls_end_later(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A look that fails for want of them is tried again; another error is what every open call raises."""
    errors = [OSError(errno.EMFILE, "Too many open files")]
    real = getattr(Waiter, step)

    def failing(self: Waiter, *args: object, **options: object) -> object:
        if errors and all(args):  # it is made for no names
            raise errors.pop()
        return real(self, *args, **options)

    monkeypatch.setattr(Waiter, step, failing)
    assert executor.submit(called.double, 4).result(PATIENCE_S) == 8
    errors.append(OSError(errno.EIO, "Input/output error"))
    with pytest.raises(SpoolError, match=r"cannot watch the calls: .*: Input/output error"):
        executor.submit(called.double, 4).result(PATIENCE_S)


# Shutdown.


def test_a_shut_executor_takes_no_calls(alone: Executor) -> None:
    """RuntimeError, as of every executor; it can cancel what waits, of `submit` and of `map`."""
    futures = [alone.submit(called.double, 3), *alone.submit_all(called.double, range(3))]
    alone.shutdown(cancel_futures=True)
    alone.shutdown()
    assert all(future.cancelled() for future in futures)
    assert os.listdir(f"{alone.root}/queued") == []
    for call in (lambda: alone.submit(called.double, 1), lambda: alone.map(called.double, [])):
        with pytest.raises(RuntimeError, match="after shutdown"):
            call()


def test_a_shut_executor_leaves_no_thread(served: Served) -> None:
    """Whether it waited for its calls or not; those that still run keep theirs until they have ended."""
    before = set(threading.enumerate())
    with Executor(served.root) as made:
        made.submit(called.double, 3)
    other = Executor(served.root)
    future = other.submit(called.double, 4)
    other.shutdown(wait=False)
    assert future.result(PATIENCE_S) == 8
    wait_for(lambda: set(threading.enumerate()) <= before)


# Maps.


def test_a_map_is_one_array_with_results_in_order(served: Served, executor: Executor) -> None:
    """Whatever order its tasks end in, as long as its shortest iterable; an exception comes in its place."""
    before = {path.name for path in served.root.glob("calls/*")}
    assert list(executor.map(called.add, range(4), range(10, 99))) == [10, 12, 14, 16]
    assert list(executor.map(called.double, [])) == []
    [array] = set(os.listdir(served.root / "calls")) - before
    wait_for((served.root / "done" / f"{array}.toml").exists)
    assert again(served, f"{array}_2") == 14
    results = executor.map(divmod, [4, 4], [2, 0])
    assert next(results) == (2, 0)
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_an_array_of_calls_has_the_results_of_all(served: Served, executor: Executor) -> None:
    """In order for whoever has its name; a chunk of calls is one task, with the same results."""
    single = executor.submit_all(called.double, range(3))
    chunks = executor.submit_all(called.double, range(5), chunksize=2)
    assert again(served, single[0].array) == [0, 2, 4]
    assert [future.result(PATIENCE_S) for future in chunks] == [[0, 2], [4, 6], [8]]
    assert again(served, chunks[0].array) == [0, 2, 4, 6, 8]
    assert list(executor.map(called.double, range(5), chunksize=3)) == [0, 2, 4, 6, 8]
    failing = executor.submit_all(divmod, [1, 1], [1, 0])
    with pytest.raises(ZeroDivisionError):
        again(served, failing[0].array)


def test_a_job_that_calls_nothing_has_no_result(served: Served, executor: Executor) -> None:
    """The error says so; while a job runs there is none either."""
    served.drop("plain", "true")
    with pytest.raises(SpoolError, match="the result of job plain: it calls no Python function"):
        again(served, "plain")
    future = executor.submit(time.sleep, 60)
    with pytest.raises(TimeoutError):
        future.job.result(timeout_s=0.01)
    future.job.cancel()


def test_a_map_can_be_limited(alone: Executor) -> None:
    """`max_running` is a key of its array; a single call has none."""
    with Executor(alone.root, max_running=2) as limited:
        single, [first, _] = limited.submit(called.double, 1), limited.submit_all(called.double, range(2))
        queued = Path(alone.root, "queued")
        assert "max_running = 2" in (queued / f"{first.array}.toml").read_text()
        assert "max_running" not in (queued / f"{single.name}.toml").read_text()
        limited.shutdown(cancel_futures=True)
    with pytest.raises(InvalidJob, match="max_running"):
        Executor(alone.root, max_running=0)


def test_what_a_partial_has_is_written_once(alone: Executor) -> None:
    """A large argument of 50 calls takes its size, not 50 times that."""
    data = b"x" * 1_000_000
    [first, *_] = alone.submit_all(partial(called.size, data), range(50))
    assert os.path.getsize(f"{alone.root}/calls/{first.array}") < 1_100_000
    assert calls.load(alone.root, first.array, 7)() == 1_000_007


def test_a_task_shows_its_parameters(served: Served, tmp_path: Path) -> None:
    """They are what its job has, replace their keys in paths, and change neither the call nor a result."""
    with Executor(served.root, name="fit", stdout=f"{tmp_path}/{{lr}}.log", env={"HERE": "{{lr}}"}) as made:
        shown = [{"lr": 0.5, "worker": Path("a")}, {"lr": 0.1, "worker": Path("b")}]
        futures = made.submit_all(called.double, range(2), parameters=shown)
        assert [future.result(PATIENCE_S) for future in futures] == [0, 2]
        assert [future.job.parameters for future in futures] == [
            {"lr": "0.5", "worker": "a"},
            {"lr": "0.1", "worker": "b"},
        ]
        assert spool.job("fit-1", served.root).result() == [0, 2]
        assert {path.name for path in tmp_path.glob("*.log")} == {"0.5.log", "0.1.log"}
        chunks = made.submit_all(called.double, range(3), chunksize=2, parameters=[{"part": at} for at in range(2)])
        assert [future.result(PATIENCE_S) for future in chunks] == [[0, 2], [4]]


def test_tasks_that_no_job_file_has_are_an_error(alone: Executor) -> None:
    """Before anything is in the spool: too many, chunks of nothing, parameters too few or of odd keys."""
    with pytest.raises(InvalidValue, match=r"100,001 tasks are more than the 100,000 of an array; set chunksize"):
        alone.map(called.double, range(100_001))
    with pytest.raises(ValueError, match="chunksize must be >= 1"):
        alone.map(called.double, range(5), chunksize=0)
    with pytest.raises(ValueError, match="2 tasks need as many parameters, not 1"):
        alone.submit_all(called.double, range(2), parameters=[{"lr": 1}])
    for wrong in ([{"lr": 1}, {"seed": 1}], [{"a.b": 1}, {"a.b": 2}], [{}, {}]):
        with pytest.raises(InvalidJob):
            alone.submit_all(called.double, range(2), parameters=wrong)
    assert not os.listdir(f"{alone.root}/queued")
    assert not os.path.exists(f"{alone.root}/calls")


# What is wrong from the start.


def test_what_cannot_be_pickled_is_named(alone: Executor) -> None:
    """When it is submitted, be it an argument or the function; nothing comes into the spool."""
    with pytest.raises(SpoolError, match="cannot submit a call of add: argument 2, a lock, cannot be pickled"):
        alone.submit(called.add, 1, threading.Lock())
    with pytest.raises(SpoolError, match="cannot submit a call of add: the argument data, a lock, cannot be pickled"):
        alone.submit(called.add, 1, data=threading.Lock())
    with pytest.raises(SpoolError, match=r"cannot submit a call of lock\.acquire: the function cannot be pickled: "):
        alone.submit(threading.Lock().acquire)
    assert os.listdir(f"{alone.root}/queued") == []


def test_functions_of_modules_need_no_cloudpickle(alone: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lambda does, and the error says how to get it."""
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    future = alone.submit(called.double, 4)
    assert calls.load(alone.root, future.name, 0)() == 8
    with pytest.raises(SpoolError, match=r"install cloudpickle \(`pip install 'spool-scheduler\[python\]'`\)"):
        alone.submit(lambda: 1)


def test_two_executors_with_one_name_share_its_numbers(alone: Executor) -> None:
    """Many threads submit at once: each call has a name of its own, and none is lost."""
    both = (alone, other := Executor(alone.root, name="call"))
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        futures = list(threads.map(lambda number: both[number % 2].submit(called.double, number), range(64)))
    names = {f"call-{number}" for number in range(1, 65)}
    assert {future.name for future in futures} == names
    assert set(os.listdir(f"{alone.root}/queued")) == {f"{name}.toml" for name in names}
    other.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("gpuz", "gpu"),
        ("name", "cannot name jobs 'a b'"),
        *((word, f"{word}; ") for word in ("max_workers", "initializer", "mp_context", "command", "array")),
    ],
)
def test_keys_are_checked_when_the_executor_is_made(tmp_path: Path, key: str, words: str) -> None:
    """An unknown key, a name that no job can have, and words of other executors, with what is here instead."""
    with pytest.raises((InvalidJob, InvalidValue), match=words):
        Executor(tmp_path / "spool", **{key: "a b"})  # type: ignore[arg-type]


def test_a_path_with_braces_and_dollars_is_taken_as_it_is(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory of a call, of one and of many."""
    odd = tmp_path / "a {index} $HOME {{b}}"
    odd.mkdir()
    monkeypatch.chdir(odd)
    with Executor(served.root) as made:
        assert made.submit(os.getcwd).result(PATIENCE_S) == str(odd)
        assert list(made.map(os.path.abspath, ["x", "y"])) == [f"{odd}/x", f"{odd}/y"]


# As the executors of the language.


def test_a_wait_for_the_first_exception_ends_with_it(executor: Executor, tmp_path: Path) -> None:
    """One of two calls goes on, whether the other fails before the wait or while it lasts."""
    good = executor.submit(called.double, 1)
    assert good.result(PATIENCE_S) == 2
    endless = executor.submit(called.until, str(tmp_path / "end"))
    later = executor.submit(called.fail_once_there, str(tmp_path / "fail"))
    timers = [threading.Timer(0.2, (tmp_path / "fail").touch), threading.Timer(PATIENCE_S, (tmp_path / "end").touch)]
    for timer in timers:
        timer.start()
    try:
        for _ in range(2):
            waited = concurrent.futures.wait([endless, later, good], return_when=concurrent.futures.FIRST_EXCEPTION)
            assert waited == ({later, good}, {endless})
    finally:
        timers[1].cancel()
        (tmp_path / "end").touch()
    assert isinstance(later.exception(), LookupError)


@pytest.mark.parametrize("why", ["raises", "times out", "is closed"])
def test_a_map_that_is_not_gone_on_with_cancels_what_waits(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    """Because a call raises, the time is over, or the iterator is given up."""
    made: list[Future[object]] = []
    submit_all = Executor.submit_all
    monkeypatch.setattr(Executor, "submit_all", lambda *args, **kw: made.extend(submit_all(*args, **kw)) or list(made))
    end, there = tmp_path / "end", tmp_path / "there"
    there.touch()
    with Executor(served.root, cpus=1, max_running=1) as executor:
        first = {"raises": "\0", "times out": str(end), "is closed": str(there)}[why]
        found = executor.map(called.until, [first, *[str(end)] * 5], timeout=1 if why == "times out" else None)
        if why == "is closed":
            assert next(found) == 0
            found.close()  # type: ignore[attr-defined]
        else:
            error = ValueError if why == "raises" else TimeoutError
            with pytest.raises(error):
                next(found)
        end.touch()
        assert sum(future.cancelled() for future in made) >= 3


@pytest.mark.parametrize("chunksize", [1, 3])
def test_a_map_keeps_no_result(executor: Executor, chunksize: int) -> None:
    """Each is gone as soon as the program has let it go."""
    for thing in executor.map(called.make_thing, range(6), chunksize=chunksize):
        gone = weakref.ref(thing)
        del thing
        assert gone() is None


def test_a_call_has_what_the_program_has_set(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Variables in `os.environ`, except those that may be secrets; `export` names exactly what a call gets."""
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    with Executor(served.root) as made:
        first = made.submit(os.getenv, "HF_HOME")
        monkeypatch.setenv("HF_HOME", "/others")
        assert [first.result(PATIENCE_S), made.submit(os.getenv, "HF_HOME").result()] == ["/models", "/others"]
        assert made.submit(os.getenv, "HF_TOKEN").result(PATIENCE_S) is None
    assert [record for record in caplog.messages if "HF_TOKEN" in record]
    with Executor(served.root, export="HF_TOKEN") as made:
        assert made.submit(os.getenv, "HF_TOKEN").result(PATIENCE_S) == "hidden"
        assert made.submit(os.getenv, "HF_HOME").result(PATIENCE_S) is None


def test_what_can_never_run_is_told_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When the executor is made, and by a client with the submission."""
    root = tmp_path / "spool"
    spool.Client(root, make=True)
    (root / "config.toml").write_text("autostart = false\ncpus = 2\n")
    Executor(root, cpus=3).shutdown()
    assert len(caplog.messages) == 1
    spool.Client(root).submit("true", name="large", cpus=3)
    assert "large" in caplog.messages[-1]
    Executor(root, cpus=2).shutdown()
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("place", ["", "jobs", "calls"])
def test_a_spool_whose_results_cannot_be_loaded_is_refused_at_once(tmp_path: Path, place: str) -> None:
    """Others can write to it, or to a directory of it that has calls or what they return."""
    root = tmp_path / "spool"
    Executor(root).shutdown()
    (root / "calls").mkdir(exist_ok=True)
    (root / place).chmod(0o770)
    with pytest.raises(SpoolUnusable, match="chmod go-w"):
        Executor(root)


def test_the_types_of_the_keys_are_those_of_a_job_file() -> None:
    """Each key is known to type checkers, except those that spool writes itself."""
    arrays = {"array", "matrix", "rows", "script"}
    assert JobKeys.__optional_keys__ == {key.name for key in keys.JOB.keys} - {"command", "task", "terminal"}
    assert CallKeys.__optional_keys__ == JobKeys.__optional_keys__ - arrays


def test_a_large_value_of_the_program_is_written_once(served: Served) -> None:
    """What a function of a script uses goes with each call: in one file, which is there as long as a call has it."""
    data = os.urandom(2 << 20)

    def at_place(at: int) -> int:
        return data[at]

    with Executor(served.root, name="heavy") as made:
        futures = [made.submit(at_place, at) for at in range(3)]
        futures += made.submit_all(at_place, [3, 4])
        assert [future.result(PATIENCE_S) for future in futures] == list(data[:5])
    calls_there = [path for path in (Path(served.root) / "calls").iterdir() if path.name.startswith("heavy")]
    sizes = {path.stat().st_ino: path.stat().st_size for path in calls_there}
    assert sum(sizes.values()) < 5 << 20
    assert sum(path.stat().st_nlink > 1 for path in calls_there if path.name.endswith("~function")) >= 3


def test_a_large_function_goes_with_the_last_call_that_has_it(alone: Executor) -> None:
    """Not while its job waits, and with its own call."""
    data = os.urandom(2 << 20)

    def first() -> int:
        return data[0]

    one, two = alone.submit(first), alone.submit(first)
    root = Path(alone.root)
    for name in (one.name, two.name):
        os.utime(root / "calls" / f"{name}~function", (0, 0))
    one.cancel()
    (root / "calls" / one.name).unlink()
    collects(Spool(alone.root))
    left = sorted(path.name for path in (root / "calls").iterdir())
    assert left == [two.name, f"{two.name}~function"]


# What a worker imports.


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in a directory where another user has put modules with the names of the library's and of others."""
    place = tmp_path / "everybodys"
    place.mkdir()
    for name in ("json", "pickle", "traceback", "sitecustomize", "msgspec", "spool", "runpy", "encodings", "calendar"):
        (place / f"{name}.py").write_text(f"raise SystemExit('{name} of another user')\n")
    monkeypatch.chdir(place)
    return place


@pytest.mark.parametrize("path", [None, ":", "{own}:", ":{own}", "{own}::{own}"])
def test_a_worker_runs_nothing_from_the_current_directory(
    served: Served, traps: Path, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    """Neither by Python's own habit nor by an empty entry of PYTHONPATH, and exceptions come back as they are."""
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path.format(own=ROOT / "src"))
    with Executor(served.root) as made:
        assert made.submit(pow, 2, 8).result(PATIENCE_S) == 256
        assert isinstance(made.submit(int, "x").exception(PATIENCE_S), ValueError)


def test_the_directory_of_the_function_is_behind_the_standard_library(
    served: Served, traps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller at a prompt has the current directory in its path: its own modules are found, the library's stay."""
    (traps / "own_of_the_caller.py").write_text("def month(at): import calendar; return calendar.month_name[at]\n")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    import own_of_the_caller  # type: ignore[import-not-found]

    with Executor(served.root) as made:
        assert made.submit(own_of_the_caller.month, 2).result(PATIENCE_S) == "February"


def test_a_module_that_the_caller_has_for_one_of_the_library_is_the_callers(served: Served, tmp_path: Path) -> None:
    """A script called `test.py` or `code.py` that another one imports."""
    (tmp_path / "code.py").write_text("def answer(): return 42\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import code, sys\nfrom spool.extras.functions.executor import Executor\n"
        "with Executor(sys.argv[1]) as made: print(made.submit(code.answer).result(60))\n"
    )
    command = [sys.executable, program, served.root]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "42\n", done.stderr


# Whose pickles are loaded.


@pytest.fixture
def returned(served: Served, executor: Executor) -> tuple[Spool, str, Path]:
    """Give a call that has returned 2: the spool, its name and the file of its return."""
    name = (future := executor.submit(called.double, 1)).name
    future.result(PATIENCE_S)
    return Spool(str(served.root)), name, served.root / "jobs" / name / "1" / "return"


class Bomb:
    """A pickle that runs something."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Do so when it is loaded."""
        return os.mkdir, ("bomb",)


def forged() -> bytes:
    """Return a return whose pickle makes a directory."""
    payload = pickle.dumps(Bomb())
    return json.dumps({"version": 1, "error": None, "size": len(payload)}).encode() + b"\n" + payload


def _behind_a_link(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "nobody else's": lambda path: None,  # so that the others cannot pass for another reason
    "group": lambda path: path.chmod(0o620),
    "all": lambda path: path.chmod(0o602),
    "link": _behind_a_link,
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "above": lambda path: path.parent.chmod(0o770),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
    "owner": lambda path: os.chown(path, 12345, 12345),
}


@pytest.mark.parametrize("how", FOREIGN)
def test_a_pickle_that_another_user_may_have_written_is_not_loaded(
    returned: tuple[Spool, str, Path], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: a file or a directory that others can write to, a link, another user's file."""
    if how == "owner" and os.geteuid() != 0:
        pytest.skip("takes root, for another user's file")
    monkeypatch.chdir(tmp_path)
    place, name, path = returned
    path.write_bytes(forged())
    FOREIGN[how](path)
    result = CallResult(place, name, End(name, State.FINISHED, run=1))
    if how == "nobody else's":
        assert result.value() is None
    else:
        assert isinstance(error := result.error(), SpoolUnusable)
        assert "returned" in str(error)
    assert (tmp_path / "bomb").exists() is (how == "nobody else's")


@pytest.mark.parametrize("text", [b"", b"{}\n", b"x\n", b'{"version": 9}\n', b'{"version": 1}\n', None])
def test_a_damaged_return_is_an_error(returned: tuple[Spool, str, Path], text: bytes | None) -> None:
    """Half a pickle is never loaded."""
    place, name, path = returned
    path.write_bytes(path.read_bytes()[:-1] if text is None else text)
    assert isinstance(CallResult(place, name, End(name, State.FINISHED, run=1)).error(), InvalidRecord)


def test_a_shortage_spoils_no_result(returned: tuple[Spool, str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps a result from being read for the moment is raised; the next look finds it."""
    place, name, _ = returned
    result = CallResult(place, name, End(name, State.FINISHED, run=1))
    with monkeypatch.context() as patched:
        patched.setattr(calls, "_open_own", refused := Refused(errno.EMFILE))
        with pytest.raises(OSError, match="Too many open files"):
            result.value()
    assert refused.times == 1
    assert result.value() == 2


def test_a_full_disk_delays_what_a_call_returns(
    returned: tuple[Spool, str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so once, and waits for room: computing the value may have taken days."""
    place, name, path = returned
    path.unlink()
    monkeypatch.setattr(calls, "_PAUSE_S", 0)
    monkeypatch.setattr(Disk, "put", Refused(errno.ENOSPC, Disk.put, times=3))
    calls.leave_value(str(path.parent), 5)
    assert CallResult(place, name, End(name, State.FINISHED, run=1)).value() == 5
    assert capsys.readouterr().err == f"spool: the disk is full: {path} waits for room\n"
    monkeypatch.setattr(Disk, "put", Refused(errno.EACCES))
    with pytest.raises(PermissionError):
        calls.leave_value(str(path.parent), 6)


def test_a_full_disk_leaves_no_call_without_a_job(alone: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is written first; its job finds no room."""
    with monkeypatch.context() as patched:
        patched.setattr(alone._disk, "publish", Refused(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            alone.submit(called.double, 1)
    assert os.listdir(f"{alone.root}/calls") == []
    alone.submit(called.double, 1)
    assert len(os.listdir(f"{alone.root}/calls")) == 1


def test_a_job_file_of_an_earlier_version_runs_its_call(alone: Executor, tmp_path: Path) -> None:
    """Its command has the name that the worker had in spool 0.1."""
    name = alone.submit(called.double, 21).name
    environment = {**os.environ, "SPOOL_DIR": alone.root, "SPOOL_METADIR": str(tmp_path)}
    words = [sys.executable, "-P", "-m", "spool.python.worker", name]
    subprocess.run(words, check=True, env=environment, cwd=tmp_path)
    assert b'"error": null' in (tmp_path / "return").read_bytes()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("absent", "cannot run the call: .*: it is not there"),
        ("open", "other users can write to it"),
        ("python", r"the worker is Python 3\.[0-9.]+, and the call is of Python 3\.99\.0"),
    ],
)
def test_a_worker_loads_no_call_that_is_not_for_it(alone: Executor, how: str, words: str) -> None:
    """It is not there, others can write to it, or another Python wrote it: it says so."""
    path = Path(alone.root, "calls", alone.submit(called.double, 1).name)
    if how == "absent":
        path.unlink()
    elif how == "open":
        path.chmod(0o660)
    else:
        header, _, rest = path.read_bytes().partition(b"\n")
        path.write_bytes(json.dumps(json.loads(header) | {"python": [3, 99, 0]}).encode() + b"\n" + rest)
    with pytest.raises(SpoolError, match=words):
        calls.load(alone.root, path.name, 0)


# What is killed.


_CALLER = """
import sys, time
from spool.extras.functions.executor import Executor
import called
import spool
made = Executor(sys.argv[1], name="orphan")
futures = [made.submit(called.note, sys.argv[2], number) for number in range(5)]
futures += made.submit_all(called.note, [sys.argv[2]] * 5, range(5, 10))
print("submitted", flush=True)
time.sleep(600)
"""


def test_calls_outlive_their_caller_and_their_dispatcher(tmp_path: Path) -> None:
    """Both are killed; each call runs once, and its result is found by its name."""
    with Served(tmp_path / "spool") as served:
        (served.root / "config.toml").write_text("autostart = false\n")
        notes = tmp_path / "notes"
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
        caller = subprocess.Popen(
            [sys.executable, "-c", _CALLER, str(served.root), str(notes)], env=environment, stdout=subprocess.PIPE
        )
        served.start()
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"submitted\n"
        caller.send_signal(signal.SIGKILL)
        caller.wait()
        caller.stdout.close()
        for _ in range(4):
            served.restart()
        names = [f"orphan-{number}" for number in range(1, 6)] + [f"orphan-6_{number}" for number in range(5)]
        wait_for(lambda: all((served.root / "done" / f"{name}.toml").exists() for name in names))
        assert [again(served, name) for name in names] == list(range(10))
        assert sorted(map(int, notes.read_text().split())) == list(range(10))


def test_a_value_that_was_returned_counts_though_its_worker_was_killed(served: Served, executor: Executor) -> None:
    """The job has failed, and says so; what it computed is there."""
    future = executor.submit(called.return_and_die, 7)
    assert future.result(PATIENCE_S) == 7
    assert served.outcome(future.name) == "failed"


def test_a_retry_makes_the_call_again(served: Served, tmp_path: Path) -> None:
    """The future waits for the last attempt, and has its value."""
    with Executor(served.root, retry={"max": 2, "delay": "0s"}) as made:
        future = made.submit(called.fail_once, str(tmp_path / "tried"))
        assert future.result(PATIENCE_S) == 2
    assert served.runs(future.name) == [1, 2]


def collects(place: Spool) -> None:
    """Remove all that `spool gc` may remove."""
    remove_planned(place, plan_removal(place, RetentionPolicy(max_age_ns=0), time.time_ns()))


def test_a_call_that_is_killed_before_its_job_leaves_nothing_for_long(alone: Executor) -> None:
    """The file without a job is removed by `gc` after an hour; one with a job stays."""
    future = alone.submit(called.double, 1)
    path = calls.publish(alone.root, "unborn", b"")
    calls.publish(alone.root, "young", b"")
    for each in (path, f"{alone.root}/calls/{future.name}"):
        os.utime(each, (1, 1))
    collects(Spool(alone.root))
    assert sorted(os.listdir(f"{alone.root}/calls")) == [future.name, "young"]


def test_the_call_goes_with_its_job(returned: tuple[Spool, str, Path]) -> None:
    """`gc` removes both."""
    place, name, _ = returned
    call = Path(place.root, "calls", name)
    assert call.exists()
    wait_for(lambda: collects(place) or not call.exists())  # the dispatcher has recorded the end by then
    with pytest.raises(SpoolError, match="calls no Python function, or its run was removed"):
        CallResult(place, name, End(name, State.FINISHED, run=1)).value()


def test_a_notebook_calls_functions_as_jobs(tmp_path: Path) -> None:
    """Its cells run one after the other, and the results of the array are there by its name."""
    with served_examples(tmp_path / "home") as home:
        notebook = json.loads((folder(home, "notebook") / "sweep.ipynb").read_text(encoding="utf-8"))
        cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
        program = "\n".join([*cells, "print(array, round(sum(results) / len(results), 2))"])
        (home.path / "sweep.py").write_text(program, encoding="utf-8")
        assert home.run("python3", "sweep.py", cwd=home.path).stdout == "pi-1 3.14\n"
        assert len(list((home.spool / "done").glob("pi-1_*.toml"))) == 4
