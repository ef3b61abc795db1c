"""The command line as a whole: the verbs, each imported on use, their help and errors, and what words on it mean.

Files hold only RFC 3339 and durations; the command line converts other forms of times: "16:00", "9pm",
"tomorrow 8:00", "friday", "friday 8:00", "2h", "2026-01-31 16:00". A day without a time is its beginning, so that on a
Friday "friday" is that of next week. A time without a day is the next such time, or the last one where the past is
asked for.
"""

from __future__ import annotations

import fnmatch
import gc
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, TypeVar

import click

from spool import __version__
from spool.cli import render
from spool.cli.render import code_of, tell
from spool.client import submit
from spool.core import layout
from spool.core.errors import ExitCode, InvalidValue, NoSuchJob, SpoolError, UsageError, cannot
from spool.core.layout import is_pattern, natural, why_not_name
from spool.core.model import State
from spool.core.units import parse_duration
from spool.formats.capabilities import ContributedVerb, capabilities, contributed, loaded, search
from spool.formats.toml import show
from spool.store.disk import is_yet_to_be_made, remedy_for

if TYPE_CHECKING:
    from spool.store.spool import Spool  # imported when needed: a submission does not need it


MORE, ADMIN = "More", "Administration"
"""The sections that only `spool help all` lists; the verbs of the second are those of `spool admin`."""

_SECTIONS = {
    "Jobs": {
        "submit": "Submit a job to the queue.",
        "run": "Submit a job, follow its output and exit with its code.",
        "ls": "List jobs that are waiting, running or recently ended.",
        "show": "Show everything about a job.",
        "why": "Explain why a job is not running yet, or how it ended.",
        "log": "Show or follow a job's output.",
        "attach": "Attach to the terminal of a running job.",
        "wait": "Wait for jobs to end, and exit with their code.",
        "cancel": "Cancel waiting or running jobs.",
        "hold": "Hold jobs until they are released.",
        "release": "Release held jobs.",
        "requeue": "Run ended or running jobs again.",
        "edit": "Change waiting jobs, or the limits of running ones.",
    },
    "The machine": {
        "info": "Show the machine, what is in use, and any problems.",
        "gpus": "Show each GPU, who uses it, and why it is unavailable.",
        "stats": "Show wait times, run times and usage of ended runs.",
    },
    "The spool": {
        "pause": "Stop starting jobs until `resume`.",
        "resume": "Start jobs again after `pause`.",
        "admin": "Run, maintain and check a spool.",
    },
    MORE: {
        "seff": "Compare what a job asked for with what it used.",
        "suspend": "Pause running jobs where they are.",
        "continue": "Continue suspended jobs.",
        "plan": "Show what would start now, what waits, and why.",
        "reserve": "Reserve GPUs for a user or project.",
    },
    ADMIN: {
        "init": "Create a spool.",
        "dispatch": "Run the dispatcher, which starts jobs.",
        "service": "Keep the dispatcher running with systemd.",
        "check": "Check job files for errors.",
        "gc": "Remove old records and output.",
        "doctor": "Diagnose problems with this spool and this machine.",
        "signal": "Send a signal to the processes of running jobs.",
        "demo": "Run a demo with real jobs in a temporary spool.",
        "completion": "Print a shell completion script.",
    },
}


def _contributed() -> dict[str, ContributedVerb]:
    return {verb: each for one in capabilities() for verb, each in one.verbs.items()}


def sections() -> dict[str, dict[str, str]]:
    """Return the verbs by section of the help, each with its line there; one that is contributed is behind another."""
    found = {title: dict(verbs) for title, verbs in _SECTIONS.items()}
    for verb, each in _contributed().items():
        verbs = found.setdefault(each.section, {})
        at = [*verbs].index(each.after) + 1 if each.after in verbs else len(verbs)
        rows = [*verbs.items()]
        found[each.section] = dict([*rows[:at], (verb, each.about), *rows[at:]])
    return found


SECTIONS = tuple(sections().items())
"""The verbs that come with spool."""

