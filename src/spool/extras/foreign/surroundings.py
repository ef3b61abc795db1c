"""What a script for another scheduler looks for in its job: variables, `srun`, `module` and `conda activate`.

The text of the script is searched. A variable of Slurm that it reads goes into the job's `env`, and no other, because
launchers take a job with such variables for one of Slurm. What is constant is written as it is; what the job is
granted is a reference such as `$SPOOL_CPUS` (docs/FORMAT.md 7).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from shlex import quote

from spool.client.draft import Exports, escaped, matching, placeholders
from spool.core.errors import InvalidValue

STANDINS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standins")
"""The directory of programs that stand for those of Slurm in a job."""


def _values_of(name: str, tasks: tuple[int, int | None], keys: Mapping[str, object]) -> Mapping[str, str]:
    """Return the variables of other schedulers that a job has, with their values."""
    from spool.formats import values

    many = frozenset(placeholders(keys))
    try:
        indices = sorted(values.array(str(keys["array"])).indices) if "array" in keys else []
    except InvalidValue:  # reported when the job is checked
        indices = []
    step = min((after - before for before, after in pairwise(indices)), default=1)
    # Slurm's number of a job stays the same when the job runs again, so it is made when the job is.
    number = str(10**9 + int.from_bytes(os.urandom(8)) % (9 * 10**9))
    count, cpus_of_each = tasks
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was removed, and the job has another one
        here = str(keys.get("workdir", ""))
    found = {
        "SLURM_JOB_ID SLURM_JOBID PBS_JOBID": f"{number}{{index}}" if many else number,
        "JOB_ID": number,
        "SLURM_JOB_NAME PBS_JOBNAME JOB_NAME": name if many else "$SPOOL_JOB",
        "SLURM_SUBMIT_DIR PBS_O_WORKDIR SGE_O_WORKDIR": escaped(here, many),
        "SLURM_SUBMIT_HOST SGE_O_HOST SLURM_JOB_NODELIST SLURM_NODELIST SLURMD_NODENAME": socket.gethostname(),
        "SLURM_CPUS_PER_TASK": "$SPOOL_CPUS" if count == 1 else str(cpus_of_each or 1),
        "SLURM_CPUS_ON_NODE SLURM_JOB_CPUS_PER_NODE NCPUS PBS_NCPUS PBS_NP PBS_NUM_PPN NSLOTS": "$SPOOL_CPUS",
        "SLURM_MEM_PER_NODE": "$SPOOL_MEMORY_MB",
        "SLURM_GPUS SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE": "$SPOOL_GPUS",
        "SLURM_JOB_GPUS SLURM_STEP_GPUS": "$SPOOL_GPU_INDICES",
        "SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE": str(count),
        "SLURM_PROCID SLURM_LOCALID SLURM_NODEID": "0",
        "SLURM_NNODES SLURM_JOB_NUM_NODES NHOSTS": "1",
        "SGE_TASK_ID": "{index}" if many else "undefined",
    }
    if many:
        found["SLURM_ARRAY_JOB_ID PBS_ARRAY_ID"] = number
        found["SLURM_ARRAY_TASK_ID GFLOW_ARRAY_TASK_ID PBS_ARRAY_INDEX PBS_ARRAYID"] = "{index}"
    if indices:
        found["SLURM_ARRAY_TASK_COUNT"] = str(len(indices))
        found["SLURM_ARRAY_TASK_MIN SGE_TASK_FIRST"] = str(indices[0])
        found["SLURM_ARRAY_TASK_MAX SGE_TASK_LAST"] = str(indices[-1])
        found["SLURM_ARRAY_TASK_STEP SGE_TASK_STEPSIZE"] = str(step)
    return {each: value for names, value in found.items() for each in names.split()}


_OF_AN_ARRAY = re.compile(r"SLURM_ARRAY_\w+|GFLOW_ARRAY_TASK_ID|PBS_ARRAY_?(?:INDEX|ID)|SGE_TASK_\w+")
_NUMBERS = ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "JOB_ID")
_NUMBERS_OF_ARRAYS = ("SLURM_ARRAY_JOB_ID", "PBS_ARRAY_ID", "JOB_ID")
_DEFAULT_OUTPUTS = (
    (re.compile(r"\bslurm-[\"']?[$*?{][^\s;&|/]*"), "slurm-%j.out", "slurm-%A_%a.out"),
    (re.compile(r"\.o[\"']?\$\{?(?:JOB_ID|PBS_JOBID)\b"), "%x.o%j", "%x.o%A.%a"),
)
"""Where other schedulers write the output that has no path: how a script names it, and the path, also in an array."""
_INSTEAD = {
    "SLURM_RESTART_COUNT": "use $SPOOL_ATTEMPT, which begins with 1",
    "SLURM_TMPDIR": "use `mktemp -d`",
    "TMPDIR": "use `mktemp -d`",
    "srun": "use the command alone",
    "sbatch": "use spool submit",
    "qsub": "use spool submit",
    "scontrol": "for `scontrol requeue` use spool requeue, for `scontrol show hostnames` hostname",
}
_LAUNCHED_BY = ("SLURM_NTASKS", "SLURM_PROCID")
_VARIABLE = re.compile(r"\b(?:SLURMD?|PBS|SBATCH|GFLOW|SGE_TASK)_[A-Z_]+\b|\bNCPUS\b")
_OF_LINES = (
    (
        re.compile(r"^#\$[ \t]*-", re.MULTILINE),
        re.compile(r"\bSGE_[A-Z_]+\b|\$\{?(NSLOTS|NHOSTS|JOB_ID|JOB_NAME|TMPDIR)\b"),
    ),
    (re.compile(r"^#PBS\b", re.MULTILINE), re.compile(r"\$\{?TMPDIR\b")),
)
"""Variables without a prefix of their own, which mean that only in a script with lines for its scheduler."""
_AT = r"(?:^|[;&|(`]|=[\"']|\b(?:time|exec|if|while|then|do|else|env)\s|\btrap\s+['\"])\s*(?:[A-Za-z_]\w*=\S*\s+)*"
_PROGRAM = re.compile(rf"{_AT}(srun|sbatch|scontrol|qsub)(?=\s)([^;&|]*)")
_STANDS_IN = re.compile(r"srun\b|scontrol\s+(?:show\s+hostnames?|requeue)\b")
_SRUN_FLAGS = "label unbuffered verbose quiet kill-on-bad-exit exclusive exact overlap pty no-kill preserve-env"
_SRUN_OPTIONS = re.compile(  # up to the command, whose options are its own
    rf"(?:\s+(?!--\s)(?:--\S+=\S*|--(?:{'|'.join(_SRUN_FLAGS.split())})(?=\s)|"
    r"-[luvQkKEOsXZbHV]\S*|-[a-zA-Z]\S+|-\S+\s+\S+))*"
)
_NTASKS = re.compile(r"\s(?:-n\s*|--ntasks(?:-per-node)?[= ]\s*)([0-9]{1,6})\b")
_NODES = re.compile(r"\s(?:-N\s*|--nodes[= ]\s*)([0-9]{1,6})\b")
_NOT_IN_SRUN = re.compile(r"\s(--(?:multi-prog|het-group))\b")
_APPENDS = re.compile(r"^#SBATCH\b.*\s--open-mode[= ]a", re.MULTILINE)
_FILLED_BY_SRUN = {"j": _NUMBERS[0], "J": _NUMBERS[0], "A": _NUMBERS_OF_ARRAYS[0], "x": "SLURM_JOB_NAME"}
_FUNCTION = re.compile(
    rf"{_AT}(?:(module|ml)\s|(conda|mamba|micromamba)\s+activate\b|(?:source|\.)\s+(activate)(?=\s|$))"
)
_SOURCES = r"(?:\bsource|(?:^|[;&\s])\.)\s+\S*"
_SETS_UP = {
    "module": re.compile(rf"{_SOURCES}(?:module|lmod)", re.MULTILINE),
    "conda": re.compile(rf"{_SOURCES}(?:conda|mamba)|\bshell(?:\.\w+)? hook", re.MULTILINE),
}
_MAY_SET_UP = {  # most ~/.bashrc return at once where no terminal is
    kind: re.compile(rf"\A#!.*\s(?:-\w*l\b|--login\b)|{_SOURCES}(?:profile(?!\.d)|bashrc{more})", re.MULTILINE)
    for kind, more in (("module", ""), ("conda", "|/activate"))
}
_STARTUP_FILES = (".bashrc", ".bash_profile", ".profile", ".zshrc")
_CONDA_IN_THEM = re.compile(
    r"[\"'\s](/[^\"'\s]+)/(?:etc/profile\.d/(?:conda|mamba)\.sh|(?:conda)?bin/(?:conda|mamba))\b"
)
_INIT_OF_MODULES = (
    *(f"/etc/profile.d/{name}.sh" for name in ("modules", "lmod", "z00_lmod")),
    *(f"/usr/share/{name}/init/bash" for name in ("modules", "Modules", "lmod/lmod")),
)
_DEFINES = {
    "module": ". /usr/share/lmod/lmod/init/bash",
    "conda": 'eval "$(/PATH/OF/conda shell.bash hook)"',
}
_OF_FUNCTIONS = {
    "module": ("BASH_FUNC_*module*", "BASH_FUNC_ml*", "MODULE*", "LMOD_*", "LOADEDMODULES", "_LMFILES_"),
    "conda": ("BASH_FUNC_*conda*", "BASH_FUNC_*mamba*", "CONDA_*", "MAMBA_*"),
}


def _lines(text: str, *, joined: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the lines of a script that are no comments, numbered; *joined*: those that a backslash continues as one."""
    first, begun = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        first, begun = first if begun else number, begun + line
        if joined and begun.endswith("\\"):
            begun = begun[:-1] + " "
        else:
            yield first, begun
            begun = ""
    if begun:
        yield first, begun


