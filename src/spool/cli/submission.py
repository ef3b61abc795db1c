"""From the command line to a job file in the spool: shared by `submit` and `run`.

`submit` here is `spool submit` for every command line that is right: without click, which takes longer to import than
all else. Help and wrong words are left to click, which has the same options in `cli.submit`.
"""

from __future__ import annotations

import gc
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from spool.cli import fastsubmit, joboptions, scripts
from spool.cli.render import progress, say, say_text
from spool.cli.telling import code_of, ensure_dispatcher, made, tell
from spool.client import submit as submitting
from spool.client.exports import Exports, exports
from spool.core import layout
from spool.core.arrays import ARRAY, INDEX, Tasks
from spool.core.errors import InvalidJob, InvalidValue, SpoolError, UsageError, cannot
from spool.core.names import why_not_name
from spool.formats import jobfile
from spool.formats.toml import MAX_BYTES
from spool.store.glance import defaults_of


class Asked(Struct, frozen=True):
    """What the command line asks for. `plain` are the words after `--`, `loose` those given without `--`.

    `capture` says whether to capture a script, None if not given; `ignore_directives`, whether to skip lines for other
    schedulers.
    """

    values: joboptions.Values = field(default_factory=dict)
    export: Sequence[str] = ()
    name: str | None = None
    shell_command: str | None = None
    plain: Sequence[str] = ()
    loose: Sequence[str] = ()
    capture: bool | None = None
    ignore_directives: bool = False


class Wanted(Struct, frozen=True):
    """A job to submit: its name, the text of its file, and whether its script asks to be held."""

    name: str
    text: bytes
    held: bool = False


class Submission(Struct, frozen=True):
    """What `spool submit` is told to do: with *files* submit these, else what is *asked* for."""

    asked: Asked
    files: Sequence[str] = ()
    hold: bool = False
    replace: bool = False
    wait: bool = False
    strict: bool = False
    dry_run: bool = False


OPTIONS = {
    "-n": ("name", ""), "--name": ("name", ""), "-J": ("name", ""), "--job-name": ("name", ""),
    "-c": ("text", ""), "--shell-command": ("text", ""), "--wrap": ("text", ""),
    "-f": ("files", ""), "--file": ("files", ""), "--export": ("export", ""),
    "--hold": ("hold", "true"), "-H": ("hold", "true"), "--replace": ("replace", "true"), "--wait": ("wait", "true"),
    "--strict": ("strict", "true"), "--dry-run": ("dry_run", "true"), "--test-only": ("dry_run", "true"),
    "--capture": ("capture", "true"), "--no-capture": ("capture", "false"),
    "--ignore-directives": ("ignore_directives", "true"),
}  # fmt: skip
"""The options of `spool submit` that are no keys, in the form of `joboptions.FLAGS`."""


def submit(arguments: Sequence[str]) -> int | None:
    """Do what the command line *arguments* says if it is `submit` with right options, and return the exit code.

    None if it is something else: nothing is done yet.
    """
    found = fastsubmit.addressed(arguments)
    if found is None:
        return None
    root, arguments = found
    try:
        values, words, _ = fastsubmit.read(arguments, joboptions.FLAGS | OPTIONS)
    except fastsubmit.UnclearError:
        return None
    if len(values.get("executor", ())) > 1:  # by several options, which click takes in its own order
        return None
    order = _order(values, words, dashes=list(arguments[-len(words) - 1 : -len(words)]) == ["--"])
    place = os.path.abspath(root) if root else submitting.default_root()
    return code_of(lambda: carry_out(order, place))


def _order(values: joboptions.Values, words: Sequence[str], *, dashes: bool) -> Submission:
    last = {key: values.pop(key)[-1] for key in ("name", "text", "capture") if key in values}
    export, files = values.pop("export", ()), values.pop("files", ())
    flags = {key: values.pop(key, None) is not None for key in ("hold", "replace", "wait", "strict", "dry_run")}
    asked = Asked(
        export=export,
        name=last.get("name"),
        shell_command=last.get("text"),
        plain=words if dashes else (),
        loose=() if dashes else words,
        capture=last["capture"] == "true" if "capture" in last else None,
        ignore_directives=values.pop("ignore_directives", None) is not None,
        values=values,
    )
    return Submission(asked, files, **flags)


def carry_out(order: Submission, root: str) -> int:
    """Submit what is ordered to the spool *root* and return the exit code. Raises SpoolError."""
    asked, hold = order.asked, order.hold
    if order.files:
        if asked.values or asked.plain or asked.loose or asked.shell_command is not None:
            raise UsageError("cannot combine a job file with options: it must be complete; edit a copy of it")
        if asked.name is not None and len(order.files) > 1:
            raise UsageError("cannot give one name to several job files; remove --name")
        jobs = [file_job(path, asked.name, root, asked.export) for path in order.files]
        if len({job for job, _ in jobs}) < len(jobs):
            raise UsageError("cannot submit two job files with the same name at once")
    else:
        wanted = job_of(asked, root)
        jobs, hold = [(wanted.name, wanted.text)], hold or wanted.held
    submitting.check_submitter(root)
    root = root if order.dry_run or submitting.is_spool(root) else made(root).root
    tell_doubts(root, jobs, strict=order.strict)
    if order.dry_run:
        for _name, text in jobs:
            say_text(text.decode("utf-8", "replace"))
        return 0
    publish(root, jobs, held=hold, replace=order.replace)
    for job, _text in jobs:
        say(job, at_once=True)
    if not order.wait:
        return 0
    gc.enable()  # it may take days
    from spool.cli.wait import until_ended

    return until_ended(root, [job for job, _ in jobs])


