"""What users and projects have used so far, from the history; read only once there is somebody to be fair between."""

from __future__ import annotations

from collections.abc import Mapping

from spool.core.errors import InvalidRecord
from spool.core.model import Policy, Result
from spool.core.order import UsageLedger, share_key, weigh
from spool.dispatcher.table import Table
from spool.formats import ends
from spool.store.spool import Spool

_HALF_LIVES = 10  # what is older counts less than a thousandth


class Usage:
    """The ledger of one spool."""

    def __init__(self, spool: Spool, table: Table) -> None:
        self._spool = spool
        self._table = table
        self._ledger: UsageLedger | None = None
        self._made_for: tuple[int, float, str] | None = None

    def at(self, now_ns: int, policy: Policy) -> Mapping[str, float]:
        """Return the decayed usage of each key; empty while all that waits is of one."""
        keys = {share_key(shape.key.user, shape.key.project, policy) for shape in self._table.queue.shapes}
        if not policy.fair_share or len(keys) < 2:
            return {}
        made_for = (policy.half_life_ns, policy.cpu_weight, policy.fair_share_by)
        if self._ledger is None or made_for != self._made_for:
            self._ledger, self._made_for = self._read(now_ns, policy), made_for
        return self._ledger.at(now_ns)

    def add(self, result: Result, policy: Policy) -> None:
        """Count a run that has just ended."""
        if self._ledger is not None:
            _count(self._ledger, result, policy)

    def _read(self, now_ns: int, policy: Policy) -> UsageLedger:
        ledger = UsageLedger(policy.half_life_ns)
        for line in self._spool.history():
            try:
                result = ends.parse_history_line(line)
            except InvalidRecord:
                continue
            if result.ended_at_ns is not None and result.ended_at_ns < now_ns - _HALF_LIVES * policy.half_life_ns:
                break
            _count(ledger, result, policy)
        return ledger


def _count(ledger: UsageLedger, result: Result, policy: Policy) -> None:
    if result.started_at_ns is not None and result.ended_at_ns is not None:
        used = weigh(result.grant, result.ended_at_ns - result.started_at_ns, policy)
        ledger.add(share_key(result.user or "", result.project, policy), used, result.ended_at_ns)
