"""`state.json` and back."""

from __future__ import annotations

from spool.core.model import Event, EventName, ForeignProcess, Gpu
from spool.formats.events import parse_event, render_event
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
    assert view is not None
    assert view.machine is not None
    return view.machine.told()


def test_what_is_known_of_a_gpu_comes_back_whole() -> None:
    """A command that reads the file knows of each GPU what the dispatcher knows; not looked at is not "none"."""
    views = (GpuView.of(KNOWN, ["one", "two"]), GpuView.of(UNKNOWN, []))
    machine = MachineView(
        cpus=1, cpus_free=1, memory_bytes=1, memory_free_bytes=1, gpu_problem="?", gpus=views, gpus_at_ns=7
    )
    assert told(machine) == GpuLook((KNOWN, UNKNOWN), "?", 7)
    assert views[0].jobs == ("one", "two")
    assert told(MachineView(cpus=1, cpus_free=1, memory_bytes=1, memory_free_bytes=1)) is None
    seen = MachineView(cpus=1, cpus_free=1, memory_bytes=1, memory_free_bytes=1, gpus_at_ns=7)
    assert told(seen) == GpuLook((), None, 7)


def test_a_name_that_is_not_utf_8_is_told_escaped() -> None:
    """One odd file name in a problem keeps nobody from the rest of the view."""
    job = JobView(state="queued", reason="caf\u00e9 \udcff", problem="\ud800")
    view = StateView(version=1, at_ns=1, pid=1, problems=("hooks/failed.d/a\udcff",), jobs={"a": job})
    seen = parse_state(render_state(view))
    assert seen is not None
    assert seen.problems == ("hooks/failed.d/a\\udcff",)
    assert (seen.jobs["a"].reason, seen.jobs["a"].problem) == ("caf\u00e9 \\udcff", "\\ud800")


def test_an_event_of_a_name_that_is_not_utf_8_is_told_escaped() -> None:
    """A line of `events.jsonl` is always written."""
    event = Event(id="1", name=EventName.FAILED, at_ns=1, host="h", version="1", spool_dir="/", reason="hooks/a\udcff")
    seen = parse_event(render_event(event))
    assert seen is not None
    assert seen.reason == "hooks/a\\udcff"
