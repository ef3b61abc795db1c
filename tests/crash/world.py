"""A dispatcher without a machine beneath it: processes, boots and time are made up, the spool on the disk is real.

What a run does is said by its command: `ok` exits with 0 and `fail` with 3; `hang` goes on until it is stopped;
`fail until 3` and `hang until 2` do so until that attempt, or that start of the job. `denied until 2` is refused a
wrapper by the machine until it is tried for that time, and `refused until 2` is refused its command by then. `leave`
exits with 0 and leaves a process behind.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from faulty import PowerCut
from spool.core import layout
from spool.core.errors import InvalidRecord, StartRefused
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.lifecycle import Liveness
from spool.core.model import Jid, Machine, Result, Stop, StopKind
from spool.dispatcher import arrays, confinement, loop, observer
from spool.dispatcher.loop import Dispatcher
from spool.executors.base import Launch
from spool.executors.local import LocalProcesses, LocalRun
from spool.executors.process import ProcessExecutor
from spool.formats import jobfile, run_records
from spool.formats.wrapper import Surroundings
from spool.machine import identity, processes
from spool.query import snapshot
from spool.store.disk import Disk
from spool.store.locked_spool import LockedSpool
from spool.store.spool import Spool

HOST = identity.host()
NAMESPACE = identity.pid_namespace()


@dataclass
class Process:
    """One wrapper with its command."""

    name: str
    run: int
    attempt: int
    start: int  # the how-manieth of its job
    command: str
    outlasts: bool = False  # the command has ended, and the wrapper waits for what that has left behind

    @property
    def code(self) -> int | None:
        """What it exits with by itself, None if it goes on."""
        word, _, until = self.command.split(" #")[0].partition(" until ")
        reached = bool(until) and int(until) <= (self.attempt if word == "fail" else self.start)
        if word == "ok" or reached:
            return 0
        return {"fail": 3, "leave": 0, "denied": 0, "refused": 0}.get(word)


@dataclass
class World:
    """The machine: who lives, what was begun, which boot it is."""

    root: Path
    boot: str = "boot-1"
    gone_hosts: frozenset[str] = frozenset()
    cpus: int = 2
    alive: dict[int, Process] = field(default_factory=dict)
    halted: set[tuple[str, int]] = field(default_factory=set)  # runs that stand still
    launched: list[Launch] = field(default_factory=list)  # wrappers that have not spoken yet
    begun: list[tuple[str, int]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)  # of each start: the job and its command
    watchers: list[Callable[[str, str, bytes], None]] = field(default_factory=list)  # told of each write of a wrapper
    tried: Counter[str] = field(default_factory=Counter)  # how often a start of each job was
    engine: LocalProcesses = field(default_factory=LocalProcesses)  # of the dispatcher that there is
    next_pids: Iterator[int] = field(default_factory=lambda: iter(range(10_000_000, 20_000_000)))

    @property
    def staging(self) -> str:
        """Where everything is written before it has its name."""
        return f"{self.root}/{layout.STAGING}"

    # What the dispatcher is given in place of the machine.

    name = "process"

    def unavailable(self) -> str | None:
        """Everything can be started."""
        return None

    def surroundings(self) -> Surroundings:
        """Return what the wrapper's text says; nobody runs it."""
        return ProcessExecutor().surroundings()

    def start(self, launch: Launch) -> LocalRun:
        """Launch a wrapper, which speaks at the next tick."""
        if self._refuses("denied", launch):
            raise StartRefused("there is no process to be had")
        self.launched.append(launch)
        return self.engine.no_child(launch.job, launch.run, None)

    def close(self) -> None:
        """Release nothing."""

    def boot_id(self) -> str:
        """Return the id of this boot."""
        return self.boot

    def liveness(self, jid: Jid) -> Liveness:
        """Return what became of a process."""
        if jid.host != HOST:
            return Liveness.REBOOTED if jid.host in self.gone_hosts else Liveness.ELSEWHERE
        if jid.pid_namespace not in (NAMESPACE, "-"):
            return Liveness.ELSEWHERE
        if jid.boot_id != self.boot:
            return Liveness.REBOOTED
        return Liveness.ALIVE if jid.pid in self.alive else Liveness.GONE

    def is_wrapper(self, jid: Jid, root: str, name: str, run: int) -> bool:
        """Return whether a process that lives is the wrapper of that run."""
        process = self.alive[jid.pid]
        return (process.name, process.run) == (name, run)

    def has_left_processes(self, root: str, name: str, run: int) -> bool:
        """Return False: whoever ends a wrapper here ends all of its run."""
        return False

    # What happens on it.

    def tick(self) -> bool:
        """Let time pass: commands end, wrappers begin; return whether anything happened."""
        happened = bool(self.launched)
        for pid, process in list(self.alive.items()):
            if process.code is None or process.outlasts or (process.name, process.run) in self.halted:
                continue
            if process.command.startswith("leave"):
                process.outlasts = True
                self._write(f"{self.metadir(process)}/{layout.LEFTOVERS}", b"running\n")
                self._write(f"{self.metadir(process)}/{layout.RC}", f"{process.code}\n".encode())
            else:
                self.exit(pid, process.code)
            happened = True
        launched, self.launched = self.launched, []
        for launch in launched:
            self._begin(launch)
        return happened

    def exit(self, pid: int, code: int) -> None:
        """End a process as its wrapper would."""
        process = self.alive.pop(pid)
        if process.outlasts:
            Path(self.metadir(process), layout.LEFTOVERS).unlink(missing_ok=True)
        else:
            self._write(f"{self.metadir(process)}/{layout.RC}", f"{code}\n".encode())

    def metadir(self, process: Process) -> str:
        """Return the metadir of its run."""
        return f"{self.root}/jobs/{process.name}/{process.run}"

    def kill(self, name: str) -> None:
        """End the processes of a job at once, wrapper and all."""
        for pid in self.pids(name):
            del self.alive[pid]

    def reboot(self) -> None:
        """Begin the next boot: nothing lives."""
        self.boot = f"boot-{int(self.boot.split('-')[1]) + 1}"
        self.alive.clear()
        self.halted.clear()
        self.launched.clear()

    def pids(self, name: str, run: int | None = None) -> list[int]:
        """Return the processes of a job, or of one run of it."""
        return [pid for pid, p in self.alive.items() if p.name == name and run in (None, p.run)]

    def _refuses(self, how: str, launch: Launch) -> bool:
        """Whether the machine refuses a job what it needs, this time."""
        word, _, until = _command(launch).split(" #")[0].partition(" until ")
        self.tried[launch.job] += word == how
        return word == how and self.tried[launch.job] < int(until)

    def _begin(self, launch: Launch) -> None:
        pid = next(self.next_pids)
        jid = Jid(pid, 1, self.boot, NAMESPACE, HOST)
        try:
            self._write(f"{launch.metadir}/{layout.JID}", run_records.render_jid(jid))
        except (FileExistsError, FileNotFoundError):
            return
        if self._refuses("refused", launch):
            self._write(f"{launch.metadir}/{layout.REFUSED}", b"cannot start the command\n")
            return
        key = (launch.job, launch.run)
        assert key not in self.begun, f"{key} was begun twice"
        assert not self.pids(launch.job), f"{launch.job} runs twice at once"
        assert len(self.alive) < self.cpus, "more runs than there are processors"
        self.begun.append(key)
        grant = run_records.parse_grant(Path(launch.metadir, layout.GRANT).read_bytes())
        command = _command(launch)
        self.texts.append((launch.job, command))
        start = Counter(name for name, _ in self.texts)[launch.job]
        self.alive[pid] = Process(launch.job, launch.run, grant.attempt, start, command)

    def _write(self, path: str, data: bytes) -> None:
        with open(path, "xb") as record:
            record.write(data)
        for watcher in self.watchers:
            watcher("write", path, data)


