"""What differs between engines: what users write of one, its commands, and the meaning of its answers.

A `Language` is all that a new engine needs; a package offers one by an entry point of the group `spool.engines`
(docs/SLURM.md, "Add another engine"). Its methods only make commands and read answers: `engine.py` runs the commands.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, NoReturn

from msgspec import Struct
from msgspec.structs import replace

from spool.core.errors import InvalidConfig, InvalidValue, SpoolError, StartRefused, cannot
from spool.core.lifecycle import EngineWord
from spool.core.model import SECOND_NS, Request
from spool.core.names import LOCAL_EXECUTORS
from spool.core.units import parse_duration, whole_words
from spool.executors.base import Launch
from spool.extras.engines import ENGINE
from spool.formats import toml
from spool.formats.config import Config
from spool.formats.freetext import one_line
from spool.formats.validation import Format, PartReader, Reading
from spool.formats.values import KINDS, option_name
from spool.formats.wrapper import EngineSurroundings
from spool.machine.commands import Command, CommandEnd

# What users write.


class EngineConfig(Struct, frozen=True):
    """The settings that every engine has."""

    max_in_flight: int = 2000
    max_pending: int = 20  # of these, jobs and arrays that wait there
    poll_ns: int = 30 * SECOND_NS  # the longest interval of looks
    submit_per_second: float = 10
    options: tuple[str, ...] = ()


class SlurmConfig(EngineConfig, frozen=True):
    """The table `[slurm]` of the configuration: how jobs are handed to Slurm."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    preemptible_qos: str | None = None
    gpus: Mapping[str, str] = {}  # GPU type in job files -> Slurm's name
    gpu_memory: str = "refuse"  # or "shard"


class SgeConfig(EngineConfig, frozen=True):
    """The table `[sge]` of the configuration: how jobs are handed to Grid Engine."""

    queue: str | None = None
    project: str | None = None
    pe: str | None = None  # the parallel environment of jobs with more than one processor
    memory: str = "mem_free"  # the resource that stands for it
    memory_per_slot: bool = False
    gpus: str | None = None  # likewise; None: jobs with GPUs are refused
    gpu_types: Mapping[str, str] = {}  # GPU type in job files -> a further request


class EngineSettings(Struct, frozen=True):
    """The tables of a configuration about engines."""

    slurm: SlurmConfig = SlurmConfig()
    sge: SgeConfig = SgeConfig()
    of_packages: Mapping[str, Mapping[str, object]] = {}  # as written


_NONE = EngineSettings()


def settings_of(config: Config) -> EngineSettings:
    """Return the tables of a configuration about engines."""
    found: EngineSettings | None = config.part("engines")
    return _NONE if found is None else found


def shared_settings(table: Mapping[str, object]) -> EngineConfig:
    """Return the settings that every engine has, from a table `[engines.NAME]` that the configuration has checked.

    An engine that an installed package offers makes its policy of them.
    """
    known = {key: table[key] for key in ("max_in_flight", "max_pending", "submit_per_second") if key in table}
    if "poll" in table:
        known["poll_ns"] = parse_duration(table["poll"])
    options = table.get("options", ())
    assert isinstance(options, list | tuple)
    return EngineConfig(**known, options=tuple(options))  # type: ignore[arg-type]


def _read_config(reading: Reading) -> EngineSettings:
    """Return the tables of engines, and add the problems of their words and options."""
    found, problems = reading.found, reading.problems
    for name, rules in _RULES.items():
        for key, value in found[name].items():
            if key == "options":
                problems.value((name, key), partial(check_options, name), value, None)
            for each in (value,) if isinstance(value, str) else value.values() if isinstance(value, dict) else ():
                problems.value((name, key), rules.check_word, each, None)
    of_packages: Mapping[str, Mapping[str, Any]] = found["engines"].get("of_packages", {})
    for name, table in of_packages.items():
        problems.value(("engines", name), _engine_name, name, "")
        shared = {key.name: table[key.name] for key in ENGINE.keys if key.name in table}  # the others are its own
        if shared:
            problems.take(_engine_format().read(toml.write(shared), "the configuration").problems, ("engines", name))
    return EngineSettings(SlurmConfig(**found["slurm"]), SgeConfig(**found["sge"]), of_packages)


