"""The status page as HTML: one document without anything outside of it, from values that say what is on it.

What users write reaches the document only through `tag`, which escapes it. Nothing in it has a style or a handler of
its own: the policy in its head allows one style sheet and one script, by their hashes.
"""

from __future__ import annotations

import html
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib import resources

from spool.core.accounting import By
from spool.core.errors import shown
from spool.core.gpus import stranger
from spool.core.model import SECOND_NS, State
from spool.core.reasons import count_of
from spool.core.units import show_duration, show_size
from spool.formats.state import GpuView
from spool.page.content import Day, PageContent, RunShown, Shown, UserDay
from spool.query.jobs import JobRow
from spool.query.tasks import ListedJob
from spool.query.timeline import LaneBar, Timeline, TimelineRow
from spool.version import __version__

_LONGEST = 400  # characters of a sentence
_LONGEST_NAME = 60  # characters of a name, before its middle is left out
_NO_JS_EVERY_S = 15
_MOST_POOLS = 6
_MOST_PROBLEMS = 8
_MOST_ON_A_GPU = 4
_VOID = frozenset({"meta"})
_LANE, _CPU = 18, 7  # heights of the rows of the timeline
_MOST_LANES = 24
_FEW_BARS = 40  # of a row: each tells what it is
_WIDE = 7  # percent: such a bar has room for a name
_COLOURS = 8


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """Return an element. Whatever is not Markup is escaped, its control characters and bidi controls made visible.

    `class_` is the attribute `class`, `data_x` is `data-x`; an attribute or a child that is None is left out.
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    inner = "".join(child if isinstance(child, Markup) else _escaped(child) for child in children if child is not None)
    return Markup(f"<{name}{told}>{inner}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """Return elements and texts, one after the other."""
    return Markup("".join(part if isinstance(part, Markup) else _escaped(part) for part in parts))


def _escaped(text: str) -> str:
    return html.escape(shown(text), quote=True)


def _cut(text: str, most: int = _LONGEST) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _named(name: str, **attributes: str | None) -> Markup:
    """Return a name, the middle of a long one left out; the whole is what a pointer sees."""
    if len(name) <= _LONGEST_NAME:
        return tag("span", name, **attributes)
    tail = _LONGEST_NAME // 3
    return tag("span", f"{name[: _LONGEST_NAME - tail]}…{name[-tail:]}", title=_cut(name), **attributes)


def render(content: PageContent, every_s: float, fresh_s: float) -> bytes:
    """Return the document. It looks for the next one *every_s*; after *fresh_s* without one it says that it is old."""
    where = content.host or "spool"
    sections = (
        _banners(content),
        _tiles(content),
        _gpus(content),
        _runs(content),
        _waiting("Waiting", content.waiting, content.at_ns, "Nothing is waiting."),
        _waiting(_held(content), content.held, content.at_ns, None),
        _day(content.day, content.at_ns),
        _users(content.day),
        _last(content.day, content.at_ns),
    )
    body = tag(
        "body", _header(content), tag("main", *filter(None, sections)), tag("footer", _footer(content)), _script()
    )
    title = tag("title", f"{_summary(content)} · {_cut(where, 80)}")
    refresh = tag("noscript", tag("meta", http_equiv="refresh", content=_NO_JS_EVERY_S))
    head = tag("head", _meta(), title, refresh, tag("style", Markup(_asset("page.css"))))
    written_ms = content.at_ns // 1_000_000
    fresh = f"{fresh_s:.0f}" if content.served else 0
    attributes = {"data_written": written_ms, "data_fresh": fresh, "data_every": f"{every_s:g}", "data_look": _look()}
    return f"<!doctype html>\n{tag('html', head, body, lang='en', **attributes)}\n".encode()


# What is the same on each page.


@cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _look() -> str:
    """Return what is another with each version of the style sheet and the script."""
    return sha256((_asset("page.css") + _asset("page.js")).encode()).hexdigest()[:12]


@cache
def _meta() -> Markup:
    allowed = {name: f"'sha256-{b64encode(sha256(_asset(name).encode()).digest()).decode()}'" for name in _ASSETS}
    policy = (
        f"default-src 'none'; style-src {allowed['page.css']}; script-src {allowed['page.js']}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )
    return joined(
        (
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("meta", name="robots", content="noindex"),
        )
    )


_ASSETS = ("page.css", "page.js")


def _script() -> Markup:
    return tag("script", Markup(_asset("page.js")))


# Above all.


def _summary(content: PageContent) -> str:
    running = sum(content.counts.get(state, 0) for state in (State.RUNNING, State.STARTING, State.STOPPING))
    submitted = content.counts.get(State.SUBMITTED, 0)
    there = f"{submitted} submitted, " if submitted else ""
    return f"{running} running, {there}{content.counts.get(State.QUEUED, 0)} waiting"


def _header(content: PageContent) -> Markup:
    if not content.served:
        pill = tag("span", "No dispatcher", class_="pill away")
    elif content.paused:
        pill = tag("span", "Paused", class_="pill paused")
    else:
        pill = tag("span", "Serving", class_="pill")
    clock = tag("time", _clock(content.at_ns, content.at_ns, seconds=True), title=_whole(content.at_ns))
    written = tag("span", " · written ", clock, " ", tag("span", class_="age"))
    return tag(
        "header",
        tag("h1", _cut(content.host or "spool", 80)),
        tag("span", _cut(content.spool, 200), class_="where"),
        tag("span", pill, written, class_="pulse"),
    )


def _banners(content: PageContent) -> Markup:
    found = [
        _banner(
            "bad",
            "This page is out of date: it is no longer being written. The dispatcher may have died: run ",
            tag("code", "spool info"),
            ".",
            id="stale",
        )
    ]
    if not content.served and content.active:
        told = f"No dispatcher is running, so nothing starts. Active jobs: {content.active}. Start one with "
        found.append(_banner("bad", told, tag("code", "spool dispatch"), "."))
    elif not content.served:
        told = "No dispatcher is running and no jobs are active. The next "
        found.append(_banner("", told, tag("code", "spool submit"), " starts one."))
    if content.paused:
        told = "The spool is paused: nothing starts, and running jobs continue. Resume with "
        found.append(_banner("warn", told, tag("code", "spool resume"), "."))
    if content.served and content.view_at_ns is None:
        found.append(_banner("", "The dispatcher has not listed the jobs yet."))
    if content.problems:
        items = [tag("li", _cut(problem)) for problem in content.problems[:_MOST_PROBLEMS]]
        if len(content.problems) > _MOST_PROBLEMS:
            more = f"and {len(content.problems) - _MOST_PROBLEMS} more: run "
            items.append(tag("li", more, tag("code", "spool doctor")))
        found.append(tag("div", tag("b", "Something is wrong"), tag("ul", *items), class_="banner bad"))
    return joined(found)


def _banner(kind: str, *told: str, **more: str) -> Markup:
    return tag("p", *told, class_=f"banner {kind}".strip(), **more)


def _tiles(content: PageContent) -> Markup:
    counts = content.counts
    running = sum(counts.get(state, 0) for state in (State.RUNNING, State.STARTING, State.STOPPING))
    tiles = [_tile("running", str(running)), _tile("waiting", str(counts.get(State.QUEUED, 0)))]
    held, invalid = counts.get(State.HELD, 0), counts.get(State.INVALID, 0)
    if submitted := counts.get(State.SUBMITTED, 0):
        tiles.insert(1, _tile("submitted", str(submitted)))
    if held:
        tiles.append(_tile("held", str(held)))
    if invalid:
        tiles.append(_tile("invalid", str(invalid)))
    machine = content.machine
    if machine is not None:
        tiles.append(_share("CPUs", machine.cpus - machine.cpus_free, machine.cpus))
        given = machine.memory_bytes - machine.memory_free_bytes
        tiles.append(_share("memory", given, machine.memory_bytes, bytes_=True))
        if content.gpus:
            given = sum(bool(gpu.jobs) for gpu in content.gpus) if content.gpus_watched else 0
            tiles.append(_share("GPUs", given, len(content.gpus)))
        for name, pool in list(machine.resources.items())[:_MOST_POOLS]:
            tiles.append(_share(_cut(name, 30), pool.granted, pool.total))
    return tag("div", *tiles, class_="tiles")


def _tile(what: str, number: str, *more: str) -> Markup:
    return tag("div", tag("b", Markup(number)), tag("span", what), *more, class_="tile")


def _share(what: str, given: int, total: int, *, bytes_: bool = False) -> Markup:
    if bytes_:
        unit, factor = next(
            ((unit, 1 << power) for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20)) if total >= 10 << power),
            ("MiB", 1 << 20),
        )
        number, rest, what = f"{given / factor:.0f}", f" / {total / factor:.0f}", f"{unit} of {what}"
    else:
        number, rest = str(given), f" / {total}"
    return _tile(what, joined((number, tag("small", rest))), _bar(given, total))


def _bar(part: float, whole: float, kind: str = "") -> Markup:
    percent = min(100.0, max(0.0, 100 * part / whole)) if whole > 0 else 0.0
    return tag("svg", tag("rect", width=f"{percent:.1f}%", height="100%"), class_=f"bar {kind}".strip(), role="img",
               aria_label=f"{percent:.0f} %")  # fmt: skip


def _section(title: str, note: str, *children: str, anchor: str) -> Markup:
    heading = tag("h2", title, tag("small", note) if note else None)
    return tag("section", heading, *children, id=anchor)


def _none(text: str) -> Markup:
    return tag("p", text, class_="none")


def _more(number: int, what: str) -> Markup | None:
    return tag("p", f"and {number:,} more {what}", class_="more") if number else None


# The machine.


def _gpus(content: PageContent) -> Markup | None:
    machine = content.machine
    if machine is None or (not content.gpus and machine.gpu_problem is None):
        return None
    users = {run.row.name: run.row.user or "?" for run in content.runs}
    cards = [_gpu(gpu, users) if content.gpus_watched else _unwatched(gpu) for gpu in content.gpus]
    problem = None
    if machine.gpu_problem is not None:
        problem = tag("p", f"What is free is unknown: {_cut(machine.gpu_problem)}", class_="banner warn")
    asked = "" if content.gpus_watched else "no job needs one; the dispatcher checks them when one does"
    if machine.gpus_at_ns is not None and content.at_ns - machine.gpus_at_ns > 60 * SECOND_NS:
        asked = f"as of {_clock(machine.gpus_at_ns, content.at_ns)}"
    return _section("GPUs", asked, *filter(None, (problem, tag("div", *cards, class_="gpus"))), anchor="gpus")


def _gpu(gpu: GpuView, users: Mapping[str, str]) -> Markup:
    rows: list[Markup] = []
    if gpu.memory_total_bytes is not None and gpu.memory_free_bytes is not None:
        used = gpu.memory_total_bytes - gpu.memory_free_bytes
        full = "full" if used > 0.95 * gpu.memory_total_bytes else ""
        of = f"{used / (1 << 30):.0f} / {show_size(gpu.memory_total_bytes)}"
        rows += [_bar(used, gpu.memory_total_bytes, full), tag("span", of)]
    if gpu.utilisation_percent is not None:
        rows += [_bar(gpu.utilisation_percent, 100), tag("span", f"{gpu.utilisation_percent} % busy")]
    told = [_holder(name, users.get(name), gpu.taken_bytes.get(name)) for name in gpu.jobs[:_MOST_ON_A_GPU]]
    if len(gpu.jobs) > _MOST_ON_A_GPU:
        told.append(tag("p", f"and {len(gpu.jobs) - _MOST_ON_A_GPU} more"))
    if gpu.problem is not None:
        told.append(tag("p", _cut(gpu.problem), class_="odd"))
    for each in gpu.foreign_processes[:_MOST_ON_A_GPU]:
        size = show_size(each.memory_bytes) if each.memory_bytes is not None else ""
        told.append(tag("p", _cut(stranger(each, size, each.user or ""), 120), class_="odd"))
    if not told:
        told.append(tag("p", "free", class_="free"))
    return tag("div", _gpu_name(gpu), tag("div", *rows, class_="use") if rows else None, *told, class_="gpu")


def _unwatched(gpu: GpuView) -> Markup:
    return tag("div", _gpu_name(gpu), tag("p", "no job"), class_="gpu")


def _gpu_name(gpu: GpuView) -> Markup:
    return tag("h3", f"GPU {gpu.index}", tag("span", _cut(gpu.name, 80), title=_cut(f"{gpu.name} {gpu.uuid}")))


def _holder(name: str, user: str | None, taken_bytes: int | None) -> Markup:
    more = [user or "", f"uses {show_size(taken_bytes)}" if taken_bytes is not None else ""]
    tail = ", ".join(filter(None, more))
    return tag("p", _named(name), tag("small", f" {_cut(tail, 80)}") if tail else None)


# The jobs.


def _table(kind: str, heads: Sequence[tuple[str, str]], rows: Iterable[Sequence[Markup]]) -> Markup:
    """Return a table; each head is its text and its class."""
    head = tag("thead", tag("tr", *(tag("th", text, class_=name or None, scope="col") for text, name in heads)))
    return tag("table", head, tag("tbody", *(tag("tr", *cells) for cells in rows)), class_=kind)


def _runs(content: PageContent) -> Markup:
    if not content.runs:
        return _section("Running", "", _none("Nothing is running."), anchor="running")
    heads = (("Job", ""), ("User", ""), ("CPUs", "n"), ("Memory", "n"), ("On GPU", "n"), ("Time", ""))
    table = _table("wide", heads, (_run(run, content.at_ns) for run in content.runs))
    return _section("Running", "", table, *filter(None, [_more(content.runs_left_out, "")]), anchor="running")


def _run(run: RunShown, now_ns: int) -> list[Markup]:
    row = run.row
    marks = [tag("span", "array", class_="tag")] if run.is_array else []
    if row.suspended_at_ns is not None:
        marks.append(tag("span", "suspended", class_="tag"))
    if row.state is not State.RUNNING:
        marks.append(tag("span", row.state.value, class_="tag"))
    if row.attempt is not None and row.attempt > 1:
        marks.append(tag("span", f"attempt {row.attempt}", class_="tag"))
    on = _ranges(run.gpus) if run.gpus else count_of(row.gpus, "GPU") if row.gpus and not run.is_array else ""
    cells = _cpus_and_memory(row) if not run.is_array else [tag("td", class_="n")] * 2
    on_gpu = tag("td", on, class_="n", data_l="GPU")
    return [tag("td", _named(row.name), *marks, class_="name"), _user(row), *cells, on_gpu, _meter(run, now_ns)]


def _ranges(numbers: Iterable[int]) -> str:
    """Return "0-3, 6" for 0, 1, 2, 3 and 6."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _meter(run: RunShown, now_ns: int) -> Markup:
    row = run.row
    ran_ns = row.time_ns(now_ns) if row.started_at_ns is not None else None
    words, bars = [], []
    if run.percent is not None:
        bars.append(_bar(run.percent, 100))
    if ran_ns is not None and run.time_limit_ns and not run.is_array:
        words.append(f"{show_duration(ran_ns)} of {show_duration(run.time_limit_ns)}")
        late = "late" if ran_ns > 0.9 * run.time_limit_ns else ""
        bars.append(_bar(ran_ns, run.time_limit_ns, f"part {late}".strip() if bars else late))
    elif ran_ns is not None and not run.is_array:
        words.append(show_duration(ran_ns))
    words = [*filter(None, [run.progress]), *words, *filter(None, [_cut(row.reason)])]
    return tag("td", *bars, " · ".join(words), *(tag("div", busy) for busy in _busy(run)), class_="meter")


