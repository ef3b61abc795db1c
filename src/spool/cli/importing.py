"""`spool import`: a script for another scheduler as a job file."""

from __future__ import annotations

import os

import click

from spool.cli import fastsubmit, render, submission
from spool.cli.common import job_name
from spool.cli.group import Verb, tell
from spool.core.errors import UsageError, cannot


@click.command(cls=Verb)
@click.option("--no-capture", is_flag=True, help="Have the job run the script by its path, not the text of now.")
@click.option("--ignore-directives", is_flag=True, help="Ignore the script's lines for other schedulers.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.pass_obj
def command(root: str, no_capture: bool, ignore_directives: bool, files: tuple[str, ...]) -> int:
    """Print the job file that a script for Slurm, gflow or PBS becomes.

    What each `#SBATCH`, `# GFLOW` and `#PBS` line becomes is told on stderr, and what has no counterpart. A lost GPU,
    array or dependency is an error. `spool submit FILE` submits the same.

      spool import train.sbatch > train.toml
      spool submit -f train.toml
    """
    for number, path in enumerate(files):
        if path == "-" or not os.path.isfile(path):
            raise UsageError(cannot("import", path, "no such file" if path != "-" else "give a file"))
        name = job_name(fastsubmit.stem_of([path]))
        capture = False if no_capture else None
        asked = submission.Asked(name=name, loose=[path], capture=capture, ignore_directives=ignore_directives)
        wanted = submission.job_of(asked, root)
        head = "\n" * (number > 0) + f"# {wanted.name}.toml, made of {os.path.basename(path)!a}\n"
        render.say_text((head if len(files) > 1 else "") + wanted.text.decode("utf-8", "replace"))
        if wanted.held:
            tell(f"{path}: asks to be held; submit the file with --hold")
    return 0
