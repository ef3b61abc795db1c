"""`state.json` and events as JSON, and back."""

from __future__ import annotations

import json

from msgspec.structs import replace

from spool.core.model import Event, EventName, ForeignProcess, Gpu, Grant, Request, Result, State
from spool.formats.events import facts, parse_event, render_event, render_facts, variables
from spool.formats.state import GpuLook, GpuView, JobView, MachineView, StateView, parse_state, render_state

GIB = 1 << 30
KNOWN = Gpu(
    uuid="GPU-a",
    index=3,
    name="H100",
    memory_total_bytes=80 * GIB,
    memory_free_bytes=20 * GIB,
    foreign=(ForeignProcess(4711, "python", GIB, "alice"), ForeignProcess(0, "unknown", None)),
    problem=None,
    taken_bytes=(("one", GIB), ("two", 0)),
    mig=True,
    utilisation_percent=87,
    memory_utilisation_percent=0,
)
UNKNOWN = Gpu("GPU-b", 4, "", None, None, problem="NVML no longer lists it")


def told(machine: MachineView) -> GpuLook | None:
    """Return what a reader of the file is told of the GPUs."""
    view = parse_state(render_state(StateView(version=1, at_ns=1, pid=1, machine=machine)))
    assert view.machine is not None
    return view.machine.told()


def test_what_is_known_of_a_gpu_comes_back_whole() -> None:
    """A command that reads the file knows of each GPU what the dispatcher knows; not looked at is not "none"."""
    views = (GpuView.of(KNOWN, ["one", "two"]), GpuView.of(UNKNOWN, []))
    machine = MachineView(
        cpus=1, cpus_free=1, memory_bytes=1, memory_free_bytes=1, gpu_problem="?", gpus=views, gpus_at_ns=7,
        gpus_unused=("GPU 7",),
    )  # fmt: skip
    assert told(machine) == GpuLook((KNOWN, UNKNOWN), "?", 7, ("GPU 7",))
    assert views[0].jobs == ("one", "two")
    assert told(MachineView(cpus=1, cpus_free=1, memory_bytes=1, memory_free_bytes=1)) is None
    seen = MachineView(cpus=1, cpus_free=1, memory_bytes=1, memory_free_bytes=1, gpus_at_ns=7)
    assert told(seen) == GpuLook((), None, 7)


def test_a_name_that_is_not_utf_8_is_told_escaped() -> None:
    """One odd file name in a problem keeps nobody from the rest of the view, or from an event."""
    job = JobView(state="queued", reason="caf\u00e9 \udcff", problem="\ud800")
    view = StateView(version=1, at_ns=1, pid=1, problems=("hooks/failed.d/a\udcff",), jobs={"a": job})
    seen = parse_state(render_state(view))
    assert seen.problems == ("hooks/failed.d/a\\udcff",)
    assert (seen.jobs["a"].reason, seen.jobs["a"].problem) == ("caf\u00e9 \\udcff", "\\ud800")
    event = Event(id="1", name=EventName.FAILED, at_ns=1, host="h", version="1", spool_dir="/", reason="hooks/a\udcff")
    told = parse_event(render_event(event))
    assert told.reason == "hooks/a\\udcff"


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


def test_programs_are_given_the_cpus_of_a_pinned_run_and_its_resources() -> None:
    """In the object and in the environment, under the same names as the job itself; of another run there is neither."""
    named = {"resources": (("a-b", 7), ("tpu", 2)), "resource_indices": (("tpu", (0, 3)),)}
    pinned = replace(EVENT, grant=Grant(1, cpu_list="0-1", **named))
    assert facts(pinned)["grant"]["cpu_list"] == "0-1"
    told = {"SPOOL_CPU_LIST": "0-1", "SPOOL_RESOURCE_A_B": "7", "SPOOL_RESOURCE_TPU": "0,3"}
    for event, expected in ((pinned, told), (replace(EVENT, grant=Grant(1)), {})):
        found = variables(event)
        assert {key: found[key] for key in found if key.startswith(("SPOOL_RESOURCE", "SPOOL_CPU_LIST"))} == expected


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
