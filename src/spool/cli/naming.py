"""What a submission without a name and without a job file is called and runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import count

_LETTERS = "23456789bcdfghjkmnpqrstvwxz"  # no vowels and nothing that looks like another: no words, no mistakes
_INTERPRETERS = ("python", "pypy", "perl", "ruby", "node", "julia", "Rscript", "bash", "sh", "dash", "zsh", "ksh")
_OF_THE_SHELL = frozenset(" \t\n|&;<>()$`\"'*?[]#~{}")
_LONGEST_STEM = 40


def command_of(words: Sequence[str]) -> str | list[str]:
    """Return *words* as a command: executed as they are, or a text for the shell if it is one word only a shell reads.

    So `submit -- 'sort a | uniq'` means what it means to `ssh` and `watch`.
    """
    if len(words) == 1 and not _OF_THE_SHELL.isdisjoint(words[0]) and not os.path.exists(words[0]):
        return words[0]
    return list(words)


def stem_of(command: str | Sequence[str]) -> str:
    """Return what to call a job that runs *command*: the program, or the script that an interpreter is given."""
    words = command.split() if isinstance(command, str) else list(command)
    while words and isinstance(command, str) and "=" in words[0] and words[0].split("=")[0].isidentifier():
        words.pop(0)  # an assignment before the program
    program = os.path.basename(words[0]) if words else "job"
    if program.rstrip("0123456789.") in _INTERPRETERS:
        scripts = [word for word in words[1:2] if not word.startswith("-")]
        if words[1:2] == ["-m"] and len(words) > 2:
            scripts = [words[2]]
        program = os.path.basename(scripts[0]) if scripts else program
    root, _, _ = program.rpartition(".")
    stem = "".join(char if char.isascii() and (char.isalnum() or char in "_-") else "-" for char in root or program)
    return stem.strip("-_")[:_LONGEST_STEM].rstrip("-_") or "job"


def fresh_name(stem: str, used: Callable[[str], bool]) -> str:
    """Return *stem* with a short suffix that makes it a name never *used* so far."""
    length = 4
    while True:
        suffix = "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(length))
        name = f"{stem}-{suffix}"
        if not used(name):
            return name
        length = min(length + 1, 12)


def next_name(name: str, used: Callable[[str], bool]) -> str:
    """Return the first of `NAME-2`, `NAME-3`, … that was never *used*."""
    return next(f"{name}-{number}" for number in count(2) if not used(f"{name}-{number}"))
