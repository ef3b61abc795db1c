"""What tests make status pages of: views of a dispatcher, and the histories beside them."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from spool.core import layout
from spool.core.model import SECOND_NS, ForeignProcess, Grant, Request, Result, State
from spool.extras.page.content import ContentReader
from spool.extras.page.document import render
from spool.formats.history import render_history
from spool.formats.state import GpuUseView, GpuView, JobView, MachineView, PoolView, StateView, render_state

G = 1 << 30
HOUR_NS = 3600 * SECOND_NS
EVIL = (
    '</script><script>window.owned=1;document.title="owned"</script><img src=x onerror="window.owned=1">'
    "\" onclick='window.owned=1' </style></title>-->\u202egnp.exe\u0007\x1b[31m\ud800&amp;<!--"
)


def a_machine(cpus: int = 16, memory_bytes: int = 64 * G, **more: object) -> MachineView:
    """Return a machine of which nothing is taken."""
    free = {"cpus_free": cpus, "memory_free_bytes": memory_bytes}
    return MachineView(cpus=cpus, memory_bytes=memory_bytes, **{**free, **more})  # type: ignore[arg-type]


def a_view(now_ns: int, **more: object) -> StateView:
    """Return what a dispatcher says that has nothing to do."""
    given = {"version": 1, "at_ns": now_ns, "pid": 1, "host": "box", "machine": a_machine(), **more}
    return StateView(**given)  # type: ignore[arg-type]


def a_running_job(now_ns: int, *, hours: float = 1.0, limit_hours: float | None = 2.0, **more: object) -> JobView:
    """Return a job that has run for so long."""
    given = {
        "state": "running",
        "run": 1,
        "cpus": 4,
        "memory_bytes": 8 * G,
        "gpus": 0,
        "user": "alice",
        "since_ns": now_ns - int((hours + 0.5) * HOUR_NS),
        "started_at_ns": now_ns - int(hours * HOUR_NS),
        "time_limit_ns": int(limit_hours * HOUR_NS) if limit_hours is not None else None,
        **more,
    }
    return JobView(**given)  # type: ignore[arg-type]


def a_waiting_job(now_ns: int, reason: str, **more: object) -> JobView:
    """Return a job that has waited for ten minutes."""
    given = {"state": "queued", "cpus": 1, "user": "bob", "since_ns": now_ns - 600 * SECOND_NS, "reason": reason}
    return JobView(**{**given, **more})  # type: ignore[arg-type]


def a_gpu_view(index: int, **more: object) -> GpuView:
    """Return a GPU."""
    given = {"uuid": f"GPU-{index}", "index": index, "name": "H100", "memory_total_bytes": 80 * G}
    return GpuView(**{**given, "memory_free_bytes": 60 * G, "utilisation_percent": 87, **more})  # type: ignore[arg-type]


def an_end(now_ns: int, job: str, *, hours_ago: float, **more: object) -> Result:
    """Return a run of an hour that ended so long ago."""
    ended_at_ns = now_ns - int(hours_ago * HOUR_NS)
    given = {
        "job": job,
        "run": 1,
        "attempt": 1,
        "outcome": State.FINISHED,
        "reason": "exit code 0",
        "submitted_at_ns": ended_at_ns - 2 * HOUR_NS,
        "started_at_ns": ended_at_ns - HOUR_NS,
        "ended_at_ns": ended_at_ns,
        "user": "alice",
        "request": Request(2, G, 1),
        "grant": Grant(2, G, ("GPU-1",), (1,)),
        **more,
    }
    return Result(**given)  # type: ignore[arg-type]


def busy_view(now_ns: int) -> StateView:
    """Return a view with something of everything."""
    machine = a_machine(
        64,
        512 * G,
        cpus_free=8,
        memory_free_bytes=212 * G,
        gpus_at_ns=now_ns,
        gpus=(
            a_gpu_view(0, jobs=("train",), memory_free_bytes=G),
            a_gpu_view(1, jobs=("eval", "notebook"), taken_bytes={"eval": 20 * G}),
            a_gpu_view(2, utilisation_percent=0, foreign_processes=(ForeignProcess(4711, "python", 3 * G, "frank"),)),
            a_gpu_view(3, problem="fell off the bus"),
        ),
        resources={"licence": PoolView(total=3, granted=2)},
    )
    use = (GpuUseView(percent=93, mean_percent=71.4, peak_percent=100),)
    jobs = {
        "train": a_running_job(
            now_ns, hours=9, limit_hours=24, gpus=1, gpu_uuids=("GPU-0",), project="lora", gpu_use=use
        ),
        "eval": a_running_job(now_ns, hours=1.9, gpus=1, gpu_uuids=("GPU-1",), user="carol"),
        "notebook": a_running_job(now_ns, hours=5, limit_hours=None, gpus=1, gpu_uuids=("GPU-1",), user="dave"),
        "sweep": a_running_job(now_ns, array=True, reason="12 of 40 tasks have ended", user="bob"),
        "prep-" + "common-crawl-" * 7: a_running_job(now_ns, state="stopping", reason="time limit reached"),
        "big": a_waiting_job(now_ns, "needs 4 GPUs, and 1 is free", gpus=4, priority=50, memory_bytes=900 * G),
        "report": a_waiting_job(now_ns, "waits for eval to finish"),
        "parked": a_waiting_job(now_ns, "held by bob", state="held"),
        "broken": a_waiting_job(now_ns, 'cpus: "many" is not a number', state="invalid"),
    }
    return a_view(now_ns, host="gpu-box", machine=machine, jobs=jobs)


def busy_history(now_ns: int) -> list[Result]:
    """Return a day's runs of two users, one of which failed."""
    ended = [an_end(now_ns, f"job-{n}", hours_ago=20 - n, user="alice" if n % 3 else "bob") for n in range(18)]
    return [*ended, an_end(now_ns, "bad", hours_ago=0.5, outcome=State.FAILED, reason="exit code 1", user="bob")]


def lay(root: Path, view: StateView | None, ended: list[Result] | None = None) -> Path:
    """Write a view into a spool, and a history if there is one; return its root."""
    if view is not None:
        staged = root / layout.STAGING / "view"
        staged.write_bytes(render_state(view))
        staged.rename(root / layout.STATE)
    if ended is not None:
        (root / layout.HISTORY).write_bytes(b"".join(map(render_history, ended)))
    return root


def page_of(root: Path, now_ns: int, *, served: bool = True, every_s: float = 3) -> str:
    """Return the page of a spool as its writer would make it at that moment."""
    return render(ContentReader(str(root)).read(now_ns, served=served), every_s, 60).decode()


class Page(HTMLParser):
    """A page as a browser takes it apart, strictly: an element that is not closed, or closed twice, is an error."""

    _VOID = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    @property
    def text(self) -> str:
        """All that a reader sees, blanks single."""
        return " ".join(" ".join(self.texts).split())

    def all(self, name: str) -> list[dict[str, str]]:
        """Return the attributes of every element of that name."""
        return [attributes for element, attributes in self.elements if element == name]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self._VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost element."""
        assert self._open
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Take in a text."""
        if not self._open or self._open[-1] not in ("script", "style"):
            self.texts.append(data)
