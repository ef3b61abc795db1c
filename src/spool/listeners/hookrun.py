"""One hook: an executable that is given the facts, a limited time, and a limited say."""

from __future__ import annotations

import itertools
import os
import select
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from spool.core.model import SECOND_NS
from spool.listeners import orphans
from spool.machine import identity
from spool.machine.tree import HOOK_MARK

MOST_OUTPUT = 64 << 10
_CUT_OFF = b"\n[the rest of its output was cut off]\n"
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Ran:
    """How a hook ended: `problem` is why not well, None if it did."""

    problem: str | None
    output: str = ""
    left: int = 0  # how many processes it left behind, which are ended


def run_hook(path: str, stdin: bytes, variables: Mapping[str, str], root: str, limit_ns: int) -> Ran:
    """Run the executable *path* in the spool *root*, and wait for its end, at most *limit_ns*."""
    mark = f"{os.getpid()}.{next(_numbers)}"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPOOL_")}
    environment |= {**variables, "SPOOL_DIR": root, HOOK_MARK: mark}
    try:
        process = subprocess.Popen(
            [path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            cwd=root,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        hint = " (has it a #! line?)" if error.errno == 8 else ""
        return Ran(f"it cannot be executed: {error.strerror}{hint}")
    jid = identity.of_process(process.pid)
    orphans.begun(process.pid, mark)
    output, code = b"", None
    left = 0
    try:
        output, ended = _attend(process, stdin, limit_ns)
        # The hook itself is not waited for before that, so that nothing else can have its pid.
        left = orphans.end_tree(root, mark, jid) - (not ended)
        code = process.wait()
    finally:
        orphans.ended(process.pid)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
    text = output.decode("utf-8", "replace")
    if not ended:
        return Ran(f"it took longer than {limit_ns / SECOND_NS:g} s and was ended", text, 0)
    if code:
        return Ran(f"signal {-code}" if code < 0 else f"exit code {code}", text, left)
    return Ran(None, text, left)


def _attend(process: subprocess.Popen[bytes], stdin: bytes, limit_ns: int) -> tuple[bytes, bool]:
    """Hand the facts over and take the output, until the hook ends or its time is over; return whether it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    into, out, end = process.stdin.fileno(), process.stdout.fileno(), os.pidfd_open(process.pid)
    try:
        os.set_blocking(into, False)
        os.set_blocking(out, False)
        ready = select.poll()
        ready.register(into, select.POLLOUT)
        ready.register(out, select.POLLIN)
        ready.register(end, select.POLLIN)
        taken, rest = b"", stdin
        deadline = time.monotonic_ns() + limit_ns
        while True:
            found = dict(ready.poll(max(0, deadline - time.monotonic_ns()) / 1e6))
            if into in found:
                rest = _give(process, rest)
                if not rest:
                    ready.unregister(into)
                    with suppress(OSError):
                        process.stdin.close()
            if out in found:
                taken, more = _take(out, taken)
                if not more:
                    ready.unregister(out)
            if end in found:  # what its children hold open is not waited for
                while True:
                    before = len(taken)
                    taken, more = _take(out, taken)
                    if not more or len(taken) == before or len(taken) > MOST_OUTPUT:
                        return taken, True
            if time.monotonic_ns() >= deadline:
                return taken, False
    finally:
        os.close(end)


def _give(process: subprocess.Popen[bytes], rest: bytes) -> bytes:
    """Write some of *rest*; return what is left, nothing if nobody reads it."""
    assert process.stdin is not None
    try:
        return rest[os.write(process.stdin.fileno(), rest) :]
    except BlockingIOError:
        return rest
    except OSError:
        return b""


def _take(out: int, taken: bytes) -> tuple[bytes, bool]:
    """Read what is there; return all that is kept, and whether there may be more."""
    try:
        data = os.read(out, 1 << 16)
    except BlockingIOError:
        return taken, True
    except OSError:
        return taken, False
    room = MOST_OUTPUT - len(taken)
    if len(data) <= room:
        return taken + data, bool(data)
    return (taken + data[:room] + _CUT_OFF if room >= 0 else taken), True
