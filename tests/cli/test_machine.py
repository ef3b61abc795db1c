"""`spool gpus`, `spool info` and `spool plan`: the machine and the plan, from a fresh look and without a dispatcher."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from calling import Command, asked, put_job, spawned
from cli.records import begin
from plugins.fake_nvml import GIB, FakeNvml
from spool.core.model import ForeignProcess, Gpu, Grant
from spool.formats.state import GpuView, MachineView, StateView, render_state
from spool.machine.host import unlisted_cards
from spool.store.locked_spool import LockedSpool
from support import wait_for

UNKNOWN = 999


@pytest.fixture
def sleeper() -> Iterator[int]:
    """Have a process of nobody's run."""
    process = subprocess.Popen(["sleep", "300"])
    yield process.pid
    process.kill()
    process.wait()


def put(root: Path, name: str, place: str = "queued", **keys: object) -> None:
    """Put a job with these keys into the spool."""
    keys = {"command": "true"} | keys
    put_job(root, name, "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()), place)


def configure(root: Path, text: str) -> None:
    """Add to the configuration of the fixture `spool`."""
    (root / "config.toml").write_text(f"autostart = false\n{text}")


def by_index(found: Any) -> dict[int, Any]:
    """Return the GPUs by index."""
    return {gpu["index"]: gpu for gpu in found["gpus"]}


def test_gpus_tells_why_each_is_not_given(spool: Command, spool_root: Path, four: FakeNvml, sleeper: int) -> None:
    """Idle; somebody else's process with pid, name, user and memory; left out by gpu.use; reserved for somebody."""
    four.process("GPU-1", sleeper, 3 * GIB)
    configure(spool_root, "[gpu]\nuse = [0, 1, 3]\n")
    assert spool("reserve", "create", "desk", "--nobody", "--gpus", "3,", "--duration", "2h").code == 0
    found = by_index(asked(spool, "gpus"))
    assert {index: gpu["state"] for index, gpu in found.items()} == {0: "idle", 1: "foreign", 2: "unused", 3: "idle"}
    assert found[0]["why_not"] is None
    (process,) = found[1]["foreign"]
    assert (process["pid"], process["name"], process["memory_bytes"]) == (sleeper, "sleep", 3 * GIB)
    assert f"pid {sleeper} (sleep, {process['user']}, 3 GiB) outside spool" in found[1]["why_not"]
    assert "gpu.use" in found[2]["why_not"]
    assert "reserved" in found[3]["why_not"]
    assert "idle 0;" in spool("info").out  # 3 is not: it is reserved
    text = spool("gpus").out
    assert f"pid {sleeper} (sleep, " in text
    assert "outside spool" in text
    assert "(desk)" in text


def test_gpus_shows_what_each_does(spool: Command, four: FakeNvml) -> None:
    """How busy a GPU and its memory are, in percent; what NVML does not tell is null, and no 0."""
    four.busy("GPU-0", 87, 34)
    four.busy("GPU-1", 0, 0)
    found = by_index(asked(spool, "gpus"))
    told = [(gpu["utilisation_percent"], gpu["memory_utilisation_percent"]) for gpu in found.values()]
    assert told == [(87, 34), (0, 0), (None, None), (None, None)]
    lines = spool("gpus").out.splitlines()
    assert "MEM BUSY" in lines[0]
    assert ("87%" in lines[1], "34%" in lines[1], "0%" in lines[2], "%" in lines[3]) == (True, True, True, False)


def test_every_command_says_of_the_gpus_what_the_dispatcher_says(
    spool: Command, spool_root: Path, four: FakeNvml
) -> None:
    """While one lives that watches them, `gpus`, `info`, `why`, `plan` and `doctor` believe it, and not their own look.

    It knows of a GPU that has fallen off, and of processes that nobody else may see; another look would deny it.
    """
    cards = (
        Gpu("GPU-0", 0, "A100", 80 * GIB, 68 * GIB, foreign=(ForeignProcess(4711, "gone", 12 * GIB),)),
        Gpu("GPU-9", 9, "A100", 80 * GIB, None, problem="NVML no longer lists it"),
    )
    gpus = tuple(GpuView.of(card, ()) for card in cards)
    machine = MachineView(cpus=8, cpus_free=8, memory_bytes=GIB, memory_free_bytes=GIB, gpus=gpus, gpus_at_ns=1)
    put(spool_root, "waits", gpus=1)
    view = StateView(version=1, at_ns=1, pid=1, host="box", machine=machine)
    (spool_root / "state.json").write_bytes(render_state(view))
    assert set(by_index(asked(spool, "gpus"))) == {0, 1, 2, 3}  # nobody lives: NVML is asked
    lock = LockedSpool(str(spool_root))
    try:
        seen = {index: gpu["why_not"] for index, gpu in by_index(asked(spool, "gpus")).items()}
        assert (seen.keys(), "4711" in seen[0]) == ({0, 9}, True)
        assert by_index(asked(spool, "info")) == by_index(asked(spool, "gpus"))
        reason = (
            "gpus: needs 1 unshared GPU; none is idle; "
            "GPU 0 is used by pid 4711 (gone, 12 GiB) outside spool; GPU 9: NVML"
        )
        assert asked(spool, "plan")["waits"][0]["reason"].startswith(reason)
        assert reason in spool("why", "waits").out
        assert "GPU-9" in spool("doctor").out
        os.utime(spool_root / "state.json", (1, 1))  # it has been silent for long
        assert set(by_index(asked(spool, "gpus"))) == {0, 1, 2, 3}
    finally:
        lock.release()


def test_gpus_that_cannot_be_asked_are_unknown_and_not_free(spool: Command, four: FakeNvml) -> None:
    """Where NVML fails, that is what is said, on stderr, and no GPU is called idle."""
    four.error("nvmlInitWithFlags", UNKNOWN)
    said = spool("gpus")
    assert said.code == 0
    assert "NVML" in said.err
    assert "idle" not in said.out
    assert asked(spool, "info")["gpu_problem"].startswith("NVML")


@pytest.mark.parametrize("verb", ["gpus", "info", "doctor"])
def test_a_gpu_without_a_uuid_is_told(spool: Command, four: FakeNvml, verb: str) -> None:
    """It is not used, and says why."""
    four.error("nvmlDeviceGetHandleByIndex_v2", 15, "GPU-3")
    assert "GPU 3 is not used: GPU is lost" in spool(verb).out


def test_runs_that_hold_gpus_are_named(spool: Command, spool_root: Path, four: FakeNvml) -> None:
    """From the files of runs alone: who has a GPU alone, who shares one and how much of it was granted."""
    configure(spool_root, "cpus = 8\n")
    for name, at, more in (
        ("exclusive", 0, {"memory_bytes": 64 << 20}),
        ("first", 1, {"gpu_memory_bytes": 8 * GIB}),
        ("second", 1, {"gpu_memory_bytes": 8 * GIB}),
    ):
        begin(spool_root, name, grant=Grant(1, gpu_uuids=(f"GPU-{at}",), gpu_indices=(at,), **more))
    found = by_index(asked(spool, "gpus"))
    holders = {index: {(one["job"], one["granted_bytes"]) for one in gpu["holders"]} for index, gpu in found.items()}
    assert holders == {0: {("exclusive", None)}, 1: {("first", 8 * GIB), ("second", 8 * GIB)}, 2: set(), 3: set()}
    assert [found[index]["state"] for index in range(4)] == ["exclusive", "shared", "idle", "idle"]
    info = asked(spool, "info")
    assert (info["cpus"], info["cpus_granted"], info["memory_granted_bytes"]) == (8, 3, 64 << 20)
    assert [run["job"] for run in info["runs"]] == ["exclusive", "first", "second"]
    assert info["states"] == {"running": 3}
    assert "exclusive 0; shared 1; idle 2, 3" in spool("info").out


def test_info_tells_of_the_dispatcher(spool: Command, dispatcher: subprocess.Popen[str], spool_root: Path) -> None:
    """Its process, since when it serves, and when it said something last."""
    wait_for((spool_root / "state.json").exists)
    told = asked(spool, "info")["dispatcher"]
    assert (told["pid"], told["since_at"] <= told["heartbeat_at"]) == (dispatcher.pid, True)


def test_info_of_a_quiet_spool(spool: Command, spool_root: Path) -> None:
    """Counts by state, that it is paused, that nobody serves it, and what is wrong with the configuration."""
    configure(spool_root, 'memory_reserve = "0%"\n[gpu]\nuse = ["GPU-gone"]\n')
    put(spool_root, "a")
    put(spool_root, "b", place="held")
    put(spool_root, "bad", gpu=1)
    spool("pause")
    found = asked(spool, "info")
    assert found["states"] == {"queued": 1, "held": 1, "invalid": 1}
    assert (found["paused"], found["dispatcher"], found["ended"]) == (True, None, {})
    assert found["memory_bytes"] > 0
    assert found["memory_available_bytes"] > 0
    configure(spool_root, "cpu = 3\n")
    assert any("cpu" in problem for problem in asked(spool, "info")["problems"])


@pytest.mark.parametrize("verb", ["info", "plan", "why", "show"])
def test_an_old_key_of_the_configuration_is_told_of_once(spool_root: Path, verb: str) -> None:
    """Whatever a command reads the configuration for."""
    configure(spool_root, "[tariff]\ncpu_hour = 1\n")
    put(spool_root, "a")
    done = spawned("--spool", spool_root, verb, *(["a"] if verb in ("why", "show") else []), check=True)
    assert f"{done.stdout}{done.stderr}".count("tariff has no effect") == 1


def test_plan_is_in_the_order_of_the_queue_with_reasons(spool: Command, spool_root: Path) -> None:
    """What starts and with what, what waits and why and until when, what ends, what cannot be planned."""
    configure(spool_root, "cpus = 4\n")
    put(spool_root, "wide", cpus=4, time_limit="1h", priority=20)
    put(spool_root, "after", depends_on=["wide"])
    put(spool_root, "next", cpus=2)
    put(spool_root, "huge", cpus=5)
    put(spool_root, "held", place="held")
    put(spool_root, "bad", gpu=1)
    found = asked(spool, "plan")
    assert [(job["place"], job["name"], job["grant"]["cpus"]) for job in found["starts"]] == [(1, "wide", 4)]
    waits = {job["name"]: job for job in found["waits"]}
    assert {name: job["code"] for name, job in waits.items()} == {
        "after": "dependency", "next": "cpus", "huge": "never_fits",
    }  # fmt: skip
    assert sorted(job["place"] for job in found["waits"]) == [2, 3, 4]
    assert waits["next"]["must_end"] == ["wide"]
    hour = datetime.fromtimestamp(found["at_ns"] // 10**9 + 3600, UTC)
    assert waits["next"]["start_at"].startswith(hour.strftime("%Y-%m-%dT%H:%M:%S"))
    assert waits["after"]["start_at"] == waits["next"]["start_at"]  # if `wide` finishes, with room for both
    assert (waits["huge"]["start_at"], waits["huge"]["start_unknown"]) == (None, waits["huge"]["reason"])
    assert list(found["left_out"]) == ["bad"]
    assert (found["held"], found["dispatcher"], found["paused"]) == (1, False, False)


def test_resources_are_shown(spool: Command, spool_root: Path) -> None:
    """`info`, `plan`, `why` and `show` tell named resources with their indices, and the limit of the whole spool."""
    configure(spool_root, "cpus = 4\nmax_running = 1\nresources = { licence = 1, tpu = { indices = [3, 5] } }\n")
    put_job(spool_root, "a", 'command = "true"\npriority = 20\nresources = { licence = 1, tpu = 2 }\n')
    put_job(spool_root, "b", 'command = "true"\nresources = { licence = 1 }\n')
    found = asked(spool, "plan")
    (start,) = found["starts"]
    assert start["grant"]["resources"] == {"licence": 1, "tpu": 2}
    assert start["grant"]["resource_indices"] == {"tpu": [3, 5]}
    assert [each["code"] for each in asked(spool, "why", "b")["reasons"]] == ["max_running", "resources"]
    assert "licence 1, tpu 2" in spool("show", "a").out
    assert asked(spool, "show", "a")["row"]["resources"] == {"licence": 1, "tpu": 2}
    told = asked(spool, "info")
    assert told["resources"]["tpu"] == {"total": 2, "granted": 0, "free": 2}
    assert told["max_running"] == 1
    lines = dict(line.split(maxsplit=1) for line in spool("info").out.splitlines())
    assert (lines["licence"], lines["runs"]) == ("1, 0 granted, 1 free", "0 of 1")


def test_plan_changes_nothing(spool: Command, spool_root: Path) -> None:
    """No file of the spool is other than before, and nothing was started."""
    put(spool_root, "a")
    put(spool_root, "doomed", depends_on=["gone"])
    before = {path: path.stat().st_mtime_ns for path in spool_root.rglob("*")}
    for verb in ("plan", "info", "gpus"):
        assert spool(verb).code == 0
    assert {path: path.stat().st_mtime_ns for path in spool_root.rglob("*")} == before


def test_a_paused_spool_and_an_empty_one_have_a_plan_too(spool: Command, spool_root: Path) -> None:
    """Paused: everything waits, for that reason. Empty: nothing waits, and that is said."""
    assert "no waiting jobs" in spool("plan").out
    put(spool_root, "a")
    spool("pause")
    said = spool("plan")
    assert "paused" in said.err
    assert asked(spool, "plan")["waits"][0]["code"] == "paused"


@pytest.mark.parametrize("verb", ["gpus", "info", "plan", "ls", "stats", "reserve list", "gpus --json"])
def test_before_there_is_a_spool_each_look_says_what_there_is(spool: Command, spool_root: Path, verb: str) -> None:
    """A look makes no spool, and says that a submission does; what a machine has can be seen without one."""
    shutil.rmtree(spool_root)
    said = spool(*verb.split())
    assert said.code == 0
    assert f"{spool_root} yet" in said.err
    assert not spool_root.exists()
    (spool_root / "something").mkdir(parents=True)
    said = spool(*verb.split())
    assert said.code == 5


def test_a_machine_without_cards_is_told_from_one_without_a_driver(tmp_path: Path) -> None:
    """NVIDIA display controllers on the PCI bus that NVML does not list lack a driver; their audio does not count."""
    assert unlisted_cards(str(tmp_path / "none")) == ""
    for number, (vendor, kind) in enumerate([("0x10de", "0x040300"), ("0x1002", "0x030000"), ("0x10de", "")]):
        (device := tmp_path / str(number)).mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    assert unlisted_cards(str(tmp_path)) == ""
    (tmp_path / "2" / "class").write_text("0x030200\n")
    assert unlisted_cards(str(tmp_path)).startswith("1 ")
    assert unlisted_cards(str(tmp_path), listed=["NVIDIA"]) == ""


@pytest.mark.usefixtures("own_nvml")
def test_each_look_at_the_gpus_says_why_there_are_none(spool: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpus`, `info` and `doctor`: no card, which is no error, or no driver for the cards that there are."""
    monkeypatch.setattr("spool.query.machine.unlisted_cards", lambda: "")
    said = spool("gpus")
    assert (said.code, said.out, "no GPUs" in said.err) == (0, "", True)
    assert asked(spool, "gpus")["gpus"] == []
    for module in ("spool.query.machine", "spool.doctor"):
        monkeypatch.setattr(f"{module}.unlisted_cards", lambda: "2 cards, no driver")
    for verb in ("gpus", "info", "doctor"):
        said = spool(verb)
        assert "2 cards, no driver" in said.out + said.err
