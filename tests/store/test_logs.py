"""The two logs: what a cut leaves of them, when they are on the disk, and how the journal is kept short."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from faulty import FaultyDisk, PowerCut, cut_off, every_cut
from spool.core import layout
from spool.formats.journal import Left, Line, Over, Waits
from spool.store.disk import SpoolTrouble
from spool.store.locked_spool import LockedSpool
from spool.store.logs import Logs
from support import make_spool, wait_for

FIRST, SECOND = Waits("a", 1, 0, 1), Waits("b", 2, 0, 2)
MANY: list[Line] = [Left(f"job{number}") for number in range(20_001)]


class Stand:
    """A locked spool on a disk that can fail, whose logs are opened by the test."""

    def __init__(self, root: Path, **faults: int | bool) -> None:
        if not root.exists():
            make_spool(root)
        self.disk = FaultyDisk(str(root / layout.STAGING), **faults)  # type: ignore[arg-type]
        self.spool = LockedSpool(str(root), self.disk)
        self.journal = root / layout.JOURNAL
        self.history = root / layout.HISTORY

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        self.spool.release()


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    """Make a spool with a sound disk."""
    with Stand(tmp_path / "spool") as made:
        yield made


@pytest.fixture
def logs(stand: Stand) -> Iterator[Logs]:
    """Open the logs of that spool; a test may close them before."""
    made = Logs(stand.spool)
    yield made
    made.close()


def remembered(stand: Stand) -> list[Line]:
    """Return what the next dispatcher reads in the journal."""
    with closing(Logs(stand.spool)) as logs:
        return logs.read_journal()


@pytest.fixture
def roots(tmp_path: Path) -> Callable[[], Path]:
    """Return a maker of paths for fresh spools."""
    numbers = count()
    return lambda: tmp_path / f"spool{next(numbers)}"


def test_what_is_remembered_is_read_again_by_the_next_dispatcher(stand: Stand, logs: Logs) -> None:
    """Lines of the journal come back in their order, after the logs were closed and opened anew."""
    assert logs.read_journal() == []
    logs.remember([FIRST, SECOND])
    logs.remember([Left("a")])
    assert remembered(stand) == [FIRST, SECOND, Left("a")]


@pytest.mark.parametrize("name", [layout.JOURNAL, layout.HISTORY])
def test_a_torn_last_line_is_ended_so_that_the_next_begins_a_line(stand: Stand, name: str) -> None:
    """After a power cut in the middle of a line, the torn piece stays alone on its line and nothing else is lost."""
    path = Path(stand.spool.layout.at(name))
    path.write_bytes(b'["left","a"]\n["left","b')
    with closing(Logs(stand.spool)) as logs:
        logs.remember([Left("c")])
        logs.account(b"{}\n")
    lines = path.read_bytes().split(b"\n")
    assert lines[:2] == [b'["left","a"]', b'["left","b']
    assert lines[2] in (b'["left","c"]', b"{}")
    if name == layout.JOURNAL:
        assert remembered(stand) == [Left("a"), Left("c")]


def test_whole_logs_are_opened_without_a_change(stand: Stand) -> None:
    """Where the last line is whole, or there is none, opening appends nothing; nor do empty batches."""
    stand.history.write_bytes(b"{}\n")
    with closing(Logs(stand.spool)) as logs:
        logs.remember([])
        logs.account(b"")
    assert (stand.history.read_bytes(), stand.journal.read_bytes()) == (b"{}\n", b"")
    assert "append" not in stand.disk.names()


@pytest.mark.parametrize("torn", [False, True])
def test_a_cut_in_the_middle_of_remembering_loses_only_what_was_not_said(roots: Callable[[], Path], torn: bool) -> None:
    """At every cut, the next dispatcher reads a beginning of what was appended, and appends after it."""

    def scenario(number: int) -> FaultyDisk:
        with Stand(roots(), cut_at=number, torn=torn) as stand:
            said: list[Line] = []

            def work() -> None:
                with closing(Logs(stand.spool, strict=True)) as logs:
                    for line in (FIRST, SECOND, Over("a", 1, True)):
                        logs.remember([line])
                        said.append(line)

            cut_off(work)
        with Stand(Path(stand.spool.root)) as after, closing(Logs(after.spool)) as logs:
            found = logs.read_journal()
            assert found[: len(said)] == said
            assert len(found) <= len(said) + 1
            logs.remember([Left("z")])
            assert logs.read_journal() == [*found, Left("z")]
        return stand.disk

    assert [disk.is_cut for disk in every_cut(scenario)].count(False) == 1


@pytest.mark.parametrize("torn", [False, True])
def test_compaction_cut_anywhere_leaves_the_old_journal_or_the_new(roots: Callable[[], Path], torn: bool) -> None:
    """Whatever change of a compaction the power goes before, the journal says all that it said or all that is left."""
    old, new = [FIRST, SECOND, Left("a")], [SECOND]
    found = []

    def scenario(number: int) -> FaultyDisk:
        root = roots()
        with Stand(root) as before, closing(Logs(before.spool)) as logs:
            logs.remember(old)
        with Stand(root, cut_at=number, torn=torn) as stand:
            logs = Logs(stand.spool)
            cut_off(lambda: logs.compact(list(new)))
        with Stand(root) as after:
            found.append(remembered(after))
        return stand.disk

    list(every_cut(scenario))
    assert found[0] == old
    assert found[-1] == new
    assert all(lines in (old, new) for lines in found)


def test_before_anything_is_forgotten_the_names_that_say_it_are_on_the_disk(stand: Stand, logs: Logs) -> None:
    """Compaction syncs the state directories and jobs/ before the new journal is renamed over the old one."""
    logs.remember([FIRST])
    logs.compact([])
    names = [(o.name, os.path.basename(o.paths[-1])) for o in stand.disk.recorded if not o.background]
    rename = names.index(("rename", layout.JOURNAL))
    for place in (*layout.PLACES, layout.JOBS):
        assert ("sync_directory", place) in names[:rename]
    assert names[rename - 1][0] == "sync_file"
    assert names[rename + 1][0] == "sync_directory"


def test_after_a_compaction_lines_go_to_the_new_journal(stand: Stand, logs: Logs) -> None:
    """The descriptor is exchanged with the file: what is remembered next is in the file of the journal's name."""
    logs.remember([FIRST, Left("a")])
    logs.compact([SECOND])
    logs.remember([Left("b")])
    assert logs.read_journal() == remembered(stand) == [SECOND, Left("b")]
    assert stand.journal.read_bytes().count(b"\n") == 2


