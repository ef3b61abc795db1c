"""What all verbs have in common as commands of click: help that is written as it is read, and exact words."""

from __future__ import annotations

from inspect import cleandoc
from typing import Any

import click


class Verb(click.Command):
    """A verb. In its help a paragraph with an indented line is printed as it stands, not filled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = unfilled(self.help or "")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; whatever is wrong with it is said to be so of this verb."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click leaves it out where an option lacks its value
            raise


class WordsVerb(Verb):
    """A verb whose words may stand after `--`; tells those apart from words without it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take note of a `--` before the first word."""
        before = list(args)
        rest = super().parse_args(ctx, args)
        words = ctx.params.get("words", ())
        start = len(before) - len(words)
        ctx.meta["spool.dashes"] = bool(words) and start > 0 and before[start - 1] == "--"
        return rest


def unfilled(text: str) -> str:
    """Return *text* with the mark of click before each paragraph that has an indented line."""
    paragraphs = cleandoc(text).split("\n\n")
    return "\n\n".join(f"\b\n{part}" if "\n  " in f"\n{part}" else part for part in paragraphs)
