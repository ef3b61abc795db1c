"""`spool completion`: print a shell completion script, which is click's, and the words that it offers.

The words of options and arguments are in one table, by name, so that verbs need not specify them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import click
from click.shell_completion import CompletionItem, get_completion_class

from spool.cli.group import JobArgument, Verb
from spool.cli.joboptions import OPTIONS
from spool.client.submit import default_root
from spool.core import layout
from spool.core.errors import SpoolError
from spool.core.layout import natural
from spool.core.model import State
from spool.formats.capabilities import loaded
from spool.store.tolerant import TolerantSpool

_MOST = 500  # longer lists of completions are useless


@click.command(cls=Verb)
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> int:
    """Print a completion script for a shell. It completes commands, options and their values, and job names.

    In ~/.bashrc, in ~/.zshrc after compinit, and once for fish:
      eval "$(spool completion bash)"
      eval "$(spool completion zsh)"
      spool completion fish > ~/.config/fish/completions/spool.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    sys.stdout.write(f"{kind(ctx.find_root().command, {}, 'spool', '_SPOOL_COMPLETE').source()}\n")
    return 0


def offer(command: click.Command, words: Collection[str]) -> None:
    """Let the options and arguments of a command, and of its subcommands among *words*, offer the tables' values."""
    for parameter in command.params:
        find = (_ARGUMENTS if isinstance(parameter, click.Argument) else _OPTIONS).get(parameter.name or "")
        if find is not None and not isinstance(parameter.type, click.Choice):
            parameter.shell_complete = partial(_offered, find)  # type: ignore[method-assign]
    if isinstance(command, click.Group):
        found = (command.get_command(click.Context(command), word) for word in words)
        for each in filter(None, found):
            offer(each, words)


def _offered(find: _Words | str, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return the possible values that begin with *incomplete*; none if the spool cannot be read."""
    if isinstance(find, str):
        return [CompletionItem(incomplete, type=find)]
    try:
        spool = TolerantSpool(ctx.find_root().params.get("root") or default_root())
        words = [word for word in find(ctx, spool, incomplete) if word.startswith(incomplete)]
    except (OSError, SpoolError):
        return []
    return [CompletionItem(word) for word in words[:_MOST]]


_Words = Callable[[click.Context, TolerantSpool, str], Iterable[str]]


def _fixed(words: Iterable[str]) -> _Words:
    return lambda ctx, spool, typed: words


def _listed(find: _Words) -> _Words:
    """Return *find* for an option that takes several words separated by commas; no word is offered twice."""

    def words(ctx: click.Context, spool: TolerantSpool, typed: str) -> list[str]:
        before, comma, last = typed.rpartition(",")
        return [f"{before}{comma}{word}" for word in find(ctx, spool, last) if word not in before.split(",")]

    return words


def _jobs(ctx: click.Context, spool: TolerantSpool, typed: str) -> list[str]:
    """Return the names that the verb of *ctx* can use."""
    verb = ctx.command_path.split()[1:]
    if verb[:1] == ["reserve"]:
        return [] if verb[1:] == ["create"] else sorted(spool.names(layout.RESERVATIONS), key=natural)
    places = next((each.places for each in ctx.command.params if isinstance(each, JobArgument)), layout.PLACES)
    given = ctx.params.get("names") or ()
    named = (spool.jobs_with_runs() if place == layout.JOBS else spool.names(place) for place in places)
    names = {name for each in named for name in each if name.startswith(typed)}
    return sorted(names.difference(given), key=natural)


def _gpu_types(ctx: click.Context, spool: TolerantSpool, typed: str) -> list[str]:
    from spool.query.rows import last_view

    view, _ = last_view(spool, 0)
    known = {gpu.name for gpu in view.machine.gpus if gpu.name} if view is not None and view.machine else ()
    return [*sorted(known), "auto"]


def _labels(key: str) -> _Words:
    """Find the values of *key* ("user", "project" or "tags") among the active jobs and those that ended last."""

    def words(ctx: click.Context, spool: TolerantSpool, typed: str) -> list[str]:
        from spool.query.jobs import JobLister

        found = (getattr(row, key) for row in JobLister(spool).listing(recent=_MOST).rows)
        labels = {label for value in found for label in (value if isinstance(value, tuple) else (value or "",))}
        return sorted(labels - {""}, key=natural)

    return words


def _signals(ctx: click.Context, spool: TolerantSpool, typed: str) -> Iterable[str]:
    from spool.formats.values import WARNING_SIGNALS

    return [f"{name}{'@60s' if ctx.info_name in ('submit', 'run', 'edit') else ''}" for name in WARNING_SIGNALS]


def _exports(ctx: click.Context, spool: TolerantSpool, typed: str) -> list[str]:
    from spool.client.draft import may_go

    return ["ALL", "NONE", *sorted(filter(may_go, os.environ))]


def _variables(ctx: click.Context, spool: TolerantSpool, typed: str) -> list[str]:
    return [name for name in _exports(ctx, spool, typed)[2:] for name in (name, f"{name}=")]


_KEYS = sorted({option.key for option in OPTIONS})

_ARGUMENTS: Mapping[str, _Words | str] = {
    "signal_name": _signals,
    "directory": "dir",
    "files": "file",
    "name": _jobs,
    "names": _jobs,
    "words": "file",
}
_OPTIONS: Mapping[str, _Words | str] = {
    **{option.word: _fixed(option.words) for option in OPTIONS if option.words and not option.value},
    **dict.fromkeys(("files", "output", "plot", "rows", "shell", "stderr", "stdout"), "file"),
    **dict.fromkeys(("root", "workdir"), "dir"),
    "columns": _listed(lambda ctx, spool, typed: loaded("spool.cli.ls:COLUMNS")),
    "depends_on": _listed(lambda ctx, spool, typed: [name for place in layout.PLACES for name in spool.names(place)]),
    "env": _variables,
    "export": _listed(_exports),
    "gpu_type": _listed(_gpu_types),
    "sets": _fixed([f"{key}=" for key in _KEYS]),
    "policy": _listed(_fixed(("fifo", "easy", "spool"))),
    "project": _labels("project"),
    "signal": _signals,
    "states": _listed(_fixed(State)),
    "tag": _labels("tags"),
    "tags": _listed(_labels("tags")),
    "unset": _fixed(_KEYS),
    "user": _labels("user"),
}
"""The possible values of an argument or option of that name, in any verb: words, files or directories."""
