"""From the command line to a job in the spool: shared by `submit` and `run`.

A script is captured: the job file holds its current text, and the script's file is no longer needed. The kernel runs
the copy by its `#!` line. A script without one is refused, as `sbatch` does; one for PBS or Grid Engine, which take it,
gets the line of the shell that they would run it by.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from spool.cli import fastsubmit, joboptions
from spool.cli.fastsubmit import MAX_HEAD_BYTES, command_of
from spool.cli.group import ensure_dispatcher
from spool.cli.render import progress, tell
from spool.client import submit as submitting
from spool.client.draft import Draft, Exports, exports, fresh_name, job_keys, next_name, stem_of
from spool.core import layout
from spool.core.arrays import Tasks
from spool.core.errors import InvalidFile, InvalidJob, InvalidValue, SpoolError, UsageError, cannot
from spool.core.layout import why_not_name
from spool.core.model import Spec
from spool.formats import jobfile
from spool.formats.capabilities import contributed
from spool.formats.toml import MAX_BYTES
from spool.formats.validation import closest
from spool.store.glance import defaults_of
from spool.store.reading import read_named

_SPOOL_LINE = re.compile(r"#SPOOL(?:[ \t]+(.*))?")
_ASKS_WHERE_IT_LIES = re.compile(r"__file__|BASH_SOURCE|\$\{0%|(?:dirname|realpath|readlink)\b[^\n]*\$\{?0\b")
_RUN_BY = {"py": "python3", "sh": "sh", "bash": "bash", "zsh": "zsh", "pl": "perl", "rb": "ruby", "js": "node",
           "R": "Rscript", "r": "Rscript", "jl": "julia", "lua": "lua", "m": "octave"}  # fmt: skip
SHELLS = frozenset(("sh", "dash", "bash", "ash", "ksh", "zsh", "csh", "tcsh"))
OPTIONS = joboptions.FLAGS | fastsubmit.OF_A_JOB | {joboptions.SET: ("set", "")}


STDIN = ("-",)
"""The words for a script on stdin."""


class ScriptText(Struct, frozen=True):
    """The text of a script or a command, and how messages name it. *ignores_lines*: its lines are only comments."""

    text: str
    what: str
    ignores_lines: bool = False
    is_script: bool = True


class Script(Struct, frozen=True):
    """What a script yields: a command, the captured text, options from its own lines, and a name for the job."""

    command: str | list[str]
    text: str | None = None
    values: joboptions.Values = field(default_factory=dict)
    stem: str | None = None
    module_path: str | None = None  # the directory of modules beside a Python script
    source: ScriptText | None = None  # None: it is no script


class Asked(Struct, frozen=True):
    """The requests of the command line. `plain` are the words after `--`, `loose` those given without `--`.

    `capture`: whether to capture a script, None if not given; `ignore_directives`: whether to skip lines for other
    schedulers; `verbose`: whether to report each of these lines, not only those that are lost. `lines`: a file with a
    command in each line. `replaces`: whether it takes the place of a job of its name. `limited`: whether it, or the
    configuration, states a time limit. `others` read the lines for other schedulers.
    """

    values: joboptions.Values = field(default_factory=dict)
    export: Sequence[str] = ()
    name: str | None = None
    shell_command: str | None = None
    plain: Sequence[str] = ()
    loose: Sequence[str] = ()
    capture: bool | None = None
    ignore_directives: bool = False
    verbose: bool = False
    lines: str | None = None
    replaces: bool = False
    limited: bool = False
    others: Sequence[OtherScripts] = ()

    @property
    def keys(self) -> frozenset[str]:
        """The keys that it states, and which of the other options."""
        others = {"name": self.name is not None, "export": bool(self.export)}
        return frozenset(self.values) | {key for key, is_stated in others.items() if is_stated}


class OtherScripts(Protocol):
    """What a capability makes of scripts for other schedulers, for jobs of the spool that it is made with."""

    def __init__(self, root: str) -> None: ...

    def is_line(self, line: str) -> bool:
        """Whether *line* of a script is for a scheduler that it reads."""

    def shell(self, script: bytes, own: bytes, what: str, asked: Asked) -> str | None:
        """Return the shell that runs a script instead of what its *own* `#!` line says; None if that one does."""

    def values(self, script: bytes, what: str, asked: Asked, own: joboptions.Values) -> joboptions.Values:
        """Return the options in the lines of a script, with its *own* ones. Raises UsageError.

        "job_name" is a name that several jobs may have there.
        """

    def adapted(self, values: joboptions.Values) -> joboptions.Values:
        """Return the values of options without words that mean nothing here."""

    def surround(
        self, source: ScriptText, name: str, given: dict[str, object], exported: Exports, freely: bool
    ) -> None:
        """Add to the keys of a job what its script looks for in it. *freely*: without `--export`."""


def read(words: Sequence[str], asked: Asked) -> Script:
    """Return the command for words without `--` before them: a script, `-` for stdin, or a program.

    Raises UsageError.
    """
    first, *rest = words
    if not first.strip():
        raise UsageError("cannot submit a job: its command is empty; is a variable in it not set?")
    if first in (*STDIN, "/dev/stdin"):
        return _of_stdin(rest, asked, named=words is not STDIN)
    why = ""
    try:
        if not stat.S_ISREG(os.stat(first).st_mode):
            why = "it is a directory" if os.path.isdir(first) else "it is not a regular file"
    except OSError as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
    if why:
        from shutil import which

        if "/" not in first and which(first) is not None:
            return Script(list(words))
        remedy = f"to run it as a command, write `spool submit -- {first} …`"
        if not {*first}.isdisjoint(" ;&|<>$*?()`"):
            remedy = f"for a text that a shell runs, write `spool submit -c {shlex.quote(first)}`"
        elif why == "no such file" and "/" not in first:
            why = "no such file or program"
        raise UsageError(cannot("submit", f"script {first}", why, remedy=remedy))
    try:
        with open(first, "rb") as script:
            data = script.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(cannot("read", f"script {first}", error.strerror or str(error))) from None
    path = os.path.abspath(first)
    line = _line_one(data, first, asked)
    _check_runs(data, first, line, asked)
    values = _directives(data, first, asked)
    wanted = values.pop("capture", ["true"])[-1] == "true"
    stem = stem_of([path])
    source = _source(data, first, asked, line)
    if not line or not (wanted if asked.capture is None else asked.capture):
        is_program = os.access(path, os.X_OK) and data.startswith(line)
        before = [] if is_program else line[2:].decode("utf-8", "replace").strip().split(None, 1)
        return Script([*before, path, *rest], None, values, stem, source=source)
    text = _begun(line, _captured(data, first))
    return Script([path, *rest], text, values, stem, _module_path(text, path), source)


def rows_of(path: str) -> list[dict[str, str]]:
    """Return the commands in the lines of a file, `-` for stdin, as rows; blank lines and comments are skipped.

    Raises UsageError.
    """
    what = ("read", "the commands")
    where = "stdin" if path in STDIN else path
    try:
        from spool.store.reading import read_whole

        text = read_whole(path, joboptions.MOST_ROWS_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(cannot(*what, error.strerror or str(error), where=where)) from None
    except UnicodeDecodeError:
        raise UsageError(cannot(*what, "the text is not UTF-8", where=where)) from None
    lines = [line.strip() for line in text.split("\n")]
    found = [{"line": line} for line in lines if line and not line.startswith("#")]
    if not found:
        raise UsageError(cannot(*what, "no line has a command", where=where))
    return found


def _line_one(script: bytes, what: str, asked: Asked) -> bytes:
    """Return the `#!` line that a script runs by, b"" if it has none and needs one."""
    own, newline, _ = script.partition(b"\n")
    end = b"\r" if newline and own.endswith(b"\r") else b""
    own = own if own.startswith(b"#!") else b""
    if b"\0" in script[:1024]:
        return own
    for other in asked.others:
        if (shell := other.shell(script, own, what, asked)) is not None:
            return b"#!" + os.fsencode(shell) + end
    return own


def _begun(line: bytes, text: str, *, numbered: bool = False) -> str:
    """Return a script's *text* with the `#!` line *line*, its own, another in its place, or one more.

    *numbered*: it takes the place of a comment, so that the others keep their numbers.
    """
    wanted, (first, _, rest) = line.decode(errors="replace"), text.partition("\n")
    if text.startswith(wanted):
        return text
    lacks = not first.startswith("#!") and not (numbered and (first.startswith("#") or not first.strip()))
    return f"{wanted}\n{text if lacks else rest}"


def _source(data: bytes, what: str, asked: Asked, line: bytes) -> ScriptText | None:
    """Return what a script is searched for; None for a program."""
    if b"\0" in data:
        return None
    text = _begun(line, data.decode(errors="replace"), numbered=True)
    return ScriptText(text, what, ignores_lines=asked.ignore_directives)


def _of_stdin(rest: Sequence[str], asked: Asked, *, named: bool) -> Script:
    """Return the script on stdin: a text for the shell, or captured if its `#!` line names another program.

    Unless stdin was *named*, anything may be there, so it needs a `#!` line.
    """
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    first = _line_one(data, "stdin", asked)
    if not named and not first:
        remedy = "write it after `--`, as in `spool submit -- sleep 5`"
        why = "no command, and no script on stdin that begins with `#!`"
        raise UsageError(f"cannot submit a job: {why}; {remedy}")
    if not data.strip():
        raise UsageError("cannot submit the script on stdin: it is empty")
    values = _directives(data, "stdin", asked)
    values.pop("capture", None)
    text = _begun(first, _captured(data, "on stdin"))
    source = _source(data, "stdin", asked, first)
    line = text.split("\n", 1)[0]
    shell = _shell_of(line[2:].split()) if line.startswith("#!") else "/bin/sh"
    if shell is None or (rest and line.startswith("#!")):
        _check_runs(data, "on stdin", first, asked)
        return Script(["stdin", *rest], text, values, "stdin", source=source)
    if rest:
        why = "to take arguments, a script must begin with a line such as `#!/bin/sh`"
        raise UsageError(cannot("submit", "the script on stdin", why))
    if line.startswith("#!"):
        values = {"shell": [shell], **values}
    return Script(text, None, values, "stdin", source=source)


def _captured(data: bytes, what: str) -> str:
    """Return the text of a script. Raises UsageError if a job file cannot hold it."""
    by_path = "" if what == "on stdin" else "--no-capture runs it by its path"
    why = ""
    if len(data) > MAX_BYTES // 2:
        why = f"it is larger than {MAX_BYTES >> 11} KiB, the most that a job file holds"
    elif b"\0" in data:
        why = "it contains NUL bytes"
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        text, why = "", why or f"line {data.count(bytes([10]), 0, error.start) + 1} is not UTF-8"
    if why:
        raise UsageError(cannot("capture", f"script {what}", why, remedy=by_path))
    if by_path and (match := _ASKS_WHERE_IT_LIES.search(text)) is not None:
        line = text.count("\n", 0, match.start()) + 1
        tell(f"{what}: line {line} uses the script's own path, but the copy that runs is in the spool; {by_path}")
    return text


def _check_runs(data: bytes, what: str, line: bytes, asked: Asked) -> None:
    """Raise UsageError with a remedy for a text that the kernel cannot execute; *line* is its `#!` line."""
    thing = f"script {what}"
    if line:
        if not line[2:].strip():
            raise UsageError(cannot("submit", thing, "its first line names no interpreter after `#!`"))
        if line.endswith(b"\r"):
            why = "it has Windows line endings, so its interpreter would not be found"
            raise UsageError(cannot("submit", thing, why, remedy=f"`sed -i 's/\\r$//' {shlex.quote(what)}` fixes it"))
        return
    if b"\0" in data[:1024]:
        if os.access(what, os.X_OK):
            return
        remedy = f"`chmod +x {shlex.quote(what)}` if it is a program"
        raise UsageError(cannot("submit", thing, "it is neither a text nor executable", remedy=remedy))
    program = _RUN_BY.get(what.rpartition(".")[2], "sh")
    line_one = f"#!/bin/{program}" if program in ("sh", "bash") else f"#!/usr/bin/env {program}"
    if data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"#!"):
        why = "its `#!` is not at the very beginning"
        other = f"remove what is before it, such as a byte order mark: `sed -i '1s/^[^#]*//' {shlex.quote(what)}`"
    else:
        why, other = "it has no `#!` line to name its interpreter", f"begin it with `{line_one}`"
    if _first_option(data, asked.others):
        raise UsageError(cannot("submit", thing, why, remedy=other))
    remedy = f"`spool submit -- {program} {shlex.quote(what)}` runs it as is, or {other}"
    raise UsageError(cannot("submit", thing, why, remedy=remedy))


def _first_option(data: bytes, others: Sequence[OtherScripts]) -> int:
    """Return the number of the first line of a script that has options, 0 if none has."""
    for number, line in head_lines(data):
        if _SPOOL_LINE.fullmatch(line) or any(other.is_line(line) for other in others):
            return number
    return 0


def _tell_unread_options(words: Sequence[str], others: Sequence[OtherScripts]) -> None:
    """Report that a command runs a script whose options are not read, since only a script that is submitted has any."""
    runs = {*SHELLS, *_RUN_BY.values()}
    script = words[1] if len(words) > 1 and os.path.basename(words[0]) in runs else words[0]
    with suppress(OSError):
        data = fastsubmit.head_of(script)
        if data.startswith(b"#!") and (number := _first_option(data, others)):
            remedy = f"`spool submit {shlex.quote(script)}` uses them"
            tell(f"{script}: the options from line {number} on are ignored after `--`; {remedy}")


def _module_path(text: str, path: str) -> str | None:
    """Return the directory of a Python script, so that the copy can import modules from there."""
    words = text.split("\n", 1)[0][2:].split()
    programs = [word for word in words if not word.startswith("-") and os.path.basename(word) != "env"]
    return os.path.dirname(path) if programs and os.path.basename(programs[0]).startswith("python") else None


def _shell_of(words: Sequence[str]) -> str | None:
    """Return the shell in the *words* of a `#!` line, None for any other program, and for a shell with options."""
    *before, last = words or [""]
    if os.path.basename(last) not in SHELLS - {"csh", "tcsh"}:
        return None
    if before and os.path.basename(before[0]) == "env" and before[1:] in ([], ["-S"]):
        from shutil import which

        return which(last)
    return None if before else last


def _directives(script: bytes, what: str, asked: Asked) -> joboptions.Values:
    """Return the options in a script's own lines; #SPOOL lines before those for other schedulers."""
    values = own_options(script, what)
    for other in asked.others:
        values = other.values(script, what, asked, values)
    return values


