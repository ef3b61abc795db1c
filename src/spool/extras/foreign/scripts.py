"""Scripts for other schedulers, as `cli.scripts` asks for them: their shell, options, and what they look for in jobs.

The text of a script is searched for variables, `srun`, `module` and `conda activate`. A variable of Slurm that it reads
goes into the job's `env`, and no other, because launchers take a job with such variables for one of Slurm. What is
constant is written as it is; what the job is granted is a reference such as `$SPOOL_CPUS` (docs/FORMAT.md 7).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from shutil import which

from spool.cli import joboptions
from spool.cli.fastsubmit import MAX_HEAD_BYTES
from spool.cli.render import tell
from spool.cli.submission import SHELLS, Asked, ScriptText, head_lines, read_options
from spool.client import submit as submitting
from spool.client.draft import Exports, escaped, matching, placeholders
from spool.core.errors import InvalidValue, UsageError, cannot
from spool.core.reasons import count_of
from spool.extras.foreign import lines
from spool.extras.foreign.lines import Directive, NoEquivalent, dependencies
from spool.formats.values import array
from spool.machine.host import login_environment
from spool.store.disk import read_file
from spool.store.glance import config_if


class ForeignScripts:
    """Reads scripts for other schedulers, for jobs of one spool: the `cli.scripts.OtherScripts` of this capability."""

    def __init__(self, root: str) -> None:
        self._root = root

    is_line = staticmethod(lines.is_line)

    def shell(self, script: bytes, own: bytes, what: str, asked: Asked) -> str | None:
        """Return the shell that runs a script instead of what its *own* `#!` line says; None if that one does.

        PBS, Grid Engine and others take the shell of `-S`, even if the script's own line names another shell, and
        without either the login shell.
        """
        head = [line for _, line in head_lines(script)]
        shell = next(filter(None, map(lines.interpreter, head)), None)
        if shell is None and (own or not any(map(lines.is_line_of_a_shell, head))):
            return None
        if own and shell is not None:
            before = os.path.basename(own.split()[-1].decode(errors="replace"))
            if before == os.path.basename(shell) or not {before, os.path.basename(shell)} <= SHELLS:
                return None
        if shell is not None and not os.access(shell, os.X_OK):
            shell = which(os.path.basename(shell)) or shell
        if shell is None:
            login = login_environment()["SHELL"]
            shell = login if os.path.basename(login) in SHELLS else "/bin/sh"
            tell(f"{what}: it has no `#!` line; {shell} runs it, as the other scheduler would")
        elif asked.verbose:
            tell(f"{what}: {shell} runs it, as its -S says")
        return shell

    def values(self, script: bytes, what: str, asked: Asked, own: joboptions.Values) -> joboptions.Values:
        """Return the options in the lines of a script, with its *own* ones, which come first. Raises UsageError."""
        if asked.ignore_directives:
            if ignored := [number for number, line in head_lines(script) if lines.is_line(line)]:
                tell(f"{what}: the lines for another scheduler are ignored, from line {ignored[0]} on")
            return own
        found = list(_directives(script, what))
        _check_unread(script, what, refused=not found and not own)
        if not found:
            return own
        values = self._carried_over(found, what, asked, own)
        if "name" in values and b"singleton" not in script:  # such a job is not submitted beside another
            values["job_name"] = values.pop("name")
        both = {"env": [*values["env"], *own.get("env", [])]} if values.get("env") else {}
        return {**values, **own, **both}

    def _carried_over(
        self, found: Sequence[Directive], what: str, asked: Asked, own: joboptions.Values
    ) -> joboptions.Values:
        """Return what the lines state that nothing else does, and tell of what is lost. Raises UsageError."""
        values: joboptions.Values = {}
        stated = asked.keys | own.keys()
        errors: list[str] = []
        notes, told = 0, False
        limited = asked.limited or "time_limit" in own
        for one in lines.convert(found, limited=limited):
            if one.key == "notify.to" and one.key in stated:
                continue
            if one.lost is not None and one.lost.matters and one.key not in stated:
                errors.append(f"line {one.directive.line}: {one.directive}: {one.lost}")
                continue
            keys, _ = read_options(one.words)
            if keys and keys.keys() <= stated - {"env"}:
                continue
            if one.lost is None or one.key not in stated:
                if asked.verbose or not one.is_note:
                    told = True
                    tell(f"{what}: {one}")
                else:
                    notes += 1
            for key, texts in keys.items():
                values.setdefault(key, []).extend(texts)
        if errors:
            remedy = "--ignore-directives ignores all lines for other schedulers"
            raise UsageError(cannot("carry over", f"the options of {what}", "; ".join(errors), remedy=remedy))
        if notes:
            tell(f"{what}: {count_of(notes, 'more note' if told else 'note')} on lines for another scheduler: -v")
        return values

    def adapted(self, values: joboptions.Values) -> joboptions.Values:
        """Return *values* without sbatch's `--dependency=singleton`, unless a job has that name."""
        needed = values.get("depends_on", [])
        if "singleton" not in needed or submitting.ever_used(self._root, "singleton"):
            return values
        tell("--dependency=singleton is not needed here: jobs of one name run one at a time")
        return {**values, "depends_on": [text for text in needed if text != "singleton"]}

    def surround(
        self, source: ScriptText, name: str, given: dict[str, object], exported: Exports, freely: bool
    ) -> None:
        """Add what a script or command for another scheduler looks for in its job. *freely*: without `--export`."""
        config = config_if(self._root, b"executor")
        executor = given.get("executor", config.executor if config is not None else None)
        if executor != "slurm":  # which gives a job the variables itself
            head = head_lines(source.text.encode(errors="replace"))
            read = [line for _, line in head] if source.is_script and not source.ignores_lines else []
            tasks = lines.tasks_of([one for line in read for one in lines.directives(0, line)])
            found = ScriptNeeds(source.text, name, tasks, given)
            found.find(exported)
            if source.is_script:
                found.find_functions(exported, freely=freely)
            for why in found.told:
                tell(f"{source.what}: {why}")
            own = given.get("env", {})
            if found.env and isinstance(own, dict):
                given["env"] = {**found.env, **own}
            if found.stdout:
                given["stdout"] = found.stdout
        for key in given.keys() & {"stdout", "stderr"}:
            given[key] = output_path(str(given[key]), name, given)


