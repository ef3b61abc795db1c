"""Options of other schedulers, as options of spool: `#SBATCH`, `# GFLOW`, `#PBS` and `#$` lines, and words of habit.

Each converter returns the words that mean the same here, or raises `NoEquivalent` with the reason. A lost option that
changes results (GPUs, an array, a dependency) makes the reader of a script fail; the others give a warning.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Mapping

from spool.core.errors import InvalidValue
from spool.core.layout import valid_name
from spool.core.model import SECOND_NS
from spool.core.names import MAX_NAME_LENGTH
from spool.core.units import format_duration, parse_size
from spool.store.ownership import this_user


class NoEquivalent(Exception):  # noqa: N818  (not always an error)
    """An option without an equivalent. *matters*: without it the job would compute something else.

    *unless*: it does not matter if the job gets this option of spool from another line.
    """

    def __init__(self, why: str, *, matters: bool = False, unless: str = "") -> None:
        super().__init__(why)
        self.matters = matters
        self.unless = unless


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


def megabytes(option: str) -> Converter:
    """Read the sizes of sbatch and gbatch: a number without a unit is in megabytes."""

    def read(text: str) -> list[str]:
        match = re.fullmatch(r"([0-9]+)([KMGT]?)B?", text, re.IGNORECASE)
        if match is None or int(match[1]) == 0:
            raise NoEquivalent("cannot request all of the machine's memory" if match else "not a valid size")
        return [option, f"{match[1]}{(match[2] or 'M').upper()}"]

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


def _of_a_gpu(name: str, count: str, instead: str = "no equivalent in spool") -> list[str]:
    """Read `a100:1`, `coproc_v100=1` and `v100`: what clusters call GPUs in their own ways.

    *instead* is why any other resource has no equivalent.
    """
    model = _GPU_MODEL.search(name)
    if model is not None and (not count or count.isdecimal()):
        return [*(["--gpus", count] if count else []), "--gpu-type", model[1]]
    if model is not None or GPU.search(f"{name} {count}"):
        raise NoEquivalent(f"{name!r} seems to be a GPU; give --gpus 1", matters=True, unless="--gpus")
    raise NoEquivalent(instead)


def is_gpu(gres: str) -> bool:
    """Whether a part of `--gres` is a GPU, or called like one."""
    name = gres.removeprefix("gres/").removeprefix("gres:").partition(":")[0]
    return GPU.search(name) is not None or _GPU_MODEL.search(name) is not None


def _gres(text: str) -> list[str]:
    words: list[str] = []
    for part in text.split(","):
        name, _, rest = re.sub(r"\(.*\)$", "", part.removeprefix("gres/").removeprefix("gres:")).partition(":")
        if name == "none":
            continue
        if words:
            raise NoEquivalent("cannot request more than one kind of GPU", matters=True)
        if name == "gpu":
            words += gpus_asked(rest or "1")
        elif name in ("shard", "mps"):
            raise NoEquivalent("give --gpus 1 --gpu-memory 8G", matters=True)
        else:
            what = f"name {name!r} under [resources] in config.toml and give --resource {name}={rest or 1}"
            words += _of_a_gpu(name, rest or "1", what)
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
    """Read `ALL,A=1`: assigned variables go into the job file; a name without a value is passed on unchanged."""
    words: list[str] = []
    for part in text.split(","):
        if part not in ("ALL", "NONE", "NIL", ""):
            words += ["--env", part]
    return words


def _everything(value: str) -> list[str]:
    return ["--export", "ALL"]


def _one(what: str) -> Converter:
    """Read a number that must be 1 here: of machines, of chunks."""

    def read(text: str) -> list[str]:
        if text.split("-")[0] != "1":
            raise NoEquivalent(f"there is only one {what}, this machine", matters=True)
        return []

    return read


_NO_PARTS = _nothing("a spool has no partitions; use --group and --priority instead")
_MAIL = _needless  # the two options of each system are read together: `MAIL`
_NICE = _nothing("give --priority 0-255: higher is first, 10 is the default")
PIECES = ("--ntasks", "--cpus-per-task", "--ntasks-per-node", "--ntasks-per-gpu", "--cpus-per-gpu", "--mem-per-cpu",
           "--mem-per-gpu", "--gpus-per-task")  # fmt: skip

GRES = "--gres --tres-per-task --tres-per-node"


def _open_mode(text: str) -> list[str]:
    if text.lower() not in ("a", "append"):
        raise NoEquivalent("a run appends to an output that is there")
    return []


# Spellings and the value's converter; a flag has no value. Options in `PIECES` are combined at the end.
_SBATCH: Mapping[str, Converter] = {
    "-J --job-name": _name,
    "-t --time": _minutes,
    "--mem": megabytes("--memory"),
    "-G --gpus --gpus-per-node --gpus-per-socket": gpus_asked,
    GRES: _gres,
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
    "--mail-type --mail-user": _MAIL,
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
    "-m --memory --max-mem --max-memory": megabytes("--memory"),
    "--gpu-memory --max-gpu-mem --max-gpu-memory": megabytes("--gpu-memory"),
    "-g --gpus --gres": gpus_asked,
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
    "--notify-email --notify-on": _MAIL,
}
_GFLOW_FLAGS: Mapping[str, Converter] = {
    "--shared": _needless,  # implied by --gpu-memory
    "--auto-close": _needless,
    "--no-auto-cancel": lambda _: ["--on-dependency-failure", "wait"],
}


PER_CPU = "--memory-per-cpu"  # until the CPUs are known


def _bytes(option: str) -> Converter:
    """Read the sizes of PBS and Grid Engine: a number without a unit is in bytes."""

    def read(text: str) -> list[str]:
        match = re.fullmatch("([0-9]{1,9}(?:[.][0-9]{1,9})?)([kmgt])?b?", text, re.IGNORECASE)
        if match is None:
            raise NoEquivalent("not a valid size")
        size = match[1] + (match[2] or "B").upper()
        try:
            parse_size(size)
        except InvalidValue as error:
            raise NoEquivalent(str(error)) from None
        return [option, size]

    return read


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


_PBS_RESOURCES: Mapping[str, Converter] = {
    "nodes select": _one("node"),
    "ppn ncpus nprocs": _same("--cpus"),
    "gpus ngpus": _same("--gpus"),
    "gpu_type gputype gpu_model": _gpu_type,
    "mem vmem": _bytes("--memory"),
    "pmem pvmem": _bytes(PER_CPU),
    "walltime": _clock_or_seconds,
    "place mpiprocs ompthreads": _needless,
}


IS_PBS_RESOURCE = re.compile(f"(?:{'|'.join(' '.join(_PBS_RESOURCES).split())})=")


def pbs_parts(text: str) -> Iterator[str]:
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
    for part in pbs_parts(text):
        key, _, value = part.partition("=")
        converter = converter_of(_PBS_RESOURCES, key)
        if converter is None:
            words += _of_a_gpu(key, value)
        else:
            words += converter(value)
    return words


def _path(option: str, names: Mapping[str, str], finished: Callable[[str], str] = str) -> Converter:
    """Read `HOST:PATH`; in a directory, the file gets the names of the job and the run.

    *names* has patterns and what stands for them here; *finished* returns the path in the end.
    """

    def read(text: str) -> list[str]:
        path = text.rpartition(":")[2].replace("%", "%%")
        for name, ours in names.items():
            path = re.sub(name, ours, path)
        if path.endswith("/") or os.path.isdir(path):
            path = os.path.join(path, f"%n.%r.{'err' if option == '--stderr' else 'out'}")
        return [option, finished(path)]

    return read


def _pbs_more(text: str) -> list[str]:
    if not text.startswith("depend="):
        raise NoEquivalent("no equivalent in spool")
    return dependencies(text.removeprefix("depend="))


_OF_QSUB: Mapping[str, Converter] = {
    "-N": _name,
    "-v": _exported,
    "-A -P": _same("--project"),
    "-a": _nothing("give --start-after 2026-01-31T09:00"),
    "-m -M": _MAIL,
    "-S": _needless,  # `interpreter`
}
"""What PBS and Grid Engine, whose command has one name, have in common."""
_PBS: Mapping[str, Converter] = {
    **_OF_QSUB,
    "-l": _pbs_resources,
    "-J -t": _same("--array"),
    "-o": _path("--stdout", {r"\^array_index\^": "%a"}),
    "-e": _path("--stderr", {r"\^array_index\^": "%a"}),
    "-d -w": _same("--workdir"),
    "-W": _pbs_more,
    "-q": _NO_PARTS,
    "-p": _nothing("PBS priorities use another scale; give --priority 0-255"),
    "-j": lambda text: [] if text in ("oe", "eo") else ["--stderr", "%n.%r.err"],
    "-r": lambda text: ["--requeue" if text == "y" else "--no-requeue"],
    "-c -C -k -u": _nothing("no equivalent in spool"),
}
_PBS_FLAGS: Mapping[str, Converter] = {"-h": lambda _: ["--hold"], "-V": _everything, "-I -z -X -x -f": _needless}


def _sge_resource(text: str) -> list[str]:
    key, _, value = text.partition("=")
    converter = converter_of(_SGE_RESOURCES, key)
    return (
        converter(value) if converter is not None else _of_a_gpu(key, "1" if value.lower() in ("", "true") else value)
    )


_SGE_RESOURCES: Mapping[str, Converter] = {
    "h_rt": lambda text: [] if text.upper() == "INFINITY" else _clock_or_seconds(text),
    "s_rt": _nothing("give --time-limit 2h --signal USR1@60s"),
    "gpu gpus ngpu ngpus num_gpus gpu_card nvidia_gpu cuda": _gpu_count,
    "gpu_type gputype gpu_model gpu_name": _gpu_type,
    "gpu_mem gpu_memory gpu_ram gpumem": _bytes("--gpu-min-memory"),
    "mem_free mf mem_total virtual_free vf": _bytes("--memory"),
    "h_vmem s_vmem h_rss tmem rmem mem h_data m_mem_free mem_per_core": _bytes(PER_CPU),
    "h hostname": _nothing("a spool is one machine, without nodes to choose from"),
}


def _slots(text: str) -> list[str]:
    """Read `smp 4` and `smp 4-8`: the least of them, so that it starts soonest."""
    slots = text.partition(" ")[2]
    match = re.fullmatch("([0-9]*)(?:-[0-9]*)?", slots)
    if match is None or not slots:
        raise NoEquivalent("not a number of slots; give --cpus", matters=True)
    return ["--cpus", match[1] or "1"]


def _held_by(text: str) -> list[str]:
    names = text.split(",")
    if odd := [name for name in names if name.isdecimal() or not valid_name(name)]:
        raise NoEquivalent(f"{odd[0]} is not the name of a job here; give --depends-on ended:NAME", matters=True)
    return ["--depends-on", "ended:" + ",".join(names)]


_IN_PATHS_OF_SGE = {
    rf"\$(?:{name}|{{{name}}})": ours
    for name, ours in (("JOB_NAME", "%x"), ("JOB_ID", "%A"), ("TASK_ID", "%a"), ("USER", "%u"), ("HOSTNAME", "%N"))
}

_SGE: Mapping[str, Converter] = {
    **_OF_QSUB,
    "-l": _sge_resource,
    "-pe": _slots,
    "-t": _same("--array"),
    "-tc": _same("--max-running"),
    "-o": _path("--stdout", _IN_PATHS_OF_SGE, output_pattern),
    "-e": _path("--stderr", _IN_PATHS_OF_SGE, output_pattern),
    "-wd": _same("--workdir"),
    "-hold_jid": _held_by,
    "-hold_jid_ad": _nothing("give --depends-on each:NAME", matters=True),
    "-q -masterq": _NO_PARTS,
    "-p": _nothing("Grid Engine's priorities use another scale; give --priority 0-255"),
    "-j": lambda text: [] if text[:1] in "yY" else ["--stderr", "%n.%r.err"],
    "-r": lambda text: ["--requeue" if text[:1] in "yY" else "--no-requeue"],
    "-i": _nothing("the job's stdin is empty; read the file in the command instead", matters=True),
    "-C -@": _nothing("other lines and files with options are not read", matters=True),
    "-b -R -now -sync -shell -w -js -ot -pty": _needless,
    "-ac -ar -binding -c -ckpt -dc -display -dl -jc -jsv -mods -adds -sc -u -umask": _nothing("no equivalent in spool"),
}
_SGE_FLAGS: Mapping[str, Converter] = {
    "-V": _everything,
    "-h": lambda _: ["--hold"],
    "-soft": _nothing("what is only wished for is required here"),
    "-notify": _nothing("give --signal USR2@60s"),
    "-cwd -hard -terse -verify -nostdin -noshell -clear -inherit": _needless,
}

SYSTEMS: Mapping[str, tuple[Mapping[str, Converter], Mapping[str, Converter]]] = {
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


def converter_of(table: Mapping[str, Converter], option: str) -> Converter | None:
    """Return the converter of *option* in a *table*, None if it has none."""
    return next((converter for names, converter in table.items() if option in names.split()), None)
