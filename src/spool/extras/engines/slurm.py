"""Slurm, by its own commands: their arguments, and the meaning of their answers.

The readers of answers are total: a line that cannot be read is skipped, and an unknown state counts as alive, because
nothing follows from it. docs/FORMAT.md 5.2 has the tables.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from msgspec import Struct

from spool.core import layout
from spool.core.errors import SpoolError, StartRefused, cannot
from spool.core.lifecycle import EngineWord
from spool.core.model import SECOND_NS, Spec
from spool.executors.base import Launch
from spool.extras.engines.language import ArrayRefused, EngineArray, Language, Sighting, is_unanswered, printable
from spool.extras.engines.settings import SlurmConfig, allowed_in_slurm, check_gpus, settings_of
from spool.formats.config import Config
from spool.formats.freetext import one_line
from spool.formats.wrapper import EngineSurroundings
from spool.machine.commands import Command, CommandEnd

_MEBIBYTE, _GIBIBYTE = 1 << 20, 1 << 30
_MINUTE_NS = 60 * SECOND_NS
_PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")
_WITHIN_S = 60.0  # squeue gives up an unreachable controller after 19 s


class SlurmLanguage(Language):
    """The commands and answers of Slurm."""

    name = "slurm"
    has_arrays = logs_ends = True
    title = "Slurm"
    surroundings = EngineSurroundings("slurm", "SLURMD_NODENAME", "SLURM_JOB_ID")

    def __init__(self, config: Callable[[], Config]) -> None:
        self._config = config
        self._sbatch: str | None = None  # its path at the last lookup of Slurm's programs
        self._array_width: int | None = None
        self._array_tasks: int | None = None
        self._memory_ns: int | None = None

    def policy(self) -> SlurmConfig:
        """Return the policy from `[slurm]`."""
        return settings_of(self._config()).slurm

    def check_options(self, options: Sequence[str]) -> None:
        """Refuse options of sbatch that spool sets itself."""
        allowed_in_slurm(tuple(options))

    def missing(self) -> str | None:
        """Return which of Slurm's programs are missing."""
        found = {program: shutil.which(program) for program in _PROGRAMS}
        self._sbatch = found.get("sbatch")
        missing = [program for program, path in found.items() if path is None]
        return f"Slurm is not installed here: no {', '.join(missing)} in PATH" if missing else None

    def identify(self) -> Command:
        """Return the question for the configuration."""
        return _urgent("scontrol", "show", "config")

    def cluster(self, done: CommandEnd) -> str | None:
        """Return the cluster's name in it."""
        if done.status != 0:
            return None
        self._array_width, self._array_tasks = array_width(done.out), array_tasks(done.out)
        self._memory_ns = memory_ns(done.out)
        return cluster_of(done.out)

    def submit(self, launch: Launch, mark: str) -> Command:
        """Return the submission of the wrapper as a batch script, in the environment that every job begins with."""
        log = file_pattern(f"{launch.metadir}/{layout.ENGINE_LOG}")
        said = submission(launch.job, mark, launch.metadir, log)
        return self._submission(launch, (*said, *self._options(launch), launch.script))

    def _options(self, launch: Launch) -> Iterator[str]:
        assert launch.spec is not None
        return options_of(launch.job, launch.spec, self.policy())

    def array_width(self) -> int | None:
        """Return the largest power of ten within `MaxArraySize`."""
        return self._array_width

    def array_tasks(self) -> int | None:
        """Return `max_array_tasks`."""
        return self._array_tasks

    def submit_array(self, launch: Launch, mark: str, array: EngineArray) -> Command:
        """Return the submission of a script that finds the wrapper of each element."""
        log = array_log(array.jobs, array.name, array.first, array.width, array.run)
        said = submission(array.name, mark, array.jobs, log)
        elements = array_option(array.elements, array.at_once)
        script = array_script(array.jobs, array.name, array.first, array.run)
        return self._submission(launch, (*said, *self._options(launch), elements), script)

    def limit_array(self, array_id: str, at_once: int | None) -> Command:
        """Return the change of the limit after the `%` of `--array`; 0 is none."""
        return _urgent("scontrol", "update", f"jobid={array_id}", f"arraytaskthrottle={at_once or 0}")

    def _submission(self, launch: Launch, arguments: Sequence[str], script: str = "") -> Command:
        """Return the call of sbatch; without a file among *arguments* it reads *script*."""
        environment = unaltered(launch.inherited())
        environment |= {key: os.environ[key] for key in NEEDED if key in os.environ}
        # Found like the other commands, by the PATH of this process: that of the job may lack it.
        program = self._sbatch or shutil.which("sbatch") or "sbatch"
        return Command((program, *arguments), environment, _WITHIN_S, standard_input=script, ends_on=RETRIES)

    def submitted(self, done: CommandEnd) -> str | SpoolError | None:
        """Return the id, or the refusal in Slurm's words; a limit on the number of jobs is one for now."""
        if done.status == 0:
            return submitted_id(done.out)
        if has_too_many(done.err):
            words = f"Slurm takes no more jobs for now: {refusal(done.err)}"
            return None if done.out.strip() else StartRefused(words)
        if self.is_silence(done):
            return None
        if has_wrong_array(done.err):
            return ArrayRefused(f"Slurm takes no such array: {refusal(done.err)}")
        return SpoolError(f"Slurm refuses it: {refusal(done.err)}")

    def look(self) -> Sequence[Command]:
        """Return the question for all jobs of this user, including ended ones."""
        return (_urgent("squeue", "--me", "--states=all", f"--format={FIELDS}"),)

    def seen(self, answers: Sequence[CommandEnd]) -> list[Sighting] | None:
        """Return the jobs in squeue's answer."""
        (done,) = answers
        lines = queue_lines(done.out) if done.status == 0 else None
        return None if lines is None else [_sighting(line, each) for line in lines for each in ids(line.id)]

    def memory_ns(self) -> int | None:
        """Return `MinJobAge`."""
        return self._memory_ns

    def cancel(self, ids: Sequence[str], signal: str | None, *, only_waiting: bool, name: str = "") -> Command:
        """Return the call of scancel."""
        how = ("--batch", f"--signal={signal}") if signal is not None else ()
        which = ("--state=PENDING",) if only_waiting else ()
        called = (f"--name={name}",) if name else ()
        return _urgent("scancel", *how, *which, *called, *compressed(ids))

    def is_silence(self, done: CommandEnd) -> bool:
        """Whether the controller has not answered."""
        return is_silence(done.status, done.err)

    def nodes(self, names: Collection[str]) -> Command:
        """Return the question to sinfo."""
        return _urgent("sinfo", "--noheader", "-N", f"--nodes={','.join(names)}", "--format=%N\t%T")

    def nodes_back(self, done: CommandEnd) -> frozenset[str] | None:
        """Return the nodes that are not marked as not responding."""
        return nodes_back(done.out) if done.status == 0 else None

    def nodes_given_up(self) -> frozenset[str]:
        """Return the nodes in `other_hosts_gone`."""
        return frozenset(self._config().other_hosts_gone)

    def last_words(self, log: str) -> tuple[EngineWord, str] | None:
        """Return the last words of slurmstepd."""
        return last_words(log)

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return an environment without variables that would change the output of Slurm's commands."""
        return unaltered(variables) | WHOLE_LISTS

    def attach(self, job_id: str) -> tuple[str, ...]:
        """Return the call of srun that opens a shell within the allocation of a job."""
        return ("srun", f"--jobid={job_id}", "--overlap", "--pty", "sh")


