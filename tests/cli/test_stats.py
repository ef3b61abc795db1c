"""`spool stats`: what the history adds up to."""

from __future__ import annotations

import gzip
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from calling import Command, asked
from spool.core.model import SECOND_NS as S
from spool.core.model import Grant, Result, State
from spool.formats.run_records import render_history
from spool.store.history import local_day

T0 = 1_700_000_000 * S
DAY = 86_400 * S


def line(job: str, begin: int | None, end: int, outcome: State = State.FINISHED, **more: Any) -> bytes:
    """Return a line of history of a run that waited 60s; instants in seconds after T0."""
    began = None if begin is None else T0 + begin * S
    submitted = T0 + (end if begin is None else begin) * S - 60 * S
    reason = more.pop("reason", "")
    known: dict[str, Any] = {"user": "alice", "grant": Grant(2, gpu_uuids=("GPU-0",)), "cpu_time_ns": 1800 * S} | more
    return render_history(Result(job, 1, 1, outcome, reason, submitted, began, T0 + end * S, **known))


@pytest.fixture
def history(spool_root: Path) -> Path:
    """Write a history of three runs: two of an hour at once, and one that was cancelled before it began."""
    path = spool_root / "history.jsonl"
    path.write_bytes(
        line("a", 0, 3600)
        + line("b", 1800, 5400, State.FAILED, user="bob", project="vision")
        + line("c", None, 6000, State.CANCELLED, user="bob", grant=Grant(), cpu_time_ns=None)
    )
    return path


def test_runs_are_chosen_by_a_tag(spool: Command, spool_root: Path) -> None:
    """Of runs with several tags, too; JSON repeats the question."""
    text = line("a", 0, 3600, tags=("x", "y")) + line("b", 0, 3600, tags=("y",)) + line("c", 0, 3600)
    (spool_root / "history.jsonl").write_bytes(text)
    found = asked(spool, "stats", "--tag", "y")
    assert (found["tag"], found["total"]["runs"]) == ("y", 2)
    assert asked(spool, "stats", "--tag", "x")["total"]["runs"] == 1
    assert asked(spool, "stats", "--tag", "z")["total"]["runs"] == 0


def test_resources_are_told_in_hours(spool: Command, history: Path) -> None:
    """Each named resource has its own line, or column, once a run was given any of it."""
    grant = Grant(1, resources=(("licence", 2), ("tpu", 1)), resource_indices=(("tpu", (3,)),))
    history.write_bytes(history.read_bytes() + line("d", 6000, 9600, grant=grant))
    said = spool("stats").out
    assert re.search(r"^licence hours +2\.00$", said, re.MULTILINE)
    assert asked(spool, "stats")["total"]["resource_hours"] == {"licence": 2, "tpu": 1}
    assert "LICENCE-H" in spool("stats", "--by", "user").out.splitlines()[0]


def test_json_has_units_in_its_names_and_null_for_unknown(spool: Command, history: Path) -> None:
    """The keys are documented; what is unknown is null and never 0."""
    found = asked(spool, "stats")
    assert (found["version"], found["by"], found["groups"], found["since_at"]) == (1, None, [], None)
    whole = found["total"]
    assert (whole["runs"], whole["jobs"], whole["outcomes"]["cancelled"], whole["outcomes"]["lost"]) == (3, 3, 1, 0)
    assert (whole["wait_median_ns"], whole["run_time_sum_ns"]) == (60 * S, 7200 * S)
    assert (whole["cpu_hours"], whole["cpu_used_hours"], whole["gpu_hours"]) == (4, 1, 2)
    assert (whole["peak_cpus"], whole["peak_gpus"], whole["peak_memory_bytes"]) == (4, 1, None)
    assert whole["peak_cpus_at"] == "2023-11-14T22:43:20.000000000Z"


