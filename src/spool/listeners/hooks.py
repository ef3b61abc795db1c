"""The executables in `hooks/` of the spool: for events, and to review new jobs, starts and cancellations.

Each runs in a session of its own, with the facts of the event, a time limit, and a limit on its output. Processes that
it leaves behind are killed by the mark of the hook, and reaped: they pass to the process of the listeners, their
nearest subreaper.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from spool.core.errors import InvalidFile, InvalidValue
from spool.core.model import SECOND_NS, Answer, Event, EventName, Jid
from spool.core.units import whole_words
from spool.formats import jobfile, toml
from spool.formats.events import facts, plain_keys, render_facts, variables
from spool.formats.wrapper import added_variables
from spool.listeners import REVIEWED, Begin, Listener, find_hooks
from spool.machine import identity, processes
from spool.machine.processes import HOOK_MARK, Process, Sought, send

log = logging.getLogger(__name__)

LIMIT_NS = 30 * SECOND_NS
"""The longest that a hook may take."""

_MOST_OUTPUT = 64 << 10
_MOST_READS = 64  # in a row, of a hook that writes and writes
_CUT_OFF = b"\n[the rest of its output was cut off]\n"
inherits_orphans = False
"""Whether this process inherits the orphans of its hooks, as that of the listeners does."""
_WALKS, _PAUSE_S = 40, 0.005  # until no process of a hook is left
_ORPHAN_S = 5.0  # for an orphan that has just ended, since a listener may be its parent

_ANSWERS = {EventName.SUBMITTING: "SPOOL_ENV", EventName.QUEUEING: "SPOOL_KEYS"}
"""The variable with the path of the file in which a hook answers."""

_marks = itertools.count(1)
_NOTHING: Mapping[str, str] = {}
_mutex = threading.Lock()
_running: dict[int, str] = {}  # hooks being waited for: pid -> mark


class Hooks(Listener):
    """Runs the hooks of each event, one after the other. They are listed each time, so changes apply at once."""

    name = "hooks"

    def __init__(self, root: str, _: object = None) -> None:
        self._root = root

    @property
    def wants(self) -> Collection[str]:
        """The events that have hooks now, without the reviews."""
        return find_hooks(self._root).paths.keys() - REVIEWED

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Run the hooks of *event*; the event is done whatever they do."""
        for path in find_hooks(self._root).paths.get(event.name, ()):
            self._run(path, event)
        done()

    def ask(self, event: Event, begin: Begin) -> Answer:
        """Run the hooks of *event* until one exits with a code other than 0; its output is the reason.

        What those of a start append to `$SPOOL_ENV` is for the environment of the run. What those of a new job write
        to `$SPOOL_KEYS`, as TOML, are keys to set; each sees those of the hooks before it. *begin* is called before
        each hook, with its time limit in nanoseconds.
        """
        found: dict[str, str] = {}
        keys: list[tuple[str, dict[str, Any]]] = []
        for path in find_hooks(self._root).paths.get(event.name, ()):
            begin(LIMIT_NS)
            with _in_memory("answer") as answer:
                # A path of this process, because a hook may start programs that close the rest.
                place = f"/proc/{os.getpid()}/fd/{answer}"
                ran = self._run(path, event, {_ANSWERS[event.name]: place} if event.name in _ANSWERS else {})
                if ran.problem is not None:
                    return Answer(no=f"hook {event.name}: {_brief(ran.output.strip()) or ran.problem}")
                said = os.pread(answer, _MOST_OUTPUT + 1, 0)  # a byte more than can be good
            try:
                if event.name is EventName.QUEUEING:
                    if len(said) > _MOST_OUTPUT:
                        return Answer(no=f"hook {event.name}: its $SPOOL_KEYS has more than 64 KiB")
                    new = plain_keys(toml.read(said, "its $SPOOL_KEYS"))
                    keys += [(os.path.relpath(path, self._root), new)] if new else []
                    event = replace(event, keys=dict(jobfile.overridden(event.keys or {}, new)))
                else:
                    found |= added_variables(said)
            except InvalidValue as error:
                return Answer(no=f"hook {event.name}: its $SPOOL_ENV {error}")
            except InvalidFile as error:
                return Answer(no=f"hook {event.name}: {error}")
        return Answer(env=tuple(found.items()), keys=tuple(keys))

    def _run(self, path: str, event: Event, more: Mapping[str, str] = _NOTHING) -> _HookResult:
        shown = os.path.relpath(path, self._root)
        with _in_memory("event", render_facts(facts(event))) as told:
            ran = _run_hook(path, told, {**variables(event), **more}, self._root)
        for line in ran.output.splitlines():
            if line.strip():
                log.info("%s: %s", shown, _printable(line))
        about = event.job or event.reservation or event.gpu or "the dispatcher"
        if ran.problem is not None:
            level = logging.INFO if event.name in REVIEWED else logging.WARNING
            log.log(level, "%s for %s: %s", shown, about, ran.problem)
        if ran.left:
            log.warning("%s for %s: killed %d processes that it left behind", shown, about, ran.left)
        return ran


@contextmanager
def _in_memory(name: str, text: bytes = b"") -> Iterator[int]:
    """Open a file in memory that has *text*, to be read from its beginning."""
    fd = os.memfd_create(name)
    try:
        os.pwrite(fd, text, 0)
        yield fd
    finally:
        os.close(fd)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() or character == "\t" else "?" for character in text)


