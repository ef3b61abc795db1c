"""Spool for Python programs: the functions of the command line, with values in and values out. Nothing is printed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from spool.client import autostart
from spool.client.draft import Draft, exports, job_keys
from spool.client.output import read_output, run_of
from spool.client.requests import DRY_RUN, Change, ChangeKind, Requests
from spool.client.submit import check_submitter, default_root, ensure_spool, submit, where_taken
from spool.client.waiting import Awaited, End
from spool.core.errors import InvalidValue, SpoolError, cannot
from spool.core.names import why_not_name
from spool.formats import jobfile
from spool.query.explain import Explanation, why
from spool.query.jobs import ALL_JOBS, JobFilter, JobList, list_jobs
from spool.store.glance import defaults_of
from spool.store.ownership import this_user
from spool.store.spool import Spool

_POLL_S = 0.025


class Client:
    """One spool, read and changed through its files. Methods that need a dispatcher start one if none is running.

    Expected failures raise a SpoolError: NoSuchJob if no job has the name, InvalidJob if the keys do not make a valid
    job file; SpoolUnusable for changes of another user's spool. Errors of the disk are OSErrors.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, *, make: bool = False) -> None:
        """Use the spool at *root*; by default that of the command line: `$SPOOL_DIR`, else `~/.spool`.

        *make*: create it if it does not exist. Raises SpoolUnusable.
        """
        path = os.path.abspath(root) if root is not None else default_root()
        if make:
            ensure_spool(path)
        self._spool = Spool.open(path)

    @property
    def root(self) -> str:
        """The directory of the spool."""
        return self._spool.root

    @property
    def _requests(self) -> Requests:
        """The requests for changes of jobs. Raises SpoolUnusable if the spool is another user's."""
        return Requests(self._spool, this_user())

    def submit(
        self,
        command: str | Sequence[str],
        *,
        name: str,
        held: bool = False,
        replace: bool = False,
        **keys: object,
    ) -> str:
        """Put a job into the queue, or keep it held, and return its name. It is on the disk when this returns.

        *command* is a text for the shell, or a program with its arguments. *keys* are those of a job file, with values
        of the same form: `cpus=2, memory="4G", time_limit="1h"`. By default the job runs in the current directory, with
        the PATH, the virtual environment and so on of this process, as from `spool submit`; `workdir` and `env`
        override this. With *replace* it replaces a waiting or held job of that name, and waits for the end of a running
        one.
        """
        why_not = why_not_name(name)
        if why_not is not None:
            raise InvalidValue(cannot("name", f"a job {name!r}", why_not))
        program = command if isinstance(command, str) else list(command)
        if isinstance(env := keys.get("env"), Mapping):
            keys["env"] = dict(env)
        check_submitter(self.root)
        draft = Draft(name, job_keys(program, keys, exports(self.root)), held=held)
        draft.check(self.root)
        taken = where_taken(self.root, name)
        if taken is not None and not replace:
            raise SpoolError(cannot("submit", f"job {name}", f"a job of that name is in {taken}/"))
        try:
            submit(self.root, [(name, draft.text())], held=held, replace=replace)
        except FileExistsError:
            raise SpoolError(cannot("submit", f"job {name}", "a job of that name has just been submitted")) from None
        if not held:
            self._serve()
        return name

    def cancel(self, name: str, reason: str = "", *, dry_run: bool = False) -> tuple[Change, ...]:
        """End a job, whether it waits or runs; return the change of each of its files.

        With *dry_run*, here and below, nothing is changed, and the result says what would be done.
        """
        return tuple(map(self._served, self._requests.cancel(name, reason, dry_run=dry_run)))

    def hold(self, name: str, *, dry_run: bool = False) -> Change:
        """Hold a job until it is released; a running one is stopped, and starts over then."""
        return self._served(self._requests.hold(name, dry_run=dry_run))

    def release(self, name: str, *, dry_run: bool = False) -> Change:
        """Let a held job run."""
        return self._served(self._requests.release(name, dry_run=dry_run))

    def requeue(self, name: str, *, dry_run: bool = False, **keys: object) -> Change:
        """Run an ended job again, or stop a running one and start it over.

        *keys* are changed in its job file before: `requeue("train", memory="16G", time_limit=None)`; None removes a
        key. The rest of the file stays unchanged. Raises InvalidJob for keys that do not make a valid job file.
        """

        def changed(name: str, text: bytes) -> bytes:
            stated = {key: value for key, value in keys.items() if value is not None}
            new = jobfile.edited(text, stated, keys.keys() - stated.keys(), name=name)
            jobfile.parse(new, name=name, defaults=defaults_of(self.root))
            return new

        return self._served(self._requests.requeue(name, changed if keys else None, dry_run=dry_run))

    def suspend(self, name: str, reason: str = "", *, dry_run: bool = False) -> Change:
        """Suspend a running job and the clock of its time limit. It keeps its resources."""
        return self._served(self._requests.suspend(name, reason, dry_run=dry_run))

    def go_on(self, name: str, *, dry_run: bool = False) -> Change:
        """Continue a suspended job."""
        return self._served(self._requests.go_on(name, dry_run=dry_run))

    def wait(self, name: str, *, timeout_s: float | None = None) -> End | None:
        """Wait until a job has ended and return its end; None after a timeout."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        awaited = Awaited(self._spool, name)
        while (end := awaited.poll()) is None:
            if until is not None and time.monotonic() >= until:
                return None
            time.sleep(_POLL_S)
        return end

    def output(self, name: str, *, run: int | None = None) -> bytes:
        """Return the output of a job so far: of its newest run, or of *run*; for an array that of each task."""
        return b"".join(read_output(self._spool, name, run_of(self._spool, name, run)))

    def jobs(self, wanted: JobFilter = ALL_JOBS, *, everything: bool = False) -> JobList:
        """Return active and recently ended jobs; with *everything* all that ever ended."""
        return list_jobs(self._spool, wanted, everything=everything)

    def why(self, name: str) -> Explanation:
        """Return why a job does not run yet, what must end first, and when it could start."""
        return why(self._spool, name)

    def _served(self, change: Change) -> Change:
        if change.kind not in DRY_RUN | {ChangeKind.HELD, ChangeKind.CANCELLED}:
            self._serve()
        return change

    def _serve(self) -> None:
        # No error if none can be started: the request is on the disk for the next one, and `jobs` reports it.
        autostart.ensure(self.root)
