"""However long a job makes a file, no more of it is read than it can mean; and nothing it puts there blocks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from calling import Command
from spool.client.output import progress_of
from spool.core import layout
from spool.formats.toml import MAX_BYTES
from spool.formats.wire import MOST_BYTES, MOST_READ
from spool.store.reading import read_bytes, read_record
from spool.store.spool import Spool
from spool.store.tolerant import TolerantSpool

HUGE = 5 << 30
LINES = (
    *(layout.JID, layout.RC, layout.STOP, layout.STATUS, layout.ENGINE, layout.SUSPENDED, layout.FAILURE),
    *(layout.REFUSED, layout.KEPT, layout.SIGNAL, layout.PROGRESS, layout.ENDED),
)
TABLES = (layout.GRANT, layout.RESULT, layout.ARRAY, layout.GPUS, layout.DEFAULTS, layout.SPEC_COPY)


@pytest.fixture
def metadir(spool_root: Path) -> Path:
    """Make the metadir of a run in an empty spool."""
    made = spool_root / "jobs" / "big" / "1"
    made.mkdir(parents=True)
    return made


def sparse(path: Path, beginning: bytes = b"") -> None:
    """Make a file of 5 GB that takes no room."""
    path.write_bytes(beginning)
    os.truncate(path, HUGE)


def test_a_record_of_one_line_is_read_no_further_than_a_line(metadir: Path, taken: list[int]) -> None:
    """Of a record of one line that has grown to 5 GB, 4 KiB are read."""
    for record in LINES:
        sparse(metadir / record, b"cancel me ")
        taken.clear()
        Spool(str(metadir.parents[2])).record("big", 1, record)
        assert sum(taken) == MOST_READ, record


@pytest.mark.parametrize("record", TABLES)
def test_a_record_in_toml_is_read_no_further_than_its_limit(metadir: Path, taken: list[int], record: str) -> None:
    """Of a record in TOML that has grown to 5 GB, no more is read than shows that it is too long."""
    sparse(metadir / record, b'job = "big"\nrun = 1\n')
    spool = Spool(str(metadir.parents[2]))
    reads = (spool.grant, spool.result, spool.array, spool.gpu_watch)
    assert [read("big", 1) for read in reads] == [None] * 4
    assert spool.spec("big", 1) is None
    assert sum(taken) <= 2 * (MAX_BYTES + 1)  # the defaults and the copy are read for one question


@pytest.mark.parametrize("limit", [1, 65535, 65536, 65537, (1 << 20) + 1])
@pytest.mark.parametrize("size", [0, 1, 65536, HUGE])
def test_a_read_ends_exactly_at_its_limit(tmp_path: Path, taken: list[int], limit: int, size: int) -> None:
    """A small file is read whole, a long one to its limit, and not one byte further."""
    file = tmp_path / "file"
    file.touch()
    os.truncate(file, size)
    for read in (read_record, read_bytes):
        taken.clear()
        assert len(read(str(file), limit) or b"") == min(size, limit)
        assert sum(taken) == min(size, limit)


def test_a_file_that_grows_while_read_is_read_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is faster than the reader does not keep the reader."""
    file = tmp_path / "file"
    file.write_bytes(b"x" * (1 << 16))
    really = os.read

    def slow(fd: int, size: int) -> bytes:
        with file.open("ab") as writer:
            writer.write(b"x" * (1 << 20))
        return really(fd, size)

    monkeypatch.setattr(os, "read", slow)
    assert len(read_record(str(file), 200_000) or b"") == 200_000


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "device"])
def test_what_is_no_file_says_nothing_and_blocks_nobody(metadir: Path, taken: list[int], kind: str) -> None:
    """A FIFO, a directory and a link to an endless device in the place of a record are read as nothing, at once."""
    spool = Spool(str(metadir.parents[2]))
    for record in (*LINES, *TABLES, layout.ENGINE_LOG):
        path = metadir / record
        match kind:
            case "fifo":
                os.mkfifo(path)
            case "directory":
                path.mkdir()
            case "link":
                path.symlink_to("/dev/zero")
            case "device":
                path.symlink_to("/dev/tty")
        assert not spool.record("big", 1, record)
        assert spool.record_end("big", 1, record) == b""
    assert spool.failure("big", 1) is None
    assert spool.cancel_denial("big", 1) == ""
    assert progress_of(spool, "big", 1).text == ""
    assert sum(taken) == 0


