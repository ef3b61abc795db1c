"""The dispatcher's side: what differs in the wrapper of a run in a terminal, and how its start is told."""

from __future__ import annotations

import os
from contextlib import suppress

from msgspec.structs import replace

from spool.core import layout
from spool.core.errors import InvalidRecord, SpoolError, StartRefused, cannot
from spool.core.lifecycle import Liveness
from spool.core.model import Jid, Spec
from spool.executors.base import Launch, refused
from spool.executors.local import LocalProcesses, LocalRun
from spool.formats.run_records import parse_jid, render_jid
from spool.formats.validation import PartReader
from spool.formats.wrapper import Assignments, both
from spool.machine import identity
from spool.machine.processes import STANDS_STILL
from spool.state.run import ActiveRun

# By the wrapper: a log is a sign that a run has begun, so none may be there before its jid.
_LOG = """\
echo 'spool: what this run prints is in the terminal of its `spool run --here`' > "$SPOOL_METADIR/log" || :"""


def own_terminal() -> str:
    """Return the `terminal` of a job that waits for this process. Its host is not asked from elsewhere."""
    found = identity.of_process(os.getpid())
    assert found is not None
    return render_jid(replace(found, host="-")).decode().strip()


READER = PartReader(lambda reading: reading.found["here"].get("terminal", ""))
"""What reads the key `terminal`."""


def launched(spec: Spec, written: Assignments, _: ActiveRun) -> Assignments:
    """Return what is written for a run that has stdin, outputs and limits from its terminal.

    Raises SpoolError if that is gone.
    """
    around = replace(written.surroundings, stdin=None, inherit_outputs=True, terminal="shared", open_files=None)
    before = os.getpriority(os.PRIO_PROCESS, _caller(spec).pid)
    nicer = 0 if spec.nice is None else spec.nice - before
    return replace(written, surroundings=around, init=both(_LOG, written.init), nicer=nicer)


def start(launch: Launch, processes: LocalProcesses) -> LocalRun | None:
    """Tell the terminal of a run to start it; None: not now, because of a problem. Raises SpoolError if it is gone."""
    assert launch.spec is not None
    _caller(launch.spec)
    if problem(launch.spec) is not None:
        return None
    try:
        with open(f"{launch.metadir}/{layout.LAUNCH}", "x", encoding="utf-8") as file:
            file.write(launch.spec.part("here"))
    except OSError as error:
        if refused(error):
            raise StartRefused(f"its terminal was not told: {error.strerror}") from error
        raise SpoolError(cannot("start", f"job {launch.job}", error.strerror or str(error))) from error
    return processes.no_child(launch.job, launch.run, None)


def problem(spec: Spec) -> str | None:
    """Return why a job cannot start now: who waits for it would not notice."""
    caller = _found(spec)
    stat = identity.read_stat(caller.pid) if caller is not None else None
    if stat is not None and stat.state in STANDS_STILL:
        return "its `spool run --here` is stopped, as by Ctrl-Z; `fg` or `bg` in its terminal continues it"
    return None


def _caller(spec: Spec) -> Jid:
    """Return the process that waits for the job. Raises SpoolError if it has ended."""
    if (found := _found(spec)) is None:
        remedy = "run its command with `spool run --here` again"
        raise SpoolError(cannot("start", "the command", "the terminal of this job is gone", remedy=remedy))
    return found


def _found(spec: Spec) -> Jid | None:
    with suppress(InvalidRecord):
        found = parse_jid(f"{spec.part('here')}\n".encode())
        if found is not None and identity.liveness(found) is Liveness.ALIVE:
            return found
    return None
