"""A launcher that makes one array of each sweep, and one job of each of its combinations."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

# Makes `hydra/launcher=spool` known.
from hydra_plugins.hydra_spool_launcher import config as _config  # noqa: F401

log = logging.getLogger(__name__)

_LONGEST_KEY, _LONGEST_SHOWN = 64, 60
_MOST_SHOWN = 512 << 10  # bytes: half of a job file


class SpoolLauncher(Launcher):
    """Runs the jobs of a sweep through spool, and waits for them."""

    def __init__(self, root: str | None, name: str, more: Any, **keys: Any) -> None:
        self._root = root
        self._name = name
        given = {**keys, **_plain(more)}
        self._keys = {key: _plain(value) for key, value in given.items() if value not in (None, {}, [])}
        self.config: DictConfig | None = None
        self.task_function: TaskFunction | None = None
        self.hydra_context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what the jobs run."""
        self.config = config
        self.hydra_context = hydra_context
        self.task_function = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run one job for each of *job_overrides*, and return how they ended, in their order.

        A job that has no return, because it was cancelled or took too much memory, has failed with that reason.
        """
        from spool import Executor  # here, because its import takes long, and only a sweep needs it

        assert self.config is not None
        assert self.hydra_context is not None
        assert self.task_function is not None
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        _make_sweep_dir(self.config)
        numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
        for number, overrides in zip(numbers, job_overrides, strict=True):
            log.info(f"\t#{number} : {' '.join(filter_overrides(overrides))}")

        executor = Executor(self._root, name=_job_name(self._name), **self._keys)
        run = functools.partial(_run, self.hydra_context, self.config, self.task_function, Singleton.get_state())
        lists = [list(overrides) for overrides in job_overrides]
        futures = executor.submit_all(run, lists, numbers, parameters=_parameters(job_overrides))
        array = futures[0].array
        log.info(f"{len(futures)} jobs in {executor.root}: {array}")
        try:
            concurrent.futures.wait(futures)
        except BaseException:
            log.warning(f"The jobs go on without this program. To end them, run: spool cancel {array}")
            raise
        finally:
            executor.shutdown(wait=False)
        return [_returned(future, overrides) for future, overrides in zip(futures, job_overrides, strict=True)]


def _run(
    hydra_context: HydraContext,
    config: DictConfig,
    task_function: TaskFunction,
    singletons: dict[Any, Any],
    overrides: list[str],
    number: int,
) -> JobReturn:
    """Run one job of a sweep: this is what spool calls, in a process of its own."""
    Singleton.set_state(singletons)
    setup_globals()
    own = hydra_context.config_loader.load_sweep_config(config, overrides)
    with open_dict(own.hydra.job):
        own.hydra.job.id = os.environ["SPOOL_JOB"]
        own.hydra.job.num = number
    return run_job(
        hydra_context=hydra_context,
        task_function=task_function,
        config=own,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def _returned(future: concurrent.futures.Future[JobReturn], overrides: Sequence[str]) -> JobReturn:
    """Return what a job has returned, or that it has failed and why."""
    try:
        error = future.exception()
    except concurrent.futures.CancelledError as cancelled:
        error = cancelled
    if error is None:
        return future.result()
    if not isinstance(error, Exception):  # as SystemExit, which ends the job and not this program
        error = RuntimeError(f"{type(error).__name__}: {error}")
    failed = JobReturn(overrides=list(filter_overrides(overrides)), status=JobStatus.FAILED)
    failed.return_value = error
    return failed


def _parameters(job_overrides: Sequence[Sequence[str]]) -> list[dict[str, str]] | None:
    """Return what spool shows of each job: its overrides, by keys that a job file can have. None if there are none.

    The file of an array has a limit, so that long values are cut, and those of a very large sweep are not shown.
    """
    found: list[dict[str, str]] = []
    for overrides in job_overrides:
        pairs = [override.partition("=") for override in filter_overrides(overrides)]
        found.append({_parameter(key): value[:_LONGEST_SHOWN] for key, _, value in pairs})
    keys = list(dict.fromkeys(key for each in found for key in each))
    shown = [{key: each.get(key, "") for key in keys} for each in found]
    return shown if keys and len(json.dumps(shown)) < _MOST_SHOWN else None


def _parameter(key: str) -> str:
    """Return the key of an override, such as `+optimizer.lr`, as one of a job file: `optimizer_lr`."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", key.lstrip("+~"))
    return (name if re.match(r"(?!index$)[A-Za-z_]", name) else f"_{name}")[:_LONGEST_KEY]


def _make_sweep_dir(config: DictConfig) -> None:
    place = Path(str(config.hydra.sweep.dir))
    place.mkdir(parents=True, exist_ok=True)
    if config.hydra.sweep.get("mode") is not None:
        place.chmod(int(str(config.hydra.sweep.mode), 8))


def _job_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:60] or "hydra"


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