def _busy(run: RunShown) -> Iterator[str]:
    now, mean = run.row.gpu_percent, run.gpu_mean_percent
    if now is not None:
        yield f"GPU {now} % busy" + (f", {mean} % on average" if mean is not None else "")
    elif mean is not None:
        yield f"GPU {mean} % busy on average"


def _cpus_and_memory(row: JobRow) -> list[Markup]:
    memory = show_size(row.memory_bytes) if row.memory_bytes is not None else ""
    return [
        tag("td", str(row.cpus) if row.cpus is not None else "", class_="n", data_l="CPUs"),
        tag("td", memory, class_="n"),
    ]


def _user(row: JobRow) -> Markup:
    project = tag("span", _cut(row.project, 40), class_="tag") if row.project else None
    return tag("td", _cut(row.user or "", 40), project, class_="user")


def _held(content: PageContent) -> str:
    return "Held and invalid" if content.counts.get(State.INVALID) else "Held"


def _waiting(title: str, jobs: Shown, now_ns: int, otherwise: str | None) -> Markup | None:
    anchor = title.partition(" ")[0].lower()
    if not jobs.total:
        return _section(title, "", _none(otherwise), anchor=anchor) if otherwise is not None else None
    heads = (("Job", ""), ("User", ""), ("CPUs", "n"), ("Memory", "n"), ("GPUs", "n"), ("Waited", "n"), ("Why", ""))
    rows = []
    for job in jobs.jobs:
        row = job.row
        marks = [tag("span", f"{job.count} tasks", class_="tag")] if job.count > 1 else []
        if row.state in (State.INVALID, State.SUBMITTED):
            marks.append(tag("span", row.state.value, class_="tag"))
        waited_ns = row.time_ns(now_ns)
        since = tag("td", show_duration(max(0, waited_ns)) if waited_ns is not None else "", class_="n", data_l="for")
        name = tag("td", _named(job.name), *marks, class_="name")
        gpus = tag("td", str(row.gpus) if row.gpus else "", class_="n", data_l="GPUs")
        why = tag("td", _cut(row.reason), class_="why")
        rows.append([name, _user(row), *_cpus_and_memory(row), gpus, since, why])
    note = "in the order of their priority and age" if title == "Waiting" else ""
    table = _table("wide", heads, rows)
    return _section(title, note, table, *filter(None, [_more(jobs.left_out, "")]), anchor=anchor)


