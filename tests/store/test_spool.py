"""What the look at a spool says of a spool that is not whole, and of records that contradict each other."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from faulty import PowerCut
from spool.core import layout
from spool.core.errors import SpoolUnusable
from spool.core.lifecycle import Liveness
from spool.core.model import Jid, Stop, StopKind
from spool.formats.run_records import GrantRecord, render_grant, render_jid
from spool.machine import identity
from spool.machine.processes import MachineProber
from spool.store.disk import Disk
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


class FullDisk(Disk):
    """A disk on which nothing is created while it is full, and no spare loses its name while it *keeps* them."""

    full = False
    keeps: type[BaseException] | None = None

    def create(self, path: str, data: bytes, mode: int = 0o600) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        super().create(path, data, mode)

    def unlink(self, path: str, at: int | None = None) -> None:
        if self.keeps is not None and f"/{layout.ROOM}/" in path:
            raise self.keeps(errno.EIO, os.strerror(errno.EIO), path)
        super().unlink(path, at)


def order(root: Path, name: str, keeps: type[BaseException] | None = None) -> None:
    """Have a new dispatcher keep room for one stop, and order one on a full disk."""
    disk = FullDisk(str(root / layout.STAGING))
    spool = LockedSpool(str(root), disk)
    try:
        spool.keep_spares(1)
        disk.full, disk.keeps = True, keeps
        (root / "jobs" / name / "1").mkdir(parents=True)
        assert spool.order_stop(name, 1, Stop(StopKind.CANCEL, name, 1))
    finally:
        spool.release()


def test_a_spare_that_became_a_stop_is_never_written_over(tmp_path: Path) -> None:
    """A dispatcher that is cut off between link and unlink leaves a file with two names: the next one leaves it be."""
    root = make_spool(tmp_path / "spool")
    with pytest.raises(PowerCut):
        order(root, "first", PowerCut)
    order(root, "second")
    by = [stop.by for name in ("first", "second") if (stop := Spool(str(root)).stop(name, 1)) is not None]
    assert by == ["first", "second"]


def test_a_stop_is_recorded_also_where_its_spare_keeps_its_name(tmp_path: Path) -> None:
    """An error after the record is there is none of the record; that file is room for no other stop."""
    root = make_spool(tmp_path / "spool")
    order(root, "first", OSError)
    order(root, "second")
    for name in ("first", "second"):
        assert (root / "jobs" / name / "1" / layout.STOP).read_bytes().count(name.encode()) == 1


@pytest.mark.parametrize("size", [0, 100, 5000, None])
def test_a_file_of_another_size_is_no_spare(tmp_path: Path, size: int | None) -> None:
    """A file that a full disk left short holds no room, and what a link leads to is not touched: it is made anew."""
    root = make_spool(tmp_path / "spool")
    (root / layout.ROOM).mkdir()
    (tmp_path / "precious").write_bytes(b"x" * 4096)
    if size is None:
        (root / layout.ROOM / "0").symlink_to(tmp_path / "precious")
    else:
        (root / layout.ROOM / "0").write_bytes(b"x" * size)
    spool = LockedSpool(str(root))
    spool.keep_spares(2)
    spool.release()
    assert [(root / layout.ROOM / name).lstat().st_size for name in "01"] == [4096, 4096]
    order(root, "first")
    assert (tmp_path / "precious").read_bytes() == b"x" * 4096
