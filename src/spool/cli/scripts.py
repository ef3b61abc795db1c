"""Submitted scripts: the captured text, how it runs, and the options in its own lines.

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
from typing import Protocol

from msgspec import Struct, field

from spool.cli import fastsubmit, joboptions
from spool.cli.telling import tell
from spool.client.draft import Exports, stem_of
from spool.core.errors import UsageError, cannot
from spool.formats.toml import MAX_BYTES

_SPOOL_LINE = re.compile(r"#SPOOL(?:[ \t]+(.*))?")
MAX_HEAD_BYTES = 64 * 1024
_ASKS_WHERE_IT_LIES = re.compile(r"__file__|BASH_SOURCE|\$\{0%|(?:dirname|realpath|readlink)\b[^\n]*\$\{?0\b")
_RUN_BY = {"py": "python3", "sh": "sh", "bash": "bash", "zsh": "zsh", "pl": "perl", "rb": "ruby", "js": "node",
           "R": "Rscript", "r": "Rscript", "jl": "julia", "lua": "lua", "m": "octave"}  # fmt: skip
SHELLS = frozenset(("sh", "dash", "bash", "ash", "ksh", "zsh", "csh", "tcsh"))
OPTIONS = joboptions.FLAGS | fastsubmit.OF_A_JOB


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


def is_job_file(words: Sequence[str]) -> bool:
    """Whether the first of *words* is a job file rather than a script."""
    return bool(words) and words[0].endswith(".toml") and os.path.isfile(words[0])


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
    if first in (*STDIN, "/dev/stdin"):
        return _of_stdin(rest, asked, named=words is not STDIN)
    why = ""
    try:
        if not stat.S_ISREG(os.stat(first).st_mode):
            why = "not a file"
    except OSError as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
    if why:
        from shutil import which

        if "/" not in first and which(first) is not None:
            return Script(list(words))
        remedy = f"to run a command, write `spool submit -- {first} …`"
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
        why, other = "its `#!` is not at the very beginning", "remove what comes before it"
    else:
        why, other = "it has no `#!` line to name its interpreter", f"begin it with `{line_one}`"
    if _has_options(data, asked):
        raise UsageError(cannot("submit", thing, why, remedy=other))
    remedy = f"`spool submit -- {program} {shlex.quote(what)}` runs it as is, or {other}"
    raise UsageError(cannot("submit", thing, why, remedy=remedy))


def _has_options(data: bytes, asked: Asked) -> bool:
    """Whether a script has options in its own lines, which only a script itself can have."""
    lines = [line for _, line in head_lines(data)]
    return any(map(_SPOOL_LINE.fullmatch, lines)) or any(
        other.is_line(line) for other in asked.others for line in lines
    )


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
    values = _own_options(script, what)
    for other in asked.others:
        values = other.values(script, what, asked, values)
    return values


def _own_options(script: bytes, what: str) -> joboptions.Values:
    words = spool_lines(script, what)
    try:
        values, rest, _ = fastsubmit.read(words, OPTIONS)
    except fastsubmit.UnclearError as error:
        raise UsageError(cannot("read", f"the #SPOOL lines of {what}", str(error))) from None
    if rest:
        raise UsageError(cannot("read", f"the #SPOOL lines of {what}", f"{rest[0]!r} is not an option"))
    for line in late_lines(script):
        tell(f"{what}: line {line}: this #SPOOL line comes after the first command and is ignored")
    return values


def spool_lines(script: bytes, what: str) -> list[str]:
    """Return the options in a script's own lines, as words in order; *what* names the script in errors.

        #!/bin/sh
        # Trains the small model.
        #SPOOL --gpus 1 --time-limit 2h
        #SPOOL --group "night runs"

    Only the head of the script is read: the lines before the first that is neither empty nor a comment. `##SPOOL` is a
    comment like any other. Raises UsageError, which names the line.
    """
    found: list[str] = []
    for number, line in head_lines(script):
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