CONFIG_READER = PartReader(_read_config)
"""What reads the tables of config.toml."""

JOB_READER = PartReader(lambda reading: reading.found["engines"].get("options", ()))
"""What reads the key `executor_options` of a job file."""


@cache
def _engine_format() -> Format:
    return Format(ENGINE, KINDS, InvalidConfig)


def _engine_name(name: str) -> str:
    """Return *name* if an installed package can offer an engine under it. Raises InvalidValue."""
    if name in (*LOCAL_EXECUTORS, *_RULES):
        where = f"[{name}]" if name in _RULES else "config.toml itself"
        raise InvalidValue(f"is built in; its settings belong into {where}")
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", name, re.ASCII) is None:
        raise InvalidValue("cannot name an engine: a name is a letter, then letters, digits, - and _")
    return name


def check(reading: Reading) -> None:
    """Add the problems of a job file whose `executor` is Slurm or Grid Engine."""
    engine, asked = str(reading.document["executor"]), reading.found.get("request", {})
    options = reading.found["engines"].get("options", ())
    reading.problems.value(("executor_options",), partial(check_options, engine), options, None)
    found = _gpu_problem(engine, asked.get("gpu_min_memory_bytes"), asked.get("gpu_types", ()))
    if found is not None:
        reading.problems.add((found[0],), f"{found[1]}; {found[2]}")


def check_options(engine: str, options: Sequence[str]) -> None:
    """Raise InvalidValue if one of further options of sbatch or qsub sets what spool sets itself."""
    rules = _RULES[engine]
    for option in options:
        for key in rules.ours(option):
            instead = f"; the key for that is {key}" if key else ""
            raise InvalidValue(f"{option!a} sets what spool sets itself{instead}")


# Options that spool sets itself, each with the key of a job file that stands for it, if there is one.
def _table(text: str) -> dict[str, str]:
    return dict(each.partition("=")[::2] for each in text.split())


_OF_SBATCH = _table("""
    job-name comment output=stdout error=stderr input open-mode chdir=workdir wrap=command export=env export-file
    propagate parsable requeue=requeue no-requeue array=array dependency=depends_on begin=start_after hold wait
    test-only time=time_limit time-min signal=signal mem=memory mem-per-cpu=memory mem-per-gpu nodes ntasks
    ntasks-per-node cpus-per-task=cpus cpus-per-gpu gres=gpus gpus=gpus gpus-per-node=gpus gpus-per-task=gpus
    gpus-per-socket=gpus clusters uid gid get-user-env version help usage quiet tres-per-task
""")
_SHORT = _table("""
    J=job-name o=output e=error i=input D=chdir a=array t=time c=cpus-per-task n=ntasks N=nodes G=gpus d=dependency
    b=begin H=hold W=wait Q=quiet M=clusters V=version h=help
""")
_FLAGS_SHORT = frozenset("kKOsvX")  # one letter, without a value: another letter may follow
_OF_QSUB = _table("""
    N o=stdout e=stderr i j wd=workdir cwd=workdir S=shell V v=env r=requeue t=array tc=max_running
    hold_jid=depends_on hold_jid_ad=depends_on terse sync b C clear shell h a=start_after now verify pe=cpus ckpt
    c @ help masterq dc ac sc inherit pty
""")
_REQUESTS_OF_QSUB = {"h_rt": "time_limit", "s_rt": "time_limit"}


def _ours_of_sbatch(option: str) -> Iterator[str]:
    """Yield the key of each option of ours in *option*, which may be a bundle of letters; "" if it has none."""
    name = option_name(option)
    if name.startswith("--"):  # Slurm's programs accept any prefix of an option's name
        yield from (key for each, key in sorted(_OF_SBATCH.items()) if each.startswith(name[2:]))
        return
    for letter in name[1:]:
        if letter in _SHORT:
            yield _OF_SBATCH[_SHORT[letter]]
        if letter not in _FLAGS_SHORT:
            return  # the rest is its value


