"""`python -m spool.listeners SPOOL`: the process of the listeners of one spool, a child of the dispatcher.

What the dispatcher says comes on its standard input, a socket, and its answers go back on that. Where the standard
input is no socket (started by hand), it tells of what is there and leaves when that input ends. What plugins start
finds nothing on its standard input, and does not have the socket.
"""

from __future__ import annotations

import fcntl
import os
import sys

from spool.listeners.logformat import set_up_logging
from spool.listeners.process import serve

_FIRST_OWN = 3  # of the descriptors: those before it are everybody's


def main(arguments: list[str]) -> int:
    """Serve the spool named by the one argument."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m spool.listeners SPOOL\n")
        return 2
    set_up_logging("info", journald="JOURNAL_STREAM" in os.environ)
    return serve(os.path.realpath(arguments[0]), _own_input())


def _own_input() -> int:
    """Take the standard input away from all that this process will start; return where it is now."""
    channel = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    return channel


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a plugin that hangs in a thread keeps nobody here
