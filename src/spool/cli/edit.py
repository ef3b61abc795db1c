"""`spool edit` and `spool move`: change a waiting or running job, and its place among the jobs of its user."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from msgspec.structs import replace

from spool.cli import joboptions, render
from spool.cli.common import for_each, name_argument, named, names_argument, one_job, opened, option_in, own
from spool.cli.group import Verb
from spool.cli.joboptions import COMMON_TITLE, key_options, values_of
from spool.cli.telling import tell
from spool.client.requests import Requests
from spool.core.errors import InvalidJob, SpoolError, UsageError, cannot
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import JobDefaults, Spec, in_force
from spool.formats import jobfile
from spool.formats.capabilities import engine_offer, loaded
from spool.formats.jobfile import edited
from spool.query.selection import priorities_to_move
from spool.store.glance import defaults_of
from spool.store.ownership import this_user
from spool.store.reading import is_too_long
from spool.store.spool import Spool


@click.command(cls=Verb)
@name_argument
@option_in(COMMON_TITLE)("-c", "--shell-command", metavar="TEXT", help="A new command, as a string for the shell.")
@option_in(COMMON_TITLE)(
    "--unset", multiple=True, metavar="KEY", help="Remove a key: memory, env.DEBUG. May be repeated."
)
@key_options
@click.pass_context
def command(ctx: click.Context, /, name: str, shell_command: str | None, unset: tuple[str, ...], **_: Any) -> int:
    """Change a waiting or held job, or the time limit, priority and gpu_idle of a running one.

    For an array in progress, only `max_running` can be changed.

    Without options, it opens $VISUAL or $EDITOR. The new text replaces the file only if it is valid. Comments, order
    and the job's place in the queue stay. A new time limit counts from the start of the run; a run that has already
    exceeded it is stopped at once.

      spool edit train
      spool edit train --priority 50 --memory 8G --unset time_limit
      spool edit train --time-limit 12h  # also while it is running

    By hand: vim queued/train.toml
    """
    spool = own(ctx.obj)
    name = one_job(spool, name)
    changes = joboptions.keys_of(values_of(ctx.params))
    if shell_command is not None:
        changes["command"] = shell_command
    if changes or unset:
        render.say(change_keys(spool, name, changes, unset))
        return 0
    place, text = _file(spool, name)
    new = _in_editor(name, text, spool.root)
    try:
        render.say(_replaced(spool, name, place, text, new))
    except SpoolError:
        _keep(name, new)
        raise
    return 0


def change_keys(spool: Spool, name: str, changes: Mapping[str, Any], unset: Sequence[str] = ()) -> str:
    """Change keys of a job that waits, is held or runs, and return a message. Raises SpoolError."""
    place, text = _file(spool, name)
    new = joboptions.checked(spool.root, name, edited(text, changes, unset, name=name), changes)
    return _replaced(spool, name, place, text, new)


def _replaced(spool: Spool, name: str, place: str, text: bytes, new: bytes) -> str:
    if place == RUNNING:
        _check_running(name, text, new, defaults_of(spool.root))
    if new == text:
        return f"{name} is unchanged"
    Requests(spool, this_user()).replace(name, place, text, new)
    others = [other for other in spool.places(name) if other not in (place, DONE)]
    where = f" ({place}/)" if others else ""
    unchanged = (f"the one in {other}/ is unchanged" for other in others)
    sooner = _ends_sooner(spool, name, new) if place == RUNNING else ()
    return "; ".join([f"{name}{where} changed", *unchanged, *sooner])


def _ends_sooner(spool: Spool, name: str, new: bytes) -> Iterator[str]:
    """Yield a warning that an engine, which has the old time limit, ends a job before its new one."""
    run = max(spool.runs(name), default=0)
    known, asked = spool.engine(name, run), spool.spec(name, run)
    offer = engine_offer(known[0]) if known is not None else None
    if known is None or offer is None or not offer.still_ends or asked is None or asked.time_limit_ns is None:
        return
    limit_ns = jobfile.parse(new, name=name, defaults=defaults_of(spool.root)).time_limit_ns
    if limit_ns is None or limit_ns > asked.time_limit_ns:
        yield loaded(offer.still_ends)(known[2], asked.time_limit_ns, limit_ns)


def _file(spool: Spool, name: str) -> tuple[str, bytes]:
    for place in (QUEUED, HELD, RUNNING):
        text = spool.job_text(place, name)
        if is_too_long(text):
            path = spool.layout.job_file(place, name)
            raise SpoolError(cannot("edit", f"job {name}", "its file is larger than 1 MiB", remedy=f"replace {path}"))
        if text is not None:
            return place, text
    places = spool.places(name)
    if not places:
        raise spool.no_such_job("edit", f"job {name}", name)
    remedy = f"`spool requeue {name} --with KEY=VALUE` changes it and runs it again"
    raise SpoolError(cannot("edit", f"job {name}", "it has ended", remedy=remedy))


def _check_running(name: str, old: bytes, new: bytes, defaults: JobDefaults) -> None:
    """Raise SpoolError if a change is not possible while the job runs."""
    try:
        before = jobfile.parse(old, name=name, defaults=defaults)
    except InvalidJob:
        return  # it was changed by hand, and is restored now
    after = jobfile.parse(new, name=name, defaults=defaults)
    if before.is_array:
        if _with_limit_of(before, after) != after:
            why = "its tasks already exist; only max_running can be changed"
            raise SpoolError(cannot("edit", f"job {name}", why, remedy=f"edit the tasks: {name}_0 and so on"))
    elif in_force(before, after) != after:
        why = "it runs; only its time limit and priority, and gpu_idle, can be changed"
        remedy = f"`spool requeue {name} --with KEY=VALUE` stops it and runs it again with other keys"
        raise SpoolError(cannot("edit", f"job {name}", why, remedy=remedy))


def _with_limit_of(before: Spec, after: Spec) -> Spec:
    """Return an array's old file with the `max_running` of its new text, given as a key or after a `%`."""
    array = before.array
    if array is not None and after.array is not None:
        array = replace(array, max_running=after.array.max_running)
    return replace(before, max_running=after.max_running, array=array)


