"""Named resources and the limit of the whole spool, with real dispatchers."""

from __future__ import annotations

from served import Served

EXECUTORS = ("process", "tmux")


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
