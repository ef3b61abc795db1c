"""`spool ls`: the jobs of a spool."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice

import click
from msgspec import Struct
from msgspec.structs import replace

from spool.cli import render
from spool.cli.group import Verb, job_name, json_option, moment_of, states_of, states_option, viewed
from spool.cli.render import tell
from spool.core.arrays import array_of
from spool.core.errors import ExitCode, shown
from spool.core.layout import is_pattern
from spool.core.model import BAD, State
from spool.core.reasons import pools_in_words, some_of
from spool.core.units import show_duration
from spool.formats.wire import render_instant
from spool.query.jobs import list_jobs
from spool.query.listing import ListedJob, folded, tasks_of, tree, with_outlook
from spool.query.rows import ORDERS, JobFilter, JobList, JobRow, by_value, with_metrics, with_progress
from spool.store.disk import is_yet_to_be_made
from spool.store.spool import Spool

_WATCH_S = 2.0
_MOST_VALUES = 8  # parameters and metrics with a column each
_UNFOLDED = 200  # tasks of an array that was named; up to that many have a line each
_MARGIN = 6  # terminal lines for the head of the table and for remarks


class JobField(Struct, frozen=True):
    """A column for --columns: its layout, and its text for a job at an instant."""

    column: render.Column
    text: Callable[[ListedJob, int], str]


def _reason(one: ListedJob, now_ns: int) -> str:
    row = one.row
    head = f"{one.count} tasks" if one.count > 1 else ""
    if row.ended_at_ns is None:
        again = f"attempt {row.attempt}" if row.attempt is not None and row.attempt > 1 else ""
        said = "; ".join(part for part in (row.reason, again) if part) if again else row.reason
        return ": ".join(part for part in (head, said) if part) if head else said
    ago = f"{show_duration(max(0, now_ns - row.ended_at_ns))} ago"
    return ", ".join(part for part in (head, row.reason, ago) if part)


def _values(what: str) -> Callable[[ListedJob, int], str]:
    """Return the text for the parameters or metrics of a task; several tasks in one line differ in theirs."""
    return lambda one, now_ns: render.parameters(getattr(one.row, what)) if one.count == 1 else ""


FIELDS = {
    "name": JobField(render.Column("NAME", cut="middle"), lambda one, now_ns: one.name),
    "state": JobField(render.Column("STATE"), lambda one, now_ns: one.row.state.value),
    "priority": JobField(render.Column("PRIO", right=True, drop=6), lambda one, now_ns: render.count(one.row.priority)),
    "cpus": JobField(render.Column("CPU", right=True, drop=2), lambda one, now_ns: render.count(one.row.cpus)),
    "cpu_list": JobField(render.Column("CPUS", cut="end", drop=2), lambda one, now_ns: one.row.cpu_list),
    "memory": JobField(render.Column("MEM", right=True, drop=4), lambda one, now_ns: render.size(one.row.memory_bytes)),
    "gpus": JobField(render.Column("GPU", right=True, drop=3), lambda one, now_ns: render.count(one.row.gpus or None)),
    "busy": JobField(
        render.Column("BUSY", right=True, drop=3),
        lambda one, now_ns: "" if one.row.gpu_percent is None else f"{one.row.gpu_percent}%",
    ),
    "user": JobField(render.Column("USER", cut="middle", drop=5), lambda one, now_ns: one.row.user or ""),
    "time": JobField(
        render.Column("TIME", right=True, drop=1), lambda one, now_ns: render.duration(one.row.time_ns(now_ns))
    ),
    "left": JobField(render.Column("LEFT", right=True, drop=1), lambda one, now_ns: one.row.outlook(now_ns)),
    "progress": JobField(render.Column("PROGRESS", right=True, drop=1), lambda one, now_ns: one.row.progress),
    "reason": JobField(render.Column("REASON", cut="end"), _reason),
    "project": JobField(render.Column("PROJECT", cut="middle"), lambda one, now_ns: one.row.project or ""),
    "tags": JobField(render.Column("TAGS", cut="end"), lambda one, now_ns: ",".join(one.row.tags)),
    "resources": JobField(
        render.Column("RESOURCES", cut="end"), lambda one, now_ns: pools_in_words(one.row.resources.items())
    ),
    "run": JobField(render.Column("RUN", right=True), lambda one, now_ns: render.count(one.row.run)),
    "attempt": JobField(render.Column("ATTEMPT", right=True), lambda one, now_ns: render.count(one.row.attempt)),
    "exit": JobField(render.Column("EXIT", right=True), lambda one, now_ns: render.count(one.row.exit_code)),
    "submitted": JobField(render.Column("SUBMITTED"), lambda one, now_ns: render.moment(one.row.submitted_at_ns)),
    "started": JobField(render.Column("STARTED"), lambda one, now_ns: render.moment(one.row.started_at_ns)),
    "ended": JobField(render.Column("ENDED"), lambda one, now_ns: render.moment(one.row.ended_at_ns)),
    "node": JobField(render.Column("NODE", cut="middle"), lambda one, now_ns: one.row.node or ""),
    "parameters": JobField(render.Column("PARAMETERS", cut="end", drop=1), _values("parameters")),
    "metrics": JobField(render.Column("METRICS", cut="end", drop=1), _values("metrics")),
}
_KNOWN = f"{', '.join(FIELDS)}, and param:KEY and metric:KEY for one value"
COLUMNS = tuple(FIELDS)
"""The columns that `--columns` may name."""
_FULLY = ("parameters", "metrics", "left")  # these need a closer look at each job
_BY_FORM = {"json": COLUMNS, "csv": COLUMNS, "table": ("progress",)}
_USUAL = ("name", "state", "priority", "cpus", "memory", "gpus", "user", "time", "reason")
_ALIASES = {"params": "parameters"}
_VALUES = {"param": "parameters", "metric": "metrics"}
"""Before the colon of a column for one value, "param:lr" or "metric:loss" -> the field that has it."""


def _of_value(word: str) -> bool:
    """Whether *word* names the column of one parameter or metric."""
    kind, colon, key = word.partition(":")
    return kind in _VALUES and bool(colon and key)


def field_of(word: str) -> JobField:
    """Return the column of that name."""
    if not _of_value(word):
        return FIELDS[word]
    kind, _, key = word.partition(":")

    def text(one: ListedJob, now_ns: int) -> str:
        return dict(getattr(one.row, _VALUES[kind])).get(key, "") if one.count == 1 else ""

    return JobField(render.Column(key.upper(), cut="middle", drop=1), text)


def _columns(ctx: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Return the columns that --columns names."""
    if text is None:
        return ()
    said = tuple(word.strip() for word in text.split(",") if word.strip())
    words = tuple(word if _of_value(word) else _ALIASES.get(word.lower(), word.lower()) for word in said)
    for word in words:
        if word not in FIELDS and not _of_value(word):
            raise click.UsageError(f"unknown column {shown(word)!r}; the columns are {_KNOWN}")
    if not words:
        raise click.UsageError(f"--columns is empty; the columns are {_KNOWN}")
    return words


