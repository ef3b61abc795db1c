"""The status page: what is on it, its text as one self-contained HTML document, and the listener that writes it.

The page is a template, `page.html`; this module makes the words and numbers for it. All of them are escaped, and their
control characters and bidi controls made visible. No element has a style or a handler of its own: the policy in its
head allows one style sheet and one script, by their hashes. The lists are limited, so that the page of a large spool is
no larger than a screen can use.

The listener ignores events and looks for itself. It costs the dispatcher's passes nothing, and its own process only a
small part of a processor: a page that takes long to make is made less often.
"""

from __future__ import annotations

import logging
import os
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from msgspec import Struct
from msgspec.structs import replace

from spool import __version__
from spool.cli.render import charts, short
from spool.client.output import last_words_of
from spool.core.accounting import By, RunFilter, Statistics, Totals
from spool.core.errors import SpoolError, shown
from spool.core.layout import JOB_LOG, STAGING
from spool.core.model import ALIVE, OUTCOMES, SECOND_NS, Machine, State
from spool.core.reasons import count_of, ranges_of
from spool.core.runtimes import Basis, part_done
from spool.core.units import show_duration, show_size
from spool.doctor import Check, Findings, Subject, good, warn
from spool.extras.page import page_path
from spool.formats.config import Config
from spool.listeners import Listener
from spool.query.details import FAILURES
from spool.query.jobs import RECENT_NS
from spool.query.listing import ListedJob, folded, tasks_of
from spool.query.overview import Overview, OverviewReader
from spool.query.rows import JobRow
from spool.query.shared import elsewhere
from spool.query.timeline import Frame, timeline
from spool.store.disk import Disk
from spool.store.history import History
from spool.store.spool import Spool

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""The page is written once in this time, or less often: run times go on, and readers see that the page is alive."""

_SHARE = 50  # making it may use one part in N of a processor
_EVERYBODYS = 0o644  # a path outside of the spool is given so that others can read the page there

MOST_RUNS, MOST_WAITING, MOST_HELD, MOST_ENDED, MOST_USERS = 60, 100, 40, 15, 12
_FRESH_S = 60.0  # after this time without another, or four times the usual one, the page says that it is old
_FOLDED = 2000  # only this many jobs of a list are looked at for tasks that share a line
_COLUMNS, _CPU_ROWS = 192, 16  # of the timeline: seven and a half minutes each
_LONGEST = 400  # characters of a sentence
_LONGEST_NAME = 60  # characters of a name, before its middle is left out


class Shown(Struct, frozen=True):
    """The first of some jobs, and the number of those that are not shown."""

    jobs: Sequence[ListedJob]
    left_out: int


def render(seen: Overview, root: str, every_s: float, *, served: bool = True, private: bool = False) -> bytes:
    """Return the document of the spool *root*, as seen at that moment; *served*: a dispatcher is running.

    It looks for the next one *every_s*, and says after a while without one that it is old. A *private* one has the last
    lines of failed jobs.
    """
    now_ns = seen.at_ns
    spool, rows = Spool(root), [seen.outlook.of(row, now_ns) for row in seen.active]
    runs = [row for row in rows if row.state in ALIVE]
    held = (State.HELD, State.INVALID)
    history = History(root)
    day = history.sums(RunFilter(since_at_ns=now_ns - RECENT_NS), By.USER)
    page = _template().render(
        seen=seen,
        problems=(*seen.problems, *history.problems),
        machine=seen.machine,
        root=root,
        host=(seen.view.host if seen.view is not None else "") or "spool",
        served=served,
        now_ns=now_ns,
        every=f"{every_s:g}",
        fresh=f"{max(_FRESH_S, 4 * every_s):.0f}" if served else 0,
        zone=time.strftime("%Z"),
        counts={state.value: seen.count(state) for state in State},
        running=seen.count(*ALIVE),
        runs=Shown([ListedJob(row, row.name) for row in runs[:MOST_RUNS]], max(0, len(runs) - MOST_RUNS)),
        waiting=_shown(spool, [row for row in rows if row.state not in (*ALIVE, *held)], MOST_WAITING),
        held=_shown(spool, [row for row in rows if row.state in held], MOST_HELD),
        last=(last := folded(spool, seen.ended, OUTCOMES)[:MOST_ENDED]),
        lines=dict(_last_lines(spool, last)) if private else {},
        users={row.name: row.user or "?" for row in runs},
        on_gpu={
            row.name: ranges_of([one.gpu.index for one in seen.gpus if row.name in one.jobs], ", ") for row in runs
        },
        elsewhere=_elsewhere(seen),
        day=day,
        day_users=_users(day),
        timeline=_timeline(spool, seen, now_ns),
    )
    return f"<!doctype html>\n{page}\n".encode()


def _shown(spool: Spool, rows: Sequence[JobRow], most: int) -> Shown:
    jobs = folded(spool, rows[:_FOLDED])[:most]
    return Shown(jobs, len(rows) - sum(job.count for job in jobs))


def _last_lines(spool: Spool, jobs: Sequence[ListedJob]) -> Iterator[tuple[str, tuple[JobRow, Sequence[str], bool]]]:
    """Yield the last lines of each that failed, or of a failed task of it; whose they are, and if its log has them."""
    for name, row in ((job.name, job.row) for job in jobs if job.row.state in FAILURES):
        with suppress(OSError, SpoolError):  # they are an extra
            tasks = tasks_of(spool, name) if row.array else None
            one = next(each for each in (*(tasks.rows if tasks is not None else ()), row) if each.state in FAILURES)
            if one.run is not None and (lines := last_words_of(spool, one.name, one.run)):
                yield name, (one, lines, os.path.exists(spool.layout.record(one.name, one.run, JOB_LOG)))


def _elsewhere(seen: Overview) -> tuple[int, ...]:
    """Return the CPUs, the memory and the GPUs of a shared machine that only others have."""
    machine = seen.machine
    if machine is None:
        return 0, 0, 0
    granted = machine.cpus - machine.cpus_free, machine.memory_bytes - machine.memory_free_bytes
    return elsewhere(seen.shared, *granted, sum(bool(gpu.jobs) for gpu in seen.gpus))


def _users(day: Statistics) -> list[tuple[str, Totals]]:
    users = [(user or "?", sums) for user, sums in day.groups]
    return sorted(users, key=lambda each: (-each[1].gpu_hours, -each[1].cpu_hours, each[0]))


def _timeline(spool: Spool, seen: Overview, now_ns: int) -> str:
    """Return the picture of the last day; "" if nothing ran, or nothing here draws."""
    drawing, machine = charts(), seen.machine
    if drawing is None or machine is None:
        return ""
    there = Machine(machine.cpus, machine.memory_bytes, gpus=tuple(each.gpu for each in seen.gpus))
    runs = timeline(spool, RunFilter(), Frame(_COLUMNS, _CPU_ROWS), now_ns, there)
    return drawing.runs(runs) if runs.runs else ""


@cache
def _template() -> Template:
    """Return the template, with the parts that are the same on each page."""
    found = Environment(autoescape=True, finalize=_visible, undefined=StrictUndefined)
    found.filters |= {filter_.__name__.removeprefix("_"): filter_ for filter_ in _FILTERS}
    style, script = _asset("page.css"), _asset("page.js")
    found.globals |= {
        "version": __version__,
        "style": style,
        "script": script,
        "look": sha256((style + script).encode()).hexdigest()[:12],  # differs for each version of the two
        "policy": f"default-src 'none'; style-src {_allowed(style)}; script-src {_allowed(script)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'",
        "MOST_USERS": MOST_USERS,
    }
    return found.from_string(re.sub(r"\n\s*", "", _asset("page.html")))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _allowed(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _visible(value: Any) -> Any:
    """Return the text of a value on the page, before it is escaped: None is empty, and controls are visible."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return shown(value)
    return "" if value is None else value


