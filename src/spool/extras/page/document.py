"""The status page as HTML: one self-contained document, made from the values of its content.

The page is a template, `page.html`; this module makes the words and numbers for it. All of them are escaped, and their
control characters and bidi controls made visible. No element has a style or a handler of its own: the policy in its
head allows one style sheet and one script, by their hashes.
"""

from __future__ import annotations

import re
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from importlib import resources
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from spool.cli.render import charts
from spool.core.errors import shown
from spool.core.gpus import stranger
from spool.core.model import ALIVE, SECOND_NS, ForeignProcess, State
from spool.core.reasons import count_of, ranges_of
from spool.core.runtimes import Basis
from spool.core.units import show_duration, show_size
from spool.extras.page.content import Day, PageContent, RunShown
from spool.query.rows import JobRow
from spool.query.shared import lease_words, pools_of
from spool.version import __version__

_LONGEST = 400  # characters of a sentence
_LONGEST_NAME = 60  # characters of a name, before its middle is left out
_HIGH = 20  # of a curve, in its own units


def render(content: PageContent, every_s: float, fresh_s: float) -> bytes:
    """Return the document. It looks for the next one *every_s*; after *fresh_s* without one it says that it is old."""
    runs, drawing = content.day.timeline, charts()
    page = _template().render(
        timeline=drawing.runs(runs) if runs is not None and drawing is not None else "",
        content=content,
        now_ns=content.at_ns,
        host=content.host or "spool",
        every=f"{every_s:g}",
        fresh=f"{fresh_s:.0f}" if content.served else 0,
        running=sum(content.counts.get(state, 0) for state in ALIVE),
        users={run.row.name: run.row.user or "?" for run in content.runs},
        gpus_note=_gpus_note(content),
        elsewhere=_elsewhere(content),
        zone=time.strftime("%Z"),
    )
    return f"<!doctype html>\n{page}\n".encode()


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
    tail = _LONGEST_NAME // 3
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - tail]}…{name[-tail:]}"


def _words(state: str) -> str:
    return state.replace("_", " ")


def _some(number: int) -> str:
    return f"{number:,}" if number else ""


def _hours(number: float) -> str:
    return f"{number:,.1f}" if number else ""


def _wide(percent: float) -> str:
    return f"{percent:.2f}%"


def _duration(duration_ns: int | None) -> str:
    return show_duration(max(0, duration_ns)) if duration_ns is not None else ""


def _size(size_bytes: int | None) -> str:
    return show_size(size_bytes) if size_bytes is not None else ""


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


def _gpus_note(content: PageContent) -> str:
    asked_ns = content.machine.gpus_at_ns if content.machine is not None else None
    if asked_ns is not None and content.at_ns - asked_ns > 60 * SECOND_NS:
        return f"as of {_clock(asked_ns, content.at_ns)}"
    return "" if content.gpus_watched else "no job needs one; the dispatcher checks them when one does"


def _strange(process: ForeignProcess) -> str:
    return stranger(process, _size(process.memory_bytes))


def _elsewhere(content: PageContent) -> tuple[int, int, int]:
    """Return the CPUs, the memory and the GPUs of a shared machine that only others have."""
    shared, machine = content.shared, content.machine
    if shared is None or machine is None:
        return 0, 0, 0
    return (
        shared.cpus_elsewhere(machine.cpus - machine.cpus_free),
        shared.memory_elsewhere_bytes(machine.memory_bytes - machine.memory_free_bytes),
        shared.gpus_elsewhere(sum(bool(gpu.jobs) for gpu in content.gpus)),
    )


def _on_gpus(run: RunShown) -> str:
    """Return the indices of a run's GPUs, "0-3, 6", or their number."""
    if not run.gpus:
        return count_of(run.row.gpus, "GPU") if run.row.gpus and not run.row.array else ""
    return ranges_of(run.gpus, ", ")


def _parameters(row: JobRow) -> str:
    return _cut(", ".join(f"{key}={value}" for key, value in row.parameters), 120)


def _left(row: JobRow) -> str:
    """Return the time that remains; with a limit alone, "ran 1h of 2h" says it already."""
    return f"{row.left.words()} left" if row.left is not None and row.left.basis is not Basis.LIMIT else ""


def _busy(run: RunShown) -> Iterator[str]:
    now, mean = run.row.gpu_percent, run.gpu_mean_percent
    if now is not None:
        yield f"GPU {now}% busy" + (f", {mean}% on average" if mean is not None else "")
    elif mean is not None:
        yield f"GPU {mean}% busy on average"


def _curve(numbers: Sequence[int | None], most: float) -> str:
    """Return the outline of *numbers* in steps as an SVG path, *most* of them high; unknown ones are gaps."""
    drawn, at = "", 0
    for known, group in groupby(numbers, lambda number: number is not None):
        steps = [min(1.0, (number or 0) / most) * _HIGH if most else 0 for number in group]
        if known:
            drawn += f"M{at} {_HIGH}" + "".join(f"V{_HIGH - step:.1f}h1" for step in steps) + f"V{_HIGH}Z"
        at += len(steps)
    return drawn


def _facts(day: Day) -> Iterator[tuple[str, str]]:
    sums = day.totals
    yield f"{sums.cpu_hours:,.1f}", "CPU hours"
    if sums.gpu_hours:
        yield f"{sums.gpu_hours:,.1f}", "GPU hours"
    if sums.wait_median_ns is not None and sums.wait_p90_ns is not None:
        yield show_duration(sums.wait_median_ns), "median wait"
        yield show_duration(sums.wait_p90_ns), "wait at the 90th percentile"


def _outcomes(day: Day) -> Iterator[dict[str, object]]:
    """Yield the outcomes of runs, finished ones first: their number, and their share of a line in percent."""
    at, outcomes = 0.0, day.totals.outcomes
    for state, count in sorted(outcomes.items(), key=lambda each: (each[0] != State.FINISHED, -each[1], each[0])):
        if count:
            width = 100 * count / sum(outcomes.values())
            yield {"state": state, "word": _words(state), "count": count, "at": at, "width": width}
            at += width


# fmt: off
_FILTERS = (
    _busy, _clock, _curve, _cut, _date, _duration, _facts, _hours, _left, _middle_cut,
    _on_gpus, _outcomes, _parameters, _size, _some, _strange, _unit, _wide, _words, lease_words,
    pools_of,
)
# fmt: on