def output_path(pattern: str, name: str, keys: Mapping[str, object]) -> str:
    """Return the path *pattern* of an output of the job *name* with %x, %j and %A of Slurm as a job file has them.

    The number of the job is a reference to the variable by which the job reads it, so that both are the same. A job
    that does not read it has a file for each run: `%n.%r`.
    """
    letters = {found[-1] for found in re.findall("%[0-9]*.", pattern)}
    env, is_array = keys.get("env", {}), bool(placeholders(keys))
    if not isinstance(env, dict) or letters.isdisjoint("xjJAa"):
        return pattern
    number, of_array = (
        next((f"${{{each}}}" for each in names if each in env), None) for names in (_NUMBERS, _NUMBERS_OF_ARRAYS)
    )
    alone = "x" in letters
    run = ("%a.%r" if is_array else "%r") if alone else "%n.%r"
    whole = (of_array or ("%r" if alone else name)) if is_array else number or run
    ours = {"x": name if is_array else "%n", "j": number or run, "J": number or run, "A": whole}
    path = re.sub("%0*([0-9]*.)", lambda found: ours.get(found[0][-1], f"%{found[1]}"), pattern)
    return path.replace(f"{name}_%a", "%n") if is_array else path  # a task's name


class ScriptNeeds:
    """What the script *text* needs in the job *name*, and the messages about that."""

    def __init__(self, text: str, name: str, tasks: tuple[int, int | None], keys: Mapping[str, object]) -> None:
        self._text = text
        self._keys = keys
        self._tasks = tasks[0]
        self._is_array = bool(placeholders(keys))
        self._values = _values_of(name, tasks, keys)
        self.env: dict[str, str] = {}
        self.stdout: str | None = None  # the path that the script reads its output from
        self.told: list[str] = []

    def find(self, exported: Exports) -> None:
        """Search for variables, programs and the default output. *exported* gets a PATH with `srun`."""
        self._find_variables()
        self._find_programs(exported)
        if "stdout" not in self._keys:
            self._find_output()

    def _find_variables(self) -> None:
        seen = {"TMPDIR"} if "TMPDIR=" in self._text else set()  # then it is the script's own
        more = [variable for lines, variable in _OF_LINES if lines.search(self._text)]
        outputs = [(0, str(self._keys[key])) for key in ("stdout", "stderr") if key in self._keys]
        for number, line in (*_lines(self._text), *outputs):
            for name in (found[0].lstrip("${") for each in (_VARIABLE, *more) for found in each.finditer(line)):
                if name in seen:
                    continue
                seen.add(name)
                value = self._values.get(name)
                if number == 0 and (value is None or "$" in value):
                    continue  # no path can have it, and the job is doubted for that
                if value is not None:
                    self.env[name] = value
                    if name in _LAUNCHED_BY:
                        which = "launchers such as PyTorch Lightning take a job that has it for one of Slurm"
                        self.told.append(f"line {number}: ${name} is {value} here; {which}")
                elif self._is_array or _OF_AN_ARRAY.fullmatch(name) is None:
                    self._miss(number, f"${name}")

    def _miss(self, number: int, what: str, more: str = "") -> None:
        instead = _INSTEAD.get(what.removeprefix("$"), "") + more
        self.told.append(f"line {number}: {what} does not exist in a spool job{f'; {instead}' if instead else ''}")

    def _find_programs(self, exported: Exports) -> None:
        seen = set()
        for number, line in _lines(self._text, joined=True):
            for name, words in _PROGRAM.findall(line):
                if name == "srun":
                    self._doubt_srun(number, words)
                its = _STANDS_IN.match(f"{name}{words}")
                what = its[0] if its is not None else name
                if what in seen:
                    continue
                seen.add(what)
                if its is not None:
                    self._stand_in(number, name, exported)
                else:
                    self._miss(number, name)

    def _doubt_srun(self, number: int, words: str) -> None:
        options = _SRUN_OPTIONS.match(words)
        words = options[0] if options is not None else ""
        stated, nodes = _NTASKS.search(words), _NODES.search(words)
        count = int(stated[1]) if stated is not None else self._tasks
        if count > 1:
            why = f"srun would start {count} tasks, but a job of spool is one task, so this will fail"
            self.told.append(f"line {number}: {why}; `mpirun -n {count}` starts several on this machine")
        if nodes is not None and int(nodes[1]) > 1:
            why = f"srun asks for {nodes[1]} nodes, and there is only this machine, so this will fail"
            self.told.append(f"line {number}: {why}")
        if (odd := _NOT_IN_SRUN.search(words)) is not None:
            self.told.append(f"line {number}: srun has no {odd[1]} here, so this will fail")
        for letter in re.findall("%[0-9]*([jJAx])", words):
            name = _FILLED_BY_SRUN[letter]
            if name not in self._values:  # not of an array, so both numbers are the same
                name = _NUMBERS[0]
            self.env.setdefault(name, self._values[name])

    def _find_output(self) -> None:
        for number, line in _lines(self._text):
            for pattern, plain, of_array in _DEFAULT_OUTPUTS:
                if (found := pattern.search(line)) is not None:
                    self.stdout = of_array if self._is_array else plain
                    what = found[0].rstrip("\"')")
                    self.told.append(f"line {number}: {what} is the job's output, so it goes to {self.stdout}")
                    return

    def _stand_in(self, number: int, name: str, exported: Exports) -> None:
        """Let the job find the program that stands for *name* of Slurm, unless there is a real one."""
        from shutil import which

        path = exported.taken.get("PATH")
        if path is None:
            self._miss(number, name, f", or let PATH go along: without it, no {name} is found")
            return
        if (found := which(name, path=path)) is None:
            exported.taken["PATH"] = f"{STANDINS}:{path}"
        elif os.path.dirname(found) != STANDINS:
            self.told.append(
                f"line {number}: {name} is that of Slurm, which knows nothing of this job; {_INSTEAD[name]}"
            )
            return
        if name == "srun" and self._tasks > 1:
            self.env.setdefault("SLURM_NTASKS", str(self._tasks))
        if name == "srun" and _APPENDS.search(self._text) is not None:
            self.env.setdefault("SLURM_OPEN_MODE", "a")

    def find_functions(self, exported: Exports, *, freely: bool) -> None:
        """Give the job the shell functions that the script calls and does not define itself.

        They are the caller's, if it exports them; else, for bash, one that defines the real one when it is called.
        *freely*: without `--export`.
        """
        first = self._text.split("\n", 1)[0]
        is_bash = first.startswith("#!") and "bash" in first
        if re.match(r"#!\S*/t?csh\b", first) is not None:  # reads its startup file in scripts too
            return
        calls = {
            next(filter(None, words)): number
            for number, line in _lines(self._text)
            for words in _FUNCTION.findall(line)
        }
        for name, number in calls.items():
            kind = "module" if name in ("module", "ml") else "conda"
            if _SETS_UP[kind].search(self._text) is not None:
                continue
            if freely and is_bash:
                exported.take(matching(_OF_FUNCTIONS[kind], os.environ), os.environ)
            variable, definition = f"BASH_FUNC_{name}%%", _definition_of(name)
            if (is_bash and variable in exported.taken) or (name == "activate" and _finds_activate(exported)):
                continue
            if is_bash and definition and name != "activate":
                self.env[variable] = f'() {{ unset -f {name}; {definition} && {name} "$@"; }}'
            elif definition or _MAY_SET_UP[kind].search(self._text) is None:
                self._lacks(number, name, definition or _DEFINES[kind])

    def _lacks(self, number: int, name: str, definition: str) -> None:
        before = definition.replace("/init/bash", "/init/sh").replace("shell bash", "shell posix")
        if name == "activate":
            why = f"`source activate` needs conda in the PATH; write `{before}; conda activate` instead"
        else:
            what = name if name in ("module", "ml") else f"{name} activate"
            why = f"`{what}` needs a shell function that the job does not have; write `{before}` before it"
        self.told.append(f"line {number}: {why}")


