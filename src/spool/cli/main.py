"""The entry point of `spool`: the fast path or the full one, and how errors end.

An expected error is one line on stderr and the exit code of its class (`core/errors.py`); only a bug prints a
traceback.

A command for several jobs continues after a failure and exits with the highest code. `wait`, `run` and `submit --wait`
exit like the job (`cli/wait.py`, FORMAT 13).
"""

from __future__ import annotations

import gc
import io
import os
import sys

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with its exit code."""
    gc.disable()  # imported modules are no garbage; a verb enables it again
    _open_missing()
    _lose_messages()
    code = run(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = code or _without_reader()
    except OSError as error:
        code = code or _told(error)  # an earlier failure has been reported already
    _leave(code)


def _told(error: OSError) -> int:
    """Report an error of stdout's disk in one line, and return the exit code."""
    from spool.cli.render import code_of

    def again() -> int:
        raise error

    _drop_output()
    return code_of(again)


def _leave(code: int) -> NoReturn:
    """End the process quickly: tearing down the interpreter takes a tenth of the time of a short command."""
    threading = sys.modules.get("threading")
    if threading is not None and threading.active_count() > 1:
        sys.exit(code)
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # stderr is closed as well
            code = code or 1
    os._exit(code)


def _open_missing() -> None:
    """Open /dev/null for each closed standard descriptor, as after `>&-`."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, so this one
            if fd == number:
                os.set_inheritable(fd, True)
            # The descriptor stays open when something else takes the place of this file.
            setattr(sys, name, open(fd, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


class Messages(io.FileIO):
    """Stderr. What cannot be written there is lost: the command has done its work, and its exit code says so."""

    def write(self, data: Any, /) -> int:
        """Write bytes, or lose them."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _lose_messages() -> None:
    """Go on, and print no traceback, where stderr is on a full disk or has lost its reader; the log is there too."""
    raw, before = Messages(2, "w", closefd=False), sys.stderr
    errors = before.errors or "backslashreplace"
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(raw), before.encoding, errors, line_buffering=True)


def run(arguments: Sequence[str]) -> int:
    """Run the command line *arguments* and return the exit code."""
    try:
        code = None
        if "submit" in arguments[:3:2]:  # the first word, or the one after `--spool DIR`
            from spool.cli import fastsubmit

            code = fastsubmit.submit(arguments)
        if code is None:
            from spool.cli import group

            if "_SPOOL_COMPLETE" in os.environ:  # a shell wants a word completed
                from spool.cli import completion

                completion.offer(group.spool, {*os.environ.get("COMP_WORDS", "").split()})
            code = group.run(arguments)
    except KeyboardInterrupt:
        from spool.core.errors import ExitCode

        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        return _without_reader()
    except OSError as error:  # from the fast path; others report their own errors
        return _told(error)
    return code


def _without_reader() -> int:
    """Return the exit code after the reader has closed our output, as in `spool ls | head`, without a message."""
    _drop_output()
    return 141  # what a shell reports for SIGPIPE


def _drop_output() -> None:
    """Redirect stdout to /dev/null, so that flushing it raises no error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
