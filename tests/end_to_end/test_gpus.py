"""Jobs with GPUs, through a real library in the place of NVIDIA's, and with named resources: over dispatchers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from end_to_end.hooking import hook
from plugins.fake_nvml import GIB, FakeNvml
from served import GPU_LOOKS, HOUR_NS, LOOKS, Served, pids_in
from support import wait_for

_BOTH = pytest.mark.executors("process", "tmux")

_ECHO = 'echo "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $SPOOL_GPUS"'


def _uuid(at: int) -> str:
    return f"GPU-{at:08d}-1111-2222-3333-444444444444"


@pytest.fixture
def gpus(fake_nvml: FakeNvml, tmp_path: Path, executor: str | None) -> Iterator[Served]:
    """Give a spool with four GPUs of 80 GiB, whose dispatcher looks at them often."""
    for at in range(4):
        fake_nvml.gpu(_uuid(at), bus=at)
    with Served(tmp_path / "spool", fake_nvml.variables, executor) as spool:
        (spool.root / "config.toml").write_text("cpus = 64\n")
        spool.changes[GPU_LOOKS] = 200_000_000
        yield spool


def _given(line: dict[str, Any]) -> set[str]:
    return set(line.get("gpu_uuids", ()))


@_BOTH
def test_a_job_finds_its_gpus_by_uuid(gpus: Served) -> None:
    """A job's GPUs are named by UUID, in PCI order; a job without GPUs sees none, on purpose."""
    gpus.drop("two", _ECHO, gpus=2)
    gpus.drop("none", _ECHO)
    assert gpus.run() == 0
    visible, order, count = gpus.log("two").split()
    assert len(visible.split(",")) == 2
    assert set(visible.split(",")) <= {_uuid(at) for at in range(4)}
    assert (order, count) == ("PCI_BUS_ID", "2")
    assert gpus.log("none") == " PCI_BUS_ID 0\n"
    line = next(line for line in gpus.history() if line["job"] == "two")
    assert ",".join(line["gpu_uuids"]) == visible


def test_a_job_finds_its_gpus_by_index_if_so_configured(gpus: Served) -> None:
    """`gpu_names = "index"`, for programs that read whole numbers in CUDA_VISIBLE_DEVICES."""
    with (gpus.root / "config.toml").open("a") as config:
        config.write('gpu_names = "index"\ngpu.use = [1, 3]\n')
    gpus.drop("two", 'echo "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $SPOOL_GPU_INDICES"', gpus=2)
    gpus.drop("none", 'echo "[$CUDA_VISIBLE_DEVICES] ${SPOOL_GPU_INDICES-unset}"')
    assert gpus.run() == 0
    assert gpus.log("two") == "1,3 PCI_BUS_ID 1,3\n"
    assert gpus.log("none") == "[] unset\n"


def test_who_came_to_a_gpu_since_nvml_was_asked_is_not_missed(gpus: Served, fake_nvml: FakeNvml) -> None:
    """NVML is asked again before a start, though its last answer is good for an hour; and else it is not asked."""
    gpus.changes[GPU_LOOKS] = HOUR_NS
    for at in range(1, 4):
        fake_nvml.remove(_uuid(at))
    gpus.start()
    gpus.looked()
    assert fake_nvml.calls() == []  # no job has to do with GPUs
    gpus.begun("holder", "until [ -e go ]; do sleep 0.02; done", gpus=1, gpu_memory="10G")
    before = fake_nvml.calls()
    for _ in range(3):
        gpus.looked()
    assert fake_nvml.calls() == before  # no start that needs an answer
    gpus.drop("alone", "true", gpus=1)
    gpus.wait_reason("alone", "shared by holder")
    fake_nvml.gpu(_uuid(0), free=68 * GIB)  # NVML lists nobody, and 12 GiB are in use
    (gpus.root.parent / "go").touch()
    gpus.wait_done("holder")
    gpus.wait_reason("alone", "12 GiB")
    told = gpus.state()["machine"]
    assert [each["memory_bytes"] for each in told["gpus"][0]["foreign_processes"]] == [12 * GIB]
    fake_nvml.gpu(_uuid(0))
    gpus.drop("part", "true", gpus=1, gpu_memory="60G")  # a start that needs an answer, which helps the other one, too
    gpus.wait_done("alone", "part")


