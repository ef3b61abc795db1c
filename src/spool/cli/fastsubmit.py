"""The fast path of `spool submit`: the plain case, in a third of the time that the full way takes.

Most of a submission's time goes into imports. So this handles plain values that are certainly valid, and writes the
same job file as the full way, without the libraries that check values and write help. For everything else it returns
None before it changes anything, and the full way does the job or reports the error. Both name a job and lay out its
file here.
"""

from __future__ import annotations

import os
import sys

from spool.client import submit as submitting
from spool.client.exports import exports, may_go
from spool.core import layout

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from spool.formats.keys import Key

_MAX_BYTES = 100_000
_AMOUNTS = {"size": "KMGT", "duration": "smhd", "timeout": "smhd"}

_OTHERS = {
    "-n": ("name", ""),
    "--name": ("name", ""),
    "-c": ("text", ""),
    "--export": ("export", ""),
    "--hold": ("hold", "true"),
}
"""The options that are no keys, in the form of `joboptions.FLAGS`."""

_SCARCE = ("cpus", "memory", "gpus", "gpu_memory", "gpu_type", "executor", "executor_options", "resources")
"""Keys that may ask for more than a machine has."""

_STATE_HEAD = 16384  # bytes of `state.json`; the machine stands before the jobs

_LETTERS = "23456789bcdfghjkmnpqrstvwxz"  # no vowels and no look-alikes: no words, no mistakes
_INTERPRETERS = ("python", "pypy", "perl", "ruby", "node", "julia", "Rscript", "bash", "sh", "dash", "zsh", "ksh")
_OF_THE_SHELL = frozenset(" \t\n|&;<>()$`\"'*?[]#~{}")
_LONGEST_STEM = 40
_PLAIN_PATH = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./")


class UnclearError(Exception):
    """The arguments are not plain; the message says why, for callers without another way to report it."""