def test_a_journal_is_long_when_much_was_appended_since_it_was_compacted(stand: Stand, logs: Logs) -> None:
    """Twenty thousand lines make a journal long; after a compaction as many more must come, and what is live again."""
    logs.remember(MANY[:-1])
    assert not logs.long
    logs.remember(MANY[-1:])
    assert logs.long
    logs.compact(MANY[:10])
    assert not logs.long
    logs.remember(MANY)
    assert not logs.long
    logs.remember(MANY[:10])
    assert logs.long
    with closing(Logs(stand.spool)) as again:
        again.read_journal()  # the lines that are read at the start count
        assert again.long


def test_strict_logs_are_on_the_disk_when_the_call_returns(stand: Stand) -> None:
    """With strict=True each append is followed by a sync of both logs before the next step, by the caller itself."""
    with closing(Logs(stand.spool, strict=True)) as logs:
        logs.remember([FIRST])
        logs.account(b"{}\n")
        assert stand.disk.names() == ["append", "sync_log", "sync_log"] * 2
        assert stand.disk.names(background=True) == []


def test_grouped_syncs_come_by_themselves_and_not_from_the_caller(stand: Stand, logs: Logs) -> None:
    """By default the caller only appends; a thread syncs soon after, without being asked."""
    logs.remember([FIRST])
    logs.account(b"{}\n")
    assert stand.disk.names() == ["append", "append"]
    wait_for(lambda: len(stand.disk.names(background=True)) >= 2, what="a grouped sync")
    assert set(stand.disk.names(background=True)) == {"sync_log"}
    assert {os.path.basename(o.paths[0]) for o in stand.disk.recorded if o.background} == {
        layout.JOURNAL,
        layout.HISTORY,
    }


