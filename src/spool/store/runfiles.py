"""What the files of one run say together."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from spool.core.layout import LOCAL_EXECUTORS
from spool.core.lifecycle import Evidence, Exit, Liveness, Proof, prove
from spool.core.model import Jid, Result, State, Stop, Suspension
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