def in_our_words(text: str) -> list[str] | None:
    """Return sbatch's `afterok:a:b,afterany:c` in the words of `--depends-on`; None for another text.

    Raises InvalidValue.
    """
    if not text.startswith("after"):
        return None
    try:
        return dependencies(text, numbers=True)[1::2]
    except NoEquivalent as error:
        raise InvalidValue(f"cannot use --depends-on {text}: {error}") from None


def _directives(script: bytes, what: str) -> Iterator[Directive]:
    """Yield the options for other schedulers: those in the head; for gflow, which reads the whole file, all."""
    head = dict(head_lines(script))
    text = script[:MAX_HEAD_BYTES].decode(errors="surrogateescape")
    for number, line in enumerate(re.split("\r?\n", text), 1):
        if number not in head and lines.is_line(line) and not lines.is_line(line, late=True):
            tell(f"{what}: line {number}: this line comes after the first command and is ignored: {line.strip()}")
            continue
        try:
            yield from lines.directives(number, line)
        except ValueError as error:
            why = f"{str(error).lower()} in {line!r}"
            raise UsageError(cannot("read", what, why, where=f"line {number}")) from None


def _check_unread(script: bytes, what: str, *, refused: bool) -> None:
    """Tell about lines for a scheduler whose lines are not read here, or raise UsageError if nothing else is read."""
    unread = [(number, line) for number, line in head_lines(script) if lines.is_unread(line)]
    if not unread:
        return
    more = f" and {count_of(len(unread) - 1, 'more line')}" if len(unread) > 1 else ""
    why = f"line {unread[0][0]}: `{unread[0][1]}`{more} for a scheduler whose lines are not read"
    if refused:
        remedy = "write what they say in lines such as `#SPOOL --cpus 8 --gpus 1`, or give --ignore-directives"
        raise UsageError(cannot("carry over", f"the options of {what}", why, remedy=remedy))
    tell(f"{what}: {why}")


STANDINS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standins")
"""The directory of programs that stand for those of Slurm in a job."""


