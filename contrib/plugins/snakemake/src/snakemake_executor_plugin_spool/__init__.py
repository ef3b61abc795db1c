"""Snakemake executor plugin: each step or group of a workflow is a job of spool.

Snakemake decides which steps are ready and what a step does; spool decides when it starts, gives it its CPUs, memory
and GPUs, ends it at its limits, and keeps its log.
"""

# Without `from __future__ import annotations`: Snakemake makes options of the types in `ExecutorSettings`.

import hashlib
import os
import threading
import tomllib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface
from snakemake_interface_executor_plugins.logging import LoggerExecutorInterface
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase
from snakemake_interface_executor_plugins.workflow import WorkflowExecutorInterface
from spool import Client, End, Job, SpoolError, State, WaitedJobs

from snakemake_executor_plugin_spool import _spool

__all__ = ["Executor", "ExecutorSettings", "common_settings", "job_keys"]

_OWN = "spool_"  # what the resources begin with that are keys of the job file
_LONGEST_STEM = 70


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    """The options `--spool-…` of Snakemake."""

    dir: Optional[str] = field(  # noqa: UP045  (Snakemake knows no other spelling)
        default=None,
        metadata={"help": "The directory of the spool. Default: $SPOOL_DIR, else ~/.spool", "required": False},
    )
    own_mem_mb: int = field(
        default=256,
        metadata={
            "help": "Memory of the Snakemake process in each job, added to mem_mb of the rule",
            "required": False,
            "type": int,
        },
    )


common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_envvar_declarations_to_cmd=False,  # they are in the job file's `env`, not in a command line that `ps` shows
    auto_deploy_default_storage_provider=False,
)


class Executor(RemoteExecutor):
    """Submits what is ready as one batch, and sees in the spool's directories which jobs have ended."""

    def __init__(self, workflow: WorkflowExecutorInterface, logger: LoggerExecutorInterface) -> None:
        """Use the spool of the settings, which is made if it does not exist.

        Not in `__post_init__`: the thread that looks for ends runs before that is called.
        """
        settings = workflow.executor_settings or ExecutorSettings()
        self._own_mem_mb = settings.own_mem_mb
        try:
            self._client = Client(settings.dir, make=True)
        except SpoolError as error:
            raise WorkflowError(str(error)) from error
        self._lock = threading.Lock()  # one thread submits, another looks
        self._waited = WaitedJobs()
        self._ends: dict[str, End] = {}
        self._alive: dict[str, None] = {}  # in the order of their submission
        super().__init__(workflow, logger)

    def run_jobs(self, jobs: list[JobExecutorInterface]) -> None:
        """Submit all steps that are ready at once."""
        batch: list[JobExecutorInterface] = []
        for job in jobs:
            self.run_job_pre(job)
            running = _spool.active(self._client, self._name_of(job))
            if running is not None:  # of a Snakemake that was killed: two of one step would write the same files
                self._follow(job, running, max(1, self._newest_run(job)), again=True)
            else:
                batch.append(job)
        runs = [self._newest_run(job) + 1 for job in batch]
        try:
            submitted = _spool.submit(self._client, [self._keys(job) for job in batch])
        except (OSError, SpoolError) as error:
            raise WorkflowError(f"cannot submit jobs to the spool {self._client.root}: {error}") from error
        for job, found, run in zip(batch, submitted, runs, strict=True):
            if isinstance(found, Job):
                self._follow(job, found, run)
            else:
                self.report_job_error(SubmittedJobInfo(job), msg=f"{found} ")

    def run_job(self, job: JobExecutorInterface) -> None:
        """Submit one step."""
        self.run_jobs([job])

    def get_python_executable(self) -> str:
        """Return the Python of a job's Snakemake, which imports nothing from the directory where it runs (`-P`)."""
        return f"{super().get_python_executable()} -P"

    def get_job_args(self, job: JobExecutorInterface) -> str:
        """Return the arguments of the Snakemake in the job: its cores are those that the job was given.

        It makes no second try of its own, with the memory of the first: `--retries 0` does not reach rules that set
        their `retries`, and those for preemptible machines do.
        """
        once = "--preemptible-rules --preemptible-retries 0"
        return f"{super().get_job_args(job)} --cores {cpus_of(job)} {once}"

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
        """Report the jobs that have ended, and yield the others."""
        with self._lock:
            ended = self._waited.poll()
        for found, end in ended:
            self._ends[found.name] = end
            self._alive.pop(found.name, None)
        self.next_seconds_between_status_checks = self._waited.pause_s
        for info in active_jobs:
            known = self._ends.pop(info.external_jobid, None)
            if known is None:
                yield info
            elif known.outcome is State.FINISHED:
                self.report_job_success(info)
            else:
                logs = [self._log_of(known.name, known.run)] if known.run is not None else []
                self.report_job_error(info, msg=f"{said_of(known)} ", aux_logs=logs)

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Cancel the jobs of this workflow that wait or run.

        *active_jobs* lacks those that the other thread is just checking, so the executor keeps its own list.
        """
        _spool.cancel(self._client, list(self._alive), "Snakemake was stopped")

    def _follow(self, job: JobExecutorInterface, submitted: Job, run: int, *, again: bool = False) -> None:
        name, verb = submitted.name, "goes on as" if again else "is"
        self._alive[name] = None
        with self._lock:
            unknown = self._waited.add([submitted])
        for error in unknown.values():  # its files were removed at once
            self._ends[name] = End(name, State.LOST, reason=str(error))
        self.report_job_submission(SubmittedJobInfo(job, external_jobid=name))
        log = self._log_of(name, run)
        self.logger.info(f"Job {job.jobid} {verb} job {name} of the spool {self._client.root} (log: {log}).")

    def _name_of(self, job: JobExecutorInterface) -> str:
        """Return the name of a step's job: the same one for each of its tries, and for a Snakemake started again."""
        identity = "\n".join((os.getcwd(), str(self.snakefile), stem_of(job), *sorted(map(str, job.output))))
        return f"{stem_of(job)}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"

    def _newest_run(self, job: JobExecutorInterface) -> int:
        return _spool.newest_run(self._client, self._name_of(job))

    def _log_of(self, name: str, run: int) -> str:
        return f"{self._client.root}/jobs/{name}/{run}/log"

    def _keys(self, job: JobExecutorInterface) -> dict[str, object]:
        return {
            "command": self.format_job_exec(job),
            **job_keys(job, self._own_mem_mb),
            "name": self._name_of(job),
            "env": {name: str(value) for name, value in self.envvars().items()},
        }


