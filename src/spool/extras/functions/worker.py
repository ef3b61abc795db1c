"""What the job of a call runs: `python -m spool.extras.functions.worker NAME` makes the call in `calls/NAME`.

It imports little, because each call waits for that.
"""

from __future__ import annotations

import os
import sys

from spool.core.errors import SpoolError
from spool.core.layout import CALL, CALLS
from spool.extras.functions import calls


def main(arguments: list[str]) -> int:
    """Make the call, and return the exit code of its job: 0, or 1 after an exception."""
    [name] = arguments
    root, metadir = os.environ["SPOOL_DIR"], os.environ["SPOOL_METADIR"]
    pid, there = os.getpid(), dict[str, str]()
    try:
        _keep(f"{root}/{CALLS}/{name}", f"{metadir}/{CALL}")
        call, there = calls.load(root, name, int(os.environ.get("SPOOL_ARRAY_INDEX", "0")))
        value = call()
        if os.getpid() != pid:  # a child that the function has forked and not ended
            return 0
        differs = calls.differences(there)
        calls.leave_value(metadir, value, differs)
    except BaseException as error:
        if os.getpid() != pid:
            raise
        trace = _trace(error)
        sys.stdout.flush()
        print(trace, end="", file=sys.stderr)
        differs = calls.differences(there)
        calls.leave_error(metadir, error, trace, differs)
        _say(differs)
        return 1
    _say(differs)
    return 0


def _keep(path: str, record: str) -> None:
    """Leave the call in the metadir: a record of what ran, which nothing needs."""
    try:
        os.link(path, record)
    except OSError:  # there is no call, or no room
        return


def _say(differs: list[str]) -> None:
    if differs:
        print(f"spool: packages of other versions than the caller's: {', '.join(differs)}", file=sys.stderr)


def _trace(error: BaseException) -> str:
    """Return the traceback from the function on, without the frames of spool."""
    if isinstance(error, SpoolError):
        return f"spool: {error}\n"
    import traceback  # here, because most calls raise nothing

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, calls.__file__):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
