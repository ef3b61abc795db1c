"""The compiled wrapper: a small C program that does what `run.sh` says, without a shell. Its build and its lookup.

This file imports the standard library only and runs by itself: the build of a wheel loads it by its path, before spool
can be imported (`src/hatch_build.py`), and `python src/spool/executors/compiled.py` builds the program beside its
source, for use from a checkout.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

NAME = "spool-wrapper"

_HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAM = f"{_HERE}/{NAME}"
SOURCE = f"{_HERE}/wrapper.c"
SCRIPT = os.path.normpath(f"{_HERE}/../formats/wrapper.sh")  # the program does what this says

_COMMON = ("-std=gnu11", "-O2", "-g0", "-s", "-Wl,--build-id=none")
# The start of a C library takes longer than all the work of the wrapper. The source has the system calls of x86-64 and
# aarch64, and does not compile this way for other processors.
_ALONE = ("-static", "-nostdlib", "-ffreestanding", "-fno-stack-protector", "-fno-asynchronous-unwind-tables")
_WITH_LIBRARY = ("-DWITH_LIBC",)

_PROCESSORS = {62: "x86_64", 183: "aarch64"}  # e_machine: elf(5)
_NO_ROOM = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
_TRY_S = 10


class FoundWrapper(NamedTuple):
    """The interpreter of the runs' scripts: the program at `path`; or, without one, `/bin/sh`, for the reason `why`."""

    path: str | None
    why: str = ""
    remedy: str = ""
    broken: bool = False  # the program exists, but cannot be used


def find(program: str | None = None) -> FoundWrapper:
    """Return what carries out the runs' scripts on this machine: *program* or that beside this file, or `/bin/sh`.

    The program is tried once in the life of a process. If the machine has no room for the attempt, that says nothing
    about the program, so the next call tries again.
    """
    program = program or PROGRAM
    try:
        return _tried(program)
    except OSError as error:
        return FoundWrapper(None, f"{program} could not be tried: {error.strerror}", "try again later", broken=True)


@cache
def _tried(program: str) -> FoundWrapper:
    """Try the program. Raise OSError, and cache nothing, if the machine has no room for the attempt."""
    if not os.path.lexists(program):
        why = "spool was installed without the compiled wrapper"
        return FoundWrapper(None, why, "for faster starts, install gcc and then spool again")
    why, remedy = _problem(program)
    return FoundWrapper(None, f"{program} {why}", remedy, broken=True) if why else FoundWrapper(program)


def _problem(program: str) -> tuple[str, str]:
    """Return why *program* cannot be used, and the remedy; two empty texts if it can.

    Raises OSError for want of room.
    """
    again, null = "install spool again on this machine", subprocess.DEVNULL
    words = [program, "--version"]
    try:
        tried = subprocess.run(words, stdin=null, capture_output=True, timeout=_TRY_S, check=False)
    except subprocess.TimeoutExpired:
        return "does not answer", again
    except PermissionError:
        return "may not be executed", "check its mode, and whether its file system is mounted with noexec"
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        return f"is not for this machine: {error.strerror}", again
    if tried.returncode:
        return f"does not work here: exit code {tried.returncode}", again
    if os.path.exists(SOURCE) and tried.stdout != f"{NAME} {digest()}\n".encode():
        return "was built from another version of its source", again
    return "", ""


def digest(*, of_constant: bool = False) -> str:
    """Return an identity of the source, which the program prints as its version, or only of the scripts' constant."""
    import hashlib  # here, like all imports for building: most commands only look the program up

    found = hashlib.sha256()
    for path in (SCRIPT,) if of_constant else (SOURCE, SCRIPT):
        with open(path, "rb") as file:
            text = file.read()
        found.update(text.partition(b"# --- assignments ---\n")[0] if of_constant else text)
    return found.hexdigest()[:16]


class NotBuiltError(Exception):
    """The program cannot be compiled here. The text gives the reason."""


class Built(NamedTuple):
    """A compiled program, and the tag of its platforms as a wheel states them."""

    path: str
    platforms: str


def build(folder: str = _HERE, *, alone: bool | None = None) -> Built:
    """Compile the program into *folder* with `$CC`, or `cc`. Raises NotBuiltError; an older program stays then.

    *alone*: without the C library (True), with it (False), or with it only where the source needs it (None). The same
    source and compiler make the same bytes in every folder.
    """
    import shlex
    import tempfile

    if not os.path.exists(SOURCE):
        raise NotBuiltError(f"{SOURCE} does not exist")
    said = ""
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=folder) as scratch:
            made, path = f"{scratch}/{NAME}", f"{folder}/{NAME}"
            for without in (True, False) if alone is None else (alone,):
                way = _ALONE if without else _WITH_LIBRARY
                stated = (f'-DSPOOL_SOURCE="{digest()}"', f'-DSPOOL_CONSTANT="{digest(of_constant=True)}.sh"')
                said = _compile([*compiler, *_COMMON, *way, *stated, "-o", made, os.path.basename(SOURCE)])
                if not said:
                    os.chmod(made, 0o755)  # noqa: S103  # whatever the umask: other users run it, too
                    os.replace(made, path)
                    _tried.cache_clear()
                    return Built(path, _platforms(path, without))
    except (OSError, ValueError) as error:
        raise NotBuiltError(str(error)) from error
    raise NotBuiltError(said)


def _compile(words: Sequence[str]) -> str:
    """Run the compiler; return its messages if it fails, or an empty text."""
    try:
        done = subprocess.run(words, cwd=_HERE, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        return f"the C compiler {words[0]} cannot be run: {error.strerror}"
    return (done.stderr.strip() or f"{words[0]} ended with exit code {done.returncode}") if done.returncode else ""


def _platforms(program: str, alone: bool) -> str:
    """Return the tag for a wheel with *program*.

    Without the C library it runs on any Linux of its processor. The tag for that is `linux_…`, which registries refuse;
    the oldest versions of both C libraries mean the same to the installers of every Python that runs spool. With the C
    library of this machine, it is for machines like this one.
    """
    import sysconfig

    with open(program, "rb") as file:
        header = file.read(20)
    processor = _PROCESSORS.get(int.from_bytes(header[18:20], "little")) if alone else None
    if processor is None:
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"manylinux_2_17_{processor}.musllinux_1_1_{processor}"


def main() -> None:
    """Build the program, and print its path."""
    import argparse

    parser = argparse.ArgumentParser(description="Compile spool's wrapper with $CC, or cc.")
    parser.add_argument("folder", nargs="?", default=_HERE, help="where to put it (default: beside its source)")
    parser.add_argument("--libc", action="store_true", help="use the C library, as for an unknown processor")
    chosen = parser.parse_args()
    try:
        print(build(chosen.folder, alone=False if chosen.libc else None).path)
    except NotBuiltError as error:
        sys.exit(f"cannot build {NAME}: {error}")


if __name__ == "__main__":
    main()
