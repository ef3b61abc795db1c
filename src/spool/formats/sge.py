"""The interface to Grid Engine: the options of `qsub`, the answers of `qstat` and `qhost`, the accounting file.

Values and text only. The parsers are total: what cannot be read is skipped, and an unknown state counts as alive,
because nothing follows from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from spool.core.errors import InvalidValue, SpoolError, cannot
from spool.core.lifecycle import EngineWord
from spool.core.model import SECOND_NS, Spec
from spool.core.units import whole_words
from spool.formats import engines
from spool.formats.engines import SgeConfig, check_gpu_kind, option_name
from spool.formats.freetext import one_line

_MEBIBYTE = 1 << 20
_MARGIN_S = 60  # Grid Engine ends a job this much later than spool
_MOST_WORDS = 200

# What users write.

_OURS = frozenset(
    (
        *("N", "o", "e", "i", "j", "wd", "cwd", "S", "V", "v", "r", "t", "tc", "hold_jid", "hold_jid_ad", "terse"),
        *("sync", "b", "C", "clear", "shell", "h", "a", "now", "verify", "pe", "ckpt", "c", "@", "help"),
        *("masterq", "dc", "ac", "sc", "inherit", "pty"),
    )
)
_OURS_REQUESTS = frozenset({"h_rt", "s_rt"})


def allowed(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return further options of qsub unchanged. Raises InvalidValue if one sets what spool sets itself."""
    for option in options:
        name = option_name(option)
        value = option[len(name) :].strip()
        if name.startswith("--") or "=" in option[: len(name) + 1]:
            raise InvalidValue(f'{option!a} is no option of qsub; write name and value as one, as in "-l scratch=10G"')
        requests = {part.partition("=")[0].strip() for part in value.split(",")} if name == "-l" else set()
        if name[1:] in _OURS or not _OURS_REQUESTS.isdisjoint(requests):
            raise InvalidValue(f"{option!a} sets what spool sets itself for Grid Engine")
    return options


def words_of(options: Iterable[str]) -> Iterator[str]:
    """Yield the words of options, each of which has its name and its value in one text: `-l gpu=1`."""
    for option in options:
        name, _, value = option.partition(" ")
        yield name
        if value.strip():
            yield value.strip()


# What jobs request.

_MARK = re.compile(r"spool-([0-9a-f]+)-([0-9]+)-(.+)", re.ASCII)


def name_of(mark: str) -> str:
    """Return a mark, `spool:SPOOL:JOB:RUN`, as the name of a job: those have no colon."""
    _, spool, job, run = mark.split(":")
    return f"spool-{spool}-{run}-{job}"


def mark_of(name: str) -> str:
    """Return the mark in the name of a job; any other name is its own."""
    match = _MARK.fullmatch(name)
    return f"spool:{match[1]}:{match[3]}:{match[2]}" if match else name


def options(name: str, spec: Spec, *, mark: str, metadir: str, config: SgeConfig) -> Iterator[str]:
    """Yield the options of qsub for the job *name*, whose records go to *metadir*.

    Raises SpoolError for a request that Grid Engine cannot be told.
    """
    # Without a prefix, no line of the script is taken for an option.
    yield from ("-terse", "-N", name_of(mark), "-C", "", "-S", "/bin/sh", "-b", "n", "-r", "n", "-V")
    yield from ("-wd", metadir, "-i", "/dev/null", "-j", "y", "-o", f"{metadir}/engine.log".replace("$", "\\$"))
    cpus = max(1, spec.request.cpus)
    if cpus > 1:
        if config.pe is None:
            why = f"it needs {cpus} CPUs, and Grid Engine gives more than one through a parallel environment only"
            remedy = 'write pe = "NAME" in [sge], one whose allocation_rule is $pe_slots (`qconf -spl` lists them)'
            raise SpoolError(cannot("hand", f"job {name} to Grid Engine", why, remedy=remedy))
        yield from ("-pe", config.pe, str(cpus))
    for request in _requests(name, spec, config):
        yield from ("-l", request)
    for option, value in (("-q", config.queue), ("-P", config.project)):
        if value is not None:
            yield from (option, value)
    yield from words_of(config.options)
    yield from words_of(spec.executor_options)