def _ours_of_qsub(option: str) -> Iterator[str]:
    """Yield the key of each option or request of ours in *option*, likewise. Raises InvalidValue if it is none."""
    name = option_name(option)
    if name.startswith("--") or "=" in option[: len(name) + 1]:
        raise InvalidValue(f'{option!a} is no option of qsub; write name and value as one, as in "-l scratch=10G"')
    if name[1:] in _OF_QSUB:
        yield _OF_QSUB[name[1:]]
    if name == "-l":
        requests = (part.partition("=")[0].strip() for part in option[len(name) :].split(","))
        yield from (_REQUESTS_OF_QSUB[each] for each in requests if each in _REQUESTS_OF_QSUB)


class _Rules(Struct, frozen=True):
    """What users may write of one of the engines here."""

    title: str
    word: re.Pattern[str]
    what: str  # such a word is
    ours: Callable[[str], Iterator[str]]
    choose: str  # how to choose among GPUs in another way than by one type

    def check_word(self, text: str) -> None:
        """Raise InvalidValue if *text* cannot name a partition, a queue or the like."""
        if self.word.fullmatch(text) is None:
            raise InvalidValue(f"{text!a} is no name {self.what}")


_RULES = {
    "slurm": _Rules(
        "Slurm",
        re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@/+*-]*", re.ASCII),
        "in Slurm",
        _ours_of_sbatch,
        'executor_options = ["--constraint=A|B"] with the features of your nodes',
    ),
    "sge": _Rules(
        "Grid Engine",
        re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@/+*=-]*", re.ASCII),
        "of a queue, a project or a resource",
        _ours_of_qsub,
        'executor_options = ["-l RESOURCE=A|B"] with a resource of your site',
    ),
}


def _gpu_problem(engine: str, least_bytes: int | None, types: tuple[str, ...]) -> tuple[str, str, str] | None:
    """Return the key that an engine has no words for, why, and what to do: a least size, or several types."""
    rules = _RULES[engine]
    remedy = f"name one gpu_type, or write {rules.choose}"
    if least_bytes is not None:
        why = f"it needs GPUs of a least size (gpu_min_memory), which {rules.title} cannot be asked for"
        return "gpu_min_memory", why, remedy
    if len(types) > 1:
        return (
            "gpu_type",
            f"it takes any of several GPU types ({', '.join(types)}), and {rules.title} takes one",
            remedy,
        )
    return None


# What an engine is.


class Sighting(Struct, frozen=True):
    """One job, or one element of an array, in the engine's list."""

    id: str
    mark: str
    said: str  # its state, in the engine's words
    begun: bool = False
    word: EngineWord | None = None  # None: it has not ended
    node: str = ""
    halted: bool = False  # it has begun, and is suspended
    blocked: bool = False  # it waits for something other than room: its node, a limit, a licence, a user
    stuck: bool = False  # the engine cannot start it, and keeps it until it is cancelled
    element: int | None = None  # its index in the array that has the mark


class ArrayRefused(StartRefused):
    """The engine takes no array of that size or with these indices; :meth:`Language.identify` tells what it takes."""


class EngineArray(Struct, frozen=True):
    """Tasks of one array of spool that are submitted together, as elements of one array of the engine.

    Element *e* runs the wrapper of task `first + e`. The records of a task lie in `JOBS/NAME_INDEX/RUN`.
    """

    name: str  # of the array
    run: int  # of each task
    first: int  # a multiple of `width`
    width: int  # a power of ten, larger than each element
    elements: Sequence[int]  # in ascending order
    jobs: str  # the directory of all metadirs
    at_once: int | None = None  # how many may run at once


_NEVER = re.compile(r"(?!)")


