"""Files are the interface: what `cp`, `mv`, `rm` and editors do to a spool that is served, and to its directories."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from served import HOUR_NS, LOOKS, Served, alive, marked
from spool.core import layout
from support import wait_for


def _sh(script: str, *arguments: str | Path) -> None:
    """Let a shell do what a user would type; `$1` and so on are *arguments*."""
    subprocess.run(["/bin/sh", "-ec", script, "sh", *map(str, arguments)], check=True)


# Dropping.


@pytest.mark.parametrize(
    "how",
    [
        'cp "$1" "$2/queued/NAME.toml"',
        'mv "$1" "$2/queued/NAME.toml"',
        'ln "$1" "$2/queued/NAME.toml"',
        'cat "$1" > "$2/queued/NAME.toml"',
        'cp "$1" "$2/queued/.NAME.partial" && mv "$2/queued/.NAME.partial" "$2/queued/NAME.toml"',
        'mv "$1" "$2/.tmp/NAME" && mv "$2/.tmp/NAME" "$2/queued/NAME.toml"',
    ],
    ids=["cp", "mv", "ln", "cat", "partial", "staged"],
)
def test_a_file_that_appears_runs(shared: Served, tmp_path: Path, how: str, request: pytest.FixtureRequest) -> None:
    """However a file comes into queued/, the job runs, and the file arrives in done/ byte for byte."""
    name = f"appears-{request.node.callspec.id}"
    file = tmp_path / "job.toml"
    text = b"# mine  \r\n" + shared.text("echo was here") + b"\n\n# end, no newline"
    file.write_bytes(text)
    _sh(how.replace("NAME", name), file, shared.root)
    assert shared.wait_done(name)["outcome"] == "finished"
    assert shared.log(name) == "was here\n"
    assert shared.path("done", name).read_bytes() == text


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no second file system")
def test_mv_from_another_file_system_runs(shared: Served) -> None:
    """A file that `mv` copies from another file system is read when it is whole."""
    other = Path(f"/dev/shm/spool-test-{os.getpid()}.toml")
    other.write_bytes(shared.text("echo moved") + b"# filling\n" * 50_000)
    try:
        _sh('mv "$1" "$2"', other, shared.path("queued", "from-afar"))
    finally:
        other.unlink(missing_ok=True)
    shared.wait_done("from-afar")
    assert shared.log("from-afar") == "moved\n"


# Editors.


def _vim(path: Path, text: bytes) -> None:
    """Save as vim does: a swap file, a test file, the old one renamed away, the new one written, all tidied up."""
    swap = path.with_name(f".{path.name}.swp")
    probe = path.with_name("4913")
    backup = path.with_name(f"{path.name}~")
    swap.write_bytes(b"b0VIM")
    probe.write_bytes(b"")
    probe.unlink()
    path.rename(backup)
    path.write_bytes(text)
    backup.unlink()
    swap.unlink()


def _replace(path: Path, text: bytes) -> None:
    """Save as most do: another file, renamed over it."""
    other = path.with_name(f".{path.name}.new")
    other.write_bytes(text)
    other.replace(path)


def _remove_and_write(path: Path, text: bytes) -> None:
    """Save as the careless do: the file goes, and comes back."""
    path.unlink()
    path.write_bytes(text)


# As nano saves: the same file, emptied and written anew.
@pytest.mark.parametrize("save", [_vim, Path.write_bytes, _replace, _remove_and_write])
def test_an_edit_of_a_waiting_file_counts(shared: Served, save: object, request: pytest.FixtureRequest) -> None:
    """What a waiting file says after it was saved is what runs, in its old place, and it runs once."""
    assert callable(save)
    name = f"edited{save.__name__.replace('_', '-')}"
    path = shared.drop(name, "echo old", start_after="1h")
    shared.wait_reason(name, "begins")
    since = shared.state()["jobs"][name]["since_ns"]
    save(path, shared.text("echo new"))
    shared.wait_done(name)
    assert shared.runs(name) == [1]
    assert shared.log(name) == "new\n"
    history = [line for line in shared.history() if line["job"] == name]
    assert [line["outcome"] for line in history] == ["finished"]
    submitted = shared.result(name)
    assert submitted["submitted_at_ns"] == since


@pytest.mark.parametrize("mark", [".NAME.toml.swp", ".#NAME.toml"])
def test_a_file_that_is_open_in_an_editor_waits(shared: Served, mark: str) -> None:
    """While vim or emacs has a file open it is not started, and it starts when they close it."""
    name = f"open-{'vim' if 'swp' in mark else 'emacs'}"
    beside = shared.root / "queued" / mark.replace("NAME", name)
    if "swp" in mark:
        beside.write_bytes(b"b0VIM")
    else:
        beside.symlink_to("somebody@host.4711")  # emacs makes a link that leads nowhere
    shared.drop(name, "echo closed")
    shared.wait_reason(name, "editor")
    assert shared.runs(name) == []
    beside.unlink()
    shared.wait_done(name)
    assert shared.log(name) == "closed\n"


def test_an_editor_that_saves_a_running_file_cancels_nothing(shared: Served) -> None:
    """A file in running/ that is gone for a moment while an editor saves it was never gone."""
    shared.up("saved-running", "echo up; until [ -e saved ]; do sleep 0.02; done")
    path = shared.path("running", "saved-running")
    _vim(path, path.read_bytes() + b"# edited\n")
    shared.looked()
    (shared.root.parent / "saved").touch()
    assert shared.wait_done("saved-running")["outcome"] == "finished"
    assert b"# edited" in shared.path("done", "saved-running").read_bytes()


# Moves.


def test_a_job_goes_where_its_file_is_moved(shared: Served) -> None:
    """Released, stopped, held, run anew, filed and run again by `mv` alone: each run ends as the move has it."""
    shared.drop("moved", "echo up; [ $SPOOL_RUN = 3 ] || exec sleep 1000", place="held")
    for run, (place, target) in enumerate((("held", "held"), ("held", "queued"), ("done", "done")), 1):
        shared.looked()
        assert (shared.places("moved"), len(shared.runs("moved"))) == ([place], (0, 1, 3)[run - 1])
        shared.move("moved", place, "queued")
        number = run + (run == 3)
        shared.says("moved", "up", number)
        shared.wait_place("moved", "running")
        shared.move("moved", "running", target)
        assert shared.wait_outcome("moved", number) == "cancelled"
        if target == "queued":
            shared.wait_done("moved")
    ends = [shared.result("moved", run) or {} for run in (1, 2, 3, 4)]
    assert [end.get("again") for end in ends] == ["hold", "requeue", None, None]
    assert (ends[2]["outcome"], ends[3]["submitted_at_ns"] > ends[2]["ended_at_ns"]) == ("finished", True)
    assert len({end["submitted_at_ns"] for end in ends[:3]}) == 1
    assert {end["attempt"] for end in ends} == {1}


def test_rm_cancels_a_running_job(shared: Served) -> None:
    """Removing the file of a running job ends it, and done/ has its file again, from the run's own copy."""
    text = shared.text("echo up; exec sleep 1000")
    shared.up("removed", text)
    pid = shared.pid("removed")
    shared.path("running", "removed").unlink()
    result = shared.wait_done("removed")
    assert result["outcome"] == "cancelled"
    assert "deleted" in result["reason"]
    assert not alive(pid)
    assert shared.path("done", "removed").read_bytes() == text


