"""`spool import`: convert a script for another scheduler to a job file."""

from __future__ import annotations

import os

import click

from spool.cli import render
from spool.cli.group import Verb, job_name
from spool.cli.render import tell
from spool.cli.submission import Asked, draft_of
from spool.client.draft import stem_of
from spool.core.errors import UsageError, cannot


@click.command(cls=Verb)
@click.option("--no-capture", is_flag=True, help="Run the script by its path instead of a copy of its current text.")
@click.option("--ignore-directives", is_flag=True, help="Ignore the script's directives for other schedulers.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.pass_obj
def command(root: str, no_capture: bool, ignore_directives: bool, files: tuple[str, ...]) -> int:
    """Convert a Slurm, gflow, PBS or Grid Engine script to a job file, and print it.

    Stderr reports what each `#SBATCH`, `# GFLOW`, `#PBS` and `#$` line becomes, and what has no equivalent. A GPU,
    array or dependency that cannot be converted is an error. `spool submit FILE` submits the same job.

      spool import train.sbatch > train.toml
      spool submit -f train.toml
    """
    for number, path in enumerate(files):
        if path == "-":
            raise UsageError(cannot("import", path, "give a file; /dev/stdin reads a pipe"))
        if not os.path.isfile(path) and path != "/dev/stdin":
            raise UsageError(cannot("import", path, "not a file" if os.path.exists(path) else "no such file"))
        name = job_name(stem_of([path]))
        capture = False if no_capture else None
        asked = Asked(name=name, loose=[path], capture=capture, ignore_directives=ignore_directives, verbose=True)
        draft = draft_of(asked, root)
        head = "\n" * (number > 0) + f"# {draft.name}.toml, made of {os.path.basename(path)!a}\n"
        render.say_text(
            (head if len(files) > 1 else "") + draft.text().decode("utf-8-sig", "replace").replace("\r\n", "\n")
        )
        if draft.held:
            tell(f"{path}: the script asks to be held; submit the file with --hold")
    return 0
