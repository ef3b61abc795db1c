"""The quick way to submit: the plain case of `spool submit`, in a third of the time that the full way takes.

Most of a submission's time is importing. So this understands a few options whose values are certainly right, and
writes the same job file as the full way, without the libraries that judge values and write help. For all else it
returns None before anything was done, and the full way says what is wrong, or does it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from spool.cli import joboptions, jobtext, naming
from spool.client import submit as submitting
from spool.core import layout
from spool.core.names import EXECUTORS

_MAX_BYTES = 100_000
_COUNTS = {"gpus": 1_000, "cpus": 100_000, "priority": 255}
_AMOUNTS = {"memory": "KMGT", "gpu_memory": "KMGT", "time_limit": "smhd"}
_LABELS = frozenset({"project", "tags"})


def submit(arguments: Sequence[str]) -> int | None:
    """Submit what *arguments*, all of the command line after the program's name, ask for; None if not plain."""
    root = ""
    if arguments[:1] == ["--spool"] and len(arguments) > 2:
        root, arguments = arguments[1], arguments[2:]
    if arguments[:1] != ["submit"]:
        return None
    try:
        values, words, dashes = joboptions.read(
            arguments[1:], {"-n": ("name", True), "--name": ("name", True), "-c": ("text", True)}
        )
    except joboptions.UnclearError:
        return None
    if "rows" in values:
        return None
    command: str | list[str]
    texts = values.pop("text", [])
    if len(texts) == 1 and not words:
        command = texts[0]
    elif dashes and words and not texts:
        command = naming.command_of(words)
    else:
        return None
    names = values.pop("name", [])
    name = names[-1] if names else None
    try:
        text = job_text(command, values)
    except OSError:  # the working directory is gone
        return None
    root = os.path.abspath(root) if root else submitting.default_root()
    if text is None or (name is not None and not _usable(name)):
        return None
    if not submitting.is_spool(root) or (name is not None and submitting.where_taken(root, name)):
        return None
    if name is None:
        name = naming.fresh_name(naming.stem_of(command), lambda name: submitting.ever_used(root, name))
    try:
        submitting.submit(root, [(name, text.encode())])
    except FileExistsError:
        return None
    except OSError as error:  # not to be tried again: the file may be there
        _complain(f"cannot submit job {name}: {error.strerror}")
        return 5
    return _told(root, name)


def _usable(name: str) -> bool:
    return layout.valid_name(name) and not name.endswith(layout.JOB_SUFFIX)


def _told(root: str, name: str) -> int:
    from spool.client import autostart

    problem = autostart.ensure(root)
    if problem:
        _complain(problem)
    print(name)
    return 0


def _complain(message: str) -> None:
    from spool.core.errors import shown

    print(f"spool: {shown(message)}", file=sys.stderr)


def job_text(command: str | list[str], values: joboptions.Values) -> str | None:
    """Return the job file, None if a value might be wrong."""
    if not (command.strip() if isinstance(command, str) else command[0]):
        return None
    keys = {"command": command, "workdir": os.getcwd(), **joboptions.keys_of(values)}
    if not all(_is_right(key, value) for key, value in keys.items()) or ("gpu_memory" in keys and not keys.get("gpus")):
        return None
    text = jobtext.render(keys)
    return text if text is not None and len(text) < _MAX_BYTES else None


def _is_right(key: str, value: object) -> bool:
    """Whether the full way would certainly take *value*."""
    if key in _COUNTS:
        return isinstance(value, int) and value <= _COUNTS[key]
    if key in _AMOUNTS:
        return isinstance(value, str) and _is_amount(value, _AMOUNTS[key])
    if key in _LABELS:
        labels = [value] if isinstance(value, str) else value
        return isinstance(labels, list) and all(label.strip() and len(label) <= 100 for label in labels)
    if key == "executor":
        return value in EXECUTORS
    if key == "keep_session":
        return isinstance(value, bool)
    if key == "workdir":
        return isinstance(value, str) and value.startswith("/") and "$" not in value
    return key == "command"


def _is_amount(text: str, units: str) -> bool:
    """Whether *text* is a whole number that is not 0 and one unit."""
    number = text[:-1]
    return (
        text[-1:] in units
        and len(number) < 7
        and number.isascii()
        and number.isdecimal()
        and not number.startswith("0")
    )
