"""Names: of every file in a spool, spelled once; of jobs, executors and variables.

Paths are plain strings: a pass over 100,000 jobs joins 100,000 of them. The clause of docs/FORMAT.md
that describes each file stands beside it. Imports nothing, because every command starts with it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Mapping

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_IN_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
MAX_NAME_LENGTH = 100
MOST_RUNS = 999_999_999  # a larger number is not a run number
JOB_SUFFIX = ".toml"
ERROR_SUFFIX = ".error"
REASON_SUFFIX = ".reason"
SUSPENDED_SUFFIX = ".suspended"

# The state directories, FORMAT 2.
QUEUED = "queued"
HELD = "held"
RUNNING = "running"
DONE = "done"
PLACES = (QUEUED, HELD, RUNNING, DONE)

# The rest of the root, FORMAT 1.
JOBS = "jobs"
RESERVATIONS = "reservations"
GONE_RESERVATIONS = ".reservations"  # cancelled, or removed after their end
ROOM = ".room"  # files that reserve space for the records of stops
STAGING = ".tmp"
DIRECTORIES = (*PLACES, JOBS, RESERVATIONS, STAGING)
CONFIG = "config.toml"
PAUSED = "paused"
HISTORY = "history.jsonl"
STATE = "state.json"
LOCK = ".lock"
HALT = ".halt"
JOURNAL = ".journal"
LOG = "dispatcher.log"
README = "README"
IDENTITY = ".id"
MACHINE = ".machine"
LAST_RUNS = "jobs/.last-runs.json"
NOTES = "jobs/.notes"  # of wrappers, where no event tells of a record: `NAME.RUN.RECORD`
WRAPPERS = ".wrapper"  # the constant text of each version, `HASH.sh`
HOOKS = "hooks"
EVENTS = "events.jsonl"
CURSORS = ".listeners"
TERMINALS = ".tmux"
CALLS = "calls"  # of Python functions, FORMAT 18
FUNCTION = "~function"  # behind the name of a call: no job has such a name

# The metadir, FORMAT 4.
SPEC_COPY = "job.toml"
GRANT = "grant.toml"
DEFAULTS = "defaults.toml"
WRAPPER = "run.sh"
SCRIPT = "script"
ENGINE = "engine"
ENGINE_LOG = "engine.log"
ENVIRONMENT = "env"  # what texts before the command add to its environment
JID = "jid"
USAGE = "usage"
LEFTOVERS = "leftovers"  # while the wrapper waits for what its command has left behind
ENDED = "ended"  # the exit code of the command, while its epilog runs
RC = "rc"
JOB_LOG = "log"
JOB_STDERR = "stderr"  # of a job that `spool run` has submitted
STOP = "stop"
STATUS = "status"
RESULT = "result.toml"
FAILURE = "error"
REFUSED = "refused"
SIGNAL = "signal"
SIGNALS = "signals"  # to be passed on by a wrapper that its engine cannot signal
KEPT = "kept"
LAUNCH = "launch"
PROGRESS = "progress"
METRICS = "metrics"
SUSPENDED = "suspended"
GPUS = "gpus.toml"
CALL = "call"  # of a Python function, FORMAT 18
RETURN = "return"

# The metadir of an array, FORMAT 4.
ARRAY = "array.toml"
TASKS = "tasks"

_GLOB = frozenset("*?[")

LOCAL_EXECUTORS = ("process", "tmux")
"""The executors whose runs are on this machine, and use its resources."""

ANY_GPU_TYPE = "auto"
"""The GPU type that every GPU has."""

EXPORTED = (
    "PATH", "VIRTUAL_ENV", "CONDA_*", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_*", "TZ",
)  # fmt: skip
"""The variables that a submission copies into the job file, unless the configuration names others."""

SERVICE = "SPOOL_SERVICE"
"""The variable that marks processes of spool's own which outlive their starter and belong to no job."""

UMASK = 0o022
"""The umask after a login, and of a job that states none."""