@pytest.mark.parametrize("look", ["failure", "refusal", "cancel_denial"])
def test_what_a_run_says_is_one_short_line(metadir: Path, look: str) -> None:
    """The reasons that a run leaves are one printable line of at most 1 KiB each."""
    record = {"failure": layout.FAILURE, "refusal": layout.REFUSED, "cancel_denial": layout.KEPT}[look]
    (metadir / record).write_bytes(b"\x1b]0;x\x07" * 100_000 + b"\nsecond")
    said = getattr(Spool(str(metadir.parents[2])), look)("big", 1)
    assert said.isprintable()
    assert 0 < len(said.encode()) <= MOST_BYTES


def test_the_end_of_an_engines_log_is_found_however_long_it_is(metadir: Path, taken: list[int]) -> None:
    """What Slurm says last is read, whatever a job has written before it, and no more than a block."""
    sparse(metadir / layout.ENGINE_LOG)
    with (metadir / layout.ENGINE_LOG).open("ab") as log:
        log.write(b"slurmstepd: error: *** JOB 7 CANCELLED AT x DUE TO TIME LIMIT ***\n")
    end = Spool(str(metadir.parents[2])).record_end("big", 1, layout.ENGINE_LOG)
    assert end.endswith(b"DUE TO TIME LIMIT ***\n")
    assert sum(taken) <= 1 << 16


@pytest.mark.parametrize("place", ["queued", "held", "done"])
def test_a_job_file_of_5_gigabytes_costs_show_no_more_than_ls(
    spool_root: Path, taken: list[int], spool: Command, place: str
) -> None:
    """`show`, `why` and `edit` read as little of a job file that is too long as `ls` does, and print none of it."""
    file = spool_root / place / "big.toml"
    file.touch()
    os.truncate(file, HUGE)
    assert spool("ls", "--all").out.count("big") >= 1
    assert sum(taken) < 3 << 20
    for words in (("show", "big"), ("show", "big", "--json"), ("why", "big"), ("edit", "big", "--priority", "3")):
        taken.clear()
        ended = spool(*words)
        assert len(ended.out) + len(ended.err) < 4000
        assert sum(taken) < 8 << 20, words
    assert file.stat().st_size == HUGE


def test_a_damaged_job_is_told_in_one_line(spool_root: Path) -> None:
    """However many files of a job cannot be read, what a list says of it on stderr is one line."""
    look = TolerantSpool(str(spool_root))
    for name in ("one", "two"):
        for record in (layout.JID, layout.RESULT, layout.STOP, layout.RC):
            look.note(OSError(5, "Input/output error", f"{spool_root}/jobs/{name}/1/{record}"), name)
        look.note(OSError(5, "Input/output error", f"{spool_root}/running/{name}.toml"), name)
        look.note(OSError(5, "Input/output error", f"{spool_root}/queued/{name}.toml.error"), name)
        look.note(OSError(5, "Input/output error"), name)
    look.note(OSError(5, "Input/output error", f"{spool_root}/history.jsonl"), "history")
    told = [line.split(": ")[0] for line in look.told()]
    firsts = [f"jobs/{name}/1/jid" for name in ("one", "two")]
    assert told == [f"cannot read {spool_root}/{first}" for first in (*firsts, "history.jsonl")]


def test_a_list_says_of_many_damaged_jobs_how_many_files_there_are(spool_root: Path) -> None:
    """Beyond five damaged jobs, the rest is one number: that of their files."""
    look = TolerantSpool(str(spool_root))
    for name in "abcdefgh":
        for record in (layout.JID, layout.RC):
            look.note(OSError(5, "Input/output error", f"{spool_root}/jobs/{name}/1/{record}"), name)
    assert [told.split()[0] for told in look.told()[5:]] == ["6"]
