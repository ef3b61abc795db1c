"""What the tests submit: in a module, as the functions of most programs are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from submitit import JobEnvironment
from submitit.helpers import Checkpointable, DelayedSubmission


def add(one: int, other: int) -> int:
    """Return the sum."""
    return one + other


def same(lr: float) -> float:
    """Return the argument."""
    return lr


def identity() -> tuple[str, str | None, str | None, int]:
    """Return what the job is told about itself."""
    here = JobEnvironment()
    return here.job_id, here.array_job_id, here.array_task_id, here.num_tasks


def variable(name: str) -> str | None:
    """Return a variable of the job's environment."""
    return os.environ.get(name)


def gpu_alone(seconds: float) -> tuple[str, float, float]:
    """Return the job's GPUs, and from when to when it had them."""
    begin = time.time()
    time.sleep(seconds)
    return os.environ["CUDA_VISIBLE_DEVICES"], begin, time.time()


class Counting(Checkpointable):
    """Counts up to 1000 in its first run, which nobody waits for; a later one returns what it began with."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.count = 0
        self.runs = 0

    def __call__(self) -> tuple[int, int]:
        """Count, or return the count and the number of earlier runs."""
        if self.runs:
            return self.count, self.runs
        while self.count < 1000 * 60:
            self.count += 1
            if JobEnvironment().global_rank == 0:
                self.mark.write_text(str(self.count))
            time.sleep(0.01)
        return self.count, self.runs

    def checkpoint(self) -> DelayedSubmission:
        """Keep the count."""
        self.runs += 1
        return DelayedSubmission(self)


class Pausing:
    """A function that cannot be checkpointed; its first run lasts."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self) -> str:
        """Return at once if it was here before."""
        if self.mark.exists():
            return "again"
        self.mark.touch()
        time.sleep(600)
        return "first"


def tidy(mark: Path) -> None:
    """Say that it runs, and when it is ended."""
    try:
        mark.write_text("began")
        time.sleep(600)
    finally:
        mark.write_text("tidied")


def call(function: Callable[[], object]) -> object:
    """Return what *function* does."""
    return function()