def own_options(script: bytes, what: str) -> joboptions.Values:
    """Return the options in a script's own lines; *what* names the script in errors.

        #!/bin/sh
        # Trains the small model.
        #SPOOL --gpus 1 --time-limit 2h
        #SPOOL --project "night runs"

    Only the head of the script is read: the lines before the first that is neither empty nor a comment. `##SPOOL` is a
    comment like any other. Raises UsageError, which names the line.
    """
    values: joboptions.Values = {}
    for number, line in head_lines(script):
        match = _SPOOL_LINE.fullmatch(line)
        if match is None:
            continue
        if "\0" in line:
            raise _wrong_line(what, number, "it has a NUL")
        try:
            found, rest = read_options(shlex.split(match.group(1) or "", comments=True))
        except ValueError as error:
            raise _wrong_line(what, number, f"{str(error).lower()} in {line!r}") from None
        except fastsubmit.UnclearError as error:
            word = str(error).rpartition(" ")[2]
            near = closest(word, OPTIONS)
            meant = f"; did you mean {near}?" if near and near not in str(error).split() else ""
            raise _wrong_line(what, number, f"{error}{meant}") from None
        except UsageError as error:
            raise _wrong_line(what, number, str(error)) from None
        if rest:
            raise _wrong_line(what, number, f"{rest[0]!r} is not an option; write them as in `#SPOOL --gpus 1`")
        for key, given in found.items():
            values.setdefault(key, []).extend(given)
    for late in late_lines(script):
        tell(f"{what}: line {late}: this #SPOOL line comes after the first command and is ignored")
    return values