class Language(ABC):
    """The commands and answers of one engine: what is the same everywhere as data, the rest as methods.

    An answer that may mean silence is None: nothing follows from silence. What has a default is optional.
    """

    name: ClassVar[str]
    """Its name in job files and records."""

    title: ClassVar[str]
    """Its usual name for users."""

    surroundings: ClassVar[EngineSurroundings]

    programs: ClassVar[tuple[str, ...]] = ()
    """Its commands, which must be in the dispatcher's PATH."""

    variables: ClassVar[tuple[str, ...]] = ()
    """The variables by which its commands find their cluster: a submission, too, has the dispatcher's."""

    signals: ClassVar[bool] = True
    """Whether :meth:`cancel` can signal the script of a job alone. If not, the wrapper reads the signals from a record
    of its metadir (`signals`), and only `signal = None` is asked for."""

    has_arrays: ClassVar[bool] = False
    """Whether :meth:`submit_array` can be asked for, as far as the cluster allows."""

    logs_ends: ClassVar[bool] = False
    """Whether :meth:`last_words` finds every end that the engine itself has caused."""

    unheard: ClassVar[re.Pattern[str]] = _NEVER
    """Finds in the words of a command that failed that it got no answer."""

    full: ClassVar[re.Pattern[str]] = _NEVER
    """Finds in a refusal that there are too many jobs for now."""

    noise: ClassVar[re.Pattern[str]] = _NEVER
    """Finds what a line of a refusal has before its reason, or instead of one."""

    array_width: int | None = None
    """The power of ten below which the indices of an array lie; None: no arrays, or not known yet."""

    array_tasks: int | None = None
    """How many elements an array may have; None: as many as there are indices."""

    memory_ns: int | None = None
    """How long a job is listed after its end; None: not known. An element that waited this recently, and is missing
    while its array is listed, was cancelled."""

    @abstractmethod
    def policy(self) -> EngineConfig:
        """Return the current settings, as far as every engine has them."""

    @abstractmethod
    def identify(self) -> Command:
        """Return the question which cluster this is."""

    @abstractmethod
    def cluster(self, done: CommandEnd) -> str | None:
        """Return the name of the cluster; None: no answer. What else the answer says is kept here."""

    @abstractmethod
    def submit(self, launch: Launch, mark: str) -> Command:
        """Return the command that submits a run. Raises SpoolError for options that the engine does not have."""

    @abstractmethod
    def look(self) -> Sequence[Command]:
        """Return the questions about all jobs; they are asked one after the other."""

    @abstractmethod
    def seen(self, answers: Sequence[CommandEnd]) -> list[Sighting] | None:
        """Return all jobs that the engine knows; None: no answer."""

    @abstractmethod
    def cancel(self, ids: Sequence[str], signal: str | None, *, only_waiting: bool, name: str = "") -> Command:
        """Return the command that ends jobs, or signals them: *signal* goes to their wrappers alone.

        With *only_waiting*, a job that has begun is left alone, as far as the engine can tell them apart. With a
        *name*, a job of another name is left alone.
        """

    def missing(self) -> str | None:
        """Return why its commands cannot be used from here at all; None if they can."""
        missing = [program for program in self.programs if shutil.which(program) is None]
        return f"{self.title} is not installed here: no {', '.join(missing)} in PATH" if missing else None

    def from_here(self, command: Command) -> Command:
        """Return a submission run as the other commands are: its program and its cluster are those of this process.

        The PATH of the job may lack the program, and its environment the variables.
        """
        program, *rest = command.arguments
        environment = command.environment
        if environment is not None:
            environment = {**environment, **{name: os.environ[name] for name in self.variables if name in os.environ}}
        return replace(command, arguments=(shutil.which(program) or program, *rest), environment=environment)

    def submitted_id(self, done: CommandEnd) -> str | None:
        """Return the id that a submission has printed: the one line that is a number; None if there is none."""
        found = _ID.findall(done.out)
        return found[0] if len(found) == 1 else None

    def submitted(self, done: CommandEnd) -> str | SpoolError | None:
        """Return the id of the submitted job or array, or the refusal; None: it may exist or not.

        StartRefused: refused for now, because there are too many jobs; ArrayRefused: or too many in the array.
        """
        known = self.submitted_id(done)
        if known is not None or done.status == 0:
            return known
        if self.full.search(done.err) is not None:
            words = f"{self.title} takes no more jobs for now: {self.refusal(done)}"
            return None if done.out.strip() else StartRefused(words)
        return None if self.is_silence(done) else SpoolError(f"{self.title} refuses it: {self.refusal(done)}")

    def refusal(self, done: CommandEnd) -> str:
        """Return why a submission was refused, in the engine's words."""
        lines = (self.noise.sub("", line.strip()) for line in done.err.splitlines())
        said = one_line("; ".join(dict.fromkeys(filter(None, lines))))
        return said or f"{self.programs[0] if self.programs else 'its command'} failed and did not say why"

    def is_silence(self, done: CommandEnd) -> bool:
        """Whether a command has failed because the engine did not answer, and not because of its request."""
        return is_unanswered(done.status, f"{done.err}\n{done.out}", self.unheard)

    def check_options(self, options: Sequence[str]) -> None:
        """Check the `executor_options` of a job. Raises InvalidValue for one that spool sets itself."""
        return

    def environment(self, variables: Mapping[str, str]) -> Mapping[str, str]:
        """Return the environment of its commands, made from the dispatcher's."""
        return variables

    def submit_array(self, launch: Launch, mark: str, array: EngineArray) -> Command:
        """Return the command that submits an array; *launch* is that of its first element, and stands for all."""
        raise NotImplementedError

    def element(self, job_id: str, element: int) -> str:
        """Return the id of one element of an array."""
        return f"{job_id}_{element}"

    def array_of(self, job_id: str) -> str | None:
        """Return the id of the array of an element; None: it is no element."""
        array, is_element, _ = job_id.partition("_")
        return array if is_element else None

    def limit_array(self, array_id: str, at_once: int | None) -> Command | None:
        """Return the command that changes how many elements of an array run at once; None: it has none."""
        return None

    def nodes(self, names: Collection[str]) -> Command:
        """Return the question which of these nodes are reachable."""
        return self.identify()

    def nodes_back(self, done: CommandEnd) -> frozenset[str] | None:
        """Return the reachable nodes; None: no answer."""
        return frozenset()

    def nodes_given_up(self) -> frozenset[str]:
        """Return the nodes that the administrator has declared gone."""
        return frozenset()

    def last_words(self, log: str) -> tuple[EngineWord, str] | None:
        """Return how the engine has ended a job, by its own lines in the job's log; None if there are none."""
        return None

    def attach(self, job_id: str) -> tuple[str, ...] | None:
        """Return the command that opens a shell beside a job, on its node; None: the engine has none."""
        return None


