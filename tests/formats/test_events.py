"""Events as JSON."""

from __future__ import annotations

import json

from msgspec.structs import replace

from spool.core.model import Event, EventName, Grant, Request, Result, State
from spool.formats.events import facts, render_facts, variables

EVENT = Event(
    id="train/3/failed",
    name=EventName.FAILED,
    at_ns=1_700_000_000_123_456_789,
    host="box",
    version="1.2.3",
    spool_dir="/s",
    reason="exit code 130",
    job="train",
    run=3,
    attempt=2,
    user="bob",
    tags=("big",),
    request=Request(gpus=1, resources=(("tpu", 2),)),
    grant=Grant(1, None, ("GPU-a",), (0,), resources=(("tpu", 2),), resource_indices=(("tpu", (0, 3)),)),
    result=Result(
        "train", 3, 2, State.FAILED, "exit code 130", submitted_at_ns=0, exit_code=130, cpu_time_ns=5_000_000
    ),
    wishes={"notify": {"to": ["https://user:secret@example.org"], "on": ["ended"], "log_lines": 0}},
)


def test_programs_are_given_the_cpus_of_a_pinned_run() -> None:
    """In the object and in the environment; of another run there is neither."""
    assert EVENT.grant is not None
    pinned = replace(EVENT, grant=replace(EVENT.grant, cpu_list="0-1"))
    assert facts(pinned)["grant"]["cpu_list"] == variables(pinned)["SPOOL_CPU_LIST"] == "0-1"
    assert "SPOOL_CPU_LIST" not in variables(EVENT)


def test_programs_are_given_all_but_whom_to_tell() -> None:
    """The whole object, on one line: what is unknown is absent, and no address of the job file is in it."""
    assert render_facts(facts(EVENT)).count(b"\n") == 1
    assert json.loads(render_facts(facts(EVENT))) == {
        "id": "train/3/failed",
        "event": "failed",
        "time": "2023-11-14T22:13:20.123456789Z",
        "host": "box",
        "version": "1.2.3",
        "spool_dir": "/s",
        "reason": "exit code 130",
        "job": "train",
        "run": 3,
        "attempt": 2,
        "user": "bob",
        "tags": ["big"],
        "request": {"cpus": 1, "gpus": 1, "resources": {"tpu": 2}},
        "grant": {
            "cpus": 1,
            "gpu_uuids": ["GPU-a"],
            "gpu_indices": [0],
            "resources": {"tpu": 2},
            "resource_indices": {"tpu": [0, 3]},
        },
        "submitted_at": "1970-01-01T00:00:00.000000000Z",
        "outcome": "failed",
        "exit_code": 130,
        "signal": 2,
        "cpu_time_ms": 5,
    }


def test_hooks_find_the_resources_in_their_environment() -> None:
    """Under the same names as the job itself; a job that was given none has none."""
    found = variables(
        replace(EVENT, grant=Grant(1, resources=(("a-b", 7), ("tpu", 2)), resource_indices=(("tpu", (0, 3)),)))
    )
    assert {key: value for key, value in found.items() if key.startswith("SPOOL_RESOURCE")} == {
        "SPOOL_RESOURCE_A_B": "7",
        "SPOOL_RESOURCE_TPU": "0,3",
    }
    assert not any(key.startswith("SPOOL_RESOURCE") for key in variables(replace(EVENT, grant=Grant(1))))