def job_keys(job: JobExecutorInterface, own_mem_mb: int) -> dict[str, object]:
    """Return what a step asks for, as keys of a job file. The sums of a group are Snakemake's."""
    resources = job.resources
    keys: dict[str, object] = {"cpus": cpus_of(job), "retry": {"max": 0}, "comment": comment_of(job)}
    if (mem_mb := resources.get("mem_mb")) is not None:
        keys["memory"] = f"{int(mem_mb) + own_mem_mb}M"
    if runtime := resources.get("runtime"):
        keys["time_limit"] = f"{int(runtime)}m"
    if gpus := resources.get("gpu"):
        keys["gpus"] = int(gpus)
        if model := resources.get("gpu_model"):
            keys["gpu_type"] = str(model)
    own = {name.removeprefix(_OWN): value for name, value in resources.items() if name.startswith(_OWN)}
    return {**keys, **{name: _toml(value) for name, value in own.items()}}


def cpus_of(job: JobExecutorInterface) -> int:
    """Return the CPUs of a step: `cpus_per_task` if it is set, else its threads, but at least one."""
    return max(1, int(job.resources.get("cpus_per_task") or job.threads))


def stem_of(job: JobExecutorInterface) -> str:
    """Return what the name of a job begins with: the rule and its wildcards, or the group."""
    words = [job.groupid] if job.is_group() else [job.rule.name, *map(str, job.wildcards_dict.values())]
    text = "-".join(words)
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in text)
    return plain.strip("-._")[:_LONGEST_STEM].rstrip("-._") or "step"


def comment_of(job: JobExecutorInterface) -> str:
    """Return the comment of a job: its rules, and what they make."""
    rules = ", ".join(sorted({each.rule.name for each in job.jobs})) if job.is_group() else job.rule.name
    return f"Snakemake: {rules} -> {', '.join(_few(map(str, job.output)))}"


def said_of(end: End) -> str:
    """Return how a job has ended, in a sentence."""
    code = "" if end.exit_code is None else f", exit code {end.exit_code}"
    reason = f": {end.reason}" if end.reason else ""
    return f"Job {end.name} of the spool: {end.outcome}{code}{reason}."


def _few(words: Iterator[str]) -> list[str]:
    found = list(words)
    return found if len(found) <= 3 else [*found[:3], "…"]


def _toml(value: Any) -> object:
    """Return the value of a resource as a job file has it: lists and tables are written as in TOML."""
    if isinstance(value, str) and value.startswith(("[", "{")):
        return tomllib.loads(f"value = {value}")["value"]
    return value
