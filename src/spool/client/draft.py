"""A job before it is in the spool: its keys, its name, its variables from the caller's environment, its file.

Every way to submit fills a `Draft`: `spool submit`, fast or not, `spool run` and `Client`. Variables
that it copies, so that the job finds the same programs as the caller, go into the file's `env`, where they can be seen
and edited. Imports almost nothing, because every submission uses it.
"""

from __future__ import annotations

import os
import resource

from spool.client.submit import ever_used, literal
from spool.core.layout import EXPORTED, LIMITS, MAX_NAME_LENGTH, SERVICE, UMASK
from spool.store.glance import config_if, defaults_of

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from spool.core.model import Spec


_NUMBERS = {name: getattr(resource, f"RLIMIT_{name.upper()}") for name in LIMITS}
_ALL = {value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}


def keys_of_caller() -> dict[str, object]:
    """Return the keys of a job file for what this process does not have as after a login."""
    keys: dict[str, object] = {}
    if (umask := _umask()) != UMASK:
        keys["umask"] = f"{umask:03o}"
    if (nice := os.getpriority(os.PRIO_PROCESS, 0)) != 0:
        keys["nice"] = nice
    limits: dict[str, object] = {}
    for name, number in _NUMBERS.items():
        soft = resource.getrlimit(number)[0]
        if soft != _at_login(name):
            limits[name] = "unlimited" if soft == resource.RLIM_INFINITY else soft
    return {**keys, "limits": limits} if limits else keys


def begin_as_after_login() -> list[str]:
    """Give this process, a dispatcher, what it would have after a login. Return what cannot be undone, in words.

    One that a submission has started also leaves the caller's directory, niceness and CPUs: it serves others, too.
    """
    os.umask(UMASK)
    kept = []
    names = {number: name for name, number in _NUMBERS.items()}
    for number in _ALL:
        hard = resource.getrlimit(number)[1]
        wanted = _at_login(names[number]) if number in names else resource.RLIM_INFINITY
        is_lower = hard != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or wanted > hard)
        if is_lower and number in names:
            kept.append(f"{names[number]} = {hard}")
        resource.setrlimit(number, (hard if is_lower else wanted, hard))
    if SERVICE in os.environ:
        os.chdir("/")
        try:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        except OSError:
            kept.append(f"nice = {os.getpriority(os.PRIO_PROCESS, 0)}")
        from contextlib import suppress  # imports half of the library

        with suppress(OSError):  # as far as its container lets it
            os.sched_setaffinity(0, os.sched_getaffinity(1))
    return kept


def _at_login(name: str) -> int:
    soft = LIMITS[name].at_login
    return resource.RLIM_INFINITY if soft is None else soft


def _umask() -> int:
    try:
        with open("/proc/self/status", "rb") as status:
            return int(status.read().partition(b"\nUmask:")[2].split()[0], 8)
    except (OSError, IndexError, ValueError):  # a kernel before 4.7
        return UMASK


# Variables that spool sets itself, and those that describe only the current shell or tmux.
_NEVER = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "_", "SHLVL", "PWD", "OLDPWD", "TMUX", "TMUX_PANE"})
_NEVER_BEGIN = ("SPOOL_", "spool_", "BASH")
_FUNCTION = "BASH_FUNC_"
_SECRETS = ("TOKEN", "SECRET", "PASS", "CREDENTIAL", "KEY", "DATABASE_URL", "CONNECTION_STRING")
_SECRET_WORDS = frozenset({"PAT", "PWD", "DSN"})  # between underscores
_MOST_SHOWN = 8

_LETTERS = "23456789bcdfghjkmnpqrstvwxz"  # no vowels and no look-alikes: no words, no misreading
_INTERPRETERS = ("python", "pypy", "perl", "ruby", "node", "julia", "Rscript", "bash", "sh", "dash", "zsh", "ksh")
_LONGEST_SUFFIX = 12  # of a fresh name
_LONGEST_STEM = 40