def _urgent(*arguments: str) -> Command:
    return Command(arguments, None, _WITHIN_S, urgent=True)


def _sighting(line: QueueLine, job_id: str) -> Sighting:
    """Return what a line of squeue says of one of its jobs. A job with an unknown state is alive."""
    begun = line.state not in WAITING and line.state not in ENDED
    halted, end = line.state in HALTED, ENDED.get(line.state)
    element = job_id.partition("_")[2]
    return Sighting(
        job_id,
        line.comment,
        line.text,
        begun,
        end,
        line.node,
        halted,
        blocked=is_blocked(line),
        element=int(element) if element.isdecimal() else None,
    )


# What jobs request.


def submission(name: str, mark: str, directory: str, log: str) -> Iterator[str]:
    """Yield the options of sbatch for every job: its script begins in *directory*, and Slurm writes to *log*."""
    yield from (f"--job-name={name}", f"--comment={mark}", "--parsable", "--no-requeue", "--open-mode=append")
    yield from ("--propagate=NONE", "--input=/dev/null", "--export=ALL", f"--chdir={directory}", f"--output={log}")


def options_of(name: str, spec: Spec, config: SlurmConfig) -> Iterator[str]:
    """Yield the options of sbatch for the request of the job *name*.

    Raises SpoolError for a request that Slurm cannot express.
    """
    request = spec.request
    yield from ("--nodes=1", "--ntasks=1", f"--cpus-per-task={max(1, request.cpus)}")
    if request.memory_bytes is not None:
        yield f"--mem={max(1, -(-request.memory_bytes // _MEBIBYTE))}M"
    if request.gpus:
        yield f"--gres={_gres(name, spec, config)}"
    if spec.time_limit_ns is not None:
        yield f"--time={minutes(spec.time_limit_ns)}"
    for key in ("partition", "account", "qos"):
        value = getattr(config, key)
        if key == "qos" and spec.preemptible:
            value = config.preemptible_qos or value
        if value is not None:
            yield f"--{key}={value}"
    yield from config.options
    yield from spec.part("engines") or ()