def read_options(words: Sequence[str]) -> tuple[joboptions.Values, Sequence[str]]:
    """Return the values of the options that *words* begin with, and the rest. Raises UsageError, UnclearError."""
    found, rest, _ = fastsubmit.read(words, OPTIONS)
    return joboptions.with_stated(found, found.pop("set", ())), rest


def late_lines(script: bytes) -> list[int]:
    """Return the numbers of `#SPOOL` lines too late to be read, for a warning."""
    last = len(list(head_lines(script)))
    lines = script[:MAX_HEAD_BYTES].decode(errors="replace").split("\n")
    return [
        number for number, line in enumerate(lines, 1) if number > last and _SPOOL_LINE.fullmatch(line.rstrip("\r"))
    ]


def head_lines(script: bytes) -> Iterator[tuple[int, str]]:
    """Yield the lines of the head, numbered from 1."""
    for number, line in enumerate(script[:MAX_HEAD_BYTES].split(b"\n"), 1):
        bare = line.strip()
        if bare and not bare.startswith(b"#"):
            return
        yield number, line.rstrip(b"\r").decode(errors="surrogateescape")


def _wrong_line(what: str, number: int, why: str) -> UsageError:
    return UsageError(cannot("read", f"the #SPOOL lines of {what}", why, where=f"line {number}"))


