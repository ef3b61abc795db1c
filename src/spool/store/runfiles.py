"""What the files of one run say together, and where it began."""

from __future__ import annotations

import os

from msgspec import Struct
from msgspec.structs import replace

from spool.core.layout import JOBS, LOCAL_EXECUTORS
from spool.core.lifecycle import Evidence, Exit, Liveness, Proof, prove
from spool.core.model import Jid, Result, State, Stop, Suspension
from spool.formats.freetext import one_line
from spool.formats.run_records import ArrayRecord, GrantRecord


class RunFiles(Struct, frozen=True):
    """What the files of one run say, each read once, in the order that proves it. None: there is no such record."""

    name: str
    run: int
    jid: Jid | Liveness
    grant: GrantRecord | None
    array: ArrayRecord | None  # an array has it instead of a grant
    left: Exit | None
    stop: Stop | None
    result: Result | None
    refusal: str | None  # why the machine did not let its command begin
    suspension: Suspension
    began_ns: int | None  # of an array: when it was expanded; None: its engine has not begun it
    evidence: Evidence

    @property
    def proof(self) -> Proof:
        """What the evidence proves."""
        return prove(self.evidence)

    @property
    def is_submitted(self) -> bool:
        """Whether it waits on its engine: it was not started here, and has not begun."""
        return self.grant is not None and self.grant.executor not in LOCAL_EXECUTORS and self.began_ns is None

    @property
    def so_far(self) -> Result:
        """What the record of its end will say of a run, as far as that is known before."""
        found = Result(
            self.name,
            self.run,
            1,
            State.RUNNING,
            "",
            started_at_ns=self.began_ns,
            exit_code=self.left.code if self.left is not None else None,
        )
        granted = self.grant
        if granted is None:
            return found
        return replace(
            found,
            attempt=granted.attempt,
            submitted_at_ns=granted.submitted_at_ns,
            requeues=granted.requeues,
            user=granted.user,
            grant=granted.grant,
            executor=granted.executor,
            node=self.jid.node if isinstance(self.jid, Jid) and granted.executor not in LOCAL_EXECUTORS else None,
        )


def place_of(root: str) -> str:
    """Return the inode of the directory of all runs, which a move keeps and a copy does not, and the path of the spool.

    Raises OSError.
    """
    return f"{os.stat(f'{root}/{JOBS}').st_ino} {one_line(os.fsencode(root))}"


def why_copied(root: str, grant: GrantRecord | None) -> str:
    """Return why a run, with its records in the spool at *root*, is that of another spool; "" if it is not.

    A run without a recorded place is this spool's. Raises OSError.
    """
    if grant is None or grant.place is None:
        return ""
    inode, _, path = grant.place.partition(" ")
    if inode == place_of(root).partition(" ")[0]:
        return ""
    return f"run {grant.run} began in {path}; this spool is a copy of that, where it may have gone on"