_ID = re.compile(r"^[ \t]*([1-9][0-9]{0,18})(?:;\S*)?[ \t\r]*$", re.MULTILINE | re.ASCII)  # ID or ID;CLUSTER


class BuiltInLanguage(Language):
    """What the engines here have in common."""

    def __init__(self, config: Callable[[], Config]) -> None:
        """Use the settings of *config* as they are now."""
        self._config = config

    def check_options(self, options: Sequence[str]) -> None:
        """Refuse options that spool sets itself."""
        check_options(self.name, options)

    def nodes_given_up(self) -> frozenset[str]:
        """Return the nodes in `other_hosts_gone`."""
        return frozenset(self._config().other_hosts_gone)

    def check_gpus(self, name: str, request: Request) -> None:
        """Raise SpoolError if the job *name* asks for GPUs in a way that the engine has no words for."""
        found = _gpu_problem(self.name, request.gpu_min_memory_bytes, request.gpu_types)
        if found is not None:
            self.refuse(name, *found[1:])

    def refuse(self, name: str, why: str, remedy: str) -> NoReturn:
        """Raise SpoolError: the job *name* cannot be handed over."""
        raise SpoolError(cannot("hand", f"job {name} to {self.title}", why, remedy=remedy))


def urgent(*arguments: str) -> Command:
    """Return a command that waits for no submission."""
    return Command(arguments, urgent=True)


_NOT_EXECUTED = (126, 127)  # the exit codes of a shell, and of the helper that runs commands


def is_unanswered(status: int | None, said: str, unheard: re.Pattern[str]) -> bool:
    """Whether a command failed because it got no answer, and not because of its request.

    *unheard* finds the engine's words for that in what it *said*. A command that could not be executed has asked
    nothing, unless it was too long to be executed at all.
    """
    if status is None or status < 0:
        return True
    if status in _NOT_EXECUTED:
        return os.strerror(errno.E2BIG) not in said
    return status != 0 and unheard.search(said) is not None


_MOST_WORDS = 200  # characters of an engine's words about a job


def printable(text: str) -> str:
    """Return an engine's words about a job, not too many of them, without control characters."""
    text = whole_words(text.strip(), _MOST_WORDS)
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
