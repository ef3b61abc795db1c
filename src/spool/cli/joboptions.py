"""The keys of a job file as command-line options, and option values converted back to keys.

`spool submit` and `spool run` take them as arguments, scripts as `#SPOOL` lines, `spool edit` as new values. They come
from the table of keys. Nothing is checked here: the resulting text goes through the one reader of job files. Imports
next to nothing, so that the plain case of `spool submit` starts quickly.
"""

from __future__ import annotations

import os

from spool.client.submit import literal
from spool.formats.capabilities import Key
from spool.formats.keys import BY_OPTION, COMMON, SECTIONS

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from spool.core.errors import InvalidFile

COMMON_TITLE = "Common options"
"""The title of the first section of the help."""

MOST_ROWS_BYTES = 64 << 20
"""The longest file of parameters or of commands."""

Values = dict[str, list[str]]
"""The texts given for each key, in order. A flag is "true" or "false"."""


class Option:
    """One option of a key, *path* (dotted in a table); with a *value* it is a flag for that value.

    A key without a spelling is given by `--set`, and by an option of its name, which the help does not list.
    """

    def __init__(self, key: Key, path: str, spelling: str, help: str, value: str = "") -> None:  # noqa: A002
        self.key = path
        self.kind = key.kind
        self.words = key.words
        self.flags = [word for word in spelling.split() if word.startswith("-")]
        self.also = [] if value else key.also.split() if spelling else _by_name(key, path)
        self.metavar = spelling.split()[-1] if spelling else "VALUE"
        self.help = help
        self.value = value
        self.is_flag = key.kind == "flag" or bool(value)
        self.rare = key.rare
        self.repeats = key.kind in _REPEATED
        self.word = value or path.replace(".", "_")  # its Python name

    @property
    def name(self) -> str:
        """Its spelling in messages."""
        return next((word for word in self.flags if word.startswith("--")), f"--set {self.key}")


def _by_name(key: Key, path: str) -> list[str]:
    """Return the options of a key without a spelling: what it is called elsewhere, and its name.

    None are those that a submission takes from its caller: `--nice` is another program's word for a priority.
    """
    word = path.replace(".", "-").replace("_", "-")
    if key.kind in ("command", "program", "umask", "limits", "niceness"):
        return key.also.split()
    more = f"--no-{word}" if key.kind == "flag" else f"--{word.removesuffix('s')}" if word.endswith("s") else ""
    return list(dict.fromkeys((*key.also.split(), f"--{word}", *([more] if more else ()))))


def _options(keys: Iterable[Key], table: str = "") -> Iterator[Option]:
    for key in keys:
        path = table + key.name
        if key.internal:
            continue
        if key.option or key.table is None:
            yield Option(key, path, key.option, key.help or key.about.replace("`", ""))
        else:
            yield from _options(key.table.keys, f"{path}.")
        for spelling, value, said in key.shortcuts:
            yield Option(key, path, spelling, said, value)


def keys_of(values: Values) -> dict[str, object]:
    """Return *values* as the keys of a job file, tables as dictionaries. Invalid values stay as text."""
    keys: dict[str, object] = {}
    for option in OPTIONS:
        given = values.get(option.key)
        if not given or option.value:
            continue
        table, _, key = option.key.rpartition(".")
        into = keys.setdefault(table, {}) if table else keys
        assert isinstance(into, dict)
        into[key] = _READERS.get(option.kind, lambda given: given[-1])(given)
    for table, short in _SHORT:
        stated = keys.get(table)
        if isinstance(stated, dict) and list(stated) == [short] and not isinstance(stated[short], str):  # a mistake
            keys[table] = stated[short]
    return keys


def _number(text: str) -> object:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def _names(given: Iterable[str]) -> list[str]:
    return [name for text in given for part in text.split(",") if (name := part.strip())]


def _count(given: list[str]) -> object:
    digits = given[-1].removeprefix("-")
    return int(given[-1]) if digits.isascii() and digits.isdecimal() and len(digits) < 19 else given[-1]


def _variables(given: list[str]) -> dict[str, object]:
    """Return `KEY=VALUE` as a table; `KEY` alone is passed on from the present environment."""
    found: dict[str, object] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        found[key] = value if equals else os.environ.get(key, "")
    return found


