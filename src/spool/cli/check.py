"""`spool check`: check job files for errors."""

from __future__ import annotations

import os
import shlex

import click

from spool.cli import render
from spool.cli.common import json_option, strict_option
from spool.cli.group import Verb
from spool.cli.telling import tell
from spool.client.submit import is_spool
from spool.core import layout
from spool.core.errors import ExitCode, InvalidFile
from spool.core.layout import why_not_name
from spool.core.model import JobDefaults, Problem, Spec
from spool.formats import config, jobfile, reservation
from spool.formats.capabilities import contributed
from spool.formats.toml import MAX_BYTES
from spool.query.foresight import doubts
from spool.store.glance import defaults_of
from spool.store.reading import read_named

_Checked = tuple[str, list[Problem], tuple[str, Spec] | None]
"""A file, its problems, and its job."""


def _print_schema(ctx: click.Context, parameter: click.Parameter, kind: str | None) -> None:
    """Print the schema line for editors, and exit."""
    if kind is not None:
        here = os.path.dirname(os.path.abspath(jobfile.__file__))
        render.say(f"#:schema {os.path.join(here, kind)}.schema.json")
        ctx.exit()


@click.command(cls=Verb)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(allow_dash=True))
@strict_option
@json_option
@click.option(
    "--schema",
    type=click.Choice(["job", "config", "reservation", "machine"]),
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Print the first line by which an editor completes and checks the keys of such a file.",
)
@click.pass_obj
def command(root: str, /, files: tuple[str, ...], strict: bool, as_json: bool) -> int:
    """Check job files, and report each error with its line.

    A file named config.toml is read as a configuration, one in a directory named reservations as a reservation, and
    /etc/spool/machine.toml as the configuration of the shared machine. A directory stands for all .toml files in it.
    Keys that a job file does not set come from `[defaults]` in the spool's configuration. The exit code is 4 if
    anything is wrong.

    If there is a spool, valid jobs are also checked against it. A job that can never run here, a notification that
    cannot be delivered, or a missing dependency gives a warning, or with --strict an error.

      spool check train.toml && cp train.toml ~/.spool/queued/
      spool check --schema job  # what to write into the first line
    """
    defaults = defaults_of(root)
    found = [(path, *_read(path, defaults)) for path in _listed(files)]
    warnings = _warnings(root, found)
    if strict:
        found = [(path, problems + warnings.pop(path, []), job) for path, problems, job in found]
    bad = [(path, problems) for path, problems, _ in found if problems]
    if as_json:
        files_json = [
            {"file": path, "valid": not problems, "problems": problems, "warnings": warnings.get(path, [])}
            for path, problems, _ in found
        ]
        render.as_json({"version": 1, "files": files_json})
    else:
        for path, problems in bad:
            for problem in problems:
                render.say(f"{path}:{problem.line or 1}: {problem.message}")
        good = len(found) - len(bad)
        if not found:
            tell(f"nothing to check: no job files (*.toml) in {', '.join(files)}")
        elif not bad:
            render.say(f"{good} file{' is' if good == 1 else 's are'} valid")
        for path, listed in warnings.items():
            for problem in listed:
                tell(f"{path}: warning: {problem.message}")
    return int(ExitCode.INVALID_FILE) if bad else 0


def _warnings(root: str, found: list[_Checked]) -> dict[str, list[Problem]]:
    """Return the warnings for each valid job file, checked against the spool at *root* if there is one."""
    if not is_spool(root):
        return {}
    jobs = {job[0]: path for path, _, job in found if job is not None}
    warnings: dict[str, list[Problem]] = {}
    for name, why in doubts(root, [job for _, _, job in found if job is not None]):
        warnings.setdefault(jobs[name], []).append(Problem(None, None, f"job {name} {why}"))
    return warnings


def _listed(files: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for path in files:
        if os.path.isdir(path):
            found += sorted(f"{path.rstrip('/')}/{name}" for name in os.listdir(path) if layout.job_of(name))
        else:
            found.append(path)
    return found


def _read(path: str, defaults: JobDefaults) -> tuple[list[Problem], tuple[str, Spec] | None]:
    """Return the problems of a file, and its job if it is valid."""
    try:
        data = read_named(path, MAX_BYTES + 1)
    except OSError as error:
        return [Problem(None, None, f"cannot be read: {error.strerror}")], None
    base = os.path.basename(path)
    name = base.removesuffix(layout.JOB_SUFFIX) if path != "-" else "stdin"
    spec = None
    kinds = (kind for _, kinds in contributed("files") for kind in kinds)
    try:
        if base == layout.CONFIG:
            config.parse(data)
        elif kind := next((kind for kind in kinds if kind.path == os.path.abspath(path)), None):
            kind.parse(data)
        elif os.path.basename(os.path.dirname(os.path.abspath(path))) == layout.RESERVATIONS:
            reservation.parse(data, name=name, created_at_ns=0)
        else:
            spec = jobfile.parse(data, name=name, defaults=defaults)
    except InvalidFile as error:
        if data.startswith(b"#!"):
            remedy = f"`spool import {shlex.quote(path)}` prints the job file that it becomes"
            return [Problem(None, None, f"it is a script, not a job file; {remedy}")], None
        return list(error.problems), None
    why = why_not_name(name)
    if why is not None:
        return [Problem(None, None, f"the file's name is not a valid job name: {why}")], None
    return [], (name, spec) if spec is not None else None
