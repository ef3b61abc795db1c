"""What a script for another scheduler looks for in its job: variables, `srun`, `module` and `conda activate`.

The text of the script is searched. A variable of Slurm that it reads goes into the job's `env`, and no other, because
launchers take a job with such variables for one of Slurm. What is constant is written as it is; what the job is
granted is a reference such as `$SPOOL_CPUS` (docs/FORMAT.md 7).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from shlex import quote

from msgspec import Struct

from spool.client.draft import Exports, escaped, matching, placeholders
from spool.core.errors import InvalidValue

STANDINS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standins")
"""The directory of programs that stand for those of Slurm in a job."""


class TasksAsked(Struct, frozen=True):
    """The tasks that the directives of a script ask for, and the CPUs of each; `cpus` is None if not stated."""

    count: int = 1
    cpus: int | None = None


class _Job(Struct, frozen=True):
    """The facts about a job that its variables show."""

    id: str
    name: str
    tasks: TasksAsked
    keys: Mapping[str, object]

    @property
    def many(self) -> frozenset[str]:
        """The placeholders of an array; empty for a plain job."""
        return frozenset(placeholders(self.keys))

    @property
    def indices(self) -> tuple[int, ...]:
        """The indices in its key `array`, ascending; empty without one."""
        from spool.formats import values

        try:
            return tuple(sorted(values.array(str(self.keys["array"])).indices)) if "array" in self.keys else ()
        except InvalidValue:  # reported when the job is checked
            return ()


def _index(job: _Job) -> str | None:
    return "{index}" if job.many else None


def _of_indices(read: Callable[[tuple[int, ...]], int]) -> Callable[[_Job], str | None]:
    return lambda job: str(read(job.indices)) if job.indices else None


def _step(indices: tuple[int, ...]) -> int:
    return min((after - before for before, after in pairwise(indices)), default=1)


def _always(value: str) -> Callable[[_Job], str | None]:
    return lambda _: value


def _tasks(job: _Job) -> str:
    return str(job.tasks.count)


def _cpus_per_task(job: _Job) -> str:
    return "$SPOOL_CPUS" if job.tasks.count == 1 else str(job.tasks.cpus or 1)


def _here(job: _Job) -> str:
    return escaped(os.getcwd(), job.many)


def _host(_: _Job) -> str:
    return socket.gethostname()


_VALUES: Mapping[str, Callable[[_Job], str | None]] = {
    "SLURM_JOB_ID SLURM_JOBID PBS_JOBID": lambda job: f"{job.id}{{index}}" if job.many else job.id,
    "SLURM_ARRAY_JOB_ID PBS_ARRAY_ID": lambda job: job.id if job.many else None,
    "JOB_ID": lambda job: job.id,
    "SLURM_ARRAY_TASK_ID GFLOW_ARRAY_TASK_ID PBS_ARRAY_INDEX PBS_ARRAYID": _index,
    "SLURM_ARRAY_TASK_COUNT": _of_indices(len),
    "SLURM_ARRAY_TASK_MIN SGE_TASK_FIRST": _of_indices(min),
    "SLURM_ARRAY_TASK_MAX SGE_TASK_LAST": _of_indices(max),
    "SLURM_ARRAY_TASK_STEP SGE_TASK_STEPSIZE": _of_indices(_step),
    "SLURM_JOB_NAME PBS_JOBNAME JOB_NAME": lambda job: job.name if job.many else "$SPOOL_JOB",
    "SLURM_SUBMIT_DIR PBS_O_WORKDIR SGE_O_WORKDIR": _here,
    "SLURM_SUBMIT_HOST SGE_O_HOST SLURM_JOB_NODELIST SLURM_NODELIST SLURMD_NODENAME": _host,
    "SLURM_CPUS_PER_TASK": _cpus_per_task,
    "SLURM_CPUS_ON_NODE SLURM_JOB_CPUS_PER_NODE NCPUS PBS_NCPUS PBS_NP PBS_NUM_PPN NSLOTS": _always("$SPOOL_CPUS"),
    "SLURM_MEM_PER_NODE": _always("$SPOOL_MEMORY_MB"),
    "SLURM_GPUS SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE": _always("$SPOOL_GPUS"),
    "SLURM_JOB_GPUS SLURM_STEP_GPUS": _always("$SPOOL_GPU_INDICES"),
    "SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE": _tasks,
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID": _always("0"),
    "SLURM_NNODES SLURM_JOB_NUM_NODES NHOSTS": _always("1"),
    "SGE_TASK_ID": lambda job: _index(job) or "undefined",
}
_VALUE_OF = {name: value for names, value in _VALUES.items() for name in names.split()}
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


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a script that are no comments, numbered."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("#"):
            yield number, line


def _commands(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield the numbered *lines*, those that a backslash continues as one."""
    first, begun = 0, ""
    for number, line in lines:
        first = first if begun else number
        begun += line
        if begun.endswith("\\"):
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

    def __init__(self, text: str, name: str, tasks: TasksAsked, keys: Mapping[str, object]) -> None:
        self._job = _Job(_fresh_id(), name, tasks, keys)
        self._text = text
        self._lines = tuple(_lines(text))
        self.env: dict[str, str] = {}
        self.stdout: str | None = None  # the path that the script reads its output from
        self.told: list[str] = []

    def find(self, exported: Exports) -> None:
        """Search for variables, programs and the default output. *exported* gets a PATH with `srun`."""
        self._find_variables()
        self._find_programs(exported)
        if "stdout" not in self._job.keys:
            self._find_output()

    def _find_variables(self) -> None:
        seen = {"TMPDIR"} if "TMPDIR=" in self._text else set()  # then it is the script's own
        more = [variable for lines, variable in _OF_LINES if lines.search(self._text)]
        outputs = [(0, str(self._job.keys[key])) for key in ("stdout", "stderr") if key in self._job.keys]
        for number, line in (*self._lines, *outputs):
            for name in (found[0].lstrip("${") for each in (_VARIABLE, *more) for found in each.finditer(line)):
                if name in seen:
                    continue
                seen.add(name)
                value = _VALUE_OF[name](self._job) if name in _VALUE_OF else None
                if number == 0 and (value is None or "$" in value):
                    continue  # no path can have it, and the job is doubted for that
                if value is not None:
                    self.env[name] = value
                    if name in _LAUNCHED_BY:
                        which = "launchers such as PyTorch Lightning take a job that has it for one of Slurm"
                        self.told.append(f"line {number}: ${name} is {value} here; {which}")
                elif self._job.many or _OF_AN_ARRAY.fullmatch(name) is None:
                    self._miss(number, f"${name}", _INSTEAD.get(name, ""))

    def _miss(self, number: int, what: str, instead: str) -> None:
        self.told.append(f"line {number}: {what} does not exist in a spool job{f'; {instead}' if instead else ''}")

    def _find_programs(self, exported: Exports) -> None:
        seen = set()
        for number, line in _commands(self._lines):
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
                    self._miss(number, name, _INSTEAD[name])

    def _doubt_srun(self, number: int, words: str) -> None:
        options = _SRUN_OPTIONS.match(words)
        words = options[0] if options is not None else ""
        stated, nodes = _NTASKS.search(words), _NODES.search(words)
        count = int(stated[1]) if stated is not None else self._job.tasks.count
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
            value = _VALUE_OF[name](self._job) or self._job.id
            self.env.setdefault(name if self._job.many or letter == "x" else _NUMBERS[0], value)

    def _find_output(self) -> None:
        for number, line in self._lines:
            for pattern, plain, of_array in _DEFAULT_OUTPUTS:
                if (found := pattern.search(line)) is not None:
                    self.stdout = of_array if self._job.many else plain
                    what = found[0].rstrip("\"')")
                    self.told.append(f"line {number}: {what} is the job's output, so it goes to {self.stdout}")
                    return

    def _stand_in(self, number: int, name: str, exported: Exports) -> None:
        """Let the job find the program that stands for *name* of Slurm, unless there is a real one."""
        from shutil import which

        path = exported.taken.get("PATH")
        instead = "use the command alone" if name == "srun" else _INSTEAD[name]
        if path is None:
            self._miss(number, name, f"{instead}, or let PATH go along: without it, no {name} is found")
            return
        if (found := which(name, path=path)) is None:
            exported.taken["PATH"] = f"{STANDINS}:{path}"
        elif os.path.dirname(found) != STANDINS:
            self.told.append(f"line {number}: {name} is that of Slurm, which knows nothing of this job; {instead}")
            return
        if name == "srun" and self._job.tasks.count > 1:
            self.env.setdefault("SLURM_NTASKS", _tasks(self._job))
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
        calls = {next(filter(None, words)): number for number, line in self._lines for words in _FUNCTION.findall(line)}
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


def _fresh_id() -> str:
    """Return a number for a job. Slurm's stays the same when a job runs again, so it is made when the job is."""
    return str(10**9 + int.from_bytes(os.urandom(8)) % (9 * 10**9))
