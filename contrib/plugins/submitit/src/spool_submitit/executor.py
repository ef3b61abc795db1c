"""submitit's executor for spool: each submission becomes a job, and each batch one array."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import spool
from submitit.core import core
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.local import LocalExecutor
from submitit.slurm.slurm import SlurmExecutor

from spool_submitit.call import own_path
from spool_submitit.job import SpoolJob

_GENERIC = frozenset(
    {"name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "stderr_to_stdout"}
)
_OWN = frozenset({"array_parallelism", "setup", "signal_delay_s"})
_KEYS = frozenset(
    {
        "comment", "depends_on", "env", "epilog", "executor", "gpu_idle", "gpu_idle_action", "gpu_memory", "gpu_type",
        "group", "group_limit", "kill_grace", "notify", "on_dependency_failure", "priority", "project", "prolog",
        "requeue", "resources", "retry", "scheduling_timeout", "start_after", "tags", "workdir",
    }
)  # fmt: skip
_TIMEOUT_MIN = 5  # submitit's own, on every cluster
_SIGNAL_DELAY_S = 90
_SIGNAL_VARIABLE = "SUBMITIT_PREEMPT_SIGNAL"
_GIB = 1024**3


class SpoolExecutor(core.Executor):
    """Submits calls as jobs of a spool, each with its own CPUs, memory and GPUs.

    *folder* has the pickles and the logs, as everywhere in submitit; *root* is the spool, by default that of the
    command line. *max_num_timeout* and *max_pickle_size_gb* are those of submitit's other executors; *python* is the
    command of the Python that runs the jobs, such as "apptainer exec image.sif python".

    Parameters are submitit's `timeout_min`, `cpus_per_task` and so on, keys of spool's job files (`priority`,
    `gpu_memory`, `tags`), and `array_parallelism`, `setup` and `signal_delay_s` as for Slurm.
    """

    job_class = SpoolJob

    def __init__(
        self,
        folder: str | Path,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
        root: str | None = None,
    ) -> None:
        super().__init__(folder)
        self.max_num_timeout = max_num_timeout
        self.max_pickle_size_gb = max_pickle_size_gb
        self.python = [sys.executable] if python is None else shlex.split(python)
        self._client = spool.Client(root, make=True)

    @classmethod
    def affinity(cls) -> int:
        """Return 2, the score of a cluster, where a spool is there and Slurm is not; else 0: only if asked for."""
        if shutil.which("srun") is not None:
            return 0
        try:
            spool.Client()
        except (spool.SpoolError, OSError):
            return 0
        return 2

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return _Names(_KEYS | _OWN)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Set parameters; None takes one back. Raises ValueError for those that cannot be."""
        unknown = sorted(kwargs.keys() - _GENERIC - _KEYS - _OWN)
        if unknown:
            known = ", ".join(sorted(_GENERIC | _KEYS | _OWN))
            raise ValueError(f"Unavailable parameter(s): {', '.join(unknown)}. Valid parameters are: {known}")
        if (kwargs.get("nodes") or 1) > 1:
            raise ValueError("spool runs jobs on one machine. Use nodes=1")
        merged = {**self.parameters, **kwargs}
        for name, value in merged.items():
            if value is None:
                self.parameters.pop(name, None)
            else:
                self.parameters[name] = value

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[core.Job[Any]]:
        """Write the pickles, submit one job, or one array of all, and return submitit's jobs."""
        number = len(delayed_submissions)
        stem = re.sub(r"[^A-Za-z0-9.-]+", "-", str(self.parameters.get("name", "submitit"))).strip("-.")[:60]
        name = self._client.fresh_name(stem or "submitit")
        ids = [name] if number == 1 else [f"{name}_{at}" for at in range(number)]
        written: list[Path] = []
        try:
            for submission, job_id in zip(delayed_submissions, ids, strict=True):
                written.append(self._write(submission, job_id, number))
            command, keys = self._job_file(name, number)
            self._client.submit(command, name=name, **keys)
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise
        ranks = range(self._tasks())
        return [SpoolJob(self.folder, job_id, ranks, self._client.root) for job_id in ids]

    def _write(self, submission: DelayedSubmission, job_id: str, number: int) -> Path:
        """Write the pickle of a job, one of *number*, where it finds it. Raises RuntimeError if that is too large."""
        submission.set_timeout(self.parameters.get("timeout_min", _TIMEOUT_MIN), self.max_num_timeout)
        path = JobPaths(self.folder, job_id).submitted_pickle
        path.parent.mkdir(parents=True, exist_ok=True)
        submission.dump(path)
        size_gb = path.stat().st_size / _GIB
        if number * size_gb > self.max_pickle_size_gb:
            path.unlink()
            raise RuntimeError(
                f"Submitting an estimated {number} x {size_gb:.2f} > {self.max_pickle_size_gb}GB of objects (function "
                "and arguments) through pickle. If this is intended, update executor.max_pickle_size_gb."
            )
        return path

    def _tasks(self) -> int:
        return max(1, int(self.parameters.get("tasks_per_node", 1)))

    def _job_file(self, name: str, number: int) -> tuple[str | list[str], dict[str, Any]]:
        """Return the command and the keys of the job *name*, an array of *number* tasks if that is more than one."""
        given = self.parameters
        ranks = self._tasks()
        keys: dict[str, Any] = {key: given[key] for key in _KEYS & given.keys()}
        keys["cpus"] = ranks * int(given.get("cpus_per_task", 1))
        keys["gpus"] = int(given.get("gpus_per_node", 0))
        if "mem_gb" in given:
            keys["memory"] = f"{int(given['mem_gb'] * _GIB)}B"
        keys |= self._times()
        keys["env"] = {
            **given.get("env", {}),
            "SUBMITIT_EXECUTOR": "spool",
            "SUBMITIT_SPOOL_NTASKS": str(ranks),
            _SIGNAL_VARIABLE: JobEnvironment.USR_SIG,
        }
        merged = bool(given.get("stderr_to_stdout", False))
        command = [*self.python, "-u", "-P", "-m", "spool_submitit.call", str(self.folder), *own_path()]
        if ranks > 1:
            words = [str(ranks), str(self.folder), "merged" if merged else "apart"]
            command = [*self.python, "-u", "-P", "-m", "spool_submitit.ranks", *words, *command]
        else:
            paths = JobPaths(self.folder)
            keys["stdout"] = _pattern(paths.stdout, name)
            if not merged:
                keys["stderr"] = _pattern(paths.stderr, name)
        whole: str | list[str] = command
        if setup := given.get("setup", ()):
            # One shell for all of it: what the setup exports, the job sees. And no shell is left that waits: a signal
            # reaches the job.
            whole = "\n".join(("set -e", *setup, f"exec {shlex.join(command)}"))
            keys["shell"] = shutil.which("bash") or "/bin/sh"
        if number > 1:
            keys["array"] = f"0-{number - 1}"
            keys["max_running"] = min(number, int(given.get("array_parallelism", 256)))
            whole = _literal(whole) if isinstance(whole, str) else [_literal(word) for word in whole]
            keys["env"] = {key: _literal(value) for key, value in keys["env"].items()}
        return whole, keys

    def _times(self) -> Mapping[str, str]:
        """Return the time limit, and when the job is warned of it."""
        limit_s = 60 * float(self.parameters.get("timeout_min", _TIMEOUT_MIN))
        delay_s = float(self.parameters.get("signal_delay_s", min(_SIGNAL_DELAY_S, limit_s / 2)))
        return {"time_limit": _duration(limit_s), "signal": f"{JobEnvironment.USR_SIG}@{_duration(delay_s)}"}


class _Names(set[str]):
    """Names of parameters that lists only those that no other executor has.

    submitit gives a parameter without a prefix, as old programs have it, to the last executor that lists its name. With
    this one installed, it still goes to Slurm.
    """

    def __iter__(self) -> Iterator[str]:
        others = SlurmExecutor._valid_parameters() | LocalExecutor._valid_parameters()
        return (name for name in super().__iter__() if name not in others)


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def _literal(text: str) -> str:
    """Return *text* as an array must spell it to mean exactly that."""
    return text.replace("{index}", "{{index}}")


def _pattern(path: Path, name: str) -> str:
    """Return a path of submitit as a job file spells it: `%j` is the job, `%A` its array, `%t` the first task."""
    tags = {"%j": "%n", "%A": name, "%a": "%a", "%t": "0", "%": "%%", "$": "$$", "{index}": "{{index}}"}
    return re.sub(r"%[jAat]|[%$]|\{index\}", lambda found: tags[found[0]], str(path))