def file_pattern(path: str) -> str:
    """Return *path* for an option that gives a meaning to `%`."""
    return path.replace("%", "%%")


# Arrays.


def array_width(configuration: str) -> int | None:
    """Return the largest power of ten within `MaxArraySize` of `scontrol show config`; None: too small for arrays."""
    match = re.search(r"^MaxArraySize\s*=\s*([0-9]{1,9})\s*$", configuration, re.MULTILINE | re.ASCII)
    digits = len(match[1]) - 1 if match else 0
    return 10**digits if digits and match and int(match[1]) >= 10**digits else None


def array_tasks(configuration: str) -> int | None:
    """Return `max_array_tasks` of `scontrol show config`: how many elements an array may have; None: no such limit."""
    wanted = r"^SchedulerParameters\s*=.*\bmax_array_tasks=([1-9][0-9]{0,8})\b"
    match = re.search(wanted, configuration, re.MULTILINE | re.ASCII)
    return int(match[1]) if match else None


def array_option(elements: Sequence[int], at_once: int | None) -> str:
    """Return `--array` for *elements*, which ascend: `--array=0-3,7%2`."""
    limit = f"%{at_once}" if at_once is not None else ""
    return f"--array={_ranges(elements)}{limit}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as Slurm lists them, `0-3,7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def array_log(jobs: str, name: str, first: int, width: int, run: int) -> str:
    """Return the pattern for `engine.log` of the task `first + element`: its index has as many zeros as needed."""
    index = f"{first // width}%{len(str(width)) - 1}a" if first else "%a"
    return f"{file_pattern(jobs)}/{name}_{index}/{run}/engine.log"


_ARRAY_SCRIPT = """\
#!/bin/sh
# An element of this array is a task of an array of spool: it turns into the wrapper of its run.
SPOOL_ENGINE_ID=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
export SPOOL_ENGINE_ID
exec /bin/sh {jobs}/{name}_$(({first} + SLURM_ARRAY_TASK_ID))/{run}/run.sh
"""


