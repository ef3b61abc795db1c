"""The fast path of `spool submit`: the plain case, in a third of the time of the full way.

Most of a submission's time goes into imports. So this handles plain values that are certainly valid, and fills the
same draft as the full way, without the libraries that check values and write help. For everything else it returns
None before it changes anything, and the full way does the job or reports the error.
"""

from __future__ import annotations

import os
import sys

from spool.client import submit as submitting
from spool.client.draft import Draft, Exports, exports, fresh_name, job_keys, may_go, stem_of
from spool.core import layout
from spool.store.glance import machine_told

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from spool.formats.capabilities import Key

MAX_HEAD_BYTES = 64 * 1024
_MAX_BYTES = 100_000
_UNITS = "KMGT"

OF_A_JOB = {
    "-n": ("name", ""),
    "--name": ("name", ""),
    "--export": ("export", ""),
    "--hold": ("hold", "true"),
    "--capture": ("capture", "true"),
    "--no-capture": ("capture", "false"),
}
"""The options of a job that are not keys, as in `joboptions.FLAGS`; a script may have them in its own lines."""

_PLAIN = {**OF_A_JOB, "-c": ("text", "")}

_SCARCE = ("cpus", "memory", "gpus", "gpu_memory", "gpu_min_memory")
"""Keys that may request more than a machine has."""

_OF_OTHERS: tuple[str, ...] = ("SLURM", "PBS_", "GFLOW_", "SGE_", "SBATCH_", "LSB_", "HQ_TASK", "NCPUS", "CUDA_VISIBLE")
_OF_OTHERS += ("srun", "sbatch", "scontrol", "squeue", "sacct", "sstat", "seff", "scancel", "qsub", "qstat", "qdel")
_OPTION_LINES = (b"\n#SPOOL", b"\n#SBATCH", b"\n#PBS", b"\n#$", b"\n# GFLOW")
_OF_THE_SHELL = frozenset(" \t\n|&;<>()$`\"'*?[]#~{}")


class UnclearError(Exception):
    """The arguments are not plain; the message says why, for callers without another way to report it."""


def submit(arguments: Sequence[str]) -> int | None:
    """Submit the job that *arguments* describe, the command line after the program's name; None if not plain."""
    root = ""
    if arguments[:1] == ["--spool"] and len(arguments) > 2:
        root, arguments = arguments[1], arguments[2:]
    if arguments[:1] != ["submit"]:
        return None
    try:
        values, words, dashes = _understood(arguments[1:])
        os.getcwd()
    except (UnclearError, OSError):  # the full way says what to do where the directory was removed
        return None
    with_kind = any(":" in text for text in values.get("depends_on", ()))  # perhaps one of other tools
    if with_kind or not values.keys().isdisjoint(("rows", "start_after", "capture", "matrix")):
        return None
    command: str | list[str]
    texts = values.pop("text", [])
    if len(texts) == 1 and not words:
        command = texts[0]
    elif dashes and words and not texts:
        command = command_of(words)
    else:
        return None
    if not _needs_nothing(command):
        return None
    names = values.pop("name", [])
    name = names[-1] if names else None
    held = values.pop("hold", None) is not None
    root = submitting.root_at(root) if root else submitting.default_root()
    exported = exports(root, values.pop("export", []))
    if exported.assigned or exported.remarks:
        return None
    draft = drafted(name or fresh_name(root, stem_of(command)), command, values, exported, held=held)
    text = None if draft is None else draft.plain_text()
    if draft is None or text is None or len(text) >= _MAX_BYTES or not _certainly_welcome(root, name, values):
        return None
    return _submitted(root, draft, text)