# The last day.


def _day(day: Day, now_ns: int) -> Markup | None:
    ended = sum(day.outcomes.values())
    parts: list[Markup] = []
    if ended:
        facts = list(_use(day.timeline)) if day.timeline is not None else []
        facts.append((f"{day.cpu_hours:,.1f}", "CPU hours"))
        if day.gpu_hours:
            facts.append((f"{day.gpu_hours:,.1f}", "GPU hours"))
        if day.wait_median_ns is not None and day.wait_p90_ns is not None:
            facts.append((show_duration(day.wait_median_ns), "median wait"))
            facts.append((show_duration(day.wait_p90_ns), "wait at the 90th percentile"))
        parts.append(tag("div", *(tag("div", tag("b", number), f" {what}") for number, what in facts), class_="facts"))
        parts.append(_outcomes(day.outcomes, ended))
        if day.cut:
            parts.append(tag("p", "More runs have ended than are counted here.", class_="more"))
    else:
        parts.append(_none("No run has ended in the last 24 hours."))
    if day.timeline is not None:
        parts = [_timeline(day.timeline), *parts]
    note = "1 run has ended" if ended == 1 else f"{ended:,} runs have ended" if ended else ""
    return _section("Last 24 hours", note, *parts, anchor="day")


def _use(line: Timeline) -> Iterator[tuple[str, str]]:
    """Yield how much of the machine was given to jobs on average."""
    for what, curve, there_are in (("CPUs", line.cpus_used, line.cpus), ("GPUs", line.gpus_used, line.gpus)):
        if there_are:
            yield f"{100 * curve.mean / there_are:.0f} %", f"of the {what} in use on average"