def _definition_of(name: str) -> str:
    """Return the commands that define the shell function *name* on this machine, "" if they are not found."""
    from shutil import which

    environ, files = os.environ, list[str]()
    if name in ("module", "ml"):
        homes = [environ[key] for key in ("MODULESHOME", "LMOD_PKG") if key in environ]
        files = [path for path in (*(f"{home}/init/bash" for home in homes), *_INIT_OF_MODULES) if os.path.isfile(path)]
        files = files[:1]
    elif name == "micromamba":
        program = environ.get("MAMBA_EXE") or which(name)
        return f'eval "$({quote(program)} shell hook --shell bash)"' if program else ""
    elif (root := _conda_root()) is not None:
        files = [f"{root}/etc/profile.d/{each}.sh" for each in dict.fromkeys(("conda", name)) if each != "activate"]
    return "; ".join(f". {quote(path)}" for path in files if os.path.isfile(path))


def _conda_root() -> str | None:
    """Return the directory in which conda is installed: that of the caller, or of its shell's startup files."""
    from shutil import which

    programs = [path for path in (os.environ.get("CONDA_EXE"), which("conda")) if path]
    roots = [os.path.dirname(os.path.dirname(path)) for each in programs for path in (each, os.path.realpath(each))]
    for name in _STARTUP_FILES:
        with suppress(OSError), open(os.path.expanduser(f"~/{name}"), errors="replace") as file:
            roots += _CONDA_IN_THEM.findall(file.read())
    return next((root for root in roots if os.path.isfile(f"{root}/etc/profile.d/conda.sh")), None)


def _finds_activate(exported: Exports) -> bool:
    """Whether a job finds `activate` of conda in its PATH, which gets the directory if need be."""
    from shutil import which

    path, root = exported.taken.get("PATH"), _conda_root()
    if path is None or which("activate", os.F_OK | os.R_OK, path) is not None:
        return path is not None
    if root is None or not os.path.isfile(f"{root}/condabin/activate"):
        return False
    exported.taken["PATH"] = f"{root}/condabin:{path}"
    return True
