"""The process that captures the code of a start, for `captures`: git and file systems may be slow, or hang.

It reads an order from its standard input, writes the records into the directory that the order names, and prints
nothing. What it cannot find out is in the record's `problem`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from spool.core import layout
from spool.core.capture import Capture
from spool.formats.capture import render_capture
from spool.formats.freetext import one_line
from spool.machine import code as reading
from spool.machine import identity
from spool.store.disk import Disk

WITHIN_S = 10.0
"""How long git may take, all its commands together."""


def capture(order: dict[str, Any]) -> dict[str, bytes]:
    """Return the records that *order* asks for, by their names."""
    until = time.monotonic() + WITHIN_S
    workdir, files, problems = str(order["workdir"]), dict[str, bytes](), list[str]()
    captured_at_ns = time.time_ns()
    code = interpreter = lock = None
    if order["git"]:
        try:
            code, diff = reading.code_at(workdir, until, int(order["diff_bytes"]))
            if diff:
                files[layout.CAPTURE_DIFF] = diff
        except reading.GitError as error:
            problems.append(one_line(str(error)))
    if order["packages"]:
        if order["words"] is not None:  # else it is that of a container
            interpreter = reading.interpreter_of(order["words"], workdir, order["environment"])
        found = reading.lock_file_of(workdir, code.top if code is not None else None)
        if found is not None:
            lock, text = found
            if text:
                files[layout.CAPTURE_LOCK] = text
    said = Capture(
        captured_at_ns=captured_at_ns,
        problem="; ".join(problems),
        host=identity.host(),
        kernel=os.uname().release,
        driver=reading.driver_version(),
        code=code,
        interpreter=interpreter,
        lock_file=lock,
    )
    return {layout.CAPTURE: render_capture(said), **files}


def main() -> None:
    """Carry out the order on standard input."""
    order = json.load(sys.stdin)
    files = capture(order)
    directory = str(order["into"])
    disk = Disk(os.path.dirname(directory))
    disk.mkdir(directory)
    for name, text in files.items():
        disk.create(f"{directory}/{name}", text, 0o400)


if __name__ == "__main__":
    main()
