"""What differs between engines: what users write of one, its commands, and the meaning of its answers.

A `Language` is all that a new engine needs (docs/CLUSTER.md, "Add another engine"). Its methods only make commands and
read answers: `engine.py` runs the commands.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NoReturn

from msgspec import Struct
from msgspec.structs import replace

from spool.core.errors import InvalidValue, SpoolError, StartRefused, cannot
from spool.core.lifecycle import EngineWord
from spool.core.model import SECOND_NS, Request
from spool.executors.base import Launch
from spool.extras.commands import Command, CommandEnd
from spool.formats.capabilities import loaded
from spool.formats.config import Config
from spool.formats.validation import PartReader, Reading
from spool.formats.wire import one_line
from spool.formats.wrapper import EngineSurroundings

# What users write.


class EngineConfig(Struct, frozen=True):
    """The settings that every engine has."""

    max_in_flight: int = 2000
    max_pending: int = 20  # of these, jobs and arrays that wait there
    options: tuple[str, ...] = ()


LANGUAGES = {"slurm": "spool.extras.engines.slurm:SlurmLanguage", "sge": "spool.extras.engines.sge:SgeLanguage"}
"""The engines that come with spool."""


def settings_of(config: Config) -> Mapping[str, Any]:
    """Return the settings of Slurm and Grid Engine in a configuration."""
    return config.part("engines") or {}


def _read_config(reading: Reading) -> Mapping[str, Any]:
    """Return the settings of engines, and add the problems of their words and options."""
    read = {}
    for name in LANGUAGES:
        language, table = _built_in(name), reading.found[name]
        if "options" in table:
            reading.problems.value((name, "options"), language.check_options, table["options"], None)
        read[name] = language.settings(**table)
    return read


CONFIG_READER = PartReader(
    _read_config, models=lambda: {name: loaded(target).settings() for name, target in LANGUAGES.items()}
)
"""What reads the tables of config.toml."""

JOB_READER = PartReader(lambda reading: reading.found["engines"].get("options", ()))
"""What reads the key `executor_options` of a job file."""


@cache
def _built_in(name: str) -> BuiltInLanguage:
    language: BuiltInLanguage = loaded(LANGUAGES[name])(Config)
    return language


def check(reading: Reading) -> None:
    """Add the problems of a job file whose `executor` is Slurm or Grid Engine."""
    language, asked = _built_in(str(reading.document["executor"])), reading.found.get("request", {})
    options = reading.found["engines"].get("options", ())
    reading.problems.value(("executor_options",), language.check_options, options, None)
    problem = language.gpu_problem(asked.get("gpu_min_memory_bytes"), asked.get("gpu_types", ()))
    if problem is not None:
        reading.problems.add((problem[0],), f"{problem[1]}; {problem[2]}")


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


_NEVER = re.compile(r"(?!)")
_NOT_EXECUTED = (126, 127)  # the exit codes of a shell, and of the helper that runs commands


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

    misleading: ClassVar[re.Pattern[str]] = _NEVER
    """Finds the other variables that would change what its commands do."""

    adds: ClassVar[Mapping[str, str]] = {}
    """What its commands find in their environment besides."""

    shell: ClassVar[tuple[str, ...]] = ()
    """The command that opens a shell beside a job, on its node, with `{}` for the job's id; (): it has none."""

    signals: ClassVar[bool] = True
    """Whether :meth:`cancel` can signal the script of a job alone. If not, the wrapper reads the signals from a record
    of its metadir (`signals`), and only `signal = None` is asked for."""

    logs_ends: ClassVar[bool] = False
    """Whether :meth:`last_words` finds every end that the engine itself has caused."""

    look_ns: ClassVar[int] = 30 * SECOND_NS
    """The longest interval of looks; after news they are sooner."""

    submit_ns: ClassVar[int] = SECOND_NS // 10
    """The shortest interval of submissions."""

    unheard: ClassVar[re.Pattern[str]] = _NEVER
    """Finds in the words of a command that failed that it got no answer."""

    reason: ClassVar[re.Pattern[str]] = _NEVER
    """Finds the reason in these words, if others may stand around it that say nothing."""

    full: ClassVar[re.Pattern[str]] = _NEVER
    """Finds in a refusal that there are too many jobs for now."""

    noise: ClassVar[re.Pattern[str]] = _NEVER
    """Finds what a line of a refusal has before its reason, or instead of one."""

    @abstractmethod
    def policy(self) -> EngineConfig:
        """Return the current settings, as far as every engine has them."""

    @abstractmethod
    def identify(self) -> Command:
        """Return the question which cluster this is."""

    @abstractmethod
    def cluster(self, done: CommandEnd) -> str | None:
        """Return the name of the cluster; None: no answer."""

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
    def cancel(self, ids: Sequence[str], signal: str | None) -> Command:
        """Return the command that ends jobs, or signals them: *signal* goes to their wrappers alone."""

    def missing(self) -> str | None:
        """Return why its commands cannot be used from here at all; None if they can."""
        missing = [program for program in self.programs if shutil.which(program) is None]
        return f"{self.title} is not installed here: no {', '.join(missing)} in PATH" if missing else None

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of its commands, made from the dispatcher's."""
        return {**self._unaltered(variables), **self.adds}

    def _unaltered(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in variables.items()
            if name in self.variables or self.misleading.match(name) is None
        }

    def from_here(self, command: Command) -> Command:
        """Return a submission run as the other commands are: its program and its cluster are those of this process.

        The PATH of the job may lack the program, and its environment the variables.
        """
        (program, *rest), environment = command.arguments, command.environment
        if environment is not None:
            own = {name: os.environ[name] for name in self.variables if name in os.environ}
            environment = {**self._unaltered(environment), **own}
        return replace(command, arguments=(shutil.which(program) or program, *rest), environment=environment)

    def submitted_id(self, done: CommandEnd) -> str | None:
        """Return the id that a submission has printed: the one line that is a number; None if there is none."""
        found = _ID.findall(done.out)
        return found[0] if len(found) == 1 else None

    def submitted(self, done: CommandEnd) -> str | SpoolError | None:
        """Return the id of the submitted job or array, or the refusal; None: it may exist or not.

        StartRefused: refused for now, because there are too many jobs.
        """
        if done.status == 0:
            return self.submitted_id(done)
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
        """Whether a command has failed because the engine did not answer, and not because of its request.

        One that could not be executed has asked nothing, unless it was too long to be executed at all.
        """
        said = f"{done.err}\n{done.out}"
        if done.status is None or done.status < 0:
            return True
        if done.status in _NOT_EXECUTED:
            return os.strerror(errno.E2BIG) not in said
        return done.status != 0 and self.unheard.search("\n".join(self.reason.findall(said)) or said) is not None

    def check_options(self, options: Sequence[str]) -> None:
        """Check the `executor_options` of a job. Raises InvalidValue for one that spool sets itself."""
        return

    def nodes(self, names: Collection[str]) -> Command:
        """Return the question which of these nodes are reachable."""
        return self.identify()

    def nodes_back(self, done: CommandEnd) -> frozenset[str] | None:
        """Return the reachable nodes; None: no answer."""
        return frozenset()

    def last_words(self, log: str) -> tuple[EngineWord, str] | None:
        """Return how the engine has ended a job, by its own lines in the job's log; None if there are none."""
        return None