def valid_name(name: str) -> bool:
    """Whether *name* can be a job's: 1 to 100 of ``A-Za-z0-9._-``, first a letter or a digit (FORMAT 2.1)."""
    # Without `re`, whose import takes longer than a submission.
    return not name.strip(_IN_NAMES) and name[:1] not in ("", ".", "_", "-") and len(name) <= MAX_NAME_LENGTH


def job_of(filename: str) -> str | None:
    """Return the job that a file of this name in a state directory is, or None if spool ignores the file."""
    if not filename.endswith(JOB_SUFFIX):
        return None
    name = filename[: -len(JOB_SUFFIX)]
    return name if valid_name(name) else None


def jobs_of(filenames: list[str]) -> list[str]:
    """Return the jobs that files of these names in a state directory are, as `job_of` does of each."""
    names = [filename[: -len(JOB_SUFFIX)] for filename in filenames if filename.endswith(JOB_SUFFIX)]
    return [name for name in names if valid_name(name)]


def file_of(name: str) -> str:
    """Return the file name of job *name*."""
    return name + JOB_SUFFIX


def editor_marks(name: str) -> tuple[str, str]:
    """Return the files that vim and emacs keep beside a job file while it is open in them."""
    return f".{name}{JOB_SUFFIX}.swp", f".#{name}{JOB_SUFFIX}"


def job_of_editor_mark(filename: str) -> str | None:
    """Return the job whose file is open in an editor that keeps a file of this name, or None."""
    if filename.startswith(".#"):
        return job_of(filename[2:])
    if filename.startswith(".") and filename.endswith(".swp"):
        return job_of(filename[1 : -len(".swp")])
    return None


def job_beside(filename: str, suffix: str) -> str | None:
    """Return the job whose file has one of this name beside it, with *suffix* at its end; None if it is another."""
    return job_of(filename[: -len(suffix)]) if filename.endswith(suffix) else None


def gone_reservation_of(filename: str) -> tuple[str, int] | None:
    """Return the name and writing time of the removed reservation in a file of this name; None if it is not one."""
    name, _, created = filename.removesuffix(JOB_SUFFIX).rpartition(".")
    is_moment = created.isascii() and created.isdecimal() and len(created) < 20
    if not filename.endswith(JOB_SUFFIX) or not valid_name(name) or not is_moment:
        return None
    return name, int(created)


class Layout:
    """The paths of one spool."""

    __slots__ = ("root",)

    def __init__(self, root: str) -> None:
        self.root: str = root.rstrip("/") or "/"

    def at(self, name: str) -> str:
        """Return the path of *name* (one of this module's constants) in the root."""
        return f"{self.root}/{name}"

    def job_file(self, place: str, name: str) -> str:
        """Return the path of job *name* in the state directory *place*."""
        return f"{self.root}/{place}/{name}{JOB_SUFFIX}"

    def error_file(self, place: str, name: str) -> str:
        """Return the path of the file that lists the problems of the job file beside it."""
        return f"{self.root}/{place}/{name}{JOB_SUFFIX}{ERROR_SUFFIX}"

    def reason_file(self, name: str) -> str:
        """Return the path of the file that says why spool itself held a job."""
        return f"{self.root}/{HELD}/{name}{JOB_SUFFIX}{REASON_SUFFIX}"

    def suspend_file(self, name: str) -> str:
        """Return the path of the file that suspends the run of a job."""
        return f"{self.root}/{RUNNING}/{name}{JOB_SUFFIX}{SUSPENDED_SUFFIX}"

    def gone_reservation(self, name: str, created_at_ns: int) -> str:
        """Return the path of a removed reservation whose file was written at *created_at_ns*."""
        return f"{self.root}/{GONE_RESERVATIONS}/{name}.{created_at_ns}{JOB_SUFFIX}"

    def whose(self, path: str) -> str | None:
        """Return the job of the file or record at *path*, or of a file of this name; None for anything else."""
        if valid_name(path):
            return path
        parts = path.removeprefix(self.root).strip("/").split("/")
        if not path.startswith(f"{self.root}/") or len(parts) < 2:
            return None
        name = parts[1] if parts[0] == JOBS else parts[1].rpartition(JOB_SUFFIX)[0] if parts[0] in PLACES else ""
        return name if valid_name(name) else None

    def runs(self, name: str) -> str:
        """Return the directory that holds the metadirs of job *name*."""
        return f"{self.root}/{JOBS}/{name}"

    def metadir(self, name: str, run: int) -> str:
        """Return the metadir of one start of job *name*."""
        return f"{self.root}/{JOBS}/{name}/{run}"

    def cursor(self, listener: str) -> str:
        """Return the file that records a listener's position among the events."""
        return f"{self.root}/{CURSORS}/{listener}"

    def task_file(self, name: str, run: int, task: str) -> str:
        """Return the file of the job *task* while it waits to be issued by the array *name*."""
        return f"{self.root}/{JOBS}/{name}/{run}/{TASKS}/{task}{JOB_SUFFIX}"

    def record(self, name: str, run: int, record: str) -> str:
        """Return the path of one small file in a metadir."""
        return f"{self.root}/{JOBS}/{name}/{run}/{record}"