def _in_editor(name: str, text: bytes, root: str) -> bytes:
    """Return *text* as the user edits it, once it is valid. Raises SpoolError if the user gives up."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="spool-edit-") as directory:
        path = os.path.join(directory, f"{name}.toml")
        with open(path, "wb") as file:
            file.write(text)
        while True:
            code = subprocess.run(["/bin/sh", "-c", f'{editor} "$1"', "sh", path], check=False).returncode
            if code != 0:
                raise UsageError(cannot("edit", f"job {name}", f"the editor, {editor!r}, ended with exit code {code}"))
            try:
                with open(path, "rb") as file:
                    new = file.read()
            except FileNotFoundError:
                why = f"the editor, {editor!r}, left no file; the job is unchanged"
                raise UsageError(cannot("edit", f"job {name}", why)) from None
            try:
                jobfile.parse(new, name=name, defaults=defaults_of(root))
            except InvalidJob as error:
                if not sys.stdin.isatty():
                    _keep(name, new)
                    raise
                for problem in error.problems:
                    tell(problem.message)
                if not click.confirm("Edit it again?", default=True, err=True):
                    _keep(name, new)
                    raise
            else:
                return jobfile.with_offset(new, text, name=name)


def _keep(name: str, text: bytes) -> None:
    """Save a text that did not become the job, and print its path."""
    descriptor, path = tempfile.mkstemp(prefix=f"{name}.", suffix=".toml")
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
    tell(f"your text is saved in {path}")


@click.command("move", cls=Verb)
@names_argument
@click.option("--first", is_flag=True, help="Move it before the user's other waiting jobs.")
@click.option("--last", is_flag=True, help="Move it after them.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing.")
@click.pass_obj
def move(root: str, /, names: tuple[str, ...], first: bool, last: bool, dry_run: bool) -> int:
    """Put a waiting job before your other jobs, or after them.

    This changes the job's priority: to one above the highest of its user's other waiting jobs, or one below the lowest.
    Priority counts across users, so the job also passes other users' jobs of a lower priority. Several jobs keep the
    order in which you name them. A job that goes first still waits for room, and smaller jobs can start before it.

      spool move train --first
      spool move 'sweep_*' --last

    By hand: set priority = 11 in queued/train.toml
    """
    if first == last or not names:
        raise click.UsageError("name jobs, and give either --first or --last")
    where = "first" if first else "last"
    spool = opened(root)
    requests = Requests(spool, this_user())
    chosen = named(spool, names, (QUEUED,))
    moved = priorities_to_move(spool, chosen, first=first)

    def act(name: str) -> str:
        what, text = ("move", f"job {name}"), spool.job_text(QUEUED, name)
        if text is None:
            if not spool.places(name) and not spool.runs(name):
                raise spool.no_such_job(*what, name)
            raise SpoolError(cannot(*what, "it is not waiting", remedy=f"`spool show {name}` says more"))
        priority = moved.get(name)
        if priority is None:
            raise SpoolError(cannot(*what, "its file is not valid", remedy=f"`spool edit {name}`"))
        new = edited(text, {"priority": priority}, name=name)
        if new == text:
            return f"{name} is already {where}: priority {priority}"
        if dry_run:
            return f"{name} would go {where}: priority {priority}"
        requests.replace(name, QUEUED, text, new)
        return f"{name} goes {where}: priority {priority}"

    return for_each(chosen, act)
