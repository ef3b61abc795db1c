"""What was captured of the code that a run began with: values, and how they read."""

from __future__ import annotations

from msgspec import Struct

MOST_UNTRACKED = 100
"""How many untracked files are named; the others are counted."""

MOST_PACKAGES = 2000
"""How many packages of an interpreter are named."""

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


class Interpreter(Struct, frozen=True):
    """The Python that a job finds, from files alone: it is not run."""

    path: str
    prefix: str = ""  # the environment that it is of
    version: str | None = None
    found_by: str = ""  # "command", the variable that names its environment, or "PATH"
    packages: tuple[str, ...] = ()  # "NAME VERSION", of its site-packages


class LockFile(Struct, frozen=True):
    """The file beside the code that pins its packages."""

    path: str
    hash: str | None = None  # SHA-256; None: it was too long to read
    size_bytes: int = 0
    kept: bool = False  # a copy is in the metadir


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


def code_in_words(code: Code) -> str:
    """Return a commit and what differed from it, in a line: `3f2a1bc9d0e1 (main), 2 files changed`."""
    parts = [code.commit[:12] if code.commit is not None else "no commit yet"]
    if code.branch is not None:
        parts[0] += f" ({code.branch})"
    if code.changed:
        kept = {WHOLE: "", CUT: ", diff cut", NONE: ", diff not kept"}.get(code.diff or "", "")
        parts.append(f"{code.changed} file{'' if code.changed == 1 else 's'} changed{kept}")
    if code.untracked_count:
        parts.append(f"{code.untracked_count} untracked")
    return ", ".join(parts)
