"""`spool submit`: submit a job to the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from spool.cli.common import option_in, strict_option
from spool.cli.group import WordsVerb
from spool.cli.joboptions import COMMON_TITLE, key_options, values_of
from spool.cli.render import say, say_text
from spool.cli.scripts import Asked
from spool.cli.submission import draft_of, file_draft, publish, tell_doubts
from spool.cli.telling import made
from spool.client.draft import Draft
from spool.client.submit import check_submitter, is_spool
from spool.core.errors import UsageError
from spool.core.layout import EXPORTED

_common, _environment = option_in(COMMON_TITLE), option_in("Environment")
name_option = _common(
    *("-n", "--name"),
    also=("-J", "--job-name"),
    metavar="NAME",
    help="Job name. Default: the program's name with a short suffix.",
)
shell_command_option = _common(
    *("-c", "--shell-command"),
    also=("--wrap",),
    metavar="TEXT",
    help="The command as a string for the shell: -c 'sort a | uniq'.",
)
replace_option = click.option(
    "--replace", is_flag=True, help="Replace a waiting or held job of that name; queue behind a running one."
)
export_option = _environment(
    "--export",
    multiple=True,
    metavar="ALL|NONE|NAME[=VALUE],…",
    help="Environment variables to copy into the job's env: all, none, or these; NAME may be a pattern. "
    f"Default: {', '.join(EXPORTED)}, or as configured.",
)


def asked(ctx: click.Context) -> Asked:
    """Return the request of a command line with `key_options`, `export_option` and `script_options`."""
    given, dashes = ctx.params, ctx.meta.get("spool.dashes", False)
    return Asked(
        values=values_of(given),
        plain=given["words"] if dashes else (),
        loose=() if dashes else given["words"],
        verbose=given["verbose"] or given.get("dry_run", False),
        lines=given.get("lines"),
        replaces=given["replace"],
        **{key: given[key] for key in ("export", "name", "shell_command", "capture", "ignore_directives")},
    )


def script_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options for submitting a script to a command."""
    for option in (
        click.option(
            "--ignore-directives",
            is_flag=True,
            help="Ignore the script's directives for other schedulers, such as #SBATCH.",
        ),
        click.option(
            *("-v", "--verbose"),
            is_flag=True,
            help="Report every line for another scheduler, not only those without an equivalent.",
        ),
        _environment(
            "--capture/--no-capture",
            default=None,
            help="Run a copy of the script as it is now, or run it by its path later. Default: a copy.",
        ),
    ):
        function = option(function)
    return function


@click.command(cls=WordsVerb, context_settings={"allow_interspersed_args": False})
@name_option
@shell_command_option
@_common("-f", "--file", "files", multiple=True, metavar="FILE", help="Submit this job file. May be repeated.")
@_common("--wait", "wait_for_it", is_flag=True, help="Wait for the job to end, and exit with its code.")
@key_options
@option_in("Arrays")("--lines", metavar="FILE", help="Submit one job for each line, a shell command.")
@option_in("When it runs")(
    "--hold", also=("-H",), is_flag=True, help="Submit the job held: it does not start until `spool release`."
)
@export_option
@replace_option
@strict_option
@option_in("")("--dry-run", also=("--test-only",), is_flag=True, help="Print the job file, do not submit it.")
@script_options
@click.option("--parsable", is_flag=True, hidden=True)  # sbatch: print only the job, as always here
@click.argument("words", nargs=-1, metavar="[SCRIPT | - | -- COMMAND...]")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    files: tuple[str, ...],
    hold: bool,
    replace: bool,
    wait_for_it: bool,
    strict: bool,
    dry_run: bool,
    **_: Any,
) -> int:
    """Submit a job to the queue.

    Prints the job's name once the job is safely on disk. Starts a dispatcher if none is running.

      spool submit -- python train.py --lr 0.1
      spool submit -g 1 -t 2h --name train -- ./train
      spool submit -c 'sort words | uniq -c > counts'
      spool submit job.sh x y     a copy of the script; x and y are arguments,
                                  and its `#SPOOL --gpus 1` lines are options
      spool submit < job.sh       a script on stdin, also as `spool submit <<EOF`
      spool submit -f train.toml  a job file, copied byte for byte
      spool submit --export NONE -- make  with the PATH of a login, not this one

    By hand:
      cp train.toml ~/.spool/.tmp/
      mv ~/.spool/.tmp/train.toml ~/.spool/queued/
    """
    root, request = ctx.obj, asked(ctx)
    jobs = _of_files(files, request, root) if files else [draft_of(request, root)]
    check_submitter(root)
    root = root if dry_run or is_spool(root) else made(root).root
    tell_doubts(root, jobs, strict=strict)
    if dry_run:
        for job in jobs:
            say_text(job.text().decode("utf-8", "replace"))
        return 0
    publish(root, jobs, held=hold or jobs[0].held, replace=replace)
    for job in jobs:
        say(job.name, at_once=True)
    if not wait_for_it:
        return 0
    from spool.cli.wait import until_ended

    return until_ended(root, [job.name for job in jobs])


def _of_files(paths: Sequence[str], request: Asked, root: str) -> list[Draft]:
    """Return the jobs in job files. Raises SpoolError."""
    given = (request.lines, request.shell_command)
    if request.values or request.plain or request.loose or any(text is not None for text in given):
        raise UsageError("cannot combine a job file with options: it must be complete; edit a copy of it")
    if request.name is not None and len(paths) > 1:
        raise UsageError("cannot give one name to several job files; remove --name")
    jobs = [file_draft(path, request.name, root, request.export) for path in paths]
    if len({job.name for job in jobs}) < len(jobs):
        raise UsageError("cannot submit two job files with the same name at once")
    return jobs
