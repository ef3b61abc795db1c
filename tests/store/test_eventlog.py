"""The events on the disk: appended, read from a cursor, cut; cut off anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from faulty import FaultyDisk, PowerCut
from filled import filled
from spool.core import layout
from spool.core.model import Event, EventName, Result, State
from spool.formats.events import parse_event, render_event
from spool.store import logs
from spool.store.disk import Disk
from spool.store.logs import EventReader, EventWriter


def event(number: int, filler: str = "") -> Event:
    """Return some event."""
    where = {"host": "h", "version": "1", "spool_dir": "/s"}
    return Event(id=str(number), name=EventName.FINISHED, at_ns=number, job="x", reason=filler, **where)


def disk(root: Path) -> Disk:
    """Return the disk of a spool."""
    return Disk(str(root / ".tmp"))


def heard(root: Path, kind: str, *, all_of_it: bool = True) -> list[str]:
    """Return the ids that a listener hears from its cursor on, and let it have heard them."""
    reader = EventReader(str(root), kind, disk(root))
    found, position = [], reader.position
    while lines := reader.read(position):
        found += [line.event.id for line in lines if line.event is not None]
        position = lines[-1].end
        if not all_of_it:
            break
    reader.save(position)
    reader.close()
    return found


def test_what_is_told_after_the_spool_was_moved_has_its_new_paths(spool_root: Path) -> None:
    """An event that was written down before a `mv` of the spool names the metadir where it lies now."""
    before = replace(event(1), run=3, metadir="/s/jobs/x/3")
    box = EventWriter(str(spool_root), disk(spool_root))
    box.append(render_event(before))
    box.close()
    reader = EventReader(str(spool_root), "hooks", disk(spool_root))
    [found] = reader.read(0)
    reader.close()
    assert found.event is not None
    assert found.event.spool_dir == str(spool_root)
    assert found.event.metadir == f"{spool_root}/jobs/x/3"


def test_an_event_comes_back_as_it_was() -> None:
    """A line of the file has all of an event, the result, the grant and whom to notify too."""
    whole = filled(Event, name=EventName.RETRYING, result=filled(Result, outcome=State.FAILED, recorded_at_ns=None))
    line = render_event(whole)
    assert line.count(b"\n") == 1
    assert parse_event(line.rstrip()) == whole
    assert parse_event(line[: len(line) // 2]) is None


def test_each_listener_hears_of_all_from_its_beginning_on(spool_root: Path) -> None:
    """One that begins later hears of nothing that was before, and each goes on where it was."""
    writer = EventWriter(str(spool_root), disk(spool_root))
    assert writer.begin("hooks")
    assert not writer.begin("hooks")
    writer.append(render_event(event(1)))
    assert writer.begin("notify")
    writer.append(render_event(event(2)) + render_event(event(3)))
    assert heard(spool_root, "hooks") == ["1", "2", "3"]
    assert heard(spool_root, "notify") == ["2", "3"]
    assert not writer.unread()
    writer.append(render_event(event(4)))
    assert writer.unread()
    assert heard(spool_root, "hooks") == ["4"]
    assert (spool_root / layout.EVENTS).stat().st_mode & 0o777 == 0o600
    writer.close()
    (spool_root / layout.EVENTS).unlink()  # cursors of the old file do not hide what is told in the new one
    writer.append(render_event(event(5)))
    assert heard(spool_root, "hooks") == ["5"]


def test_what_all_have_read_is_cut_off_and_no_cursor_changes(spool_root: Path) -> None:
    """A listener that is behind keeps what it has not heard, a reader goes on in the new file, positions only grow."""
    writer = EventWriter(str(spool_root), disk(spool_root))
    writer.begin("hooks")
    writer.begin("notify")
    for number in range(20):
        writer.append(render_event(event(number, "x" * 100)))
    reader = EventReader(str(spool_root), "hooks", disk(spool_root))
    position = reader.read(reader.position)[14].end
    reader.save(position)
    EventReader(str(spool_root), "notify", disk(spool_root)).save(position)
    size, end = (spool_root / layout.EVENTS).stat().st_size, writer.end
    writer.cut()
    assert (spool_root / layout.EVENTS).stat().st_size < size / 2
    assert writer.end == end
    writer.append(render_event(event(20)))
    assert [line.event.id for line in reader.read(position) if line.event] == [str(n) for n in range(15, 21)]
    assert heard(spool_root, "notify") == [str(n) for n in range(15, 21)]
    again = EventWriter(str(spool_root), disk(spool_root))
    assert again.end == writer.end
    reader.close()


def test_a_listener_that_never_reads_does_not_fill_the_disk(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than the most that is kept, the newer half stays, in whole lines, and what is lost is told once."""
    monkeypatch.setattr(logs, "MOST_BYTES", 4000)
    writer = EventWriter(str(spool_root), disk(spool_root))
    writer.begin("hooks")
    lost, sizes = 0, list[int]()
    for number in range(100):
        writer.append(render_event(event(number, "x" * 100)))
        lost += writer.cut()
        sizes.append((spool_root / layout.EVENTS).stat().st_size)
    assert max(sizes) < 4500
    kept = heard(spool_root, "hooks")
    assert kept == [str(number) for number in range(100 - len(kept), 100)]
    assert 8 <= len(kept) < 30
    lines = [len(render_event(event(number, "x" * 100))) for number in range(100 - len(kept))]
    assert lost == sum(lines)
    writer.append(render_event(event(100)))
    assert writer.cut() == 0
    assert heard(spool_root, "hooks") == ["100"]


@pytest.mark.parametrize("torn", [False, True])
def test_nothing_is_lost_where_the_dispatcher_is_cut_off(spool_root: Path, tmp_path: Path, *, torn: bool) -> None:
    """Before each change of an append or a cut: what was appended is heard once, a torn line is passed over."""
    for number in range(1, 40):
        root = tmp_path / f"{number}"
        (root / ".tmp").mkdir(parents=True)
        faulty = FaultyDisk(str(root / ".tmp"), cut_at=number, torn=torn)
        sure: list[str] = []
        got: list[str] = []
        writer = EventWriter(str(root), faulty)
        try:
            writer.begin("hooks")
            for serial in range(8):
                writer.append(render_event(event(serial, "x" * 50)))
                sure.append(str(serial))
                if serial % 3 == 2:
                    got += heard(root, "hooks", all_of_it=serial != 5)
                    writer.cut()
        except PowerCut:
            pass
        writer.close()
        after = EventWriter(str(root), disk(root))
        after.begin("hooks")
        after.append(render_event(event(99)))
        got += heard(root, "hooks")
        assert [each for each in got if each in sure or each == "99"] == [*sure, "99"], number
        after.close()
        if not faulty.is_cut:
            return
    raise AssertionError("the scenario has no end")
