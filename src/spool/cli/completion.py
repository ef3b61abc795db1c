"""`spool completion`: print a shell completion script."""

from __future__ import annotations

import sys

import click
from click.shell_completion import get_completion_class

from spool.cli import group
from spool.cli.group import Verb

_HOW = {
    "bash": '# in ~/.bashrc:  eval "$(spool completion bash)"\n',
    "zsh": '# in ~/.zshrc:  eval "$(spool completion zsh)"\n',
    "fish": "# in ~/.config/fish/completions/spool.fish\n",
}


@click.command(cls=Verb)
@click.argument("shell", type=click.Choice(sorted(_HOW)))
def command(shell: str) -> int:
    """Print a completion script for a shell. It completes commands, options and job names.

    In ~/.bashrc, in ~/.zshrc, and once for fish:
      eval "$(spool completion bash)"
      eval "$(spool completion zsh)"
      spool completion fish > ~/.config/fish/completions/spool.fish
    """
    made = get_completion_class(shell)
    assert made is not None
    script = made(group.spool, {}, "spool", "_SPOOL_COMPLETE")
    # In fish it splits at every comma, but descriptions and lists of names contain commas.
    template = script.source_template.replace('string split ","', 'string split --max 1 ","')
    # Not `script.source()`: for bash that starts a bash to ask for its version.
    sys.stdout.write(_HOW[shell] + template % script.source_vars() + "\n")
    return 0