def draft_of(asked: Asked, root: str, *, stderr_apart: bool = False) -> Draft:
    """Return the requested job, valid. Raises UsageError or InvalidJob.

    *stderr_apart*: its error output goes to a separate file in the metadir, unless an output path is given.
    """
    if asked.shell_command is not None and (asked.plain or asked.loose):
        text = asked.shell_command
        remedy = f"for CPUs write --cpus {text}" if text.isdecimal() else "remove the other words"
        raise UsageError(f"cannot submit a job: -c already gives the command; {remedy}")
    if of_others := {"command", "script"} & asked.values.keys():
        why = f"--set {of_others.pop()} changes a job that is there"
        raise UsageError(cannot("submit", "a job", why, remedy="write the command after `--`"))
    if asked.loose and asked.loose[0].endswith(".toml") and os.path.isfile(asked.loose[0]):
        return _job_file(asked, root)
    others = tuple(kind(root) for _, kind in contributed("scripts"))
    what = _what_to_run(asked, root, others)
    own = dict(what.values)
    held = own.pop("hold", []) != []
    own_name = _own_name(own, asked, root)
    name = own_name if asked.name is None else asked.name
    named = name is not None
    export = own.pop("export", [])
    exported = exports(root, asked.export or export)
    values = {**own, **asked.values}
    for other in others:
        values = other.adapted(values)
    if "env" in own and "env" in asked.values:
        values["env"] = [*own["env"], *asked.values["env"]]
    if name is None:
        name = fresh_name(root, what.stem or stem_of(what.command))
    try:
        given = joboptions.keys_of(values)
        searched = what.command
        if asked.lines is not None:
            given["rows"] = rows = rows_of(asked.lines)
            searched = "\n".join(row["line"] for row in rows)
        text = searched if isinstance(searched, str) else shlex.join(searched)
        source = what.source or ScriptText(text, "the command", is_script=False)
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
    draft = Draft(checked_name(name), keys, held=held, named=named)
    try:
        draft.check(root)
    except InvalidJob as error:
        whose = f"job {name}" if named else "this job"
        raise _with_letters(joboptions.in_options(error, whose, keys.keys()), whose, values) from None
    _tell_habits(name, values)
    return draft


