"""`spool reserve`: a file in reservations/, refused where it cannot stand."""

from __future__ import annotations

import errno
import os
import stat
import time
import tomllib
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from calling import Command, asked, put_job
from plugins.fake_nvml import FakeNvml
from spool.core.model import SECOND_NS as S
from spool.query import snapshot
from spool.store.ownership import this_user

HOUR = 3600 * S
NOW_NS = time.time_ns()


pytestmark = pytest.mark.usefixtures("four")


def files(root: Path) -> list[str]:
    """Return the files of reservations/."""
    return sorted(path.name for path in (root / "reservations").iterdir())


def test_create_writes_the_file_that_the_page_describes(spool: Command, spool_root: Path) -> None:
    """It has the keys of the format, the beginning as a date, and the user who asked."""
    before = int(time.time())
    said = spool("reserve", "create", "demo", "--gpus", "2", "--duration", "2h", "--comment", "a talk")
    assert said.code == 0, said.err
    assert files(spool_root) == ["demo.toml"]
    found = tomllib.loads((spool_root / "reservations" / "demo.toml").read_text())
    start = found.pop("start")
    assert before <= start.timestamp() <= time.time()
    assert start.tzinfo is not None
    assert found == {"user": this_user(), "gpus": 2, "duration": "2h", "comment": "a talk"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--nobody",), {"user": "nobody"}),
        (("--project", "ml"), {"project": "ml"}),
        (("--user", "root"), {"user": "root"}),
        (("--gpus", "0,2"), {"gpus": [0, 2]}),
        (("--gpus", "3,"), {"gpus": [3]}),
    ],
)
def test_for_whom_and_which(spool: Command, spool_root: Path, options: tuple[str, ...], expected: dict) -> None:
    """A user, a project or nobody; a number or indices."""
    assert spool("reserve", "create", "a", "--gpus", "1", "--duration", "1h", *options).code == 0
    found = tomllib.loads((spool_root / "reservations" / "a.toml").read_text())
    assert expected.items() <= found.items()


def test_times_may_be_relative_or_dates(spool: Command) -> None:
    """`+2h` is from now; a date and time needs no offset (it is local time) and no seconds; --end is for --duration."""
    day = (datetime.now() + timedelta(days=2)).strftime("%Y-%m-%dT")
    assert spool("reserve", "create", "soon", "--gpus", "1", "--start", "+2h", "--end", "+3h").code == 0
    assert spool("reserve", "create", "later", "--gpus", "1", "--start", f"{day}14:00", "--duration", "2h").code == 0
    found = {one["name"]: one for one in asked(spool, "reserve", "list")["reservations"]}
    start, end = (datetime.fromisoformat(found["soon"][key][:19]) for key in ("start_at", "end_at"))
    assert end - start == timedelta(hours=1)
    local = datetime.fromisoformat(f"{day}14:00:00").astimezone()
    assert abs(datetime.fromisoformat(found["later"]["start_at"][:19] + "+00:00") - local) < timedelta(seconds=1)
    assert [one["state"] for one in found.values()] == ["pending", "pending"]


def test_reservations_that_never_hold_at_once_may_keep_the_same(spool: Command) -> None:
    """All four for one after the other."""
    assert spool("reserve", "create", "a", "--gpus", "4", "--duration", "1h").code == 0
    assert spool("reserve", "create", "b", "--gpus", "0,1,2,3", "--start", "+61m", "--duration", "1h").code == 0


def test_where_nvml_does_not_answer_what_is_kept_by_index_still_conflicts(spool: Command, four: FakeNvml) -> None:
    """How many GPUs there are is unknown then, and said to be."""
    assert spool("reserve", "create", "a", "--gpus", "0,1", "--duration", "1h").code == 0
    four.error("nvmlInitWithFlags", 999)
    said = spool("reserve", "create", "b", "--gpus", "2", "--duration", "1h")
    assert said.code == 0
    assert "NVML" in said.err


def test_list_tells_states_and_problems(spool: Command, spool_root: Path) -> None:
    """Pending, active, completed (only when asked for), and invalid with the reason: a mistake, or a conflict."""
    folder = spool_root / "reservations"
    spool("reserve", "create", "active", "--gpus", "2", "--duration", "2h")
    spool("reserve", "create", "pending", "--gpus", "0,1", "--start", "+3h", "--duration", "2h")
    (folder / "over.toml").write_text('user = "a"\ngpus = 1\nstart = 2020-01-01T00:00:00Z\nduration = "1h"\n')
    (folder / "bad.toml").write_text('user = "a"\ngpu = 1\nduration = "1h"\n')
    (folder / "beside.toml").write_text('user = "a"\ngpus = 3\nduration = "1h"\n')
    rows = asked(spool, "reserve", "list")["reservations"]
    assert {one["name"]: one["state"] for one in rows} == {
        "active": "active", "pending": "pending", "bad": "invalid", "beside": "invalid",
    }  # fmt: skip
    problems = {one["name"]: one["problem"] for one in rows}
    assert '"gpu"' in problems["bad"]
    assert "active" in problems["beside"]
    assert problems["active"] is None
    everything = asked(spool, "reserve", "list", "--all")["reservations"]
    assert {one["name"] for one in everything if one["state"] == "completed"} == {"over"}


def test_nothing_reserved_asks_nothing_of_nvml(spool: Command, four: FakeNvml) -> None:
    """An empty list is quick."""
    said = spool("reserve", "list")
    assert (said.code, said.out) == (0, "")
    assert "no reservations" in said.err
    assert four.calls() == []
    assert asked(spool, "reserve", "list")["reservations"] == []


