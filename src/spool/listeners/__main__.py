"""`python -m spool.listeners SPOOL`: the process of the listeners of one spool, a child of the dispatcher.

What the dispatcher says comes on its standard input, a socket, and its answers go back on that. Where the standard
input is no socket (started by hand), it tells of what is there and leaves when that input ends.
"""

from __future__ import annotations

import os
import sys

from spool.listeners.lines import set_up_logging
from spool.listeners.process import serve


def main(arguments: list[str]) -> int:
    """Serve the spool named by the one argument."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m spool.listeners SPOOL\n")
        return 2
    set_up_logging("info", journald="JOURNAL_STREAM" in os.environ)
    return serve(os.path.realpath(arguments[0]), 0)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a plugin that hangs in a thread keeps nobody here
