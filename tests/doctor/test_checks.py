"""The table of checks behind `spool doctor`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spool.doctor import OF_THE_SPOOL, Check, Finding, Level, Subject, examine
from spool.store.ownership import Ownership, this_user


def test_a_finding_bears_the_name_of_its_check_or_of_a_part_of_it(spool_root: Path) -> None:
    """So a program finds it under the check; one check may have several parts."""

    def find(subject: Subject) -> Iterator[Finding]:
        yield Finding("", Level.OK, subject.root)
        yield Finding("part", Level.WARN, "something")

    found = examine(str(spool_root), checks=[Check("whole", find)])
    assert [(each.check, each.text) for each in found] == [("whole", str(spool_root)), ("part", "something")]


def test_a_check_of_a_part_of_the_spool_that_cannot_be_made_costs_that_check_alone(spool_root: Path) -> None:
    """The others are made; what belongs to no part of the spool ends the command, as for every other command."""

    def broken(subject: Subject) -> Iterator[Finding]:
        raise PermissionError(13, "Permission denied", "queued")
        yield

    first, second = examine(str(spool_root), checks=[Check("a", broken, ("queued",)), OF_THE_SPOOL[0]])
    assert (first.check, first.level, "queued: " in first.text) == ("a", Level.FAIL, True)
    assert (second.check, second.level) == ("directories", Level.OK)
    with pytest.raises(PermissionError):
        list(examine(str(spool_root), checks=[Check("b", broken)]))


def test_a_check_that_needs_a_directory_is_left_out_without_it(tmp_path: Path) -> None:
    """Of what is no spool only the directories are checked; of the machine, what needs no directory."""
    found = {each.check for each in examine(str(tmp_path / "none"))}
    assert {"directories", "clock", "GPUs"} <= found
    assert found.isdisjoint({"disk type", "room", "notify"})
    names = {each.check for each in examine(str(tmp_path))}
    assert {"directories", "clock"} <= names
    assert names.isdisjoint({"mode", "job files", "runs"})


@pytest.mark.parametrize(("text", "level"), [("comand = 1\n", Level.OK), ('command = "true"\n', Level.WARN)])
def test_an_invalid_file_is_no_active_job(spool_root: Path, text: str, level: Level) -> None:
    """No dispatcher is missed where none would start anything."""
    (spool_root / "queued" / "a.toml").write_text(text)
    (check,) = (check for check in OF_THE_SPOOL if check.name == "dispatcher")
    (found,) = (each for each in examine(str(spool_root), checks=[check]) if each.check == "dispatcher")
    assert found.level == level


def test_a_refused_file_is_told_of_all_whose_files_run(tmp_path: Path) -> None:
    """Those in `accept_from` too."""
    ownership = Ownership(str(tmp_path), lambda: ("ann", "@staff"))
    why = ownership.why_not(os.stat_result((0o600, 1, 0, 1, os.getuid() + 4711, *[0] * 5)), "queued", "a.toml")
    assert f"{this_user()}, ann, @staff only" in why
