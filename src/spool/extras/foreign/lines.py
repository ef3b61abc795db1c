"""The lines of a script for another scheduler: which there are, their options, and what these become together.

What each option means alone is in the tables of `options`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from spool.core.units import format_size, parse_size
from spool.extras.foreign.options import (
    GPU,
    MAIL,
    MAIL_EVENTS,
    PER_CPU,
    PER_GPU,
    PIECES,
    SYSTEMS,
    NoEquivalent,
    gpus_asked,
    meaning_of,
    parts_of,
    words_of,
)
from spool.store.ownership import this_user


class Directive(Struct, frozen=True):
    """One option in a line of a script, as written; `value` is None for a flag."""

    line: int
    system: str  # the start of the line: "#SBATCH"
    option: str
    value: str | None

    def __str__(self) -> str:
        between = "=" if self.option.startswith("--") else " "
        return f"{self.system} {self.option}" + (f"{between}{self.value}" if self.value is not None else "")


class Converted(Struct, frozen=True):
    """The result for a directive: `words` of our command line, or why it is `lost`. No words: not needed here."""

    directive: Directive
    words: tuple[str, ...] = ()
    lost: NoEquivalent | None = None

    @property
    def is_note(self) -> bool:
        """Whether nothing is lost: it has an equivalent, is not needed, or chooses among parts that a spool lacks."""
        return self.lost is None or (self.directive.option in _PARTS and not self.lost.unless)

    @property
    def key(self) -> str | None:
        """The key of the job file without which the job would compute something else, if it has one of these."""
        option = self.directive.option
        if option in MAIL[self.directive.system]:
            return "notify.to"
        if self.lost is not None and self.lost.unless:
            return self.lost.unless.removeprefix("--")
        return next((key for options, key in _KEYS.items() if option in options.split()), None)

    def __str__(self) -> str:
        one = self.directive
        if self.lost is not None:
            return f"line {one.line}: {one} is ignored: {self.lost}"
        return f"line {one.line}: {one} {f'becomes {shlex.join(self.words)}' if self.words else 'is not needed here'}"


_PARTS = frozenset(("-p", "--partition", "-q", "--qos"))
_PLACES = (("#PBS", "-q"), ("#$", "-q"), ("#$", "-pe"))
_KEYS = {
    "-G -g --gpus --gpus-per-node --gpus-per-task --gres": "gpus",
    "-a --array -J -t": "array",
    "-d --dependency -W --depends-on --depends-on-all --depends-on-any -hold_jid -hold_jid_ad": "depends_on",
}

_PIECES = {"-n": "--ntasks", "-c": "--cpus-per-task"}
_SYNONYMS = {"--tasks": "--ntasks", "--tasks-per-node": "--ntasks-per-node"}
_LINE = re.compile(r"((?:#SBATCH|# GFLOW|#PBS)(?![^ \t])|#\$(?=[ \t]*-[a-zA-Z@]))[ \t]*(.*)")
_READ_ANYWHERE = ("# GFLOW", "#$")


def _in_full(option: str) -> str:
    """Return a long option of sbatch, which takes any beginning that no other option has."""
    known = {name for table in SYSTEMS["#SBATCH"] for names in table for name in names.split()}
    known.update(PIECES, _SYNONYMS, MAIL["#SBATCH"])
    meant = [option] if option in known else [name for name in known if name.startswith(option)]
    return _SYNONYMS.get(meant[0], meant[0]) if len(meant) == 1 else option


_LOADLEVELER = (
    "queue|(?:job_name|job_type|step_name|class|node|tasks_per_node|total_tasks|wall_clock_limit|output|error|executable"
    "|arguments|initialdir|environment|resources|network|requirements|notification|account_no|dependency|shell)\\s*=.*"
)
_OF_OTHERS = {
    "LSF": r"#BSUB\s+-.*",
    "Moab": r"#MSUB\s+-.*",
    "Cobalt": r"#COBALT\s+-.*",
    "OAR": r"#OAR\s+-.*",
    "LoadLeveler": rf"#\s*@\s*(?:{_LOADLEVELER})\s*",
    "Flux": r"#\s*(?:FLUX|flux):\s*-.*",
    "HyperQueue": r"#HQ\s+-.*",
    "Fujitsu's job operation": r"#PJM\s+-.*",
}


def unread_system(line: str) -> str | None:
    """Return the scheduler that *line* of a script is for, if its lines are not read here."""
    return next((system for system, pattern in _OF_OTHERS.items() if re.fullmatch(pattern, line)), None)


def is_line(line: str, *, late: bool = False) -> bool:
    """Whether *line* of a script is for another scheduler that reads it, also *late*: after the first command."""
    found = _LINE.fullmatch(line)
    return found is not None and (not late or found[1] in _READ_ANYWHERE)


def is_line_of_a_shell(line: str) -> bool:
    """Whether *line* is for a scheduler that gives a script without a `#!` line to a shell."""
    found = _LINE.fullmatch(line)
    return found[1] in ("#PBS", "#$") if found is not None else unread_system(line) is not None


def interpreter(line: str) -> str | None:
    """Return the shell that *line* of a script names, of a scheduler that runs it by that: `#PBS -S /bin/bash`."""
    found = re.fullmatch(r"#(?:PBS|MSUB|\$)(?:.*\s)?-S\s+([^\s,@]+).*|#BSUB(?:.*\s)?-L\s+(\S+).*", line)
    return (found[1] or found[2]) if found is not None else None


def directives(number: int, line: str) -> Iterator[Directive]:
    """Yield the options of one line. Raises ValueError for quotes that do not end."""
    match = _LINE.fullmatch(line)
    if match is None:
        return
    system = match[1]
    flags = SYSTEMS[system][1]
    words = shlex.split(match[2] or "", comments=True)
    while words:
        word = words.pop(0)
        if system == "#$" and word.startswith("-"):
            count = 0 if meaning_of(flags, word) is not None else 2 if word == "-pe" else 1
            values, words = words[:count], words[count:]
            yield Directive(number, system, word, " ".join(values) if values else None)
            continue
        if not word.startswith("-") or word == "-":
            yield Directive(number, system, word, None)
            continue
        option, equals, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        if not equals and meaning_of(flags, option) is None and words and not words[0].startswith("-"):
            equals, value = "=", words.pop(0)
        if system == "#SBATCH" and option.startswith("--"):
            option = _in_full(option)
        yield Directive(number, system, option, value if equals else None)


def convert(
    found: Sequence[Directive], *, limited: bool = True, sends_to: Callable[[str], bool] = lambda _: False
) -> list[Converted]:
    """Return the result for each of *found*, in order, line by line.

    *limited*: others state a time limit. *sends_to*: whether messages to an address can be sent.
    """
    done: list[Converted] = []
    pieces: dict[str, Directive] = {}
    for one in found:
        name = _PIECES.get(one.option, one.option)
        if one.system == "#SBATCH" and name in PIECES and one.value is not None:
            pieces[name] = one
        elif one.option not in MAIL[one.system]:
            done += [_converted(replace(one, value=part)) for part in parts_of(one.system, one.option, one.value)]
    if not limited and not any("--time-limit" in one.words for one in done):
        why = NoEquivalent("it warns before a time limit, and there is none; give --time-limit")
        done = [replace(one, words=(), lost=why) if "--signal" in one.words else one for one in done]
    done += [*_put_together(pieces, _count("--gpus", done)), *_mail(found, sends_to)]
    return sorted(_settled(done), key=lambda one: one.directive.line)


def _mail(found: Sequence[Directive], sends_to: Callable[[str], bool]) -> Iterator[Converted]:
    """Yield the recipients and the moments of messages; of several lines that are lost, the first stands for all."""
    events = {word: ours.split() for words, ours in MAIL_EVENTS.items() for word in words.split()}
    for system, (to, on) in MAIL.items():
        who = [one for one in found if (one.system, one.option) == (system, to)]
        when = [one for one in found if (one.system, one.option) == (system, on)]
        words = re.findall(r"\w+" if "--" in on else r"\w", " ".join(one.value or "" for one in when).upper())
        wanted = list(dict.fromkeys(event for word in words for event in events.get(word, ())))
        if "ended" in wanted:
            wanted = [event for event in wanted if event in ("started", "ended", "retried")]
        addresses = [each for one in who for each in re.split(r"[,\s]+", one.value or "") if each] or [this_user()]
        if when and not wanted:
            yield from map(Converted, [*who, *when])
        elif not all(map(sends_to, addresses)):
            why = NoEquivalent("give --notify ADDRESS, or see docs/EVENTS.md for what sends a mail")
            yield from (Converted(one, lost=why) for one in [*who, *when][:1])
        else:
            recipients = ("--notify", ",".join(addresses))
            yield from (Converted(one, recipients) for one in who[:1])
            on_events = ("--notify-on", ",".join(wanted))
            yield from (Converted(one, on_events if who else (*recipients, *on_events)) for one in when[:1])


def _count(option: str, done: Sequence[Converted]) -> int:
    """Return the number that the words of *done* give an *option*, 1 without one."""
    words = [word for one in done for word in one.words]
    return next((int(value) for name, value in pairwise(words) if name == option and _is_number(value)), 1)


def _settled(done: Sequence[Converted]) -> Iterator[Converted]:
    """Yield *done* with what depends on other lines: memory per CPU, and what matters only without a GPU."""
    words = [word for one in done for word in one.words]
    counts = {PER_CPU: _count("--cpus", done[::-1]), PER_GPU: _count("--gpus", done[::-1])}
    joined = any(one.directive.option == "-j" and one.lost is None and not one.words for one in done)
    most = 0
    for one in done:
        ours, lost = list(one.words), one.lost
        if ours and ours[0] in counts:
            ours = ["--memory", format_size(parse_size(ours[1]) * counts[ours[0]])]
        if ours[:1] == ["--memory"] and one.directive.system == "#$":  # a limit and what is free: the larger counts
            most = max(most, size := parse_size(ours[1]))
            ours = ours if size == most else []
        if ours[:1] == ["--stderr"] and joined:
            ours = []
        if one.directive.option == "-tc" and "--array" not in words:
            ours, lost = [], NoEquivalent("it limits the tasks of an array, and there is none")
        if lost is not None and lost.unless and lost.unless in words:
            lost = NoEquivalent()
        is_place = (one.directive.system, one.directive.option) in _PLACES
        if is_place and "--gpus" not in words and GPU.search(one.directive.value or ""):
            why = f"{one.directive.value} seems to have GPUs; for one give --gpus 1"
            lost = NoEquivalent(why, matters=one.directive.option == "-pe", unless="--gpus")
        yield replace(one, words=tuple(ours), lost=lost)


def _converted(one: Directive) -> Converted:
    values, flags = SYSTEMS[one.system]
    value, meaning = None, meaning_of(flags, one.option)
    if meaning is None:
        value, meaning = one.value, meaning_of(values, one.option)
        if meaning is None:
            return Converted(one, lost=NoEquivalent("unknown option"))
        if value is None:
            return Converted(one, lost=NoEquivalent("it needs a value", matters=True))
    try:
        return Converted(one, tuple(words_of(meaning, value)))
    except NoEquivalent as error:
        return Converted(one, lost=error)


def _put_together(pieces: Mapping[str, Directive], gpus: int) -> Iterator[Converted]:
    """Yield CPUs and GPUs that are stated per task; all tasks run here, so this is their sum."""
    numbers: dict[str, int] = {}
    for name, one in pieces.items():
        if _is_number(one.value):
            numbers[name] = int(one.value or 0)
        elif name != "--gpus-per-task":
            yield Converted(one, lost=NoEquivalent("not a number", matters=True))
            return
    tasks = numbers.get("--ntasks", numbers.get("--ntasks-per-node", numbers.get("--ntasks-per-gpu", 0) * gpus)) or 1
    if (per_task := pieces.get("--gpus-per-task")) is not None:
        try:
            option, count, *more = gpus_asked(per_task.value or "")
        except NoEquivalent as error:
            yield Converted(per_task, lost=error)
        else:
            gpus = tasks * int(count)
            yield Converted(per_task, (option, str(gpus), *more))
    cpus = tasks * numbers.get("--cpus-per-task", 1)
    if "--cpus-per-task" not in pieces and "--cpus-per-gpu" in numbers:
        cpus = gpus * numbers["--cpus-per-gpu"]
    yield from (Converted(one, ("--cpus", str(cpus))) for one in pieces.values() if one != per_task)


def tasks_of(found: Sequence[Directive]) -> tuple[int, int | None]:
    """Return how many tasks the `#SBATCH` lines ask for, and how many CPUs for each, None if they do not say so."""
    asked = [one for one in found if one.system == "#SBATCH" and _is_number(one.value)]
    numbers = {_PIECES.get(one.option, one.option): int(one.value or 0) for one in asked}
    return numbers.get("--ntasks", numbers.get("--ntasks-per-node", 1)) or 1, numbers.get("--cpus-per-task")


def _is_number(text: str | None) -> bool:
    return text is not None and re.fullmatch("[0-9]{1,9}", text) is not None


def answer(option: str, value: str | None) -> str | None:
    """Return the equivalent of an *option* of sbatch or gbatch here; None if neither has it."""
    option = _SYNONYMS.get(option, option)
    for system in ("#SBATCH", "# GFLOW"):
        values, flags = SYSTEMS[system]
        if meaning_of(flags, option) is not None:
            value = None
        elif meaning_of(values, option) is None and option not in MAIL[system] + PIECES * (system == "#SBATCH"):
            continue
        elif value is None:
            value = "gpu:1" if option == "--gres" else "1"
        found = convert([Directive(0, system, option, value)])[0]
        if found.words:
            return f"write {shlex.join(found.words)}"
        return str(found.lost) if found.lost is not None else "leave it out"
    return None
