"""Lessons of the history, for the planner and for expected run times.

A dispatcher reads it once there are jobs to put in order; a command reads it for every job that it shows, so that
`why`, `plan` and `show` expect the same of a job, however many others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

from spool.core.errors import InvalidRecord
from spool.core.model import Policy, Result
from spool.core.priority import Past
from spool.formats.history import parse_history_line
from spool.store.spool import Spool

if TYPE_CHECKING:  # a command that asks for the past alone loads no table
    from spool.state.run import ActiveRun
    from spool.state.table import SchedulerState

_MOST = 10_000  # newest runs that are read
_HALF_LIVES = 10  # older runs count less than a thousandth


class Remembered:
    """The past of one spool, kept up to date from its first use on."""

    def __init__(self, spool: Spool, table: SchedulerState) -> None:
        self._spool = spool
        self._table = table
        self._made_for: tuple[object, ...] | None = None

    def see_to(self, now_ns: int, policy: Policy) -> Past:
        """Return the past; empty until there are waiting jobs to put in order."""
        table = self._table
        made_for = (
            policy.half_life_ns,
            policy.cpu_weight,
            policy.fair_share_by,
            policy.learn_run_times,
            policy.max_running is None,
            sizes := table.sizing is not None,
        )
        if made_for != self._made_for and table.queue and (len(table.queue) + len(table.runs) > 1 or sizes):
            table.remember(past_of(self._spool, now_ns, policy, table.arrivals, sizes=sizes))
            self._made_for = made_for
        return table.past

    def learn(self, live: ActiveRun) -> None:
        """Add the lessons of a run that is over and filed."""
        if live.result is not None and self._made_for is not None:
            self._table.learn(live, live.result)


def past_of(
    spool: Spool,
    now_ns: int,
    policy: Policy,
    asked: Callable[[], Iterable[int]] | None = None,
    *,
    sizes: bool = False,
) -> Past:
    """Return the lessons of the newest runs in the history; *asked* as in `Past`, *sizes* whether their peaks count."""
    past = Past(policy, asked)
    if sizes:
        from spool.core.sizes import Sizes

        past.sizes = Sizes()
    known: list[Result] = []
    for line in islice(spool.history(), _MOST):
        try:
            result = parse_history_line(line)
        except InvalidRecord:
            continue
        if result.told_at_ns is not None and result.told_at_ns < now_ns - _HALF_LIVES * policy.half_life_ns:
            break
        known.append(result)
    events: list[tuple[int, bool, int]] = []  # in order of time, which is the cheapest to count
    for number, result in enumerate(known):
        if result.started_at_ns is not None and result.ended_at_ns is not None:
            events.append((result.started_at_ns, False, number))
            events.append((max(result.ended_at_ns, result.started_at_ns), True, number))
    events.sort()
    for at_ns, ends, number in events:
        result = known[number]
        (past.end if ends else past.begin)(result.user or "", result.project, result.grant, at_ns)
    for result in reversed(known):
        past.learn(result.user or "", result)
    return past