def test_without_a_thread_to_spare_the_caller_syncs(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that refuses a thread each line is on the disk at once, and the next line asks for one again."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with closing(Logs(stand.spool)) as logs:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            logs.remember([FIRST])
            assert stand.disk.names() == ["append", "sync_log", "sync_log"]
        logs.account(b"{}\n")
        wait_for(lambda: len(stand.disk.names(background=True)) >= 2, what="a grouped sync")


def test_many_appends_share_few_syncs(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """All lines of one while cost one sync of each log; closing syncs the last one, and ends the thread."""
    monkeypatch.setattr("spool.store.logs.GROUP_S", 3600.0)  # longer than any machine needs for them
    with closing(Logs(stand.spool)) as logs:
        for line in MANY[:1000]:
            logs.remember([line])
    assert stand.disk.names().count("append") == 1000
    assert stand.disk.recorded[-1].name == "sync_log"
    assert sum(operation.name == "sync_log" for operation in stand.disk.recorded) <= 4
    assert "spool-sync" not in {thread.name for thread in threading.enumerate()}


def test_a_grouped_sync_that_fails_is_told_and_tried_again(
    stand: Stand, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error in the background does not vanish: `problem` holds it until a sync has succeeded."""
    monkeypatch.setattr("spool.store.logs.AGAIN_S", 0.01)

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(stand.disk, "sync_log", broken)
        logs.remember([FIRST])
        wait_for(lambda: logs.problem is not None)
        assert isinstance(logs.problem, SpoolTrouble)
        assert logs.problem.errno == errno.EIO
    wait_for(lambda: logs.problem is None, what="another sync")


@pytest.mark.parametrize("name", [layout.JOURNAL, layout.HISTORY])
def test_logs_that_cannot_be_mended_are_closed(stand: Stand, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """However often a dispatcher tries to open them on a full disk, no descriptor is lost."""
    Path(stand.spool.root, name).write_bytes(b"torn")

    def full(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stand.disk, "append", full)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(SpoolTrouble) as met:
            Logs(stand.spool)
        assert met.value.filename == f"{stand.spool.root}/{name}"
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_line_that_a_full_disk_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    """When there is room again, the next line is read, although half of the one before it lies in the file."""
    with Stand(tmp_path / "spool", fail_at=2, torn=True) as stand, closing(Logs(stand.spool)) as logs:
        logs.remember([FIRST])
        with pytest.raises(OSError, match="No space left"):
            logs.remember([SECOND])
        logs.remember([Left("c")])
        assert logs.read_journal() == [FIRST, Left("c")]


def test_a_cut_passes_through_the_logs(tmp_path: Path) -> None:
    """A power cut is not taken for a problem of the disk that could be lived with."""
    with Stand(tmp_path / "spool", cut_at=1) as stand:
        logs = Logs(stand.spool)
        with pytest.raises(PowerCut):
            logs.remember([FIRST])


@pytest.mark.parametrize("how", ["deleted", "rotated", "replaced"])
def test_a_history_that_goes_away_meanwhile_loses_no_line(stand: Stand, logs: Logs, how: str) -> None:
    """The next line goes to a file with its name, and what was rotated away stays as it was."""
    logs.account(b"one\n")
    old = stand.history.rename(stand.history.with_suffix(".jsonl.1"))
    if how == "deleted":
        old.unlink()
    if how == "replaced":
        stand.history.write_text("cut sho")
    logs.keep()
    logs.account(b"two\n")
    assert stand.history.read_text() == ("cut sho\ntwo\n" if how == "replaced" else "two\n")
    assert how == "deleted" or old.read_text() == "one\n"


def test_what_was_rotated_away_is_on_the_disk_and_so_is_the_name_of_the_new_file(
    stand: Stand, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut takes neither the last lines of the old file nor the new file."""
    logs.account(b"one\n")
    inode = stand.history.stat().st_ino
    stand.history.rename(stand.history.with_suffix(".jsonl.1"))
    synced: list[int | str] = []
    monkeypatch.setattr(stand.disk, "sync_log", lambda fd: synced.append(os.fstat(fd).st_ino))
    monkeypatch.setattr(stand.disk, "sync_directory", lambda path: synced.append(path))
    logs.keep()
    assert inode in synced
    assert stand.spool.root in synced


def test_no_line_goes_to_a_file_that_is_gone_while_something_else_has_its_name(stand: Stand, logs: Logs) -> None:
    """The caller hears of it, and says the line again later."""
    stand.history.unlink()
    stand.history.mkdir()
    for deed in (logs.keep, lambda: logs.account(b"one\n")):
        with pytest.raises(SpoolTrouble):
            deed()
    stand.history.rmdir()
    logs.account(b"one\n")
    assert stand.history.read_text() == "one\n"


def test_a_deleted_journal_is_written_again_as_a_whole(stand: Stand, logs: Logs) -> None:
    """What it had told is worth a compaction at once."""
    logs.remember([FIRST])
    assert not logs.long
    stand.journal.unlink()
    logs.keep()
    logs.remember([SECOND])
    assert logs.long
    logs.compact([FIRST, SECOND])
    assert logs.read_journal() == [FIRST, SECOND]
