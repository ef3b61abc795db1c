"""joblib's own tests of a backend, as far as they are about any backend that runs processes.

Left out are those about memory maps, workers that live on (initializers, reuse), and tasks that talk to the caller.
"""

from __future__ import annotations

import joblib.parallel
import pytest
from joblib.test import test_parallel as theirs

import joblib_spool

pytestmark = pytest.mark.usefixtures("spool")

assert joblib.parallel.BACKENDS["spool"] is joblib_spool.SpoolBackend


def test_simple_parallel() -> None:
    """The results are in order, however many batches there are at once."""
    for n_jobs in (1, 2, -1, -2):
        theirs.test_simple_parallel("spool", n_jobs, 11)


def test_main_thread_renamed_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call from a thread of any name warns of nothing."""
    theirs.test_main_thread_renamed_no_warning("spool", monkeypatch)


def test_background_thread_parallelism() -> None:
    """A call from another thread works, and is not kept from running beside others."""
    theirs.test_background_thread_parallelism("spool")


@pytest.mark.parametrize("child", ["threading", "sequential"])
def test_nested_loop(child: str) -> None:
    """A task may call Parallel itself."""
    theirs.test_nested_loop("spool", child)


def test_parallel_as_context_manager() -> None:
    """Parallel opened once serves several calls, with one executor."""
    with joblib.parallel.Parallel(n_jobs=2, backend="spool") as parallel:
        first = parallel._backend._executor
        assert parallel(joblib.delayed(theirs.f)(x, y=1) for x in range(3)) == [theirs.f(x, y=1) for x in range(3)]
        assert parallel(joblib.delayed(theirs.f)(x) for x in range(3)) == [theirs.f(x) for x in range(3)]
        assert parallel._backend._executor is first


def test_parallel_timeout_success() -> None:
    """Calls within the time return their results."""
    theirs.test_parallel_timeout_success("spool")


def test_parallel_timeout_fail() -> None:
    """A call beyond its time raises TimeoutError."""
    theirs.test_parallel_timeout_fail("spool")


@pytest.mark.parametrize("return_as", ["generator", "generator_unordered"])
def test_parallel_timeout_fail_with_generator(return_as: str) -> None:
    """A generator raises TimeoutError too, when the result is due."""
    theirs.test_parallel_timeout_fail_with_generator("spool", return_as)


def test_error_in_task_iterator() -> None:
    """An exception of what makes the tasks comes back, and leaves no call behind."""
    theirs.test_error_in_task_iterator("spool")


@pytest.mark.parametrize("context", [joblib.parallel_config, joblib.parallel.parallel_backend])
def test_backend_context_manager(monkeypatch: pytest.MonkeyPatch, context: object) -> None:
    """The backend is in force inside of its `with`, in threads too, and not after it."""
    theirs.test_backend_context_manager(monkeypatch, "spool", context)


def test_invalid_njobs() -> None:
    """No jobs at once is an error."""
    theirs.test_invalid_njobs("spool")


@pytest.mark.parametrize("n_jobs", ["2", 2.3, 2])
def test_njobs_converted_to_int(n_jobs: object) -> None:
    """A number of jobs that is a text counts as its number."""
    theirs.test_njobs_converted_to_int("spool", n_jobs)


@pytest.mark.parametrize("define", [theirs.SQUARE_MAIN, theirs.SQUARE_LOCAL, theirs.SQUARE_LAMBDA])
@pytest.mark.parametrize("position", ["delayed", "args", "kwargs"])
def test_parallel_with_unpicklable_functions_in_args(define: str, position: str, tmpdir: object) -> None:
    """Functions that no module has are tasks, and arguments of tasks."""
    before = "import joblib_spool\n" + define
    theirs.test_parallel_with_unpicklable_functions_in_args("spool", before, position, tmpdir)


def test_lambda_expression() -> None:
    """A lambda is a task."""
    theirs.test_lambda_expression("spool")


@pytest.mark.parametrize("n_jobs", [2, -1])
def test_abort_backend(n_jobs: int) -> None:
    """The call of a failed task ends at once, not with the longest of the others."""
    theirs.test_abort_backend(n_jobs, "spool")


@pytest.mark.parametrize("return_as", ["generator", "generator_unordered"])
@pytest.mark.parametrize("called", ["test_deadlock_with_generator", "test_multiple_generator_call"])
def test_generators(called: str, return_as: str) -> None:
    """A generator can be dropped, and a second one cannot begin before the first is over."""
    getattr(theirs, called)("spool", return_as, 2)


def test_multiple_generator_call_managed() -> None:
    """Inside of `with Parallel(...)`, too."""
    theirs.test_multiple_generator_call_managed("spool", "generator", 2)


def test_multiple_generator_call_separated() -> None:
    """Two Parallel can each have a generator."""
    theirs.test_multiple_generator_call_separated("spool", "generator", "generator_unordered", 2)
