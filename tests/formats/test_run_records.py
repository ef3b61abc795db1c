"""The records of a run: what is written reads back, what is torn is not there yet, what is senseless is told."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from filled import filled
from formats.some_records import grants, results, watches, word
from spool.core.errors import InvalidRecord
from spool.core.gpuuse import GpuWatch
from spool.core.lifecycle import EngineWord
from spool.core.model import SECOND_NS, GpuUse, Grant, Jid, Request, Result, State, Stop, StopKind, Suspension
from spool.formats import run_records
from spool.formats.run_records import (
    parse_history_line,
    parse_result,
    read_ended_runs,
    read_told,
    render_history,
    render_result,
)
from spool.formats.wire import MOST_READ, parse_instant, render_instant
from spool.store.spool import Spool

GOLDEN = Path(__file__).parent / "golden" / "records"

BOOT = "6a0c1d9e-7c1e-4c55-9d5c-0a4b6f0d3a11"
GRANT = Grant(2, 1 << 34, ("GPU-8f1c0b1e-0000-0000-0000-000000000001",), (0,), None)
RESULT = Result(
    "train",
    3,
    2,
    State.FAILED,
    'exit code 3: "no such file"',
    submitted_at_ns=1795232626504843735,
    started_at_ns=1795232627000000001,
    ended_at_ns=1795232687999999999,
    exit_code=3,
    peak_memory_bytes=123456789,
    cpu_time_ns=55_123_000_000,
    requeues=1,
    again="retry",
    again_at_ns=1795232697999999999,
    user="alice",
    project="llm",
    group="night",
    tags=("paper",),
    request=Request(2, 1 << 34, 1, None, ("A100",)),
    grant=GRANT,
    executor="process",
    host="box",
)
NEVER = Result(
    "never",
    1,
    1,
    State.UNSCHEDULABLE,
    "waited 1 h 00 m",
    submitted_at_ns=1795232626504843735,
    ended_at_ns=1795236226504843735,
)


USE = (GpuUse(55_000_000_000, 43.25, 100, 60_000_000_000, 1 << 33, 1 << 34), GpuUse(memory_watched_ns=1_000_000))
WATCH = GpuWatch(1795232687999999999, USE, idle_ns=12_345_000_000, told=2, is_told=True)


def test_golden_records_load_for_ever() -> None:
    """What an older version wrote in a metadir is understood by every later one."""
    assert run_records.parse_jid((GOLDEN / "jid").read_bytes()) == Jid(4711, 1234567, BOOT, "pid:[4026531836]", "box")
    assert run_records.parse_rc((GOLDEN / "rc").read_bytes()) == 143
    assert run_records.render_status(State.RUNNING) == (GOLDEN / "status").read_bytes()
    stop = Stop(StopKind.CANCEL, "alice", 1795232626504843735, "no longer needed")
    assert run_records.parse_stop((GOLDEN / "stop").read_bytes()) == stop
    suspended = Suspension(61_000_000_000, 1795232627000000001, 4711_000_000_000)
    assert run_records.parse_suspended((GOLDEN / "suspended").read_bytes()) == suspended
    assert run_records.parse_grant((GOLDEN / "grant.toml").read_bytes()) == run_records.GrantRecord(
        "train", 3, 2, 1, "process", GRANT, "alice", 1795232626504843735, 1795232627000000001, "box", BOOT, 12345678
    )
    assert parse_result((GOLDEN / "result.toml").read_bytes()) == RESULT
    lines = (GOLDEN / "history.jsonl").read_bytes().splitlines()
    assert list(map(parse_history_line, lines)) == [RESULT, NEVER]
    assert run_records.parse_gpus((GOLDEN / "gpus.toml").read_bytes()) == WATCH
    usage = run_records.Usage(12_345_678_900, 1 << 30)
    assert run_records.parse_usage((GOLDEN / "usage").read_bytes()) == usage


@pytest.mark.parametrize(
    ("kind", "render", "parse"),
    [
        ("history", render_history, parse_history_line),
        ("result", render_result, parse_result),
        ("grant", run_records.render_grant, run_records.parse_grant),
        ("array", run_records.render_array, run_records.parse_array),
        ("gpus", run_records.render_gpus, run_records.parse_gpus),
    ],
)
def test_a_record_is_written_as_ever(kind: str, render: Callable[[Any], bytes], parse: Callable[[bytes], Any]) -> None:
    """What an older version wrote of any values is the same, byte for byte, once it is read and written again."""
    for line in (GOLDEN / "recorded.jsonl").read_text(encoding="utf-8").splitlines():
        text = json.loads(line)[kind].encode()
        assert render(parse(text)) == text


def test_a_result_keeps_parameters_and_metrics_whatever_they_are() -> None:
    """Keys and values of any kind come back as one line each; what is too much is left out, and nothing else is."""
    odd = (("lr", "0.1"), ('a "b".c', "x = 1"), ("é", "ü"))
    twice = (("loss", "1"), ("loss\n", "2"))  # equal as one line
    assert parse_result(render_result(replace(RESULT, metrics=twice))).metrics == (("loss", "2"),)
    result = replace(RESULT, parameters=odd, metrics=(("loss/eval", "0.5"),))
    assert parse_result(render_result(result)) == result
    many = tuple((f"k{at}", "v" * 1000) for at in range(1000))
    found = parse_result(render_result(replace(RESULT, parameters=many, metrics=(("loss", "1"),))))
    assert 0 < len(found.parameters) < 100
    assert found.metrics == (("loss", "1"),)
    assert parse_result(b'parameters = 1\nmetrics = { a = 2, b = "x" }\n' + render_result(NEVER)).metrics == (
        ("b", "x"),
    )


@pytest.mark.parametrize(
    ("parse", "whole"),
    [
        (run_records.parse_jid, f"1 2 {BOOT} pid:[1] box\n".encode()),
        (run_records.parse_rc, b"137\n"),
        (run_records.parse_stop, b"cancel alice 5 why\n"),
        (run_records.parse_suspended, b"5 6 7\n"),
    ],
)
def test_a_record_without_its_newline_is_not_there_yet(parse: Callable[[bytes], object], whole: bytes) -> None:
    """However much of a line was written, until the newline it says nothing, and never something else."""
    for end in range(len(whole)):
        assert parse(whole[:end]) is None
    assert parse(whole) is not None


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (run_records.parse_jid, b"abc\n"),
        *((run_records.parse_jid, b"%d 1 b n h\n" % pid) for pid in (0, 1 << 31, 10**18)),
        (run_records.parse_jid, b"1 2 b\n"),
        (run_records.parse_jid, b"\xff\n"),
        (run_records.parse_jid, b"\n"),
        (run_records.parse_jid, run_records.VOID_JID),
        (run_records.parse_rc, b"256\n"),
        (run_records.parse_rc, b"0" * MOST_READ),
        (run_records.parse_rc, b"-1\n"),
        (run_records.parse_rc, b"\n"),
        (run_records.parse_rc, "\u0661\n".encode()),
        (run_records.parse_stop, b"explode alice 5\n"),
        (run_records.parse_suspended, b"5 6\n"),
        (run_records.parse_suspended, b"-5\n"),
        (run_records.parse_grant, b"job = 1"),
        (run_records.parse_gpus, b"idle_ms = 5\n"),
        (run_records.parse_grant, b"\xff"),
        (parse_result, b""),
        (parse_result, b'job = "a"\nrun = 1\noutcome = "exploded"'),
        (parse_result, b'job = "a"\nrun = 1\noutcome = "running"'),
        (parse_history_line, b'{"job":"a","run":1,"outcome":"exploded"}'),
        (parse_history_line, b'{"job":"a","run":1,"outc'),
        (parse_history_line, b"[" * 10_000),
    ],
)
def test_a_whole_record_that_says_nothing_is_told(parse: Callable[[bytes], object], text: bytes) -> None:
    """Evidence that cannot be understood is never taken for no evidence."""
    with pytest.raises(InvalidRecord):
        parse(text)


def test_what_is_no_count_of_a_resource_is_passed_over() -> None:
    """Whoever edits the table by hand loses no other resource by it; a negative number neither frees nor takes room."""
    odd = b'job = "a"\nrun = 1\nresources = { a = 1, b = "x", c = true, d = -1 }\nresource_indices = 3\n'
    assert run_records.parse_grant(odd).grant == Grant(resources=(("a", 1),))
    for number in (-1, -(1 << 63)):
        text = f'job = "a"\nrun = 1\ncpus = {number}\ngranted_at_ns = {number}\ngpu_indices = [{number}, 2]\n'
        record = run_records.parse_grant(text.encode())
        assert (record.grant.cpus, record.granted_at_ns, record.grant.gpu_indices) == (0, None, (2,))


def test_people_may_write_a_stop_by_hand() -> None:
    """`echo cancel > stop` is enough: then the file's time is when."""
    assert run_records.parse_stop(b"cancel\n", at_ns=7) == Stop(StopKind.CANCEL, "-", 7)
    assert run_records.parse_stop(b"requeue bob\n", at_ns=7) == Stop(StopKind.REQUEUE, "bob", 7)
    assert run_records.parse_stop(b"hold bob tired of it\n", at_ns=7) == Stop(StopKind.HOLD, "bob", 7, "tired of it")


