"""The running dispatcher's last view, `state.json`, for commands that need nothing else."""

from __future__ import annotations

import os

from spool.core import layout
from spool.core.model import SECOND_NS
from spool.formats.state import GpusTold, MachineView, StateView, parse_machine, parse_state
from spool.store.spool import Spool

STALE_NS = 35 * SECOND_NS  # three heartbeats and a little
_MAX_STATE = 1 << 30


def last_view(spool: Spool, now_ns: int) -> tuple[StateView | None, int | None]:
    """Return the view of a running dispatcher, and how long it has been silent, if too long."""
    data, silent_ns = _last_words(spool, now_ns)
    return (parse_state(data) if data else None), silent_ns


def machine_told(spool: Spool, now_ns: int) -> MachineView | None:
    """Return the machine in the running dispatcher's view; None without a dispatcher, or if it is silent."""
    data, silent_ns = _last_words(spool, now_ns) if spool.dispatcher_lives() else (None, None)
    return parse_machine(data) if data and silent_ns is None else None


def gpus_told(spool: Spool, now_ns: int) -> GpusTold | None:
    """Return the GPUs in the running dispatcher's view, so that all answers agree; None if it has none.

    It has watched them, and may know facts that one look cannot show: that a GPU has fallen off, or the earlier users.
    """
    machine = machine_told(spool, now_ns)
    return machine.told() if machine is not None else None


def _last_words(spool: Spool, now_ns: int) -> tuple[bytes | None, int | None]:
    try:
        silent_ns = now_ns - os.stat(spool.layout.at(layout.STATE)).st_mtime_ns
    except OSError:
        return None, None
    return spool.file(layout.STATE, _MAX_STATE), (silent_ns if silent_ns > STALE_NS else None)