def job_of(asked: Asked, root: str, *, stderr_apart: bool = False) -> Wanted:
    """Return the job that is asked for, valid. Raises UsageError or InvalidJob.

    *stderr_apart*: its error output goes to a separate file in the metadir, unless an output path is given.
    """
    if asked.shell_command is not None and (asked.plain or asked.loose):
        text = asked.shell_command
        remedy = f"for CPUs write --cpus {text}" if text.isdecimal() else "remove the other words"
        raise UsageError(f"cannot submit a job: -c already gives the command; {remedy}")
    if scripts.is_job_file(asked.loose):
        return _job_file(asked, root)
    what = _what_to_run(asked)
    own = dict(what.values)
    held = own.pop("hold", []) != []
    own_name = own.pop("name", [None])[-1]
    name = own_name if asked.name is None else asked.name
    if "export" in own and not asked.export:
        asked = replace(asked, export=own["export"])
    own.pop("export", None)
    values = {**own, **asked.values}
    if "env" in own and "env" in asked.values:
        values["env"] = [*own["env"], *asked.values["env"]]
    command = what.keys["command"]
    assert isinstance(command, str | list)
    try:
        given = joboptions.keys_of(values)
        keys: dict[str, object] = {
            "command": command,
            "workdir": given.get("workdir") or submitting.literal(os.getcwd()),
            **given,
        }
    except FileNotFoundError:
        why = "the current directory no longer exists; give --workdir an absolute path"
        raise UsageError(f"cannot submit a job: {why}") from None
    exported = exports(root, asked.export)
    _tell_left_out(exported)
    if env := exported.env(_table(given.get("env")), _placeholders(given)):
        keys["env"] = env
    if stderr_apart and not {"stdout", "stderr", "executor"} & keys.keys():
        jobs = layout.Layout(os.path.realpath(root)).at(layout.JOBS)
        keys["stderr"] = f"{submitting.literal(jobs).replace('%', '%%')}/%n/%r/{layout.JOB_STDERR}"
    _put_in_script(keys, what)
    if name is None:
        stem = what.stem or fastsubmit.stem_of(command)
        name = fastsubmit.fresh_name(stem, lambda name: submitting.ever_used(root, name))
    if name.isdecimal():  # sbatch -n 4
        tell(f"warning: {name} is the job's name now; for CPUs write --cpus {name}")
    try:
        return Wanted(checked_name(name), checked(name, keys, root), held)
    except InvalidJob as error:
        whose = "this job" if own_name is None and asked.name is None else f"job {name}"
        raise joboptions.in_options(error, whose, keys.keys()) from None


def _what_to_run(asked: Asked) -> scripts.Script:
    """Return the command or the script that is asked for."""
    if asked.shell_command is not None:
        return scripts.Script({"command": asked.shell_command})
    if asked.plain:
        return scripts.Script({"command": fastsubmit.command_of(asked.plain)})
    if asked.loose:
        stated = {"name": asked.name is not None, "export": bool(asked.export)}
        keys = frozenset(asked.values) | {key for key, said in stated.items() if said}
        return scripts.read(asked.loose, scripts.Said(asked.capture, asked.ignore_directives, keys))
    raise UsageError("cannot submit a job: no command; write it after `--`, as in `spool submit -- sleep 5`")


def _job_file(asked: Asked, root: str) -> Wanted:
    """Return the error for a job file that was given like a script."""
    path, *rest = asked.loose
    if asked.values or rest:
        remedy = f"edit a copy of it, or submit it unchanged: `spool submit -f {path}`"
        raise UsageError(
            cannot("submit", f"{path} with options", "a job file must be complete in itself", remedy=remedy)
        )
    return Wanted(*file_job(path, asked.name, root, asked.export))


def _put_in_script(keys: dict[str, object], what: scripts.Script) -> None:
    """Put a captured script into *keys*, after the keys that are short; tables follow."""
    if "script" not in what.keys:
        return
    tables = {key: keys.pop(key) for key in [key for key, value in keys.items() if isinstance(value, dict)]}
    keys["script"] = what.keys["script"]
    keys.update(tables)
    if what.module_path is not None:
        env = keys.setdefault("env", {})
        assert isinstance(env, dict)
        before = env.get("PYTHONPATH")
        env["PYTHONPATH"] = f"{what.module_path}:{before}" if before else what.module_path


def checked_name(name: str) -> str:
    """Return *name* if a job can have it. Raises InvalidValue."""
    why = why_not_name(name)
    if why is None and name.endswith(layout.JOB_SUFFIX):
        why = f"that is a file's name; the job's is {name.removesuffix(layout.JOB_SUFFIX)!r}"
    if why is not None:
        raise InvalidValue(cannot("name", f"a job {name!r}", why, remedy="give another with --name"))
    return name