def _command(launch: Launch) -> str:
    spec = jobfile.parse(Path(launch.metadir, layout.SPEC_COPY).read_bytes(), name=launch.job)
    assert isinstance(spec.command, str)
    return spec.command


class Users:
    """What people do to the files, as `cp`, `mv` and `rm` do it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layout = layout.Layout(str(root))

    def submit(self, name: str, command: str, *lines: str, place: str = QUEUED) -> None:
        """Put a job file there, whole."""
        staged = self.root / ".tmp" / f"user.{name}"
        staged.write_text("\n".join([f'command = "{command}"', *lines, ""]))
        os.rename(staged, self.path(place, name))

    def path(self, place: str, name: str) -> Path:
        """Return where a job file lies."""
        return Path(self.layout.job_file(place, name))

    def move(self, name: str, old: str, new: str) -> bool:
        """Move a job file; False if it was not there."""
        try:
            os.rename(self.path(old, name), self.path(new, name))
        except FileNotFoundError:
            return False
        return True

    def suspend(self, name: str) -> None:
        """Have the run of a job stand still: `touch`."""
        Path(self.layout.suspend_file(name)).touch()

    def go_on(self, name: str) -> None:
        """Let the run of a job go on: `rm`."""
        Path(self.layout.suspend_file(name)).unlink(missing_ok=True)

    def cancel(self, name: str) -> None:
        """Cancel a job that runs, as the command does it."""
        spool = Spool(str(self.root))
        run = spool.latest_run(name)
        if run is not None:
            stop = Stop(StopKind.CANCEL, "somebody", time.time_ns())
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                path = spool.layout.record(name, run, layout.STOP)
                Disk(f"{self.root}/.tmp").publish(path, run_records.render_stop(stop))
        self.path(RUNNING, name).unlink(missing_ok=True)


class _Processes(LocalProcesses):
    """Ends what it is told to at once, and sees the processes of the world."""

    world: World

    def terminate(self, runs: Mapping[LocalRun, bool]) -> Collection[LocalRun]:
        for run in runs:
            for pid in self.world.pids(*run.key):
                self.world.exit(pid, 143)
            self.world.halted.discard(run.key)
        return list(runs)

    def suspend(self, runs: Mapping[LocalRun, bool]) -> Collection[LocalRun]:
        for run, on in runs.items():
            if on and self.world.pids(*run.key):
                self.world.halted.add(run.key)
            elif not on:
                self.world.halted.discard(run.key)
        return [run for run, on in runs.items() if (run.key in self.world.halted) is on]

    def left_behind(self, run: LocalRun, exit_code: int | None = None) -> bool:
        return bool(self.world.pids(*run.key))


def dispatcher(world: World, disk: Disk | None = None) -> Dispatcher:
    """Return a dispatcher of that world, not opened yet."""
    spool = LockedSpool(str(world.root), disk)
    try:
        made = Dispatcher(spool)
    except BaseException:
        spool.release()
        raise
    made.executors._made = {"process": world}
    world.engine = made.executors.local
    world.engine.__class__ = _Processes
    world.engine.world = world  # type: ignore[attr-defined]
    world.engine.groups = None
    made.status.write = lambda *_, **__: None  # type: ignore[method-assign]
    made.status._plan_next = lambda: None  # type: ignore[method-assign]
    made.watcher.start = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    made.world.machine = lambda _: Machine(cpus=world.cpus, memory_bytes=1 << 30)  # type: ignore[method-assign,assignment]
    made.logs._changed = made.logs.sync if made.logs.strict else lambda: None  # type: ignore[method-assign]
    return made


def abandon(made: Dispatcher) -> None:
    """Take away what a killed process would have lost: its descriptors and its lock. The disk stays as it is."""
    made.watcher.close()
    getattr(made.gate.leases, "_disconnect", lambda: None)()
    made.wakeup.close()
    made.logs.events.close()
    made.events.client.child.close()
    for log in made.logs._open.values():
        with contextlib.suppress(OSError):
            os.close(log.fd)
    made.spool.release()


class Session:
    """Dispatchers of one world, one after the other; each may be cut off."""

    def __init__(self, world: World, disks: Iterator[Disk] | None = None) -> None:
        self.world = world
        self.users = Users(world.root)
        self.disks = disks if disks is not None else iter(())
        self.now: Dispatcher | None = None
        self.dispatchers = 0  # so far
        self.cuts = 0
        self.errors: list[OSError] = []
        self.survives_errors = False  # whether the dispatcher goes on after an error, or another one does
        self.opened = False
        self.looks_at_everything = True  # in each pass; else only at the start
        self.after_turn: Callable[[], None] = lambda: None
        self.after_cut: Callable[[], None] = lambda: None

    def settle(self, patience: int = 400) -> None:
        """Go on until nothing happens any more, with another dispatcher after each cut."""
        self.turns(patience, until_quiet=True)

    def turns(self, number: int, *, until_quiet: bool = False) -> None:
        """Do so many passes."""
        quiet = 0
        for _ in range(number):
            known = len(self.errors)
            try:
                happened = self.one_turn()
                if len(self.errors) > known:
                    happened = True
                    if not self.survives_errors:
                        self.end()
            except PowerCut:
                self.end()
                self.cuts += 1
                self.after_cut()
                happened = True
            except OSError as error:
                self.errors.append(error)
                if not (self.survives_errors and self.opened):
                    self.end()
                happened = True
            self.after_turn()
            happened = self.world.tick() or happened
            quiet = 0 if happened else quiet + 1
            if until_quiet and quiet >= 2:
                return
        if until_quiet:
            raise AssertionError(f"it does not settle: {[p.name for p in self.world.alive.values()]}")

    def end(self) -> None:
        """Kill the dispatcher."""
        if self.now is not None:
            abandon(self.now)
            self.now = None

    def sweep(self) -> None:
        """Kill the dispatcher, and take away what the next one would find in the staging directory, and no more."""
        self.end()
        spool = LockedSpool(str(self.world.root))
        spool.sweep_staging()
        spool.release()

    def _hear_of_errors(self, now: Dispatcher) -> None:
        """Keep every error that a dispatcher confines; one that nobody expects is a bug, and ends the test."""
        failed = now.confinement.failed

        def hear(thing: confinement.Thing, verb: str, error: Exception) -> None:
            if isinstance(error, OSError):
                self.errors.append(error)
            elif not isinstance(error, InvalidRecord):  # which is told, and nothing is tried again for it
                raise AssertionError(f"cannot {verb} {thing}") from error
            failed(thing, verb, error)

        now.confinement.failed = hear  # type: ignore[method-assign]

    def look_next(self) -> None:
        """Have the dispatcher look at everything in its next turn."""
        self.now.observer._timer.set(0)

    def one_turn(self) -> bool:
        """Make one turn of the dispatcher, opened first if there is none; return whether something happened."""
        if self.now is None:
            self.opened = False
            self.now = dispatcher(self.world, next(self.disks, None))
            self._hear_of_errors(self.now)
            self.dispatchers += 1
            self.now.open()
            self.opened = True
        now = self.now
        for live in now.state.live.values():
            now.supervisor.suspects.add(live.key)
        if self.looks_at_everything:
            self.look_next()
        happened = now.turn()
        now.get_ahead()
        return happened


@dataclass(frozen=True)
class Ends:
    """What a spool has come to: of each job where its file lies, how often it was begun, and how its runs ended."""

    places: dict[str, tuple[str, ...]]
    starts: dict[str, int]
    outcomes: dict[str, tuple[str, ...]]


def history(root: Path) -> list[Result]:
    """Return every line of the accounting."""
    return list(Spool(str(root)).accounts_since(None))[::-1]


def ends_of(world: World) -> Ends:
    """Return what the spool has come to."""
    names: dict[str, list[str]] = {}
    for place in (QUEUED, HELD, RUNNING, DONE):
        for path in sorted((world.root / place).glob("*.toml")):
            names.setdefault(path.stem, []).append(place)
    outcomes: dict[str, list[str]] = {}
    for result in history(world.root):
        words = f"{result.outcome} {result.attempt}.{result.requeues}" + (f" {result.again}" if result.again else "")
        outcomes.setdefault(result.job, []).append(words)
    starts = Counter(name for name, _ in world.begun)
    return Ends(
        {name: tuple(places) for name, places in sorted(names.items())},
        dict(sorted(starts.items())),
        {name: tuple(words) for name, words in sorted(outcomes.items())},
    )


def check(world: World) -> None:
    """Assert what must hold of a spool in which everything has ended, whatever was cut off on the way."""
    root = world.root
    assert not world.alive
    lines = Counter((result.job, result.run) for result in history(root))
    assert all(count == 1 for count in lines.values()), f"more than one line of history: {lines}"
    spool = Spool(str(root))
    for key in world.begun:
        assert key in lines, f"no line of history for {key}"
    for name in spool.jobs_with_runs():
        for run in spool.runs(name):
            result = spool.result(name, run)
            if spool.array(name, run) is not None:
                continue
            if result is not None:
                assert lines[name, run] == 1, f"no line of history for {name} {run}: {result}"
            elif spool.record(name, run, layout.JID) != run_records.VOID_JID:
                # Published and never claimed: nothing was started, and nothing of it is said.
                assert (name, run) not in lines
                assert (name, run) not in world.begun
    assert not list((root / RUNNING).glob("*.toml")), "files in running/ of which no run is alive"
    assert not [name for name in os.listdir(root / layout.STAGING) if not name.startswith("user.")]


@contextlib.contextmanager
def world_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Give a world with an empty spool at *root*; its boot is the one that the program sees."""
    root.mkdir(mode=0o700)
    for name in layout.DIRECTORIES:
        (root / name).mkdir(mode=0o700)
    (root / layout.CONFIG).write_text('disk_floor = "0M"\n')
    world = World(root)

    def prober(gone_hosts: frozenset[str] = frozenset()) -> World:
        world.gone_hosts = gone_hosts
        return world

    for module in (loop, snapshot, processes):  # a dispatcher and commands see the same processes
        monkeypatch.setattr(module, "MachineProber", prober)
    # What fails is tried again in the next pass: the passes of a test do not wait for anything.
    monkeypatch.setattr(confinement, "FIRST_PAUSE_NS", 0)
    monkeypatch.setattr(confinement, "LONGEST_PAUSE_NS", 0)
    monkeypatch.setattr(confinement, "_FORGET_NS", 1 << 60)
    monkeypatch.setattr("spool.state.run.LONGEST_PAUSE_NS", 0)  # after a start that was refused
    monkeypatch.setattr(identity, "boot_id", lambda **_: world.boot)
    # Meant for a process that has one dispatcher in its life: here it would keep every one that there ever was.
    monkeypatch.setattr(gc, "freeze", lambda: None)
    # On a busy machine a look, or an array, would give way: the same script makes the same changes at any pace.
    monkeypatch.setattr(arrays, "BUDGET_NS", 1 << 60)
    monkeypatch.setattr(observer, "BUDGET_NS", 1 << 60)
    # What a sync is worth, no test of one process can see; what it costs, every one can.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    yield world
