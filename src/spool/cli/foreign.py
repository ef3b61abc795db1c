"""Options of other schedulers, as options of spool: `#SBATCH`, `# GFLOW` and `#PBS` lines, and words typed by habit.

Each converter returns the words that mean the same here, or raises `NoEquivalent` with the reason. A lost option that
changes results (GPUs, an array, a dependency) makes the reader of a script fail; the others give a warning.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from spool.core.layout import valid_name
from spool.core.model import SECOND_NS
from spool.core.names import MAX_NAME_LENGTH
from spool.core.units import format_duration
from spool.store.ownership import this_user


class NoEquivalent(Exception):  # noqa: N818  (not always an error)
    """An option without an equivalent. *matters*: without it the job would compute something else."""

    def __init__(self, why: str, *, matters: bool = False) -> None:
        super().__init__(why)
        self.matters = matters


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
        return self.lost is None or self.directive.option in _PARTS

    @property
    def key(self) -> str | None:
        """The key of the job file without which the job would compute something else, if it has one of these."""
        option = self.directive.option
        return next((key for options, key in _KEYS.items() if option in options.split()), None)

    def __str__(self) -> str:
        one = self.directive
        if self.lost is not None:
            return f"line {one.line}: {one} is ignored: {self.lost}"
        return f"line {one.line}: {one} {f'becomes {shlex.join(self.words)}' if self.words else 'is not needed here'}"


_PARTS = frozenset(("-p", "--partition", "-q", "--qos"))
_KEYS = {
    "-G -g --gpus --gpus-per-node --gpus-per-task --gres": "gpus",
    "-a --array -J": "array",
    "-d --dependency -W --depends-on --depends-on-all --depends-on-any": "depends_on",
}


Converter = Callable[[str], list[str]]


def _same(option: str) -> Converter:
    return lambda value: [option, value]


def _nothing(why: str, *, matters: bool = False) -> Converter:
    def lose(value: str) -> list[str]:
        raise NoEquivalent(why, matters=matters)

    return lose


def _needless(value: str) -> list[str]:
    return []


# Values.


def _name(text: str) -> list[str]:
    """Read a name; what a name cannot have here, as in `my job (2)`, becomes a hyphen."""
    if not valid_name(text):
        text = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("-._")[:MAX_NAME_LENGTH].rstrip("-")
    if not text:
        raise NoEquivalent("a name is made of A-Z a-z 0-9 . _ and -; give --name")
    return ["--name", text]


def _minutes(text: str) -> list[str]:
    """Read the times of sbatch and gbatch: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    if text.upper() in ("UNLIMITED", "INFINITE", "0"):
        return []
    match = re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,6})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?", text)
    if match is None:
        return ["--time-limit", text]  # "2h" works here too; the reader of job files checks it
    days, first, second, third = (int(part) if part is not None else None for part in match.groups())
    assert first is not None
    if days is not None:
        seconds = days * 86400 + first * 3600 + (second or 0) * 60 + (third or 0)
    elif third is not None:
        seconds = first * 3600 + (second or 0) * 60 + third
    else:
        seconds = first * 60 + (second or 0)
    return ["--time-limit", format_duration(seconds * SECOND_NS)]


def _clock_or_seconds(text: str) -> list[str]:
    """Read the times of PBS: S, M:S, H:M:S."""
    if not re.fullmatch(r"[0-9]{1,8}(:[0-9]{1,2}){0,2}", text):
        raise NoEquivalent("not a valid time", matters=False)
    seconds = 0
    for part in text.split(":"):
        seconds = seconds * 60 + int(part)
    return ["--time-limit", format_duration(seconds * SECOND_NS)]


def _megabytes(option: str) -> Converter:
    """Read the sizes of sbatch and gbatch: a number without a unit is in megabytes."""

    def read(text: str) -> list[str]:
        match = re.fullmatch(r"([0-9]+)([KMGT]?)B?", text, re.IGNORECASE)
        if match is None or int(match[1]) == 0:
            raise NoEquivalent("cannot request all of the machine's memory" if match else "not a valid size")
        return [option, f"{match[1]}{(match[2] or 'M').upper()}"]

    return read