def test_a_table_by_user(spool: Command, history: Path) -> None:
    """A row for each, one for all, and no column that nobody has anything in."""
    header, bob, alice, whole = spool("stats", "--by", "user").out.splitlines()
    assert header.split()[:5] == ["USER", "RUNS", "FINISHED", "FAILED", "CANCEL"]
    assert "LOST" not in header
    assert "MEM" not in header
    assert alice.split()[:3] == ["alice", "1", "1"]
    assert (bob.split()[0], whole.split()[:2]) == ("bob", ["all", "3"])


@pytest.mark.parametrize(
    ("by", "groups"),
    [
        ("user", {"alice": 1, "bob": 2}),
        ("project", {"vision": 1, None: 2}),
        ("state", {"finished": 1, "failed": 1, "cancelled": 1}),
        ("tag", {None: 3}),
    ],
)
def test_grouping(spool: Command, history: Path, by: str, groups: dict[str | None, int]) -> None:
    """By anything that a line of history says; those that do not say are in a group without a name."""
    found = asked(spool, "stats", "--by", by)
    assert found["by"] == by
    assert {each[by]: each["runs"] for each in found["groups"]} == groups


def test_days_are_those_of_the_local_clock(spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run over midnight in Auckland ends on the second day and has used both; in UTC it is on one."""
    (spool_root / "history.jsonl").write_bytes(line("a", -12_800, -6_000))  # 18:40 to 20:33 in UTC
    for zone, days in (("UTC0", 1), ("NZST-12NZDT,M9.5.0,M4.1.0/3", 1), ("EET-2", 1), ("PKT-5", 2)):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert len(asked(spool, "stats", "--by", "day")["groups"]) == days, zone
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    spring = 1_774_700_000 * S  # 28 March 2026; on the 29th the clock goes forward
    name, start, end = local_day(spring + DAY)
    assert (name, end - start) == ("2026-03-29", 23 * 3600 * S)
    monkeypatch.undo()
    time.tzset()


def test_since_and_until(spool: Command, history: Path) -> None:
    """By the end of a run: a date and time, with its offset or local, from then on, and up to but not including."""
    assert asked(spool, "stats", "--since", "2023-11-14T23:43:20Z")["total"]["runs"] == 2
    assert asked(spool, "stats", "--until", "2023-11-14T23:43:20Z")["total"]["runs"] == 1
    assert asked(spool, "stats", "--since", "1000w", "--until", "2023-11-14")["total"]["runs"] == 0
    assert asked(spool, "stats", "--user", "bob", "--project", "vision")["total"]["runs"] == 1
    assert asked(spool, "stats", "--since", "1h")["total"]["runs"] == 0


def test_an_empty_spool_has_no_figures(spool: Command) -> None:
    """It says so, and JSON has the same keys as ever."""
    said = spool("stats")
    assert (said.code, said.out) == (0, "")
    assert spool("stats", "--by", "day").code == 0
    assert asked(spool, "stats")["total"]["success_rate"] is None


def test_what_cannot_be_read_is_passed_over_and_told(spool: Command, history: Path) -> None:
    """Torn lines, another language's, unknown words; not unknown keys, and not a last line that is being written."""
    good = history.read_bytes()
    odd = json.loads(line("d", 0, 10)) | {"planet": "earth", "granted_cpus": 1, "user": None}
    whole = b'{"job":"x","run":1,"outcome":"finished"'
    bad = [b'{"job":"x","run":1', b"[]", b"\xff\xfe", b'{"job":"x","run":1,"outcome":"vanished"}', b"[" * 100_000]
    bad += [whole + b',"granted_cpus":-1}', whole + b',"tags":"x"}']
    history.write_bytes(b"\n".join(bad) + b"\n\0\0\0\n\n" + good + json.dumps(odd).encode() + b"\n" + good[:40])
    found = asked(spool, "stats")
    assert (found["total"]["runs"], found["unreadable_lines"]) == (4, len(bad))
    assert f"{len(bad)} lines" in spool("stats").err


def test_odd_lines_are_told_apart_from_bad_ones(spool: Command, history: Path) -> None:
    """A line that stands twice counts once, one of the far future has no time, one that ends early is not timed.

    Nor is one that lasts for centuries, and what it waited counts no more.
    """
    far = line("far", 0, 10).replace(b"2023-", b"9999-")
    long = re.sub(rb'("(?:submitted|started)_at":")2023', rb"\g<1>1700", line("long", 0, 10)).replace(b"2023", b"2240")
    history.write_bytes(history.read_bytes() * 2 + line("back", 100, 50) + far + long)
    for by in ((), ("--by", "day"), ("--by", "user")):
        found = asked(spool, "stats", *by)
        assert (found["total"]["runs"], found["duplicate_runs"], found["clock_set_runs"]) == (6, 3, 2)


def test_rotated_files_are_read_in_their_order(spool: Command, spool_root: Path, history: Path) -> None:
    """As logrotate leaves them, gzipped or not, whatever they are called; a retry is known across them."""
    first = line("old", -9000, -8000, State.FAILED, again="retry")
    middle = line("mid", -7000, -6000)
    history.with_name("history.jsonl.2.gz").write_bytes(gzip.compress(first))
    history.with_name("history.jsonl-20231114").write_bytes(middle)
    later = Result(
        "old", 2, 2, State.FINISHED, "", T0 - 9060 * S, T0 + 6000 * S, T0 + 6100 * S, user="alice", grant=Grant(1)
    )
    history.write_bytes(history.read_bytes() + render_history(later))
    (spool_root / "history.jsonl.d").mkdir()
    os.mkfifo(spool_root / "history.jsonl.fifo")
    history.with_name("history.jsonl.9.gz").write_bytes(gzip.compress(first)[:30])
    found = asked(spool, "stats")
    assert (found["total"]["runs"], found["total"]["retries"], found["total"]["jobs"]) == (6, 1, 5)
    assert found["total"]["wait_mean_ns"] == (4 * 60 + 14_000) * S // 5
    assert len(found["problems"]) == 1
    assert "history.jsonl.9.gz" in found["problems"][0]
    assert asked(spool, "stats", "--since", "2023-11-14T22:13:20Z")["total"]["runs"] == 4


def test_a_period_is_found_without_reading_all(spool: Command, spool_root: Path) -> None:
    """What lies before the period by more than an hour is not even looked at: lines that are bad there are not told."""
    bad = b'{"bad"\n' * 10
    old = b"".join(line(f"o{at}", -900_000 + at, -899_000 + at, reason="x" * 900) for at in range(3000))
    new = b"".join(line(f"n{at}", at, at + 1) for at in range(10))
    (spool_root / "history.jsonl").write_bytes(bad + old + new)
    found = asked(spool, "stats", "--since", "2023-11-14T22:13:20Z")
    assert (found["total"]["runs"], found["unreadable_lines"]) == (10, 0)
    assert asked(spool, "stats")["unreadable_lines"] == 10


def test_gpus_of_slurm_count_as_many_as_were_asked_for(spool: Command, spool_root: Path) -> None:
    """Slurm alone knows which they were: in the sums and the peak, each counts as another one."""
    there = {"grant": Grant(2, gpus_elsewhere=2), "executor": "slurm", "cpu_time_ns": None}
    text = line("far", 0, 3600, **there) + line("farther", 1800, 5400, **there) + line("near", 0, 3600)
    (spool_root / "history.jsonl").write_bytes(text)
    found = asked(spool, "stats", "--by", "executor")
    assert {group["executor"]: group["gpu_hours"] for group in found["groups"]} == {"slurm": 4.0, None: 1.0}
    assert (found["total"]["gpu_hours"], found["total"]["peak_gpus"]) == (5.0, 5)
    assert found["total"]["gpu_used_hours"] is None