def test_a_newer_file_ends_the_retries_of_the_older(shared: Served) -> None:
    """Where a newer file of the name waits, a failed one is not tried again."""
    shared.up("newer", "echo up; until [ -e newer-go ]; do sleep 0.02; done; exit 3", retry={"max": 5})
    shared.drop("newer", "true")
    shared.looked()
    (shared.root.parent / "newer-go").touch()
    wait_for(lambda: shared.outcome("newer", 2))
    shared.wait_done("newer")
    assert [shared.outcome("newer", 1), shared.outcome("newer", 2)] == ["failed", "finished"]


def test_a_link_beside_a_running_job_is_a_second_submission(shared: Served) -> None:
    """`ln running/x.toml queued/x.toml`: the second waits for the first, and each ran once."""
    shared.drop("linked", "echo run $SPOOL_RUN; [ $SPOOL_RUN != 1 ] || until [ -e linked-go ]; do sleep 0.02; done")
    shared.says("linked", "run 1")
    os.link(shared.path("running", "linked"), shared.path("queued", "linked"))
    shared.looked()
    (shared.root.parent / "linked-go").touch()
    wait_for(lambda: shared.outcome("linked", shared.runs("linked")[-1]) and len(shared.runs("linked")) > 1)
    shared.wait_done("linked")
    assert shared.runs("linked") == [1, 2]


