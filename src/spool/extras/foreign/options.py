"""Options of other schedulers, as options of spool: `#SBATCH`, `# GFLOW`, `#PBS` and `#$` lines, and words of habit.

The tables say what each option means: an option of spool that takes the same value, a reader of the value that returns
the words that mean the same here, or the reason why there are none. A lost option that changes results (GPUs, an array,
a dependency) makes the reader of a script fail; the others give a warning.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Mapping

from spool.core.errors import InvalidValue
from spool.core.layout import MAX_NAME_LENGTH, valid_name
from spool.core.model import SECOND_NS
from spool.core.units import format_duration, parse_size
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
        return meaning.split() if value is None or meaning == NEEDLESS else [meaning, value]
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
    what = f"name {name!r} under [resources] in config.toml and give --resource {name}={rest or 1}"
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
    `surroundings.output_path`. In a directory of PBS, the file gets the names of the job and the run.
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
    clock = {"midnight": "0:00", "noon": "12:00", "fika": "15:00", "teatime": "16:00"}.get(text.lower(), text)
    return ["--start-after", re.sub(r"^([0-9]{1,2}:[0-9]{2}):[0-9]{2}$", r"\1", clock)]


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
    parts = (part for part in text.split(",") if part not in ("ALL", "NONE", "NIL", ""))
    return [word for part in parts for word in ("--env", part)]


def _one_node(text: str) -> list[str]:
    if text.split("-")[0] != "1":
        raise NoEquivalent("there is only one node, this machine", matters=True)
    return []


def _open_mode(text: str) -> list[str]:
    if text.lower() not in ("a", "append"):
        raise NoEquivalent("a run appends to an output that is there")
    return []


def _gpu_count(text: str) -> list[str]:
    """Read `2`, and the `true` and the empty text of a resource that is there or not."""
    count = "1" if text.lower() in ("", "true") else text
    if not count.isdecimal():
        raise NoEquivalent("not a number of GPUs; give --gpus 1", matters=True, unless="--gpus")
    return ["--gpus", count]


def _gpu_type(text: str) -> list[str]:
    if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9 _.-]*", text):
        raise NoEquivalent("not a type of GPU; give --gpu-type A100")
    return ["--gpu-type", text]


def _slots(text: str) -> list[str]:
    """Read `smp 4` and `smp 4-8`: the least of them, so that it starts soonest."""
    slots = text.partition(" ")[2]
    match = re.fullmatch("([0-9]*)(?:-[0-9]*)?", slots)
    if match is None or not slots:
        raise NoEquivalent("not a number of slots; give --cpus", matters=True)
    return ["--cpus", match[1] or "1"]


def _yes(yes: str, no: str) -> Callable[[str], list[str]]:
    """Return a reader of `y` and `n`, which returns the words for each."""
    return lambda text: (yes if text.startswith(("y", "Y", "oe", "eo")) else no).split()


PER_CPU, PER_GPU = "--memory-per-cpu", "--memory-per-gpu"  # until the CPUs and GPUs are known
PIECES = ("--ntasks", "--cpus-per-task", "--ntasks-per-node", "--ntasks-per-gpu", "--cpus-per-gpu", "--gpus-per-task")
"""Options of sbatch that are read together."""
GRES = "--gres --tres-per-task --tres-per-node"

_NO_PARTS = NoEquivalent("a spool has no partitions; use --group and --priority instead")
_NO_NODES = NoEquivalent("a spool is one machine, without nodes to choose from")
_NO_STDIN = NoEquivalent("the job's stdin is empty; read the file in the command instead", matters=True)
_OTHER_SCALE = "priorities use another scale; give --priority 0-255"
_NICE = NoEquivalent("give --priority 0-255: higher is first, 10 is the default")

# The options of each system with a value, then those without one.
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
    "--kill-on-invalid-dep": lambda text: ["--on-dependency-failure", "wait" if text.lower() == "no" else "cancel"],
    "-N --nodes": _one_node,
    "-p --partition -q --qos": _NO_PARTS,
    "-C --constraint": NoEquivalent("a spool is one machine; --gpu-type selects a GPU, --workdir a directory"),
    "-w --nodelist -x --exclude -M --clusters": _NO_NODES,
    "--reservation": NoEquivalent("a job uses the reservations of its user or project by itself"),
    "--priority": NoEquivalent(f"Slurm's {_OTHER_SCALE}"),
    "-i --input": _NO_STDIN,
    "--open-mode": _open_mode,
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
    "--contiguous --ignore-pbs --test-only": NEEDLESS,
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
    "--max-concurrent": "--max-running",
    "--max-retries": "--retry-max",
    "--name-template": NoEquivalent("tasks are named NAME_0, NAME_1 and so on"),
}
_GFLOW_FLAGS: Table = {
    "--shared --auto-close": NEEDLESS,  # the first is implied by --gpu-memory
    "--no-auto-cancel": "--on-dependency-failure wait",
}
_OF_QSUB: Table = {
    "-N": _name,
    "-v": _exported,
    "-A -P": "--project",
    "-a": NoEquivalent("give --start-after 2026-01-31T09:00"),
    "-S": NEEDLESS,  # `lines.interpreter`
    "-j": _yes("", "--stderr %n.%r.err"),
    "-r": _yes("--requeue", "--no-requeue"),
}
"""What PBS and Grid Engine, whose command has one name, have in common."""
_PBS_RESOURCES: Table = {
    "nodes select": _one_node,
    "ppn ncpus nprocs": "--cpus",
    "gpus ngpus": "--gpus",
    "gpu_type gputype gpu_model": _gpu_type,
    "mem vmem": _size("--memory", "B"),
    "pmem pvmem": _size(PER_CPU, "B"),
    "walltime": _seconds,
    "place mpiprocs ompthreads": NEEDLESS,
}
_SGE_RESOURCES: Table = {
    "h_rt": _seconds,
    "s_rt": NoEquivalent("give --time-limit 2h --signal USR1@60s"),
    "gpu gpus ngpu ngpus num_gpus gpu_card nvidia_gpu cuda": _gpu_count,
    "gpu_type gputype gpu_model gpu_name": _gpu_type,
    "gpu_mem gpu_memory gpu_ram gpumem": _size("--gpu-min-memory", "B"),
    "mem_free mf mem_total virtual_free vf": _size("--memory", "B"),
    "h_vmem s_vmem h_rss tmem rmem mem h_data m_mem_free mem_per_core": _size(PER_CPU, "B"),
    "h hostname": _NO_NODES,
}


def _pbs_resource(text: str) -> list[str]:
    if "+" in text:  # nodes=1:ppn=2+1:ppn=4
        raise NoEquivalent("there is only one node, this machine", matters=True)
    key, _, value = text.partition("=")
    meaning = meaning_of(_PBS_RESOURCES, key)
    return words_of(meaning, value) if meaning is not None else _of_a_gpu(key, value)


def _sge_resource(text: str) -> list[str]:
    key, _, value = text.partition("=")
    meaning = meaning_of(_SGE_RESOURCES, key)
    return (
        words_of(meaning, value)
        if meaning is not None
        else _of_a_gpu(key, "1" if value.lower() in ("", "true") else value)
    )


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
    "-l": _pbs_resource,
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
    "-l": _sge_resource,
    "-pe": _slots,
    "-t": "--array",
    "-tc": "--max-running",
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

MAIL = {
    "#SBATCH": ("--mail-user", "--mail-type"),
    "# GFLOW": ("--notify-email", "--notify-on"),
    "#PBS": ("-M", "-m"),
    "#$": ("-M", "-m"),
}
"""The options of each system for the recipients of messages, and for the moments."""

MAIL_EVENTS = {
    "BEGIN B JOB_STARTED": "started",
    "END E": "ended",
    "FAIL JOB_FAILED": "failed timeout out_of_memory lost",
    "A": "failed timeout out_of_memory lost cancelled",
    "ALL": "started ended retried",
    "REQUEUE": "retried",
    "TIME_LIMIT JOB_TIMEOUT": "timeout",
    "JOB_COMPLETED": "finished",
    "JOB_CANCELLED": "cancelled",
}
"""What they call the moments of a message, and our events. For others there is none here."""