def _gpus(text: str) -> list[str]:
    """Read `2`, `a100:2`, `a100`."""
    kind, colon, count = text.partition(":")
    if not colon and kind.isdecimal():
        kind, count = "", kind
    if not (count or "1").isdecimal() or "," in text:
        raise NoEquivalent("cannot request more than one kind of GPU", matters=True)
    return ["--gpus", count or "1"] + (["--gpu-type", kind] if kind else [])


def _gres(text: str) -> list[str]:
    words: list[str] = []
    for part in text.split(","):
        name, _, rest = re.sub(r"\(.*\)$", "", part.removeprefix("gres/").removeprefix("gres:")).partition(":")
        if name == "none":
            continue
        if name == "gpu" and not words:
            words += _gpus(rest or "1")
        elif name == "gpu":
            raise NoEquivalent("cannot request more than one kind of GPU", matters=True)
        else:
            what = f"name {name!r} under [resources] in config.toml and give --resource {name}={rest or 1}"
            raise NoEquivalent(what, matters=name in ("shard", "mps"))
    return words


_KINDS = {"afterok": "", "afterany": "ended:", "afternotok": "failed:", "aftercorr": "each:"}


def dependencies(text: str, *, numbers: bool = False) -> list[str]:
    """Return `afterok:a:b,afterany:c` as the words of `--depends-on`. *numbers*: a job may be named 1234 here."""
    words: list[str] = []
    any_of_them = "?" in text
    for clause in re.split("[,?]", text):
        kind, *names = clause.split(":")
        if clause == "singleton":  # jobs of one name run one at a time
            continue
        if kind not in _KINDS:
            raise NoEquivalent(f"{kind!r} has no equivalent; give --depends-on NAME", matters=True)
        if not names or not all(names):
            raise NoEquivalent(f"{clause!r} names no job", matters=True)
        if not numbers and (of_others := [name for name in names if re.fullmatch(r"[0-9_+]+", name)]):
            raise NoEquivalent(f"{of_others[0]} is a job of the other scheduler; give --depends-on NAME", matters=True)
        if any_of_them and kind != "afterok":
            raise NoEquivalent("`?` (any of several) works with afterok only", matters=True)
        words += ["--depends-on", ("any:" if any_of_them else _KINDS[kind]) + ",".join(names)]
    return words


def output_pattern(text: str) -> str:
    """Return the path *text* of sbatch with the user, the host and the one task filled in. Raises NoEquivalent.

    What differs from job to job stays as it is, for `surroundings.output_path`.
    """
    constant = {"u": this_user(), "N": socket.gethostname().partition(".")[0], "t": "0", "s": "0"}

    def filled(found: re.Match[str]) -> str:
        letter = found[0][-1]
        if letter not in constant and letter not in "%nraxjJA":
            raise NoEquivalent(f"{found[0]} is not supported; %n is the job, %r the run, %a the index")
        return constant.get(letter, found[0])

    return re.sub("%[0-9]*.?", filled, text, flags=re.DOTALL)


def _output(option: str) -> Converter:
    return lambda text: [option, output_pattern(text)]


def _begin(text: str) -> list[str]:
    seconds = re.fullmatch(r"now\+([0-9]+)(?:s|seconds?)?", text.replace(" ", ""))
    if seconds:
        return ["--start-after", f"{seconds[1]}s"]
    return ["--start-after", re.sub(r"^([0-9]{1,2}:[0-9]{2}):[0-9]{2}$", r"\1", text)]


def _signal(text: str) -> list[str]:
    match = re.fullmatch(r"(?:([RB]+):)?([A-Za-z0-9]+)(?:@([0-9]+))?", text)
    name = match[2] if match is not None else ""
    if name.isdecimal():
        name = next((each.name for each in signal.Signals if each == int(name)), "")
    if match is None or not name:
        raise NoEquivalent("write it as --signal USR1@60s")
    to = "shell" if "B" in (match[1] or "") else "main"
    return ["--signal", f"{name}@{match[3] or 60}s", "--signal-to", to]


def _licenses(text: str) -> list[str]:
    pairs = (re.split("[:=]", part) for part in text.split(","))
    return ["--resource", ",".join(f"{pair[0].split('@')[0]}={pair[1] if len(pair) > 1 else 1}" for pair in pairs)]


def _exported(text: str) -> list[str]:
    """Read `ALL,A=1`: assigned variables go into the job file; a name without a value is passed on unchanged."""
    words: list[str] = []
    for part in text.split(","):
        if part not in ("ALL", "NONE", "NIL", ""):
            words += ["--env", part]
    return words