VERBS = {verb: short for _, verbs in SECTIONS for verb, short in verbs.items()}
_COMMANDS = {  # where a verb is the `command` of no module of its own
    verb: f"{module}:{verb}"
    for module, verbs in {
        "control": "cancel hold release requeue suspend pause resume",
        "dispatch": "gc init", "info": "gpus reserve", "show": "seff", "submit": "check edit run",
        "wait": "attach log", "why": "plan",
    }.items()
    for verb in verbs.split()
} | {
    "admin": "group:admin", "continue": "control:go_on", "service": "dispatch:keep", "signal": "control:send",
}  # fmt: skip
_ELSEWHERE = {
    word: verb
    for verb, words in {
        "submit": "sbatch gbatch add enqueue new create qsub bsub batch", "run": "srun salloc exec", "why": "sprio",
        "ls": "squeue gqueue queue list status ps jobs qstat atq bjobs",
        "cancel": "scancel gcancel kill rm remove delete stop abort terminate end del qdel atrm bkill",
        "log": "logs tail cat output", "log -f": "follow follow-log", "dispatch": "start daemon",
        "show": "view describe inspect", "ls --watch": "watch", "top": "monitor htop dashboard",
        "release": "unhold qrls", "resume": "unpause", "hold": "stash park qhold",
        "edit --first": "prioritize up urgent", "requeue": "retry resubmit again qrerun restart redo",
        "gc": "clear purge prune cleanup clean", "check": "validate lint", "doctor": "config", "--version": "version",
        "completion": "completions", "attach": "sattach", "edit": "qalter update modify change set scontrol",
        "continue": "cont thaw unsuspend", "suspend": "freeze", "info": "sinfo ginfo", "reserve": "gctl",
        "gpus": "nvidia-smi gpu", "reserve list": "reservations", "ls --plan": "predict",
        "stats": "gstats sreport history", "plot": "gantt chart timeline", "ls -a": "sacct",
        "edit --priority": "nice renice", "submit --start-after": "at",
        "submit --dry-run": "convert",
    }.items()
    for word in words.split()
}  # fmt: skip
LAST = "@"
"""Stands for the job that the user submitted last. No job can have that name."""

_MOST_MEANT = 3  # options suggested in a message
_FLAGS = 26  # cells at most for the options in a help with sections


def _is_verb(word: str) -> bool:
    """Whether there is such a verb, if need be in an installed package."""
    return word in VERBS or (search() and word in _contributed())


