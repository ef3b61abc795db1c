"""The file for node_exporter, and its sums over events."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from served import HOUR_NS, LOOKS, Served
from spool.core.errors import InvalidConfig
from spool.core.model import SECOND_NS, Event, EventName, ForeignProcess, Grant, Result, State
from spool.extras.metrics import listener as writing
from spool.extras.metrics.listener import BOUNDS_NS, Histogram, Metrics, Sums
from spool.formats import config
from spool.formats.config import Config
from spool.formats.state import GpuView, JobView, MachineView, PoolView, SharedView, StateView, render_state
from support import ROOT, wait_for

G = 1 << 30
VIEW = StateView(
    version=1,
    at_ns=0,
    pid=os.getpid(),
    started_at_ns=1_700_000_000 * SECOND_NS,
    paused=True,
    problems=("no file events",),
    machine=MachineView(
        cpus=16,
        cpus_free=4,
        memory_bytes=64 * G,
        memory_free_bytes=16 * G,
        gpus=(
            GpuView(
                uuid="GPU-a",
                index=0,
                name='A "big" \\one\n',
                memory_total_bytes=80 * G,
                memory_free_bytes=20 * G,
                jobs=("x", "y"),
                foreign_processes=(ForeignProcess(4711, "python", G),),
                utilisation_percent=87,
            ),
            GpuView(uuid="GPU-b", index=1, problem="fell off the bus"),
        ),
        resources={"licence": PoolView(total=3, granted=2)},
        shared=SharedView(directory="/run/spool"),
    ),
    errors=5,
    jobs={
        "x": JobView(state="running", submitted_at_ns=1),
        "y": JobView(state="running", submitted_at_ns=2, beside="held"),
        "z": JobView(state="queued", submitted_at_ns=5 * SECOND_NS),
        "far": JobView(state="submitted", submitted_at_ns=1),
        "sweep": JobView(state="running", array=True),
        "odd": JobView(state="unreachable"),
    },
)
S = SECOND_NS
RESULT = Result("w", 1, 1, State.FAILED, "", 0, 2 * S, 62 * S, 3, None, 7 * S, grant=Grant(1, None, ("G",)))
ENDED = Event(
    id="e", name=EventName.FAILED, at_ns=0, host="box", version="1", spool_dir="/s", job="w", run=1, result=RESULT
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(path: Path) -> Samples:
    """Return every number of the file, by name and labels but the one that all have."""
    found: Samples = {}
    for family in text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("spool")
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def value(found: Samples, name: str, /, **labels: str) -> float:
    """Return one number."""
    return found[name, frozenset(labels.items())]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Name the file."""
    (tmp_path / "collector").mkdir()
    return tmp_path / "collector" / "spool.prom"


@pytest.fixture
def listener(spool_root: Path, out: Path) -> Metrics:
    """Return a listener of a spool with a state."""
    (spool_root / "state.json").write_bytes(render_state(VIEW))
    return Metrics(str(spool_root), lambda: Config(parts=(("metrics", str(out)),)))


