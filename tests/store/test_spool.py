"""What the look at a spool says of a spool that is not whole, and of records that contradict each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spool.core import layout
from spool.core.errors import SpoolUnusable
from spool.core.lifecycle import Liveness
from spool.core.model import Jid
from spool.formats.run_records import GrantRecord, render_grant, render_jid
from spool.machine import identity
from spool.machine.processes import MachineProber
from spool.store.locked_spool import LockedSpool
from spool.store.spool import Spool
from support import make_spool


@pytest.mark.parametrize(("engine", "executor"), [(None, "process"), ("slurm:7", "slurm")])
def test_a_run_whose_wrapper_names_no_engine_was_started_on_this_machine(
    spool_root: Path, engine: str | None, executor: str
) -> None:
    """Every view takes the executor from `grant.toml` only where the `jid` does not contradict it."""
    metadir = spool_root / "jobs" / "a" / "1"
    metadir.mkdir(parents=True)
    (metadir / "grant.toml").write_bytes(render_grant(GrantRecord("a", 1, executor="slurm")))
    (metadir / "jid").write_bytes(render_jid(Jid(1, 2, "boot", "-", "here", engine)))
    granted = Spool(str(spool_root)).grant("a", 1)
    assert granted is not None
    assert granted.executor == executor


class _Meanwhile(MachineProber):
    """The wrapper of the run in *metadir* registers and begins between the look for its jid and all that follows."""

    def __init__(self, metadir: Path) -> None:
        super().__init__()
        self._metadir = metadir

    def boot_id(self) -> str:
        own = identity.of_process(os.getpid())
        assert own is not None
        (self._metadir / "jid").write_bytes(render_jid(own))
        (self._metadir / "log").touch()
        return own.boot_id

    def is_wrapper(self, *_: object) -> bool:
        return True


def test_a_wrapper_that_registers_during_a_look_is_alive(spool_root: Path) -> None:
    """What it writes after its jid does not prove that the jid was removed: without a second look it would be lost."""
    metadir = spool_root / "jobs" / "a" / "1"
    metadir.mkdir(parents=True)
    (metadir / "grant.toml").write_bytes(render_grant(GrantRecord("a", 1, boot_id=identity.boot_id())))
    spool = Spool(str(spool_root))
    assert spool.evidence("a", 1, _Meanwhile(metadir)).liveness is Liveness.ALIVE
    (metadir / "jid").unlink()
    assert spool.evidence("a", 1, MachineProber()).liveness is Liveness.GONE


def test_a_spool_without_queued_is_told_from_no_spool(spool_root: Path, tmp_path: Path) -> None:
    """The error names the directory that is missing or replaced, and not the spool as a whole."""
    (spool_root / "queued").rmdir()
    with pytest.raises(SpoolUnusable, match="queued: it is missing; `spool init`"):
        Spool.open(str(spool_root))
    (spool_root / "queued").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SpoolUnusable, match="queued: it is not a directory; move it somewhere else; `spool init`"):
        Spool.open(str(spool_root))
    with pytest.raises(SpoolUnusable, match="no spool there"):
        Spool.open(str(tmp_path / "nowhere"))


def test_a_note_is_read_once_and_what_the_file_system_needs_stays(tmp_path: Path) -> None:
    """NFS gives a file that was removed and is still open such a name, and removing it makes another one."""
    spool = LockedSpool(str(make_spool(tmp_path / "spool")))
    try:
        assert spool.notes() == []
        notes = Path(spool.layout.at(layout.NOTES))
        for name in ("x.1.rc", ".nfs0001"):
            (notes / name).touch()
        assert spool.notes() == [("x", 1, "rc")]
        assert os.listdir(notes) == [".nfs0001"]
    finally:
        spool.release()
