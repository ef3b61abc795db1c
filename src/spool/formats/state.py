"""`state.json`, the dispatcher's last view: text to values and back. Nothing may decide by it.

A reader takes the keys that it knows and passes over the others, so that the file may grow.
"""

from __future__ import annotations

from msgspec import DecodeError, Struct, field, json


class JobView(Struct, frozen=True, kw_only=True):
    """What the dispatcher said of one job that waits, is held or runs."""

    state: str
    reason: str = ""
    run: int | None = None
    attempt: int = 1
    priority: int | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    gpus: int | None = None
    gpu_uuids: tuple[str, ...] = ()
    user: str | None = None
    project: str | None = None
    tags: tuple[str, ...] = ()
    since_ns: int | None = None
    started_at_ns: int | None = None
    array: bool = False  # it stands for its tasks, which are jobs themselves


class GpuView(Struct, frozen=True, kw_only=True):
    """What the dispatcher saw of one GPU."""

    uuid: str
    index: int
    name: str = ""
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    problem: str | None = None
    jobs: tuple[str, ...] = ()  # that it was given to
    foreign: tuple[int, ...] = ()  # pids of processes of nobody's run


class MachineView(Struct, frozen=True, kw_only=True):
    """What the dispatcher saw of the machine."""

    cpus: int
    cpus_free: int
    memory_bytes: int
    memory_free_bytes: int
    gpu_problem: str | None = None
    gpus: tuple[GpuView, ...] = ()


class PassesView(Struct, frozen=True, kw_only=True):
    """How long the passes of this dispatcher took."""

    count: int = 0
    sum_ns: int = 0
    last_ns: int = 0
    bounds_ns: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()  # how many took at most so long, each counted once; the last: longer than all


class StateView(Struct, frozen=True, kw_only=True):
    """The whole view. It is as old as `at_ns`; the time of the file itself is the dispatcher's last heartbeat."""

    version: int
    at_ns: int
    pid: int  # of the dispatcher
    heartbeat_ns: int = 0
    host: str = ""
    boot_id: str = ""
    started_at_ns: int | None = None
    paused: bool = False
    problems: tuple[str, ...] = ()
    machine: MachineView | None = None
    passes: PassesView | None = None
    events_lost: int = 0  # how often the kernel dropped file events
    errors: int = 0  # that this dispatcher has logged
    jobs: dict[str, JobView] = field(default_factory=dict)


_decoder = json.Decoder(StateView)
_encoder = json.Encoder()


def render_state(view: StateView) -> bytes:
    """Return the text of `state.json`."""
    return _encoder.encode(view)


def parse_state(data: bytes) -> StateView | None:
    """Return what `state.json` says, None if it cannot be understood: it is rewritten at any moment."""
    try:
        return _decoder.decode(data)
    except (DecodeError, UnicodeDecodeError):
        return None