def test_cancel_removes_the_file_and_what_is_said_about_it(spool: Command, spool_root: Path) -> None:
    """By name or glob; a name that is not there is told, and the others are cancelled all the same."""
    folder = spool_root / "reservations"
    for name in ("a1", "a2", "b"):
        (folder / f"{name}.toml").write_text('user = "a"\ngpus = 1\nduration = "1h"\n')
    (folder / "a1.toml.error").write_text("- x\n")
    said = spool("reserve", "cancel", "nope", "a*")
    assert (said.code, "nope" in said.err, said.out) == (3, True, "a1 cancelled\na2 cancelled\n")
    assert files(spool_root) == ["b.toml"]
    assert spool("reserve", "cancel", "b.toml").code == 0
    assert spool("reserve", "cancel", "z*").code == 3


def test_a_reservation_that_cannot_be_read_costs_the_commands_that_reservation(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks at the whole spool goes on without it; the list says what is the matter."""
    spool("reserve", "create", "good", "--gpus", "1", "--duration", "2h")
    spool("reserve", "create", "bad", "--gpus", "1", "--duration", "2h")
    put_job(spool_root, "waits", 'command = "true"\ncpus = 1\n')
    sound = snapshot.read_stable

    def fails(path: str) -> object:
        if path.endswith("/bad.toml"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return sound(path)

    monkeypatch.setattr(snapshot, "read_stable", fails)
    for words in (("why", "waits"), ("plan",), ("info",)):
        said = spool(*words)
        assert said.code == 0, said.err
    rows = {row["name"]: row for row in asked(spool, "reserve", "list")["reservations"]}
    assert (rows["good"]["problem"], rows["bad"]["state"]) == (None, "invalid")
    assert os.strerror(errno.EIO) in rows["bad"]["problem"]
    said = spool("reserve", "create", "new", "--gpus", "1", "--duration", "2h")
    assert said.code == 0
    assert " bad " in said.out + said.err


def test_a_cancelled_reservation_is_listed_with_all(spool: Command, spool_root: Path) -> None:
    """As cancelled, or completed if its end had passed; once for each time that one of its name was cancelled."""
    name = "a" * 100
    for _ in range(2):
        assert spool("reserve", "create", name, "--gpus", "2", "--duration", "1h", "--comment", "talk").code == 0
        assert spool("reserve", "cancel", name).out == f"{name} cancelled\n"
    old = put_job(spool_root, "old", 'user = "x"\ngpus = 1\nduration = "1s"\n', "reservations")
    os.utime(old, ns=(0, NOW_NS - HOUR))
    spool("reserve", "cancel", "old")
    put_job(spool_root, "broken", "gpus = [", "reservations")
    spool("reserve", "cancel", "broken")
    assert asked(spool, "reserve", "list")["reservations"] == []
    rows = asked(spool, "reserve", "list", "--all")["reservations"]
    assert [(row["name"], row["state"], row["comment"]) for row in rows] == [
        ("old", "completed", None), (name, "cancelled", "talk"), (name, "cancelled", "talk"),
    ]  # fmt: skip
    assert all(row["removed_at_ns"] >= NOW_NS for row in rows)
    said = spool("reserve", "list", "--all").out
    assert said.count("cancelled") == 2
    assert "|" not in said.splitlines()[-1]
    (spool_root / ".reservations" / "junk").write_text("x")
    (spool_root / ".reservations" / "x.12.toml").mkdir()
    assert asked(spool, "reserve", "list", "--all")["reservations"] == rows


def test_what_is_kept_of_reservations_is_open_to_those_who_may_change_them(spool: Command, spool_root: Path) -> None:
    """In a spool that a group shares, the first who cancels one does not shut the others out, whatever the umask."""
    os.chmod(spool_root / "reservations", 0o2770)
    assert spool("reserve", "create", "a", "--gpus", "2", "--duration", "1h").code == 0
    before = os.umask(0o077)
    try:
        assert spool("reserve", "cancel", "a").code == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(spool_root / ".reservations").st_mode) == 0o2770


def test_a_reservation_that_cannot_be_kept_is_cancelled_all_the_same(spool: Command, spool_root: Path) -> None:
    """Its GPUs matter more than its memory: as with `rm`, the file is gone."""
    (spool_root / ".reservations").write_text("in the way")
    assert spool("reserve", "create", "a", "--gpus", "2", "--duration", "1h").code == 0
    assert spool("reserve", "cancel", "a").out == "a cancelled\n"
    assert os.listdir(spool_root / "reservations") == []


def test_gc_removes_what_is_kept_of_old_reservations(spool: Command, spool_root: Path) -> None:
    """By the time of their removal, with --older-than alone; a dry run tells of them, and other files stay."""
    for name in ("a", "b"):
        assert spool("reserve", "create", name, "--gpus", "2", "--duration", "1h").code == 0
        assert spool("reserve", "cancel", name).code == 0
    kept = spool_root / ".reservations"
    (kept / "notes").write_text("mine")
    files = sorted(str(path) for path in kept.glob("*.toml"))
    for words in (("--keep-runs", "1"), ("--older-than", "1h")):
        assert asked(spool, "gc", *words)["reservations"] == []
    assert spool("gc", "--older-than", "0s", "--dry-run").out.splitlines()[:-1] == files
    assert asked(spool, "gc", "--older-than", "0s")["reservations"] == [os.path.basename(file) for file in files]
    assert os.listdir(kept) == ["notes"]