def checked(name: str, keys: dict[str, object], root: str) -> bytes:
    """Return *keys* as the text of a job file that the spool *root* takes.

    Raises InvalidJob, or InvalidValue for what no file can hold.
    """
    laid_out = fastsubmit.laid_out(keys)
    text = jobfile.dump(keys) if laid_out is None else laid_out.encode()
    jobfile.parse(text, name=name, defaults=defaults_of(root))
    return text


def _tell_left_out(exported: Exports) -> None:
    for why in exported.left_out:
        tell(why)


def _table(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, dict) else {}


def _placeholders(keys: Mapping[str, object]) -> set[str]:
    """Return the keys whose `{key}` an array with *keys* replaces."""
    makers = [key for key in ("array", "matrix", "rows") if key in keys]
    if not makers:
        return set()
    rows = keys.get("rows")
    found = {INDEX, *_table(keys.get("matrix")), *(_table(rows[0]) if isinstance(rows, list) and rows else ())}
    return found | {ARRAY} if "array" in makers and len(makers) > 1 else found


def file_job(path: str, name: str | None, root: str, export: Sequence[str] = ()) -> tuple[str, bytes]:
    """Return the job in the file *path*, byte for byte, if it is valid; *export* adds to its `env`.

    Variables from our environment never replace those that the file sets. Raises SpoolError.
    """
    stem = os.path.basename(path).removesuffix(layout.JOB_SUFFIX)
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        remedy = "`-f /dev/stdin --name NAME` reads a pipe" if path == "-" else None
        raise UsageError(
            cannot("read", "the job file", error.strerror or str(error), where=path, remedy=remedy)
        ) from None
    name = checked_name(name or stem)
    defaults = defaults_of(root)
    without_env = {key: value for key, value in defaults.keys.items() if key != "env"}
    try:
        spec = jobfile.parse(text, name=name, defaults=replace(defaults, keys=without_env))
    except InvalidJob as error:
        if text.startswith(b"#!"):
            remedy = f"`spool submit {shlex.quote(path)}` submits a script"
            raise UsageError(cannot("use", "the job file", "it is a script", where=path, remedy=remedy)) from error
        raise
    exported = exports(root, export) if export else Exports()
    _tell_left_out(exported)
    before = dict(spec.env)
    own = {key: value for key, value in before.items() if key not in exported.assigned}
    after = exported.env(own, Tasks(name, spec).keys if spec.is_array else ())
    if changed := {key: value for key, value in after.items() if before.get(key) != value}:
        text = jobfile.edited(text, {"env": changed}, name=name)
        jobfile.parse(text, name=name, defaults=defaults)
    return name, text


def tell_doubts(root: str, jobs: Sequence[tuple[str, bytes]], *, strict: bool) -> None:
    """Warn about what will keep *jobs* from running or their notifications from being sent.

    Raises SpoolError if *strict*.
    """
    from spool.query.foresight import doubts

    if not submitting.is_spool(root) or not submitting.is_ours(root):  # another user's tells nothing of the machine
        return
    defaults = defaults_of(root)
    specs = [(name, jobfile.parse(text, name=name, defaults=defaults)) for name, text in jobs]
    found = doubts(root, specs)
    for name, why in found:
        tell(f"{'' if strict else 'warning: '}job {name} {why}")
    if found and strict:
        raise SpoolError("nothing was submitted: --strict treats warnings as errors")


def publish(root: str, jobs: Sequence[tuple[str, bytes]], *, held: bool, replace: bool) -> None:
    """Put *jobs* into the spool and see that a dispatcher serves it. Raises SpoolError if a name is taken."""
    if not replace:
        for name, _ in jobs:
            if (place := submitting.where_taken(root, name)) is not None:
                raise _taken(root, name, place)
    done = 0

    def counted() -> Iterator[tuple[str, bytes]]:
        nonlocal done
        for done, job in enumerate(jobs):
            step(done, len(jobs))
            yield job

    try:
        with progress("submitting") as step:
            submitting.submit(root, counted(), held=held, replace=replace)
    except KeyboardInterrupt:
        tell(f"interrupted: {done} of {len(jobs)} jobs are submitted")
        raise
    except FileExistsError as error:
        path = os.fsdecode(error.filename)
        name = os.path.basename(path).removesuffix(layout.JOB_SUFFIX)
        raise _taken(root, name, os.path.basename(os.path.dirname(path))) from None
    if not held:
        ensure_dispatcher(root)


def _taken(root: str, name: str, place: str) -> SpoolError:
    does = {layout.QUEUED: "waits", layout.HELD: "is held", layout.RUNNING: "runs"}[place]
    takes = "queues this one behind it" if place == layout.RUNNING else "takes its place"
    free = fastsubmit.next_name(name, lambda name: submitting.ever_used(root, name))
    remedy = f"--name {free} is free, and --replace {takes}"
    return SpoolError(cannot("submit", f"job {name}", f"a job of that name {does}", remedy=remedy))
