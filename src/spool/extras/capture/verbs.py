"""`spool diff`, what differs between two runs, and `spool rerun`, an earlier run once more as a new job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import ClassVar

import click
from msgspec import Struct

from spool.cli import render
from spool.cli.control import rewriter
from spool.cli.group import JobArgument, Verb, json_option, one_job, opened, own, run_named
from spool.cli.render import tell
from spool.cli.submission import check_free, checked_name, publish, tell_doubts
from spool.client.draft import Draft, escaped, next_name, placeholders
from spool.client.submit import literal
from spool.core import layout
from spool.core.errors import InvalidFile, NoSuchJob, cannot
from spool.core.reasons import count_of
from spool.core.units import show_duration, show_size
from spool.extras.capture.code import DIFF, Capture, Code, Interpreter, code_in_words
from spool.formats import jobfile, toml
from spool.formats.capabilities import one_run_keys
from spool.formats.wrapper import variables_of
from spool.query.details import RunDetails, job_details
from spool.store.spool import Spool

_OF_EACH_RUN = frozenset({"SPOOL_JOB", "SPOOL_RUN", "SPOOL_METADIR"})
_OF_EVERY_RUN = frozenset({"executor", "host", "gpus"})  # of the machine; a capture has the rest
_RECORDED = frozenset({"code", "python", "packages", "environment"})  # sections that a record has, or nothing does
_MOST_SHOWN = 200  # characters of a value
_SHORT = 48  # cells of a value on a line of its own kind; a longer one is cut
_BEFORE = 16  # … and begins so far before the first difference


class Difference(Struct, frozen=True):
    """One thing that differs. None: this run has none."""

    section: str
    key: str
    one: str | None
    other: str | None
    PUBLIC: ClassVar[str] = "section key one other"


class Comparison(Struct, frozen=True):
    """Two runs, `JOB/RUN`, with what differs between them."""

    one: str
    other: str
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]  # what could not be compared, and how to see more
    PUBLIC: ClassVar[str] = "one other differences notes"


class _Side(Struct, frozen=True):
    run: RunDetails
    facts: dict[str, dict[str, str]]  # by section and key


@click.command(cls=Verb)
@click.argument("one", cls=JobArgument, metavar="NAME[/RUN]")
@click.argument("other", cls=JobArgument, metavar="NAME[/RUN]")
@json_option
@click.pass_obj
def diff(root: str, one: str, other: str, as_json: bool) -> int:
    """Show what differs between two runs.

    Compares their job files, parameters, code (with `capture` in the configuration), packages, environment, machine
    and GPUs, and their outcomes. Without RUN it is the newest run. The exit code is 0 whether or not anything differs.

      spool diff train/1 train/4
      spool diff sweep_3 sweep_7
      spool diff train/1 train/2 --json

    Also: `spool show train/1 train/4`. By hand: diff -r jobs/train/1 jobs/train/4
    """
    spool = opened(root)
    found = compare(spool, run_named(one), run_named(other))
    if as_json:
        render.as_json(found)
    else:
        _print(found)
    return 0


def compare(spool: Spool, one: tuple[str, int | None], other: tuple[str, int | None]) -> Comparison:
    """Return what differs between two runs; the run None is the newest. Raises NoSuchJob."""
    sides = [_side(spool, *each) for each in (one, other)]
    first, second = sides
    found = []
    for section in first.facts:
        left, right = first.facts[section], second.facts[section]
        if section in _RECORDED and not (left and right):
            continue  # unknown is not different; a note says why
        keys = dict.fromkeys((*left, *right))
        if section == "machine" and not all(side.run.parts.get("capture") for side in sides):
            keys = {key: None for key in keys if key in _OF_EVERY_RUN}
        found += [
            Difference(section, key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)
        ]
    names = [f"{side.run.record.job}/{side.run.record.run}" for side in sides]
    return Comparison(names[0], names[1], tuple(found), tuple(_notes(names, sides)))


def _side(spool: Spool, name: str, run: int | None) -> _Side:
    name = one_job(spool, name)
    if run is None:
        run = spool.latest_run(name)
    details = job_details(spool, name, run)
    if not details.runs:
        raise NoSuchJob(cannot("compare", f"the newest run of {name}", "it has not run yet"))
    found = details.runs[-1]
    record, capture = found.record, found.parts.get("capture") or Capture()
    code, python = capture.code or Code(""), capture.interpreter or Interpreter("")
    waited_ns = (record.started_at_ns or 0) - record.submitted_at_ns if record.submitted_at_ns is not None else 0
    ran_ns = found.ran_ns(record.ended_at_ns) if record.ended_at_ns is not None else None
    defaults, stated = (_flat(spool.record(name, record.run, each)) for each in (layout.DEFAULTS, layout.SPEC_COPY))
    script = spool.record(name, record.run, layout.WRAPPER)
    variables = variables_of(script) if script else {}
    changes = f"{count_of(code.changed, 'file')}, sha256 {code.diff_hash or '?'}" if code.changed else None
    facts: dict[str, dict[str, str | None]] = {
        "file": {**defaults, **stated},
        "parameters": {**dict(record.parameters or details.row.parameters)},
        "code": {
            "commit": code.commit,
            "branch": code.branch,
            "changes": changes,
            "work tree": code.top or None,
            "untracked": ", ".join(code.untracked) or None,
        },
        "python": {"path": python.path or None, "version": python.version},
        "packages": {**dict(text.partition(" ")[::2] for text in python.packages)},
        "environment": {key: text[:_MOST_SHOWN] for key, text in variables.items() if key not in _OF_EACH_RUN},
        "machine": {
            "executor": record.executor,
            "host": record.node or capture.host or record.host,
            "kernel": capture.kernel,
            "driver": capture.driver,
            "gpus": ", ".join(found.grant.gpu_uuids) or None if found.grant is not None else None,
        },
        "outcome": {
            "state": found.state.value if found.state is not None else None,
            "reason": found.reason or None,
            "waited": show_duration(waited_ns) if record.started_at_ns is not None and waited_ns >= 0 else None,
            "ran": show_duration(ran_ns) if ran_ns is not None else None,
            "peak memory": show_size(record.peak_memory_bytes) if record.peak_memory_bytes is not None else None,
        },
        "metrics": {**dict(record.metrics or (details.row.metrics if details.row.run == record.run else ()))},
    }
    known = {
        section: {key: value for key, value in values.items() if value is not None} for section, values in facts.items()
    }
    return _Side(found, known)


def _notes(names: list[str], sides: list[_Side]) -> Iterator[str]:
    """Yield what could not be compared, and the commands that show more."""
    captures = [side.run.parts.get("capture") for side in sides]
    for name, side, capture in zip(names, sides, captures, strict=True):
        if side.run.record.started_at_ns is None:
            yield f"{name}: it has not started, so nothing is known of its code and environment"
        elif capture is None:
            yield f"{name}: its code was not captured; `capture = true` in config.toml does that (docs/OPERATIONS.md)"
        elif capture.problem:
            yield f"{name}: not captured: {capture.problem}"
        elif capture.code is not None and capture.code.diff_bytes:
            yield f"{name}: {code_in_words(capture.code)}: {side.run.metadir}/{DIFF}"
    codes = [capture.code for capture in captures if capture is not None and capture.code is not None]
    if len(codes) == len(sides) and all(code.commit for code in codes) and codes[0].commit != codes[1].commit:
        yield f"the commits: git -C {codes[1].top} diff {str(codes[0].commit)[:12]} {str(codes[1].commit)[:12]}"


def _flat(text: bytes | None) -> dict[str, str]:
    """Return the keys of a job file, those of tables with dots, and their values as written; {} if it is not TOML."""

    def leaves(table: Mapping[str, object], before: str) -> Iterator[tuple[str, str]]:
        for key, value in table.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{before}{key}.")
            else:
                yield f"{before}{key}", value if isinstance(value, str) else _written(value)

    try:
        document = toml.read(text or b"", "a job file")
    except InvalidFile:
        return {}
    return {key: value for key, value in leaves(document, "") if not key.startswith("env.")}


def _written(value: object) -> str:
    """Return a value as a job file has it, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_written(each)}' for key, each in value.items())}}}"
    return toml.quote(value) if isinstance(value, str) else toml.show(value)