def test_the_file_says_what_there_is(listener: Metrics, out: Path) -> None:
    """Jobs by state, grants, GPUs, troubles, and what the events add up to; arrays do not count as jobs."""
    done: list[str] = []
    listener.hear(ENDED, lambda: done.append("e"))
    listener.hear(ENDED, lambda: done.append("e"))
    listener.tick()
    found = samples(out)
    assert done == ["e", "e"]
    assert value(found, "spool_jobs", state="running") == 2
    assert value(found, "spool_jobs", state="submitted") == 1
    assert value(found, "spool_jobs", state="held") == 1
    assert value(found, "spool_jobs", state="unreachable") == 1
    assert value(found, "spool_oldest_queued_timestamp_seconds") == 5
    assert value(found, "spool_cpus_granted") == 12
    assert value(found, "spool_memory_granted_bytes") == 48 * G
    assert value(found, "spool_gpu_memory_used_bytes", uuid="GPU-a") == 60 * G
    assert value(found, "spool_resources", resource="licence") == 3
    assert value(found, "spool_resources_granted", resource="licence") == 2
    assert value(found, "spool_gpu_jobs", uuid="GPU-a") == 2
    assert value(found, "spool_gpu_foreign_processes", uuid="GPU-a") == 1
    assert value(found, "spool_gpu_utilisation_ratio", uuid="GPU-a") == 0.87
    assert ("spool_gpu_utilisation_ratio", frozenset({("uuid", "GPU-b")})) not in found
    assert value(found, "spool_gpu_usable", uuid="GPU-b") == 0
    assert ("spool_gpu_memory_bytes", frozenset({("uuid", "GPU-b")})) not in found
    assert value(found, "spool_gpu_info", uuid="GPU-a", index="0", name='A "big" \\one\n') == 1
    assert value(found, "spool_errors_total") == 5
    assert value(found, "spool_paused") == 1
    assert value(found, "spool_dispatcher_up") == 1
    assert value(found, "spool_job_outcomes_total", outcome="failed") == 1
    assert value(found, "spool_run_duration_seconds_sum", outcome="failed") == 60
    assert value(found, "spool_run_duration_seconds_bucket", outcome="failed", le="60.0") == 1
    assert value(found, "spool_job_wait_seconds_sum") == 2
    assert value(found, "spool_run_gpu_seconds_total") == 60


def test_the_arbiter_of_a_shared_machine_is_up_or_not(listener: Metrics, out: Path, spool_root: Path) -> None:
    """A number says whether it grants leases; a machine that is not shared has no such number."""
    listener.tick()
    assert value(samples(out), "spool_arbiter_up") == 1
    assert VIEW.machine is not None
    silent = SharedView(directory="/run/spool", problem="the arbiter has not answered")
    for shared, told in ((silent, [0]), (None, [])):
        view = replace(VIEW, machine=replace(VIEW.machine, shared=shared))
        (spool_root / "state.json").write_bytes(render_state(view))
        Metrics(str(spool_root), listener._config).tick()
        assert [number for (name, _), number in samples(out).items() if name == "spool_arbiter_up"] == told