class Draft:
    """A job before it is in the spool: its name, the keys of its file, and whether it begins held.

    A job file that a user has written has no *keys* here: its *text* stays as it is. *named*: whether its name was
    given, and can be that of earlier jobs.
    """

    __slots__ = ("_text", "held", "keys", "name", "named")

    def __init__(
        self,
        name: str,
        keys: Mapping[str, object],
        *,
        held: bool = False,
        text: bytes | None = None,
        named: bool = True,
    ) -> None:
        self.name = name
        self.named = named
        self.keys = keys
        self.held = held
        self._text = text

    def plain_text(self) -> str | None:
        """Return the job file, tables last, as a user would write it; None if that needs a library.

        It does for a text that needs more than a backslash, and for numbers and tables of other kinds.
        """
        lines: list[str] = []
        tables: list[str] = []
        for key, value in self.keys.items():
            if isinstance(value, dict):
                tables += ["", f"[{_key(key)}]", *(_line(name, item) for name, item in value.items())]
            else:
                lines.append(_line(key, value))
        text = "\n".join([*lines, *tables]) + "\n"
        return None if "\0" in text else text

    def text(self) -> bytes:
        """Return the job file. Raises InvalidValue for a text that no file can hold."""
        if self._text is None:
            plain = self.plain_text()
            if plain is not None:
                self._text = plain.encode()
            else:
                from spool.formats import jobfile

                self._text = jobfile.dump(self.keys)
        return self._text

    def check(self, root: str) -> Spec:
        """Return what the job is. Raises InvalidJob if the spool *root* would not take it, InvalidValue as `text`."""
        from spool.core.errors import InvalidJob
        from spool.formats import jobfile

        try:
            return jobfile.parse(self.text(), name=self.name, defaults=defaults_of(root))
        except InvalidJob as error:
            raise (error.without_lines() if self.keys else error) from None


def job_keys(command: str | Sequence[str], given: Mapping[str, object], exported: Exports) -> dict[str, object]:
    """Return the keys of a job that runs *command* with the keys *given*.

    It runs in the current directory unless they have a `workdir`, and under the umask, limits and niceness of this
    process. A `start_after` without an offset is in the zone of this process. Keys of `env` in *given* override those
    of *exported*. Raises FileNotFoundError if the current directory is gone.
    """
    known = placeholders(given)
    here = given.get("workdir") or escaped(literal(os.getcwd()), known)
    keys = {"command": command, "workdir": here, **keys_of_caller(), **given}
    if "start_after" in given:
        from spool.formats.values import with_offset

        keys["start_after"] = with_offset(given["start_after"])
    own = given.get("env", {})
    if isinstance(own, dict) and (env := exported.env(own, known)):
        keys["env"] = env
    return keys


def plain(value: object) -> str | int | float:
    """Return a parameter as a job file has it: what it cannot hold, such as numpy's or paths, as its text."""
    return value if isinstance(value, str | int | float) else str(value)


def placeholders(keys: Mapping[str, object]) -> set[str]:
    """Return the keys whose `{key}` an array with *keys* replaces."""
    makers = [key for key in ("array", "matrix", "rows") if key in keys]
    if not makers:
        return set()
    from spool.core.arrays import ARRAY, INDEX

    rows = keys.get("rows")
    tables = (keys.get("matrix"), rows[0] if isinstance(rows, list) and rows else None)
    found = {INDEX, *(key for table in tables if isinstance(table, dict) for key in table)}
    return found | {ARRAY} if "array" in makers and len(makers) > 1 else found


def escaped(text: str, placeholders: Iterable[str]) -> str:
    """Return *text* as an array must spell it to mean exactly that: `{{key}}` for `{key}` of its *placeholders*."""
    for key in placeholders:
        text = text.replace(f"{{{key}}}", f"{{{{{key}}}}}")
    return text


class Exports:
    """Variables for a job: `taken` from the caller, `assigned` on the command line, and `remarks` about others."""

    def __init__(self) -> None:
        self.taken: dict[str, str] = {}
        self.assigned: dict[str, str] = {}
        self.remarks: list[str] = []

    def env(self, own: Mapping[str, object], placeholders: Iterable[str] = ()) -> dict[str, object]:
        """Return the `env` of a job with its *own* `env`, which overrides the taken variables.

        *placeholders* are the `{key}` that have a meaning in the file, and none in the taken variables.
        """
        known = tuple(placeholders)
        taken = {name: escaped(value, known) for name, value in self.taken.items()} if known else self.taken
        return {**taken, **self.assigned, **own}

    def take(self, names: Iterable[str], environment: Mapping[str, str]) -> None:
        """Take the variables *names* from *environment*, as far as a file can hold them."""
        for name in sorted(names):
            value = environment[name]
            try:
                value.encode()
            except UnicodeEncodeError:
                self.remarks.append(f"{name} is not passed on: it is not UTF-8")
            else:
                self.taken[name] = value


