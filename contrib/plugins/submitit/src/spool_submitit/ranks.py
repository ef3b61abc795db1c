"""The tasks of one submitit job: `python -m spool_submitit.ranks NUMBER FOLDER merged|apart COMMAND…`.

Each runs the command with its own rank and its own logs. spool sends every signal to all processes of a run, so that
nothing is passed on here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import JobPaths


class Ranks:
    """The running tasks, by their pid."""

    def __init__(self, number: int, folder: str, command: list[str], *, is_merged: bool) -> None:
        self._number = number
        self._folder = folder
        self._command = command
        self._is_merged = is_merged
        self._running: dict[int, int] = {}
        self._is_stopping = False

    def run(self) -> int:
        """Run all tasks, and return the exit code of the first that fails, else 0."""
        signal.signal(signal.SIGTERM, self._stops)
        signal.signal(JobEnvironment._usr_sig(), lambda *_: None)
        for rank in range(self._number):
            self._running[self._start(rank)] = rank
        code = 0
        while self._running:
            pid, status = os.wait()
            rank = self._running.pop(pid, -1)
            ended = os.waitstatus_to_exitcode(status)
            if rank >= 0:
                code = code or (128 - ended if ended < 0 else ended)
            self._end_if_over()
        return code

    def _start(self, rank: int) -> int:
        paths = JobPaths(self._folder, os.environ["SPOOL_JOB"], rank)
        paths.folder.mkdir(parents=True, exist_ok=True)
        own = {"SUBMITIT_SPOOL_LOCALID": str(rank), "SUBMITIT_SPOOL_GLOBALID": str(rank)}
        with contextlib.ExitStack() as files:
            out = files.enter_context(paths.stdout.open("ab"))
            err = out if self._is_merged else files.enter_context(paths.stderr.open("ab"))
            process = subprocess.Popen(self._command, env=os.environ | own, stdout=out, stderr=err)
        process.returncode = 0  # it is waited for here, among all others
        return process.pid

    def _stops(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True
        self._end_if_over()

    def _end_if_over(self) -> None:
        """End the others once the first task is over in a run that is being stopped: they wait for its checkpoint."""
        if self._is_stopping and 0 not in self._running.values():
            for pid in self._running:
                os.kill(pid, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run the tasks of a job."""
    number, folder, outputs, *command = arguments
    return Ranks(int(number), folder, command, is_merged=outputs == "merged").run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
