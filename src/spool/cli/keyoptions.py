"""The table of options as options of click, their help taken from the descriptions of the job file's keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import click

from spool.cli.completing import complete_names
from spool.cli.joboptions import FLAG, OPTIONS, WORD, Option, Values

F = TypeVar("F", bound=Callable[..., Any])

_INSTEAD = {
    "env": "An environment variable; without =VALUE it is passed on as it is now. May be repeated.",
    "depends_on": "Jobs that must finish first; before a colon any, ended, failed or each. May be repeated.",
    "resources": "What it needs of the resources that the configuration names; NAME alone is 1. May be repeated.",
    "matrix": "Makes many jobs: a key and its values. May be repeated; {key} is replaced in the command.",
    "workdir": "Where the command runs. Default: here.",
    "requeue": "Run it again after a reboot or when it vanished. Default: yes, at most 3 times.",
    "stdout": "Where the output goes: %n is the job, %r the run, %a the index. Default: a file in the spool.",
    "retry.on": "Outcomes (failed, timeout, out_of_memory) and exit codes to try again after. Default: failed.",
    "rows": "Makes many jobs: one for each row of a table; its first line has the keys. {key} is replaced.",
    "array": "Makes many jobs of one: their indices, with a step :2, at most 4 of them at once %4.",
}

_WORDS = {"tmux": "Run it in a terminal, to which `spool attach` goes: the same as --executor tmux."}


class KeyOption(click.Option):
    """An option for one key of the job file. Its help is looked up when help is asked for."""

    key: str = ""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option and its help."""
        if not self.help:
            self.help = _INSTEAD.get(self.key) or _descriptions().get(self.key, "")
        return super().get_help_record(ctx)


@cache
def _descriptions() -> dict[str, str]:
    """Return the description of each key, dotted, without the marks of Markdown."""
    from spool.formats.schema import schema

    made = schema("job")
    tables = {"retry": "RetryTable", "notify": "NotifyTable"}
    found = dict(made["properties"])
    for prefix, table in tables.items():
        found |= {f"{prefix}.{key}": value for key, value in made["$defs"][table]["properties"].items()}
    return {key: str(value.get("description", "")).replace("`", "") for key, value in found.items()}


def key_options(function: F) -> F:
    """Give a command an option for every key of a job file."""
    for option in reversed(OPTIONS):
        function = _click_option(option)(function)
    return function


def _click_option(option: Option) -> Callable[[F], F]:
    def add(function: F) -> F:
        if option.kind == WORD:
            value, said = option.metavar, _WORDS[option.metavar]
            made = click.option(*option.flags, option.word, cls=KeyOption, flag_value=value, default=None, help=said)(
                function
            )
        elif option.kind == FLAG:
            made = click.option("/".join(option.flags), option.word, cls=KeyOption, default=None)(function)
        else:
            made = click.option(
                *option.flags,
                option.word,
                cls=KeyOption,
                metavar=option.metavar,
                multiple=option.repeats,
                shell_complete=complete_names if option.key == "depends_on" else None,
            )(function)
        added = made.__click_params__[-1]  # type: ignore[attr-defined]  # where click keeps them until it has all
        added.key = option.key
        return made

    return add


def values_of(parameters: dict[str, Any]) -> Values:
    """Return what click found for the options of the table, as the table's own reader returns it."""
    values: Values = {}
    for option in OPTIONS:
        given = parameters.get(option.word)
        if given is None or given == ():
            continue
        if option.kind == FLAG:
            values[option.key] = ["true" if given else "false"]
        else:
            values[option.key] = list(given) if option.repeats else [given]
    return values