def _brief(text: str) -> str:
    """Return the last line that is not blank: usually the error message of a program."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return whole_words(_printable(lines[-1]), 300) if lines else ""


class _HookResult(Struct, frozen=True):
    """How a hook ended: `problem` is the error, None if there was none."""

    problem: str | None
    output: str = ""
    left: int = 0  # processes that it left behind, which are killed


def _run_hook(path: str, stdin: int, variables: Mapping[str, str], root: str) -> _HookResult:
    """Run the executable *path* in the spool *root*, and wait for its end, at most `LIMIT_NS`."""
    mark = f"{os.getpid()}.{next(_marks)}"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPOOL_")}
    environment |= {**variables, "SPOOL_DIR": root, HOOK_MARK: mark}
    try:
        process = subprocess.Popen(
            [path],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            cwd=root,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        hint = " (does it have a #! line?)" if error.errno == 8 else ""
        return _HookResult(f"it cannot be executed: {error.strerror}{hint}")
    jid = identity.of_process(process.pid)
    with _mutex:
        _running[process.pid] = mark
    output, code = b"", None
    left = 0
    try:
        output, ended = _attend(process)
        # The hook is reaped only afterwards, so that its pid cannot be reused before.
        left = end_tree(root, mark, jid) - (not ended)
        code = process.wait()
    finally:
        with _mutex:
            _running.pop(process.pid, None)
        if process.stdout is not None:
            process.stdout.close()
    text = output.decode("utf-8", "replace")
    if not ended:
        return _HookResult(f"it took longer than {LIMIT_NS / SECOND_NS:g}s and was killed", text, 0)
    if code:
        return _HookResult(f"signal {-code}" if code < 0 else f"exit code {code}", text, left)
    return _HookResult(None, text, left)


def _attend(process: subprocess.Popen[bytes]) -> tuple[bytes, bool]:
    """Collect the output until the hook ends or its time is over; return whether it ended."""
    assert process.stdout is not None
    out, end = process.stdout.fileno(), os.pidfd_open(process.pid)
    try:
        os.set_blocking(out, False)
        ready = select.poll()
        ready.register(out, select.POLLIN)
        ready.register(end, select.POLLIN)
        taken, deadline = b"", time.monotonic_ns() + LIMIT_NS
        ended = False
        while not ended and time.monotonic_ns() < deadline:
            ended = end in dict(ready.poll(max(0, deadline - time.monotonic_ns()) / 1e6))
            with suppress(OSError):  # nothing is there now; what its children hold open is not waited for
                for _ in range(_MOST_READS):
                    data = os.read(out, _MOST_OUTPUT)
                    taken += data[: _MOST_OUTPUT + 1 - len(taken)]
                    if not data:
                        with suppress(KeyError):
                            ready.unregister(out)
                        break
        return taken[:_MOST_OUTPUT] + (_CUT_OFF if len(taken) > _MOST_OUTPUT else b""), ended
    finally:
        os.close(end)


def end_tree(root: str, mark: str, jid: Jid | None, *, ours: bool = True) -> int:
    """Kill the processes of a hook, itself included; return how many there were.

    *jid* is the hook's identity, if known. One that is *ours* descends from this process, with
    all of its orphans if this process inherits them.
    """
    below = os.getpid() if ours and inherits_orphans else None
    killed: set[Process] = set()
    before: frozenset[Process] = frozenset()
    for walk in range(_WALKS):
        sought = Sought(mark, 0, root, jid, frozenset(killed))
        found = processes.search([sought], below=below)
        left = found.members[sought.key]
        if not left and found.certain:
            break
        # Processes that were stopped in two looks fork no more; those not stopped after half of the looks are killed
        # anyway.
        still = processes.still(left)
        if left.keys() == still == before or walk >= _WALKS // 2:
            killed |= send(left, signal.SIGKILL).signalled
        else:
            send((process for process in left if process not in still), signal.SIGSTOP)
        before = still
        time.sleep(_PAUSE_S)
    return len(killed)


class OrphanReaper:
    """Reaps the orphans of hooks, and kills leftover hooks."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._dead: dict[int, float] = {}  # children that have ended, and since when that is known

    def end_strangers(self) -> None:
        """Kill hooks left by an earlier process of the same spool that was killed."""
        mine = f"{os.getpid()}."
        for pid, mark in processes.hooks_of(self._root):
            if not mark.startswith(mine):
                end_tree(self._root, mark, identity.of_process(pid), ours=False)

    def end_all(self) -> None:
        """Kill the hooks that still run."""
        with _mutex:
            running = list(_running.items())
        for pid, mark in running:
            end_tree(self._root, mark, identity.of_process(pid))

    def reap(self) -> None:
        """Reap the orphans that ended a while ago."""
        now = time.monotonic()
        dead = {
            pid
            for pid in processes.children_of_self() or ()
            if (stat := identity.read_stat(pid)) is not None and stat.dead
        }
        self._dead = {pid: self._dead.get(pid, now) for pid in dead}
        with _mutex:
            processes.reap(pid for pid, since in self._dead.items() if pid not in _running and now - since > _ORPHAN_S)
