"""`spool check`: tell whether job files are valid."""

from __future__ import annotations

import os
import sys

import click

from spool.cli import render
from spool.cli.common import json_option
from spool.cli.group import Verb
from spool.core import layout
from spool.core.errors import ExitCode, InvalidFile, Problem
from spool.core.model import JobDefaults
from spool.core.names import why_not_name
from spool.formats import config, jobfile, reservation
from spool.store.config import defaults_of
from spool.store.stable_read import MAX_BYTES


@click.command(cls=Verb)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(allow_dash=True))
@json_option
@click.pass_obj
def command(root: str, files: tuple[str, ...], as_json: bool) -> int:
    """Tell whether job files are valid, and if not, what is wrong on which line.

    A file called config.toml is read as a configuration, one in a directory called reservations as a reservation, and
    of a directory every .toml file is read. What a job file leaves open is taken from `[defaults]` of the spool's
    configuration. Exits with 4 if something is wrong.

      spool check train.toml && cp train.toml ~/.spool/queued/
    """
    defaults = defaults_of(root)
    found = [(path, _problems(path, defaults)) for path in _listed(files)]
    bad = [(path, problems) for path, problems in found if problems]
    if as_json:
        files_json = [{"file": path, "valid": not problems, "problems": problems} for path, problems in found]
        render.as_json({"version": 1, "files": files_json})
    else:
        for path, problems in bad:
            for problem in problems:
                render.say(f"{path}:{problem.line or 1}: {problem.message}")
        good = len(found) - len(bad)
        if not bad:
            render.say(f"{good} file{' is' if good == 1 else 's are'} valid")
    return int(ExitCode.INVALID_FILE) if bad else 0


def _listed(files: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for path in files:
        if os.path.isdir(path):
            found += sorted(f"{path.rstrip('/')}/{name}" for name in os.listdir(path) if layout.job_of(name))
        else:
            found.append(path)
    return found


def _problems(path: str, defaults: JobDefaults) -> list[Problem]:
    try:
        if path == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
    except OSError as error:
        return [Problem(None, None, f"it cannot be read: {error.strerror}")]
    base = os.path.basename(path)
    name = base.removesuffix(layout.JOB_SUFFIX) if path != "-" else "stdin"
    try:
        if base == layout.CONFIG:
            config.parse(data)
        elif os.path.basename(os.path.dirname(os.path.abspath(path))) == layout.RESERVATIONS:
            reservation.parse(data, name=name, created_at_ns=0)
        else:
            jobfile.parse(data, name=name, defaults=defaults)
    except InvalidFile as error:
        return list(error.problems)
    why = why_not_name(name)
    return [Problem(None, None, f"the file's name cannot be a job's: {why}")] if why is not None else []
