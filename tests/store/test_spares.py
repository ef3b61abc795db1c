"""The room that is kept for the records of stops on a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from faulty import PowerCut
from spool.core import layout
from spool.core.model import Stop, StopKind
from spool.store.disk import Disk
from spool.store.locked_spool import LockedSpool
from spool.store.spool import Spool
from support import make_spool


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