def _requests(name: str, spec: Spec, config: SgeConfig) -> Iterator[str]:
    """Yield the values of `-l`. A parallel environment multiplies some of them by its slots."""
    request, slots = spec.request, max(1, spec.request.cpus)
    if request.memory_bytes is not None:
        parts = slots if config.memory_per_slot else 1
        yield f"{config.memory}={max(1, -(-request.memory_bytes // (_MEBIBYTE * parts)))}M"
    if request.gpus:
        yield from _gpus(name, spec, config)
    if spec.time_limit_ns is not None:
        yield f"h_rt={-(-spec.time_limit_ns // SECOND_NS) + _MARGIN_S}"


def _gpus(name: str, spec: Spec, config: SgeConfig) -> Iterator[str]:
    request, what = spec.request, f"job {name} to Grid Engine"
    if request.gpu_memory_bytes is not None:
        why = "it shares a GPU (gpu_memory), which Grid Engine cannot be asked for"
        raise SpoolError(cannot("hand", what, why, remedy="ask for whole GPUs"))
    if config.gpus is None:
        remedy = 'write gpus = "NAME" in [sge], the resource that counts them (`qconf -sc` lists all)'
        raise SpoolError(cannot("hand", what, "it needs GPUs, and which resource they are is unknown", remedy=remedy))
    yield f"{config.gpus}={request.gpus}"
    check_gpu_kind(name, spec, "sge")
    if request.gpu_types:
        (gpu_type,) = request.gpu_types
        known = config.gpu_types.get(gpu_type)
        if known is None:
            remedy = f'write gpu_types = {{ "{gpu_type}" = "RESOURCE=VALUE" }} in [sge]'
            raise SpoolError(cannot("hand", what, f"what stands for a {gpu_type} is unknown", remedy=remedy))
        yield known


# What Grid Engine reports.


class QueueJob(Struct, frozen=True):
    """One job as qstat shows it."""

    id: str
    name: str
    state: str
    node: str


class AccountLine(Struct, frozen=True):
    """One line of the accounting file: a job that has ended, or was put back."""

    id: str
    name: str
    node: str
    began: bool
    failed: int
    code: int

    @property
    def text(self) -> str:
        """How it ended, in Grid Engine's terms."""
        if not self.failed:
            return f"exit status {self.code}"
        return f"failed {self.failed}: {_FAILURES.get(self.failed, 'for an unknown reason')}"


def queue_jobs(text: str) -> list[QueueJob] | None:
    """Return the jobs in an answer of `qstat -xml`; None if it is no answer, or is cut off."""
    from xml.etree import ElementTree  # imported here, because only few spools need it

    try:
        root = ElementTree.fromstring(text)  # noqa: S314  (it is of the cluster that runs our jobs)
    except ElementTree.ParseError:
        return None
    if root.tag != "job_info":
        return None
    return [_queue_job(each) for each in root.iter("job_list") if (each.findtext("JB_job_number") or "").isdecimal()]


def _queue_job(job: object) -> QueueJob:
    get = job.findtext  # type: ignore[attr-defined]
    node = (get("queue_name") or "").partition("@")[2]
    return QueueJob(get("JB_job_number"), get("JB_name") or "", _printable(get("state") or ""), _printable(node))


def accounts(text: str) -> dict[str, AccountLine]:
    """Return the last line about each job in the end of the accounting file; its first line may be cut off."""
    found = {}
    for line in text.split("\n")[:-1]:
        fields = line.split(":")
        if len(fields) > 12 and all(fields[at].isascii() and fields[at].isdecimal() for at in (5, 9, 11, 12)):
            id_, began, failed, code = fields[5], fields[9], fields[11], fields[12]
            if len(failed) < 4 and len(code) < 4:
                found[id_] = AccountLine(
                    id_, fields[4], _printable(fields[1]), began.strip("0") != "", int(failed), int(code)
                )
    return found


def meaning(account: AccountLine) -> EngineWord:
    """Return how Grid Engine has ended a job."""
    if account.failed == 0:
        return EngineWord.COMPLETED if account.code == 0 else EngineWord.FAILED
    if account.failed == _TOO_LONG:
        return EngineWord.TIMEOUT
    if account.failed in _PUT_BACK:
        return EngineWord.PREEMPTED
    if account.failed == _SIGNALLED:
        return EngineWord.CANCELLED if account.code == _KILLED else EngineWord.FAILED
    return EngineWord.FAILED if account.began else EngineWord.NOT_STARTED


