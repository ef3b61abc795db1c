"""The process above a test cluster's daemons: it starts and kills them on request, and ends all of them with itself.

It reads one request a line, `start NAME COMMAND…` (fields separated by NUL) or `kill NAME SIGNAL`, and answers each
with the daemon's pid. At the end of its input it kills every process below it and leaves. Daemons restarted in the
middle of a test are its children and not the test's, and what they orphan becomes its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl


def main() -> None:
    """Serve requests until the input ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    log = sys.argv[1]
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    for line in sys.stdin:
        verb, name, *rest = line.rstrip("\n").split("\0")
        if verb == "start":
            with open(os.path.join(log, f"{name}.out"), "ab") as out:
                daemons[name] = subprocess.Popen(
                    rest, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=_end_with_parent
                )
        else:
            daemons[name].send_signal(int(rest[0]))
            if int(rest[0]) in (signal.SIGKILL, signal.SIGTERM):
                daemons[name].wait()
        print(daemons[name].pid, flush=True)
    _end_all()


def _end_with_parent() -> None:
    """Have a daemon end even where the keeper is killed."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_all() -> None:
    """Kill all that is below this process, again and again until nothing is."""
    while below := psutil.Process().children(recursive=True):
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=5)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    main()