def test_readers_know_older_and_later_versions_and_other_tools() -> None:
    """Only job, run and outcome are required; unknown keys and words are passed over; a date and time is enough."""
    assert parse_result(render_result(RESULT) + b"mood = 'good'\n[weather]\nrain = true\n") == RESULT
    line = json.loads(render_history(RESULT)) | {"mood": "good"}
    assert parse_history_line(json.dumps(line).encode()) == RESULT
    assert run_records.parse_jid(f"1 2 {BOOT} pid:[1] box more words\n".encode()) == Jid(1, 2, BOOT, "pid:[1]", "box")
    assert run_records.parse_suspended(b"5 6 7 more\n") == Suspension(5, 6, 7)
    text, expected = b'job = "a"\nrun = 1\noutcome = "lost"', Result("a", 1, 1, State.LOST, "")
    assert parse_result(text) == parse_history_line(b'{"job":"a","run":1,"outcome":"lost"}') == expected
    assert run_records.parse_grant(b'job = "a"\nrun = 1') == run_records.GrantRecord("a", 1)
    timed = parse_result(text + b"\nended_at = 2026-11-21T03:43:46.5+00:00\ncpu_time_ms = 5")
    assert (timed.ended_at_ns, timed.cpu_time_ns) == (1795232626500000000, 5_000_000)


