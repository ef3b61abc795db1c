"""The verbs that write job files: `spool submit`, `run`, `check` and `edit`."""

from __future__ import annotations

import fcntl
import os
import shlex
import stat
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from spool.cli import joboptions, render
from spool.cli.group import (
    Verb,
    WordsVerb,
    for_each,
    json_option,
    made,
    named,
    names_argument,
    one_job,
    opened,
    option_in,
    own,
    strict_option,
)
from spool.cli.joboptions import COMMON_TITLE, key_options, values_of
from spool.cli.render import say, say_text, tell
from spool.cli.submission import Asked, draft_of, file_draft, publish, tell_doubts
from spool.client import submit as submitting
from spool.client.draft import Draft
from spool.client.submit import check_submitter, is_spool
from spool.core import layout
from spool.core.errors import ExitCode, InvalidFile, InvalidJob, SpoolError, SpoolUnusable, UsageError, cannot
from spool.core.layout import DONE, EXPORTED, HELD, QUEUED, RUNNING, why_not_name
from spool.core.model import JobDefaults, Problem, Spec, in_force
from spool.core.units import show_duration
from spool.formats import jobfile
from spool.formats.capabilities import OtherWay, contributed, engine_offer, loaded
from spool.formats.jobfile import edited
from spool.formats.toml import MAX_BYTES
from spool.query.foresight import doubts
from spool.store.glance import defaults_of
from spool.store.ownership import this_user
from spool.store.reading import is_too_long, read_named

if TYPE_CHECKING:
    from spool.store.spool import Spool  # imported when needed: a submission does not need it

_common, _environment = option_in(COMMON_TITLE), option_in("Environment")
name_option = _common(
    *("-n", "--name"), also=("-J", "--job-name"), metavar="NAME", help="Job name. Default: by the program."
)
shell_command_option = _common(
    *("-c", "--shell-command"), also=("--wrap",), metavar="TEXT", help="A text for the shell: -c 'sort a | uniq'."
)
replace_option = click.option(
    "--replace", is_flag=True, help="Replace a waiting or held job of that name; run after a running one."
)
export_option = _environment(
    "--export",
    multiple=True,
    metavar="ALL|NONE|NAME[=VALUE],…",
    help=f"Variables to copy, or patterns. Default: {', '.join(EXPORTED)}, or as configured.",
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
        option_in("")(
            "--ignore-directives",
            rare=True,
            is_flag=True,
            help="Ignore a script's lines for other schedulers, such as #SBATCH.",
        ),
        option_in("")(
            *("-v", "--verbose"),
            rare=True,
            is_flag=True,
            help="Report each line for another scheduler, also those with an equivalent.",
        ),
        _environment(
            "--capture/--no-capture",
            rare=True,
            default=None,
            help="Run a copy of the script, the default, or later what is at its path.",
        ),
    ):
        function = option(function)
    return function