def _one(what: str) -> Converter:
    """Read a number that must be 1 here: of machines, of chunks."""

    def read(text: str) -> list[str]:
        if text.split("-")[0] != "1":
            raise NoEquivalent(f"there is only one {what}, this machine", matters=True)
        return []

    return read


_NO_PARTS = _nothing("a spool has no partitions; use --group and --priority instead")
_NO_MAIL = _nothing("give --notify ADDRESS (docs/NOTIFICATIONS.md)")
_NICE = _nothing("give --priority 0-255: higher is first, 10 is the default")
_PIECES = ("--ntasks", "--cpus-per-task", "--ntasks-per-node", "--ntasks-per-gpu", "--cpus-per-gpu", "--mem-per-cpu",
           "--mem-per-gpu", "--gpus-per-task")  # fmt: skip

_GRES = "--gres --tres-per-task --tres-per-node"
_IS_GPU = re.compile("(?:gres[/:])?gpu(?::|$)")


def _open_mode(text: str) -> list[str]:
    if text.lower() not in ("a", "append"):
        raise NoEquivalent("a run appends to an output that is there")
    return []


def _mail_type(text: str) -> list[str]:
    return [] if text.upper() == "NONE" else _NO_MAIL(text)


# Spellings and the value's converter; a flag has no value. Options in `_PIECES` are combined at the end.
_SBATCH: Mapping[str, Converter] = {
    "-J --job-name": _name,
    "-t --time": _minutes,
    "--mem": _megabytes("--memory"),
    "-G --gpus --gpus-per-node --gpus-per-socket": _gpus,
    _GRES: _gres,
    "-a --array": _same("--array"),
    "-d --dependency": dependencies,
    "-o --output": _output("--stdout"),
    "-e --error": _output("--stderr"),
    "-D --chdir --workdir": _same("--workdir"),
    "-b --begin": _begin,
    "--signal": _signal,
    "-L --licenses": _licenses,
    "-A --account --wckey": _same("--project"),
    "--comment": _same("--comment"),
    "--export": _same("--export"),
    "--kill-on-invalid-dep": lambda text: ["--on-dependency-failure", "wait" if text.lower() == "no" else "cancel"],
    "-N --nodes": _one("node"),
    "--mail-type": _mail_type,
    "--mail-user": _NO_MAIL,
    "-p --partition -q --qos": _NO_PARTS,
    "-C --constraint": _nothing("a spool is one machine; --gpu-type selects a GPU, --workdir a directory"),
    "-w --nodelist -x --exclude -M --clusters": _nothing("a spool is one machine, without nodes to choose from"),
    "--reservation": _nothing("a job uses the reservations of its user or project by itself"),
    "--priority": _nothing("Slurm's priorities use another scale; give --priority 0-255"),
    "-i --input": _nothing("the job's stdin is empty; read the file in the command instead", matters=True),
    "--open-mode": _open_mode,
    "--tmp --mincpus --hint --distribution --cpu-freq --cores-per-socket --threads-per-core --profile "
    "--gpu-bind --cpu-bind --time-min --deadline --ntasks-per-core --ntasks-per-socket --acctg-freq --switches "
    "--cluster-constraint --prefer --gpu-freq --core-spec -S --mail --export-file": _nothing("no equivalent in spool"),
}
_SBATCH_FLAGS: Mapping[str, Converter] = {
    "-H --hold": lambda _: ["--hold"],
    "--requeue": lambda _: ["--requeue"],
    "--no-requeue": lambda _: ["--no-requeue"],
    "--nice": _NICE,  # its value is optional
    "--exclusive": _nothing("specify what the job needs; for the whole machine give --cpus and --memory"),
    "-Q --quiet -v --verbose --parsable -W --wait --get-user-env -O --overcommit -s --oversubscribe --spread-job "
    "--contiguous --ignore-pbs --test-only": _needless,
}
_GFLOW: Mapping[str, Converter] = {
    "-n --name -J --job-name": _name,
    "-t --time --time-limit --timelimit": _minutes,
    "-m --memory --max-mem --max-memory": _megabytes("--memory"),
    "--gpu-memory --max-gpu-mem --max-gpu-memory": _megabytes("--gpu-memory"),
    "-g --gpus --gres": _gpus,
    "-p --priority --nice": _same("--priority"),
    "-P --project": _same("--project"),
    "--begin": _begin,
    "--array": _same("--array"),
    "-d --depends-on --dependency --depends-on-all --depends-on-any": _nothing(
        "jobs have names here, not numbers; give --depends-on NAME", matters=True
    ),
    "-c --conda-env": _nothing("activate it in the script, or submit from within it", matters=True),
    "--param --param-file": _nothing("give --matrix NAME=VALUE,… or --param-file", matters=True),
    "--max-concurrent": _same("--max-running"),
    "--max-retries": _same("--retry-max"),
    "--name-template": _nothing("tasks are named NAME_0, NAME_1 and so on"),
    "--notify-email --notify-on": _NO_MAIL,
}
_GFLOW_FLAGS: Mapping[str, Converter] = {
    "--shared": _needless,  # implied by --gpu-memory
    "--auto-close": _needless,
    "--no-auto-cancel": lambda _: ["--on-dependency-failure", "wait"],
}