def _resources(given: list[str]) -> dict[str, object]:
    """Return `NAME=N,…` as a table; `NAME` alone means one."""
    pairs = (text.partition("=") for text in _names(given))
    return {name: _count([count]) if equals else 1 for name, equals, count in pairs}


def _command(given: list[str]) -> object:
    """Return a command as a job file has it: a list, or a text for the shell, which can begin with "[" too."""
    from spool.core.errors import InvalidFile
    from spool.formats import toml

    text = given[-1]
    try:
        stated = toml.read(f"command = {text}".encode(), "--set").get("command") if text.startswith("[") else None
    except InvalidFile:
        return text
    return stated if isinstance(stated, list) else text


def _directory(given: list[str]) -> str:
    """Return a directory in the form of a job file: a relative one is resolved from the current directory.

    Raises OSError.
    """
    path = given[-1]
    if not path.strip() or path[0] in "/~${":
        return path
    return os.path.normpath(os.path.join(literal(os.getcwd()), path))


def _dependencies(given: list[str]) -> object:
    """Return `a,b` as a list, `any:a,b` as a table."""
    table: dict[str, list[str]] = {}
    for text in [ours for words in given for ours in _as_ours(words)]:
        kind, colon, names = text.partition(":")
        found = _names([names if colon else text])
        kind = kind.strip() if colon else "all"
        if kind not in _DEPENDENCIES:
            from spool.core.errors import InvalidValue

            why = f'"{kind}" is unknown; it is one of {", ".join(_DEPENDENCIES)}'
            raise InvalidValue(f"cannot use --depends-on {text}: {why}")
        table.setdefault(kind, []).extend(found)
    if list(table) == ["all"]:
        return table["all"]
    if len(pair := table.get("each", [])) > 1:
        from spool.core.errors import InvalidValue

        raise InvalidValue(f"cannot use --depends-on each:{','.join(pair)}: it takes the name of one array")
    return {kind: found[0] if kind == "each" and found else found for kind, found in table.items()}


def _choices(given: list[str]) -> dict[str, list[str]]:
    """Return `KEY=VALUE,…` as lists of a table; the values of a key that is given twice follow each other."""
    table: dict[str, list[str]] = {}
    for key, _, values in (pair.partition("=") for pair in given):
        table.setdefault(key, []).extend(filter(None, values.split(",")))
    return table


def _as_ours(text: str) -> Sequence[str]:
    """Return dependencies in the words of another scheduler in ours. Raises InvalidValue."""
    kind, colon, _ = text.partition(":")
    if not colon or kind.strip() in _DEPENDENCIES:
        return [text]
    from spool.formats.capabilities import contributed

    found: Iterator[Sequence[str] | None] = (read(text) for _, read in contributed("dependencies"))
    return next((words for words in found if words is not None), [text])


def _rows(given: list[str]) -> list[dict[str, str]]:
    """Return the rows of the table in a file, with unchanged cells. Raises InvalidValue.

    The first line has the keys. Cells are separated by commas, in a `.tsv` file by tabs; empty lines are skipped.
    """
    import csv  # imported here, because few submissions need it
    import io

    from spool.core.errors import InvalidValue, cannot
    from spool.store.reading import read_whole

    path = given[-1]
    use = ("use", "the table of parameters")
    try:
        text = io.StringIO(read_whole(path, MOST_ROWS_BYTES).decode("utf-8-sig"), newline="")
        lines = [line for line in csv.reader(text, delimiter="\t" if path.endswith(".tsv") else ",") if line]
    except OSError as error:
        raise InvalidValue(cannot(*use, error.strerror or str(error), where=path)) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidValue(cannot(*use, str(error), where=path)) from None
    keys = [key.strip() for key in lines[0]] if lines else []
    if len(set(keys)) < len(keys):
        raise InvalidValue(cannot(*use, "two of its columns have the same name", where=path))
    for number, line in enumerate(lines[1:], start=1):
        if len(line) != len(keys):
            why = f"row {number} has {len(line)} cells, but the first line has {len(keys)}"
            raise InvalidValue(cannot(*use, why, where=path))
    return [dict(zip(keys, line, strict=True)) for line in lines[1:]]