@click.command(cls=Verb)
@click.argument("names", nargs=-1, metavar="[NAMES]...")
@click.option(
    "-a", "--all", "everything", is_flag=True, help="All ended jobs instead of the last ten, and each array task."
)
@click.option("-n", "recent", type=click.IntRange(0), metavar="N", help="The last N ended jobs instead of ten.")
@click.option("--since", metavar="TIME", help='Jobs that ended since: "2h" (ago), 0:00, friday, a date.')
@states_option
@click.option("-u", "--user", metavar="USER", help="Only this user's jobs.")
@click.option("--project", metavar="NAME", help="Only jobs in this project.")
@click.option("--tag", metavar="TAG", help="Only jobs with this tag.")
@click.option("--sort", type=click.Choice(sorted(ORDERS)), help="Sort order. Default: ended, running, waiting.")
@click.option("--columns", metavar="NAME,...", callback=_columns, help=f"Only these columns: {_KNOWN}.")
@click.option(
    "--by", metavar="KEY", help="Tasks in the order of this parameter, with its values, metrics or last line of output."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV: every column, or those of --columns.")
@click.option(
    "--tree", "as_tree", is_flag=True, help="Show each job below its dependencies, and each task below its array."
)
@click.option("--watch", is_flag=True, help="Refresh the list every two seconds, until Ctrl-C.")
@click.option("-q", "--quiet", is_flag=True, help="Print only names, one per line.")
@click.option("--plan", is_flag=True, expose_value=False, help="What would start now, what waits, why, and until when.")
@json_option
@click.pass_obj
def command(
    root: str,
    names: tuple[str, ...],
    everything: bool,
    recent: int | None,
    since: str | None,
    states: tuple[str, ...],
    user: str | None,
    project: str | None,
    tag: str | None,
    sort: str | None,
    columns: tuple[str, ...],
    by: str | None,
    as_csv: bool,
    as_tree: bool,
    watch: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """List jobs that are waiting, running or recently ended. An array that has ended is one line.

    TIME is how long a job has waited, has run, or ran. NAMES may be globs; the name of an array lists its tasks. A
    terminal shows one line for each job, one for all waiting tasks of an array, the PARAMETERS of a task in a matrix,
    the progress of runs that report it (the last percentage of tqdm, or the file `progress` in their metadir), and how
    BUSY the GPUs of a run are (for an ended job, the average); a pipe gets everything.

    LEFT is the time that remains of a run by its own progress, else `~` by similar runs, else `≤` until its time limit;
    for a job that waits it is when it starts by the plan (`in ~` by a guess), and `-` if that is unknown.

      spool ls
      spool ls 'sweep_*' -s failed,timeout -q | xargs spool requeue
      spool ls --since 0:00 --columns name,state,exit,ended

    `--by lr` lists tasks in the order of their parameter lr, with the outcome, the metrics (`key = value` lines in the
    file `metrics` of their metadir) or else the last line of output, and which values failed.

      spool ls sweep --by lr
      spool ls sweep --columns name,state,param:lr,metric:loss

    By hand: ls queued held running done
    """
    if by is not None and (as_tree or sort is not None or quiet):
        raise click.UsageError("--by cannot be combined with --tree, --sort or --quiet")
    form = _form(json=as_json, names=quiet, csv=as_csv, tree=as_tree)
    if watch and (form not in ("table", "tree") or not sys.stdout.isatty()):
        raise click.UsageError("--watch needs a terminal; in a script call `spool ls` repeatedly")
    since_ns = moment_of("--since", since, time.time_ns())
    only = tuple(name if is_pattern(name) else job_name(name) for name in names)
    wanted = JobFilter(only, states_of(states), user, project, tag, recent, since_ns)
    asked = _Asked(wanted, everything, sort, columns, form, watch, by)
    spool = viewed(root)
    while watch:
        _show(spool, asked)
        sys.stdout.flush()
        time.sleep(_WATCH_S)
    gc.disable()  # it takes a quarter of the time of a long list, in which nothing is garbage
    try:
        return _show(spool, asked)
    finally:
        gc.enable()


def _form(**wanted: bool) -> str:
    """Return the form of the list that the options name."""
    named = [form for form, is_wanted in wanted.items() if is_wanted]
    if len(named) > 1:
        raise click.UsageError("--csv, --json, --quiet and --tree cannot be combined")
    return named[0] if named else "table"


class _Asked(Struct, frozen=True):
    """The content of a list, and its form."""

    wanted: JobFilter
    everything: bool
    order: str | None
    columns: tuple[str, ...]
    form: str
    watch: bool
    by: str | None = None  # a parameter of tasks


def _show(spool: Spool, asked: _Asked) -> int:
    """Read the spool, print the list once, and return the exit code."""
    found, arrays = _read(spool, asked)
    listed = {row.name for row in found.rows}
    tasks = [row for one in arrays.values() for row in one if asked.wanted.wants(row) and row.name not in listed]
    rows = [*found.rows, *tasks]
    if asked.by is not None and asked.form in ("table", "csv"):
        rows = _by(rows, asked.by)
    match asked.form:
        case "json":
            _print_json(found, arrays)
        case "names":
            # The name of an array stands for its tasks.
            names = (row.name for row in rows if row.name in listed or array_of(row.name) not in listed)
            sys.stdout.writelines(f"{name}\n" for name in dict.fromkeys(names))
        case "csv":
            _print_csv(rows, asked.columns or COLUMNS, found.at_ns)
        case _ if not rows:
            if asked.watch:
                render.clear()
        case _ if asked.by is not None:
            _print_by(spool, rows, asked, found.at_ns)
        case _:
            _print_table(_lines(spool, rows, asked, named=bool(arrays)), asked, found.at_ns)
    _remark(found)
    _tell_unknown_values(rows, asked.columns)
    if not rows and asked.form in ("table", "tree"):
        _tell_empty(spool, found, asked)
    for name in found.unknown:
        hint = f"; or did you mean --state {name}?" if name in set(State) else ""
        tell(f"{spool.no_such_job('list', f'job {name}', name)}{hint}")
    return int(ExitCode.NO_SUCH_JOB) if found.unknown else 0


def _read(spool: Spool, asked: _Asked) -> tuple[JobList, dict[str, tuple[JobRow, ...]]]:
    """Return the list, and the tasks of the arrays that were named, with what the columns need beyond the rows."""
    columns = {_VALUES.get(word.partition(":")[0], word) for word in _needed(asked)}
    closely = not columns.isdisjoint(_FULLY)
    found = list_jobs(spool, asked.wanted, everything=asked.everything, order=asked.order, in_full=closely)
    if "progress" in columns and not closely:
        found = replace(found, rows=tuple(with_progress(spool, row) for row in found.rows))
    names = (name for name in asked.wanted.names if not is_pattern(name))
    arrays = {name: tasks.rows for name in names if (tasks := tasks_of(spool, name)) is not None}
    rows = (*found.rows, *chain.from_iterable(arrays.values()))
    if "left" in columns:
        rows = with_outlook(spool, rows, found.at_ns, served=found.serves)
    if "metrics" in columns or (arrays and columns):
        rows = with_metrics(spool, rows)
    each = iter(rows)
    found = replace(found, rows=tuple(islice(each, len(found.rows))))
    return found, {name: tuple(islice(each, len(tasks))) for name, tasks in arrays.items()}


def _needed(asked: _Asked) -> Sequence[str]:
    """Return the columns that the list may show."""
    if asked.by is not None:
        return (*asked.columns, "parameters", "metrics")
    if asked.columns and asked.form != "json":
        return asked.columns
    on_terminal = asked.form in ("table", "tree") and sys.stdout.isatty()
    return ("progress", "parameters", "left") if on_terminal else _BY_FORM.get(asked.form, ())


def _tell_unknown_values(rows: Sequence[JobRow], columns: Sequence[str]) -> None:
    """Report the columns of a parameter or metric that no listed job has, if they have others: a likely typo."""
    for kind, what in _VALUES.items():
        known = _keys(rows, what)
        for key in (word.partition(":")[2] for word in columns if word.startswith(f"{kind}:")):
            if known and key not in known:
                tell(f"no listed job has the {what[:-1]} {shown(key)!r}; the {what} are {', '.join(known)}")


def _keys(rows: Iterable[JobRow], what: str) -> list[str]:
    """Return the keys of their "parameters" or "metrics"."""
    return list(dict.fromkeys(key for row in rows for key, _ in getattr(row, what)))


def _tell_empty(spool: Spool, found: JobList, asked: _Asked) -> None:
    """Say that the list is empty, and the next step, unless another message says why."""
    if found.unknown or spool.unread or is_yet_to_be_made(spool.root):
        return
    what = ("no jobs" if asked.everything else "no active jobs") if asked.wanted == JobFilter() else "no job matches"
    step = (
        "`spool submit --help` shows how to submit one" if asked.everything else "`spool ls --all` lists ended jobs too"
    )
    tell(f"{what}; {step}")


def _lines(spool: Spool, rows: Sequence[JobRow], asked: _Asked, *, named: bool) -> Sequence[ListedJob]:
    """Return the lines of a tree or a table; *named*: it has the tasks of an array that was named."""
    if asked.form == "tree":
        return tree(spool, rows)
    told = named and len(rows) <= _UNFOLDED and any(row.parameters for row in rows)
    if sys.stdout.isatty() and not asked.everything and not told:
        return folded(spool, rows)
    return [ListedJob(row, row.name) for row in rows]


def _print_table(lines: Sequence[ListedJob], asked: _Asked, now_ns: int) -> None:
    """Print the table; with --watch, no more lines than the terminal has."""
    on_terminal = sys.stdout.isatty()
    progress = ("progress",) if any(one.row.progress for one in lines) else ()
    left = ("left",) if on_terminal and any(one.row.left or one.row.start for one in lines) else ()
    is_busy = (one.row.gpu_percent is not None and one.row.ended_at_ns is None for one in lines)
    busy = ("busy",) if on_terminal and any(is_busy) else ()
    parameters = _of_tasks(lines, asked.wanted.names) if on_terminal else ()
    kept = [
        field_of(name) for name in asked.columns or (*_USUAL[:-1], *left, *busy, *progress, *parameters, _USUAL[-1])
    ]
    room = len(lines)
    if asked.watch:
        import shutil  # imported here, because only --watch needs it

        room = max(1, shutil.get_terminal_size((80, 24)).lines - _MARGIN)
        render.clear()
    _draw(kept, lines[:room], now_ns)
    if len(lines) > room:
        render.say(f"… and {len(lines) - room} more")


def _draw(fields: Sequence[JobField], lines: Sequence[ListedJob], now_ns: int) -> None:
    columns = [[field.text(one, now_ns) for one in lines] for field in fields]
    styles = [render.style_of_row(one.row) for one in lines] if sys.stdout.isatty() else []
    render.table([field.column for field in fields], list(zip(*columns, strict=True)), styles)


def _by(rows: Sequence[JobRow], key: str) -> list[JobRow]:
    """Return the tasks in the order of a parameter."""
    found = by_value(rows, key)
    if not found and rows:
        known = _keys(rows, "parameters")
        has = f"the parameters are {', '.join(known)}" if known else "name an array with a matrix or rows"
        raise click.UsageError(f"no listed task has the parameter {shown(key)!r}; {has}")
    return found


def _print_by(spool: Spool, rows: Sequence[JobRow], asked: _Asked, now_ns: int) -> None:
    """Print the tasks in the order of a parameter, and below them the values whose tasks failed."""
    from spool.client.output import last_line_of  # imported here, because only this reads outputs

    key = asked.by or ""

    def last_line(one: ListedJob, now_ns: int) -> str:
        return last_line_of(spool, one.name, one.row.run) if one.row.run is not None else one.row.reason

    others = [f"param:{each}" for each in _keys(rows, "parameters") if each != key]
    metrics = [f"metric:{each}" for each in _keys(rows, "metrics")]
    kept = [field_of(name) for name in asked.columns or ("name", *others, "state", "exit", "time", *metrics)]
    if not asked.columns:
        kept.insert(0, JobField(render.Column(key.upper(), cut="middle"), field_of(f"param:{key}").text))
        kept += [] if metrics else [JobField(render.Column("LAST LINE", cut="end"), last_line)]
    _draw(kept, [ListedJob(row, row.name) for row in rows], now_ns)
    groups: dict[str, list[JobRow]] = {}
    for row in rows:
        groups.setdefault(dict(row.parameters)[key], []).append(row)
    for value, tasks in groups.items():
        if failed := [row.name for row in tasks if row.state in BAD]:
            render.prose(f"{key}={value}: {len(failed)} of {len(tasks)} failed: {some_of(failed)}")


def _of_tasks(lines: Sequence[ListedJob], names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns for the values of tasks: one for each if arrays were named and have few, else one for all."""
    rows = [one.row for one in lines if one.count == 1]
    keys, metrics = _keys(rows, "parameters"), _keys(rows, "metrics") if names else []
    if names and len(keys) + len(metrics) <= _MOST_VALUES:
        return (*(f"param:{key}" for key in keys), *(f"metric:{key}" for key in metrics))
    return (("parameters",) if keys else ()) + (("metrics",) if metrics else ())


def _print_csv(rows: Iterable[JobRow], columns: Sequence[str], now_ns: int) -> None:
    """Print CSV as in RFC 4180, except for its line ends."""
    import csv  # imported here, because no other form needs it

    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(columns)
    for row in rows:
        out.writerow([shown(field_of(name).text(ListedJob(row, row.name), now_ns)) for name in columns])


def _print_json(found: JobList, arrays: Mapping[str, Sequence[JobRow]]) -> None:
    tasks = {"tasks": arrays} if arrays else {}
    render.as_json({"at": render_instant(found.at_ns), "dispatcher": found.dispatcher,
                    "paused": found.paused, "problems": found.problems, "jobs": found.rows, **tasks})  # fmt: skip


def _remark(found: JobList) -> None:
    """Warn on stderr if the list is out of date."""
    if found.paused:
        tell("the spool is paused: no job starts until `spool resume`")
    if found.unserved:
        tell("no dispatcher is running: the list shows what the files say; `spool dispatch` starts one")
    elif found.stale_ns is not None:
        tell(f"no heartbeat from the dispatcher for {show_duration(found.stale_ns)}; the reasons are equally old")
    for problem in found.problems:
        tell(problem)