_LETTERS = {"priority": "-p", "env": "-e"}  # which mean other things in sbatch


def _with_letters(error: InvalidFile, whose: str, values: joboptions.Values) -> InvalidJob:
    """Return *error* with what to write where a value is one for sbatch."""
    problems = [replace(one, message=one.message + _elsewhere(one.key or "", values)) for one in error.problems]
    return InvalidJob(whose, problems)


def _tell_habits(name: str, values: joboptions.Values) -> None:
    """Warn of options that mean other things in sbatch, and were probably meant so."""
    if name.isdecimal():  # sbatch -n 4
        tell(f"warning: -n is the name, so this job is called {name}; for CPUs write --cpus {name}")
    for unset in (text for text in values.get("env", ()) if "=" not in text and text not in os.environ):
        tell(f"warning: {unset} is not set here, so it is empty in the job{_elsewhere('env', values)}")
    for text in values.get("env", ()):
        if len(each := text.split(",")) > 1 and all(re.fullmatch(r"[A-Za-z_]\w*=[^=]*", pair) for pair in each):
            tell(f"warning: {text} sets one variable; for more write --env {' --env '.join(each)}")


def _elsewhere(key: str, values: joboptions.Values) -> str:
    """Return what to write instead for a value of *key* that suits sbatch's option of the same letter, "" if none."""
    key = key.partition(".")[0]
    given = [
        text for text in values.get(key, ()) if key in _LETTERS and "=" not in text and not text.lstrip("-").isdecimal()
    ]
    told = (answer(_LETTERS[key], text, ()) for text in given for _, answer in contributed("answers"))
    return next((f"; for {_LETTERS[key]} of sbatch, {each}" for each in told if each is not None), "")