def _timeline(line: Timeline) -> Markup:
    """Return who had which GPU and how many CPUs when, as rows over a common time, and what the colours mean."""
    ticks = list(_ticks(line))
    lanes = []
    rows = line.gpu_rows
    if len(rows) > _MOST_LANES:  # without what shared a GPU with others
        rows = tuple(row for row in rows if not row.track)[:_MOST_LANES]
    for row in rows:
        bars = [_lane_bar(line, row, bar, 0, _LANE) for bar in row.bars]
        lanes.append(_lane(row.label if not row.track else "", _LANE, [*_grid(ticks), *bars]))
    if len(rows) < len(line.gpu_rows):
        lanes.append(_lane("", 16, [tag("text", f"and {len(line.gpu_rows) - len(rows)} more rows", y=12)], "axis"))
    bars = [_lane_bar(line, row, bar, at * _CPU, _CPU) for at, row in enumerate(line.cpu_rows) for bar in row.bars]
    lanes.append(_lane("CPUs", len(line.cpu_rows) * _CPU, [*_grid(ticks), *bars]))
    hours = [
        tag("text", time.strftime("%H:%M", local), x=f"{at:.2f}%", y=12, text_anchor="middle", class_=kind)
        for at, local, kind in ticks
        if 2 < at < 98
    ]
    lanes.append(_lane("", 16, hours, "axis"))
    keys = [tag("span", _key(_colour(line, group)), _cut(_word(group), 40)) for group in line.groups]
    return joined((*lanes, tag("div", *keys, class_="legend")))


