"""Which code a run begins with: its commit and changes, its interpreter and packages; and their record (FORMAT 4.27).

git is asked such that a repository starts no other program: no file system monitor, hook, filter, external diff or
text conversion, and no bare repository that lies inside a work tree counts. Nothing is fetched that a partial clone
lacks. It writes nothing, not even the index. In another user's work tree git itself refuses to work
(`safe.directory`). Filters of the user's own configuration, such as those of LFS, run as in `git status`. No
interpreter is started: its version and packages are read off names.

git and file systems may be slow, or hang, so `steps` runs this module as a process. Its argument is an order. It writes
the records into the directory that the order names, and prints nothing. What it cannot find out is in the record's
`problem`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct

from spool.core.errors import InvalidRecord
from spool.core.layout import without_here
from spool.core.model import SECOND_NS
from spool.core.reasons import count_of
from spool.core.units import show_duration
from spool.formats import toml
from spool.formats.wire import Form, Table, one_line, one_lines
from spool.machine import identity
from spool.store.disk import Disk

if TYPE_CHECKING:
    from spool.query.details import RunDetails
    from spool.store.spool import Spool

_WITHIN_S = 10.0  # git may take so long, all its commands together
_MOST_LISTED = 4 << 20  # bytes of git's list of files; a longer one is cut
_PLAIN = (
    "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null",
    "-c", "safe.bareRepository=explicit",
)  # fmt: skip
# Keys that name programs and have no option of git against them, and what stands for those of a repository: nothing, or
# this user's own. git-lfs, which may be that user's filter, reads some of them.
_PROGRAMS = re.compile(
    rb"filter\..*\.(?:clean|smudge|process|required)|lfs\.(?:extension|customtransfer)\..*|lfs\.standalonetransferagent"
    rb"|credential\.(?:.*\.)?helper|core\.(?:sshcommand|gitproxy|askpass)|hook\..*\.command",
    re.DOTALL,
)
_PYTHON = re.compile(r"(?:python|pypy)[0-9]*(?:\.[0-9]+)?")
_VERSION = re.compile(r"(?:version|version_info)\s*=\s*([0-9]+(?:\.[0-9]+)*)", re.ASCII)
_INFO = re.compile(r"([A-Za-z0-9._]+)-([^-]+?)(?:-py[0-9.]+)?\.(?:dist|egg)-info")
_DRIVER = re.compile(r"Kernel Module\S*\s+(?:for \S+\s+)?([0-9]+(?:\.[0-9]+)+)")
MOST_DIFF = 1 << 20
"""How many bytes of the uncommitted changes are kept."""

MOST_UNTRACKED = 100
"""How many untracked files are named; the others are counted."""

MOST_PACKAGES = 2000
"""How many packages of an interpreter are named."""

RECORD, DIFF = "capture.toml", "capture.diff"
FILES = (DIFF, RECORD)
"""What the metadir of a run has of it; the last says what the others are."""

_LATER_NS = 60 * SECOND_NS  # a capture that is older than this may not be what the run began with

WHOLE, CUT, NONE = "whole", "cut", "none"
"""What is kept of the uncommitted changes: all of them; the first bytes of too many; nothing without a commit."""


class Code(Struct, frozen=True):
    """The git work tree that a job's working directory is in."""

    top: str  # its directory
    commit: str | None = None  # None: there is none yet
    branch: str | None = None  # None: no branch is checked out
    changed: int = 0  # files that differ from the commit
    diff: str | None = None  # WHOLE, CUT or NONE; None: nothing differs
    diff_bytes: int = 0  # that are kept
    diff_hash: str | None = None  # SHA-256 of these
    untracked: tuple[str, ...] = ()  # the first, relative to `top`
    untracked_count: int = 0
    PUBLIC: ClassVar[str] = """
        top commit branch changed diff diff_bytes diff_sha256=diff_hash untracked untracked_count
    """


class Interpreter(Struct, frozen=True):
    """The Python that a job finds, from files alone: it is not run."""

    path: str
    version: str | None = None
    packages: tuple[str, ...] = ()  # "NAME VERSION", of its site-packages
    PUBLIC: ClassVar[str] = "path version packages"


class Capture(Struct, frozen=True):
    """What was there when a run began, as far as that is known."""

    captured_at_ns: int | None = None
    problem: str = ""  # what could not be found out, and why
    host: str | None = None
    kernel: str | None = None
    driver: str | None = None  # of NVIDIA
    code: Code | None = None
    interpreter: Interpreter | None = None
    PUBLIC: ClassVar[str] = "captured_at_ns problem host kernel driver git=code python=interpreter"


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
        tuple[str, ...],
        clean=lambda texts: one_lines(texts[:most]),
        lines=lambda key, texts: f"{key} = [\n{''.join(f'  {toml.quote(text)},{chr(10)}' for text in texts)}]\n",
    )