@click.command(cls=WordsVerb, context_settings={"allow_interspersed_args": False})
@name_option
@shell_command_option
@_common("-f", "--file", "files", multiple=True, metavar="FILE", help="Submit this job file. May be repeated.")
@_common("--wait", "wait_for_it", also=("-W",), is_flag=True, help="Wait for the job to end, and exit with its code.")
@key_options
@option_in("Arrays")("--lines", metavar="FILE", help="Submit one job for each line, a shell command.")
@option_in("When it runs")("--hold", also=("-H",), is_flag=True, help="Submit it held, until `spool release`.")
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

    By hand: cd ~/.spool; cp ~/train.toml .tmp/; mv .tmp/train.toml queued/
    """
    root, request = ctx.obj, asked(ctx)
    jobs = _of_files(files, request, root) if files else [draft_of(each, root) for each in _each_script(ctx, request)]
    check_submitter(root)
    root = root if dry_run or is_spool(root) else made(root).root
    tell_doubts(root, jobs, strict=strict)
    if dry_run:
        for job in jobs:
            say_text(job.text().decode("utf-8-sig", "replace").replace("\r\n", "\n"))
        return 0
    publish(root, jobs, held=hold or jobs[0].held, replace=replace)
    for job in jobs:
        say(job.name, at_once=True)
    if not wait_for_it:
        return 0
    from spool.cli.wait import until_ended

    return until_ended(root, [job.name for job in jobs])


def _each_script(ctx: click.Context, request: Asked) -> list[Asked]:
    """Return the *request*, once for each script if `import` was given several."""
    paths = request.loose if ctx.meta.get("spool.import") else ()
    several = len(paths) > 1 and all(map(os.path.isfile, paths))
    return [replace(request, loose=(path,)) for path in paths] if several else [request]


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


_WAYS: tuple[OtherWay, ...] = tuple(way for _, way in contributed("way"))


def _other_ways(function: Callable[..., int]) -> Callable[..., int]:
    """Give the verb the options of its other ways, and their part of the help."""
    for way in reversed(_WAYS):
        option = option_in(COMMON_TITLE)(way.option, "runs", default=None, flag_value=way.runs, help=way.help)
        function = option(function)
    function.__doc__ = "\n\n".join([cleandoc(function.__doc__ or ""), *(way.text for way in _WAYS)])
    return function


@click.command(cls=WordsVerb, context_settings={"allow_interspersed_args": False})
@name_option
@shell_command_option
@option_in(COMMON_TITLE)("-q", "--quiet", is_flag=True, help="Print only the job's output.")
@_other_ways
@key_options
@export_option
@replace_option
@strict_option
@script_options
@click.argument("words", nargs=-1, metavar="[SCRIPT | - | -- COMMAND...]")
@click.pass_context
def run(ctx: click.Context, /, replace: bool, quiet: bool, strict: bool, runs: str | None = None, **_: Any) -> int:
    """Submit a job, follow its output and exit with its code.

    The job's output goes to stdout and its error output to stderr; if both are the same (a terminal), there is one log.
    Its stdin is empty, like that of every job, because it may run again while you are away.

    Ctrl-C cancels the job; a second Ctrl-C exits at once while the job is being stopped. If the job is held, by a user
    or by a hook's veto, a message says so, and the command waits until it is released. The exit codes are those of
    `spool wait`. For an array, each task's output is shown once the task has ended.

      spool run -g 1 -- python train.py
      spool run -c 'make -j4 && make check' --cpus 4
    """
    request = asked(ctx)
    if runs is not None:
        code: int = loaded(runs)(ctx.obj, request, quiet=quiet, strict=strict, replaces=replace)
        return code
    _check_readable(ctx.obj)
    draft = draft_of(request, ctx.obj, stderr_apart=not _one_output())
    job = draft.name
    spool = made(ctx.obj) if submitting.is_ours(ctx.obj) else opened(ctx.obj)
    tell_doubts(spool.root, [draft], strict=strict)
    before = spool.latest_run(job)
    publish(spool.root, [draft], held=draft.held, replace=replace)
    if not quiet:
        tell(f"job {job}")
    if not quiet and _has_input():
        tell("the job does not read this stdin: its own is empty; let it read a file, as in -c 'sort < words'")
    from spool.cli.wait import followed

    return followed(spool, job, before, quiet=quiet)


def _check_readable(root: str) -> None:
    """Raise SpoolUnusable if a job cannot be submitted to the spool at *root*, or its output cannot be read there."""
    submitting.check_submitter(root)
    jobs = layout.Layout(root).at(layout.JOBS)
    if not submitting.is_ours(root) and not os.access(jobs, os.R_OK | os.X_OK):
        why, remedy = "you may not read the output of its jobs", "`spool submit` submits a job without following it"
        raise SpoolUnusable(cannot("follow", "a job", why, where=jobs, remedy=remedy))


def _one_output() -> bool:
    """Whether stdout and stderr are one and the same file or terminal."""
    try:
        return os.path.sameopenfile(1, 2)
    except OSError:  # one of them is closed
        return True


def _has_input() -> bool:
    """Whether stdin has input that was probably meant for the job."""
    try:
        status = os.fstat(0)
        if stat.S_ISREG(status.st_mode):
            return os.lseek(0, 0, os.SEEK_CUR) < status.st_size
        if not (stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
            return False
        return fcntl.ioctl(0, termios.FIONREAD, bytes(4)) != bytes(4)
    except OSError:
        return False


_Checked = tuple[str, list[Problem], tuple[str, Spec] | None]
"""A file, its problems, and its job."""


def _print_schema(ctx: click.Context, parameter: click.Parameter, kind: str | None) -> None:
    """Print the schema line for editors, and exit."""
    if kind is not None:
        here = os.path.dirname(os.path.abspath(jobfile.__file__))
        render.say(f"#:schema {os.path.join(here, kind)}.schema.json")
        ctx.exit()


@click.command(cls=Verb)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(allow_dash=True))
@strict_option
@json_option
@click.option(
    "--schema",
    type=click.Choice(["job", "config", "reservation", "machine"]),
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Print the first line by which an editor completes and checks the keys of such a file.",
)
@click.pass_obj
def check(root: str, /, files: tuple[str, ...], strict: bool, as_json: bool) -> int:
    """Check job files, and report each error with its line.

    A file named config.toml is read as a configuration, one in a directory named reservations as a reservation, and
    /etc/spool/machine.toml as the configuration of the shared machine. A directory stands for all .toml files in it.
    Keys that a job file does not set come from `[defaults]` in the spool's configuration. The exit code is 4 if
    anything is wrong.

    If there is a spool, valid jobs are also checked against it. A job that can never run here, a notification that
    cannot be delivered, or a missing dependency gives a warning, or with --strict an error.

      spool check train.toml && cp train.toml ~/.spool/queued/
      spool check --schema job  # what to write into the first line
    """
    defaults = defaults_of(root)
    found = [(path, *_read(path, defaults)) for path in _listed(files)]
    warnings = _warnings(root, found)
    if strict:
        found = [(path, problems + warnings.pop(path, []), job) for path, problems, job in found]
    bad = [(path, problems) for path, problems, _ in found if problems]
    if as_json:
        files_json = [
            {"file": path, "valid": not problems, "problems": problems, "warnings": warnings.get(path, [])}
            for path, problems, _ in found
        ]
        render.as_json({"files": files_json})
    else:
        for path, problems in bad:
            for problem in problems:
                render.say(f"{path}:{problem.line or 1}: {problem.message}")
        good = len(found) - len(bad)
        if not found:
            tell(f"nothing to check: no job files (*.toml) in {', '.join(files)}")
        elif not bad:
            render.say(f"{good} file{' is' if good == 1 else 's are'} valid")
        for path, listed in warnings.items():
            for problem in listed:
                tell(f"{path}: warning: {problem.message}")
    return int(ExitCode.INVALID_FILE) if bad else 0


def _warnings(root: str, found: list[_Checked]) -> dict[str, list[Problem]]:
    """Return the warnings for each valid job file, checked against the spool at *root* if there is one."""
    if not is_spool(root):
        return {}
    jobs = {job[0]: path for path, _, job in found if job is not None}
    warnings: dict[str, list[Problem]] = {}
    for name, why in doubts(root, [job for _, _, job in found if job is not None]):
        warnings.setdefault(jobs[name], []).append(Problem(None, None, f"job {name} {why}"))
    return warnings


def _listed(files: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for path in files:
        if os.path.isdir(path):
            found += sorted(f"{path.rstrip('/')}/{name}" for name in os.listdir(path) if layout.job_of(name))
        else:
            found.append(path)
    return found


def _read(path: str, defaults: JobDefaults) -> tuple[list[Problem], tuple[str, Spec] | None]:
    """Return the problems of a file, and its job if it is valid."""
    from spool.formats import config, reservation  # no other command here needs them

    try:
        data = read_named(path, MAX_BYTES + 1)
    except OSError as error:
        return [Problem(None, None, f"cannot be read: {error.strerror}")], None
    base = os.path.basename(path)
    name = base.removesuffix(layout.JOB_SUFFIX) if path != "-" else "stdin"
    spec = None
    kinds = (kind for _, kinds in contributed("files") for kind in kinds)
    try:
        if base == layout.CONFIG:
            for advice in config.parse(data).advice:
                tell(f"{path}: warning: {advice}")
        elif kind := next((kind for kind in kinds if kind.path == os.path.abspath(path)), None):
            kind.parse(data)
        elif os.path.basename(os.path.dirname(os.path.abspath(path))) == layout.RESERVATIONS:
            reservation.parse(data, name=name, created_at_ns=0)
        else:
            spec = jobfile.parse(data, name=name, defaults=defaults)
    except InvalidFile as error:
        if data.startswith(b"#!"):
            remedy = f"`spool submit --dry-run {shlex.quote(path)}` prints the job file that it becomes"
            return [Problem(None, None, f"it is a script, not a job file; {remedy}")], None
        return list(error.problems), None
    why = why_not_name(name)
    if why is not None:
        return [Problem(None, None, f"the file's name is not a valid job name: {why}")], None
    return [], (name, spec) if spec is not None else None


@click.command(cls=Verb)
@names_argument(places=(QUEUED, HELD, RUNNING))
@option_in(COMMON_TITLE)("-c", "--shell-command", metavar="TEXT", help="A new command, as a string for the shell.")
@option_in(COMMON_TITLE)(
    "--unset", multiple=True, metavar="KEY", help="Remove a key: memory, env.DEBUG. May be repeated."
)
@option_in(COMMON_TITLE)("--first", is_flag=True, help="Give it a priority above your other waiting jobs.")
@option_in(COMMON_TITLE)("--last", is_flag=True, help="Give it a priority below them.")
@option_in(COMMON_TITLE)("--before", metavar="JOB", help="Give it a priority above that of this waiting job.")
@key_options
@click.pass_context
def edit(
    ctx: click.Context,
    /,
    names: tuple[str, ...],
    shell_command: str | None,
    unset: tuple[str, ...],
    first: bool,
    last: bool,
    before: str | None,
    **_: Any,
) -> int:
    """Change waiting or held jobs, or the time limit, priority and gpu_idle of running ones.

    For an array in progress, only `max_running` can be changed.

    With one job and no options, it opens $VISUAL or $EDITOR. The new text replaces the file only if it is valid.
    Comments, order and the job's place in the queue stay. A new time limit counts from the start of the run; a run that
    has already exceeded it is stopped at once.

      spool edit train
      spool edit train --priority 50 --memory 8G --unset time_limit
      spool edit train --time-limit 12h  # also while it is running
      spool edit train --first           # priority counts across users

    By hand: vim queued/train.toml
    """
    spool = own(ctx.obj)
    found = named(spool, names, (QUEUED, HELD, RUNNING))
    changes = joboptions.keys_of(values_of(ctx.params))
    if shell_command is not None:
        changes["command"] = shell_command
    if first + last + (before is not None) + ("priority" in changes) > 1:
        raise UsageError("--first, --last, --before and --priority cannot be combined; give one of them")
    rival = one_job(spool, before) if before is not None else None
    is_placed = first or last or rival is not None

    def changed(name: str) -> str:
        if not is_placed:
            return change_keys(spool, name, changes, unset)
        from spool.query.selection import priority_for  # imports half of the program

        changes["priority"] = priority_for(spool, _file(spool, name)[0], name, first=first, before=rival)
        return f"{change_keys(spool, name, changes, unset)}: priority {changes['priority']}"

    is_in_editor = not (is_placed or changes or unset)
    if not found or (is_in_editor and len(found) > 1):
        raise UsageError("name one job to edit its file, or jobs and the options to change")
    code = 0
    if is_in_editor:
        render.say(_edited(spool, *found))
    elif len(found) == 1:
        render.say(changed(*found))
    else:  # they keep their order
        code = for_each(reversed(found) if is_placed and not last else found, changed)
    specs = ((name, spool.job_spec(QUEUED, name) or spool.job_spec(HELD, name)) for name in found if not is_placed)
    for name, why in doubts(spool.root, [(name, spec) for name, spec in specs if spec is not None]):
        tell(f"warning: job {name} {why}")
    return code


def _edited(spool: Spool, name: str) -> str:
    """Change a job as the user edits its file, and return a message. Raises SpoolError."""
    place, text = _file(spool, name)
    new = _in_editor(name, text, spool.root)
    try:
        return _replaced(spool, name, place, text, new)
    except SpoolError:
        _keep(name, new)
        raise


def change_keys(spool: Spool, name: str, changes: Mapping[str, Any], unset: Sequence[str] = ()) -> str:
    """Change keys of a job that waits, is held or runs, and return a message. Raises SpoolError."""
    place, text = _file(spool, name)
    new = joboptions.checked(spool.root, name, edited(text, changes, unset, name=name), changes)
    return _replaced(spool, name, place, text, new)


def _replaced(spool: Spool, name: str, place: str, text: bytes, new: bytes) -> str:
    from spool.client.requests import Requests

    if place == RUNNING:
        _check_running(name, text, new, defaults_of(spool.root))
    if new == text:
        return f"{name} is unchanged"
    Requests(spool, this_user()).replace(name, place, text, new)
    others = [other for other in spool.places(name) if other not in (place, DONE)]
    where = f" ({place}/)" if others else ""
    unchanged = (f"the one in {other}/ is unchanged" for other in others)
    sooner = _ends_sooner(spool, name, new) if place == RUNNING else ()
    return "; ".join([f"{name}{where} changed", *unchanged, *sooner])


def _ends_sooner(spool: Spool, name: str, new: bytes) -> Iterator[str]:
    """Yield a warning that an engine, which has the old time limit, ends a job before its new one."""
    run = max(spool.runs(name), default=0)
    known, asked = spool.engine(name, run), spool.spec(name, run)
    offer = engine_offer(known[0]) if known is not None else None
    if known is None or offer is None or asked is None or asked.time_limit_ns is None:
        return
    limit_ns = jobfile.parse(new, name=name, defaults=defaults_of(spool.root)).time_limit_ns
    if limit_ns is None or limit_ns > asked.time_limit_ns:
        lasts = show_duration(asked.time_limit_ns)
        yield f"{offer.title} still ends job {known[2]} soon after {lasts}, unless an administrator raises that too"


def _file(spool: Spool, name: str) -> tuple[str, bytes]:
    for place in (QUEUED, HELD, RUNNING):
        text = spool.job_text(place, name)
        if is_too_long(text):
            path = spool.layout.job_file(place, name)
            raise SpoolError(cannot("edit", f"job {name}", "its file is larger than 1 MiB", remedy=f"replace {path}"))
        if text is not None:
            return place, text
    places = spool.places(name)
    if not places:
        raise spool.no_such_job("edit", f"job {name}", name)
    remedy = f"`spool requeue {name} --set KEY=VALUE` changes it and runs it again"
    raise SpoolError(cannot("edit", f"job {name}", "it has ended", remedy=remedy))


def _check_running(name: str, old: bytes, new: bytes, defaults: JobDefaults) -> None:
    """Raise SpoolError if a change is not possible while the job runs."""
    try:
        before = jobfile.parse(old, name=name, defaults=defaults)
    except InvalidJob:
        return  # it was changed by hand, and is restored now
    after = jobfile.parse(new, name=name, defaults=defaults)
    if before.is_array:
        if _with_limit_of(before, after) != after:
            why = "its tasks already exist; only max_running can be changed"
            raise SpoolError(cannot("edit", f"job {name}", why, remedy=f"edit the tasks: {name}_0 and so on"))
    elif in_force(before, after) != after:
        why = "it runs; only its time limit and priority, and gpu_idle, can be changed"
        remedy = f"`spool requeue {name} --set KEY=VALUE` stops it and runs it again with other keys"
        raise SpoolError(cannot("edit", f"job {name}", why, remedy=remedy))


def _with_limit_of(before: Spec, after: Spec) -> Spec:
    """Return an array's old file with the `max_running` of its new text, given as a key or after a `%`."""
    array = before.array
    if array is not None and after.array is not None:
        array = replace(array, max_running=after.array.max_running)
    return replace(before, max_running=after.max_running, array=array)