def _pbs_memory(text: str) -> list[str]:
    match = re.fullmatch("([0-9]+)([kmgt]?)b?", text, re.IGNORECASE)
    if match is None:
        raise NoEquivalent("not a valid size")
    return ["--memory", match[1] + (match[2].upper() or "B")]


_PBS_RESOURCES: Mapping[str, Converter] = {
    "nodes select": _one("node"),
    "ppn ncpus nprocs": _same("--cpus"),
    "gpus ngpus": _same("--gpus"),
    "mem pmem vmem": _pbs_memory,
    "walltime": _clock_or_seconds,
    "place mpiprocs ompthreads": _needless,
}


_IS_PBS_RESOURCE = re.compile(f"(?:{'|'.join(' '.join(_PBS_RESOURCES).split())})=")


def _pbs_parts(text: str) -> Iterator[str]:
    """Yield the parts of `nodes=1:ppn=4:bigmem,walltime=1:00:00` and of `select=1:ncpus=4:ngpus=1:mem=8gb`."""
    for part in re.split("[,:](?=[a-z_]+=)", re.sub("select=(?=[a-z_]+=)", "", text)):
        key, _, value = part.partition("=")
        if key in ("walltime", "place") or ":" not in value:
            yield part
        else:
            number, *properties = value.split(":")
            yield f"{key}={number}"
            yield from properties


def _pbs_resources(text: str) -> list[str]:
    if "+" in text:  # nodes=1:ppn=2+1:ppn=4
        raise NoEquivalent("there is only one node, this machine", matters=True)
    words: list[str] = []
    for part in _pbs_parts(text):
        key, _, value = part.partition("=")
        converter = _found(_PBS_RESOURCES, key)
        if converter is None:
            raise NoEquivalent(f"{key!r} has no equivalent", matters="gpu" in key)
        words += converter(value)
    return words


def _pbs_output(option: str) -> Converter:
    """Read `HOST:PATH`; in a directory, the file gets the names of the job and the run."""

    def read(text: str) -> list[str]:
        path = text.rpartition(":")[2].replace("%", "%%").replace("^array_index^", "%a")
        if path.endswith("/") or os.path.isdir(path):
            path = os.path.join(path, f"%n.%r.{'err' if option == '--stderr' else 'out'}")
        return [option, path]

    return read


def _pbs_more(text: str) -> list[str]:
    if not text.startswith("depend="):
        raise NoEquivalent("no equivalent in spool")
    return dependencies(text.removeprefix("depend="))


_PBS: Mapping[str, Converter] = {
    "-l": _pbs_resources,
    "-N": _name,
    "-J -t": _same("--array"),
    "-o": _pbs_output("--stdout"),
    "-e": _pbs_output("--stderr"),
    "-d -w": _same("--workdir"),
    "-W": _pbs_more,
    "-v": _exported,
    "-A -P": _same("--project"),
    "-q": _NO_PARTS,
    "-m -M": _NO_MAIL,
    "-p": _nothing("PBS priorities use another scale; give --priority 0-255"),
    "-a": _nothing("give --start-after 2026-01-31T09:00"),
    "-S": _nothing("the script's first line selects its interpreter"),
    "-j": lambda text: [] if text in ("oe", "eo") else ["--stderr", "%n.%r.err"],
    "-r": lambda text: ["--requeue" if text == "y" else "--no-requeue"],
    "-c -C -k -u": _nothing("no equivalent in spool"),
}
_PBS_FLAGS: Mapping[str, Converter] = {"-h": lambda _: ["--hold"], "-V -I -z -X -x -f": _needless}