def _own_name(own: joboptions.Values, asked: Asked, root: str) -> str | None:
    """Take the name that a script states out of its *own* options.

    One for another scheduler, where jobs can share a name, is changed if it is not free.
    """
    foreign = own.pop("job_name", [None])[-1]
    if "name" in own:
        return own.pop("name")[-1]
    if foreign is None or asked.name is not None or asked.replaces or submitting.where_taken(root, foreign) is None:
        return foreign
    free = fresh_name(root, foreign)
    tell(f"job {foreign} has not ended, so this one is {free}")
    return free


def _take_script(keys: dict[str, object], what: Script) -> None:
    """Add the captured text of a script to *keys*, and where its modules are."""
    if what.text is not None:
        keys["script"] = what.text
    if what.module_path is not None:
        env = keys.setdefault("env", {})
        assert isinstance(env, dict)
        before = env.get("PYTHONPATH")
        env["PYTHONPATH"] = f"{what.module_path}:{before}" if before else what.module_path


def _what_to_run(asked: Asked, root: str, others: Sequence[OtherScripts]) -> Script:
    """Return the requested command or script."""
    if asked.lines is not None:
        if asked.shell_command is not None or asked.plain or asked.loose or {"matrix", "rows"} & asked.values.keys():
            why = "each of its lines is a command"
            remedy = "for one command with the values of each line use --param-file"
            raise UsageError(cannot("combine", "--lines with another command or --matrix", why, remedy=remedy))
        return Script("{line}", stem="lines" if asked.lines in STDIN else stem_of([asked.lines]))
    if asked.shell_command is not None:
        return Script(asked.shell_command)
    if asked.plain:
        if not asked.ignore_directives:
            _tell_unread_options(asked.plain, others)
        return Script(command_of(asked.plain))
    words = asked.loose or (STDIN if _has_script_on_stdin() else ())
    if words:
        _tell_late_options(words)
        limited = "time_limit" in asked.values or "time_limit" in defaults_of(root).keys
        return read(words, replace(asked, limited=limited, others=others))
    raise UsageError("cannot submit a job: no command; write it after `--`, as in `spool submit -- sleep 5`")


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
    late = [flag for flag in dict.fromkeys(flags) if flag in OPTIONS]
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
    from spool.query.foresight import doubts, same_in_all

    if not submitting.is_spool(root) or not submitting.is_ours(root):  # another user's tells nothing of the machine
        return
    defaults = defaults_of(root)
    specs = [(job.name, jobfile.parse(job.text(), name=job.name, defaults=defaults)) for job in jobs]
    sized = ((job, spec) for job, (_, spec) in zip(jobs, specs, strict=True) if spec.is_sized)
    if (first := next(sized, None)) is not None:
        _tell_size(root, *first)  # others of these are most likely like it
    for job, (_, spec) in zip(jobs, specs, strict=True):
        if job.keys and (why := same_in_all(spec)):  # a file was written with more thought than a command line
            tell(f"job {job.name} {why}")
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