class Limit:
    """A limit of `ulimit`: its letter there, the bytes, seconds or files per unit, and the soft one after a login."""

    def __init__(self, letter: str, unit: int, at_login: int | None = None) -> None:
        self.letter = letter
        self.unit = unit
        self.at_login = at_login  # None: unlimited


LIMITS = {
    "as": Limit("v", 1024),
    "core": Limit("c", 512, 0),
    "cpu": Limit("t", 1),
    "data": Limit("d", 1024),
    "fsize": Limit("f", 512),
    "nofile": Limit("n", 1, 1024),
    "stack": Limit("s", 1024, 8 << 20),
}
"""The limits that a job takes along from its submitter, by their names in limits.conf(5)."""


_SEARCHED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")


def without_here(environment: Mapping[str, str]) -> dict[str, str]:
    """Return *environment* without the relative entries of search paths; an empty one is relative, too.

    They mean the directory where a program happens to run, and a user who may write there would choose what it runs.
    """
    found = dict(environment)
    for name in _SEARCHED:
        if name in found:
            found[name] = ":".join(entry for entry in found[name].split(":") if entry.startswith("/"))
    return found


def engine_of(executor: str | None) -> str | None:
    """Return the engine whose runs are on another machine; None if the runs of *executor* are here, or unknown."""
    return None if executor in (None, *LOCAL_EXECUTORS) else executor


def why_not_name(name: str) -> str | None:
    """Return what is wrong with *name* as a job's name, or None if nothing is."""
    if valid_name(name):
        return None
    if not name:
        return "a name has at least one character"
    if len(name) > MAX_NAME_LENGTH:
        return f"a name has at most {MAX_NAME_LENGTH} characters, this one has {len(name)}"
    foreign = next((char for char in name if not valid_name(f"a{char}")), None)
    if foreign is not None:
        return f"a name is made of A-Z a-z 0-9 . _ and -, and {foreign!r} is not allowed"
    return f"a name begins with a letter or a digit, not with {name[0]!r}"


def is_pattern(text: str) -> bool:
    """Whether a text is a glob pattern."""
    return not _GLOB.isdisjoint(text)


class NaturalOrder:
    """A sort key of last resort: the name in natural order, computed only if nothing else decides."""

    __slots__ = ("_key", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._key: tuple[str | int, ...] = ()

    def __lt__(self, other: NaturalOrder) -> bool:
        return (self._key or self._worked_out()) < (other._key or other._worked_out())

    def _worked_out(self) -> tuple[str | int, ...]:
        """Return the key, cached: a sort compares each name a dozen times."""
        self._key = natural(self._name)
        return self._key


def natural(name: str) -> tuple[str | int, ...]:
    """Return a sort key for names that puts `sweep_2` before `sweep_10`."""
    import re  # imported here because a submission, which uses other parts of this module, sorts nothing

    parts: list[str | int] = re.split(
        "([0-9]+)", f"{name}\0"
    )  # texts and numbers in turn: only like is compared with like
    parts[1::2] = map(int, parts[1::2])
    return tuple(parts)
