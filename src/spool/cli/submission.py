"""From the command line to a job in the spool: shared by `submit`, `run` and `import`."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from spool.cli import joboptions, scripts
from spool.cli.fastsubmit import OF_A_JOB, command_of
from spool.cli.render import progress
from spool.cli.scripts import Asked
from spool.cli.telling import ensure_dispatcher, tell
from spool.client import submit as submitting
from spool.client.draft import Draft, Exports, exports, fresh_name, job_keys, next_name, stem_of
from spool.core import layout
from spool.core.arrays import Tasks
from spool.core.errors import InvalidJob, InvalidValue, SpoolError, UsageError, cannot
from spool.core.layout import why_not_name
from spool.core.model import Spec
from spool.formats import jobfile
from spool.formats.capabilities import contributed
from spool.formats.toml import MAX_BYTES
from spool.store.glance import defaults_of
from spool.store.reading import read_named


def draft_of(asked: Asked, root: str, *, stderr_apart: bool = False) -> Draft:
    """Return the requested job, valid. Raises UsageError or InvalidJob.

    *stderr_apart*: its error output goes to a separate file in the metadir, unless an output path is given.
    """
    if asked.shell_command is not None and (asked.plain or asked.loose):
        text = asked.shell_command
        remedy = f"for CPUs write --cpus {text}" if text.isdecimal() else "remove the other words"
        raise UsageError(f"cannot submit a job: -c already gives the command; {remedy}")
    if scripts.is_job_file(asked.loose):
        return _job_file(asked, root)
    others = tuple(kind(root) for _, kind in contributed("scripts"))
    what = _what_to_run(asked, root, others)
    own = dict(what.values)
    held = own.pop("hold", []) != []
    foreign_name = own.pop("job_name", [None])[-1]
    own_name = own.pop("name", [foreign_name])[-1]
    if foreign_name is not None and "name" not in what.values and asked.name is None and not asked.replaces:
        own_name = _free_name(root, foreign_name)
    name = own_name if asked.name is None else asked.name
    export = own.pop("export", [])
    exported = exports(root, asked.export or export)
    values = {**own, **asked.values}
    for other in others:
        values = other.adapted(values)
    if "env" in own and "env" in asked.values:
        values["env"] = [*own["env"], *asked.values["env"]]
    if not (named := name is not None):
        name = fresh_name(root, what.stem or stem_of(what.command))
    try:
        given = joboptions.keys_of(values)
        searched = what.command
        if asked.lines is not None:
            given["rows"] = rows = scripts.rows_of(asked.lines)
            searched = "\n".join(row["line"] for row in rows)
        text = searched if isinstance(searched, str) else shlex.join(searched)
        source = what.source or scripts.ScriptText(text, "the command", is_script=False)
        for other in others:
            other.surround(source, name, given, exported, not (asked.export or export))
        keys = job_keys(what.command, given, exported)
    except FileNotFoundError:
        why = "the current directory no longer exists; give --workdir an absolute path"
        raise UsageError(f"cannot submit a job: {why}") from None
    for why in exported.remarks:
        tell(why)
    if stderr_apart and not {"stdout", "stderr", "executor"} & keys.keys():
        jobs = layout.Layout(os.path.realpath(root)).at(layout.JOBS)
        keys["stderr"] = f"{submitting.literal(jobs).replace('%', '%%')}/%n/%r/{layout.JOB_STDERR}"
    _take_script(keys, what)
    if name.isdecimal():  # sbatch -n 4
        tell(f"warning: -n is the name, so this job is called {name}; for CPUs write --cpus {name}")
    draft = Draft(checked_name(name), keys, held=held, named=named)
    try:
        draft.check(root)
    except InvalidJob as error:
        whose = "this job" if own_name is None and asked.name is None else f"job {name}"
        raise joboptions.in_options(error, whose, keys.keys()) from None
    return draft


def _take_script(keys: dict[str, object], what: scripts.Script) -> None:
    """Add the captured text of a script to *keys*, and where its modules are."""
    if what.text is not None:
        keys["script"] = what.text
    if what.module_path is not None:
        env = keys.setdefault("env", {})
        assert isinstance(env, dict)
        before = env.get("PYTHONPATH")
        env["PYTHONPATH"] = f"{what.module_path}:{before}" if before else what.module_path


def _what_to_run(asked: Asked, root: str, others: Sequence[scripts.OtherScripts]) -> scripts.Script:
    """Return the requested command or script."""
    if asked.lines is not None:
        if asked.shell_command is not None or asked.plain or asked.loose or {"matrix", "rows"} & asked.values.keys():
            raise UsageError("cannot submit --lines with another command, --matrix or --param-file")
        return scripts.Script("{line}", stem="lines" if asked.lines in scripts.STDIN else stem_of([asked.lines]))
    if asked.shell_command is not None:
        return scripts.Script(asked.shell_command)
    if asked.plain:
        return scripts.Script(command_of(asked.plain))
    words = asked.loose or (scripts.STDIN if _has_script_on_stdin() else ())
    if words:
        _tell_late_options(words)
        limited = "time_limit" in asked.values or "time_limit" in defaults_of(root).keys
        return scripts.read(words, replace(asked, limited=limited, others=others))
    raise UsageError("cannot submit a job: no command; write it after `--`, as in `spool submit -- sleep 5`")


def _free_name(root: str, name: str) -> str:
    """Return *name*, of a script for another scheduler, or one that is free: there, jobs can share a name."""
    if submitting.where_taken(root, name) is None:
        return name
    free = fresh_name(root, name)
    tell(f"job {name} has not ended, so this one is {free}")
    return free


def _has_script_on_stdin() -> bool:
    """Whether stdin is a file or a pipe, as in `spool submit <<EOF`, and not a terminal or /dev/null."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode)