def test_a_removed_running_file_and_a_new_one_of_its_name(shared: Served) -> None:
    """`rm running/x.toml; cp new queued/x.toml` cancels the first and runs the second, whatever inode it got."""
    for at in range(3):
        name = f"reborn-{at}"
        shared.up(name, "echo up; exec sleep 1000")
        shared.path("running", name).unlink()
        shared.path("queued", name).write_bytes(shared.text("echo new"))
        wait_for(lambda name=name: shared.outcome(name, 2))
        shared.wait_done(name)
        first, second = shared.result(name, 1), shared.result(name, 2)
        assert (first["outcome"], first.get("again")) == ("cancelled", None)
        assert second["outcome"] == "finished"
        assert second["submitted_at_ns"] > first["submitted_at_ns"]


# Bad files.


def test_a_bad_file_stays_and_is_explained(shared: Served) -> None:
    """Beside a bad file appears what is wrong, in which key, on which line, and what was meant; mending runs it."""
    path = shared.drop("typo", b'command = "true"\n\ngpu = 1\n')
    error = path.with_name("typo.toml.error")
    text = wait_for(lambda: error.read_text() if error.exists() else "")
    assert "gpu" in text
    assert '"gpus"' in text
    assert "line 3" in text
    wait_for(lambda: shared.state()["jobs"].get("typo", {}).get("state") == "invalid")
    assert path.exists()
    path.write_bytes(shared.text("echo mended"))
    shared.wait_done("typo")
    assert not error.exists()
    assert shared.log("typo") == "mended\n"


def test_the_error_goes_when_a_slow_writer_mends_the_file(shared: Served) -> None:
    """The `.error` file goes also when the mending took its time with the file open, or with the editor open."""
    path = shared.drop("slowly-mended", b"command = \n")
    error = path.with_name("slowly-mended.toml.error")
    wait_for(error.exists)
    swap = path.with_name(".slowly-mended.toml.swp")
    swap.touch()
    wait_for(lambda: "editor" in shared.reason("slowly-mended"))
    with path.open("wb") as file:
        shared.looked()
        file.write(shared.text("true", start_after="1h"))
        file.flush()
        shared.looked()
    swap.unlink()
    shared.wait_reason("slowly-mended", "begins")
    wait_for(lambda: not error.exists())
    path.unlink()


