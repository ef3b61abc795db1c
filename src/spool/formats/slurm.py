"""The interface to Slurm: the options of `sbatch`, the lines of `squeue`, the words for states. Values and text only.

The parsers are total: a line that cannot be read is skipped, and an unknown state counts as alive, because nothing
follows from it. docs/FORMAT.md 5.2 has the tables.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from spool.core.errors import InvalidValue, SpoolError, cannot
from spool.core.lifecycle import EngineWord
from spool.core.model import SECOND_NS, Spec
from spool.core.units import whole_words
from spool.formats import engines
from spool.formats.engines import EngineConfig, check_gpu_kind
from spool.formats.freetext import one_line

_MEBIBYTE, _GIBIBYTE = 1 << 20, 1 << 30
_MINUTE_NS = 60 * SECOND_NS
_MOST_WORDS = 200  # characters of Slurm's words about a job
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@/+*-]*", re.ASCII)


class SlurmConfig(EngineConfig, frozen=True):
    """The table `[slurm]` of the configuration: how jobs are handed to Slurm."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    preemptible_qos: str | None = None
    gpus: Mapping[str, str] = field(default_factory=dict)  # GPU type in job files -> Slurm's name
    gpu_memory: str = "refuse"  # or "shard"


# What users write.

_OURS = (
    *("job-name", "comment", "output", "error", "input", "open-mode", "chdir", "wrap", "export", "export-file"),
    *("propagate", "parsable", "requeue", "no-requeue", "array", "dependency", "begin", "hold", "wait", "test-only"),
    *("time", "time-min", "signal", "mem", "mem-per-cpu", "mem-per-gpu", "nodes", "ntasks", "ntasks-per-node"),
    *("cpus-per-task", "cpus-per-gpu", "gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"),
    *("clusters", "uid", "gid", "get-user-env", "version", "help", "usage", "quiet", "tres-per-task"),
)
_OURS_SHORT = frozenset("JoeiDatcnNGdbHWQMVh")
_OPTION = re.compile(r"--[A-Za-z][A-Za-z0-9-]*|-[A-Za-z].*", re.ASCII)
_FLAGS_SHORT = frozenset("kKOsvX")  # one letter, without a value: another letter may follow


def allowed(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return further options of sbatch unchanged. Raises InvalidValue if one sets what spool sets itself."""
    for option in options:
        _check(option)
    return options


def _check(option: str) -> None:
    name = re.split(r"[=\s]", option, maxsplit=1)[0]
    if not option.isprintable() or _OPTION.fullmatch(name) is None:
        raise InvalidValue(f'{option!a} is no option; write name and value as one, as in "--constraint=ib"')
    if name.startswith("--"):
        # Slurm's programs accept any prefix of an option's name.
        ours = any(each.startswith(name[2:]) for each in _OURS)
    else:
        ours = any(letter in _OURS_SHORT for letter in _letters(name[1:]))
    if ours:
        raise InvalidValue(f"{option!a} sets what spool sets itself")


def _letters(bundle: str) -> Iterator[str]:
    """Yield the one-letter options in a bundle; the rest after the first that takes a value is that value."""
    for letter in bundle:
        yield letter
        if letter not in _FLAGS_SHORT:
            return


def word(text: str) -> str:
    """Return *text* if it can name a partition or the like. Raises InvalidValue."""
    if _SAFE.fullmatch(text) is None:
        raise InvalidValue(f"{text!a} is no name in Slurm")
    return text


# What jobs request.


def submission(name: str, mark: str, directory: str, log: str) -> Iterator[str]:
    """Yield the options of sbatch for every job: its script begins in *directory*, and Slurm writes to *log*."""
    yield from (f"--job-name={name}", f"--comment={mark}", "--parsable", "--no-requeue", "--open-mode=append")
    yield from ("--propagate=NONE", "--input=/dev/null", "--export=ALL", f"--chdir={directory}", f"--output={log}")


def options(name: str, spec: Spec, config: SlurmConfig) -> Iterator[str]:
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
    yield from spec.executor_options


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


def minutes(time_limit_ns: int) -> int:
    """Return the time limit for Slurm, in minutes: it ends later than spool's own.

    Slurm counts in minutes, and from the moment at which it makes the node ready.
    """
    return -(-time_limit_ns // _MINUTE_NS) + 1


def _gres(name: str, spec: Spec, config: SlurmConfig) -> str:
    request = spec.request
    check_gpu_kind(name, spec, "slurm")
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
            state, *rest = (_printable(each) for each in fields[1:])
            found.append(QueueLine(fields[0].strip(), state.upper(), *rest))
        else:
            answered = answered or fields[0].strip() == "JOBID"
    return found if answered else None


def _printable(text: str) -> str:
    text = whole_words(text.strip(), _MOST_WORDS)
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


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
    return engines.is_silence(status, "\n".join(_REASON.findall(err)) or err, _UNREACHABLE)


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


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for Slurm's commands, without variables that would change their output."""
    return {key: value for key, value in variables.items() if not key.startswith(_PREFIXES) or key in NEEDED}


_PREFIXES = ("SLURM_", "SBATCH_", "SQUEUE_", "SCANCEL_", "SINFO_", "SCONTROL_", "SALLOC_", "SRUN_", "SPANK_", "_SLURM_")
NEEDED = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""The variables by which Slurm's commands find their cluster and authenticate."""


def cancel(ids: Sequence[str], signal: str | None, *, only_waiting: bool, name: str = "") -> tuple[str, ...]:
    """Return the command that cancels jobs, or with *signal* one that only signals the processes of their scripts.

    With a *name*, only those of *ids* whose job has that name.
    """
    how: Iterable[str] = ("--batch", f"--signal={signal}") if signal is not None else ()
    which: Iterable[str] = ("--state=PENDING",) if only_waiting else ()
    called: Iterable[str] = (f"--name={name}",) if name else ()
    return ("scancel", *how, *which, *called, *compressed(ids))


def attach(job_id: str) -> tuple[str, ...]:
    """Return the command that opens a shell beside the processes of a job, within its allocation."""
    return ("srun", f"--jobid={job_id}", "--overlap", "--pty", "sh")