def array_script(jobs: str, name: str, first: int, run: int) -> str:
    """Return the script of an array: it finds the wrapper of each task."""
    return _ARRAY_SCRIPT.format(jobs=shlex.quote(jobs), name=name, first=first, run=run)


def still_ends(job_id: str, asked_ns: int, limit_ns: int | None) -> str:
    """Return when Slurm ends a job that has a later limit now, and how an administrator can change that."""
    most = "UNLIMITED" if limit_ns is None else minutes(limit_ns)
    raised = f"`scontrol update jobid={job_id} timelimit={most}`"
    return f"Slurm still ends it after {minutes(asked_ns)} min, unless an administrator raises that too: {raised}"


def minutes(time_limit_ns: int) -> int:
    """Return the time limit for Slurm, in minutes: it ends later than spool's own.

    Slurm counts in minutes, and from the moment at which it makes the node ready.
    """
    return -(-time_limit_ns // _MINUTE_NS) + 1


def _gres(name: str, spec: Spec, config: SlurmConfig) -> str:
    request = spec.request
    check_gpus(name, spec, "slurm")
    if request.gpu_memory_bytes is not None:
        if config.gpu_memory != "shard":
            why = "it shares a GPU (gpu_memory), which Slurm is not asked for"
            remedy = 'ask for whole GPUs, or write gpu_memory = "shard" in [slurm] if Slurm has shards of 1 GiB'
            raise SpoolError(cannot("hand", f"job {name} to Slurm", why, remedy=remedy))
        return f"shard:{-(-request.gpu_memory_bytes // _GIBIBYTE) * request.gpus}"
    if not request.gpu_types:
        return f"gpu:{request.gpus}"
    (name,) = request.gpu_types
    return f"{config.gpus.get(name, f'gpu:{name}')}:{request.gpus}"


# What Slurm reports.

FIELDS = "%i\t%T\t%r\t%N\t%k"
"""The fields for `squeue -o`: id, state, reason, nodes and, last because it may hold anything, comment."""


class QueueLine(Struct, frozen=True):
    """One job as squeue shows it."""

    id: str
    state: str
    reason: str
    node: str
    comment: str

    @property
    def text(self) -> str:
        """The state and the reason, as in the output of squeue."""
        return self.state if self.reason in ("", "None", "(null)") else f"{self.state} ({self.reason})"


def queue_lines(text: str) -> list[QueueLine] | None:
    """Return the jobs in an answer of squeue; None without its title line, since then it is no answer.

    Unreadable lines are skipped, and so is an incomplete last line.
    """
    found, answered = [], False
    for line in text.split("\n")[:-1]:
        fields = line.split("\t", 4)
        if len(fields) != 5:
            continue
        if fields[0][:1].isdigit() and fields[1].strip():
            state, *rest = (printable(each) for each in fields[1:])
            found.append(QueueLine(fields[0].strip(), state.upper(), *rest))
        else:
            answered = answered or fields[0].strip() == "JOBID"
    return found if answered else None


_TOGETHER = re.compile(r"([0-9]{1,18})_\[([0-9,:-]+)(?:%[0-9]+)?\]", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([1-9][0-9]{0,8}))?)?", re.ASCII)
_MOST_ELEMENTS = 10_000_000  # more than any array of Slurm has


def ids(text: str) -> Iterator[str]:
    """Yield the ids in one of squeue's: it lists the elements of an array that wait as one, `7_[0-3,8-20:2%4]`."""
    match = _TOGETHER.fullmatch(text)
    ranges = [_RANGE.fullmatch(each) for each in match[2].split(",")] if match else []
    if match is None or None in ranges:
        yield text
        return
    for each in filter(None, ranges):
        first, last = int(each[1]), int(each[2] or each[1])
        for element in range(first, min(last, first + _MOST_ELEMENTS) + 1, int(each[3] or 1)):
            yield f"{match[1]}_{element}"


