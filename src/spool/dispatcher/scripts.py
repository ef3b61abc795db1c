"""What the wrapper of a run says: its job, its grant and the configuration, turned into assignments."""

from __future__ import annotations

from spool.dispatcher.paths import expanded, home, output_path
from spool.executors import Executor
from spool.formats import wrapper
from spool.formats.listening import Reply
from spool.machine.host import umask
from spool.state.table import Live
from spool.store.config import Settings
from spool.store.spool import Spool


class Scripts:
    """Writes the wrappers of one spool."""

    def __init__(self, spool: Spool, settings: Settings) -> None:
        self._spool = spool
        self._settings = settings
        self._umask = umask()

    def render(self, live: Live, executor: Executor, texts: Reply | None = None) -> bytes:
        """Return the text of `run.sh`; *texts* are those of plugins.

        Raises SpoolError for what no process can be given.
        """
        spec, metadir = live.spec, self._spool.layout.metadir(live.name, live.run)
        environment = wrapper.job_environment(
            spec,
            live.grant,
            spool_dir=self._spool.root,
            job=live.name,
            run=live.run,
            attempt=live.series.attempt,
            metadir=metadir,
        )
        return wrapper.render(
            wrapper.Assignments(
                metadir=metadir,
                command=spec.command,
                surroundings=executor.surroundings(),
                environment=environment,
                shell=spec.shell,
                workdir=expanded(spec.workdir) if spec.workdir else home(),
                stdout=output_path(spec.stdout, live),
                stderr=output_path(spec.stderr, live),
                init=texts.init if texts is not None else None,
                prep=texts.prep if texts is not None else None,
                end=texts.end if texts is not None else None,
                prolog=_both(self._settings.prolog, spec.prolog),
                epilog=_both(spec.epilog, self._settings.epilog),
                umask=self._umask,
                cgroup=str(live.group.procs) if live.group is not None else None,
            )
        )


def _both(first: str | None, second: str | None) -> str | None:
    return "\n".join(text for text in (first, second) if text) or None