_TOO_LONG, _SIGNALLED, _KILLED = 37, 100, 128 + 9
_PUT_BACK = frozenset({24, 25})
# man sge_status
_FAILURES = {
    **dict.fromkeys(range(1, 8), "its shepherd could not begin"),
    8: "in the prolog",
    10: "in the start of the parallel environment",
    11: "before the job",
    15: "in the epilog",
    17: "ended by a signal",
    19: "before its exit status was written",
    21: "recognising the job",
    24: "migrated",
    25: "started again",
    26: "opening the input or output file",
    27: "searching the shell",
    28: "changing into the working directory",
    29: "error in a file of the job",
    30: "the job reported an error",
    37: "a limit of time or memory was exceeded",
    38: "adding a supplementary group",
    100: "ended by a signal",
}


def waits(state: str) -> bool:
    """Whether a job waits: `qw`, `hqw`, and `Rq` of one that was put back."""
    return "q" in state or state in ("h", "w", "E")


def is_stuck(state: str) -> bool:
    """Whether Grid Engine keeps a job that it could not start: `Eqw`."""
    return "E" in state


def is_held(state: str) -> bool:
    """Whether a hold keeps a job: `hqw`."""
    return "h" in state and waits(state)


def is_halted(state: str) -> bool:
    """Whether a job that has begun is suspended: by a user, by its queue, or by a threshold."""
    return not waits(state) and any(letter in state for letter in "sST")


def has_ended(state: str) -> bool:
    """Whether a job is listed as one that has ended."""
    return state == "z"


_SUBMITTED = re.compile(r"^Your job ([1-9][0-9]{0,18}) \(", re.MULTILINE)
_ID = re.compile(r"^[ \t]*([1-9][0-9]{0,18})[ \t\r]*$", re.MULTILINE | re.ASCII)


def submitted_id(out: str, err: str) -> str | None:
    """Return the id that `qsub -terse` has printed on a line of its own; None if there is none, or more than one.

    With a warning, qsub prints a sentence instead, and says that it could not run the job, which it has submitted.
    """
    found = _ID.findall(out) or _SUBMITTED.findall(f"{out}\n{err}")
    return found[0] if len(found) == 1 else None


_UNREACHABLE = re.compile(
    r"unable to (?:contact|send|receive|connect)|commlib|can't connect|got (?:read|send|select|write) error|"
    r"failed receiving|no answer|not responding|timeout|timed out|unable to initialize environment|"
    r"can't resolve (?:host|service)|shut ?down|abort(?:ed|ing) qmaster",
    re.IGNORECASE,
)


def is_silence(status: int | None, said: str) -> bool:
    """Whether a command failed because it got no answer, and not because of its request."""
    return engines.is_silence(status, said, _UNREACHABLE)


_TOO_MANY = re.compile(r"jobs? (?:are|is) allowed per (?:user|cluster)|max_(?:u_)?jobs", re.IGNORECASE)


def has_too_many(err: str) -> bool:
    """Whether qsub refused a job because of too many jobs, so that it may accept it later."""
    return _TOO_MANY.search(err) is not None


def refusal(err: str) -> str:
    """Return why qsub has refused a job, in Grid Engine's words."""
    lines = [re.sub(r"^(?:Unable to run job|qsub|error|warning): *", "", each.strip()) for each in err.splitlines()]
    said = [each for each in lines if each and each not in ("Exiting.", "error:")]
    return one_line("; ".join(dict.fromkeys(said))) or "qsub failed and did not say why"


def nodes_back(text: str) -> frozenset[str] | None:
    """Return the hosts with a load in an answer of `qhost -xml`: the others do not report. None: no answer."""
    from xml.etree import ElementTree  # imported here, because only few spools need it

    try:
        root = ElementTree.fromstring(text)  # noqa: S314  (it is of the cluster that runs our jobs)
    except ElementTree.ParseError:
        return None
    return frozenset(
        host.get("name", "")
        for host in root.iter("host")
        for value in host.iter("hostvalue")
        if value.get("name") == "load_avg" and (value.text or "-").strip() != "-"
    )


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which Grid Engine's commands find their cluster."""
    return {key: variables[key] for key in NEEDED if key in variables}


NEEDED = ("SGE_ROOT", "SGE_CELL", "SGE_CLUSTER_NAME", "SGE_QMASTER_PORT", "SGE_EXECD_PORT", "SGE_ARCH")


def _printable(text: str) -> str:
    text = whole_words(text.strip(), _MOST_WORDS)
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