def _values_of(name: str, tasks: tuple[int, int | None], keys: Mapping[str, object]) -> Mapping[str, str]:
    """Return the variables of other schedulers that a job has, with their values."""
    many = frozenset(placeholders(keys))
    try:
        indices = sorted(array(str(keys["array"])).indices) if "array" in keys else []
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
        "SLURM_JOB_ID SLURM_JOBID PBS_JOBID LSB_JOBID": f"{number}{{index}}" if many else number,
        "JOB_ID": number,
        "SLURM_JOB_NAME PBS_JOBNAME LSB_JOBNAME JOB_NAME": name if many else "$SPOOL_JOB",
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
        found["SLURM_ARRAY_TASK_ID GFLOW_ARRAY_TASK_ID PBS_ARRAY_INDEX PBS_ARRAYID LSB_JOBINDEX HQ_TASK_ID"] = "{index}"
    if indices:
        found["SLURM_ARRAY_TASK_COUNT"] = str(len(indices))
        found["SLURM_ARRAY_TASK_MIN SGE_TASK_FIRST"] = str(indices[0])
        found["SLURM_ARRAY_TASK_MAX SGE_TASK_LAST"] = str(indices[-1])
        found["SLURM_ARRAY_TASK_STEP SGE_TASK_STEPSIZE"] = str(step)
    return {each: value for names, value in found.items() for each in names.split()}


