"""Shared parts of verbs: finding the spool and the jobs, and continuing after a failure."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from spool.cli import render
from spool.cli.group import LAST, JobArgument
from spool.cli.telling import tell
from spool.core import layout
from spool.core.errors import ExitCode, InvalidValue, NoSuchJob, SpoolError, UsageError, cannot
from spool.core.layout import is_pattern, natural, why_not_name
from spool.core.model import State
from spool.store.disk import is_yet_to_be_made, remedy_for

if TYPE_CHECKING:
    from spool.store.spool import Spool  # imported when needed: a submission does not need it


F = TypeVar("F", bound=Callable[..., object])


class SpelledOption(click.Option):
    """An option in a *section* of the help. It also accepts other tools' spellings, which the help does not list."""

    def __init__(self, *args: Any, also: Sequence[str] = (), section: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.also = also
        self.section = section

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Register every spelling with the parser."""
        own = self.opts
        self.opts = [*own, *self.also]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = own


def option_in(section: str) -> Callable[..., Callable[[F], F]]:
    """Return `click.option` for options in a *section* of the help."""
    return partial(click.option, cls=SpelledOption, section=section)


def opened(root: str) -> Spool:
    """Return the spool at *root*. Raises SpoolUnusable if there is none."""
    from spool.store.spool import Spool

    return Spool.open(root)


def own(root: str) -> Spool:
    """Return the spool at *root* for a command that changes it. Raises SpoolUnusable if it is not this user's."""
    from spool.store.ownership import check_owner

    check_owner(root)
    return opened(root)


def viewed(root: str) -> Spool:
    """Return the spool at *root* for a command that lists: unreadable files are left out, with a warning on stderr.

    Before there is a spool it is empty, and stderr says so. Raises SpoolUnusable if something else is there.
    """
    from spool.store.tolerant import TolerantSpool

    if is_yet_to_be_made(root):
        tell(f"no spool in {root} yet; `spool submit` makes one")
        return TolerantSpool(root)
    spool = TolerantSpool.open(root)
    assert isinstance(spool, TolerantSpool)

    def tell_of_it() -> None:
        for line in spool.told():
            tell(line)

    click.get_current_context().call_on_close(tell_of_it)
    return spool


def named(spool: Spool, patterns: Iterable[str], places: Sequence[str] = layout.PLACES) -> list[str]:
    """Return the jobs that *patterns* match, each once: names unchanged, globs with their matches in *places*.

    `@` is the last job. A file's name or path (`train.toml`, `queued/train.toml`) stands for its job. Raises NoSuchJob
    for a glob that matches nothing.
    """
    found: dict[str, None] = {}
    listed: list[str] | None = None
    for pattern in patterns:
        if not is_pattern(pattern):
            found[one_job(spool, pattern)] = None
            continue
        if listed is None:
            listed = sorted({name for place in places for name in spool.names(place)}, key=natural)
        matches = [name for name in listed if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            where = "/, ".join(places)
            raise NoSuchJob(cannot("find", "jobs", f"no job in {where}/ matches {pattern!r}"))
        found.update(dict.fromkeys(matches))
    return list(found)


def one_job(spool: Spool, text: str) -> str:
    """Return the job that *text* names; `@` is the last one submitted. Raises NoSuchJob."""
    if text != LAST:
        return job_name(text)
    from spool.query.selection import last_job
    from spool.store.ownership import this_user

    return last_job(spool, this_user())


def job_name(text: str) -> str:
    """Return the job that *text* names: a job's name, or its file's name or path. Raises NoSuchJob."""
    name = os.path.basename(text.rstrip("/")) if text.rstrip("/") else text
    name = name.removesuffix(layout.JOB_SUFFIX)
    if not layout.valid_name(name):
        raise NoSuchJob(cannot("find", f"job {text!r}", f"not a valid job name: {why_not_name(name)}"))
    return name


_STATES_OF_SLURM = {
    word: state
    for words, state in (
        ("pd pending", State.QUEUED),
        ("r", State.RUNNING),
        ("cg completing", State.STOPPING),
        ("cd completed", State.FINISHED),
        ("f", State.FAILED),
        ("ca", State.CANCELLED),
        ("to", State.TIMEOUT),
        ("oom", State.OUT_OF_MEMORY),
        ("nf node_fail", State.LOST),
        ("dl deadline", State.UNSCHEDULABLE),
    )
    for word in words.split()
}


def states_of(texts: Sequence[str]) -> frozenset[State]:
    """Return the states given to `--state`, each a word or several separated by commas. Raises UsageError."""
    words = [word.strip().lower() for text in texts for word in text.split(",") if word.strip()]
    if texts and not words:
        raise click.UsageError(f"--state is empty; the states are {', '.join(State)}")
    known = {state.value: state for state in State} | _STATES_OF_SLURM
    for word in words:
        if word not in known:
            raise click.UsageError(f"unknown state {word!r}; the states are {', '.join(State)}")
    return frozenset(known[word] for word in words)


def moment_of(option: str, text: str | None, now_ns: int) -> int | None:
    """Return the instant given to an option, None if it was not given. Raises UsageError."""
    if text is None:
        return None
    from spool.cli.moments import moment

    try:
        return moment(text, now_ns)
    except InvalidValue as error:
        raise UsageError(f"cannot understand {option}: {error}") from None


T = TypeVar("T")


def value_of(option: str, text: str, parse: Callable[[str], T]) -> T:
    """Return *parse* of the value given to an option. Raises UsageError, which names the option."""
    try:
        return parse(text)
    except InvalidValue as error:
        raise UsageError(cannot("use", option, str(error))) from None


def for_each(names: Iterable[str], act: Callable[[str], str]) -> int:
    """Call *act* for each name and print its result, continuing after failures. Return the highest exit code."""
    worst = 0
    for name in names:
        try:
            done = act(name)
        except SpoolError as error:
            tell(str(error))
            worst = max(worst, int(error.exit_code))
            continue
        except OSError as error:
            tell(cannot("change", f"job {name}", error.strerror or str(error), remedy=remedy_for(error)))
            worst = max(worst, int(ExitCode.SPOOL_UNUSABLE))
            continue
        if done:
            render.say(done)
    return worst


name_argument = click.argument("name", cls=JobArgument)
names_argument = click.argument("names", cls=JobArgument, nargs=-1, metavar="NAME...")
states_option = option_in("")(
    "-s", "--state", "states", also=("-t",), multiple=True, metavar="STATE,...", help="Only jobs in this state."
)
strict_option = click.option(
    "--strict", is_flag=True, help="Treat warnings as errors: a job that can never run, or a missing dependency."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