def test_a_torn_history_loses_only_its_torn_lines(tmp_path: Path) -> None:
    """A line that a crash cut short, or that a later version wrote, hides no other."""
    line = render_history(RESULT)
    data = line + line[:40] + b"\n\xff\n\n" + b'{"job":"b","run":1,"outcome":"evaporated"}\n' + line + line[:100]
    (tmp_path / "history.jsonl").write_bytes(data)
    assert list(Spool(str(tmp_path)).accounts_since(None)) == [RESULT, RESULT]


def test_a_history_line_is_flat_json_that_says_the_signal() -> None:
    """Accounting tools need no library: times are RFC 3339, sizes whole numbers, absent is unknown."""
    result = Result("a", 1, 1, State.CANCELLED, "cancelled by bob", exit_code=143, started_at_ns=0)
    assert json.loads(render_history(result)) == {
        "job": "a",
        "run": 1,
        "outcome": "cancelled",
        "reason": "cancelled by bob",
        "started_at": "1970-01-01T00:00:00.000000000Z",
        "exit_code": 143,
        "signal": 15,
    }


def test_a_result_is_toml_that_people_read() -> None:
    """Dates as dates beside the exact instants; nothing unknown is written."""
    document = tomllib.loads(render_result(NEVER).decode())
    assert document["submitted_at"].isoformat() == "2026-11-21T03:43:46.504843+00:00"
    assert document["submitted_at_ns"] == NEVER.submitted_at_ns
    times = {"submitted_at", "submitted_at_ns", "ended_at", "ended_at_ns"}
    assert set(document) == {"job", "run", "attempt", "outcome", "reason", "request"} | times


def test_no_field_of_a_result_is_left_out_of_its_forms() -> None:
    """Each field reads back from `result.toml` and from the line of history.

    When it was recorded is of the line alone; parameters and metrics are of `result.toml` alone.
    """
    result = filled(Result, outcome=State.FAILED)
    assert parse_history_line(render_history(result)) == replace(result, parameters=(), metrics=())
    assert parse_result(render_result(result)) == replace(result, recorded_at_ns=None)


