"""What tests of a shared machine need: a spool on it, and the file in which an arbiter says who has how much."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from spool.core.model import SECOND_NS
from spool.extras.machine.protocol import MachineShares
from spool.formats.wire import json_line
from spool.query.shared import GpuShare, UserShare
from spool.store.ownership import this_user
from views import BOB as BOB
from views import G as G


def shares(*others: UserShare, own: UserShare | None = None, **more: Any) -> MachineShares:
    """Return what an arbiter writes of a machine with 8 CPUs, 32 GiB and 3 licences, for these users."""
    given = {
        "written_at_ns": time.time_ns(),
        "since_ns": time.time_ns() - 3600 * SECOND_NS,
        "pid": 4711,
        "cpus": 8,
        "memory_bytes": 32 * G,
        "resources": {"licence": 3},
        "users": (*([own] if own is not None else []), *others),
        "gpus": (),
    }
    return MachineShares(**{**given, **more})


def mine(**more: Any) -> UserShare:
    """Return the share of the user of the tests."""
    return UserShare(user=this_user(), **more)


def gpu_share(index: int, *users: tuple[str, int | None]) -> GpuShare:
    """Return the users of a GPU of the fake NVML."""
    return GpuShare(uuid=f"GPU-{index}", index=index, users=users)


def write(directory: Path, said: MachineShares | bytes, *, age_s: float = -3600) -> Path:
    """Write `machine.json` into *directory*, as if that long ago; return its path.

    A file of the future does not grow old while a test takes its time.
    """
    directory.mkdir(exist_ok=True)
    path = directory / "machine.json"
    path.write_bytes(said if isinstance(said, bytes) else json_line(said))
    at_ns = time.time_ns() - int(age_s * SECOND_NS)
    os.utime(path, ns=(at_ns, at_ns))
    return path


def join(root: Path, said: MachineShares | bytes, *, age_s: float = -3600, config: str = "autostart = false\n") -> Path:
    """Have the spool at *root* use the machine of the arbiter that says so; return the path of what it says."""
    directory = root.parent / "machine"
    (root / "config.toml").write_text(f'{config}machine = "{directory}"\n')
    return write(directory, said, age_s=age_s)