_OF_AN_ARRAY = re.compile(r"\w+_ARRAY_\w+|PBS_ARRAYID|SGE_TASK_\w+|LSB_JOBINDEX|HQ_TASK_ID")
_NUMBERS = ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "JOB_ID")
_NUMBERS_OF_ARRAYS = ("SLURM_ARRAY_JOB_ID", "PBS_ARRAY_ID", "JOB_ID")
_DEFAULT_OUTPUTS = (
    (re.compile(r"\bslurm-[\"']?[$*?{][^\s;&|/]*"), "slurm-%j.out", "slurm-%A_%a.out"),
    (re.compile(r"\.o[\"']?\$\{?(?:JOB_ID|PBS_JOBID)\b"), "%x.o%j", "%x.o%A.%a"),
)
"""Where other schedulers write the output that has no path: how a script names it, and the path, also in an array."""
_INSTEAD = {
    "SLURM_RESTART_COUNT": "use $SPOOL_ATTEMPT, which begins with 1",
    **dict.fromkeys(("SLURM_TMPDIR", "TMPDIR"), "use `mktemp -d`"),
    "srun": "use the command alone",
    **dict.fromkeys(("sbatch", "qsub", "bsub"), "use spool submit"),
    **dict.fromkeys(("squeue", "qstat", "bjobs"), "use spool show $SPOOL_JOB"),
    **dict.fromkeys(("sacct", "sstat", "seff"), "use spool seff $SPOOL_JOB"),
    **dict.fromkeys(("scancel", "qdel"), "use spool cancel $SPOOL_JOB"),
    "scontrol": "for `scontrol requeue` use spool requeue, for `scontrol show hostnames` hostname",
}
_GPU_PICKED = re.compile(r"CUDA_VISIBLE_DEVICES(['\"]\] *= *|=)['\"]?(\d|\$[({]*\w*(LOCALID|PROCID|TASK_ID|INDEX)\b)")
"""A GPU that a script picks by itself, in shell or Python: its number is that of the machine, not of the job."""
_VARIABLE = re.compile(r"\b(?:(?:SLURMD?|PBS|SBATCH|GFLOW|SGE_TASK|LSB)_[A-Z_]+|HQ_TASK_ID|NCPUS)\b")
_OF_LINES = (
    (
        re.compile(r"^#\$[ \t]*-", re.MULTILINE),
        re.compile(r"\bSGE_[A-Z_]+\b|\$\{?(NSLOTS|NHOSTS|JOB_ID|JOB_NAME|TMPDIR)\b"),
    ),
    (re.compile(r"^#PBS\b", re.MULTILINE), re.compile(r"\$\{?TMPDIR\b")),
)
"""Variables without a prefix of their own, which mean that only in a script with lines for its scheduler."""
_AT = r"(?:^|[;&|(`]|=[\"']|\b(?:time|exec|if|while|then|do|else|env)\s|\btrap\s+['\"])\s*(?:[A-Za-z_]\w*=\S*\s+)*"
_PROGRAM = re.compile(
    rf"{_AT}(srun|sbatch|scontrol|squeue|scancel|sacct|sstat|seff|qsub|qstat|qdel|bsub|bjobs)(?=\s)([^;&|]*)"
)
_SOURCES = r"(?:\bsource|(?:^|[;&\s])\.)\s+\S*"
_FUNCTIONS = {  # how a script calls them, how it defines them, what has those of the caller, and what defines them
    "module": (
        re.compile(rf"{_AT}(module|ml)\s"),
        re.compile(rf"\A#!.*\s-\w*l|{_SOURCES}(?:module|lmod|profile(?!\.d)|bashrc)", re.MULTILINE),
        ("BASH_FUNC_*module*", "BASH_FUNC_ml*", "MODULE*", "LMOD_*", "LOADEDMODULES", "_LMFILES_"),
        ". /usr/share/lmod/lmod/init/{0}",
    ),
    "conda": (
        re.compile(rf"{_AT}(conda\s+activate)\b"),
        re.compile(rf"{_SOURCES}(?:conda|mamba|activate|bashrc)|\bshell(?:\.\w+)? hook", re.MULTILINE),
        ("BASH_FUNC_*conda*", "BASH_FUNC_*mamba*", "CONDA_*", "MAMBA_*"),
        'eval "$(conda shell.{1} hook)"',
    ),
    "mamba": (
        re.compile(rf"{_AT}((?:micro)?mamba\s+activate)\b"),
        re.compile(rf"{_SOURCES}(?:mamba|activate|bashrc)|mamba\s+shell\b", re.MULTILINE),
        ("BASH_FUNC_*mamba*", "MAMBA_*", "CONDA_*"),
        'eval "$({2} shell hook --shell {1})"',
    ),
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
    if not is_array:  # the usual name of a task's file, also where a script is submitted without `--array`
        pattern = re.sub("%[0-9]*A([-_.]?)%[0-9]*a", "%A", pattern)
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
        if picking := [number for number, line in _lines(self._text) if _GPU_PICKED.search(line)]:
            why = "a number in CUDA_VISIBLE_DEVICES picks a GPU that may be in use; --gpus picks one that is free"
            self.told.append(f"line {picking[0]}: {why}")
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
                    if name in ("SLURM_NTASKS", "SLURM_PROCID"):
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
                if name == "srun" and self._tasks > 1 and re.search(r"\s(?:-n|--ntasks)", words) is None:
                    why = f"srun would start {self._tasks} tasks, but a job of spool is one task, so this will fail"
                    self.told.append(f"line {number}: {why}; `mpirun -n {self._tasks}` starts several on this machine")
                its = re.match(r"srun\b|scontrol\s+(?:show\s+hostnames?|requeue)\b", f"{name}{words}")
                what = its[0] if its is not None else name
                if what in seen:
                    continue
                seen.add(what)
                if its is not None:
                    self._stand_in(number, name, exported)
                else:
                    self._miss(number, name)

    def _find_output(self) -> None:
        for number, line in _lines(self._text):
            for pattern, plain, of_array in _DEFAULT_OUTPUTS:
                if pattern.search(line) is not None:
                    self.stdout = of_array if self._is_array else plain
                    self.told.append(f"line {number}: this is the job's output, so it goes to {self.stdout}")
                    return

    def _stand_in(self, number: int, name: str, exported: Exports) -> None:
        """Let the job find the program that stands for *name* of Slurm, unless there is a real one."""
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
        if name == "srun" and re.search(r"^#SBATCH\b.*\s--open-mode[= ]a", self._text, re.MULTILINE):
            self.env.setdefault("SLURM_OPEN_MODE", "a")

    def find_functions(self, exported: Exports, *, freely: bool) -> None:
        """Let the shell functions of the caller that the script calls and does not define go along.

        *freely*: without `--export`. Only bash takes functions from its environment.
        """
        first = self._text.partition("\n")[0]
        is_bash = "bash" in first
        if re.match(r"#!\S*/t?csh\b", first) is not None:  # reads its startup file in scripts too
            return
        text = self._text
        with suppress(OSError):
            begun = (read_file(os.path.expanduser("~/.bashrc")) or b"").partition(b"conda initialize")[0]
            if re.search(rb"(?m)^[^#\n]*\breturn\b", begun):  # a script gets no further, as on Debian and Ubuntu
                text = text.replace("bashrc", "")
        for calls, defines, of_functions, definition in _FUNCTIONS.values():
            named = {found[1]: number for number, line in _lines(self._text) for found in calls.finditer(line)}
            if not named or defines.search(text) is not None:
                continue
            if freely and is_bash:
                exported.take(matching(of_functions, os.environ), os.environ)
            for name, number in named.items():
                if not (is_bash and f"BASH_FUNC_{name.split()[0]}%%" in exported.taken):
                    why = "needs a shell function that the job does not have"
                    before = definition.format(*("bash", "bash") if is_bash else ("sh", "posix"), name.split()[0])
                    self.told.append(f"line {number}: `{name}` {why}; write `{before}` before it")
