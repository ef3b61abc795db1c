"""Obstacles to a job or its messages that show before it is submitted.

Nothing here is certain: a machine may grow, and files come in any order. So these are warnings, not errors. Every
submission uses this, so modules that only some jobs need are imported on demand.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace

from spool.core.arrays import INDEX, PARAMETER, Substitution, Tasks, array_of, variable_of
from spool.core.layout import LAST_RUNS, LOCAL_EXECUTORS, LOCK, valid_name
from spool.core.model import SECOND_NS, Machine, Request, Spec, Waiting
from spool.formats.capabilities import contributed
from spool.store.glance import config_if
from spool.store.lock import dispatcher_lives

if TYPE_CHECKING:
    from spool.formats.config import Config
    from spool.store.spool import Spool

_PATIENCE_NS = SECOND_NS  # limits the wait for a driver that hangs
_OF_THE_JOB = re.compile(r"\$\{?((?:SPOOL|SLURM|PBS|SGE_TASK)_[A-Z0-9_]+|CUDA_VISIBLE_DEVICES)\}?")
_TEXT_FOLLOWS = re.compile("-[a-zA-Z]*[ce]")  # as `sh -c TEXT`, which may expand it
_MOST_READ = 1 << 20  # of a program that an array runs
_MOST_PROPOSED = 5  # values of a key
_MOST_DOUBTS = 20  # a thousand missing dependencies are one mistake


def doubts(root: str, jobs: Sequence[tuple[str, Spec]]) -> list[tuple[str, str]]:
    """Return the doubts about *jobs*, submitted together to the spool *root*, as pairs of name and sentence."""
    seer = _Seer(root, {name for name, _ in jobs})
    found: list[tuple[str, str]] = []
    for name, spec in jobs:
        with suppress(OSError):  # reading errors are reported elsewhere, and must not prevent a submission
            found.extend((name, why) for why in seer.doubts(name, spec))
    return found


class _Seer:
    """Reads as much of a spool as the jobs need: a plain job needs nothing."""

    def __init__(self, root: str, together: Collection[str]) -> None:
        self._root = root
        self._together = together
        self._now_ns = time.time_ns()

    @cached_property
    def _spool(self) -> Spool:
        from spool.store.spool import Spool

        return Spool(self._root)

    @cached_property
    def _config(self) -> Config:
        from spool.store.edited import Settings

        return Settings(self._root).config

    def doubts(self, name: str, spec: Spec) -> Iterator[str]:
        """Yield each doubt about one job."""
        said = config_if(self._root, b"executor") if spec.executor is None else None
        executor = spec.executor or ("process" if said is None else said.executor)
        problem = self._executor_problem(executor, spec)
        if problem is not None:
            yield f"cannot start: {problem}"
        elif executor in LOCAL_EXECUTORS:
            yield from self._never_fits(name, spec)
            yield from self._nowhere(spec)
            yield from self._not_executed(spec)
        yield from self._one_output(name, spec)
        yield from self._not_expanded(spec)
        if spec.is_array:
            yield from _not_varied(spec)
        for capability, parts in contributed("doubts") if spec.parts else ():
            if spec.part(capability.name) is not None:
                yield from parts(spec, self._config)
        yield from self._unknown(name, spec)

    def _executor_problem(self, executor: str, spec: Spec) -> str | None:
        if executor == "process" and not spec.parts:
            return None
        from spool.executors import Executors

        return Executors(config=lambda: self._config).problem_of(spec)

    def _never_fits(self, name: str, spec: Spec) -> Iterator[str]:
        request = spec.request
        if request == Request(cpus=min(request.cpus, 1)):
            return  # any machine has that
        from spool.core.resources import FreeResources, Runs

        machine = self._machine(request)
        room = FreeResources(machine, self._config.policy, self._now_ns, Runs())
        if request.memory_auto:  # then it requests what there is
            spec = replace(spec, request=replace(request, memory_bytes=None))
        reason = room.never_fits(Waiting(name, spec, "", self._now_ns))
        if reason is not None:
            yield reason.text

    def _machine(self, request: Request) -> Machine:
        """Return the machine as the running dispatcher last saw it; where that lacks what is requested, as it is."""
        config, told = self._config, None
        if dispatcher_lives(f"{self._root}/{LOCK}"):
            from spool.query.rows import machine_told

            told = machine_told(self._spool, self._now_ns)
        gpus = told.told() if told is not None else None
        if request.gpus and gpus is None:
            from spool.query.snapshot import machine_now

            return machine_now(self._spool, self._now_ns, patience_ns=_PATIENCE_NS)
        shared = told.shared if told is not None else None
        if told is not None:
            machine = Machine(told.cpus, told.memory_bytes, resources=config.resources)
            if gpus is not None:
                machine = replace(machine, gpus=gpus.gpus, gpu_problem=gpus.problem)
        else:
            from spool.machine.host import Host, shared_directory

            host = Host()
            cpus = host.cpus() if config.cpus is None else config.cpus
            machine = Machine(cpus, config.memory_of(host.memory().total_bytes), resources=config.resources)
            if shared_directory(config.machine) is not None:
                from spool.query.shared import arbiter_view, shared_machine

                seen = shared_machine(self._spool, self._now_ns, config)
                shared = arbiter_view(seen) if seen is not None else None
        if shared is None:
            return machine
        from spool.state.world import on_shared

        return on_shared(machine, config, shared)

    def _nowhere(self, spec: Spec) -> Iterator[str]:
        path = spec.workdir or ""
        if path.startswith("/") and not {*path} & {*"{$%"} and not os.path.isdir(path):
            yield f"cannot start until its workdir exists: {path}"
        for key, text in (("workdir", spec.workdir), ("stdout", spec.stdout), ("stderr", spec.stderr)):
            if text is not None and ("$" in text or text.startswith("~")):
                from spool.machine.host import why_not_expanded

                why = why_not_expanded(text, dict(spec.env))
                if why is not None:
                    yield f"cannot run: {key}: {why}"
        place = os.path.expanduser(path or "~")
        for key, text in (("stdout", spec.stdout), ("stderr", spec.stderr)):
            if text and re.match("/dev/(stdout|stderr|fd/)|/proc/self/fd/", text):
                yield f"may lose its output: {key}: {text} leads nowhere; leave {key} out, and `spool log` shows it"
            elif text and not {*text} & {*"{$%~"} and os.path.isdir(os.path.join(place, text)):
                yield f"cannot run: {key}: {text} is a directory; name a file in it, as in {text}/%n.%r.log"

    def _not_executed(self, spec: Spec) -> Iterator[str]:
        if spec.script is None:
            return
        from spool.machine.host import is_mounted_noexec

        if is_mounted_noexec(self._root):
            remedy = "--no-capture runs the script where it is"
            yield f"cannot execute its script: the spool is on a file system mounted with noexec; {remedy}"

    def _one_output(self, name: str, spec: Spec) -> Iterator[str]:
        """Yield the outputs that all tasks of an array share."""
        tasks = Tasks(name, spec)
        if tasks.count < 2:
            return
        from spool.machine.host import expanded

        differs = Substitution(tasks.keys).touches
        for path in dict.fromkeys(filter(None, (spec.stdout, spec.stderr))):
            place = expanded(path, dict(spec.env))
            if not re.search("%[1-9]?[na]", place.replace("%%", "")) and not differs(place) and place != os.devnull:
                yield f"writes the output of all its {tasks.count} tasks to {path}; %a in the path is the index"

    def _not_expanded(self, spec: Spec) -> Iterator[str]:
        """Yield the variable of the job that a command without a shell gets as plain text."""
        if isinstance(spec.command, str):
            return
        for word in spec.command:
            if _TEXT_FOLLOWS.fullmatch(word) is not None:
                return
            if (found := _OF_THE_JOB.search(word)) is not None:
                key = Tasks("", spec).variables.get(found[1], INDEX)
                instead = f", and {{{key}}} is {'the index' if key == INDEX else 'its value'}" if spec.is_array else ""
                remedy = f"-c takes a text for the shell{instead}"
                yield f"gets {found[0]} as plain text, because no shell expands it; {remedy}"
                return

    def _unknown(self, name: str, spec: Spec) -> Iterator[str]:
        if not spec.depends_on:
            return
        missing = [each for each in spec.depends_on.names() if not self._exists(each)]
        for each in missing[:_MOST_DOUBTS]:
            yield f"depends on {each}, which does not exist; it waits until a job with that name is submitted"
        if len(missing) > _MOST_DOUBTS:
            yield f"depends on {len(missing) - _MOST_DOUBTS} more jobs that do not exist"

    def _exists(self, name: str) -> bool:
        """Whether a job, or the array it would be a task of, exists, existed, or is submitted at the same time."""
        array = array_of(name)
        if name in self._together or array in self._together or (valid_name(name) and self._was_seen(name)):
            return True
        if not valid_name(array) or not self._was_seen(array):
            return False
        specs = [spec for place in self._spool.places(array) if (spec := self._spool.job_spec(place, array))]
        return not specs or any(name in Tasks(array, spec).names() for spec in specs)

    def _was_seen(self, name: str) -> bool:
        if self._spool.places(name) or self._spool.runs(name):
            return True
        word = f'"{name}"'.encode()  # of an array, whose tasks alone have lines, `spool gc` keeps the number
        return word in (self._spool.file(LAST_RUNS) or b"") or any(word in line for line in self._spool.history())


def _not_varied(spec: Spec) -> Iterator[str]:
    """Yield what an array varies without effect, and values that were probably meant as several."""
    tasks, text = Tasks("", spec), _written(spec)
    variables = tasks.variables
    alike = [key for key in tasks.keys[1:] if key not in variables.values()]
    for name in dict.fromkeys(map(variable_of, alike)):
        keys = " and ".join(key for key in alike if variable_of(key) == name)
        yield f"has no ${name}: {keys} would have that variable; rename one of them"
    written = Substitution(None).keys_in(text) | {key for name, key in variables.items() if name in text}
    varied = [key for key, _ in spec.matrix]
    if spec.rows and written.isdisjoint(tasks.keys):  # else other columns of the table may be notes
        varied += [key for key, _ in spec.rows[0]]
    unused = [key for key in varied if key not in written]
    if unused and not any(PARAMETER in _head_of(path) for path in _files_in(text, spec)):
        from spool.formats.validation import closest  # only a mistake needs it

        for key in unused:
            near = closest(key, written.difference(tasks.keys), like=0.5)
            also = "" if key in alike else f", and in ${variable_of(key)}"
            instead = f", not {{{near}}}" if near else also
            yield f"does not use {key}: its value is where the command has {{{key}}}{instead}"
    for key, choices in spec.matrix:
        if choices[0].startswith("[") and choices[-1].endswith("]") and len(choices) > 1:
            values = ",".join(choices[:_MOST_PROPOSED]).strip("[]")
            yield f"has {choices[0]} as a value of {key}; a list has no brackets: --matrix {key}={values}"
        elif inner := next((each for each in choices if re.match(r"[A-Za-z]\w*=[^=]", each) and len(choices) > 1), ""):
            yield f"has {inner} as a value of {key}; another key has an option of its own: --matrix {inner}"
        elif len(choices) == 1 and re.fullmatch(r"-?\d+(\.\.|-|:)\d+|[\d.e-]+( +[\d.e-]+)+", choices[0]):
            yield f"has only one value of {key}, {choices[0]}; a list names each: --matrix {key}=1,2"


def same_in_all(spec: Spec) -> str:
    """Return what to tell of an array whose tasks may all do the same, "" if they do not."""
    count, text = Tasks("", spec).count, _written(spec)
    if spec.matrix or spec.rows or spec.script or count < 2 or re.search(r"\{index\}|ARRAY|TASK|-m", text):
        return ""
    if any(_files_in(text, spec)):  # a program that may read its index
        return ""
    return f"does the same in all its {count} tasks, unless the command reads $SPOOL_ARRAY_INDEX: it has no {{index}}"


def _files_in(text: str, spec: Spec) -> Iterator[str]:
    """Yield the files that a word of *text* names where the job runs."""
    place = os.path.expanduser(spec.workdir or "~")
    return (path for word in text.split() if os.path.isfile(path := os.path.join(place, word)))


def _head_of(path: str) -> str:
    with suppress(OSError), open(path, errors="replace") as file:
        return file.read(_MOST_READ)
    return ""


def _written(spec: Spec) -> str:
    """Return all that may have the `{key}` of an array."""
    words = [spec.command] if isinstance(spec.command, str) else spec.command
    paths = (spec.script, spec.workdir, spec.stdout, spec.stderr)
    return "\n".join((*words, *filter(None, paths), *(value for _, value in spec.env)))