WHOLE_LISTS = {"SLURM_BITSTR_LEN": "0"}
"""The environment in which squeue cuts no list of elements short."""

_FOR_ROOM = frozenset(["", "None", "(null)", "Priority", "Resources", "Cleaning", "Prolog"])


def is_blocked(line: QueueLine) -> bool:
    """Whether a job waits for something other than room: a node, a limit, a licence, or a user."""
    return line.state in WAITING and line.state != "CONFIGURING" and line.reason not in _FOR_ROOM


def compressed(ids: Sequence[str]) -> list[str]:
    """Return *ids* with the elements of each array as one, `7_[0-3,9]`."""
    arrays: dict[str, list[int]] = {}
    for each in ids:
        job, _, element = each.partition("_")
        arrays.setdefault(job, []).extend([int(element)] if element.isdecimal() else [])
    return [f"{job}_[{_ranges(sorted(set(elements)))}]" if elements else job for job, elements in arrays.items()]


WAITING = frozenset(
    ["PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"]
)
HALTED = frozenset(["SUSPENDED", "STOPPED"])
RUNNING = frozenset(["RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING", "SUSPENDED", "STOPPED"])
ENDED = {
    "COMPLETED": EngineWord.COMPLETED,
    "FAILED": EngineWord.FAILED,
    "CANCELLED": EngineWord.CANCELLED,
    "TIMEOUT": EngineWord.TIMEOUT,
    "DEADLINE": EngineWord.TIMEOUT,
    "OUT_OF_MEMORY": EngineWord.OUT_OF_MEMORY,
    "NODE_FAIL": EngineWord.NODE_LOST,
    "REVOKED": EngineWord.NODE_LOST,
    "PREEMPTED": EngineWord.PREEMPTED,
    "BOOT_FAIL": EngineWord.NOT_STARTED,
}

_LAST_WORDS = (
    ("DUE TO TIME LIMIT", EngineWord.TIMEOUT),
    ("DUE TO PREEMPTION", EngineWord.PREEMPTED),
    ("DUE TO JOB REQUEUE", EngineWord.PREEMPTED),  # by a user who wants its node, and wants it to run again
    ("DUE TO NODE FAILURE", EngineWord.NODE_LOST),
    ("exceeded memory limit", EngineWord.OUT_OF_MEMORY),
    ("oom-kill", EngineWord.OUT_OF_MEMORY),
    ("oom_kill", EngineWord.OUT_OF_MEMORY),
    ("CANCELLED AT", EngineWord.CANCELLED),
    ("Error running slurm prolog", EngineWord.NOT_STARTED),  # Slurm drains the node, and cancels the job
)


def last_words(log: str) -> tuple[EngineWord, str] | None:
    """Return how Slurm ended a job, and in which words: the last line of `engine.log` that says so."""
    for line in reversed(log.splitlines()):
        if "slurm" in line:  # else it is a line of the job
            for words, meaning in _LAST_WORDS:
                if words in line:
                    return meaning, one_line(line)
    return None


def submitted_id(text: str) -> str | None:
    """Return the id that `sbatch --parsable` has printed, `ID` or `ID;CLUSTER` on a line of its own.

    None: there is no such line, or more than one, so that the id is unknown.
    """
    found = re.findall(r"^[ \t]*([1-9][0-9]{0,18})(?:;\S*)?[ \t\r]*$", text, re.MULTILINE | re.ASCII)
    return found[0] if len(found) == 1 else None


