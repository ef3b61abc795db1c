"""From what stands on the command line to a job file in the spool: shared by `submit` and `run`."""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spool.cli import fastsubmit, joboptions
from spool.cli.group import tell
from spool.client import autostart, submit
from spool.client.exports import Exports, exports
from spool.core import layout
from spool.core.arrays import ARRAY, INDEX, Tasks
from spool.core.errors import InvalidValue, SpoolError, UsageError, cannot
from spool.core.names import why_not_name
from spool.formats import jobfile
from spool.store.stable_read import MAX_BYTES

_SPOOL_LINE = re.compile(r"#SPOOL(?:[ \t]+(.*))?")
_MAX_HEAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for. `plain` are the words after `--`, `loose` those without it before them."""

    values: joboptions.Values = field(default_factory=dict)
    export: Sequence[str] = ()
    name: str | None = None
    shell_command: str | None = None
    plain: Sequence[str] = ()
    loose: Sequence[str] = ()


def job_of(asked: Asked, root: str, *, stderr_apart: bool = False) -> tuple[str, bytes]:
    """Return the name and the text of the job that is asked for, valid. Raises UsageError or InvalidJob.

    *stderr_apart*: its error output goes to a file of its own in the metadir, if nobody says where an output goes.
    """
    values = asked.values
    command: str | Sequence[str]
    stem: str | None = None
    if asked.shell_command is not None:
        if asked.plain or asked.loose:
            raise UsageError("cannot submit a job: -c gives the command already; leave the other words out")
        command = asked.shell_command
    elif asked.plain:
        command = fastsubmit.command_of(asked.plain)
    elif asked.loose:
        command, directive_values, stem = _loose(asked.loose)
        values = {**directive_values, **values}
        if "name" in directive_values:
            asked = replace(asked, name=asked.name or directive_values["name"][-1])
        if "export" in directive_values and not asked.export:
            asked = replace(asked, export=directive_values["export"])
    else:
        raise UsageError("cannot submit a job: no command; write it after `--`, as in `spool submit -- sleep 5`")
    try:
        given = joboptions.keys_of(values)
        keys: dict[str, object] = {"command": command, "workdir": given.get("workdir") or os.getcwd(), **given}
    except FileNotFoundError:
        why = "the current directory was removed; give --workdir an absolute path"
        raise UsageError(f"cannot submit a job: {why}") from None
    exported = exports(root, asked.export)
    _tell_left_out(exported)
    if env := exported.env(_table(given.get("env")), _placeholders(given)):
        keys["env"] = env
    if stderr_apart and not {"stdout", "stderr", "executor"} & keys.keys():
        jobs = layout.Layout(os.path.realpath(root)).at(layout.JOBS)
        keys["stderr"] = f"{jobs.replace('%', '%%')}/%n/%r/{layout.JOB_STDERR}"
    name = asked.name
    if name is None:
        name = fastsubmit.fresh_name(stem or fastsubmit.stem_of(command), lambda name: submit.ever_used(root, name))
    return checked_name(name), checked(name, keys)


def checked_name(name: str) -> str:
    """Return *name* if a job can have it. Raises InvalidValue."""
    why = why_not_name(name)
    if why is None and name.endswith(layout.JOB_SUFFIX):
        why = f"that is a file's name; the job's is {name.removesuffix(layout.JOB_SUFFIX)!r}"
    if why is not None:
        raise InvalidValue(cannot("name", f"a job {name!r}", why))
    return name


def checked(name: str, keys: dict[str, object]) -> bytes:
    """Return *keys* as the text of a job file. Raises InvalidJob, or InvalidValue for what no file can hold."""
    laid_out = fastsubmit.laid_out(keys)
    text = jobfile.dump(keys) if laid_out is None else laid_out.encode()
    jobfile.parse(text, name=name)
    return text


def _tell_left_out(exported: Exports) -> None:
    for why in exported.left_out:
        tell(why)


def _table(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, dict) else {}


def _placeholders(keys: Mapping[str, object]) -> set[str]:
    """Return the keys of which an array with *keys* replaces `{key}`."""
    makers = [key for key in ("array", "matrix", "rows") if key in keys]
    if not makers:
        return set()
    rows = keys.get("rows")
    found = {INDEX, *_table(keys.get("matrix")), *(_table(rows[0]) if isinstance(rows, list) and rows else ())}
    return found | {ARRAY} if "array" in makers and len(makers) > 1 else found


def file_job(path: str, name: str | None, root: str, export: Sequence[str] = ()) -> tuple[str, bytes]:
    """Return the job in the file *path*, byte for byte, if it is valid; with *export* its `env` has more in it.

    What is taken of our environment changes nothing that the file sets itself. Raises SpoolError.
    """
    stem = os.path.basename(path).removesuffix(layout.JOB_SUFFIX)
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(cannot("read", "the job file", error.strerror or str(error), where=path)) from None
    name = checked_name(name or stem)
    spec = jobfile.parse(text, name=name)
    exported = exports(root, export) if export else Exports()
    _tell_left_out(exported)
    before = dict(spec.env)
    own = {key: value for key, value in before.items() if key not in exported.assigned}
    after = exported.env(own, Tasks(name, spec).keys if spec.is_array else ())
    if changed := {key: value for key, value in after.items() if before.get(key) != value}:
        text = jobfile.edited(text, {"env": changed}, name=name)
        jobfile.parse(text, name=name)
    return name, text


def tell_doubts(root: str, jobs: Sequence[tuple[str, bytes]], *, strict: bool) -> None:
    """Warn of what will keep *jobs* from running, or from telling anybody. Raises SpoolError for that if *strict*."""
    from spool.query.foresight import doubts
    from spool.store.spool import Spool

    if not submit.is_spool(root):
        return
    found = doubts(Spool(root), [(name, jobfile.parse(text, name=name)) for name, text in jobs])
    for name, why in found:
        tell(f"{'' if strict else 'warning: '}job {name} {why}")
    if found and strict:
        raise SpoolError("cannot submit: --strict refuses what is doubtful: nothing was submitted")


def publish(root: str, jobs: Sequence[tuple[str, bytes]], *, held: bool, replace: bool) -> None:
    """Put *jobs* into the spool and see that a dispatcher serves it. Raises SpoolError if a name is taken."""
    if not replace:
        for name, _ in jobs:
            if (place := submit.where_taken(root, name)) is not None:
                raise _taken(root, name, place)
    try:
        submit.submit(root, jobs, held=held, replace=replace)
    except FileExistsError as error:
        path = os.fsdecode(error.filename)
        name = os.path.basename(path).removesuffix(layout.JOB_SUFFIX)
        raise _taken(root, name, os.path.basename(os.path.dirname(path))) from None
    if not held:
        ensure_dispatcher(root)


def ensure_dispatcher(root: str) -> None:
    """Start a dispatcher in the background if none lives, or say how."""
    problem = autostart.ensure(root)
    if problem is not None:
        tell(problem)


def _taken(root: str, name: str, place: str) -> SpoolError:
    does = {layout.QUEUED: "waits", layout.HELD: "is held", layout.RUNNING: "runs"}[place]
    takes = "has this one wait for its end" if place == layout.RUNNING else "takes its place"
    free = fastsubmit.next_name(name, lambda name: submit.ever_used(root, name))
    remedy = f"--name {free} is free, and --replace {takes}"
    return SpoolError(cannot("submit", f"job {name}", f"a job of that name {does}", remedy=remedy))


def _loose(words: Sequence[str]) -> tuple[str | list[str], joboptions.Values, str | None]:
    """Return what to run for words without `--` before them: a script, its `#SPOOL` lines read; `-`; or a program."""
    first, *rest = words
    if first == "-":
        if rest:
            raise UsageError("cannot submit the script on stdin: it is the whole command, and no arguments follow it")
        data = sys.stdin.buffer.read()
        text, shell = _text_of(data)
        return text, {**shell, **_directives(data, "stdin")}, "stdin"
    try:
        status = os.stat(first)
    except OSError:
        status = None
    if status is None or not stat.S_ISREG(status.st_mode):
        from shutil import which

        if "/" not in first and which(first) is not None:
            return list(words), {}, None
        why = "no such file" if status is None else "it is not a file"
        raise UsageError(
            cannot("submit", f"script {first}", why, remedy=f"for a command write `spool submit -- {first} …`")
        )
    with open(first, "rb") as script:
        head = script.read(65536)
    path = os.path.abspath(first)
    return [*_interpreter(head, path), path, *rest], _directives(head, first), fastsubmit.stem_of([path])


def _directives(script: bytes, what: str) -> joboptions.Values:
    words = spool_lines(script, what)
    try:
        values, rest, _ = joboptions.read(
            words, {"-n": ("name", True), "--name": ("name", True), "--export": ("export", True)}
        )
    except joboptions.UnclearError as error:
        raise UsageError(cannot("read", f"the #SPOOL lines of {what}", str(error))) from None
    if rest:
        raise UsageError(cannot("read", f"the #SPOOL lines of {what}", f"{rest[0]!r} is not an option"))
    for line in late_lines(script):
        tell(f"{what}: line {line}: this #SPOOL line stands after the first command and is not read")
    return values


def _text_of(data: bytes) -> tuple[str, joboptions.Values]:
    """Return the script as a text for the shell, and the shell if its `#!` line names one. Raises UsageError."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UsageError("cannot submit the script on stdin: it is not UTF-8") from None
    if not text.startswith("#!"):
        return text, {}
    shell = _shell_of(text.splitlines()[0][2:].split())
    if shell is None:
        raise UsageError("cannot submit the script on stdin: only the shell can read it from there; give its file")
    return text, {"shell": [shell]}