def test_what_is_no_job_file_is_none_of_spools_business(shared: Served, tmp_path: Path) -> None:
    """Links, directories, FIFOs, sockets and odd names neither run nor hang nor crash anything, and stay."""
    target = tmp_path / "target.toml"
    target.write_bytes(shared.text("echo through a link"))
    good = shared.text("echo should not run")
    left: list[Path] = []
    for place in ("queued", "held", "running", "done"):
        at = shared.root / place
        (at / "dir.toml").mkdir()
        os.mkfifo(at / "fifo.toml")
        (at / "link.toml").symlink_to(target)
        (at / "dangling.toml").symlink_to(tmp_path / "nowhere")
        (at / "loop.toml").symlink_to("loop.toml")
        # The path of a socket may have 107 bytes.
        with socket.socket(socket.AF_UNIX) as listener:
            here = os.open(at, os.O_RDONLY)
            listener.bind(f"/proc/self/fd/{here}/socket.toml")
            os.close(here)
        left += [at / f"{name}.toml" for name in ("dir", "fifo", "link", "dangling", "loop", "socket")]
    for odd in ("with space.toml", "-rf.toml", "new\nline.toml", "ä.toml", ".hidden.toml", "x.toml~", "x.swp", "4913",
                "#x.toml#", "x", "toml", ".toml", "x.TOML", "_x.toml", "a" * 101 + ".toml", "x.toml.bak"):  # fmt: skip
        (shared.root / "queued" / odd).write_bytes(good)
        left.append(shared.root / "queued" / odd)
    raw = os.fsencode(shared.root / "queued") + b"/\xff\xfe.toml"
    with open(raw, "wb") as file:
        file.write(good)
    shared.looked()
    shared.completes("beside-odd-ones", "true")
    assert all(os.path.lexists(path) for path in left), [str(p) for p in left if not os.path.lexists(p)]
    for name in ("dir", "fifo", "link", "dangling", "loop", "socket", "x", "-rf"):
        assert shared.runs(name) == []
    for path in left:
        path.rmdir() if path.name == "dir.toml" else path.unlink()
    os.unlink(raw)
    assert shared.lives()


def test_metadirs_deleted_under_a_running_job(live: Served) -> None:
    """`rm -rf jobs/*` while jobs run ends no dispatcher and leaves no process."""
    live.drop("robbed", "echo up; until [ -e go ]; do sleep 0.02; done", kill_grace="1s")
    live.drop("robbed-too", "echo up; exec sleep 1000", kill_grace="1s")
    live.says("robbed", "up")
    live.says("robbed-too", "up")
    shutil.rmtree(live.root / "jobs" / "robbed")
    shutil.rmtree(live.root / "jobs" / "robbed-too")
    (live.root.parent / "go").touch()
    live.path("running", "robbed-too").unlink()
    wait_for(lambda: not marked(live.root))
    live.looked()
    assert live.lives()
    result = live.wait_done("robbed")
    assert (result["outcome"], result["exit_code"]) == ("finished", 0)
    assert live.outcome("robbed-too") == "cancelled"
    live.move("robbed", "done", "queued")
    wait_for(lambda: live.outcome("robbed", 2))
    live.wait_done("robbed")


# Scripts in job files.


def test_a_captured_script_runs_as_a_file_of_its_run(shared: Served) -> None:
    """Its first line says what runs it; it stays in the metadir; retries and arrays have it too."""
    script = '#!/bin/sh -e\necho $0: "$@"\n[ "$SPOOL_RUN" = 2 ] || exit 3\n'
    assert shared.completes("no-interpreter", ["a.sh"], script="#!/no/such/interpreter\n")["exit_code"] == 127
    shared.drop("captured", ["a.sh", "x y", "--lr"], script=script, retry={"max": 1})
    assert shared.wait_done("captured") is not None
    path = shared.root / "jobs" / "captured" / "1" / "script"
    assert (path.read_text(), path.stat().st_mode & 0o777) == (script, 0o700)
    assert shared.log("captured", 2) == f"{path.parent.parent}/2/script: x y --lr\n"
    text = "#!/bin/sh\necho {index} $SPOOL_ARRAY_INDEX $1\n"
    shared.completes("captured-many", ["a.sh", "task {index}"], script=text, array="0-1")
    assert [shared.log(f"captured-many_{at}") for at in (0, 1)] == ["{index} 0 task 0\n", "{index} 1 task 1\n"]


EVERYONE = (*layout.DIRECTORIES, layout.ROOM, layout.CURSORS)


def take_away(path: Path, how: str) -> None:
    """Remove a directory, or move it elsewhere."""
    if how == "rm -r":
        shutil.rmtree(path)
    else:
        path.rename(path.parent / "elsewhere")