NS = st.integers(0, 1 << 62)
SUSPENSIONS = st.builds(Suspension, NS) | st.builds(Suspension, NS, NS, NS)


@pytest.mark.parametrize(
    ("render", "parse", "values"),
    [
        (render_result, parse_result, results),
        (render_history, parse_history_line, results),
        (run_records.render_grant, run_records.parse_grant, grants),
        (run_records.render_gpus, run_records.parse_gpus, watches),
        (run_records.render_jid, run_records.parse_jid, st.builds(Jid, st.integers(1, 1 << 22), NS, word, word, word)),
        (lambda code: b"%d\n" % code, run_records.parse_rc, st.integers(0, 255)),
        (run_records.render_suspended, run_records.parse_suspended, SUSPENSIONS),
    ],
)
@given(data=st.data())
def test_a_record_reads_back(
    render: Callable[[Any], bytes], parse: Callable[[bytes], Any], values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    """Nothing is lost, also numbers that need all of 64 bits, and what is unknown; each line of history is one line."""
    value = data.draw(values)
    text = render(value)
    assert parse(text) == value
    assert text.endswith(b"\n")
    assert render is not render_history or text.count(b"\n") == 1


@given(st.sampled_from(StopKind), st.text(max_size=10), st.integers(0, 1 << 62), st.text(max_size=30))
def test_a_stop_is_one_line_whatever_people_say(kind: StopKind, by: str, at_ns: int, reason: str) -> None:
    """Names and reasons are put on one line that can be shown; kind and moment are always exact."""
    line = run_records.render_stop(Stop(kind, by, at_ns, reason))
    stop = run_records.parse_stop(line)
    assert stop is not None
    assert (stop.kind, stop.at_ns) == (kind, at_ns)
    assert run_records.parse_stop(run_records.render_stop(stop)) == stop


LINES = run_records.parse_jid, run_records.parse_rc, run_records.parse_stop, run_records.parse_suspended


@given(st.binary(max_size=60))
def test_readers_of_records_are_total(data: bytes) -> None:
    """Any bytes give a value, "not there yet", or InvalidRecord."""
    for parse in (*LINES, run_records.parse_grant, parse_result, parse_history_line):
        with suppress(InvalidRecord):
            parse(data)
    assert read_run(data) is read_told(data) is None


def test_what_utf_8_cannot_hold_is_written_all_the_same() -> None:
    """A record must always be written: a lone surrogate is replaced in TOML, and escaped in JSON."""
    result = Result("a", 1, 1, State.LOST, "x\udcff", user="\udcff", tags=("\udcff",))
    assert "\udcff" not in parse_result(render_result(result)).reason
    assert parse_history_line(render_history(result)).reason == r"x\udcff"
    jid = run_records.parse_jid(run_records.render_jid(Jid(1, 2, "b", "n", "h\udcff")))
    assert jid is not None
    assert jid.host == "h?"


@given(st.integers(0, (1 << 63) - 1))
def test_an_instant_as_text_is_exact(at_ns: int) -> None:
    """Nine digits lose nothing; fewer are rounded down."""
    assert parse_instant(render_instant(at_ns)) == at_ns
    assert parse_instant(render_instant(at_ns, digits=0)) == at_ns // 10**9 * 10**9
    assert parse_instant(render_instant(at_ns, digits=6)) == at_ns // 1000 * 1000


def test_what_is_no_instant_is_none() -> None:
    """Dates alone, days that do not exist and times without an offset are none; any offset will do."""
    for text in ("", "now", "2026-01-31", "2026-02-30T00:00:00Z", "2026-01-31T00:00:00"):
        assert parse_instant(text) is None
    assert parse_instant("2026-11-21 05:43:46.5+02:00") == 1795232626500000000


@pytest.mark.parametrize("number", ["-1", "nan", "inf", "1e300", '"many"', "true", "[1]"])
def test_numbers_that_no_gpu_has_are_unknown(number: str) -> None:
    """Whoever edits a record by hand breaks no sum by it."""
    lines = "at_ns = 5", "idle_ms = X", "told = X", "[[gpu_use]]", "watched_ms = X", "mean_percent = X"
    with suppress(InvalidRecord):
        assert run_records.parse_gpus("\n".join(lines).replace("X", number).encode()) == GpuWatch(5, (GpuUse(),))
    line = '{"job":"a","run":1,"outcome":"failed","gpu_use":[{"mean_percent":X}]}'
    with suppress(InvalidRecord):
        assert parse_history_line(line.replace("X", number).encode()).gpu_use == (GpuUse(),)


def test_the_record_of_an_engine_says_how_it_ended_a_run_that_had_not_begun() -> None:
    """Readers of the id alone read it as before; a word of a later version says nothing of an end."""
    end = EngineWord.CANCELLED, "Slurm says CANCELLED"
    data = run_records.render_engine("slurm", "lab", "4711", end)
    assert data == (GOLDEN / "engine").read_bytes()
    assert (run_records.parse_engine(data), run_records.parse_engine_end(data)) == (("slurm", "lab", "4711"), end)
    assert run_records.parse_engine_end(run_records.render_engine("slurm", "lab", "4711")) is None
    assert run_records.parse_engine_end(b"slurm lab 4711 evaporated\n") is None
    assert run_records.parse_engine_end(data[:-1]) is None
    two_lines = run_records.render_engine("slurm", "lab", "4711", (EngineWord.TIMEOUT, "one\ntwo"))
    assert run_records.parse_engine_end(two_lines) == (EngineWord.TIMEOUT, "one two")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"cpu_time_ns = -1\n",
        b"cpu_time_ns = 1e9\n",
        b"cpu_time_ns = " + b"9" * 5000,
        b"peak_memory_bytes = \xb2\n",
        b"\0" * 9000,
        b"[[" * 500_000,
        b"0m0.01s 0m0.00s\n",
        b"x" * 2000 + b"\ncpu_time_ns = 5\n",
    ],
)
def test_a_damaged_usage_says_nothing(data: bytes) -> None:
    """A record of usage that was damaged or forged is no error: what it does not say in due form is unknown."""
    assert run_records.parse_usage(data) == run_records.Usage()