def exports(root: str, asked: Sequence[str] = ()) -> Exports:
    """Return the variables that the words of `--export` take from the environment.

    Without words, the configuration of *root* has them. A word is ALL, NONE, a name, a pattern or NAME=VALUE, several
    with commas between. Named variables that are not set are in `remarks`, and possible secrets that ALL takes.
    """
    found, environment = Exports(), os.environ
    if not asked:
        found.take(matching(patterns(root), environment), environment)
        return found
    wanted, everything = list[str](), False
    for word in ",".join(asked).split(","):
        name, equals, value = word.strip().partition("=")
        if equals:
            found.assigned[name] = value
        elif name.upper() == "ALL":
            everything = True
        elif name and name.upper() not in ("NONE", "NIL"):
            wanted.append(name)
            if not _is_pattern(name) and name not in environment:
                found.remarks.append(f"{name} is not passed on: it is not set")
            elif not _is_pattern(name) and not may_go(name):
                found.remarks.append(f"{name} is not passed on: it only makes sense in this process")
    names = {name for name in environment if may_go(name)} if everything else set()
    if secrets := sorted(name for name in names - {*wanted} if may_be_secret(name, environment[name])):
        more = f" and {len(secrets) - _MOST_SHOWN} more" if len(secrets) > _MOST_SHOWN else ""
        shown = ", ".join(secrets[:_MOST_SHOWN])
        found.remarks.append(f"ALL writes possible secrets into the job file: {shown}{more}")
    found.take(names | matching(wanted, environment), environment)
    return found


def may_go(name: str) -> bool:
    """Whether a variable of that name can be in a job file and makes sense elsewhere."""
    if name.startswith(_FUNCTION):  # a shell function that bash exports
        of = name[len(_FUNCTION) : -2]
        return name.endswith("%%") and name.isascii() and of.replace("-", "_").replace(".", "_").isidentifier()
    return name.isascii() and name.isidentifier() and name not in _NEVER and not name.startswith(_NEVER_BEGIN)


def matching(patterns: Iterable[str], environment: Mapping[str, str]) -> set[str]:
    """Return the names in *environment* that match. Possible secrets match full names only."""
    patterns = {*patterns}
    named = {pattern for pattern in patterns if not _is_pattern(pattern)}
    found = named & environment.keys()
    for pattern in patterns - named:
        head, last = pattern[:-1], pattern[-1]
        if last == "*" and not _is_pattern(head):
            found |= {name for name in environment if name.startswith(head)}
        else:
            from fnmatch import fnmatchcase  # here, because most callers do not need it

            found |= {name for name in environment if fnmatchcase(name, pattern)}
    return {name for name in found if may_go(name) and (name in named or not may_be_secret(name, environment[name]))}


def _is_pattern(word: str) -> bool:
    return any(char in word for char in "*?[")


def may_be_secret(name: str, value: str) -> bool:
    """Whether a variable may hold a secret: by its name, or as an address with a password."""
    upper = name.upper()
    _, is_address, rest = value.partition("://")
    user, _, _ = rest.partition("/")[0].rpartition("@")
    return (
        any(word in upper for word in _SECRETS)
        or not _SECRET_WORDS.isdisjoint(upper.split("_"))
        or (bool(is_address) and ":" in user)
    )


def patterns(root: str) -> Sequence[str]:
    """Return the variables that are copied by default: from the configuration of *root*, or the built-in list."""
    said = config_if(root, b"export")
    return EXPORTED if said is None else said.export


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


def fresh_name(root: str, stem: str) -> str:
    """Return *stem*, cut if need be, with a short suffix that makes it a name never used before in the spool *root*."""
    stem, length = stem[: MAX_NAME_LENGTH - _LONGEST_SUFFIX - 1], 4
    while True:
        suffix = "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(length))
        name = f"{stem}-{suffix}"
        if not ever_used(root, name):
            return name
        length = min(length + 1, _LONGEST_SUFFIX)


def next_name(root: str, name: str) -> str:
    """Return the first of `NAME-2`, `NAME-3`, … that was never used in the spool *root*."""
    number = 2
    while ever_used(root, f"{name}-{number}"):
        number += 1
    return f"{name}-{number}"


def _line(key: object, value: object) -> str:
    shown = f"'''\n{value}'''" if isinstance(value, str) and _is_literal(value) else _value(value)
    return f"{_key(key)} = {shown}"


def _key(key: object) -> str:
    if not isinstance(key, str):
        return "\0"
    return key if key.isascii() and key.replace("-", "_").isidentifier() else _value(key)


def _is_literal(text: str) -> bool:
    """Whether *text* has several lines that TOML takes unchanged between triple quotes."""
    lines = text.split("\n")
    plain = all(line.replace("\t", "").isprintable() for line in lines)
    return len(lines) > 1 and plain and "'''" not in text and not text.endswith("'")


def _value(value: object) -> str:
    """Return *value* in TOML; NUL, which no file has, for values that `plain_text` refuses."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if value.isprintable() else "\0"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return "\0"
