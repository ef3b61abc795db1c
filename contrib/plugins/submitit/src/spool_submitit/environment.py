"""What a submitit job finds around it when spool runs it: who it is, and how it is interrupted and queued again."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import ClassVar

import spool
from submitit.core import logger
from submitit.core.job_environment import JobEnvironment, SignalHandler
from submitit.core.utils import DelayedSubmission, JobPaths

_STOP_PATIENCE_S = 30.0


class SpoolJobEnvironment(JobEnvironment):
    """The environment of a submitit job that spool runs."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": "SPOOL_JOB",
        "num_tasks": "SUBMITIT_SPOOL_NTASKS",
        "num_nodes": "SUBMITIT_SPOOL_NNODES",
        "node": "SUBMITIT_SPOOL_NODEID",
        "global_rank": "SUBMITIT_SPOOL_GLOBALID",
        "local_rank": "SUBMITIT_SPOOL_LOCALID",
    }

    def __init__(self) -> None:
        super().__init__()
        self._is_requeued = False

    @property
    def array_task_id(self) -> str | None:
        """The index of the job in its array; None if it is in none."""
        return os.environ.get("SPOOL_ARRAY_INDEX")

    @property
    def array_job_id(self) -> str | None:
        """The name of the array that the job is in; None if it is in none."""
        index = self.array_task_id
        return None if index is None else self.raw_job_id.removesuffix(f"_{index}")

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        """Checkpoint before the time limit, and when spool stops the run to queue the job again."""
        handler = SignalHandler(self, paths, submission)
        signal.signal(signal.SIGTERM, functools.partial(self._stopped, handler))
        signal.signal(signal.SIGCONT, handler.bypass)
        signal.signal(self._usr_sig(), handler.checkpoint_and_try_requeue)

    def _stopped(self, handler: SignalHandler, number: int, frame: FrameType | None) -> None:
        """Do what the order to stop means: leave a checkpoint if the job continues later, and end at once if not."""
        order = _stop_order()
        if self._is_requeued or not order:
            handler.bypass(number, frame)
        elif order in ("requeue", "hold"):
            handler.checkpoint_and_exit(number, frame)
        else:
            logger.get_logger().warning(f"Ending, because spool stops this job ({order}).")
            sys.exit(128 + number)

    def _requeue(self, countdown: int) -> None:
        """Queue the job again: this run is stopped, and the next one loads the checkpoint."""
        self._is_requeued = True
        spool.Client(os.environ["SPOOL_DIR"]).requeue(self.job_id)
        logger.get_logger().info(f"Requeued job {self.job_id} ({countdown} remaining timeouts)")
        until = time.monotonic() + _STOP_PATIENCE_S
        while not _stop_order() and time.monotonic() < until:  # a run that ends before that would count as failed
            time.sleep(0.02)


def _stop_order() -> str:
    """Return the first word of the run's record `stop`: why it is being stopped; "" if it is not."""
    try:
        words = Path(os.environ["SPOOL_METADIR"], "stop").read_text(errors="replace").split()
    except (OSError, KeyError):
        return ""
    return words[0] if words else ""