def _lane(label: str, height: int, inner: Iterable[Markup], kind: str = "") -> Markup:
    return tag("div", tag("span", label), tag("svg", *inner, height=height), class_=f"lane {kind}".strip())


def _lane_bar(line: Timeline, row: TimelineRow, bar: LaneBar, y: int, height: int) -> Markup:
    """Return a stretch of a lane in the colour of its group; a long one on a GPU has the name of the job in it."""
    share = 100 * line.step_ns / (line.until_at_ns - line.since_at_ns)  # of a column
    first, width = bar.first * share, (bar.last - bar.first) * share
    colour = _colour(line, line.group_of(bar.run))
    place = {"x": f"{first:.2f}%", "width": f"{width:.2f}%", "y": y or None, "height": height - 1 if y else height}
    title = _bar_title(line, bar) if bar.last - bar.first > 1 or len(row.bars) < _FEW_BARS else None
    opacity = None if bar.busy >= 1 else f"{0.3 + 0.7 * bar.busy:.2f}"
    drawn = tag("rect", title, class_=colour, fill_opacity=opacity, **place)
    if height < _LANE or width < _WIDE or not bar.alone:
        return drawn
    name = tag(
        "text", _cut(bar.run.job, _LONGEST_NAME), x=5, y=height - 5, class_="in" if width > 2 * _WIDE else "in minor"
    )
    return joined((drawn, tag("svg", name, x=f"{first:.2f}%", width=f"{width:.2f}%", height=height)))