_WHAT = "a capture record"
_CODE = Table(
    _WHAT,
    Code,
    """
    top! commit branch changed! diff:extent diff_bytes diff_sha256=diff_hash untracked_count
    untracked:untracked
    """,
    {"top": ""},
    extent=Form(str, clean=one_line, decode=lambda text: text if text in (WHOLE, CUT, NONE) else None),
    untracked=_list(MOST_UNTRACKED),
)
_PYTHON_KEYS = "path! version packages:packages"
_INTERPRETER = Table(_WHAT, Interpreter, _PYTHON_KEYS, {"path": ""}, packages=_list(MOST_PACKAGES))
_CAPTURE = Table(
    _WHAT,
    Capture,
    "captured_at problem host kernel driver git=code:code python=interpreter:python",
    code=_CODE.inner(),
    python=_INTERPRETER.inner(),
)

render_capture, parse_capture = _CAPTURE.render, _CAPTURE.parse
"""`capture.toml`."""


# How it is found out.


class GitError(Exception):
    """git has not answered; the message is its own, or says that it took too long."""


def git(arguments: Sequence[str], where: str, until: float, most: int = _MOST_LISTED) -> tuple[bytes, bool]:
    """Return what git prints in *where*, at most *most* bytes, and whether that is all.

    *until* is on the monotonic clock. Raises GitError.
    """
    return _git([*_without_programs(where, until), *arguments], where, until, most)


def _without_programs(where: str, until: float) -> list[str]:
    """Return options against the programs that the configuration of a repository names. Raises GitError."""
    listed, _ = _git(["config", "--list", "--show-scope", "-z"], where, until, _MOST_LISTED)
    fields = listed.split(b"\0")
    own, named = dict[bytes, bytes](), set[bytes]()
    for scope, entry in zip(fields[::2], fields[1::2], strict=False):
        key, _, value = entry.partition(b"\n")
        if _PROGRAMS.fullmatch(key) is None or scope == b"command":
            continue
        if scope in (b"system", b"global"):
            own[key] = value
        else:
            named.add(key)
    if any(b"=" in key for key in named):  # `git -c` would take it for another one
        raise GitError("its configuration names a program by a key with = in it")
    none = {
        key: b"false" if key.endswith(b".required") else b"true" if key.startswith(b"hook") else b"" for key in named
    }
    return [word for key in named for word in ("-c", os.fsdecode(key + b"=" + own.get(key, none[key])))]


def _git(arguments: Sequence[str], where: str, until: float, most: int) -> tuple[bytes, bool]:
    environment = {
        key: value for key, value in without_here(os.environ).items() if not key.startswith(("GIT_", "PYTHON"))
    }
    environment |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
    environment |= {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}  # the second for git before 2.45
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                ["git", *_PLAIN, *arguments],
                cwd=where,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
            )
        except OSError as error:
            raise GitError(f"cannot run git in {where}: {error.strerror}") from None
        with process:
            limit = threading.Timer(max(0.0, until - time.monotonic()), process.kill)
            limit.start()
            assert process.stdout is not None
            out = process.stdout.read(most + 1)
            if len(out) > most:
                process.kill()
            status = process.wait()
            limit.cancel()
        if len(out) > most:
            return out[:most], False
        if status and time.monotonic() >= until:
            raise GitError("git took too long")
        if status:
            said.seek(0)
            lines = said.read(4096).decode("utf-8", "replace").strip().splitlines()
            bad = [line for line in lines if line.startswith(("fatal: ", "error: "))] or lines
            raise GitError(bad[0].partition(": ")[2] or bad[0] if bad else f"git failed with code {status}")
    return out, True


def code_at(directory: str, until: float, most_diff: int = MOST_DIFF) -> tuple[Code, bytes]:
    """Return the work tree that *directory* is in, and its uncommitted changes, at most *most_diff* bytes of them.

    Raises GitError, also if it is in none.
    """
    answer, _ = git(["rev-parse", "--show-toplevel"], directory, until)
    top = os.fsdecode(answer.split(b"\n")[0])
    status = ["status", "--porcelain=v2", "--branch", "-z", "--untracked-files=normal", "--no-renames"]
    listed, _ = git([*status, "--ignore-submodules=dirty"], top, until)
    commit = branch = None
    changed, untracked = 0, list[str]()
    for entry in listed.split(b"\0"):
        kind, _, rest = entry.partition(b" ")
        if entry.startswith(b"# branch.oid ") and not entry.endswith(b"(initial)"):
            commit = entry.split(b" ")[2].decode()
        elif entry.startswith(b"# branch.head ") and not entry.endswith(b"(detached)"):
            branch = entry.split(b" ", 2)[2].decode("utf-8", "replace")
        elif kind == b"?":
            untracked.append(rest.decode("utf-8", "replace"))
        elif kind in (b"1", b"2", b"u"):
            changed += 1
    diff, whole = b"", True
    if changed and commit is not None:
        words = ["diff", "--no-ext-diff", "--no-textconv", "--binary", "--no-color", "--no-renames", "--no-relative"]
        words += ["--submodule=short"]
        words += ["--src-prefix=a/", "--dst-prefix=b/", "--ignore-submodules=dirty", "--unified=3", "HEAD"]
        diff, whole = git(words, top, until, most_diff)
    code = Code(
        top=top,
        commit=commit,
        branch=branch,
        changed=changed,
        diff=None if not changed else NONE if commit is None else WHOLE if whole else CUT,
        diff_bytes=len(diff),
        diff_hash=sha256(diff).hexdigest() if diff else None,
        untracked=tuple(untracked[:MOST_UNTRACKED]),
        untracked_count=len(untracked),
    )
    return code, diff


