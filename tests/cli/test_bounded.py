"""What a job or its file can grow to costs no command more than a limit, and no more than a line of its answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from calling import Command
from spool.core import layout
from spool.store.tolerant import TolerantSpool

HUGE = 5 << 30


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