def _needs_nothing(command: str | list[str]) -> bool:
    """Whether a command neither names another scheduler nor runs a script with options, and expects no shell."""
    words = _OF_OTHERS if isinstance(command, str) else (*_OF_OTHERS, "$SPOOL_", "${SPOOL_")
    text = command if isinstance(command, str) else " ".join(command)
    if any(word in text for word in words):
        return False
    try:
        heads = [head_of(word) for word in command[:2]] if isinstance(command, list) else []
    except OSError:
        return False
    return not any(head.startswith(b"#!") and any(each in head for each in _OPTION_LINES) for head in heads)


def head_of(path: str) -> bytes:
    """Return the begin of a file, b"" if there is none. Raises OSError."""
    if not os.path.isfile(path) or not os.path.getsize(path):  # one without a size may be the kernel's, and wait
        return b""
    with open(path, "rb") as file:
        return file.read(MAX_HEAD_BYTES)


def _submitted(root: str, draft: Draft, text: str) -> int | None:
    """Put the job into the spool and return the exit code; None if there is a job of that name."""
    try:
        submitting.submit(root, [(draft.name, text.encode())], held=draft.held)
    except FileExistsError:
        return None
    except OSError as error:  # do not try again: the file may exist
        from spool.store.disk import remedy_for

        _complain(f"cannot submit job {draft.name}: {error.strerror}; {remedy_for(error)}")
        return 5
    if not draft.held:
        _serve(root)
    print(draft.name)
    return 0


def _understood(arguments: Sequence[str]) -> tuple[dict[str, list[str]], Sequence[str], bool]:
    """Return the result of `read`; the table of all keys is imported only if one of them is given."""
    try:
        return read(arguments, _PLAIN)
    except UnclearError:
        from spool.cli import joboptions

        return read(arguments, {**joboptions.FLAGS, **_PLAIN})


def read(
    arguments: Sequence[str], known: Mapping[str, tuple[str, str]]
) -> tuple[dict[str, list[str]], Sequence[str], bool]:
    """Return the values of the options at the begin of *arguments*, the remaining words, and whether `--` came between.

    *known* has each option's key and its fixed value, "" if it takes a value. Raises UnclearError for others.
    """
    values: dict[str, list[str]] = {}
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            return values, arguments[at + 1 :], True
        if not word.startswith("-") or word == "-":
            break
        flag, equals, value = word.partition("=") if word.startswith("--") else (word[:2], "", word[2:])
        if flag not in known:
            raise UnclearError(f"unknown option {flag}")
        key, stands_for = known[flag]
        if stands_for:
            if value or equals:
                raise UnclearError(f"{flag} takes no value")
            value = stands_for
        elif not value and not equals:
            at += 1
            if at == len(arguments):
                raise UnclearError(f"{flag} needs a value")
            value = arguments[at]
        values.setdefault(key, []).append(value)
        at += 1
    return values, arguments[at:], False


def _certainly_welcome(root: str, name: str | None, values: Mapping[str, list[str]]) -> bool:
    """Whether neither the spool nor the machine prevents such a job. If one does, the full way reports it."""
    return (
        (name is None or (layout.valid_name(name) and not name.endswith(layout.JOB_SUFFIX) and not name.isdecimal()))
        and _certainly_fits(root, values)
        and submitting.is_spool(root)
        and submitting.is_ours(root)
        and (name is None or submitting.where_taken(root, name) is None)
        and _are_there(root, name, values.get("depends_on", ()))
    )


def _are_there(root: str, name: str | None, depends_on: Sequence[str]) -> bool:
    """Whether the jobs that job *name* depends on are known, and it is not one of them."""
    needed = [each.strip() for text in depends_on for each in text.split(",") if each.strip()]
    return name not in needed and all(submitting.ever_used(root, each) for each in needed)


def _certainly_fits(root: str, values: Mapping[str, list[str]]) -> bool:
    """Whether the machine, as the dispatcher last found it, has the requested resources."""
    asked = {key: values[key][-1] for key in _SCARCE if key in values}
    if not asked or asked == {"cpus": "1"}:
        return True
    has = machine_told(root)
    return all(key in has and _bytes_of(text) <= has[key] for key, text in asked.items())