def test_a_hook_that_is_asked_about_a_start_on_gpus_is_asked_once(gpus: Served) -> None:
    """Its yes outlasts the answer of NVML that it was asked on: NVML is asked again, and the hook is not.

    `dispatch --once` starts such a job, too, though NVML is asked without waiting.
    """
    hook(gpus, "submitting", 'echo asked >> "$SPOOL_DIR/asked"')
    gpus.drop("job", "true", gpus=1)
    assert gpus.run("--once") == 0
    assert gpus.runs("job") == [1]
    assert (gpus.root / "asked").read_text() == "asked\n"


def test_a_start_that_waits_for_nvml_delays_nobody_else(gpus: Served, fake_nvml: FakeNvml) -> None:
    """NVML hangs: the job whose start needs its answer waits and says so, others start beside it and in its place."""
    gpus.changes[GPU_LOOKS] = HOUR_NS
    gpus.serves("cpus = 2\n")
    gpus.begun("first", "until [ -e go ]; do sleep 0.02; done", gpus=1, cpus=1)
    fake_nvml.hang("nvmlDeviceGetMemoryInfo_v2")
    gpus.drop("waits", "true", gpus=1, cpus=1)
    gpus.wait_reason("waits", "NVML has not answered yet")
    gpus.completes("plain", "true", cpus=1)
    assert gpus.runs("waits") == []
    fake_nvml.mend()
    gpus.wait_done("waits")
    (gpus.root.parent / "go").touch()
    gpus.wait_done("first")


def test_our_own_processes_on_a_gpu_are_not_foreign(gpus: Served, fake_nvml: FakeNvml) -> None:
    """A process of a job, also one that hides in a session of its own, is no stranger on that job's GPU."""
    for at in range(1, 4):
        fake_nvml.remove(_uuid(at))
    gpus.start()
    command = "setsid sleep 1000 & echo $!; until [ -e go ]; do sleep 0.02; done"
    gpus.drop("user", command, gpus=1, gpu_memory="10G", kill_grace="500ms")
    pid = wait_for(lambda: pids_in(gpus.log("user")))[0]
    fake_nvml.process(_uuid(0), pid)
    gpus.completes("companion", "true", gpus=1, gpu_memory="10G")
    (gpus.root.parent / "go").touch()
    gpus.wait_done("user")


@_BOTH
def test_adopted_runs_keep_their_gpus(gpus: Served) -> None:
    """After a dispatcher was killed, the GPUs of what runs on are not given to others."""
    gpus.start()
    gpus.begun("keeper", "until [ -e go ]; do sleep 0.02; done", gpus=3)
    gpus.restart()
    gpus.drop("small", "true", gpus=1)
    gpus.drop("wide", "true", gpus=2)
    gpus.wait_done("small")
    gpus.wait_reason("wide", "gpus")
    (gpus.root.parent / "go").touch()
    gpus.wait_done("wide")
    by_name = {line["job"]: line for line in gpus.history()}
    assert not _given(by_name["small"]) & _given(by_name["keeper"])
    assert by_name["wide"]["started_at"] >= by_name["keeper"]["ended_at"]


@_BOTH
def test_indices_are_kept_over_a_dead_dispatcher(served: Served) -> None:
    """A run finds its indices in its environment, and the dispatcher that adopts it grants the others only."""
    (served.root / "config.toml").write_text("cpus = 8\nresources = { tpu = { indices = [0, 1, 2] } }\n")
    gate = served.root.parent / "gate"
    text = f'echo "<$SPOOL_RESOURCE_TPU>"; until [ -e {gate} ]; do sleep 0.02; done'
    served.start()
    served.drop("one", text, resources={"tpu": 1})
    assert "<0>" in served.says("one", ">")
    served.drop("two", text, resources={"tpu": 1})
    assert "<1>" in served.says("two", ">")
    served.kill()
    served.drop("third", text, resources={"tpu": 1})
    served.start()
    assert "<2>" in served.says("third", ">")
    served.drop("wide", 'echo "<$SPOOL_RESOURCE_TPU>"', resources={"tpu": 3})
    assert "3, 0 of 3 " in served.wait_reason("wide", "tpu")
    gate.touch()
    served.wait_done("one", "two", "third", "wide")
    assert served.log("wide") == "<0,1,2>\n"
    assert (served.result("two") or {})["grant"]["resource_indices"] == {"tpu": [1]}