def program_of(words: Sequence[str]) -> str:
    """Return the program of a command: its first word that assigns no variable, "" without one."""
    return next((word for word in words if "=" not in word or not word.partition("=")[0].isidentifier()), "")


def interpreter_of(program: str, workdir: str, environment: Mapping[str, str]) -> Interpreter | None:
    """Return the Python of a command that runs *program*; None if the job can find none."""
    path = _named(program, workdir, environment)
    if not path:
        return None
    prefix = os.path.dirname(os.path.dirname(path))
    packages = sorted({name for directory in _sites(prefix, path) for name in _packages(directory)}, key=str.lower)
    return Interpreter(path, _version(path, prefix), tuple(packages[:MOST_PACKAGES]))


def _named(program: str, workdir: str, environment: Mapping[str, str]) -> str:
    if _PYTHON.fullmatch(os.path.basename(program)):
        if "/" not in program:
            return _in_path(program, environment.get("PATH", ""))
        path = os.path.normpath(os.path.join(workdir, program))
        return path if os.path.exists(path) else ""
    places = [environment.get(variable, "") for variable in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    places += [f"{workdir}/.venv"] if program == "uv" else []
    for place in places:
        if place.startswith("/") and os.path.exists(f"{place}/bin/python"):
            return f"{place}/bin/python"
    return next(filter(None, (_in_path(name, environment.get("PATH", "")) for name in ("python", "python3"))), "")


def _in_path(name: str, path: str) -> str:
    places = (f"{each}/{name}" for each in path.split(":") if each.startswith("/"))
    return next((each for each in places if os.access(each, os.X_OK)), "")


def _version(path: str, prefix: str) -> str | None:
    """Return the version of an interpreter, from its environment's records or else from its name."""
    with suppress(OSError, UnicodeDecodeError), open(f"{prefix}/pyvenv.cfg", encoding="utf-8") as file:
        if match := _VERSION.search(file.read(8192)):
            return match[1]
    with suppress(OSError):
        for name in os.listdir(f"{prefix}/conda-meta"):
            if match := re.fullmatch(r"python-([0-9][0-9.]*)-.*\.json", name):
                return match[1]
    match = re.search(r"([0-9]+\.[0-9]+)$", os.path.basename(os.path.realpath(path)))
    return match[1] if match else None


def _sites(prefix: str, path: str) -> Iterator[str]:
    """Yield the directories of an interpreter's packages."""
    base = os.path.basename(os.path.realpath(path))
    minor = base if re.fullmatch(r"python[0-9]+\.[0-9]+", base) else ""
    for lib in dict.fromkeys((f"{prefix}/lib", f"{prefix}/lib64", f"{prefix}/local/lib")):
        with suppress(OSError):
            for name in sorted(os.listdir(lib)):
                if _PYTHON.fullmatch(name) and (not minor or name in (minor, "python3")):
                    yield from (f"{lib}/{name}/{site}" for site in ("site-packages", "dist-packages"))


def _packages(directory: str) -> Iterator[str]:
    with suppress(OSError):
        for name in os.listdir(directory):
            if match := _INFO.fullmatch(name):
                yield f"{match[1].replace('_', '-')} {match[2]}"


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel module; None if there is none."""
    with suppress(OSError, UnicodeDecodeError), open("/proc/driver/nvidia/version", encoding="utf-8") as file:
        if match := _DRIVER.search(file.readline(4096)):
            return match[1]
    return None


def capture(order: dict[str, Any]) -> dict[str, bytes]:
    """Return the records that *order* asks for, by their names."""
    until = time.monotonic() + _WITHIN_S
    workdir, files, problem, captured_at_ns = str(order["workdir"]), dict[str, bytes](), "", time.time_ns()
    code = interpreter = None
    try:
        code, diff = code_at(workdir, until)
        if diff:
            files[DIFF] = diff
    except GitError as error:
        problem = one_line(str(error))
    if order["program"] is not None:
        interpreter = interpreter_of(order["program"], workdir, order["environment"])
    record = Capture(
        captured_at_ns=captured_at_ns,
        problem=problem,
        host=identity.host(),
        kernel=os.uname().release,
        driver=driver_version(),
        code=code,
        interpreter=interpreter,
    )
    return {RECORD: render_capture(record), **files}


def main() -> None:
    """Carry out the order in the argument."""
    order = json.loads(sys.argv[1])
    files = capture(order)
    directory = str(order["into"])
    disk = Disk(os.path.dirname(directory))
    disk.mkdir(directory)
    for name, text in files.items():
        disk.create(f"{directory}/{name}", text, 0o400)


if __name__ == "__main__":
    main()