def _colour(line: Timeline, group: str) -> str:
    """Return the class of a group: a state has the colour that it has everywhere."""
    return group if line.by is By.STATE else f"k{min(line.groups.index(group), _COLOURS - 1)}"


def _bar_title(line: Timeline, bar: LaneBar) -> Markup:
    run = bar.run
    until = _clock(run.ended_at_ns, line.at_ns) if run.ended_at_ns is not None else "now"
    more = "" if bar.alone else " and others"
    when = f"{_clock(run.started_at_ns, line.at_ns)} to {until}"
    return tag("title", f"{_cut(run.job, 120)}{more}, {_cut(run.user or '?', 40)}, {when}")


def _ticks(line: Timeline) -> Iterator[tuple[float, time.struct_time, str]]:
    """Yield each third hour of the clock in the period: where it is in percent, when, and how important it is."""
    hour_ns = 3600 * SECOND_NS
    first = -(-line.since_at_ns // (hour_ns // 4))
    for quarter in range(first, line.until_at_ns // (hour_ns // 4) + 1):  # zones differ by quarters of an hour
        at_ns = quarter * (hour_ns // 4)
        local = time.localtime(at_ns // SECOND_NS)
        if local.tm_min == 0 and local.tm_hour % 3 == 0:
            at = 100 * (at_ns - line.since_at_ns) / (line.until_at_ns - line.since_at_ns)
            yield at, local, "minor" if local.tm_hour % 6 else "major"


def _grid(ticks: Iterable[tuple[float, time.struct_time, str]]) -> Iterator[Markup]:
    for at, _, kind in ticks:
        if kind == "major":
            yield tag("line", x1=f"{at:.2f}%", x2=f"{at:.2f}%", y1=0, y2="100%")


def _key(colour: str) -> Markup:
    return tag("svg", tag("rect", width="100%", height="100%", class_=colour), aria_hidden="true")


def _outcomes(outcomes: Mapping[str, int], ended: int) -> Markup:
    there = [(word, count) for word, count in sorted(outcomes.items(), key=_most_first) if count]
    at, parts, legend = 0.0, [], []
    for word, count in there:
        width = 100 * count / ended
        label = f"{count:,} {_word(word)}"
        place = {"x": f"{at:.2f}%", "width": f"{width:.2f}%", "height": "100%"}
        parts.append(tag("rect", tag("title", label), class_=word, **place))
        legend.append(tag("span", _key(word), label))
        at += width
    told = ", ".join(f"{count} {_word(word)}" for word, count in there)
    split = tag("svg", *parts, class_="split", role="img", aria_label=told)
    return joined((split, tag("div", *legend, class_="legend")))


def _most_first(outcome: tuple[str, int]) -> tuple[bool, int, str]:
    return outcome[0] != State.FINISHED, -outcome[1], outcome[0]


def _word(state: str) -> str:
    return state.replace("_", " ")


def _users(day: Day) -> Markup | None:
    if not day.users:
        return None
    numbers = _NUMBERS if any(user.gpu_hours for user in day.users) else _NUMBERS[:-2]
    heads = [("User", ""), *((head, "n") for head, _, _ in numbers)]
    rows = (
        [
            tag("td", _cut(user.user, 40), class_="name"),
            *(tag("td", told(user), class_="n", data_l=label) for _, label, told in numbers),
        ]
        for user in day.users
    )
    more = _more(day.users_left_out, "")
    return _section("Users", "last 24 hours", _table("wide", heads, rows), *filter(None, [more]), anchor="users")


def _some(number: int) -> str:
    return f"{number:,}" if number else ""


_NUMBERS: tuple[tuple[str, str, Callable[[UserDay], str]], ...] = (
    ("Running", "running", lambda user: _some(user.running)),
    ("Waiting", "waiting", lambda user: _some(user.waiting)),
    ("Ended", "ended", lambda user: _some(user.ended)),
    ("Failed", "failed", lambda user: _some(user.failed)),
    (
        "Median wait",
        "median wait",
        lambda user: show_duration(user.wait_median_ns) if user.wait_median_ns is not None else "",
    ),
    ("CPU hours", "CPU hours", lambda user: f"{user.cpu_hours:,.1f}" if user.cpu_hours else ""),
    ("GPU hours", "GPU hours", lambda user: f"{user.gpu_hours:,.1f}" if user.gpu_hours else ""),
    ("GPU busy", "GPU busy", lambda user: f"{100 * user.gpu_busy:.0f} %" if user.gpu_busy is not None else ""),
)


def _last(day: Day, now_ns: int) -> Markup | None:
    if not day.last:
        return None
    heads = (("Job", ""), ("User", ""), ("Outcome", ""), ("Ended", "n"), ("Ran", "n"), ("Why", ""))
    table = _table("wide", heads, (_ended(one, now_ns) for one in day.last))
    return _section("Recently ended", "", table, anchor="ended")


def _ended(job: ListedJob, now_ns: int) -> list[Markup]:
    row = job.row
    marks = [tag("span", f"{job.count} tasks", class_="tag")] if job.count > 1 else []
    ended = _clock(row.ended_at_ns, now_ns) if row.ended_at_ns is not None else ""
    ran_ns = row.time_ns(now_ns) if row.started_at_ns is not None and job.count == 1 else None
    ran = show_duration(max(0, ran_ns)) if ran_ns is not None else ""
    busy = f"GPU {row.gpu_percent} % busy" if row.gpu_percent is not None and job.count == 1 else ""
    return [
        tag("td", _named(job.name), *marks, class_="name"),
        tag("td", _cut(row.user or "", 40), class_="user"),
        tag("td", tag("span", _word(row.state), class_=f"say {row.state}"), class_="outcome"),
        tag("td", ended, class_="n", data_l="ended"),
        tag("td", ran, class_="n", data_l="ran"),
        tag("td", " · ".join(filter(None, (_cut(row.reason), busy))), class_="why"),
    ]


def _footer(content: PageContent) -> str:
    return f"spool {__version__} · times are those of {content.host or 'this machine'}, {time.strftime('%Z')}"


def _clock(at_ns: int, now_ns: int, *, seconds: bool = False) -> str:
    """Return the time of day of the machine that wrote the page, and the day where it is another."""
    at, now = time.localtime(at_ns // SECOND_NS), time.localtime(now_ns // SECOND_NS)
    clock = time.strftime("%H:%M:%S" if seconds else "%H:%M", at)
    return clock if at[:3] == now[:3] else f"{time.strftime('%-d %b', at)} {clock}"


def _whole(at_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at_ns // SECOND_NS))