def _moment(given: list[str]) -> str:
    """Return a moment in the form of a job file. Raises InvalidValue."""
    import time

    from spool.cli.group import understood
    from spool.core.errors import InvalidValue

    try:
        return understood(given[-1], time.time_ns())
    except InvalidValue as error:
        raise InvalidValue(f"cannot use --start-after: {error}") from None


_DEPENDENCIES = ("all", "any", "ended", "failed", "each")
# Tables whose keys have options, and that can be one of these alone.
_SHORT = tuple(
    (key.name, key.table.short.name) for key in BY_OPTION if not key.option and key.table and key.table.short
)
_SHORT_KEYS = {table: f"{table}.{short}" for table, short in _SHORT}
_PAIRS = ("amounts", "choices", "limits", "variables")  # kinds that are tables of the user's own names
# The name of another key in a message: a value that it quotes is its first word, or comes after "names".
_OTHER_KEY = r'(?<!: )(?<!names )(?:the key )?"([a-z_.]+)"'

_REPEATED: dict[str, Callable[[list[str]], object]] = {
    "addresses": _names,
    "amounts": _resources,
    "choices": _choices,
    "DependsOn": _dependencies,
    "ends": lambda given: [_count([name]) for name in _names(given)],
    "events": _names,
    "GPU type": lambda given: names[0] if len(names := _names(given)) == 1 else names,
    "labels": _names,
    "limits": _resources,
    "options of a program": list,
    "variables": _variables,
}
"""The readers of kinds whose options may be repeated; of other options the last one counts."""

_READERS = _REPEATED | {
    "command": _command,
    "count": _count,
    "flag": lambda given: {"true": True, "false": False}.get(given[-1], given[-1]),
    "moment or delay": _moment,
    "niceness": _count,
    "number": lambda given: _number(given[-1]),
    "rows": _rows,
    "workdir": _directory,
}

OPTIONS = tuple(_options(BY_OPTION))

FLAGS = {
    flag: (option.key, option.value or ("false" if flag.startswith("--no-") else "true") if option.is_flag else "")
    for option in OPTIONS
    for flag in (*option.flags, *option.also)
}
"""Each spelling of an option -> its key, and the value of a flag, "" if it takes a value."""

SET = "--set"
"""The option that takes any key."""


def stated(pairs: Iterable[str]) -> Values:
    """Return the values that `--set KEY=VALUE` states. Raises UsageError."""
    values: Values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        option, (table, _, name) = _option_of(_SHORT_KEYS.get(key, key)), key.partition(".")
        if option is None and name and (whole := _option_of(table)) is not None and whole.kind in _PAIRS:
            option, value = whole, f"{name}={value}"
        if option is None or not equals:
            from spool.core.errors import UsageError, cannot
            from spool.formats.validation import closest

            known = sorted({each.key for each in OPTIONS})
            inner = (each.key for each in OPTIONS if each.key.startswith(f"{key.lower()}."))
            near = next(inner, None) or closest(key, known)
            why, remedy = f"unknown key {key!r}", f"the keys are {', '.join(known)}"
            if not equals:
                why, remedy = "it needs a key and a value", f"write, for example, {SET} priority=50"
            elif near is not None:
                remedy = f"did you mean {near!r}?"
            raise UsageError(cannot("use", f"{SET} {pair}", why, remedy=remedy))
        values.setdefault(option.key, []).append(value)
    return values


def _option_of(word: str) -> Option | None:
    """Return the option of the key that *word* names: as files do, or as its option is spelled."""
    bare = word.replace("-", "_")
    for option in OPTIONS:
        words = (option.word, *option.flags) if option.flags else (option.word, option.word.removesuffix("s"))
        if not option.value and (word == option.key or bare in words or f"--{word}" in words):
            return option
    return None


def _by_section() -> Iterator[tuple[str, Option]]:
    """Yield each option with its section of the help, in the order of the help."""
    of_key: dict[str, list[Option]] = {}
    for option in OPTIONS:
        of_key.setdefault(option.key.partition(".")[0], []).append(option)
    for name in COMMON:
        for option in of_key.pop(name):
            yield COMMON_TITLE, option
    for title, keys in SECTIONS:
        for key in keys:
            for option in of_key.pop(key.name, ()):
                yield title, option