# Slurm's own words for its errors of communication, whole: a job may be refused because of its sockets, and a plugin
# may print anything.
_UNREACHABLE = re.compile(
    r"unable to contact slurm|slurm backup controller in standby|socket timed out|missing socket error|"
    r"connection (?:timed out|refused|reset)|communication (?:connection|shutdown) failure|"
    r"zero bytes were transmitted|message (?:send|receive) failure|failed to send entire message|"
    r"received (?:zero length message|message length < 0)|header lengths are longer|insane message length|"
    r"unexpected message received|protocol (?:authentication error|version)|incompatible versions|"
    r"stream version number error|can't find an address|authentication credential|munge encode failed|"
    r"transport endpoint|no route to host|network is unreachable|broken pipe|temporarily unavailable|no answer from|"
    r"not responding|unable to (?:resolve|establish)|fatal: .*(?:configuration|plugin|auth|munge|credential)",
    re.IGNORECASE,
)
_REASON = re.compile(r"(?:submission failed|Kill job error on job id \S+): (.*)")


def is_silence(status: int | None, err: str) -> bool:
    """Whether a command failed because it got no answer, and not because of its request."""
    return is_unanswered(status, "\n".join(_REASON.findall(err)) or err, _UNREACHABLE)


def refusal(err: str) -> str:
    """Return why sbatch has refused a job, in Slurm's words."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    said = [re.sub(r"^sbatch: (?:error: )?(?:Batch job submission failed: )?", "", line) for line in lines]
    return one_line("; ".join(dict.fromkeys(filter(None, said)))) or "sbatch failed and did not say why"


RETRIES = "temporarily unable to accept job"
"""What sbatch says when it waits, for up to two minutes, for the end of one of all jobs of the cluster."""

# Limits on submissions, as QOSMaxSubmitJobPerUserLimit, and troubles of the controller's own: a full disk, a restart.
_TOO_MANY = re.compile(
    rf"\b(?:Assoc|QOS)\w*Submit\w*Limit\b|{RETRIES}|Unable to create job record, try again|"
    r"I/O error writing script/environment to file|Requested operation is presently disabled"
)


def has_too_many(err: str) -> bool:
    """Whether sbatch refused a job for now: there are too many, or the controller cannot store it."""
    return _TOO_MANY.search(err) is not None


def memory_ns(configuration: str) -> int | None:
    """Return `MinJobAge` of `scontrol show config`, for which ended jobs are listed; None: it does not say."""
    match = re.search(r"^MinJobAge\s*=\s*([0-9]{1,9}) sec", configuration, re.MULTILINE | re.ASCII)
    seconds = int(match[1]) if match else None
    return None if seconds is None else seconds * SECOND_NS if seconds else _FOR_EVER_NS


_FOR_EVER_NS = 1 << 62


def has_wrong_array(err: str) -> bool:
    """Whether sbatch refused an array: its limits of arrays are smaller than they were."""
    return "Invalid job array specification" in err


def cluster_of(configuration: str) -> str | None:
    """Return the name of the cluster from the output of `scontrol show config`."""
    match = re.search(r"^ClusterName\s*=\s*(\S+)", configuration, re.MULTILINE)
    return match[1] if match else None


def nodes_back(text: str) -> frozenset[str]:
    """Return the responding nodes in the output of sinfo: lines of a name and a state. A final `*`: no response.

    A node that is down does not count: Slurm may not have noticed yet that it does not respond.
    """
    pairs = [line.split("\t") for line in text.splitlines()]
    return frozenset(pair[0].strip() for pair in pairs if len(pair) == 2 and not _AWAY.match(pair[1].strip()))


_AWAY = re.compile(r".*\*$|down|fail|unk|no_respond|error|future", re.IGNORECASE)


def unaltered(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for Slurm's commands, without variables that would change their output."""
    return {key: value for key, value in variables.items() if not key.startswith(_PREFIXES) or key in NEEDED}


_PREFIXES = ("SLURM_", "SBATCH_", "SQUEUE_", "SCANCEL_", "SINFO_", "SCONTROL_", "SALLOC_", "SRUN_", "SPANK_", "_SLURM_")
NEEDED = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""The variables by which Slurm's commands find their cluster and authenticate."""
