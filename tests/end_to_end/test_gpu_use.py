"""What runs do with their GPUs: recorded, shown, and told where that is nothing; through the real dispatcher."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from end_to_end.hooking import hook
from plugins.fake_nvml import GIB, FakeNvml
from served import GPU_LOOKS, Served
from spool.formats.state import parse_parts

_UUID = "GPU-00000000-1111-2222-3333-444444444444"
_OTHER = "GPU-00000001-1111-2222-3333-444444444444"
_UNTIL_GO = "until [ -e go ]; do sleep 0.02; done"
_IDLE = {"gpus": 1, "gpu_idle": "1s"}


@pytest.fixture
def gpus(fake_nvml: FakeNvml, tmp_path: Path, executor: str | None) -> Iterator[Served]:
    """Give a spool with two GPUs of 80 GiB that do nothing, whose dispatcher looks at them often."""
    for at, uuid in enumerate((_UUID, _OTHER)):
        fake_nvml.gpu(uuid, bus=at)
        fake_nvml.busy(uuid, 0, 0)
    with Served(tmp_path / "spool", fake_nvml.variables, executor) as spool:
        (spool.root / "config.toml").write_text("cpus = 64\n")
        spool.changes[GPU_LOOKS] = 100_000_000
        yield spool


def _go(spool: Served, name: str) -> dict[str, Any]:
    """Let a job end, and return how it did."""
    (spool.root.parent / "go").touch()
    result = spool.wait_done(name)
    assert result is not None
    return result


def _use(spool: Served, name: str) -> list[dict[str, Any]]:
    """Return what the dispatcher says that a run does with its GPUs."""
    found: list[dict[str, Any]] = spool.state()["jobs"].get(name, {}).get("gpu_use", [])
    return found


def _told(spool: Served) -> list[str]:
    path = spool.root / "told"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.executors("process", "tmux")
def test_the_energy_of_a_run_is_recorded(gpus: Served, fake_nvml: FakeNvml) -> None:
    """Across the death of the dispatcher; result, history, `seff` and `stats` have it."""
    fake_nvml.energy(_UUID, 1_000_000)
    gpus.start()
    gpus.begun("train", _UNTIL_GO, gpus=1, project="llm")
    gpus.until(lambda: "counter_mj = 1000000" in (gpus.record("train", "gpus.toml") or ""), "the record of its use")
    gpus.kill()
    fake_nvml.energy(_UUID, 1_000_000 + 7_200_000_000)  # 2 kWh
    gpus.start()
    gpus.until(lambda: _use(gpus, "train") and _use(gpus, "train")[0]["energy_mj"], "the energy")
    (use,) = _go(gpus, "train")["gpu_use"]
    assert use["energy_mj"] == 7_200_000_000
    assert gpus.history()[0]["gpu_use"][0]["energy_mj"] == 7_200_000_000
    assert "2.00 kWh" in gpus.spool("seff", "train").stdout
    told = json.loads(gpus.spool("stats", "--by", "project", "--json").stdout)
    assert (told["groups"][0]["project"], told["groups"][0]["gpu_kwh"]) == ("llm", 2.0)


def test_what_a_run_used_of_its_gpus_is_recorded_and_shown(gpus: Served, fake_nvml: FakeNvml) -> None:
    """Result, history, `seff`, `show`, `stats` and `ls` say how busy its GPUs were, and which was not."""
    gpus.start()
    gpus.begun("train", _UNTIL_GO, gpus=2)
    fake_nvml.busy(_UUID, 90, 10)
    fake_nvml.gpu(_UUID, bus=0, free=40 * GIB)
    gpus.until(lambda: [each["percent"] for each in _use(gpus, "train")] == [90, 0], "a look at both")
    gpus.until(lambda: (gpus.state()["recent"]["gpus"].get(_UUID) or [0])[-1] > 50, "the last half hour")
    assert gpus.state()["recent"]["gpus"][_OTHER][-1] == 0
    listed = gpus.spool("ls", "train", "--json")
    assert json.loads(listed.stdout)["jobs"][0]["gpu_percent"] == 45
    gpus.until(lambda: (_use(gpus, "train")[0]["mean_percent"] or 0) > 50, "a mean")
    so_far = json.loads(gpus.spool("show", "train", "--json").stdout)["runs"][0]
    assert so_far["gpu_use"][0]["peak_percent"] in (0, 90)  # the record is written every 15s
    first, second = _go(gpus, "train")["gpu_use"]
    assert (first["peak_percent"], second["peak_percent"]) == (90, 0)
    assert 50 < first["mean_percent"] <= 90
    assert (first["peak_memory_bytes"], second["mean_percent"]) == (40 * GIB, 0)
    assert gpus.history()[0]["gpu_use"] == [first, second]
    told = json.loads(gpus.spool("seff", "train", "--json").stdout)
    assert told["gpu_efficiency"] == pytest.approx(first["mean_percent"] / 200, abs=0.02)
    text = gpus.spool("seff", "train").stdout
    assert "GPU 1 of 2" in text
    total = json.loads(gpus.spool("stats", "--json").stdout)["total"]
    assert total["gpu_used_runs"] == 1
    assert total["gpu_efficiency"] == pytest.approx(told["gpu_efficiency"], abs=0.02)
    assert "busy" in gpus.spool("stats").stdout
    assert "BUSY" in gpus.spool("stats", "--by", "user").stdout
    assert "90% at most" in gpus.spool("show", "train").stdout


def test_a_metadir_that_was_removed_is_not_made_again(gpus: Served) -> None:
    """What nothing depends on brings no metadir back: how such a run ended is known by its wrapper alone."""
    gpus.start()
    gpus.drop("train", _UNTIL_GO, gpus=1)
    gpus.until(lambda: gpus.record("train", "gpus.toml"), "the record")
    (gpus.root / "jobs/train/1").rename(gpus.root / "away")
    gpus.stop()
    assert gpus.runs("train") == []
    (gpus.root / "away").rename(gpus.root / "jobs/train/1")
    gpus.start()
    assert _go(gpus, "train")["outcome"] == "finished"


def test_a_run_that_leaves_its_gpu_idle_is_told_of_once(gpus: Served, fake_nvml: FakeNvml) -> None:
    """A hook hears `gpu_idle`, `ls` and `show` give the reason, the log too; work ends it, and it goes on.

    A new dispatcher does not tell it again: that stands in the metadir, as does for how long the GPU has been idle.
    """
    hook(gpus, "gpu_idle", 'echo "$SPOOL_JOB $SPOOL_EVENT_ID $SPOOL_REASON" >> "$SPOOL_DIR/told"')
    gpus.start()
    gpus.drop("train", _UNTIL_GO, **_IDLE)
    gpus.until(lambda: _told(gpus), "the hook")
    gpus.wait_reason("train", "gpu_idle = 1s")
    assert [verb for verb in ("ls", "show") if "gpu_idle = 1s" not in gpus.spool(verb, "train").stdout] == []
    assert gpus.said().count("gpu_idle = 1s") == 1
    gpus.kill()
    assert "gpu_idle = " in gpus.spool("ls", "train").stdout  # the files alone say so
    gpus.start()
    gpus.wait_reason("train", "gpu_idle = ")
    gpus.looked()
    for uuid in (_UUID, _OTHER):
        fake_nvml.busy(uuid, 50, 0)
    gpus.until(lambda: gpus.reason("train") == "", "work")
    assert len(_told(gpus)) == 1
    assert _told(gpus)[0].startswith("train train:1:gpu_idle:1 ")
    for uuid in (_UUID, _OTHER):
        fake_nvml.busy(uuid, 1, 0)
    gpus.until(lambda: len(_told(gpus)) == 2, "the second time")
    assert " train:1:gpu_idle:2 " in _told(gpus)[1]
    assert _go(gpus, "train")["outcome"] == "finished"


def test_a_run_that_leaves_its_gpu_idle_is_stopped_if_it_wants_that(gpus: Served) -> None:
    """It is `cancelled`, with the reason, and not tried again; its GPU goes to the next."""
    hook(gpus, "gpu_idle", 'echo "$SPOOL_EVENT_ID" >> "$SPOOL_DIR/told"')
    gpus.start()
    gpus.drop("train", "sleep 1000", gpus=2, gpu_idle="1s", gpu_idle_action="stop", retry={"max": 3, "on": ["failed"]})
    gpus.drop("next", "true", gpus=2)
    gpus.wait_done("next", "train")
    result = gpus.result("train")
    assert result["outcome"] == "cancelled"
    assert "gpu_idle = " in result["reason"]
    assert "again" not in result
    assert gpus.runs("train") == [1]
    assert result["gpu_use"][0]["mean_percent"] == 0
    gpus.until(lambda: _told(gpus), "the hook")


def test_a_hook_may_keep_an_idle_run_and_is_not_asked_at_every_look(gpus: Served) -> None:
    """A no to the stop holds for as long again as the run may be idle; that it was kept is shown."""
    hook(gpus, "cancelling", 'echo asked >> "$SPOOL_DIR/told"; echo "a demonstration"; exit 1')
    gpus.start()
    gpus.drop("train", _UNTIL_GO, gpus=1, gpu_idle="2s", gpu_idle_action="stop")
    gpus.until(lambda: _told(gpus), "the question")
    gpus.wait_reason("train", "a demonstration")
    for _ in range(3):
        gpus.looked()
    assert _told(gpus) == ["asked"]
    gpus.until(lambda: len(_told(gpus)) == 2, "the second question")
    assert _go(gpus, "train")["outcome"] == "finished"


def test_a_suspended_run_is_not_idle(gpus: Served) -> None:
    """It cannot work, so the clock of `gpu_idle` stands still until it goes on."""
    gpus.start()
    gpus.begun("train", _UNTIL_GO, gpus=1, gpu_idle="1h")
    (gpus.root / "running/train.toml.suspended").touch()
    gpus.wait_reason("train", "suspended")
    gpus.spool("edit", "train", "--set", "gpu_idle=2s")
    watched = gpus.state()["jobs"]["train"]["started_at_ns"]
    gpus.until(lambda: gpus.state()["machine"]["gpus_at_ns"] > watched + 4_000_000_000, "looks for four seconds")
    assert "has been idle" not in gpus.said()
    assert gpus.spool("continue", "train").returncode == 0
    gpus.wait_reason("train", "gpu_idle = ")
    _go(gpus, "train")


def test_an_edit_gives_a_running_job_more_time(gpus: Served) -> None:
    """`spool edit` of a job that runs changes `gpu_idle` at once."""
    gpus.start()
    gpus.begun("train", _UNTIL_GO, gpus=1, gpu_idle="1h", gpu_idle_action="stop")
    assert gpus.spool("edit", "train", "--set", "gpu_idle_action=warn", "--set", "gpu_idle=300ms").returncode == 0
    gpus.wait_reason("train", "gpu_idle = 300ms")
    assert gpus.spool("edit", "train", "--set", "gpu_idle=0s").returncode == 0
    gpus.until(lambda: gpus.reason("train") == "", "patience")
    assert _go(gpus, "train")["outcome"] == "finished"


def test_the_last_half_hour_outlives_the_dispatcher(gpus: Served, fake_nvml: FakeNvml) -> None:
    """After a crash the next dispatcher goes on with the curves of the GPUs; what is damaged is left."""
    fake_nvml.busy(_UUID, 90, 10)
    gpus.start()
    gpus.drop("train", _UNTIL_GO, gpus=1)

    def curve() -> Any:
        return gpus.state().get("recent", {"gpus": {}})["gpus"].get(_UUID, ())  # the first state has none

    gpus.until(lambda: 90 in curve(), "the last half hour")
    gpus.kill()
    before = gpus.state()
    steps = [7] * 5
    before["recent"] |= {"gpus": {_UUID: steps}}
    (gpus.root / "state.json").write_text(json.dumps(before))
    gpus.start()
    gpus.until(lambda: 7 in curve() and gpus.state()["pid"] != before["pid"], "the same after a restart")
    assert list(curve()[:4]) == steps[:4]
    gpus.kill()
    (gpus.root / "state.json").write_text('{"recent": 3')
    gpus.start()
    state = gpus.root / "state.json"
    gpus.until(lambda: 7 not in dict(parse_parts(state.read_bytes()).recent.gpus).get(_UUID, [7]), "a new beginning")
    _go(gpus, "train")