def test_a_bound_of_another_kind_is_told() -> None:
    """`ended_at_is` says that a run ended then or later; no other word is taken for that."""
    text = render_result(replace(RESULT, end_is_bound=True))
    with pytest.raises(InvalidRecord, match="says nothing of an end"):
        parse_result(text.replace(b"earliest", b"roughly"))


def test_a_late_line_says_when_it_was_written() -> None:
    """A line that is written more than a minute after the end of its run has `recorded_at`; others do without."""
    assert RESULT.ended_at_ns is not None
    late_ns = RESULT.ended_at_ns + 61 * SECOND_NS
    assert parse_history_line(render_history(RESULT, late_ns)).told_at_ns == late_ns
    assert b"recorded_at" not in render_history(RESULT, late_ns - 2 * SECOND_NS)
    assert parse_history_line(render_history(RESULT)).told_at_ns == RESULT.ended_at_ns


def read_run(line: bytes) -> Result | None:
    """Return the run in one line of history; None for one that cannot be understood."""
    return next(iter(read_ended_runs(line)[0]), None)


def test_only_the_engine_knows_the_gpus_of_a_run_elsewhere() -> None:
    """Each counts as one that no other run had; an edited line may claim any number."""
    run = Result("a", 2, 1, State.FINISHED, "", grant=Grant(gpus_elsewhere=2))
    assert run.gpus == ("a:2:0", "a:2:1")
    assert len(replace(run, grant=Grant(gpus_elsewhere=10**9)).gpus) == 1024


def test_a_peak_of_nothing_is_an_unknown_one() -> None:
    """Versions that wrote 0 for runs that nobody had looked at are understood, in every reader."""
    line = b'{"job":"a","run":1,"outcome":"finished","peak_memory_bytes":0}'
    run = read_run(line)
    assert run is not None
    assert run.peak_memory_bytes is None
    assert parse_history_line(line).peak_memory_bytes is None
    record = b'job = "a"\nrun = 1\nattempt = 1\noutcome = "finished"\nreason = ""\npeak_memory_bytes = 0\n'
    assert parse_result(record).peak_memory_bytes is None