def _shell_of(words: Sequence[str]) -> str | None:
    """Return the shell that the *words* of a `#!` line name, None for anything else, and for a shell with options."""
    *before, last = words or [""]
    if os.path.basename(last) not in ("sh", "dash", "bash", "ash", "ksh", "zsh"):
        return None
    if before and os.path.basename(before[0]) == "env" and before[1:] in ([], ["-S"]):
        from shutil import which

        return which(last)
    return None if before else last


def _interpreter(head: bytes, path: str) -> list[str]:
    """Return what has to stand before a script that cannot be executed itself: its `#!` line, or the shell."""
    if os.access(path, os.X_OK):
        return []
    if head.startswith(b"#!"):
        words = head.split(b"\n", 1)[0][2:].decode("utf-8", "replace").strip().split(None, 1)
        if words:
            return words
    if b"\0" in head[:1024]:
        raise UsageError(cannot("submit", f"script {path}", "it is not a text and may not be executed"))
    return ["/bin/sh"]


def spool_lines(script: bytes, what: str) -> list[str]:
    """Return the options that stand in a script itself, as words in their order; *what* names the script in errors.

        #!/bin/sh
        # Trains the small model.
        #SPOOL --gpus 1 --time-limit 2h
        #SPOOL --group "night runs"

    Only the head of the script is read: the lines before the first that is neither empty nor a comment. `##SPOOL` is a
    comment like any other. Raises UsageError, which names the line.
    """
    found: list[str] = []
    for number, line in _head_lines(script):
        match = _SPOOL_LINE.fullmatch(line)
        if match is None:
            continue
        try:
            options = shlex.split(match.group(1) or "", comments=True)
        except ValueError as error:
            raise _wrong_line(what, number, f"{str(error).lower()} in {line!r}") from None
        if options and not options[0].startswith("-"):
            raise _wrong_line(what, number, f"{options[0]!r} is not an option; write them as in `#SPOOL --gpus 1`")
        if "\0" in line:
            raise _wrong_line(what, number, "it has a NUL")
        found += options
    return found


def late_lines(script: bytes) -> list[int]:
    """Return the numbers of `#SPOOL` lines that stand too late to be read, for a warning."""
    last = len(list(_head_lines(script)))
    lines = script[:_MAX_HEAD_BYTES].decode(errors="replace").split("\n")
    return [
        number for number, line in enumerate(lines, 1) if number > last and _SPOOL_LINE.fullmatch(line.rstrip("\r"))
    ]


def _head_lines(script: bytes) -> Iterator[tuple[int, str]]:
    """Yield the lines of the head, numbered from 1."""
    for number, line in enumerate(script[:_MAX_HEAD_BYTES].split(b"\n"), 1):
        bare = line.strip()
        if bare and not bare.startswith(b"#"):
            return
        yield number, line.rstrip(b"\r").decode(errors="surrogateescape")


def _wrong_line(what: str, number: int, why: str) -> UsageError:
    return UsageError(cannot("read", f"the #SPOOL lines of {what}", why, where=f"line {number}"))
