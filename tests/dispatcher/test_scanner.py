"""File events say where to look; a look gives way to what can start, and misses nothing for that."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from crash.world import Session, ends_of
from spool.core.layout import DONE, HELD, QUEUED
from spool.core.model import SECOND_NS, Spec
from spool.dispatcher import observer
from spool.dispatcher.scanner import Scanner
from spool.dispatcher.wakeup import DirectoryWatcher, Hint, NameChange
from spool.formats import jobfile
from spool.formats.journal import Reviewed
from spool.query import look as look_at_files
from spool.query import snapshot
from spool.store.spool import Spool

MISTAKES = 'command = "ok"\n' + "".join(f"k{at:063} = 1\n" for at in range(1000))
FORTY = [f"bad{at:02}" for at in range(40)]


@pytest.fixture
def session(session: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Give a dispatcher whose looks give way after each step."""
    monkeypatch.setattr(observer, "BUDGET_NS", 0)
    session.looks_at_everything = False
    session.settle()
    return session


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note of which jobs a text is looked into."""
    found: list[str] = []
    parse = Scanner.parse

    def noted(self: Scanner, name: str, data: bytes, reviewed: Reviewed | None = None) -> tuple[Spec, bytes | None]:
        found.append(name)
        return parse(self, name, data, reviewed)

    monkeypatch.setattr(Scanner, "parse", noted)
    return found


def look(session: Session) -> None:
    """Have the next pass begin to look at everything."""
    session.now.watcher.lost = True


def put(session: Session, name: str, text: str, place: str = QUEUED) -> Path:
    """Put a file into a state directory."""
    path = session.users.path(place, name)
    path.write_text(text)
    return path


@pytest.mark.parametrize("events", [True, False], ids=["events", "no events"])
def test_a_good_job_waits_for_no_file_full_of_mistakes(session: Session, parsed: list[str], events: bool) -> None:
    """Beside forty of them it starts after one at most; then each of them is told what is wrong."""
    for name in FORTY:
        put(session, name, MISTAKES)
    session.users.submit("good", "ok")
    look(session)
    if events:
        session.now.watcher.lost = False
        session.now.watcher.hints += [Hint(QUEUED, f"{name}.toml") for name in (*FORTY, "good")]
    for _ in range(60):
        session.turns(1)
        if "good" in dict(session.world.begun):
            break
    assert len([name for name in parsed if name != "good"]) <= 3
    assert not session.now.idle
    session.settle()
    assert session.now.idle
    assert sorted(set(parsed)) == sorted([*FORTY, "good"])
    assert len(parsed) == 41
    for name in FORTY:
        error = session.users.path(QUEUED, name).with_suffix(".toml.error").read_text()
        assert " 1,000 problems" in error.splitlines()[0]
        assert "- and 900 more\n" in error
    assert ends_of(session.world).places["good"] == (DONE,)


def test_the_first_look_of_a_dispatcher_leaves_large_files_for_later(session: Session, parsed: list[str]) -> None:
    """It sees every other file in one go; what can start does, and a large file that waits keeps its place."""
    put(session, "large", 'command = "ok"\ncpus = 99\n' + "# padding\n" * 10_000)
    look(session)
    session.settle()
    place = session.now.state.jobs["large"].wait
    session.end()
    for name in FORTY[:3]:
        put(session, name, MISTAKES)
    session.users.submit("good", "ok")
    parsed.clear()
    session.turns(2)
    assert "good" in dict(session.world.begun)
    assert len(parsed) < 1 + 3 + 1
    session.settle()
    assert {*FORTY[:3], "large"} <= set(parsed)
    again = session.now.state.jobs["large"].wait
    assert again.arrived_at_ns == place.arrived_at_ns


def test_what_happens_while_a_look_has_given_way_is_seen(session: Session, parsed: list[str]) -> None:
    """A file that is mended, removed or moved before its turn has come is taken as it is then; errors go with files."""
    mended, removed, held = (put(session, name, MISTAKES) for name in ("mended", "removed", "held"))
    put(session, "small", MISTAKES[:100])
    look(session)
    for _ in range(3):
        session.turns(1)
    assert not parsed or parsed == ["small"]
    mended.write_text('command = "ok"\n')
    removed.unlink()
    held.rename(session.users.path(HELD, "held"))
    session.settle()
    look(session)
    session.settle()
    assert ends_of(session.world).places["mended"] == (DONE,)
    assert "removed" not in session.now.state.jobs
    assert session.now.state.jobs["held"].held is not None
    assert not session.users.path(QUEUED, "held").with_suffix(".toml.error").exists()
    error = session.users.path(HELD, "held").with_suffix(".toml.error")
    assert error.exists()
    session.users.path(HELD, "held").unlink()
    look(session)
    session.settle()
    assert not error.exists()


def test_a_file_is_not_taken_for_gone_before_a_look_has_seen_the_whole_directory(session: Session) -> None:
    """Held jobs keep their places however often the look gives way."""
    for at in range(5):
        session.users.submit(f"h{at}", "ok", place=HELD)
    look(session)
    session.settle()
    before = {name: job.wait for name, job in session.now.state.jobs.items()}
    for name in FORTY[:5]:
        put(session, name, MISTAKES)
    look(session)
    for _ in range(10):
        session.turns(1)
        assert {name: session.now.state.jobs[name].wait for name in before} == before


def test_a_plan_believes_what_was_said_of_a_large_file(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` and `why` do not find the same mistakes again; a file that has changed since is read."""
    path = put(session, "bad", MISTAKES)
    look(session)
    session.settle()
    parse, asked = jobfile.parse, list[str]()

    def noted(data: bytes, *, name: str, **given: Any) -> Spec:
        asked.append(name)
        return parse(data, name=name, **given)

    monkeypatch.setattr(look_at_files.jobfile, "parse", noted)
    spool = Spool(str(session.world.root))
    told = snapshot.snapshot(spool).left_out["bad"]
    assert told.startswith('unknown key "k000')
    assert told.endswith("; and 900 more")
    assert not asked
    while path.stat().st_ctime_ns <= path.with_suffix(".toml.error").stat().st_mtime_ns:
        path.write_text(MISTAKES + "x = 1\n")
    assert snapshot.snapshot(spool).left_out["bad"].endswith("; and 901 more")
    assert asked == ["bad"]


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ('workdir = "$SPOOL_TEST_UNSET/x"', '"workdir" on line 2: $SPOOL_TEST_UNSET'),
        ('stdout = "a.${SPOOL_TEST_UNSET}"', '"stdout" on line 2: ${SPOOL_TEST_UNSET}'),
        ('stderr = "~no such user/err"', '"stderr" on line 2: there is no user no such user'),
        ('workdir = "$1/a"', '"workdir" on line 2: $1'),
        ('array = "0-1"\nworkdir = "/tmp/$SPOOL_TEST_UNSET/{index}"', '"workdir" on line 3: $SPOOL_TEST_UNSET'),
        ('rows = [{ x = "$SPOOL_TEST_UNSET" }]\nworkdir = "/tmp/{x}"', "task lost_0: "),
    ],
)
def test_a_path_that_cannot_be_expanded_is_told_and_fails_no_run(session: Session, line: str, where: str) -> None:
    """A variable that the dispatcher has not, or a user that the machine has not, is known when the file is read."""
    path = put(session, "lost", f'command = "ok"\n{line}\n')
    look(session)
    session.settle()
    assert not session.world.begun
    assert where in path.with_suffix(".toml.error").read_text()
    survey_says = snapshot.snapshot(Spool(str(session.world.root))).left_out["lost"]
    assert where in survey_says or "array" in line or "rows" in line