def test_it_is_written_whole_for_whoever_reads_it_and_not_more_often_than_it_may(
    listener: Metrics, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode 0644 whatever the umask, by one rename, nothing left beside it, and again after 15 seconds."""
    now = time.monotonic()
    monkeypatch.setattr(writing.time, "monotonic", lambda: now)
    umask = os.umask(0o077)
    try:
        assert listener.tick() == writing.EVERY_S == 15
    finally:
        os.umask(umask)
    first = out.stat()
    assert first.st_mode & 0o777 == 0o644
    assert os.listdir(out.parent) == [out.name]
    now += 14.9
    left = listener.tick()
    assert left is not None
    assert 0 < left < 0.2
    assert out.stat().st_ino == first.st_ino
    now += 0.2
    assert listener.tick() == 15
    assert out.stat().st_ino != first.st_ino


def test_a_dispatcher_that_is_gone_is_not_up(listener: Metrics, out: Path, spool_root: Path) -> None:
    """The last that the listener writes says so; and a state that is old says that somebody died.

    A spool whose dispatcher has not said anything yet has no jobs, and no numbers are made up.
    """
    listener.tick()
    listener.close()
    assert value(samples(out), "spool_dispatcher_up") == 0
    old = time.time() - 3600
    os.utime(spool_root / "state.json", (old, old))
    again = Metrics(str(spool_root), listener._config)
    again.tick()
    found = samples(out)
    assert value(found, "spool_dispatcher_up") == 0
    assert value(found, "spool_dispatcher_heartbeat_timestamp_seconds") == pytest.approx(old)
    (spool_root / "state.json").unlink()
    Metrics(str(spool_root), listener._config).tick()
    found = samples(out)
    assert value(found, "spool_dispatcher_up") == 0
    assert not [name for name, _ in found if name in ("spool_jobs", "spool_cpus")]


def test_a_file_that_cannot_be_written_is_reported_once(
    spool_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of node_exporter may be missing: one line in the log, and the spool goes on."""
    monkeypatch.setattr(writing, "EVERY_S", 0.0)
    listener = Metrics(str(spool_root), lambda: Config(parts=(("metrics", str(tmp_path / "nowhere" / "spool.prom")),)))
    listener.tick()
    listener.tick()
    assert caplog.text.count("cannot write the metrics") == 1


def test_no_metrics_are_written_where_none_are_configured(spool_root: Path) -> None:
    """The key may be taken out of the configuration while the listener lives."""
    Metrics(str(spool_root), Config).tick()
    assert not list(spool_root.rglob("*.prom"))


def test_promtool_finds_nothing_to_object_to(listener: Metrics, out: Path) -> None:
    """Names, types, units and help texts are as the conventions of Prometheus have them."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    listener.hear(ENDED, lambda: None)
    listener.tick()
    checked = subprocess.run([promtool, "check", "metrics"], input=out.read_bytes(), capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_the_dashboard_and_the_page_speak_of_metrics_that_there_are(listener: Metrics, out: Path) -> None:
    """What the dashboard asks for is written with these labels, and what is written is in docs/EVENTS.md."""
    listener.tick()
    families = list(text_string_to_metric_families(out.read_text()))
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    dashboard = (ROOT / "contrib" / "grafana" / "spool.json").read_text()
    queries = [target["expr"] for panel in json.loads(dashboard)["panels"] for target in panel.get("targets", ())]
    asked = {name for query in queries for name in re.findall(r"\bspool_[a-z_]+\b", query)}
    assert asked == set(re.findall(r"\bspool_[a-z_]+\b", dashboard))
    assert asked - set(labels) == set()
    for query in queries:
        by = {word for group in re.findall(r"by \(([a-z, ]+)\)", query) for word in group.split(", ")}
        known = set().union(*(labels[name] for name in re.findall(r"\bspool_[a-z_]+\b", query)))
        assert by <= known, query
    listed = re.findall(
        r"^\| `(spool_[a-z_]+)` \| (\w+) \| (.*?) ?\|", (ROOT / "docs" / "EVENTS.md").read_text(), re.MULTILINE
    )
    assert {(name, kind, frozenset(re.findall(r"`(\w+)`", stated))) for name, kind, stated in listed} == {
        (
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            frozenset(set(family.samples[0].labels) - {"spool", "le"}),
        )
        for family in families
    }


def test_the_key_names_a_file_that_node_exporter_reads() -> None:
    """It is absolute or begins with `~`, and ends with `.prom`; anything else is an error."""
    assert config.parse(b'metrics = "~/metrics/spool.prom"').part("metrics") == "~/metrics/spool.prom"
    for wrong in ("/tmp/spool.prom ", "spool.prom", "/tmp/spool.txt"):
        with pytest.raises(InvalidConfig):
            config.parse(f'metrics = "{wrong}"'.encode())


def test_metrics_follow_the_spool(served: Served, tmp_path: Path) -> None:
    """The file is there soon after the dispatcher, and says at its end what has happened, and that nobody serves."""
    out = tmp_path / "spool.prom"
    (served.root / "config.toml").write_text(f'cpus = 4\nmetrics = "{out}"\n')
    served.changes[LOOKS] = HOUR_NS
    served.start()
    wait_for(lambda: out.exists() and "spool_dispatcher_up" in out.read_text())
    assert out.stat().st_mode & 0o777 == 0o644
    served.drop("good", "true")
    served.drop("bad", "exit 1", retry={"max": 1})
    wait_for(lambda: served.places("good") == ["done"] and served.places("bad") == ["done"])
    assert served.stop() == 0
    wait_for(lambda: f'spool_dispatcher_up{{spool="{served.root}"}} 0.0' in out.read_text())
    found = samples(out)
    assert value(found, "spool_submissions_total") == value(found, "spool_job_wait_seconds_count") == 2
    assert [value(found, "spool_job_outcomes_total", outcome=word) for word in ("finished", "failed")] == [1, 1]
    assert value(found, "spool_retries_total", kind="retry") == 1
    assert value(found, "spool_run_duration_seconds_count", outcome="failed") == 2
    assert value(found, "spool_errors_total") == 0


FIRST_RUN = Result(
    job="train",
    run=1,
    attempt=1,
    outcome=State.FAILED,
    reason="exit code 3",
    submitted_at_ns=0,
    started_at_ns=30 * SECOND_NS,
    ended_at_ns=90 * SECOND_NS,
    cpu_time_ns=100 * SECOND_NS,
    grant=Grant(2, None, ("GPU-a", "GPU-b"), (0, 1)),
)
EVENT = Event(id="0", name=EventName.QUEUED, at_ns=0, host="box", version="1", spool_dir="/s", job="train")
STARTED = replace(
    EVENT, id="1", name=EventName.STARTED, run=1, attempt=1, submitted_at_ns=0, started_at_ns=30 * SECOND_NS
)
RETRYING = replace(EVENT, id="2", name=EventName.RETRYING, run=1, attempt=1, result=replace(FIRST_RUN, again="retry"))
FAILED = replace(EVENT, id="3", name=EventName.FAILED, run=2, attempt=2, result=replace(FIRST_RUN, run=2, attempt=2))


def sums(*events: Event) -> Sums:
    """Return what *events* add up to."""
    made = Sums()
    for event in events:
        made.take(event)
    return made


def test_a_life_of_a_job_is_counted() -> None:
    """One submission, one wait, two runs, one retry, one outcome; CPU and GPU time of both runs."""
    told = sums(EVENT, STARTED, RETRYING, FAILED)
    assert told.submissions == 1
    assert told.outcomes == {"failed": 1}
    assert told.again == {"retry": 1}
    assert (sum(told.waits.counts), told.waits.sum_ns) == (1, 30 * SECOND_NS)
    assert {word: (sum(runs.counts), runs.sum_ns) for word, runs in told.runs.items()} == {
        "failed": (2, 120 * SECOND_NS)
    }
    assert (told.cpu_ns, told.gpu_ns) == (200 * SECOND_NS, 240 * SECOND_NS)


def test_gpus_of_an_engine_count_as_many_as_were_asked_for() -> None:
    """Only the engine knows which they were."""
    assert (
        sums(replace(FAILED, result=replace(FIRST_RUN, grant=Grant(1, gpus_elsewhere=3)))).gpu_ns == 3 * 60 * SECOND_NS
    )


def test_what_is_told_again_counts_once() -> None:
    """At least once is how events are told; once is how they are counted."""
    once, often = sums(EVENT, STARTED, RETRYING, FAILED), sums(*[EVENT, STARTED, RETRYING, FAILED] * 3)
    for name in ("submissions", "outcomes", "again", "cpu_ns", "gpu_ns"):
        assert getattr(once, name) == getattr(often, name)
    assert once.waits.counts == often.waits.counts


def test_a_run_too_short_to_be_seen_to_start_has_waited_too() -> None:
    """Its wait is known when it ends; one that was told of before is not counted again."""
    ended = replace(FAILED, id="9", run=1, attempt=1, result=FIRST_RUN)
    assert sums(ended).waits.sum_ns == 30 * SECOND_NS
    assert sum(sums(STARTED, ended).waits.counts) == 1


def test_a_job_that_never_started_has_an_outcome_and_no_run() -> None:
    """Cancelled while it waited: it is in no histogram."""
    result = replace(FIRST_RUN, outcome=State.CANCELLED, started_at_ns=None, cpu_time_ns=None)
    told = sums(replace(EVENT, id="8", name=EventName.CANCELLED, result=result))
    assert told.outcomes == {"cancelled": 1}
    assert not told.runs
    assert not sum(told.waits.counts)


def test_a_histogram_puts_a_bound_into_its_own_bucket() -> None:
    """At most so long, as Prometheus counts; a clock that was set back gives nothing below zero."""
    histogram = Histogram()
    for duration in (-5, BOUNDS_NS[0], BOUNDS_NS[0] + 1, BOUNDS_NS[-1] + 1):
        histogram.add(duration)
    assert histogram.counts == [2, 1, *[0] * (len(BOUNDS_NS) - 2), 1]
    assert histogram.sum_ns == 2 * BOUNDS_NS[0] + 1 + BOUNDS_NS[-1] + 1


def test_what_was_seen_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of repeats is bounded."""
    monkeypatch.setattr("spool.extras.metrics.listener._REMEMBERED", 2)
    assert sums(*(replace(EVENT, id=key) for key in "12131")).submissions == 4
