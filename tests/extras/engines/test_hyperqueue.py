"""The claims of `spool.testing.engine_claims` for HyperQueue, on a fake `hq`, and what it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from served import remember
from spool.core.errors import InvalidValue, SpoolError
from spool.core.lifecycle import EngineWord
from spool.formats import hq
from spool.formats.engines import HqConfig
from spool.testing.builders import a_request, a_spec
from spool.testing.engine_claims import *  # noqa: F403
from spool.testing.engine_claims import Site


def test_a_job_asks_for_what_its_file_says(served_site: Site, server: Path) -> None:
    """CPUs, memory in MiB, GPUs, a time limit one minute above spool's, and its own options."""
    served_site.spool.drop(
        "x", "echo $SPOOL_CPUS", cpus=3, memory="1000M", gpus=2, time_limit="10m", executor_options=["--priority=3"]
    )
    served_site.spool.wait_done("x")
    asked: dict[str, Any] = json.loads((server / "1" / "job").read_text())
    assert (asked["cpus"], asked["resource"]) == ("3", ["mem=1000", "gpus/nvidia=2"])
    assert (asked["time_limit"], asked["priority"], asked["max_fails"]) == ("660s", "3", 0)
    assert served_site.spool.log("x") == "3\n"


def test_a_job_of_a_cluster_is_not_pinned(served_site: Site) -> None:
    """`cpu_pinning` is about this machine: the cluster binds its jobs itself."""
    config = served_site.spool.root / "config.toml"
    config.write_text(f"cpu_pinning = true\n{config.read_text()}")
    served_site.spool.drop("x", 'echo "<${SPOOL_CPU_LIST-none}>"', cpus=3)
    served_site.spool.wait_done("x")
    assert served_site.spool.log("x") == "<none>\n"
    assert "cpu_list" not in (served_site.spool.record("x", "grant.toml") or "")


def test_memory_that_spool_works_out_is_asked_for(engine_site: Site, server: Path) -> None:
    """By the peaks of earlier runs, as a number in the file would be."""
    remember(engine_site.spool, "x_1", 300)
    engine_site.spool.start()
    engine_site.spool.drop("x_2", "true", memory="auto")
    engine_site.spool.wait_done("x_2")
    assert json.loads((server / "1" / "job").read_text())["resource"] == ["mem=384"]


def test_options_are_checked_by_the_engine_that_gets_the_job(engine_site: Site) -> None:
    """If the file names it, the file is wrong; if it is the default, the job is held when it is handed over."""
    spool = engine_site.spool
    config = spool.root / "config.toml"
    config.write_text(f'executor = "hq"\n{config.read_text()}')
    spool.start()
    spool.drop("named", "true", executor_options=["--array=1-3"])
    spool.until((spool.root / "queued" / "named.toml.error").exists, "the error")
    words = "'--array=1-3' sets what spool sets itself for HyperQueue"
    assert words in (spool.root / "queued" / "named.toml.error").read_text()
    spool.drop("default", "true", executor=None, executor_options=["--array=1-3"])
    spool.wait_place("default", "held")
    assert words in (spool.root / "held" / "default.toml.reason").read_text()


def test_a_gpu_type_is_the_resource_that_the_configuration_names() -> None:
    """Another type is refused, with words that say what to write; so is a share of a GPU."""
    config = HqConfig(gpu_types={"A100": "gpus/a100"})

    def options(**request: Any) -> list[str]:
        return [*hq.options("x", a_spec(request=a_request(**request)), mark="m", metadir="/d", config=config)]

    assert "--resource=gpus/a100=1" in options(gpus=1, gpu_type="A100")
    with pytest.raises(SpoolError, match=r"write gpu_types = \{ \"H100\" = \"RESOURCE\" \} in \[hq\]"):
        options(gpus=1, gpu_type="H100")
    with pytest.raises(SpoolError, match=r"needs GPUs of a least size .*name one gpu_type"):
        options(gpus=1, gpu_min_memory="40G")
    with pytest.raises(SpoolError, match=r"any of several GPU types \(A100, H100\), and HyperQueue takes one"):
        options(gpus=1, gpu_type=("A100", "H100"))
    with pytest.raises(SpoolError, match="shares a GPU"):
        options(gpus=1, gpu_memory="1G")


@pytest.mark.parametrize(
    "option", ["--name=x", "--array=1-3", "--cpus=2", "--resource=cpus=3", "-c3", "--env=A=1", "x"]
)
def test_an_option_that_spool_sets_itself_is_refused(option: str) -> None:
    """So is what is no option of hq submit."""
    with pytest.raises(InvalidValue):
        hq.allowed((option,))
    assert hq.allowed(("--priority=3", "--resource=fpga=1")) == ("--priority=3", "--resource=fpga=1")


@pytest.mark.parametrize(
    "text", ["", "{", "null", "3", "{}", '{"error": "x"}', "[{}]", '[{"id": "x", "name": 3}]', "[[[["]
)
def test_any_answer_is_read(text: str) -> None:
    """What is no answer gives None, and what cannot be read is left out."""
    assert hq.job_lines(text) in (None, [])
    assert hq.submitted_id(text) is None
    assert hq.cluster_of(text) is None
    assert not hq.nodes_back(text)


def test_each_state_has_its_meaning() -> None:
    """A state that is unknown is no end."""
    listed = [{"id": at, "name": "x", "task_stats": {word: 1}} for at, word in enumerate([*hq.ENDED, "waiting", "new"])]
    lines = hq.job_lines(json.dumps(listed))
    assert lines is not None
    words = [hq.ENDED.get(line.state) for line in lines]
    ends = [EngineWord.COMPLETED, EngineWord.FAILED, EngineWord.CANCELLED, EngineWord.CANCELLED]
    assert words == [*ends, None, None]


def test_a_server_that_does_not_run_is_silence_and_a_wrong_option_is_not() -> None:
    """Nothing follows from silence; a refusal holds the job."""
    assert hq.is_silence(1, '{"error": "No running instance of HQ found at \\"/x\\""}')
    assert hq.is_silence(None, "")
    assert hq.is_silence(127, "hq: not found")
    assert not hq.is_silence(2, "error: unexpected argument '--no-such-option' found")
    assert not hq.is_silence(0, "connection")