def test_a_path_is_expanded_by_what_the_job_has(session: Session) -> None:
    """A variable that is set, `~`, and a dollar sign that begins no variable are no mistakes."""
    for at, given in enumerate(("$SPOOL_TEST_SET/a", "${SPOOL_TEST_SET}", "~/a", "/tmp/a$", "$HOME")):
        put(session, f"j{at}", f'command = "ok"\nworkdir = \'{given}\'\nenv.SPOOL_TEST_SET = "/tmp"\n')
    look(session)
    session.settle()
    assert {name for name, _ in session.world.begun} == {"j0", "j1", "j2", "j3", "j4"}


def test_an_array_whose_tasks_would_fill_the_disk_is_refused(session: Session) -> None:
    """A hundred thousand copies of a long text are a mistake, told before the first of them is written."""
    path = put(session, "sweep", f'command = "ok"\nprolog = "{"x" * 20_000}"\narray = "0-99999"\n')
    look(session)
    session.settle()
    told = path.with_suffix(".toml.error").read_text()
    assert [size in told for size in ("100,000", "19.6 KiB", "1.9 GiB")] == [True] * 3
    assert not list(Path(session.world.staging).glob("**/*.toml"))


@pytest.mark.parametrize("events", [0, 1])
def test_a_watch_that_is_closed_leaves_nothing_open(tmp_path: Path, events: int) -> None:
    """A user may have few of the kernel's descriptors for file events; also one that had nothing to tell goes back."""
    before = os.listdir("/proc/self/fd")
    watch = DirectoryWatcher()
    watch.start({"here": str(tmp_path)})
    assert watch.problem is None
    for number in range(events):
        (tmp_path / str(number)).touch()
        watch.read()
        assert watch.take_hints()
    watch.close()
    assert os.listdir("/proc/self/fd") == before