@_BOTH
def test_a_lost_grant_keeps_its_resources(served: Served) -> None:
    """Of a run whose `grant.toml` a power cut has emptied its job file counts; which indices it has nobody knows."""
    (served.root / "config.toml").write_text("cpus = 8\nresources = { licence = 2, tpu = { indices = [0, 1] } }\n")
    gate = served.root.parent / "gate"
    served.start()
    served.up("one", f"echo up; until [ -e {gate} ]; do sleep 0.02; done", resources={"licence": 1, "tpu": 1})
    served.kill()
    (served.root / "jobs/one/1/grant.toml").write_bytes(b"")
    served.drop("two", "true", resources={"licence": 2})
    served.drop("three", "true", resources={"tpu": 1})
    served.start()
    assert "2, 1 of 2 " in served.wait_reason("two", "licence")
    assert "unknown" in served.wait_reason("three", "tpu")
    gate.touch()
    served.wait_done("one", "two", "three")


# Reservations.


def _wakes_for_what_is_due(spool: Served) -> None:
    """Have the dispatcher wake for events and for what is due, and for nothing else."""
    del spool.changes[GPU_LOOKS]
    spool.changes[LOOKS] = HOUR_NS


def reserve(spool: Served, name: str, gpus: int | list[int], start: datetime, end: datetime, who: str) -> Path:
    """Write a reservation as a person does: elsewhere, then `mv`."""
    staged = spool.root / ".tmp" / name
    staged.write_text(f"{who}\ngpus = {gpus}\nstart = {start.isoformat()}\nend = {end.isoformat()}\n")
    return staged.rename(spool.root / "reservations" / f"{name}.toml")


def test_the_end_of_a_reservation_starts_the_next_job(gpus: Served) -> None:
    """No event comes and no look is due: the job starts when the reservation ends, not before, by that alone."""
    _wakes_for_what_is_due(gpus)
    now, hour = datetime.now(UTC), timedelta(hours=1)
    reserve(gpus, "demo", 4, now - hour, now + hour, 'user = "nobody"')
    gpus.start()
    gpus.drop("next", "date +%s.%N", gpus=1)
    assert "reserved" in gpus.wait_reason("next", "reserved")
    end = datetime.now(UTC) + timedelta(seconds=3)
    reserve(gpus, "demo", 4, now - hour, end, 'user = "nobody"')
    gpus.wait_done("next")
    begun = datetime.fromtimestamp(float(gpus.log("next")), UTC)
    assert begun >= end
    print(f"its first line came {(begun - end).total_seconds() * 1e3:.1f} ms after the end of the reservation")


@pytest.mark.parametrize("how", ["command", "file"])
def test_cancelling_it_starts_what_waited(gpus: Served, how: str) -> None:
    """`spool reserve cancel`, or `rm`, frees the GPUs at once."""
    _wakes_for_what_is_due(gpus)
    gpus.start()
    made = gpus.spool("reserve", "create", "demo", "--gpus", "4", "--duration", "2h", "--nobody")
    assert made.returncode == 0, made.stderr
    gpus.drop("next", ["sleep", "600"], gpus=1)
    gpus.wait_reason("next", "reserved")
    listed = gpus.spool("reserve", "list", "--json")
    assert json.loads(listed.stdout)["reservations"][0]["name"] == "demo", listed.stdout
    if how == "command":
        assert gpus.spool("reserve", "cancel", "demo").returncode == 0
    else:
        (gpus.root / "reservations" / "demo.toml").unlink()
    gpus.wait_place("next", "running")
    kept = gpus.root / ".reservations"
    gpus.until(lambda: kept.is_dir() and list(kept.iterdir()), "what the reservation said")
    listed = gpus.spool("reserve", "list", "--all", "--json")
    rows = json.loads(listed.stdout)["reservations"]
    assert [(row["name"], row["state"], row["gpu_count"]) for row in rows] == [("demo", "cancelled", 4)]