_SYSTEMS: Mapping[str, tuple[Mapping[str, Converter], Mapping[str, Converter]]] = {
    "#SBATCH": (_SBATCH, _SBATCH_FLAGS),
    "# GFLOW": (_GFLOW, _GFLOW_FLAGS),
    "#PBS": (_PBS, _PBS_FLAGS),
}
_SYNONYMS = {"--tasks": "--ntasks", "--tasks-per-node": "--ntasks-per-node"}
_LINE = re.compile(r"(#SBATCH|# GFLOW|#PBS)(?:[ \t]+(.*))?")


def _found(table: Mapping[str, Converter], option: str) -> Converter | None:
    return next((converter for names, converter in table.items() if option in names.split()), None)


def _in_full(option: str) -> str:
    """Return a long option of sbatch, which takes any beginning that no other option has."""
    tables = (*_SBATCH, *_SBATCH_FLAGS)
    known = {name for names in tables for name in names.split()}.union(_PIECES, _SYNONYMS)
    meant = [option] if option in known else [name for name in known if name.startswith(option)]
    return _SYNONYMS.get(meant[0], meant[0]) if len(meant) == 1 else option


_OF_OTHERS = (
    ("Grid Engine", re.compile(r"#\$[ \t]*(-[a-zA-Z].*)")),
    ("LSF", re.compile(r"#BSUB[ \t]+(-.*)")),
    ("Moab", re.compile(r"#MSUB[ \t]+(-.*)")),
)


def unread_system(line: str) -> str | None:
    """Return the scheduler that *line* of a script is for, if its lines are not read here."""
    return next((system for system, pattern in _OF_OTHERS if pattern.fullmatch(line)), None)


def is_line(line: str) -> bool:
    """Whether *line* of a script is for another scheduler."""
    return _LINE.fullmatch(line) is not None


def directives(number: int, line: str) -> Iterator[Directive]:
    """Yield the options of one line. Raises ValueError for quotes that do not end."""
    match = _LINE.fullmatch(line)
    if match is None:
        return
    system = match[1]
    flags = _SYSTEMS[system][1]
    words = shlex.split(match[2] or "", comments=True)
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "-":
            yield Directive(number, system, word, None)
            continue
        option, equals, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        if not equals and _found(flags, option) is None and words and not words[0].startswith("-"):
            equals, value = "=", words.pop(0)
        if system == "#SBATCH" and option.startswith("--"):
            option = _in_full(option)
        yield Directive(number, system, option, value if equals else None)


def convert(found: Sequence[Directive], *, limited: bool = True) -> list[Converted]:
    """Return the result for each of *found*, in order, line by line. *limited*: others state a time limit."""
    found = [part for one in found for part in _parted(one)]
    done: list[Converted] = []
    pieces: dict[str, Directive] = {}
    for one in found:
        name = {"-n": "--ntasks", "-c": "--cpus-per-task"}.get(one.option, one.option)
        if one.system == "#SBATCH" and name in _PIECES and one.value is not None:
            pieces[name] = one
        else:
            done.append(_converted(one))
    if not limited and not any("--time-limit" in one.words for one in done):
        why = NoEquivalent("it warns before a time limit, and there is none; give --time-limit")
        done = [replace(one, words=(), lost=why) if "--signal" in one.words else one for one in done]
    return sorted([*done, *_put_together(pieces, found)], key=lambda one: one.directive.line)


def _parted(one: Directive) -> Iterator[Directive]:
    """Yield one directive for all resources that have an equivalent, and one for each other: it alone is lost."""
    if one.system == "#SBATCH" and one.option in _GRES.split():
        parts, is_known = (one.value or "").split(","), _IS_GPU.match
    elif one.system == "#PBS" and one.option == "-l":
        parts, is_known = list(_pbs_parts(one.value or "")), _IS_PBS_RESOURCE.match
    else:
        yield one
        return
    known = [part for part in parts if is_known(part)]
    if len(known) in (0, len(parts)):
        yield one
        return
    yield replace(one, value=",".join(known))
    for part in parts:
        if not is_known(part):
            yield replace(one, value=part)