def test_a_mode_is_news_where_somebody_wants_to_know_and_a_link_is_none(tmp_path: Path) -> None:
    """What is made readable is heard of in such a directory; a second name elsewhere, which moves make, is not."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    watch = DirectoryWatcher()
    watch.start({name: str(tmp_path / name) for name in ("here", "there")}, modes_of=("here",))
    for name in ("here", "there"):
        os.link(tmp_path / name / "file", tmp_path / "link")
        (tmp_path / "link").unlink()
        (tmp_path / name / "file").chmod(0o640)
    watch.read()
    watch.close()
    assert watch.take_hints() == [Hint("here", "file")]


def test_what_the_kernel_drops_is_counted_and_all_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where events were lost, the watch says so once, and it goes on."""
    watch = DirectoryWatcher()
    watch.start({"here": str(tmp_path)})
    with monkeypatch.context() as patch:  # to drop one takes 16,384 others
        patch.setattr(os, "read", lambda *_: struct.pack("iIII", -1, 0x4000, 0, 0))  # IN_Q_OVERFLOW
        watch.read()
    assert (watch.take_lost(), watch.take_lost()) == (True, False)
    (tmp_path / "later").touch()
    watch.read()
    watch.close()
    assert Hint("here", "later", NameChange.CAME) in watch.take_hints()


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_directory_that_took_the_place_of_another_is_watched(tmp_path: Path, how: str) -> None:
    """That a directory is gone or elsewhere calls for a look at everything; the next one of its name is watched."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    watch = DirectoryWatcher()
    watch.start({"here": str(here)})
    if how == "moved":
        here.rename(elsewhere)
    else:
        here.rmdir()
    watch.read()
    assert watch.take_lost()
    watch.renew()
    assert str(here) in (watch.problem or "")
    here.mkdir()
    watch.renew()
    assert watch.problem is None
    if how == "moved":
        (elsewhere / "theirs").touch()
    (here / "ours").touch()
    watch.read()
    watch.close()
    assert {hint.filename for hint in watch.take_hints()} == {"ours"}


def test_a_working_directory_that_is_gone_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher that was started in a directory which is removed later, or was before, has file events."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    watch = DirectoryWatcher()
    watch.start({"here": str(tmp_path)})
    watch.close()
    assert watch.problem is None


@pytest.mark.parametrize("opened", [True, False], ids=["opened", "closed"])
def test_an_editor_that_comes_or_goes_while_a_look_has_given_way_is_seen(session: Session, opened: bool) -> None:
    """The rest of the look does not take back what the event of the editor's own file has told."""
    for name in ("edited", "other"):
        session.users.submit(name, "ok", place=HELD)
    session.settle()
    scanner, state = session.now.scanner, session.now.state
    marks = [session.users.path(HELD, name).with_name(f".{name}.toml.swp") for name in ("edited", "other")]
    for mark in marks if not opened else ():
        mark.touch()
    scanner.everything(0)  # one step, with the editors' files of this moment
    for mark in marks:
        mark.touch() if opened else mark.unlink()
    for name in ("edited", "other"):
        scanner.examine(HELD, name)
    told = {name: state.jobs[name].held for name in ("edited", "other")}
    while scanner.unfinished:
        scanner.go_on(0)
    assert {name: state.jobs[name].held for name in ("edited", "other")} == told
    assert all((file is not None and file.spec is None) == opened for file in told.values())


def test_a_job_that_spool_holds_is_still_held_by_it_while_an_editor_has_it_open(session: Session) -> None:
    """Its reason goes with the edit, not before."""
    file = put(session, "x", 'command = "ok"\n', HELD)
    reason = file.with_name("x.toml.reason")
    reason.write_text("its program is not there\n")
    for _ in range(2):
        look(session)
        session.settle()
        assert session.now.state.jobs["x"].hold_reason == "its program is not there"
        assert reason.exists()
        file.with_name(".x.toml.swp").touch()
    os.utime(file, ns=(time.time_ns() + SECOND_NS,) * 2)
    look(session)
    session.settle()
    assert not reason.exists()
