"""Launch the runs of a plan: metadir, claim, journal, wrapper, in the order of docs/FORMAT.md 5.

All starts of a pass are prepared and recorded before the first is launched, so that one line of the journal, and one
sync if `durability` requires it, serves them all.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from spool.core import layout
from spool.core.errors import SpoolError, StartRefused
from spool.core.lifecycle import Liveness, Unstartable
from spool.core.model import Answer, EventName, Spec
from spool.core.scheduler import Start
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context
from spool.dispatcher.planner import Shortage
from spool.executors import Executor, Launch
from spool.formats import journal, run_records, wrapper
from spool.formats.capabilities import loaded, used_by
from spool.machine import identity
from spool.machine.cgroups import RunGroup
from spool.machine.host import expanded, vendors_here
from spool.state.run import ActiveRun, JobEntry, JobFileVersion
from spool.store.disk import SpoolTrouble, status_of
from spool.store.edited import Settings
from spool.store.locked_spool import LockedSpool, Staged
from spool.store.ownership import name_of

log = logging.getLogger(__name__)

IN_THE_WAY = "running/ already has a file with its name that belongs to no run: move that file away"
SILENT_NS = 30_000_000_000  # how long a launched wrapper may take to write its jid


class Launcher(Component):
    """Turns the starts of a plan into live runs."""

    def __init__(self, context: Context, shortage: Shortage, put: Callable[[ActiveRun], object]) -> None:
        """*put* is called for each claimed run before it is launched, and raises nothing."""
        super().__init__(context)
        self._put = put
        self._shortage = shortage
        self._scripts = WrapperWriter(context.spool, context.settings)
        self._ahead = Preparation(context, self._scripts)

    def close(self) -> None:
        """Release everything prepared."""
        self._ahead.drop()
        self._executors.close()

    def ask_executors_again(self) -> None:
        """Let the executors be asked again, and tell the table which jobs were waiting for that."""
        if self._executors.ask_again():
            self.tell_executors_problems()

    def tell_executors_problems(self) -> None:
        """Set for every waiting job why its executor cannot start it: the configured executor may have changed."""
        waiting = [self._state.queue[name] for name in self._state.queue]
        for job in waiting:
            if job.executor_problem != self._executors.problem_of(job.spec):
                self._state.settle(self._state.job(job.name))

    def start(
        self, starts: Sequence[tuple[Start, Answer | None]], now_ns: int
    ) -> tuple[list[ActiveRun], SpoolTrouble | None]:
        """Start each of *starts*; return the runs: an `Unstartable` one was not launched.

        Each start comes with the hooks' variables for its run. A job whose file was changed, moved or deleted since the
        last look is skipped: the next look sees why. One that cannot be started for another reason is blocked until the
        next complete look, so that it does not keep others waiting. A failure of the spool as a whole is returned too,
        and the caller takes the runs back.
        """
        prepared: dict[ActiveRun, RunGroup | None] = {}
        blocked: dict[str, str] = {}
        trouble: SpoolTrouble | None = None
        try:
            try:
                self._prepare_all(starts, now_ns, prepared, blocked)
                boot_id, lines = identity.boot_id(), list[journal.Line]()
                for live in prepared:
                    self._events.run(EventName.SUBMITTED, live, now_ns)
                    arrived_ns = live.wait.arrived_at_ns
                    lines.append(journal.Started(live.name, live.run, boot_id, live.inode, arrived_ns, now_ns))
                if lines:
                    self._journal.write(lines)
                    if not self._journal.logs.strict and not all(live.spec.requeue for live in prepared):
                        self._journal.logs.sync()
            except SpoolTrouble as error:
                trouble = error
            self._launch_all(prepared, now_ns, refused=trouble is not None)
        finally:  # updates in memory can wait until the wrappers are on their way
            for live in prepared:
                self._state.claimed(self._state.job(live.name), live, now_ns)
                self._gate.leases.used(live)
        startable = [live for live in prepared if not isinstance(live.phase, Unstartable)]
        if trouble is None and not all(map(is_on_its_way, startable)):
            self.ask_executors_again()  # one of them has started nothing, or could not tell whether it has
        for name, why in blocked.items():
            self._state.block(self._state.job(name), why)
        return list(prepared), trouble

    def _launch_all(self, prepared: Mapping[ActiveRun, RunGroup | None], now_ns: int, *, refused: bool) -> None:
        """Start the wrappers of claimed runs, until one is *refused*: then all others would be refused, too."""
        startable = () if refused else [live for live in prepared if not isinstance(live.phase, Unstartable)]
        without_lease = self._gate.leases.begin(startable)
        for live, group in prepared.items():
            if not refused and live.key not in without_lease:
                refused = self._launch(live, group, now_ns)
            if live.handle is None:
                _remove(group)
                live.taken_back()

    def _prepare_all(
        self,
        starts: Sequence[tuple[Start, Answer | None]],
        now_ns: int,
        prepared: dict[ActiveRun, RunGroup | None],
        blocked: dict[str, str],
    ) -> None:
        """Claim the jobs of *starts* for runs, and add these to *prepared*, unless something is in the way."""
        for start, answer in starts[: self._shortage.most()]:
            job = self._startable(start.name)
            if job is None or job.queued is None:
                continue
            why = ""
            with self._confinement.of(Thing.of_job(start.name), "start") as piece:
                # The claim detects it by itself; its finding is checked before another number is used.
                why = self._in_the_way(start.name) if start.name in self._state.doubted else ""
                if not why:
                    self._events.file(EventName.SUBMITTING, job, job.queued, now_ns)
                    made = self._prepare(job, job.queued, start, answer, now_ns)
                    prepared.update(made)
                    why = "" if made else self._in_the_way(start.name)
            if why and self._state.told_blocked.get(start.name) != why:
                log.error("cannot start job %s: %s", start.name, why)
            if piece.failed or why:
                blocked[start.name] = why or self._confinement.why(start.name)

    def _in_the_way(self, name: str) -> str:
        """Return the second file of its name that keeps a job from being started, "" if there is none."""
        if status_of(self._spool.layout.job_file(layout.RUNNING, name)) is not None:
            return IN_THE_WAY
        return "its file is in held/ too: remove one of the two" if self._spool.is_between(name) else ""

    def foresee(self, start: Start | None, now_ns: int) -> None:
        """Prepare *start*, which is probably the next, so that it takes less time."""
        is_ready = False
        with suppress(OSError, SpoolError, ImportError):  # the start itself will report the error
            if start is not None and (job := self._startable(start.name)) is not None and job.queued is not None:
                grant = start.grant
                # A script that names a control group is written when that is created, together with the run.
                if self._executors.local.groups is None or not (grant.memory_bytes is not None or grant.cpu_list):
                    live = self._live(job, job.queued, self._spool.next_run(job.name), start, now_ns)
                    is_ready = self._ahead.prepare(live, job.queued, self._executors[live.executor])
        if not is_ready:
            self._ahead.drop()

    def _startable(self, name: str) -> JobEntry | None:
        job = self._state.jobs.get(name)
        if job is None or job.queued is None or job.queued.spec is None or job.live is not None:
            return None
        return job

    def _prepare(
        self, job: JobEntry, file: JobFileVersion, start: Start, answer: Answer | None, now_ns: int
    ) -> dict[ActiveRun, RunGroup | None]:
        """Claim a job for a run; return it with the control group that it enters, or nothing if the claim failed."""
        spool, name = self._spool, job.name
        run = spool.next_run(name)
        live = self._live(job, file, run, start, now_ns)
        ready = self._ahead.take(live, file) if answer is None else None
        record = run_records.GrantRecord(
            job=name,
            run=run,
            grant=live.grant,
            attempt=live.attempts.attempt,
            requeues=live.attempts.requeues,
            executor=live.executor,
            boot_id=identity.boot_id(),
            inode=live.inode,
            user=live.user,
            submitted_at_ns=live.wait.arrived_at_ns,
            granted_at_ns=now_ns,
            host=identity.host(),
            lease=live.lease,
            place=spool.place,
            waited_ns=live.wait.waited_ns(now_ns) if live.elsewhere is not None else 0,
        )
        files, group = {layout.GRANT: run_records.render_grant(record)}, None
        if ready is None:
            # The claim ensures that this is still the file's content, and the text that was found to be an order.
            text = file.text if file.text is not None else spool.waiting_text(name, file.version)
            if text is None:
                return {}
            script, group = self._write(live, answer)
            files |= _texts(live, text, script)
        spool.publish_metadir(name, run, files, ready)
        claimed = False
        try:
            claimed = spool.claim(name, *file.version)
        finally:
            if not claimed:
                spool.take_jid(name, run)
                _remove(group)
        if not claimed:
            return {}
        self._put(live)
        return {live: group}

    def _write(self, live: ActiveRun, answer: Answer | None) -> tuple[bytes, RunGroup | None]:
        """Write the wrapper of a run, and create the control group that limits its memory and CPUs, if possible."""
        groups, group, grant = self._executors.groups(live.executor), None, live.grant
        if _starts(live.spec):  # its wrapper comes from a session that may not enter our groups
            groups = None
        if groups is not None and (grant.memory_bytes is not None or (grant.cpu_list and groups.binds_cpus())):
            group = groups.create(live.name, live.run, grant.memory_bytes, grant.cpu_list)
        try:
            return self._scripts.render(live, self._executors[live.executor], answer, group), group
        except SpoolError as error:
            live.see(Unstartable(str(error)))
            return b"#!/bin/sh\n", group

    def _live(self, job: JobEntry, file: JobFileVersion, run: int, start: Start, now_ns: int) -> ActiveRun:
        assert file.spec is not None
        assert job.wait is not None
        return ActiveRun(
            name=job.name,
            run=run,
            spec=file.spec,
            grant=start.grant,
            lease=start.lease,
            user=name_of(file.uid),
            wait=job.wait,
            attempts=job.attempts,
            refused=job.refused,
            inode=file.inode,
            mtime_ns=file.mtime_ns,
            started_at_ns=now_ns,
            started_boot_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            executor=file.spec.executor or self._settings.config.executor,
            unregistered_until_ns=time.monotonic_ns() + SILENT_NS,
        )

    def _launch(self, live: ActiveRun, group: RunGroup | None, now_ns: int) -> bool:
        """Start the wrapper of a run; return whether the machine refuses to."""
        if isinstance(live.phase, Unstartable):
            return False
        metadir = self._spool.layout.metadir(live.name, live.run)
        launch = Launch(
            job=live.name,
            run=live.run,
            spool_dir=self._spool.root,
            metadir=metadir,
            script=f"{metadir}/{layout.WRAPPER}",
            keep=live.spec.keep_session,
            group=group,
            cpus=live.grant.cpu_list,
            spec=live.requested,
        )
        try:
            if starts := _starts(live.spec):
                handle = loaded(starts)(launch, self._executors.local)
            else:
                handle = self._executors[live.executor].start(launch)
        except StartRefused as error:
            live.taken_back(str(error))
            self._shortage.refused(live, str(error), now_ns)
            return True
        except SpoolError as error:
            live.see(Unstartable(str(error)))
            return False
        if handle is not None:  # else the job waits for its executor
            live.launched(handle)
            if live.elsewhere is None:
                self._shortage.tries(live)
        return False


def _starts(spec: Spec) -> str:
    """Return what starts a run in place of its executor; "": nothing does."""
    return next((each.starts for each in used_by(spec) if each.starts), "")


def _remove(group: RunGroup | None) -> None:
    """Remove a control group that no process has entered."""
    if group is not None:
        group.remove()


def is_on_its_way(live: ActiveRun) -> bool:
    """Whether something was started for it, as far as its executor can tell."""
    return live.handle is not None and live.handle.liveness() is not Liveness.ABSENT


class PreparedStart(Struct, frozen=True):
    """The prepared part of a metadir, and what it was made of."""

    made_of: tuple[object, ...]
    staged: Staged
    changed_ns: int  # when a record came or went last


class Preparation(Component):
    """Keeps at most one start ready."""

    def __init__(self, context: Context, scripts: WrapperWriter) -> None:
        super().__init__(context)
        self._scripts = scripts
        self._ready: PreparedStart | None = None

    def prepare(self, live: ActiveRun, file: JobFileVersion, executor: Executor) -> bool:
        """Prepare the start of *live*, which is not a run yet; return False if its file has changed.

        Raises OSError, and SpoolError for arguments that no process can have.
        """
        if self._ready is not None and self._ready.made_of != self._essence(live, file):
            self.drop()
        if self._ready is None:
            text = file.text if file.text is not None else self._spool.waiting_text(live.name, file.version)
            if text is None:
                return False
            script = self._scripts.render(live, executor)
            staged = self._spool.stage(_texts(live, text, script), blank=(layout.GRANT,))
            changed_ns = os.lstat(staged.path).st_mtime_ns
            self._ready = PreparedStart(self._essence(live, file), staged, changed_ns)
        return True

    def take(self, live: ActiveRun, file: JobFileVersion) -> Staged | None:
        """Return the preparation for the start of *live*; the caller owns it from now on."""
        ready = self._ready
        if ready is None or ready.made_of != self._essence(live, file):
            return None
        metadir = status_of(ready.staged.path)
        if metadir is None or metadir.st_mtime_ns != ready.changed_ns:  # the staging directory was swept
            self.drop()
            return None
        self._ready = None
        return ready.staged

    def drop(self) -> None:
        """Discard the preparation."""
        if self._ready is not None:
            self._spool.unstage(self._ready.staged.path)
            self._ready = None

    def _essence(self, live: ActiveRun, file: JobFileVersion) -> tuple[object, ...]:
        """Return everything that a start's records depend on, except the moment."""
        of_run = live.name, live.run, live.spec, live.grant, live.attempts, live.executor
        return (*of_run, file.version, self._settings.config)