@pytest.mark.parametrize("how", ["rm -r", "mv"])
@pytest.mark.parametrize("name", EVERYONE)
def test_a_directory_that_is_taken_away_is_made_again(served: Served, name: str, how: str) -> None:
    """Whichever directory goes, jobs start, end, are held and cancelled as before, by events and not by polling."""
    served.changes[LOOKS] = HOUR_NS
    served.start()
    served.completes("before", "true")
    path = served.root / name
    if not path.is_dir():
        pytest.skip("it is not there until it is needed")
    mode = stat.S_IMODE(path.stat().st_mode)
    take_away(path, how)
    if name in layout.DIRECTORIES:
        served.until(path.is_dir, f"{name}/ again")
        wait_for(lambda: stat.S_IMODE(path.stat().st_mode) == mode)
    served.completes("after", "true")
    assert served.outcome("after") == "finished"
    served.drop("parked", "true", place="held")
    served.wait_place("parked", "held")
    served.move("parked", "held", "queued")
    served.wait_done("parked")
    served.begun("long", "sleep 1000")
    served.path("running", "long").unlink()
    served.wait_done("long")
    assert served.outcome("long") == "cancelled"
    served.until(lambda: not served.state()["problems"], "an end of all problems")
    assert served.lives()
    assert "network file system" not in served.said()


@pytest.mark.parametrize("name", layout.DIRECTORIES)
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_in_the_way_of_a_directory_is_told_and_never_deleted(served: Served, name: str, kind: str) -> None:
    """A file or a dangling link in the place of a directory is named as a problem; once it is moved, all goes on."""
    served.changes[LOOKS] = HOUR_NS
    served.start()
    served.completes("before", "true")
    path = served.root / name
    path.rename(served.root / "elsewhere")
    aside = served.root / "aside"
    if kind == "file":
        aside.write_text("mine")
    else:
        aside.symlink_to("nowhere")
    while os.path.lexists(aside):
        try:
            os.rename(aside, path)
        except IsADirectoryError:  # the dispatcher was faster, and may have put something into it
            shutil.rmtree(path, ignore_errors=True)

    def told() -> bool:
        # Without .tmp/ state.json cannot be replaced; the log and `doctor` tell then.
        lines = served.said().splitlines() if name == layout.STAGING else served.state()["problems"]
        return any(
            f"directories of the spool: {name}: " in each and "move what is in the way" in each for each in lines
        )

    served.until(told, "the problem")
    assert "network file system" not in served.said()
    assert path.is_symlink() if kind == "link" else path.read_text() == "mine"
    path.rename(served.root / "moved")
    served.until(path.is_dir, f"{name}/ again")
    served.until(lambda: not served.state()["problems"], "the end of the problem")
    served.completes("after", "true")
    assert served.outcome("after") == "finished"


@pytest.mark.parametrize("how", ["rm -r", "mv"])
def test_running_that_is_taken_away_cancels_what_runs_with_a_record_of_each(live: Served, how: str) -> None:
    """To take `running/` away is to take each of its files away: every run is cancelled, and recorded."""
    for name in ("one", "two"):
        live.begun(name, "sleep 1000", cpus=0)
    take_away(live.root / "running", how)
    for name in ("one", "two"):
        live.wait_done(name)
        assert live.outcome(name) == "cancelled"
    assert sorted(line["job"] for line in live.history()) == ["one", "two"]


@pytest.mark.parametrize("how", ["rm -r", "mv"])
def test_jobs_that_are_taken_away_leave_a_record_of_each_run(live: Served, how: str) -> None:
    """Without `jobs/` a run has no place for its exit code: it is stopped by a cancel as any other, and recorded."""
    live.begun("one", "sleep 1000", requeue=False)
    take_away(live.root / "jobs", how)
    live.until((live.root / "jobs").is_dir, "jobs/ again")
    live.path("running", "one").unlink()
    live.until(lambda: live.history(), "a line of the history")
    assert [line["job"] for line in live.history()] == ["one"]
    assert live.places("one") in ([], ["done"])
