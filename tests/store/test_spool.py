"""What the look at a spool says of a spool that is not whole, and of records that contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from spool.core.errors import SpoolUnusable
from spool.core.model import Jid
from spool.formats.run_records import GrantRecord, render_grant, render_jid
from spool.store.spool import Spool


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