def _cut(text: str, most: int = _LONGEST) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _middle_cut(name: str) -> str:
    """Return a name, with the middle of a long one left out."""
    return short(name, _LONGEST_NAME, middle=True)


def _some(number: float, digits: int = 0) -> str:
    return f"{number:,.{digits}f}" if number else ""


def _duration(duration_ns: int | None) -> str:
    return show_duration(max(0, duration_ns)) if duration_ns is not None else ""


def _size(size_bytes: int | None) -> str:
    return show_size(size_bytes) if size_bytes else ""


def _unit(size_bytes: int) -> tuple[str, int]:
    """Return the unit in which a size has at least two digits, and its bytes."""
    for unit, power in (("TiB", 40), ("GiB", 30)):
        if size_bytes >= 10 << power:
            return unit, 1 << power
    return "MiB", 1 << 20


def _clock(at_ns: int | None, now_ns: int, *, seconds: bool = False) -> str:
    """Return the time of day in the time zone of the machine that wrote the page, with the day if it is another."""
    if at_ns is None:
        return ""
    at, now = time.localtime(at_ns // SECOND_NS), time.localtime(now_ns // SECOND_NS)
    clock = time.strftime("%H:%M:%S" if seconds else "%H:%M", at)
    return clock if at[:3] == now[:3] else f"{time.strftime('%-d %b', at)} {clock}"


def _date(at_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at_ns // SECOND_NS))


def _tone(state: State) -> str:
    """Return the class of a state in the style sheet."""
    return OUTCOMES[state].tone if state in OUTCOMES else state


def _percent(row: JobRow) -> int | None:
    """Return the progress that a run reports as a number, in percent."""
    done = part_done(row.progress)
    return round(100 * done) if done is not None else None


def _story(row: JobRow, now_ns: int) -> Iterator[str]:
    """Yield what is told of a run: its parameters, progress and times, why it is no plain run, and its GPUs' use."""
    yield _cut(", ".join(f"{key}={value}" for key, value in row.parameters), 120)
    yield row.progress
    if row.started_at_ns is not None and not row.array:
        limit = f" of {_duration(row.time_limit_ns)}" if row.time_limit_ns else ""
        yield f"{_duration(row.time_ns(now_ns))}{limit}"
    if row.left is not None and row.left.basis is not Basis.LIMIT:  # "ran 1h of 2h" says that already
        yield f"{row.left.words()} left"
    yield _cut(row.reason)
    if row.gpu_percent is not None:
        yield f"GPU {row.gpu_percent}% busy"


def _facts(day: Statistics) -> Iterator[tuple[str, str]]:
    sums = day.total
    for state, count in sorted(sums.ended.items(), key=lambda each: (each[0] != State.FINISHED, -each[1], each[0])):
        if count:
            yield f"{count:,}", state.replace("_", " ")
    yield f"{sums.cpu_hours:,.1f}", "CPU hours"
    if sums.gpu_hours:
        yield f"{sums.gpu_hours:,.1f}", "GPU hours"
    if sums.wait_median_ns is not None and sums.wait_p90_ns is not None:
        yield show_duration(sums.wait_median_ns), "median wait"
        yield show_duration(sums.wait_p90_ns), "wait at the 90th percentile"


# fmt: off
_FILTERS = (
    count_of, _clock, _cut, _date, _duration, _facts, _middle_cut, _percent, _size, _some, _story, _tone, _unit,
)
# fmt: on


class PageWriter(Listener):
    """Replaces the page as a whole. *config* returns the configuration in force."""

    name = "page"

    def __init__(self, root: str, config: Callable[[], Config]) -> None:
        self._root = root
        self._config = config
        self._disk = Disk(f"{root}/{STAGING}")
        self._overviews = OverviewReader(root)
        self._seen: Overview | None = None
        self._complaint = ""
        self._pause_s = EVERY_S
        self._next = 0.0  # monotonic: the next write

    def tick(self) -> float | None:
        """Write the page if its time has come."""
        path = page_path(self._config(), self._root)
        if path is not None and time.monotonic() >= self._next:
            self._write(path)
        return max(0.0, self._next - time.monotonic()) if path is not None else EVERY_S

    def close(self) -> None:
        """Write a last time: the dispatcher has left."""
        path = page_path(self._config(), self._root)
        if path is not None:
            self._write(path, served=False)

    def _write(self, path: str, *, served: bool = True) -> None:
        begun_ns = time.thread_time_ns()
        try:
            now_ns = time.time_ns()
            seen = self._overviews.look(now_ns) or self._seen
            assert seen is not None
            view = seen.view or (self._seen.view if self._seen is not None else None)  # the machine is still the same
            self._seen = replace(seen, view=view, at_ns=now_ns)
            private = path.startswith(f"{self._root}/")
            text = render(self._seen, self._root, self._pause_s, served=served, private=private)
            if private:
                self._disk.put(path, text)
            else:
                self._disk.put_beside(path, text, _EVERYBODYS)
            complaint = ""
        except (OSError, SpoolError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            complaint = f"cannot write the status page: {path}: {why}"
            if complaint != self._complaint:
                log.error("%s", complaint)
        self._complaint = complaint
        self._pause_s = max(EVERY_S, _SHARE * (time.thread_time_ns() - begun_ns) / SECOND_NS)
        self._next = time.monotonic() + self._pause_s


def _check(subject: Subject) -> Findings:
    path = page_path(subject.config, subject.root)
    if path is None:
        return
    if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK | os.X_OK):
        yield warn(f"{path} cannot be written", "fix `status_page` in config.toml")
    else:
        yield good(f"written to {path}")


CHECKS = (Check("status page", _check),)
"""The check, as a row of the doctor's table."""
