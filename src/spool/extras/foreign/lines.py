"""The lines of a script for another scheduler: what each option means here, and what those of a script become together.

The tables say what each option means: an option of spool that takes the same value, a reader of the value that returns
the words that mean the same here, or the reason why there are none. A lost option that changes results (GPUs, an array,
a dependency) makes the reader of a script fail; the others give a warning.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from spool.core.errors import InvalidValue
from spool.core.layout import MAX_NAME_LENGTH, valid_name
from spool.core.model import SECOND_NS
from spool.core.units import format_duration, format_size, parse_size
from spool.store.ownership import this_user


class NoEquivalent(Exception):  # noqa: N818  (not always an error)
    """An option without an equivalent. *matters*: without it the job would compute something else.

    *unless*: it does not matter if the job gets this option of spool from another line.
    """

    def __init__(self, why: str = "no equivalent in spool", *, matters: bool = False, unless: str = "") -> None:
        super().__init__(why)
        self.matters = matters
        self.unless = unless


Meaning = str | NoEquivalent | Callable[[str], list[str]]
"""An option of spool, for an option with a value; words, for a flag; a reader of the value; or why there are none."""
Table = Mapping[str, Meaning]
"""What each option means; spellings of one option share a row."""

NEEDLESS = ""
_NOT_HERE = NoEquivalent()


def meaning_of(table: Table, option: str) -> Meaning | None:
    """Return what *option* means, None if it is not in the *table*."""
    return next((meaning for names, meaning in table.items() if option in names.split()), None)


def words_of(meaning: Meaning, value: str | None) -> list[str]:
    """Return the words for an option with that *value*, None for a flag. Raises NoEquivalent."""
    if isinstance(meaning, NoEquivalent):
        raise meaning
    if isinstance(meaning, str):
        if value is None or meaning == NEEDLESS:
            return meaning.split()
        return f"{meaning}{value}".split(" ", 1) if meaning.endswith("=") else [meaning, value]
    return meaning(value or "")


def _name(text: str) -> list[str]:
    """Read a name; what a name cannot have here, as in `my job (2)`, becomes a hyphen."""
    if not valid_name(text):
        text = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("-._")[:MAX_NAME_LENGTH].rstrip("-")
    if not text:
        raise NoEquivalent("a name is made of A-Z a-z 0-9 . _ and -; give --name")
    return ["--name", text]


def _time(text: str, *, alone: int = 60) -> list[str]:
    """Read M:S, H:M:S, D-H, D-H:M, D-H:M:S, or a number without a colon, each worth *alone* seconds."""
    if text.upper() in ("UNLIMITED", "INFINITE", "INFINITY", "0"):
        return []
    match = re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,8}(?::[0-9]{1,2}){0,2})", text)
    if match is None:
        return ["--time-limit", text]  # "2h" works here too; the reader of job files checks it
    parts = [int(part) for part in match[2].split(":")]
    units = (3600, 60, 1) if match[1] or len(parts) == 3 else (60, 1) if len(parts) == 2 else (alone,)
    seconds = int(match[1] or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
    return ["--time-limit", format_duration(seconds * SECOND_NS)]


def _seconds(text: str) -> list[str]:
    if text.count(":") == 3:  # D:H:M:S, as Torque takes it
        text = text.replace(":", "-", 1)
    return _time(text, alone=1)


def _size(option: str, unit: str = "M") -> Callable[[str], list[str]]:
    """Return a reader of sizes; *unit* is that of a number without one."""

    def read(text: str) -> list[str]:
        match = re.fullmatch(r"([0-9]{1,12}(?:[.][0-9]{1,9})?)([KMGT]?)B?", text, re.ASCII | re.IGNORECASE)
        if match is None:
            raise NoEquivalent("not a valid size")
        if not float(match[1]):
            raise NoEquivalent("cannot request all of the machine's memory")
        size = match[1] + (match[2] or unit).upper()
        try:
            parse_size(size)
        except InvalidValue as error:
            raise NoEquivalent(str(error)) from None
        return [option, size]

    return read


def gpus_asked(text: str) -> list[str]:
    """Read `2`, `a100:2`, `a100`."""
    kind, colon, count = text.partition(":")
    if not colon and kind.isdecimal():
        kind, count = "", kind
    if not (count or "1").isdecimal() or "," in text:
        raise NoEquivalent("cannot request more than one kind of GPU", matters=True)
    return ["--gpus", count or "1"] + (["--gpu-type", kind] if kind else [])


GPU = re.compile("gpu|cuda|nvidia|tesla|geforce|quadro|titan|volta|ampere|hopper|rocm", re.IGNORECASE)
_GPU_MODEL = re.compile(
    r"(?<![a-z0-9])(?:[rg]tx[_-]?)?(a(?:2|10g?|16|30|40|100|800|[2-6]000)|b[1-3]00|h(?:20|[128]00)|k[248]0|l(?:4|20|40s?)"
    r"|m[46]0|p(?:4|40|100)|t4|v100s?|gh200|gb[23]00|mi[0-9]{2,3}[axs]?|(?:[79]80|[1-5]0[5-9]0)(?:ti)?|[68]000)"
    r"(?![a-z0-9])",
    re.IGNORECASE,
)


def _of_a_gpu(name: str, count: str, instead: NoEquivalent = _NOT_HERE) -> list[str]:
    """Read `a100:1`, `coproc_v100=1` and `v100`: what clusters call GPUs in their own ways.

    *instead* is why any other resource has no equivalent.
    """
    model = _GPU_MODEL.search(name)
    if model is not None and (not count or count.isdecimal()):
        return [*(["--gpus", count] if count else []), "--gpu-type", model[1]]
    if model is not None or GPU.search(f"{name} {count}"):
        raise NoEquivalent(f"{name!r} seems to be a GPU; give --gpus 1", matters=True, unless="--gpus")
    raise instead


def _gres(text: str) -> list[str]:
    name, _, rest = re.sub(r"\(.*\)$", "", re.sub("^gres[/:]", "", text)).partition(":")
    if name == "none":
        return []
    if name == "gpu" or "," in text:
        return gpus_asked(rest or "1")
    if name in ("shard", "mps"):
        raise NoEquivalent("give --gpus 1 --gpu-memory 8G", matters=True)
    what = f"name {name!r} under [resources] in config.toml and give --set resources.{name}={rest or 1}"
    return _of_a_gpu(name, rest or "1", NoEquivalent(what))


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


def _held_by(text: str) -> list[str]:
    names = text.split(",")
    if odd := [name for name in names if name.isdecimal() or not valid_name(name)]:
        raise NoEquivalent(f"{odd[0]} is not the name of a job here; give --depends-on ended:NAME", matters=True)
    return ["--depends-on", "ended:" + ",".join(names)]


def _path(option: str, variables: Mapping[str, str] | None = None) -> Callable[[str], list[str]]:
    """Return a reader of a path of sbatch, or if there are *variables*, of `HOST:PATH` with these in it.

    The user, the host and the one task are filled in; what differs from job to job is left for
    `scripts.output_path`. In a directory of PBS, the file gets the names of the job and the run.
    """
    constant = {"u": this_user(), "N": socket.gethostname().partition(".")[0], "t": "0", "s": "0"}

    def filled(found: re.Match[str]) -> str:
        letter = found[0][-1]
        if letter not in constant and letter not in "%nraxjJA":
            raise NoEquivalent(f"{found[0]} is not supported; %n is the job, %r the run, %a the index")
        return constant.get(letter, found[0])

    def read(text: str) -> list[str]:
        if variables is not None:
            text = text.rpartition(":")[2].replace("%", "%%")
            for variable, ours in variables.items():
                text = re.sub(variable, ours, text)
            if text.endswith("/") or os.path.isdir(text):
                text = os.path.join(text, f"%n.%r.{'err' if option == '--stderr' else 'out'}")
        return [option, re.sub("%[0-9]*.?", filled, text, flags=re.DOTALL)]

    return read


def _begin(text: str) -> list[str]:
    away = re.fullmatch(r"now(?:\+([0-9]+)(?:([smhdw])[a-z]*)?)?", text.replace(" ", "").lower())
    if away:
        return ["--start-after", f"{away[1]}{away[2] or 's'}"] if away[1] else []
    clock = {"midnight": "0:00", "noon": "12:00"}.get(text.lower(), text)
    return ["--start-after", re.sub(r"^([0-9]{1,2}:[0-9]{2}):[0-9]{2}$", r"\1", clock)]


def _signal(text: str) -> list[str]:
    match = re.fullmatch(r"(?:([RB]+):)?([A-Za-z0-9]+)(?:@([0-9]+))?", text)
    name = match[2] if match is not None else ""
    if name.isdecimal():
        name = next((each.name for each in signal.Signals if each == int(name)), "")
    if match is None or not name:
        raise NoEquivalent("write it as --signal USR1@60s")
    to = "shell" if "B" in (match[1] or "") else "main"
    return ["--signal", f"{name}@{match[3] or 60}s", "--set", f"signal_to={to}"]


def _licenses(text: str) -> list[str]:
    pairs = (re.split("[:=]", part) for part in text.split(","))
    amounts = [f"{pair[0].split('@')[0]}={pair[1] if len(pair) > 1 else 1}" for pair in pairs]
    return [word for amount in amounts for word in ("--set", f"resources.{amount}")]


def _exported(text: str) -> list[str]:
    parts = (part for part in text.split(",") if part not in ("ALL", "NONE", "NIL", ""))
    return [word for part in parts for word in ("--env", part)]


def _of_form(pattern: str, option: str, lost: NoEquivalent) -> Callable[[str], list[str]]:
    """Return a reader of what *pattern* fits, whose group is the value of *option*, 1 if it is empty."""

    def read(text: str) -> list[str]:
        if (match := re.fullmatch(pattern, text)) is None:
            raise lost
        return [option, match[1] or "1"] if option else []

    return read


def _yes(yes: str, no: str) -> Callable[[str], list[str]]:
    """Return a reader of `y` and `n`, which returns the words for each."""
    return lambda text: (yes if text.startswith(("y", "Y", "oe", "eo")) else no).split()


PER_CPU, PER_GPU = "--memory-per-cpu", "--memory-per-gpu"  # until the CPUs and GPUs are known
PIECES = ("--ntasks", "--cpus-per-task", "--ntasks-per-node", "--ntasks-per-gpu", "--cpus-per-gpu", "--gpus-per-task")
"""Options of sbatch that are read together."""
GRES = "--gres --tres-per-task --tres-per-node"

_NO_PARTS = NoEquivalent("a spool has no partitions; use --set group=NAME and --priority instead")
_OTHER_NODES = NoEquivalent("there is only one node, this machine", matters=True)
_ONE_NODE = _of_form("1(?:-.*)?", "", _OTHER_NODES)
_NO_NODES = NoEquivalent("a spool is one machine, without nodes to choose from")
_NO_STDIN = NoEquivalent("the job's stdin is empty; read the file in the command instead", matters=True)
_GPU_COUNT = _of_form(  # a resource that is there or not is `true` or empty
    "(?i:true)?([0-9]*)", "--gpus", NoEquivalent("not a number; give --gpus 1", matters=True, unless="--gpus")
)
_GPU_TYPE = _of_form(
    "([A-Za-z0-9][A-Za-z0-9 _.-]*)", "--gpu-type", NoEquivalent("not a type of GPU; give --gpu-type A100")
)
_SLOTS = _of_form(  # `smp 4-8`: the least of them, so that it starts soonest
    r"\S* (?=.)([0-9]*)(?:-[0-9]*)?", "--cpus", NoEquivalent("not a number of slots; give --cpus", matters=True)
)
_OTHER_SCALE = "priorities use another scale; give --priority 0-255"
_NICE = NoEquivalent("give --priority 0-255: higher is first, 10 is the default")

_SBATCH: Table = {
    "-J --job-name": _name,
    "-t --time": _time,
    "--mem": _size("--memory"),
    "--mem-per-cpu": _size(PER_CPU),
    "--mem-per-gpu": _size(PER_GPU),
    "-G --gpus --gpus-per-node --gpus-per-socket": gpus_asked,
    GRES: _gres,
    "-a --array": "--array",
    "-d --dependency": dependencies,
    "-o --output": _path("--stdout"),
    "-e --error": _path("--stderr"),
    "-D --chdir --workdir": "--workdir",
    "-b --begin": _begin,
    "--signal": _signal,
    "-L --licenses": _licenses,
    "-A --account --wckey": "--project",
    "--comment": "--comment",
    "--export": "--export",
    "--kill-on-invalid-dep": _yes("--set on_dependency_failure=cancel", "--set on_dependency_failure=wait"),
    "-N --nodes": _ONE_NODE,
    "-p --partition -q --qos": _NO_PARTS,
    "-C --constraint": NoEquivalent("a spool is one machine; --gpu-type selects a GPU, --workdir a directory"),
    "-w --nodelist -x --exclude -M --clusters -B --extra-node-info -F --nodefile": _NO_NODES,
    "--reservation": NoEquivalent("a job uses the reservations of its user or project by itself"),
    "--priority": NoEquivalent(f"Slurm's {_OTHER_SCALE}"),
    "-i --input": _NO_STDIN,
    "--container --container-image": NoEquivalent("give --container IMAGE", matters=True),
    "--open-mode": _of_form("(?i:a|append)", "", NoEquivalent("a run appends to an output that is there")),
    "--tmp --mincpus --hint --distribution --cpu-freq --cores-per-socket --threads-per-core --profile "
    "--gpu-bind --cpu-bind --time-min --deadline --ntasks-per-core --ntasks-per-socket --acctg-freq --switches "
    "--cluster-constraint --prefer --gpu-freq --core-spec -S --mail --export-file": _NOT_HERE,
}
_SBATCH_FLAGS: Table = {
    "-H --hold": "--hold",
    "--requeue": "--requeue",
    "--no-requeue": "--no-requeue",
    "--nice": _NICE,  # its value is optional
    "--exclusive": NoEquivalent("specify what the job needs; for the whole machine give --cpus and --memory"),
    "-Q --quiet -v --verbose --parsable -W --wait --get-user-env -O --overcommit -s --oversubscribe --spread-job "
    "--contiguous --ignore-pbs --test-only -k --no-kill -l --label -u --unbuffered -I --immediate": NEEDLESS,
    "--pty": NoEquivalent("write `spool run --here`, whose command has this terminal"),
}
_GFLOW: Table = {
    "-n --name -J --job-name": _name,
    "-t --time --time-limit --timelimit": _time,
    "-m --memory --max-mem --max-memory": _size("--memory"),
    "--gpu-memory --max-gpu-mem --max-gpu-memory": _size("--gpu-memory"),
    "-g --gpus --gres": gpus_asked,
    "-p --priority --nice": "--priority",
    "-P --project": "--project",
    "--begin": _begin,
    "--array": "--array",
    "-d --depends-on --dependency --depends-on-all --depends-on-any": NoEquivalent(
        "jobs have names here, not numbers; give --depends-on NAME", matters=True
    ),
    "-c --conda-env": NoEquivalent("activate it in the script, or submit from within it", matters=True),
    "--param --param-file": NoEquivalent("give --matrix NAME=VALUE,… or --param-file", matters=True),
    "--max-concurrent": "--set max_running=",
    "--max-retries": "--retry-max",
    "--name-template": NoEquivalent("tasks are named NAME_0, NAME_1 and so on"),
}
_GFLOW_FLAGS: Table = {
    "--shared --auto-close": NEEDLESS,  # the first is implied by --gpu-memory
    "--no-auto-cancel": "--set on_dependency_failure=wait",
}
_OF_QSUB: Table = {
    "-N": _name,
    "-v": _exported,
    "-A -P": "--project",
    "-a": NoEquivalent("give --start-after 2026-01-31T09:00"),
    "-S": NEEDLESS,  # `interpreter`
    "-j": _yes("", "--stderr %n.%r.err"),
    "-r": _yes("--requeue", "--no-requeue"),
}
"""What PBS and Grid Engine, whose command has one name, have in common."""
_PBS_RESOURCES: Table = {
    "nodes select": _ONE_NODE,
    "ppn ncpus nprocs": "--cpus",
    "gpus ngpus": "--gpus",
    "gpu_type gputype gpu_model": _GPU_TYPE,
    "mem vmem": _size("--memory", "B"),
    "pmem pvmem": _size(PER_CPU, "B"),
    "walltime": _seconds,
    "place mpiprocs ompthreads": NEEDLESS,
}
_SGE_RESOURCES: Table = {
    "h_rt": _seconds,
    "s_rt": NoEquivalent("give --time-limit 2h --signal USR1@60s"),
    "gpu gpus ngpu ngpus num_gpus gpu_card nvidia_gpu cuda": _GPU_COUNT,
    "gpu_type gputype gpu_model gpu_name": _GPU_TYPE,
    "gpu_mem gpu_memory gpu_ram gpumem": _size("--gpu-min-memory", "B"),
    "mem_free mf mem_total virtual_free vf": _size("--memory", "B"),
    "h_vmem s_vmem h_rss tmem rmem mem h_data m_mem_free mem_per_core": _size(PER_CPU, "B"),
    "h hostname": _NO_NODES,
}


def _resource(table: Table, alone: str) -> Callable[[str], list[str]]:
    """Return a reader of `NAME=VALUE`; *alone* is the number of a GPU whose name has no value."""

    def read(text: str) -> list[str]:
        if "+" in text:  # nodes=1:ppn=2+1:ppn=4
            raise _OTHER_NODES
        key, _, value = text.partition("=")
        if (meaning := meaning_of(table, key)) is not None:
            return words_of(meaning, value)
        return _of_a_gpu(key, alone if value.lower() in ("", "true") else value)

    return read


def parts_of(system: str, option: str, text: str | None) -> Iterator[str | None]:
    """Yield each resource in the value of an option, so that one that is lost takes no other with it."""
    if text is None:
        yield None
    elif (system, option) == ("#PBS", "-l") and "+" not in text:
        # nodes=1:ppn=4:bigmem,walltime=1:00:00 and select=1:ncpus=4:ngpus=1:mem=8gb
        for part in re.split("[,:](?=[a-z_]+=)", re.sub("select=(?=[a-z_]+=)", "", text)):
            key, _, value = part.partition("=")
            number, *properties = [value] if key in ("walltime", "place") else value.split(":")
            yield f"{key}={number}" if "=" in part else part
            yield from properties
    elif (system, option) == ("#$", "-l") or (system == "#SBATCH" and option in GRES.split()):
        parts = text.split(",")
        gpus = [part for part in parts if GPU.search(part) or _GPU_MODEL.search(part)]
        several = system == "#SBATCH" and len(gpus) > 1  # are lost together
        yield from [",".join(gpus), *(part for part in parts if part not in gpus)] if several else parts
    else:
        yield text


_OUTPUTS_OF_PBS = {r"\^array_index\^": "%a"}
_OUTPUTS_OF_SGE = {
    rf"\$(?:{name}|{{{name}}})": ours
    for name, ours in (("JOB_NAME", "%x"), ("JOB_ID", "%A"), ("TASK_ID", "%a"), ("USER", "%u"), ("HOSTNAME", "%N"))
}
_PBS: Table = {
    **_OF_QSUB,
    "-l": _resource(_PBS_RESOURCES, ""),
    "-J -t": "--array",
    "-o": _path("--stdout", _OUTPUTS_OF_PBS),
    "-e": _path("--stderr", _OUTPUTS_OF_PBS),
    "-d -w": "--workdir",
    "-W": lambda text: words_of(dependencies if text.startswith("depend=") else _NOT_HERE, text.partition("=")[2]),
    "-q": _NO_PARTS,
    "-p": NoEquivalent(f"PBS {_OTHER_SCALE}"),
    "-c -C -k -u": _NOT_HERE,
}
_PBS_FLAGS: Table = {"-h": "--hold", "-V": "--export ALL", "-I -z -X -x -f": NEEDLESS}
_SGE: Table = {
    **_OF_QSUB,
    "-l": _resource(_SGE_RESOURCES, "1"),
    "-pe": _SLOTS,
    "-t": "--array",
    "-tc": "--set max_running=",
    "-o": _path("--stdout", _OUTPUTS_OF_SGE),
    "-e": _path("--stderr", _OUTPUTS_OF_SGE),
    "-wd": "--workdir",
    "-hold_jid": _held_by,
    "-hold_jid_ad": NoEquivalent("give --depends-on each:NAME", matters=True),
    "-q -masterq": _NO_PARTS,
    "-p": NoEquivalent(f"Grid Engine's {_OTHER_SCALE}"),
    "-i": _NO_STDIN,
    "-C -@": NoEquivalent("other lines and files with options are not read", matters=True),
    "-b -R -now -sync -shell -w -js -ot -pty": NEEDLESS,
    "-ac -ar -binding -c -ckpt -dc -display -dl -jc -jsv -mods -adds -sc -u -umask": _NOT_HERE,
}
_SGE_FLAGS: Table = {
    "-V": "--export ALL",
    "-h": "--hold",
    "-soft": NoEquivalent("what is only wished for is required here"),
    "-notify": NoEquivalent("give --signal USR2@60s"),
    "-cwd -hard -terse -verify -nostdin -noshell -clear -inherit": NEEDLESS,
}

SYSTEMS: Mapping[str, tuple[Table, Table]] = {
    "#SBATCH": (_SBATCH, _SBATCH_FLAGS),
    "# GFLOW": (_GFLOW, _GFLOW_FLAGS),
    "#PBS": (_PBS, _PBS_FLAGS),
    "#$": (_SGE, _SGE_FLAGS),
}

_MAIL = {"#SBATCH": ("--mail-user", "--mail-type"), "# GFLOW": ("--notify-email", "--notify-on")}
_MAIL |= dict.fromkeys(("#PBS", "#$"), ("-M", "-m"))


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
        return self.lost is None or (
            self.directive.option in ("-p", "--partition", "-q", "--qos") and not self.lost.unless
        )

    @property
    def key(self) -> str | None:
        """The key of the job file without which the job would compute something else, if it has one of these."""
        option = self.directive.option
        if option in _MAIL[self.directive.system]:
            return "notify.to"
        if self.lost is not None and self.lost.unless:
            return self.lost.unless.removeprefix("--")
        return next((key for options, key in _KEYS.items() if option in options.split()), None)

    def __str__(self) -> str:
        one = self.directive
        if self.lost is not None:
            return f"line {one.line}: {one} is ignored: {self.lost}"
        return f"line {one.line}: {one} {f'becomes {shlex.join(self.words)}' if self.words else 'is not needed here'}"


_KEYS = {
    "-G -g --gpus --gpus-per-node --gpus-per-task --gres": "gpus",
    "-a --array -J -t": "array",
    "-d --dependency -W --depends-on --depends-on-all --depends-on-any -hold_jid -hold_jid_ad": "depends_on",
}

_PIECES = {"-n": "--ntasks", "-c": "--cpus-per-task"}
_SYNONYMS = {"--tasks": "--ntasks", "--tasks-per-node": "--ntasks-per-node"}
_OF_SBATCH = (*PIECES, *" ".join((*_SBATCH, *_SBATCH_FLAGS)).split())
_LINE = re.compile(r"((?:#SBATCH|# GFLOW|#PBS)(?![^ \t])|#\$(?=[ \t]*-[a-zA-Z@]))[ \t]*(.*)")
_UNREAD = re.compile(r"#(?:BSUB|MSUB|COBALT|OAR|HQ|PJM)\s+-.*|#\s*(?:FLUX|flux):\s*-.*|#\s*@\s*queue\s*")


def is_unread(line: str) -> bool:
    """Whether *line* of a script is for a scheduler whose lines are not read here."""
    return _UNREAD.fullmatch(line) is not None


def is_line(line: str, *, late: bool = False) -> bool:
    """Whether *line* of a script is for another scheduler that reads it, also *late*: after the first command."""
    found = _LINE.fullmatch(line)
    return found is not None and (not late or found[1] in ("# GFLOW", "#$"))


def is_line_of_a_shell(line: str) -> bool:
    """Whether *line* is for a scheduler that gives a script without a `#!` line to a shell."""
    found = _LINE.fullmatch(line)
    return found[1] in ("#PBS", "#$") if found is not None else is_unread(line)


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
            fitting = [each for each in _OF_SBATCH if each.startswith(option)]  # a beginning is enough for sbatch
            option = fitting[0] if len(fitting) == 1 else _SYNONYMS.get(option, option)
        yield Directive(number, system, option, value if equals else None)


def convert(found: Sequence[Directive], *, limited: bool = True) -> list[Converted]:
    """Return the result for each of *found*, in order, line by line; of those about mails, for the first.

    *limited*: others state a time limit.
    """
    done: list[Converted] = []
    pieces: dict[str, Directive] = {}
    for one in found:
        name = _PIECES.get(one.option, one.option)
        if one.system == "#SBATCH" and name in PIECES and one.value is not None:
            pieces[name] = one
        elif one.option not in _MAIL[one.system]:
            done += [_converted(replace(one, value=part)) for part in parts_of(one.system, one.option, one.value)]
    if not limited and not any("--time-limit" in one.words for one in done):
        why = NoEquivalent("it warns before a time limit, and there is none; give --time-limit")
        done = [replace(one, words=(), lost=why) if "--signal" in one.words else one for one in done]
    mails = [one for one in found if one.option in _MAIL[one.system] and one.value not in ("NONE", "n")]
    address = next((one.value for one in mails if one.option == _MAIL[one.system][0]), "ADDRESS")
    why = NoEquivalent(f"give --notify {address}, or see docs/EVENTS.md for what sends a mail")
    done += [*_put_together(pieces, _count("--gpus", done)), *(Converted(one, lost=why) for one in mails[:1])]
    return sorted(_settled(done), key=lambda one: one.directive.line)


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
        is_place = (one.directive.system, one.directive.option) in (("#PBS", "-q"), ("#$", "-q"), ("#$", "-pe"))
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
            slip = re.match(
                r"[\u2013\u2014]|--.*(gpu|array|depend)", one.option
            )  # as in `--gpu=2`, or a dash of a web page
            unless = "--gpus" if "gpu" in one.option else ""
            return Converted(one, lost=NoEquivalent("unknown option", matters=slip is not None, unless=unless))
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


def answer(option: str, value: str | None, words: Sequence[str] = ()) -> str | None:
    """Return the equivalent of an *option* of sbatch or gbatch among *words* here; None if neither has it."""
    option = _SYNONYMS.get(option, option)
    for system in ("#SBATCH", "# GFLOW"):
        values, flags = SYSTEMS[system]
        if meaning_of(flags, option) is not None:
            value = None
        elif meaning_of(values, option) is None and option not in _MAIL[system] + PIECES * (system == "#SBATCH"):
            continue
        elif value is None:
            value = "gpu:1" if option == "--gres" else "1"
        # The memory for each CPU or GPU is more for several.
        counts = [("--cpus-per-task", "--cpus"), ("--gpus", "--gpus")] if system == "#SBATCH" else []
        each = [word for given in words for word in given.split("=", 1)]
        beside = [Directive(1, system, name, each[each.index(ours) + 1]) for name, ours in counts if ours in each[:-1]]
        found = convert([Directive(0, system, option, value), *beside])[0]
        if found.words:
            return f"write {shlex.join(found.words)}"
        return str(found.lost) if found.lost is not None else "leave it out"
    return None