def _print(found: Comparison) -> None:
    if not found.differences:
        render.say(f"{found.one} and {found.other} do not differ")
    for section, several in groupby(found.differences, lambda each: each.section):
        columns = (render.Column(section.upper()), render.Column(found.one), render.Column(found.other))
        render.table(columns, [[each.key, *_short(each.one, each.other)] for each in several])
        render.say()
    for note in found.notes:
        render.prose(note)


def _short(one: str | None, other: str | None) -> tuple[str, str]:
    """Return two values as cells; of longer ones the part in which they differ."""
    lines = [" ".join(value.split()) if value is not None else "-" for value in (one, other)]
    common = 0
    if max(map(len, lines)) > _SHORT:
        differ = (at for at, (left, right) in enumerate(zip(*lines, strict=False)) if left != right)
        common = next(differ, min(map(len, lines)) if lines[0] != lines[1] else 0)
    begin = common - _BEFORE if common > _SHORT - _BEFORE else 0
    lines = [f"…{line[begin + 1 :]}" if begin else line for line in lines]
    first, second = (line if len(line) <= _SHORT else f"{line[: _SHORT - 1]}…" for line in lines)
    return first, second


@click.command(cls=Verb)
@click.argument("name", cls=JobArgument, metavar="NAME[/RUN]")
@click.option("--name", "new_name", metavar="NAME", help="The name of the new job. Default: NAME-2, NAME-3, …")
@click.option("--workdir", metavar="DIR", help="Run it in this directory, such as a work tree with other code.")
@click.option("--hold", is_flag=True, help="Submit the job held: it does not start until `spool release`.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a key. May be repeated.")
@click.option("--dry-run", is_flag=True, help="Print the job file, and change nothing.")
@click.pass_obj
def rerun(
    root: str, /, name: str, new_name: str | None, workdir: str | None, hold: bool, sets: tuple[str, ...], dry_run: bool
) -> int:
    """Submit an earlier run again, as a new job.

    The new job has the file that the run began with, whatever became of the job since. Without RUN it is the newest
    run. `spool requeue` runs the job itself again, with its present file. The code is that of now; docs/OPERATIONS.md
    says how to make a work tree with the code of then, where `capture` in the configuration has kept it.

      spool rerun train/3
      spool rerun train/3 --workdir ../train-old

    Also: `spool requeue train/3`.

    By hand: cp jobs/train/3/job.toml queued/train-2.toml
    """
    spool = own(root)
    job, run = run_named(name)
    job = one_job(spool, job)
    run = spool.latest_run(job) if run is None else run
    text = spool.record(job, run, layout.SPEC_COPY) if run is not None else None
    if run is None or text is None:
        if not spool.runs(job) and not spool.places(job):
            raise spool.no_such_job("run", f"{name} again", job)
        why = "there is no such run, or its records were removed"
        raise NoSuchJob(cannot("run", f"{name} again", why if spool.runs(job) else "it has not run yet"))
    new = checked_name(new_name or next_name(root, job))
    if bound := one_run_keys(text):
        tell(f"{new} is without {', '.join(bound)}, which only one run can have")
    if bound or workdir is not None:
        keys = {key: value for key, value in toml.read(text, "a job file").items() if key not in bound}
        if workdir is not None:
            keys["workdir"] = escaped(literal(os.path.abspath(workdir)), placeholders(keys))
        text = jobfile.dump(keys)
    if (change := rewriter(sets, root)) is not None:
        text = change(new, text)
    draft = Draft(new, {}, held=hold, text=text)
    draft.check(root)
    if dry_run:
        render.say_text(text.decode("utf-8", "replace"))
        return 0
    check_free(root, new, can_replace=False)
    tell_doubts(root, [draft], strict=False)
    publish(root, [draft], held=hold, replace=False)
    render.say(new, at_once=True)
    return 0