def _bytes_of(text: str) -> int:
    """Return a plain amount, `4` or `4G`, as a number."""
    shift = 10 * (_UNITS.find(text[-1]) + 1)
    return int(text[:-1] if shift else text) << shift


def _serve(root: str) -> None:
    from spool.store.lock import dispatcher_lives

    if dispatcher_lives(f"{root}/{layout.LOCK}"):
        return
    from spool.client import autostart

    problem = autostart.ensure(root)
    if problem:
        _complain(problem)


def _complain(message: str) -> None:
    from spool.core.errors import shown

    print(f"spool: {shown(message)}", file=sys.stderr)


def drafted(
    name: str, command: str | list[str], values: dict[str, list[str]], exported: Exports, *, held: bool = False
) -> Draft | None:
    """Return the job if it is valid; None if a value might be wrong. Raises OSError."""
    if not (command.strip() if isinstance(command, str) else command[0]):
        return None
    here = os.getcwd()
    if not here.startswith("/") or "$" in here:
        return None
    given: dict[str, object] = {}
    if values:
        from spool.cli import joboptions
        from spool.formats.keys import BY_OPTION

        given = joboptions.keys_of(values)
        table = {key.name: key for key in BY_OPTION}
        if not all(_is_plain(table[key], value, given) for key, value in given.items()):
            return None
    return Draft(name, job_keys(command, given, exported), held=held)


def _is_plain(key: Key, value: Any, keys: Mapping[str, object]) -> bool:
    """Whether *value* is one that the reader of job files takes without a second thought, beside the rest of *keys*."""
    if key.needs and not keys.get(key.needs.partition(":")[0]):
        return False
    is_plain = _PLAIN_VALUES.get(key.kind)
    return is_plain is not None and is_plain(key, value)


def _is_text(text: object) -> bool:
    return isinstance(text, str) and text.isprintable() and "{" not in text and len(text) < _MAX_BYTES


def _are_labels(labels: Sequence[str]) -> bool:
    good = (text == text.strip() and 0 < len(text) <= 100 and text.isprintable() for text in labels)
    return 0 < len(set(labels)) == len(labels) and all(good)


def _is_amount(text: object, units: str) -> bool:
    """Whether *text* is a whole number that is not 0 and one unit."""
    number = text[:-1] if isinstance(text, str) and text[-1:] in units else ""
    return len(number) < 6 and number.isascii() and number.isdecimal() and not number.startswith("0")


def _is_assigned(name: str, text: str) -> bool:
    """Whether *text* is plain, and not the rest of several assignments, for which the full way has an advice."""
    return may_go(name) and bool(text) and _is_text(text) and not {",", "="} <= {*text}


_PLAIN_VALUES: Mapping[str, Callable[[Key, Any], bool]] = {
    "count": lambda key, value: not key.array_only and isinstance(value, int) and (key.least or 0) <= value <= key.most,
    "DependsOn": lambda _, value: isinstance(value, list) and _are_labels(value) and all(map(layout.valid_name, value)),
    "duration": lambda _, value: _is_amount(value, "smhd"),
    "label": lambda _, value: _are_labels([value]),
    "labels": lambda _, value: _are_labels(value),
    "size": lambda _, value: _is_amount(value, _UNITS),
    "size or auto": lambda _, value: _is_amount(value, _UNITS),
    "variables": lambda _, value: all(map(_is_assigned, value, value.values())),
}
"""By kind, which values are plain; of another kind none is."""


def command_of(words: Sequence[str]) -> str | list[str]:
    """Return *words* as a command: executed directly, or a string for the shell if one word needs a shell.

    So `submit -- 'sort a | uniq'` works as with `ssh` and `watch`.
    """
    if len(words) == 1 and not _OF_THE_SHELL.isdisjoint(words[0]) and not os.path.exists(words[0]):
        return words[0]
    return list(words)
