"""What was captured of the code that a run began with: values, their record (FORMAT 4.27), and how they read."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from spool.core.errors import InvalidRecord
from spool.core.model import SECOND_NS
from spool.core.reasons import count_of
from spool.core.units import show_duration
from spool.formats import toml
from spool.formats.wire import Form, Table, one_line, said, several
from spool.query.details import RunDetails
from spool.store.spool import Spool

MOST_UNTRACKED = 100
"""How many untracked files are named; the others are counted."""

MOST_PACKAGES = 2000
"""How many packages of an interpreter are named."""

RECORD, DIFF, LOCK = "capture.toml", "capture.diff", "capture.lock"
FILES = (DIFF, LOCK, RECORD)
"""What the metadir of a run has of it; the last says what the others are."""

_LATER_NS = 60 * SECOND_NS  # a capture that is older than this may not be what the run began with

WHOLE, CUT, NONE = "whole", "cut", "none"
"""What is kept of the uncommitted changes: all of them; the first bytes of too many; nothing, as configured."""


class Code(Struct, frozen=True):
    """The git work tree that a job's working directory is in."""

    top: str  # its directory
    prefix: str = ""  # of the working directory below it; "" is the top itself
    commit: str | None = None  # None: there is none yet
    branch: str | None = None  # None: no branch is checked out
    changed: int = 0  # files that differ from the commit
    diff: str | None = None  # WHOLE, CUT or NONE; None: nothing differs
    diff_bytes: int = 0  # that are kept
    diff_hash: str | None = None  # SHA-256 of these
    untracked: tuple[str, ...] = ()  # the first, relative to `top`
    untracked_count: int = 0
    submodules: bool = False
    PUBLIC: ClassVar[str] = """
        top prefix commit branch changed diff diff_bytes diff_sha256=diff_hash untracked untracked_count
        submodules
    """


class Interpreter(Struct, frozen=True):
    """The Python that a job finds, from files alone: it is not run."""

    path: str
    prefix: str = ""  # the environment that it is of
    version: str | None = None
    found_by: str = ""  # "command", the variable that names its environment, or "PATH"
    packages: tuple[str, ...] = ()  # "NAME VERSION", of its site-packages
    PUBLIC: ClassVar[str] = "path prefix version found_by packages"


class LockFile(Struct, frozen=True):
    """The file beside the code that pins its packages."""

    path: str
    hash: str | None = None  # SHA-256; None: it was too long to read
    size_bytes: int = 0
    kept: bool = False  # a copy is in the metadir
    PUBLIC: ClassVar[str] = "path sha256=hash size_bytes kept"


class Capture(Struct, frozen=True):
    """What was there when a run began, as far as that is known."""

    captured_at_ns: int | None = None
    problem: str = ""  # what could not be found out, and why
    host: str | None = None
    kernel: str | None = None
    driver: str | None = None  # of NVIDIA
    code: Code | None = None
    interpreter: Interpreter | None = None
    lock_file: LockFile | None = None
    PUBLIC: ClassVar[str] = "captured_at_ns problem host kernel driver git=code python=interpreter lock_file"


def code_in_words(code: Code) -> str:
    """Return a commit and what differed from it, in a line: `3f2a1bc9d0e1 (main), 2 files changed`."""
    parts = [code.commit[:12] if code.commit is not None else "no commit yet"]
    if code.branch is not None:
        parts[0] += f" ({code.branch})"
    if code.changed:
        kept = {WHOLE: "", CUT: ", diff cut", NONE: ", diff not kept"}.get(code.diff or "", "")
        parts.append(f"{count_of(code.changed, 'file')} changed{kept}")
    if code.untracked_count:
        parts.append(f"{code.untracked_count} untracked")
    return ", ".join(parts)


def told(run: RunDetails) -> list[tuple[str, str]]:
    """Return the lines of `spool show` about what a run began with."""
    capture, started_at_ns = run.parts.get("capture"), run.record.started_at_ns
    if capture is None:
        return []
    lines = [("not captured", capture.problem)]
    if capture.code is not None:
        at_ns, code = capture.captured_at_ns, code_in_words(capture.code)
        if at_ns is not None and started_at_ns is not None and started_at_ns - at_ns > _LATER_NS:
            code += f"; captured {show_duration(started_at_ns - at_ns)} before the run began"
        lines += [("commit", code), ("work tree", capture.code.top)]
    if (python := capture.interpreter) is not None:
        parts = [python.path, f"({python.version})" if python.version else ""]
        lines.append(("python", " ".join(filter(None, parts))))
        lines.append(("packages", count_of(len(python.packages), "package") if python.packages else ""))
    if (lock := capture.lock_file) is not None:
        lines.append(("lock file", f"{lock.path}{f' ({lock.hash[:12]})' if lock.hash else ''}"))
    return [*lines, ("driver", capture.driver or "")]


def capture_of(spool: Spool, name: str, run: int) -> Capture | None:
    """Return what was captured of the code that a run began with; None if nothing was."""
    text = spool.record(name, run, RECORD)
    if text is None:
        return None
    try:
        return parse_capture(text)
    except InvalidRecord as error:
        return Capture(problem=str(error))


def _list(most: int) -> Form:
    """Return the form of a list of texts, a line each."""
    return Form(
        lambda texts: f"[\n{''.join(f'  {toml.quote(text)},{chr(10)}' for text in texts)}]",
        lambda keys, key: tuple(map(one_line, several(keys, key, str)))[:most],
    )


_WHAT = "a capture record"
_CODE = Table(
    _WHAT,
    Code,
    """
    top! prefix commit branch changed! diff:extent diff_bytes diff_sha256=diff_hash untracked_count
    untracked:untracked submodules!
    """,
    {"top": ""},
    extent=Form(toml.quote, lambda keys, key: text if (text := said(keys, key)) in (WHOLE, CUT, NONE) else None),
    untracked=_list(MOST_UNTRACKED),
)
_PYTHON_KEYS = "path! prefix version found_by packages:packages"
_INTERPRETER = Table(_WHAT, Interpreter, _PYTHON_KEYS, {"path": ""}, packages=_list(MOST_PACKAGES))
_LOCK_FILE = Table(_WHAT, LockFile, "path! sha256=hash size_bytes! kept!", {"path": ""})
_CAPTURE = Table(
    _WHAT,
    Capture,
    "captured_at problem host kernel driver git=code:code python=interpreter:python lock_file:lock",
    code=_CODE.inner(),
    python=_INTERPRETER.inner(),
    lock=_LOCK_FILE.inner(),
)

render_capture, parse_capture = _CAPTURE.render, _CAPTURE.parse
"""`capture.toml`."""