_ID = re.compile(r"^[ \t]*([1-9][0-9]{0,18})(?:;\S*)?[ \t\r]*$", re.MULTILINE | re.ASCII)  # ID or ID;CLUSTER


class BuiltInLanguage(Language):
    """What the engines here have in common."""

    settings: ClassVar[type[EngineConfig]]
    """Its table in the configuration."""

    choose: ClassVar[str]
    """How to choose among GPUs in another way than by one type."""

    def __init__(self, config: Callable[[], Config]) -> None:
        """Use the settings of *config* as they are now."""
        self._config = config

    def policy(self) -> Any:
        """Return its settings."""
        return settings_of(self._config()).get(self.name) or self.settings()

    def check_options(self, options: Sequence[str]) -> None:
        """Raise InvalidValue if one of further options sets what spool sets itself."""
        for option in options:
            for key in self.ours(option):
                instead = f"; the key for that is {key}" if key else ""
                raise InvalidValue(f"{option!a} sets what spool sets itself{instead}")

    @abstractmethod
    def ours(self, option: str) -> Iterator[str]:
        """Yield, for each option in *option* that spool sets itself, the key of job files for that; "" if none is."""

    def gpu_problem(self, least_bytes: int | None, types: tuple[str, ...]) -> tuple[str, str, str] | None:
        """Return the key of GPUs that the engine has no words for, why, and what to do: a least size, several types."""
        remedy = f"name one gpu_type, or write {self.choose}"
        if least_bytes is not None:
            why = f"it needs GPUs of a least size (gpu_min_memory), which {self.title} cannot be asked for"
            return "gpu_min_memory", why, remedy
        if len(types) > 1:
            why = f"it takes any of several GPU types ({', '.join(types)}), and {self.title} takes one"
            return "gpu_type", why, remedy
        return None

    def check_gpus(self, name: str, request: Request) -> None:
        """Raise SpoolError if the job *name* asks for GPUs in a way that the engine has no words for."""
        problem = self.gpu_problem(request.gpu_min_memory_bytes, request.gpu_types)
        if problem is not None:
            self.refuse(name, *problem[1:])

    def refuse(self, name: str, why: str, remedy: str) -> NoReturn:
        """Raise SpoolError: the job *name* cannot be handed over."""
        raise SpoolError(cannot("hand", f"job {name} to {self.title}", why, remedy=remedy))


def table_of(text: str) -> dict[str, str]:
    """Return words as a table: `NAME=VALUE`, or NAME alone."""
    return dict(each.partition("=")[::2] for each in text.split())


def urgent(*arguments: str) -> Command:
    """Return a command that waits for no submission."""
    return Command(arguments, urgent=True)


def what_it_said(done: CommandEnd) -> str:
    """Return what a command has printed, on one line."""
    nothing = "it printed nothing" if not done.status else f"it printed nothing, exit status {done.status}"
    return one_line(" ".join((done.err or done.out).split())) or nothing
