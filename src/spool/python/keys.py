"""The keys of a job file as type checkers know them; `spool.formats.keys` says what each means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

_Names = str | Sequence[str]


class CallKeys(TypedDict, total=False):
    """The keys of a job that calls a Python function."""

    shell: str
    workdir: str
    env: Mapping[str, str]
    setup: str
    container: str | Mapping[str, Any]
    cpus: int
    memory: str
    gpus: int
    gpu_memory: str
    gpu_min_memory: str
    gpu_type: _Names
    resources: Mapping[str, int]
    time_limit: str
    signal: str
    signal_to: Literal["main", "all", "shell"]
    umask: str
    limits: Mapping[str, int | str]
    nice: int
    gpu_idle: str
    gpu_idle_action: Literal["warn", "stop"]
    kill_grace: str
    priority: int
    depends_on: _Names | Mapping[str, Any]
    on_dependency_failure: Literal["cancel", "wait"]
    start_after: Any
    scheduling_timeout: str
    group: str
    group_limit: int
    max_running: int
    retry: Mapping[str, Any]
    requeue: bool
    preemptible: bool
    stdout: str
    stderr: str
    prolog: str
    epilog: str
    executor: str
    executor_options: Sequence[str]
    keep_session: bool
    project: str
    tags: Sequence[str]
    comment: str
    notify: _Names | Mapping[str, Any]


class JobKeys(CallKeys, total=False):
    """The keys of any job; those that spool writes itself are not among them."""

    script: str
    array: str
    matrix: Mapping[str, Sequence[object]]
    rows: Sequence[Mapping[str, object]]
