"""The executors by name. The dispatcher gets them here and knows no specific one."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import invalidate_caches
from typing import TypeVar

from msgspec.structs import replace

from spool.core.errors import InvalidValue, SpoolError, cannot
from spool.core.layout import LOCAL_EXECUTORS
from spool.core.model import Jid, Machine, Spec
from spool.executors.base import Engine, EngineEnd, Executor, Launch, RunHandle
from spool.executors.local import LocalProcesses
from spool.formats.capabilities import engine_offer, engine_title, executors, is_of_a_package, loaded, used_by
from spool.formats.config import Config
from spool.formats.jobfile import why_not_there
from spool.formats.run_records import Usage
from spool.machine.cgroups import RunGroups

log = logging.getLogger(__name__)

__all__ = ["Engine", "EngineEnd", "Executor", "Executors", "Launch", "RunHandle", "Usage", "by_name"]

Answer = TypeVar("Answer")

_HERE = {
    "process": "spool.executors.process:ProcessExecutor",
    "tmux": "spool.executors.tmux:TmuxExecutor",
}
"""The class of each executor of this machine."""


def by_name(
    name: str,
    local: LocalProcesses | None = None,
    config: Callable[[], Config] = Config,
    home: object = None,
) -> Executor:
    """Return a new executor of that name; its module is imported on this call. Raises InvalidValue for other names.

    *local* manages processes that it starts on this machine; *home* is the locked spool whose runs it starts elsewhere.
    Capabilities offer those of other machines. Raises ImportError if one cannot be loaded.
    """
    if name in LOCAL_EXECUTORS:
        local_one: Executor = loaded(_HERE[name])(local)
        return local_one
    offer = engine_offer(name)
    if offer is None:
        remedy = f"use one of {', '.join(executors())}"
        raise InvalidValue(cannot("use", f"executor {name!r}", "it does not exist", remedy=remedy))
    made: Executor = loaded(offer.executor)(name, config, home)
    return made


class Executors:
    """The executors of one spool, each created on first use."""

    def __init__(
        self, local: LocalProcesses | None = None, config: Callable[[], Config] = Config, home: object = None
    ) -> None:
        """Create none yet. *local* manages the runs of this machine; without *home*, none is started elsewhere."""
        self._config, self._home = config, home
        self.local = local or LocalProcesses()
        self._made: dict[str, Executor] = {}
        self.engines: dict[str, Engine] = {}  # those that start runs elsewhere
        self._problems: dict[str, str | None] = {}
        self._parts: dict[tuple[object, ...], str | None] = {}  # answers about the parts of jobs
        self._told: Mapping[str, str] = {}
        self.unloaded: dict[str, str] = {}  # executors that could not be imported, and why: `ask_again` tries again
        self._silent: list[Engine] = []
        self._broken: dict[str, str] = {}  # engines of packages, with their last error

    def __getitem__(self, name: str) -> Executor:
        if name not in self._made:
            self._made[name] = self._load(name)
        return self._made[name]

    def problem(self, name: str | None) -> str | None:
        """Return why the executor *name* (None: the default) cannot start anything, None if it can.

        The answer is kept until :meth:`ask_again`.
        """
        name = name or self._config().executor
        if name not in self._problems:
            self._problems[name] = self._problem(name)
        return self._problems[name]

    def unavailable(self) -> dict[str, str]:
        """Return the executors that cannot start anything, with the reasons, as far as they have been asked."""
        return {name: problem for name, problem in self._problems.items() if problem is not None}

    def believe(self, told: Mapping[str, str]) -> None:
        """Use a dispatcher's answers about executors that are :meth:`unavailable`: only it has asked the engines."""
        self._told = told

    def problem_of(self, spec: Spec) -> str | None:
        """Return why a job cannot be started: its executor cannot start anything, or rejects one of its keys."""
        request = spec.request
        here = spec.keep_session or spec.gpu_idle_ns is not None or request.resources or request.gpu_memory_auto
        if here or spec.parts:
            why = why_not_there(spec, spec.executor or self._config().executor)
            if why is not None:
                return why
        return self.problem(spec.executor) or (self._part_problem(spec) if spec.parts else None)

    def _part_problem(self, spec: Spec) -> str | None:
        """Return why a capability whose keys a job has cannot be used here; kept like the answers about executors."""
        for capability in used_by(spec):
            if not capability.problem:
                continue
            asked = capability.name, spec.part(capability.name), spec.env
            if asked not in self._parts:
                try:
                    self._parts[asked] = loaded(capability.problem)(spec)
                except (ImportError, OSError) as error:
                    self._parts[asked] = f"cannot load what its {capability.name} need: {why_not_imported(error)}"
            if self._parts[asked] is not None:
                return self._parts[asked]
        return None

    def _problem(self, name: str) -> str | None:
        try:
            executor = self[name]
        except InvalidValue:
            return f"this version of spool has no executor {name!r}"
        except SpoolError as error:
            return str(error)
        self._broken.pop(name, None)
        problem = None
        with self._confined(name):
            problem = executor.unavailable()
        return self._broken.get(name) or problem or self._told.get(name)

    @contextmanager
    def _confined(self, name: str) -> Iterator[None]:
        """Keep an error in the engine of a package, which is not ours, to the jobs of that engine."""
        try:
            yield
        except Exception as error:
            if not is_of_a_package(name):
                raise
            said = f"the engine {name} is broken: {type(error).__name__}: {error}"
            if self._broken.get(name) != said:
                log.exception("%s", said)
            self._broken[name] = said

    def _of_each(self, ask: Callable[[Engine], Answer]) -> dict[str, Answer]:
        """Return the answer of each engine, by its name, but for those that are broken."""
        found = {}
        for name, engine in self.engines.items():
            with self._confined(name):
                found[name] = ask(engine)
        return found

    def _load(self, name: str) -> Executor:
        """Return an executor, created on first use. Raises InvalidValue, and SpoolError if it cannot be imported now.

        Python caches which files it did not find, and that it could not look: the cache is cleared for the next
        attempt.
        """
        try:
            made = by_name(name, self.local, self._config, self._home)
        except (ImportError, OSError) as error:
            invalidate_caches()
            self.unloaded[name] = f"cannot load the executor {name}: {why_not_imported(error)}"
            raise SpoolError(self.unloaded[name]) from error
        self.unloaded.pop(name, None)
        if name not in LOCAL_EXECUTORS:
            self.engines[name] = made.engine
        return made

    def elsewhere(self, name: str | None) -> str | None:
        """Return the other machine where the runs of executor *name* (None: the default) are; None: this one."""
        name = name or self._config().executor
        return None if name in LOCAL_EXECUTORS else name

    def machines(self) -> dict[str, Machine]:
        """Return the resources of other machines, as far as their executors have been asked."""
        titles = {name: engine_title(name) for name in self.engines}
        there = self._of_each(lambda engine: engine.machine())
        return {name: replace(each, title=titles[name]) for name, each in there.items() if isinstance(each, Machine)}

    def ask_again(self) -> bool:
        """Clear the cached answers, so that the executors are asked again; return whether an answer has changed."""
        before, self._problems = self._problems, {}
        parts, self._parts = bool(self._parts), {}
        return parts or any(self.problem(name) != problem for name, problem in before.items())

    def problems(self) -> list[str]:
        """Return which executors cannot be loaded, and why engines that have runs of this spool do not answer now."""
        found = map(self.problem, self.engines)
        return [*self.unloaded.values(), *(problem for problem in found if problem is not None)]

    def adopt(self, name: str, job: str, run: int, jid: Jid | None) -> RunHandle:
        """Return a run that an executor of that name has started for another dispatcher.

        Runs of this machine are known without their executor, which need not be installed any more.
        """
        engine: Engine = self.local
        if name not in LOCAL_EXECUTORS:
            with suppress(SpoolError):  # the run is left alone then
                engine = self[name].engine
        return engine.adopt(job, run, jid)

    def work(self) -> list[RunHandle]:
        """Let every engine do its due work; return the runs with news."""
        return [run for news in self._of_each(lambda engine: list(engine.work())).values() for run in news]

    def turned(self) -> bool:
        """Whether an engine has stopped answering, or answers again, since the last call."""
        before, self._silent = self._silent, [engine for engine in self.engines.values() if engine.silent]
        return before != self._silent

    def due_ns(self) -> int | None:
        """Return when an engine has work of its own to do, on the monotonic clock."""
        times = self._of_each(lambda engine: engine.due_ns()).values()
        return min((due_ns for due_ns in times if due_ns is not None), default=None)

    def descriptors(self) -> frozenset[int]:
        """Return the engines' descriptors, which are readable when :meth:`work` has something to do."""
        return frozenset(fd for engine in self.engines.values() if (fd := engine.fileno()) is not None)

    def groups(self, name: str) -> RunGroups | None:
        """Return where the control groups of the runs of executor *name* can be created; None: nowhere."""
        return self.local.groups if name in LOCAL_EXECUTORS else None

    def close(self) -> None:
        """Release the shared resources of the starts, and the orphans."""
        for executor in self._made.values():
            executor.close()


def why_not_imported(error: Exception) -> str:
    """Return why an import failed: a directory cannot be read, a package is missing, or *error*."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        for folder in filter(None, sys.path):
            try:
                os.stat(folder)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as failed:
                return f"{folder}: {failed.strerror}"
        return f"the Python package {package} is not installed, or cannot be read"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
