"""`spool signal`: send a signal to the processes of running jobs."""

from __future__ import annotations

import re
import signal
from typing import Any

import click

from spool.cli.common import for_each, own, states_of
from spool.cli.control import picked_names, picking
from spool.cli.group import Verb
from spool.core.errors import SpoolError, UsageError, cannot
from spool.core.layout import RUNNING
from spool.core.lifecycle import Liveness
from spool.core.model import Jid, SignalTo
from spool.core.names import LOCAL_EXECUTORS, engine_title
from spool.query.selection import running_tasks
from spool.store.spool import Spool

_KNOWN = {each.name.removeprefix("SIG"): each for each in signal.Signals}


class _SignalVerb(Verb):
    """A verb whose first word may be written as for kill(1): -USR1, -9."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remove the dash from a signal."""
        first = args[0].upper() if args else ""
        named = re.fullmatch(r"-(SIG)?[A-Z0-9]+", first) and first.removeprefix("-").removeprefix("SIG") in _KNOWN
        if named or re.fullmatch(r"-[0-9]{1,2}", first):
            args = [first[1:], *args[1:]]
        return super().parse_args(ctx, args)


@click.command(cls=_SignalVerb)
@click.argument("signal_name", metavar="SIGNAL")
@picking
@click.option("--to", type=click.Choice(("main", "all", "shell")), help="Which processes. Default: as the job says.")
@click.option("--shell", is_flag=True, help="The same as --to shell.")
@click.pass_obj
def command(root: str, /, signal_name: str, to: SignalTo, shell: bool, dry_run: bool, **picks: Any) -> int:
    """Send a signal to the processes of running jobs.

    SIGNAL is a name or a number: USR1, SIGUSR1, 10. It goes to the program itself: not to what that has started, nor
    to a shell that only waits for it, as with the key `signal_to`. A job that dies from the signal has failed. To end
    a job use `spool cancel`, to pause it `spool suspend`.

      spool signal USR1 train
      spool signal INT --project vision
      spool signal HUP 'serve_*' --dry-run

    By hand:
      ps -s $(cut -d' ' -f1 jobs/train/1/jid)  # its processes, the wrapper first
      kill -USR1 PID
    """
    number, spool = _number(signal_name, picks["names"]), own(root)
    names, code = picked_names(spool, (RUNNING,), picks, states_of(picks.pop("states")))

    def act(name: str) -> str:
        return _signalled(spool, name, number, to="shell" if shell else to, dry_run=dry_run)

    return max(code, for_each(running_tasks(spool, names), act))


def _number(text: str, names: tuple[str, ...]) -> signal.Signals:
    name = text.upper().removeprefix("SIG")
    found = _KNOWN.get(name)
    if found is None and re.fullmatch("[0-9]{1,3}", text) and int(text) in set(_KNOWN.values()):
        found = signal.Signals(int(text))
    if found is None:
        last = names[-1].upper().removeprefix("SIG") if names else ""
        remedy = f"write `spool signal {last} {text}`" if last in _KNOWN else "`kill -l` lists the signals"
        raise UsageError(cannot("send", f"a signal {text!r}", "no such signal", remedy=remedy))
    if found is signal.SIGSTOP:
        why = "the time limit would keep counting"
        raise UsageError(cannot("send", "STOP", why, remedy="`spool suspend` stops a job and its clock"))
    return found


def _signalled(spool: Spool, name: str, number: signal.Signals, *, to: SignalTo, dry_run: bool) -> str:
    """Send the signal and return a message. Raises SpoolError if no process of the job can have received it."""
    from spool.executors import Executors
    from spool.executors.local import LocalProcesses

    what, word = ("signal", f"job {name}"), number.name.removeprefix("SIG")
    run = spool.latest_run(name)
    if RUNNING not in spool.places(name) or run is None:
        if not spool.places(name) and not spool.runs(name):
            raise spool.no_such_job(*what, name)
        raise SpoolError(cannot(*what, "it is not running", remedy=f"`spool show {name}` shows its state"))
    if spool.array(name, run) is not None:
        raise SpoolError(cannot(*what, "it is an array, and none of its tasks is running"))
    grant, jid, spec = spool.grant(name, run), spool.jid(name, run), spool.spec(name, run)
    if grant is None or not isinstance(jid, Jid):
        raise SpoolError(cannot(*what, "it is still starting", remedy="try again in a moment"))
    if grant.executor not in LOCAL_EXECUTORS:
        known = spool.engine(name, run)
        remedy = f"`scancel --batch --signal={word} {known[2]}` signals it" if known is not None else ""
        raise SpoolError(cannot(*what, f"it runs in {engine_title(grant.executor)}", remedy=remedy))
    suspended = spool.suspend_order(name) is not None
    if suspended and number is signal.SIGCONT:
        raise SpoolError(cannot(*what, "it is suspended", remedy=f"`spool continue {name}` resumes it"))
    handle = Executors(lambda: grant.executor, LocalProcesses(spool.root)).adopt(grant.executor, name, run, jid)
    if handle.liveness() is Liveness.ELSEWHERE:
        raise SpoolError(cannot(*what, f"it runs on {jid.host}", remedy="run this command there"))
    if dry_run:
        return f"{name} would get {word}"
    told = handle.signal(word, to or (spec.signal_to if spec is not None else None))
    if not told:
        raise SpoolError(cannot(*what, "it has no process that can be signalled"))
    later = "; it takes effect when the job is resumed" if suspended and number is not signal.SIGKILL else ""
    return f"{name}: {word} sent to {told} process{'' if told == 1 else 'es'}{later}"
