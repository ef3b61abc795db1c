"""The joblib backend "spool": `with joblib.parallel_config(backend="spool")`. Importing this makes it known."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import spool
from joblib.parallel import (
    AutoBatchingMixin,
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
    ThreadingBackend,
    cpu_count,
    register_parallel_backend,
)

__all__ = ["Batch", "SpoolBackend"]

_JOBLIBS = ("context", "max_nbytes", "mmap_mode", "temp_folder", "verbose")  # options that joblib gives every backend


class Batch:
    """Tasks of joblib for one job. It belongs to this module, so that its process knows the backend "spool" too."""

    def __init__(self, tasks: Callable[[], Any]) -> None:
        """*tasks*: the `BatchedCalls` of joblib; the job is called after the function of the first."""
        self._tasks = tasks
        for function, _, _ in getattr(tasks, "items", ())[:1]:
            self.__qualname__ = str(getattr(function, "__qualname__", type(function).__qualname__))

    def __call__(self) -> Any:
        """Run the tasks one after the other, and return their results."""
        return self._tasks()


class SpoolBackend(AutoBatchingMixin, ParallelBackendBase):
    """Runs each batch of a `joblib.Parallel` as a job of a spool.

    The options are those of `spool.Executor`: `root`, `name`, and the keys of a job file.
    """

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._executor: spool.Executor | None = None
        self._options: dict[str, Any] = {}
        self._open: set[concurrent.futures.Future[Any]] = set()

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many batches may be in the spool at once; -1 means as many as there are CPUs."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        return n_jobs if n_jobs > 0 else max(cpu_count() + 1 + n_jobs, 1)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **options: Any) -> int:
        """Open the spool, and return the number of batches at once. Raises what `spool.Executor` raises.

        Within a task of a job, joblib's own rule for nested calls holds instead: threads, and none below threads. A job
        that waited for others would keep its CPUs, and two such jobs could wait for each other for ever.
        """
        if self.nesting_level and "SPOOL_JOB" in os.environ:
            nested = ThreadingBackend if self.nesting_level == 1 else SequentialBackend
            raise FallbackToBackend(nested(nesting_level=self.nesting_level))
        number = self.effective_n_jobs(n_jobs)
        if number == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        taken = {**self.backend_kwargs, **options}
        wanted = {key: value for key, value in taken.items() if key not in (*_JOBLIBS, "prefer", "require")}
        if self.inner_max_num_threads is not None:
            threads = dict.fromkeys(self.MAX_NUM_THREADS_VARS, str(self.inner_max_num_threads))
            wanted["env"] = {**threads, **wanted.get("env", {})}
        if self._executor is None or wanted != self._options:
            former, self._executor = self._executor, spool.Executor(**wanted)
            self._options = wanted
            if former is not None:
                former.shutdown(wait=False)
        return number

    def submit(
        self, func: Callable[[], Any], callback: Callable[[Any], None] | None = None
    ) -> concurrent.futures.Future[Any]:
        """Submit a batch. A failure to do so is that of the batch: joblib may call this where no exception is seen."""
        assert self._executor is not None
        future: concurrent.futures.Future[Any]
        try:
            future = self._executor.submit(Batch(func))
        except Exception as error:
            future = concurrent.futures.Future()
            future.set_exception(error)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: concurrent.futures.Future[Any]) -> Any:
        """Return the results of a batch; raise what one of its tasks has raised, or how its job has ended."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel the batches that wait or run."""
        left = [future for future in list(self._open) if not future.cancel()]
        for future in left:
            if isinstance(future, spool.Future):
                with suppress(spool.SpoolError):  # it has just ended
                    future.job.cancel("joblib needs its results no longer")

    def terminate(self) -> None:
        """End a call. The spool stays open for the next one."""
        self.reset_batch_stats()


register_parallel_backend("spool", SpoolBackend)