def key_options(function: Callable[..., int]) -> Callable[..., int]:
    """Give a click command the options of the keys of a job file, and the one that takes any key."""
    import click

    from spool.cli.group import SpelledOption

    told = "Set any key of the job file, such as kill_grace=1m. May be repeated."
    function = click.option(SET, "sets", multiple=True, metavar="KEY=VALUE", help=told)(function)
    for section, option in reversed(list(_by_section())):
        flags, more = option.flags or option.also, dict[str, object]()
        if not flags:
            continue
        if option.value:
            more = {"flag_value": option.value}
        elif option.is_flag:
            flags = ["/".join(flags)]
        else:
            more = {"also": option.also if option.flags else (), "metavar": option.metavar, "multiple": option.repeats}
        more |= {
            "section": section,
            "rare": option.rare,
            "default": None,
            "help": option.help,
            "hidden": not option.flags,
        }
        function = click.option(*flags, option.word, cls=SpelledOption, **more)(function)
    return function


def values_of(parameters: Mapping[str, object]) -> Values:
    """Return the option values that click found, in the form that `read` returns."""
    values: Values = {}
    for option in OPTIONS:
        given = parameters.get(option.word)
        if isinstance(given, tuple):
            if given:
                values[option.key] = list(given)
        elif given is not None:
            values[option.key] = [str(given) if not isinstance(given, bool) else "true" if given else "false"]
    sets = parameters.get("sets", ())
    assert isinstance(sets, tuple)
    return with_stated(values, sets)


def with_stated(values: Values, pairs: Iterable[str]) -> Values:
    """Return the *values* of options with those that `--set KEY=VALUE` states. Raises UsageError."""
    for key, texts in stated(pairs).items():
        option, given = _option_of(key), values.setdefault(key, [])
        if given and option is not None and (twice := _stated_twice(option, given, texts)):
            from spool.core.errors import UsageError, cannot

            remedy = f"give {twice.partition('=')[0]} once, by {SET} or by its option"
            raise UsageError(cannot("use", f"{SET} {twice}", "another option states that key", remedy=remedy))
        given.extend(texts)
    return values


def _stated_twice(option: Option, given: list[str], texts: list[str]) -> str:
    """Return the one of *texts* whose key *given* states, too, as KEY=VALUE; "" if none. Lists take values of both."""
    if option.kind not in _PAIRS:
        return "" if option.repeats else f"{option.key}={texts[-1]}"
    before, now = map(_REPEATED[option.kind], (given, texts))
    assert isinstance(before, dict)
    assert isinstance(now, dict)
    return next((f"{option.key}.{name}={value}" for name, value in now.items() if name in before), "")


def checked(root: str, name: str, text: bytes, stated: Collection[str], spelled: str = "") -> bytes:
    """Return the new *text* of a job's file if it is valid. Raises InvalidJob, which names the options.

    *stated* and *spelled* are those of `in_options`.
    """
    from spool.core.errors import InvalidJob
    from spool.formats import jobfile
    from spool.store.glance import defaults_of

    try:
        jobfile.parse(text, name=name, defaults=defaults_of(root))
    except InvalidJob as error:
        raise in_options(error, f"job {name}", stated, spelled) from None
    return text


def in_options(error: InvalidFile, what: str, stated: Collection[str], spelled: str = "") -> InvalidFile:
    """Return *error* for a user who wrote options instead of a file: it names the option, and no line.

    *what* names the job. *stated* are the keys that were set; for other keys the message stays unchanged. *spelled* is
    the option by which all of them were set.
    """
    import re

    from msgspec.structs import replace

    flags = {option.key: option.name for option in OPTIONS if not option.value and option.key != "command"}
    flags |= {name: flags[f"{table}.{short}"] for table, short in _SHORT for name in (table, short)}
    problems = []
    for problem in error.problems:
        message, path = problem.message, problem.key or ""
        at = f" on line {problem.line}"
        key = next((each for each in (path, path.partition("[")[0], path.partition(".")[0]) if each in flags), "")
        if path.partition(".")[0].partition("[")[0] in stated:
            name = f"{spelled} {path}" if spelled else flags.get(key, f'"{path}"')
            message = message.replace(f'"{path}"{at}', name, 1).replace(f'"{path}"', name, 1).replace(at, "", 1)
            if not spelled:
                message = re.sub(_OTHER_KEY, lambda found: flags.get(found[1], found[0]), message)
        problems.append(replace(problem, message=message))
    return type(error)(what, problems)