def _converted(one: Directive) -> Converted:
    values, flags = _SYSTEMS[one.system]
    converter = _found(flags, one.option) or _found(values, one.option)
    if converter is None:
        return Converted(one, lost=NoEquivalent("unknown option"))
    if one.value is None and _found(flags, one.option) is None:
        return Converted(one, lost=NoEquivalent("it needs a value", matters=True))
    try:
        return Converted(one, tuple(converter(one.value or "")))
    except NoEquivalent as error:
        return Converted(one, lost=error)


def _put_together(pieces: Mapping[str, Directive], found: Sequence[Directive]) -> Iterator[Converted]:
    """Yield CPUs, memory and GPUs that are stated per task or per CPU; all tasks run here, so this is their sum."""
    numbers: dict[str, int] = {}
    for name, one in pieces.items():
        if "mem" not in name and name != "--gpus-per-task" and not (one.value or "").isdecimal():
            yield Converted(one, lost=NoEquivalent("not a number", matters=True))
            return
        if one.value is not None and one.value.isdecimal():
            numbers[name] = int(one.value)
    gpus = next((int(count) for count in _gpus_of(found) if count.isdecimal()), 1)
    tasks = numbers.get("--ntasks", numbers.get("--ntasks-per-node", numbers.get("--ntasks-per-gpu", 0) * gpus)) or 1
    if "--gpus-per-task" in pieces:
        per_task = _times(pieces["--gpus-per-task"], tasks, _gpus)
        gpus = int(per_task.words[1]) if per_task.words else gpus
        yield per_task
    cpus = tasks * numbers.get("--cpus-per-task", 1)
    if "--cpus-per-task" not in pieces:
        cpus = gpus * numbers["--cpus-per-gpu"] if "--cpus-per-gpu" in numbers else cpus
    for name in ("--ntasks", "--ntasks-per-node", "--ntasks-per-gpu", "--cpus-per-task", "--cpus-per-gpu"):
        if name in pieces:
            yield Converted(pieces[name], ("--cpus", str(cpus)))
    for name, count in (("--mem-per-cpu", cpus), ("--mem-per-gpu", gpus)):
        if name in pieces:
            yield _times(pieces[name], count, _megabytes("--memory"))


def tasks_of(found: Sequence[Directive]) -> tuple[int, int | None]:
    """Return how many tasks the `#SBATCH` lines ask for, and how many CPUs for each, None if they do not say so."""
    numbers = {one.option: int(one.value or 0) for one in found if one.system == "#SBATCH" and _is_number(one.value)}
    tasks = numbers.get("--ntasks", numbers.get("-n", numbers.get("--ntasks-per-node", 1)))
    return tasks or 1, numbers.get("--cpus-per-task", numbers.get("-c"))


def _is_number(text: str | None) -> bool:
    return text is not None and re.fullmatch("[0-9]{1,9}", text) is not None


def _gpus_of(found: Sequence[Directive]) -> Iterator[str]:
    """Yield the numbers of GPUs that *found* request."""
    for one in found:
        if one.value is not None and one.option not in _PIECES:
            words = _converted(one).words
            if "--gpus" in words:
                yield words[words.index("--gpus") + 1]


def _times(one: Directive, count: int, read: Converter) -> Converted:
    """Return a size or a number of GPUs *count* times."""
    try:
        option, amount, *more = read(one.value or "")
    except NoEquivalent as error:
        return Converted(one, lost=error)
    match = re.fullmatch("([0-9]+)(.*)", amount)
    if match is None:
        return Converted(one, lost=NoEquivalent("not a number", matters=True))
    return Converted(one, (option, f"{int(match[1]) * count}{match[2]}", *more))


def answer(option: str, value: str | None) -> str | None:
    """Return the equivalent of an *option* of sbatch or gbatch here; None if neither has it."""
    option = _SYNONYMS.get(option, option)
    for system in ("#SBATCH", "# GFLOW"):
        values, flags = _SYSTEMS[system]
        if _found(flags, option) is not None:
            value = None
        elif _found(values, option) is None and (system == "# GFLOW" or option not in _PIECES):
            continue
        elif value is None:
            value = "gpu:1" if option == "--gres" else "1"
        found = convert([Directive(0, system, option, value)])[0]
        if found.words:
            return f"write {shlex.join(found.words)}"
        return str(found.lost) if found.lost is not None else "leave it out"
    return None