def addressed(arguments: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """Return which spool a command line names ("": none), and what follows `submit`; None of any other command."""
    root = ""
    if arguments[:1] == ["--spool"] and len(arguments) > 2:
        root, arguments = arguments[1], arguments[2:]
    return (root, arguments[1:]) if arguments[:1] == ["submit"] else None


def submit(arguments: Sequence[str]) -> int | None:
    """Submit the job that *arguments* describe, the command line after the program's name; None if not plain."""
    found = addressed(arguments)
    if found is None:
        return None
    root, arguments = found
    try:
        values, words, dashes = _understood(arguments)
    except UnclearError:
        return None
    if not values.keys().isdisjoint(("rows", "start_after")):  # of a file, and in words of people
        return None
    if any(text.startswith("after") for text in values.get("depends_on", ())):  # in words of other tools
        return None
    command: str | list[str]
    texts = values.pop("text", [])
    if len(texts) == 1 and not words:
        command = texts[0]
    elif dashes and words and not texts:
        command = command_of(words)
    else:
        return None
    names = values.pop("name", [])
    name = names[-1] if names else None
    held = values.pop("hold", None) is not None
    root = os.path.abspath(root) if root else submitting.default_root()
    exported = exports(root, values.pop("export", []))
    if exported.assigned or exported.left_out:
        return None
    try:
        text = job_text(command, values, exported.taken)
    except OSError:  # the working directory is gone
        return None
    if text is None or (name is not None and not _usable(name)) or not _certainly_fits(root, values):
        return None
    if (
        not submitting.is_spool(root)
        or not submitting.is_ours(root)
        or (name is not None and submitting.where_taken(root, name))
    ):
        return None
    if not _are_there(root, name, values.get("depends_on", ())):
        return None
    if not all(map(os.path.isdir, values.get("workdir", ()))):  # or the full way warns
        return None
    if name is None:
        name = fresh_name(stem_of(command), lambda name: submitting.ever_used(root, name))
    try:
        submitting.submit(root, [(name, text.encode())], held=held)
    except FileExistsError:
        return None
    except OSError as error:  # do not try again: the file may exist
        from spool.store.disk import remedy_for

        _complain(f"cannot submit job {name}: {error.strerror}; {remedy_for(error)}")
        return 5
    if not held:
        _serve(root)
    print(name)
    return 0


def _understood(arguments: Sequence[str]) -> tuple[dict[str, list[str]], Sequence[str], bool]:
    """Return what `read` does; the table of all keys is imported only if one of them is given."""
    try:
        return read(arguments, _OTHERS)
    except UnclearError:
        from spool.cli import joboptions

        return read(arguments, {**joboptions.FLAGS, **_OTHERS})


def read(
    arguments: Sequence[str], known: Mapping[str, tuple[str, str]]
) -> tuple[dict[str, list[str]], Sequence[str], bool]:
    """Return the values of the options that *arguments* begin with, what follows, and whether `--` stood between.

    *known* has each option's key and the value that it stands for, "" if it takes one. Raises UnclearError for others.
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


def _are_there(root: str, name: str | None, depends_on: Sequence[str]) -> bool:
    """Whether the jobs that job *name* depends on are known, and it is none of them. If not, the full way says so."""
    needed = [each.strip() for text in depends_on for each in text.split(",") if each.strip()]
    return name not in needed and all(submitting.ever_used(root, each) for each in needed)


def _certainly_fits(root: str, values: Mapping[str, list[str]]) -> bool:
    """Whether the machine, as `state.json` describes it, has what is asked for. If not, the full way warns."""
    asked = {key: values[key][-1] for key in _SCARCE if key in values}
    if not asked or asked == {"cpus": "1"}:
        return True
    try:
        with open(f"{root}/{layout.STATE}", "rb") as file:
            told = file.read(_STATE_HEAD).partition(b'"machine":{')[2].partition(b'"passes":')[0]
    except OSError:
        return False
    has = {
        "cpus": _number_after(told, b'"cpus":'),
        "memory": _number_after(told, b'"memory_bytes":'),
        "gpus": told.count(b'"uuid":'),
    }
    return all(key in has and _bytes_of(text) <= has[key] for key, text in asked.items())


def _number_after(text: bytes, key: bytes) -> int:
    _, _, rest = text.partition(key)
    digits = rest[:20].partition(b",")[0]
    return int(digits) if digits.isdigit() else -1


def _bytes_of(text: str) -> int:
    """Return a plain amount, `4` or `4G`, as a number."""
    shift = 10 * (_AMOUNTS["size"].find(text[-1]) + 1)
    return int(text[:-1] if shift else text) << shift


def _usable(name: str) -> bool:
    return layout.valid_name(name) and not name.endswith(layout.JOB_SUFFIX) and not name.isdecimal()


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


def job_text(command: str | list[str], values: dict[str, list[str]], env: Mapping[str, str]) -> str | None:
    """Return the job file with *env*, which is valid; None if a value might be wrong."""
    if not (command.strip() if isinstance(command, str) else command[0]):
        return None
    here = os.getcwd()
    if not here.startswith("/") or "$" in here:
        return None
    keys: dict[str, object] = {"command": command, "workdir": here}
    if values:
        from spool.cli import joboptions
        from spool.formats.keys import BY_OPTION

        keys.update(joboptions.keys_of(values))
        table = {key.name: key for key in BY_OPTION}
        if not all(_is_right(table[key], value, keys) for key, value in keys.items()):
            return None
    own = keys.get("env")
    together = {**env, **(own if isinstance(own, dict) else {})}
    text = laid_out({**keys, "env": together} if together else keys)
    return text if text is not None and len(text) < _MAX_BYTES else None


def _is_right(key: Key, value: object, keys: Mapping[str, object]) -> bool:
    """Whether the full way would certainly accept *value* together with the rest of *keys*."""
    if key.needs and not keys.get(key.needs.partition(":")[0]):
        return False
    if key.kind == "count" and not key.array_only:
        return isinstance(value, int) and (key.least or 0) <= value <= key.most
    if key.kind in _AMOUNTS:
        return isinstance(value, str) and _is_amount(value, _AMOUNTS[key.kind])
    if key.kind in ("label", "labels"):
        labels = value if isinstance(value, list) else [str(value)]
        return len(set(labels)) == len(labels) and all(_is_label(label) for label in labels)
    if key.kind == "word":
        # What it says alone may need more, which the configuration may have: "stop" needs an idle time.
        return value in key.words and (key.name != "gpu_idle_action" or "gpu_idle" in keys)
    if key.kind == "DependsOn":
        return isinstance(value, list) and value != [] and all(layout.valid_name(name) for name in value)
    if key.kind == "output":
        return isinstance(value, str) and _PLAIN_PATH.issuperset(value) and value[-1:] not in ("", "/", ".")
    if key.kind == "variables":
        return isinstance(value, dict) and all(may_go(name) and _is_plain(text) for name, text in value.items())
    if key.table is not None and key.name == "retry" and isinstance(value, dict):
        inner = {each.name: each for each in key.table.keys}
        return all(_is_right(inner[name], each, value) for name, each in value.items())
    if key.kind == "workdir":
        return isinstance(value, str) and value.startswith("/") and "$" not in value
    return key.kind in ("command", "flag")


def _is_plain(text: object) -> bool:
    return isinstance(text, str) and text.isprintable() and "{" not in text and len(text) < _MAX_BYTES


def _is_label(text: str) -> bool:
    return text == text.strip() and 0 < len(text) <= 100 and text.isprintable()


def _is_amount(text: str, units: str) -> bool:
    """Whether *text* is a whole number that is not 0 and one unit."""
    number = text[:-1]
    return (
        text[-1:] in units
        and len(number) < 6
        and number.isascii()
        and number.isdecimal()
        and not number.startswith("0")
    )


def command_of(words: Sequence[str]) -> str | list[str]:
    """Return *words* as a command: executed as they are, or a string for the shell if one word needs a shell.

    So `submit -- 'sort a | uniq'` works as with `ssh` and `watch`.
    """
    if len(words) == 1 and not _OF_THE_SHELL.isdisjoint(words[0]) and not os.path.exists(words[0]):
        return words[0]
    return list(words)


def stem_of(command: str | Sequence[str]) -> str:
    """Return a name for a job that runs *command*: the program, or the script given to an interpreter."""
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
    """Return *stem* with a short suffix that makes it a name never *used* before."""
    length = 4
    while True:
        suffix = "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(length))
        name = f"{stem}-{suffix}"
        if not used(name):
            return name
        length = min(length + 1, 12)


def next_name(name: str, used: Callable[[str], bool]) -> str:
    """Return the first of `NAME-2`, `NAME-3`, … that was never *used*."""
    number = 2
    while used(f"{name}-{number}"):
        number += 1
    return f"{name}-{number}"


def laid_out(keys: Mapping[str, object]) -> str | None:
    """Return *keys* as the text of a job file, tables last, as a person would write it; None if this function cannot.

    A text that needs more than a backslash in TOML is left to the writer of `formats`.
    """
    lines: list[str] = []
    tables: list[str] = []
    for key, value in keys.items():
        if isinstance(value, dict):
            inner = [_line(name, item) for name, item in value.items()]
            tables += ["", f"[{key}]", *inner]
        else:
            lines.append(_line(key, value))
    text = "\n".join([*lines, *tables]) + "\n"
    return None if "\0" in text else text


def _line(key: str, value: object) -> str:
    bare = key.isascii() and key.replace("-", "_").isidentifier()
    shown = f"'''\n{value}'''" if isinstance(value, str) and _is_literal(value) else _value(value)
    return f"{key if bare else _quoted(key)} = {shown}"


def _is_literal(text: str) -> bool:
    """Whether *text* has several lines that TOML takes unchanged between triple quotes."""
    lines = text.split("\n")
    plain = all(line.replace("\t", "").isprintable() for line in lines)
    return len(lines) > 1 and plain and "'''" not in text and not text.endswith("'")


def _value(value: object) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return "\0"


def _quoted(text: str) -> str:
    """Return *text* as a string of TOML; what needs more than a backslash becomes NUL, which `laid_out` refuses."""
    if not text.isprintable():
        return "\0"
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
