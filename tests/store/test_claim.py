"""Claiming a job file while people write to its name: nothing that they put there is ever taken away."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spool.client.requests import Requests
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.store.disk import Disk
from spool.store.locked_spool import CUT_OFF_NS, LockedSpool
from support import make_spool

OLD, NEW, NEWER = b'command = "old"\n', b'command = "the new one"\n', b'command = "one newer than that"\n'


class Busy(Disk):
    """A disk on which somebody does something before and after each change of a name."""

    def __init__(self, staging: str, *, atomic: bool) -> None:
        super().__init__(staging)
        self.atomic = atomic
        self.changes = 0
        self.deeds: dict[int, Callable[[], object]] = {}

    def _change(self) -> None:
        self.changes += 1
        self.deeds.pop(self.changes, lambda: None)()

    def rename_new(self, old: str, new: str) -> bool:
        if not self.atomic:
            return False
        self._change()
        return super().rename_new(old, new)

    def link(self, old: str, new: str) -> None:
        self._change()
        super().link(old, new)

    def unlink(self, path: str, at: int | None = None) -> None:
        self._change()
        super().unlink(path, at)

    def rename(self, old: str, new: str) -> None:
        self._change()
        super().rename(old, new)


class Desk:
    """A spool with one waiting job, and the person who is at it."""

    def __init__(self, root: Path, *, atomic: bool) -> None:
        self.root = make_spool(root)
        self.disk = Busy(str(root / ".tmp"), atomic=atomic)
        self.spool = LockedSpool(str(root), self.disk)
        self.queued.write_bytes(OLD)

    @property
    def queued(self) -> Path:
        return self.root / QUEUED / "x.toml"

    def save(self, text: bytes, path: Path | None = None) -> None:
        """Replace the waiting file, or another, as editors do."""
        (self.root / ".tmp" / "saved").write_bytes(text)
        os.replace(self.root / ".tmp" / "saved", path or self.queued)

    def hold(self) -> None:
        """Have the file held."""
        os.rename(self.queued, self.root / HELD / "x.toml")

    def submit(self, text: bytes) -> None:
        """Put a file there unless one waits."""
        (self.root / ".tmp" / "submitted").write_bytes(text)
        try:
            os.link(self.root / ".tmp" / "submitted", self.queued)
        finally:
            (self.root / ".tmp" / "submitted").unlink()

    def claim(self) -> bool:
        """Claim the file that is there now, while the person does what was planned."""
        status = self.queued.stat()
        self.disk.changes = 0
        return self.spool.claim("x", status.st_ino, status.st_mtime_ns, status.st_size)

    def texts(self) -> dict[str, bytes]:
        """Return what lies where."""
        found = {place: self.root / place / "x.toml" for place in (QUEUED, HELD, RUNNING)}
        return {place: path.read_bytes() for place, path in found.items() if path.exists()}


@pytest.fixture(params=["in one step", "in two"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Desk:
    """Return a desk on a file system that can move a file in one step, or cannot."""
    return Desk(tmp_path / "spool", atomic=request.param == "in one step")


@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_a_save_at_any_moment_of_a_claim_loses_nothing(desk: Desk, moment: int) -> None:
    """The new version is queued whatever the old one has come to; a claimed one is the one that was looked at."""
    desk.disk.deeds[moment] = lambda: desk.save(NEW)
    claimed = desk.claim()
    if desk.disk.deeds:
        desk.save(NEW)  # the claim was over before
    assert desk.texts() == ({RUNNING: OLD, QUEUED: NEW} if claimed else {QUEUED: NEW})


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_submission_at_any_moment_of_a_claim_loses_nothing(desk: Desk, moment: int) -> None:
    """It is refused while the old one waits, and waits itself once that is claimed."""
    refused = []

    def submit() -> None:
        try:
            desk.submit(NEW)
        except FileExistsError:
            refused.append(True)

    desk.disk.deeds[moment] = submit
    assert desk.claim()
    assert desk.texts() == ({RUNNING: OLD} if refused or desk.disk.deeds else {RUNNING: OLD, QUEUED: NEW})


def test_two_newer_files_at_once_are_both_kept(tmp_path: Path) -> None:
    """One is saved just before the claim and another put in its place during it: the first is held, none is lost."""
    desk = Desk(tmp_path / "spool", atomic=True)
    desk.disk.deeds = {1: lambda: desk.save(NEW), 2: lambda: desk.submit(NEWER)}
    assert not desk.claim()
    assert desk.texts() == {QUEUED: NEWER, HELD: NEW}


def test_a_directory_that_was_put_there_goes_back(desk: Desk) -> None:
    """What is no job at all is not left in running/ either."""

    def replace() -> None:
        desk.queued.unlink()
        desk.queued.mkdir()

    desk.disk.deeds[1] = replace
    assert not desk.claim()
    assert desk.queued.is_dir()
    assert not (desk.root / RUNNING / "x.toml").exists()


@pytest.mark.parametrize(("deed", "place"), [("release", QUEUED), ("hold", HELD)])
def test_a_release_or_hold_during_a_claim_loses_nothing(desk: Desk, deed: str, place: str) -> None:
    """Claimed between the two halves of it, a job waits on or does not start; it never loses its last name."""
    if deed == "release":
        desk.hold()
    busy = Busy(str(desk.root / ".tmp"), atomic=desk.disk.atomic)
    busy.deeds = {2: lambda: desk.claim()}
    getattr(Requests(desk.spool, "somebody", busy), deed)("x")
    assert desk.texts() == {place: OLD}


def test_an_older_file_in_the_way_is_never_replaced(desk: Desk) -> None:
    """What somebody put into running/ stays there, and the job waits."""
    (desk.root / RUNNING / "x.toml").write_bytes(NEW)
    assert not desk.claim()
    assert desk.texts() == {QUEUED: OLD, RUNNING: NEW}


@pytest.mark.parametrize("moment", [1, 2, 3, 4, 5, 6])
def test_two_saves_during_a_claim_lose_nothing(tmp_path: Path, moment: int) -> None:
    """What is put there while the newer file goes back to its place is kept beside it."""
    desk = Desk(tmp_path / "spool", atomic=False)
    desk.disk.deeds = {2: lambda: desk.save(NEW), moment + 2: lambda: desk.queued.exists() or desk.submit(NEWER)}
    assert desk.claim()
    assert desk.texts()[RUNNING] == OLD
    waiting = {path.read_bytes() for path in (desk.root / QUEUED).iterdir()}
    assert NEW in waiting
    assert waiting <= {NEW, NEWER}


@pytest.mark.parametrize("to", ["queued", "held", "done", None])
def test_a_job_that_is_taken_out_of_running_at_once_stays_where_it_is_put(desk: Desk, to: str | None) -> None:
    """Whatever was done with it in the moment of the claim stays done; deleted it is a run that was cancelled."""
    running = desk.root / RUNNING / "x.toml"

    def taken() -> bool:
        Busy.move(desk.disk, str(desk.queued), str(running))
        if to is None:
            running.unlink()
        else:
            running.rename(desk.root / to / "x.toml")
        return True

    desk.disk.move = lambda old, new: taken()  # type: ignore[assignment]
    assert desk.claim() is (to is None)
    assert not running.exists()
    assert to is None or (desk.root / to / "x.toml").exists()


def test_what_cannot_be_given_back_because_it_is_gone_is_no_matter(desk: Desk) -> None:
    """A newer version was claimed, and taken away by its owner before it was back."""
    desk.disk.deeds = {1: lambda: desk.save(NEW), 2 if desk.disk.atomic else 4: (desk.root / RUNNING / "x.toml").unlink}
    assert not desk.claim()
    assert desk.texts() == {}


@pytest.mark.parametrize("moment", [1, 2])
@pytest.mark.parametrize("what", ["between", "put back", "complete", "away"])
def test_a_save_while_one_of_two_names_is_taken_away_loses_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, what: str, moment: int
) -> None:
    """Whoever finishes a move that was cut off takes a second name away, and never a new file."""
    second = desk.root / {"between": HELD, "away": DONE}.get(what, RUNNING) / "x.toml"
    os.link(desk.queued, second)
    path = second if what == "put back" else desk.queued
    later = time.time_ns() + 2 * CUT_OFF_NS
    monkeypatch.setattr(time, "time_ns", lambda: later)
    deeds: dict[str, Callable[[], object]] = {
        "between": lambda: desk.spool.is_between("x"),
        "put back": lambda: desk.spool.requeue_file("x", QUEUED),
        "complete": lambda: desk.spool.complete_move("x"),
        "away": lambda: desk.spool.archive_file("x", QUEUED),
    }
    desk.disk.deeds = {moment: lambda: desk.save(NEW, path)}
    deeds[what]()
    kept = {where.read_bytes() for where in (desk.queued, second) if where.exists()}
    assert (NEW in kept) == (not desk.disk.deeds)
    assert OLD in kept or what == "away"  # what is filed away takes the place of an older record
    assert sorted(os.listdir(desk.root / ".tmp")) == []