def _tell_late_options(words: Sequence[str]) -> None:
    """Report options of spool that come after the script, and are its arguments, as in sbatch."""
    flags = (word.partition("=")[0] for word in words[1:] if word.startswith("--"))
    late = [flag for flag in dict.fromkeys(flags) if flag in joboptions.FLAGS or flag in OF_A_JOB]
    if late:
        its = f"{late[0]} is an argument" if len(late) == 1 else f"{', '.join(late)} are arguments"
        tell(f"{its} of {words[0]}, as in sbatch; write spool's options before {words[0]}")


def _job_file(asked: Asked, root: str) -> Draft:
    """Return the job in a file that was given like a script."""
    path, *rest = asked.loose
    if asked.values or rest:
        remedy = f"edit a copy of it, or submit it unchanged: `spool submit -f {path}`"
        why = "a job file must be complete in itself"
        raise UsageError(cannot("submit", f"{path} with options", why, remedy=remedy))
    return file_draft(path, asked.name, root, asked.export)


def checked_name(name: str) -> str:
    """Return *name* if a job can have it. Raises InvalidValue."""
    why = why_not_name(name)
    if why is None and name.endswith(layout.JOB_SUFFIX):
        why = f"that is a file's name; the job's is {name.removesuffix(layout.JOB_SUFFIX)!r}"
    if why is not None:
        raise InvalidValue(cannot("name", f"a job {name!r}", why, remedy="give another with --name"))
    return name


def file_draft(path: str, name: str | None, root: str, export: Sequence[str] = ()) -> Draft:
    """Return the job in the file *path*, byte for byte, if it is valid; *export* adds to its `env`.

    A `start_after` without an offset gets that of this process's zone.
    Variables from this process's environment never replace those of the file. Raises SpoolError.
    """
    stem = os.path.basename(path).removesuffix(layout.JOB_SUFFIX)
    try:
        text = read_named(f"./{path}" if path == "-" else path, MAX_BYTES + 1)
    except OSError as error:
        why, remedy = error.strerror or str(error), "`-f /dev/stdin --name NAME` reads a pipe" if path == "-" else None
        raise UsageError(cannot("read", "the job file", why, where=path, remedy=remedy)) from None
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
    for why in exported.remarks:
        tell(why)
    before = dict(spec.env)
    own = {key: value for key, value in before.items() if key not in exported.assigned}
    after = exported.env(own, Tasks(name, spec).keys if spec.is_array else ())
    if changed := {key: value for key, value in after.items() if before.get(key) != value}:
        text = jobfile.edited(text, {"env": changed}, name=name)
        jobfile.parse(text, name=name, defaults=defaults)
    return Draft(name, {}, text=jobfile.with_offset(text, name=name))


def tell_doubts(root: str, jobs: Sequence[Draft], *, strict: bool) -> None:
    """Warn about problems that will keep *jobs* from running or their notifications from being sent.

    Raises SpoolError if *strict*.
    """
    from spool.query.foresight import doubts

    if not submitting.is_spool(root) or not submitting.is_ours(root):  # another user's tells nothing of the machine
        return
    defaults = defaults_of(root)
    specs = [(job.name, jobfile.parse(job.text(), name=job.name, defaults=defaults)) for job in jobs]
    sized = ((job, spec) for job, (_, spec) in zip(jobs, specs, strict=True) if spec.is_sized)
    if (first := next(sized, None)) is not None:
        _tell_size(root, *first)  # others of these are most likely like it
    found = doubts(root, specs)
    for name, why in found:
        tell(f"{'' if strict else 'warning: '}job {name} {why}")
    if found and strict:
        raise SpoolError("nothing was submitted: --strict treats warnings as errors")


def _tell_size(root: str, job: Draft, spec: Spec) -> None:
    from spool.query.snapshot import next_request
    from spool.store.ownership import this_user
    from spool.store.spool import Spool

    found = next_request(Spool(root), job.name, this_user(), spec)
    if found is not None:
        hint = "" if job.named or spec.is_array else "; with --name, it learns from earlier runs of that name"
        tell(f"job {job.name} requests {found.why}{hint}")


def publish(root: str, jobs: Sequence[Draft], *, held: bool, replace: bool) -> None:
    """Put *jobs* into the spool and ensure that a dispatcher serves it. Raises SpoolError if a name is taken."""
    if not replace:
        for job in jobs:
            check_free(root, job.name)
    done = 0

    def counted() -> Iterator[tuple[str, bytes]]:
        nonlocal done
        for done, job in enumerate(jobs):
            if len(jobs) > 1:
                step(done, len(jobs))
            yield job.name, job.text()

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


def check_free(root: str, name: str, *, can_replace: bool = True) -> None:
    """Raise SpoolError if a job of that name waits, is held or runs. *can_replace*: whether the verb has --replace."""
    if (place := submitting.where_taken(root, name)) is not None:
        raise _taken(root, name, place, can_replace=can_replace)


def _taken(root: str, name: str, place: str, *, can_replace: bool = True) -> SpoolError:
    does = {layout.QUEUED: "waits", layout.HELD: "is held", layout.RUNNING: "runs"}[place]
    takes = "queues this one behind it" if place == layout.RUNNING else "takes its place"
    free = next_name(root, name)
    remedy = f"--name {free} is free" + (f", and --replace {takes}" if can_replace else "")
    return SpoolError(cannot("submit", f"job {name}", f"a job of that name {does}", remedy=remedy))