def _texts(live: ActiveRun, spec_copy: bytes, wrapper_text: bytes) -> dict[str, bytes]:
    """Return the records of a run that can be written before its number is known to be free."""
    files = {layout.SPEC_COPY: spec_copy, layout.WRAPPER: wrapper_text}
    if live.spec.defaults_text:
        files[layout.DEFAULTS] = live.spec.defaults_text.encode()
    if live.spec.script is not None:
        files[layout.SCRIPT] = live.spec.script.encode()
    return files


class WrapperWriter:
    """Writes the wrappers of one spool."""

    def __init__(self, spool: LockedSpool, settings: Settings) -> None:
        self._spool = spool
        self._settings = settings
        self._visible = [loaded(vendor.visible) for vendor in vendors_here()]

    def render(
        self, live: ActiveRun, executor: Executor, answer: Answer | None = None, group: RunGroup | None = None
    ) -> bytes:
        """Return the text of `run.sh`; *answer* is that of the hooks, *group* is the control group that it enters.

        Raises SpoolError for arguments that no process can have.
        """
        spec, metadir = live.spec, self._spool.layout.metadir(live.name, live.run)
        command = spec.command
        if spec.script is not None:
            command = (f"{metadir}/{layout.SCRIPT}", *command[1:])
        command = wrapper.with_setup(spec.setup, command, spec.shell)
        environment = self._environment(live, metadir)
        if answer is not None:
            environment |= dict(answer.env)
        written = wrapper.Assignments(
            metadir=metadir,
            command=command,
            surroundings=executor.surroundings(),
            environment=environment,
            shell=spec.shell,
            workdir=workdir_of(spec),
            stdout=output_path(spec.stdout, live),
            stderr=output_path(spec.stderr, live),
            prolog=wrapper.both(self._settings.config.prolog, spec.prolog),
            epilog=wrapper.both(spec.epilog, self._settings.config.epilog),
            umask=spec.umask,
            limits=spec.limits,
            nicer=0 if spec.nice is None else spec.nice - os.getpriority(os.PRIO_PROCESS, 0),
            cgroup=str(group.procs) if group is not None else None,
        )
        for capability in used_by(spec):
            if capability.launch:
                written = loaded(capability.launch)(spec, written, live)
        return wrapper.render(written, self._constant())

    def _constant(self) -> str | None:
        """Return the file that has the wrapper's constant, written if it is missing; None if it cannot be."""
        script, disk = wrapper.load(), self._spool.disk
        path = self._spool.layout.at(f"{layout.WRAPPERS}/{script.name}")
        try:
            found = status_of(path)
            if found is None or not stat.S_ISREG(found.st_mode) or found.st_size != len(script.constant):
                disk.ensure_directory(os.path.dirname(path))
                disk.put(path, script.constant, durable=True)
        except OSError as error:
            log.warning("cannot write %s, so each run.sh contains it: %s", path, error.strerror)
            return None
        return path

    def _environment(self, live: ActiveRun, metadir: str) -> dict[str, str]:
        spec = live.spec
        environment = wrapper.job_environment(
            spec,
            live.grant,
            spool_dir=self._spool.root,
            job=live.name,
            run=live.run,
            attempt=live.attempts.attempt,
            metadir=metadir,
            gpu_names=self._settings.config.gpu_names,
        )
        if live.elsewhere is None:
            for visible in self._visible:
                environment |= visible(live.grant, environment)
        else:  # its engine chooses its GPUs
            environment |= {"SPOOL_GPUS": str(spec.request.gpus)}
            for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
                environment.pop(name, None)
        return wrapper.with_references(environment, spec.env)


def workdir_of(spec: Spec) -> str:
    """Return the directory in which a job runs: by default the home directory; a relative path is taken from there."""
    home = os.path.expanduser("~")
    return os.path.join(home, expanded(spec.workdir, dict(spec.env))) if spec.workdir else home


def output_path(template: str | None, live: ActiveRun) -> str | None:
    """Return the path of an output: `%n` is the job, `%r` the run, `%a` the array index, `%%` a percent sign.

    `%4a` is an index of at least four digits. A relative path is taken from the workdir.
    """
    if template is None:
        return None
    index = str(live.spec.task.index) if live.spec.task is not None else ""
    values = {"n": live.name, "r": str(live.run), "a": index, "%": "%"}
    path = re.sub("%([1-9]?)([nra%])", lambda found: values[found[2]].rjust(int(found[1] or 0), "0"), template)
    return os.path.normpath(os.path.join(workdir_of(live.spec), expanded(path, dict(live.spec.env))))