class Verb(click.Command):
    """A verb. In its help a paragraph with an indented line is printed as is, not filled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = unfilled(self.help or "")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; errors name this verb."""
        ctx.meta[ALL] = args[-2:] in (["--help", "all"], ["-h", "all"])
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click leaves it out if an option lacks its value
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb, with garbage collection enabled again for everything but the imported modules."""
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by section."""
        sections = by_section(ctx)
        if len(sections) == 1:
            super().format_options(ctx, formatter)
            return
        cells = min(_FLAGS, formatter.width // 3)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl([(f"{flags:{cells}}", text) for flags, text in records], col_max=cells)


ALL = "spool.help_all"
"""Where a context says that its help lists everything."""


def by_section(ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Return the options of a command with their help, by `section`, those without one last."""
    sections: dict[str, list[tuple[str, str]]] = {}
    options = [each for each in ctx.command.get_params(ctx) if isinstance(each, click.Option)]
    listed = [each for each in options if ctx.meta.get(ALL) or not getattr(each, "rare", False)]
    for option in listed:
        record = option.get_help_record(ctx)
        if record is not None and "--help" in option.opts and len(listed) < len(options):
            record = record[0], "Show this message; `--help all` lists the rest."
        if record is not None:
            sections.setdefault(getattr(option, "section", ""), []).append(record)
    rest = sections.pop("", [])
    return {**sections, "Other options" if sections else "Options": rest}


class JobArgument(click.Argument):
    """The names of jobs on the command line. `@` is the last job; a shell completes those in *places*."""

    def __init__(self, *args: Any, places: tuple[str, ...] = layout.PLACES, **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self.places = places


class WordsVerb(Verb):
    """A verb that takes words, with or without `--` before them, and records which."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Record whether `--` comes before the first word."""
        before = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _answered(error, before) from None
        words = ctx.params.get("words", ())
        start = len(before) - len(words)
        last = before[start - 1] if words and start else ""
        ctx.meta["spool.dashes"] = last == "--"
        is_value = words[:1] == ("false",) or (words[:1] == ("true",) and len(words) > 1)
        if is_value and (told := _of_a_switch(self, last)):
            raise UsageError(f"{told}; to run {words[0]}, write it after `--`")
        return rest


def _of_a_switch(command: click.Command, flag: str) -> str:
    """Return what to write instead of a value after *flag*, "" if *command* has no opposite of it."""
    for each in command.params:
        if isinstance(each, click.Option) and each.secondary_opts and flag in (*each.opts, *each.secondary_opts):
            opposite = (each.secondary_opts if flag in each.opts else each.opts)[0]
            return f"{flag} takes no value; its opposite is {opposite}"
    return ""


def _answered(error: click.NoSuchOption, words: Sequence[str]) -> Exception:
    """Return the error for an unknown option: the equivalent here, if another tool has it."""
    name, value = error.option_name, None
    for at, word in enumerate(words):
        if word.startswith(f"{name}="):
            value = word.partition("=")[2]
        elif word == name and at + 1 < len(words) and not words[at + 1].startswith("-"):
            value = words[at + 1]
    for _, answer in contributed("answers"):
        if (told := answer(name, value, words)) is not None:
            return UsageError(f"unknown option {name}; {told}")
    return error


def unfilled(text: str) -> str:
    """Return *text* with click's mark before each paragraph that has an indented line."""
    paragraphs = cleandoc(text).split("\n\n")
    return "\n\n".join(f"\b\n{part}" if "\n  " in f"\n{part}" else part for part in paragraphs)


admin = Verb(
    "admin",
    help="Run, maintain and check a spool.\n\n"
    + "\n".join(f"  spool admin {verb:<12}{about}" for verb, about in dict(SECTIONS)[ADMIN].items())
    + "\n\nThe word `admin` can be left out.",
)


class Verbs(click.Group):
    """The group of all verbs; a verb's module is imported when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the verb's command, None if there is none."""
        if not _is_verb(cmd_name):
            return None
        short = VERBS.get(cmd_name, "")
        if (contributed := _contributed().get(cmd_name)) is not None:
            command, short = loaded(contributed.command), contributed.about
        else:
            command = loaded(f"spool.cli.{_COMMANDS.get(cmd_name, f'{cmd_name}:command')}")
        assert isinstance(command, click.Command)
        command.short_help = short  # shown by a shell beside the verb; click would truncate a longer text
        if cmd_name == "plan" or cmd_name in sections()[ADMIN]:
            command.epilog = f"Also: `spool {'ls --plan' if cmd_name == 'plan' else f'admin {cmd_name}'}`."
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or suggest a similar one. `help VERB` is `VERB --help`."""
        verb = args[0]
        if verb == "help":
            ctx.meta[ALL] = args[1:] == ["all"]
            return self.resolve_command(ctx, ["--help"] if ctx.meta[ALL] else [*args[1:2], "--help", *args[2:]])
        if verb == "admin" and not "".join(args[1:2]).startswith("-"):
            return self.resolve_command(ctx, args[1:] or ["admin", "--help"])
        if verb == "ls" and "--plan" in args:
            return self.resolve_command(ctx, ["plan", *(word for word in args[1:] if word != "--plan")])
        if verb in _RENAMED:
            tell(f"`{verb}` is now `{' '.join(_RENAMED[verb])}`")
            ctx.meta[f"spool.{verb}"] = True
            args = [*_RENAMED[verb], *args[1:]]
            verb = args[0]
        if not verb.startswith("-") and not _is_verb(verb):
            import difflib

            low = verb.lower()
            near = [low] if low in VERBS else difflib.get_close_matches(low, VERBS, n=1)
            meant = _ELSEWHERE.get(low) or (near[0] if near else None)
            hint = f"did you mean `spool {meant}`?" if meant else "`spool --help` lists the commands"
            raise UsageError(f"unknown command {verb!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs by section, without importing them."""
        search()  # the help lists those of installed packages too
        for title, verbs in sections().items():
            if ctx.meta.get(ALL) or title not in (MORE, ADMIN):
                with formatter.section(title):
                    formatter.write_dl(list(verbs.items()))
        if not ctx.meta.get(ALL):
            with formatter.section(MORE):
                formatter.write_text(f"{', '.join(sections()[MORE])}: `spool help all` lists everything.")


_RENAMED = {"import": ("submit", "--dry-run"), "move": ("edit",)}
"""Verbs that other words have taken the place of, and these words."""


class Subverbs(click.Group):
    """A verb with verbs of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = unfilled(self.help or "")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or list the available ones."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            known = ", ".join(self.commands)
            raise click.UsageError(f"unknown command {args[0]!r}; the commands are {known}", ctx)
        return super().resolve_command(ctx, args)


_EPILOG = unfilled("""
Everything here also works with cp, mv, rm and cat:
  mv queued/a.toml held/       holds job a        (spool hold a)
  rm running/a.toml            cancels it         (spool cancel a)
  mv done/a.toml queued/       runs it again      (spool requeue a)
  cat jobs/a/1/log             shows its output   (spool log a)
""")


@click.group(
    cls=Verbs,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=True,
)
@click.option("--spool", "root", metavar="DIR", help="The spool to use. Default: $SPOOL_DIR, or ~/.spool.")
@click.version_option(__version__, "-V", "--version", prog_name="spool", message="%(prog)s %(version)s")
@click.pass_context
def spool(ctx: click.Context, root: str | None) -> None:
    """Run jobs from a directory: a job is a TOML file, and its folder is its state."""
    ctx.obj = submit.root_at(root) if root else submit.default_root()


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code; expected errors print one line on stderr."""
    return code_of(lambda: _clicked(arguments))


def _clicked(arguments: Sequence[str]) -> int:
    try:
        code = spool.main(args=list(arguments), prog_name="spool", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        ctx = getattr(error, "ctx", None)
        path = ctx.command_path if ctx is not None else "spool"
        help_hint = f" (see `{path} --help`)" if isinstance(error, click.UsageError) else ""
        message = _in_our_words(error, ctx)
        tell(f"{message[:1].lower()}{message[1:].rstrip('.')}{help_hint}")
        return error.exit_code
    except click.Abort:
        return int(ExitCode.INTERRUPTED)
    return code if isinstance(code, int) else 0


def _in_our_words(error: click.ClickException, ctx: click.Context | None) -> str:
    """Return the mistake in a command line, without click's own type names."""
    message = " ".join(error.format_message().split())
    if isinstance(error, click.NoSuchOption):
        return _of_an_unknown_option(error.option_name, error.possibilities or (), ctx)
    if isinstance(error, click.BadOptionUsage) and message.endswith("requires an argument."):
        return f"option {error.option_name} needs a value"
    if isinstance(error, click.BadOptionUsage) and message.endswith("does not take a value.") and ctx is not None:
        return _of_a_switch(ctx.command, error.option_name) or f"{error.option_name} takes no value"
    if isinstance(error, click.BadParameter) and error.param is not None:
        wanted = _number_wanted(error.param.type)
        given = message.partition(": ")[2].partition(" is not ")[0]
        if wanted and given:
            return f"{error.param.opts[-1]} must be {wanted}, not {given}"
    if message.startswith("Got unexpected extra argument") and ctx is not None:
        extra = message.partition("(")[2].rpartition(")")[0]
        takes = " ".join(each.make_metavar(ctx) for each in ctx.command.params if isinstance(each, click.Argument))
        return f"unexpected argument {extra!r}; `{ctx.command_path}` takes {f'only {takes}' if takes else 'none'}"
    return message


def _of_an_unknown_option(name: str, near: Sequence[str], ctx: click.Context | None) -> str:
    """Suggest replacements for the unknown option *name*: options that begin with it, else the *near* ones."""
    if ctx is not None and ctx.parent is not None and name == "--spool":
        return f"{name} stands before the command: `spool {name} DIR {ctx.command_path.partition(' ')[2]} …`"
    if name == "-1":
        return f"unknown option {name}; `{LAST}` is the job that you submitted last"
    if name == "--all":
        return f"unknown option {name}; name jobs, where '*' means all of them"
    options = ctx.command.params if ctx is not None else ()
    known = {word for each in options for word in (*each.opts, *each.secondary_opts, *getattr(each, "also", ()))}
    begun = sorted(word for word in known if name.startswith("--") and word.startswith(name))
    meant = [f"{name}s"] if f"{name}s" in known else begun[:_MOST_MEANT] or sorted(near)
    meant = meant or [word for word in known if len(name) > 2 and word == name.lower()]
    if "--state" in known and name.startswith("--") and name[2:] in {*layout.PLACES, *State}:
        meant = [f"--state {name[2:]}"]
    elif name in ("--me", "--mine") and "--user" in known:
        meant = ["--user $USER"]
    return f"unknown option {name}" + (f"; did you mean {' or '.join(meant)}?" if meant else "")


def _number_wanted(kind: object) -> str:
    """Describe the numbers that *kind* takes, "" if it takes something else."""
    if not isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return ""
    word = "a whole number" if isinstance(kind, click.types.IntParamType) else "a number"
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    if most is not None:
        return f"{word} from {least:g} to {most:g}"
    if least is None:
        return word
    return f"{word} above {least:g}" if getattr(kind, "min_open", False) else f"{word} of at least {least:g}"


F = TypeVar("F", bound=Callable[..., object])


class SpelledOption(click.Option):
    """An option in a *section* of the help; a *rare* one is listed by `--help all`.

    It also accepts other tools' spellings, which the help does not list.
    """

    def __init__(
        self, *args: Any, also: Sequence[str] = (), section: str = "", rare: bool = False, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.also = also
        self.section = section
        self.rare = rare

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


def made(root: str) -> Spool:
    """Return the spool at *root*, created if it does not exist. Raises SpoolUnusable."""
    if submit.ensure_spool(root):
        tell(f"created a new spool in {root}")
    return opened(root)


def own(root: str) -> Spool:
    """Return the spool at *root* for a command that changes it. Raises SpoolUnusable if it is not this user's."""
    from spool.store.ownership import check_owner

    check_owner(root)
    return opened(root)


def ensure_dispatcher(root: str) -> None:
    """Start a dispatcher in the background if none is running, or say how."""
    from spool.client import autostart  # imported when needed: most commands only look

    problem = autostart.ensure(root)
    if problem is not None:
        tell(problem)


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
    job, run = run_named(text)
    if run is not None:
        remedy = f"for run {run} of job {job} write `{job} --run {run}`"
        raise NoSuchJob(cannot("find", f"job {text}", "a name has no `/`", remedy=remedy))
    name = (text.rstrip("/") or text).rpartition("/")[2].removesuffix(layout.JOB_SUFFIX)
    if not layout.valid_name(name):
        raise NoSuchJob(cannot("find", f"job {text!r}", f"not a valid job name: {why_not_name(name)}"))
    return name


def run_named(text: str) -> tuple[str, int | None]:
    """Return the job and the run that `JOB/RUN` names; of any other text itself, and None."""
    job, _, run = text.rstrip("/").rpartition("/")
    is_job = job == LAST or (layout.valid_name(job) and job not in layout.DIRECTORIES)
    return (job, int(run)) if is_job and re.fullmatch("[0-9]{1,9}", run) else (text, None)


def carried_out(verb: str, **given: object) -> int:
    """Carry out another verb, with all that it takes, instead of this one; return the exit code."""
    ctx = click.get_current_context()
    command = spool.get_command(ctx, verb)
    if command is None:
        raise UsageError(f"this needs `spool {verb}`, which is not installed")
    return int(ctx.invoke(command, **given))


_STATES_OF_SLURM = {
    word: state
    for state, words in {
        State.QUEUED: "pd pending", State.RUNNING: "r", State.STOPPING: "cg completing", State.FINISHED: "cd completed",
        State.FAILED: "f", State.CANCELLED: "ca", State.TIMEOUT: "to", State.OUT_OF_MEMORY: "oom",
        State.LOST: "nf node_fail", State.UNSCHEDULABLE: "dl deadline",
    }.items()
    for word in words.split()
}  # fmt: skip


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
    return None if text is None else value_of(option, text, lambda text: moment(text, now_ns))


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


name_argument = partial(click.argument, "name", cls=JobArgument)
names_argument = partial(click.argument, "names", cls=JobArgument, nargs=-1, metavar="NAME...")
states_option = option_in("")(
    "-s", "--state", "states", also=("-t",), multiple=True, metavar="STATE,...", help="Only jobs in this state."
)
strict_option = option_in("")(
    "--strict", is_flag=True, rare=True, help="Warnings are errors: a job that can never run, a missing dependency."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_CLOCK = r"([01]?\d|2[0-3]):([0-5]\d)"
_WORDS = re.compile(rf"(?=.)([a-z]{{3,}})?(?:(?:^| ){_CLOCK})?", re.ASCII)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_TWELVE = re.compile(r"\b(0?[1-9]|1[0-2])(?::([0-5]\d))? ?([ap])m\b", re.ASCII)
_FORMS = 'write "16:00", "{} 8:00", "friday", "friday 8:00", "2h" or "2026-01-31 16:00"'


def understood(text: str, now_ns: int, *, past: bool = False) -> str:
    """Return *text* as a date and time or a duration, as a file has it, seen from *now_ns* in local time.

    With *past* the last such moment is meant, not the next. Raises InvalidValue.
    """
    from spool.formats.values import with_offset  # most commands are given no time

    words = _TWELVE.sub(_of_24, " ".join(text.lower().split()))
    if _DATE.match(words):
        return str(with_offset(f"{words}T00:00" if _DATE.fullmatch(words) else text.strip()))
    match = _WORDS.fullmatch(words)
    found = _calendar(match, datetime.fromtimestamp(now_ns // 1_000_000_000), past=past) if match is not None else None
    if found is not None:
        return datetime.fromtimestamp(found.timestamp(), UTC).astimezone().isoformat(timespec="seconds")
    length = words if past else words.removeprefix("now").removeprefix("+")
    try:
        if ":" in length:  # "16:00:00" could be a time of day or a duration
            raise InvalidValue(f"{show(text)} is not a time")
        parse_duration(length)
    except InvalidValue as error:
        told = error if length[:1].isdigit() else f"{show(text)} is not a time"
        raise InvalidValue(f"{told}; {_FORMS.format('yesterday' if past else 'tomorrow')}") from None
    return length


def _of_24(match: re.Match[str]) -> str:
    """Return a time such as "9pm" with the hours from 0 to 23."""
    return f"{int(match[1]) % 12 + 12 * (match[3] == 'p'):02}:{match[2] or '00'}"


def moment(text: str, now_ns: int) -> int:
    """Return the past instant that *text* means; a duration such as "7d" is that long ago. Raises InvalidValue."""
    from spool.formats.values import moment_or_delay

    at_ns, ago_ns = moment_or_delay(understood(text, now_ns, past=True))
    return at_ns if at_ns is not None else now_ns - (ago_ns or 0)


def _calendar(match: re.Match[str], now: datetime, *, past: bool) -> datetime | None:
    """Return the moment that a day, a time, or both name; None for another word."""
    day, clock = match[1], timedelta(hours=int(match[2] or 0), minutes=int(match[3] or 0))
    midnight = datetime(now.year, now.month, now.day)
    if day == ("yesterday" if past else "tomorrow"):
        return midnight + timedelta(days=-1 if past else 1) + clock
    if day == "today" and past:
        return midnight + clock
    if day is None:
        return _nearest(midnight + clock, now, timedelta(days=1), past=past)
    number = next((number for number, name in enumerate(_DAYS) if name.startswith(day)), None)
    if number is None:
        return None
    first = midnight + timedelta(days=(number - now.weekday()) % 7)
    return _nearest(first + clock, now, timedelta(days=7), past=past)


def _nearest(found: datetime, now: datetime, step: timedelta, *, past: bool) -> datetime:
    """Return the next or last moment that is *found* or a multiple of *step* away."""
    now_s = now.timestamp()
    if past:
        return found if found.timestamp() <= now_s else found - step
    soon = (each for each in (found, found.replace(fold=1)) if each.timestamp() > now_s)  # 2:30 may come twice
    return next(soon, found + step)