def _in_editor(name: str, text: bytes, root: str) -> bytes:
    """Return *text* as the user edits it, once it is valid. Raises SpoolError if the user gives up."""
    import subprocess
    import tempfile

    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    if editor == "vi" and not sys.stdin.isatty():
        remedy = f"`spool edit {name} --set KEY=VALUE` needs none"
        raise UsageError(cannot("edit", f"job {name}", "there is no terminal for an editor", remedy=remedy))
    with tempfile.TemporaryDirectory(prefix="spool-edit-") as directory:
        path = os.path.join(directory, f"{name}.toml")
        with open(path, "wb") as file:
            file.write(text)
        while True:
            code = subprocess.run(["/bin/sh", "-c", f'{editor} "$1"', "sh", path], check=False).returncode
            if code != 0:
                raise UsageError(cannot("edit", f"job {name}", f"the editor, {editor!r}, ended with exit code {code}"))
            try:
                with open(path, "rb") as file:
                    new = file.read()
            except FileNotFoundError:
                why = f"the editor, {editor!r}, left no file; the job is unchanged"
                raise UsageError(cannot("edit", f"job {name}", why)) from None
            try:
                jobfile.parse(new, name=name, defaults=defaults_of(root))
            except InvalidJob as error:
                if sys.stdin.isatty():
                    for problem in error.problems:
                        tell(problem.message)
                    if click.confirm("Edit it again?", default=True, err=True):
                        continue
                _keep(name, new)
                raise
            else:
                return jobfile.with_offset(new, text, name=name)


def _keep(name: str, text: bytes) -> None:
    """Save a text that did not become the job, and print its path."""
    import tempfile

    descriptor, path = tempfile.mkstemp(prefix=f"{name}.", suffix=".toml")
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
    tell(f"your text is saved in {path}")
