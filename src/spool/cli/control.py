"""The verbs that request one change: `cancel hold release requeue suspend continue signal pause resume`."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import wraps
from typing import Any

import click
from msgspec import Struct

from spool.cli import joboptions, render
from spool.cli.group import (
    Verb,
    carried_out,
    ensure_dispatcher,
    for_each,
    made,
    moment_of,
    named,
    names_argument,
    one_job,
    opened,
    option_in,
    own,
    run_named,
    states_of,
    states_option,
)
from spool.cli.render import tell
from spool.client.requests import Change, ChangeKind, Requests, told
from spool.core.errors import ExitCode, SpoolError, UsageError, cannot
from spool.core.layout import DONE, HELD, LOCAL_EXECUTORS, QUEUED, RUNNING, is_pattern
from spool.core.lifecycle import Liveness
from spool.core.model import Jid, SignalTo, State
from spool.core.reasons import some_of
from spool.formats.capabilities import engine_title
from spool.store.ownership import this_user
from spool.store.spool import Spool

_MOST_SHOWN = 5  # names in a question
Command = Callable[..., int]


Act = Callable[..., Change | tuple[Change, ...]]
"""What changes one job, given the requests, its name, `dry_run` and the verb's own options."""


class JobVerb(Struct, frozen=True):
    """The folders that a verb applies to, and the results that need a dispatcher; None: all.

    `suspended`: of the runs that are not named, it takes only those that are suspended, or only the others. `remark` is
    told once something has been changed.
    """

    places: tuple[str, ...]
    serve_if: ChangeKind | None = None
    suspended: bool | None = None
    remark: str = ""

    def command(self, *options: Callable[[Command], Command]) -> Callable[[Act], click.Command]:
        """Make the command, with *options* of its own, of what changes one job."""

        def made(act: Act) -> click.Command:
            @wraps(act)
            def changed(root: str, /, **given: Any) -> int:
                spool = opened(root)
                requests = Requests(spool, this_user())
                picks = {key: given.pop(key) for key in _PICKS if key in given}
                pick = picked_names if self.suspended is None else self._suspendable
                names, code = pick(spool, self.places, picks)
                return max(code, self.carry_out(spool, names, lambda name: act(requests, name, **given)))

            function: Command = click.pass_obj(changed)
            for option in reversed(options):
                function = option(function)
            return click.command(cls=Verb)(picking(*self.places)(function))

        return made

    def carry_out(self, spool: Spool, names: Iterable[str], act: Callable[[str], Change | tuple[Change, ...]]) -> int:
        """Call *act* for each job and print its result; return the highest exit code."""
        done: set[ChangeKind] = set()

        def told_of(name: str) -> str:
            found = act(name)
            changes = (found,) if isinstance(found, Change) else found
            done.update(change.kind for change in changes if not change.dry_run)
            return told(name, changes)

        code = for_each(names, told_of)
        if self.needs_dispatcher(done):
            ensure_dispatcher(spool.root)
        if self.remark and done:
            tell(self.remark)
        return code

    def needs_dispatcher(self, done: Set[ChangeKind]) -> bool:
        """Whether a dispatcher must react to the results *done*."""
        return bool(done) and (self.serve_if is None or self.serve_if in done)

    def _suspendable(self, spool: Spool, places: tuple[str, ...], picks: Mapping[str, Any]) -> tuple[list[str], int]:
        """Return the selected runs: those named, and of the other selected ones the suspended, or the rest."""
        from spool.query.selection import running_tasks

        names, code = picked_names(spool, places, picks)
        by_name = {name for name in picks["names"] if not is_pattern(name)} if not picks["states"] else ()
        by_name, orders = set(named(spool, by_name)), set(spool.running_files()[1])
        found = [name for name in running_tasks(spool, names) if name in by_name or (name in orders) is self.suspended]
        if not found and names:
            state = "suspended" if self.suspended else "running and not suspended"
            render.say(f"nothing to do: none of these is {state}")
        return found, code


CANCEL = JobVerb((QUEUED, HELD, RUNNING), ChangeKind.STOPPING)
HOLD = JobVerb((QUEUED, RUNNING), ChangeKind.STOPPED_AND_HELD)
RELEASE = JobVerb((HELD,))
REQUEUE = JobVerb((RUNNING, DONE))
SUSPEND = JobVerb((RUNNING,), suspended=False, remark="a suspended job keeps its CPUs, memory and GPUs")
CONTINUE = JobVerb((RUNNING,), suspended=True)

_PICKS = ("names", "states", "user", "project", "tag", "everything")


def picking(*places: str) -> Callable[[Command], Command]:
    """Give a verb the names of jobs in *places*, and the options that select jobs."""

    def made(function: Command) -> Command:
        for option in (
            click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing."),
            click.option("--tag", metavar="TAG", help="Only jobs with this tag."),
            click.option("--project", metavar="NAME", help="Only jobs in this project."),
            click.option("-u", "--user", metavar="USER", help="Only this user's jobs."),
            states_option,
            names_argument(places=places),
        ):
            function = option(function)
        return function

    return made


def picked_names(
    spool: Spool, places: tuple[str, ...], picks: Mapping[str, Any], states: frozenset[State] | None = None
) -> tuple[list[str], int]:
    """Return the jobs in *places* that the command line selects, and the exit code for names that match nothing.

    *states* are taken in place of the stated ones.
    """
    states = states_of(picks["states"]) if states is None else states
    names, filters = picks["names"], {key: picks[key] for key in ("user", "project", "tag")}
    for key, value in filters.items():
        if value == "":  # an unset variable in a script must not mean all jobs
            raise click.UsageError(f"--{key} is empty")
    if picks.get("everything", False):
        if names or states or any(filters.values()):
            raise click.UsageError("--all takes all jobs; leave out the names and the other selecting options")
    elif not states and not any(filters.values()):
        if not names:
            more = ", or give --all" if "everything" in picks else ""
            raise click.UsageError(f"name jobs, or select them with --user, --project, --tag or --state{more}")
        return named(spool, names, places), 0
    meant = tuple(name if is_pattern(name) else one_job(spool, name) for name in names)
    from spool.query.rows import JobFilter
    from spool.query.selection import picked

    wanted = JobFilter(meant, states, **filters, since_at_ns=picks.get("since_at_ns"))
    found, unknown = picked(spool, wanted, places)
    for name in unknown:
        tell(str(spool.no_such_job("find", f"job {name}", name)))
    if not found and not unknown:
        render.say(f"nothing to do: no job in {'/, '.join(places)}/ matches")
    return found, int(ExitCode.NO_SUCH_JOB) if unknown else 0


@CANCEL.command(
    click.option("--all", "everything", is_flag=True, help="All jobs that wait, are held or run."),
    click.option("--reason", default="", metavar="TEXT", help="The reason; recorded with a running job."),
)
def cancel(requests: Requests, name: str, reason: str, *, dry_run: bool) -> tuple[Change, ...]:
    """Cancel waiting or running jobs.

    A running job gets TERM, and KILL after its grace period; its whole process tree ends. NAMES may be globs; `@`
    is the job that you submitted last. If a second file of the same name waits for the run to end, both are
    cancelled, and each gets its record and its line of history.

      spool cancel train
      spool cancel 'sweep_*' --dry-run
      spool cancel --project vision --state queued
      spool cancel --all

    By hand:
      mv queued/train.toml done/  # if it is waiting
      rm running/train.toml       # if it is running
    """
    return requests.cancel(name, reason, dry_run=dry_run)


@HOLD.command()
def hold(requests: Requests, name: str, *, dry_run: bool) -> Change:
    """Hold jobs until they are released.

    A waiting job keeps its place in the queue. A running job is stopped, and starts over when released; `spool suspend`
    pauses it where it is.

      spool hold train
      spool hold --user anna --state queued

    By hand: mv queued/train.toml held/
    """
    return requests.hold(name, dry_run=dry_run)


@RELEASE.command()
def release(requests: Requests, name: str, *, dry_run: bool) -> Change:
    """Release held jobs.

    A suspended job that is named continues, as by `spool continue`.

      spool release train
      spool release --tag night

    By hand: mv held/train.toml queued/
    """
    return requests.release(name, dry_run=dry_run)


@click.command(cls=Verb)
@picking(*REQUEUE.places)
@click.option("--failed", is_flag=True, help="Only jobs that failed, were lost, or exceeded a limit.")
@click.option("--since", metavar="TIME", help='With --failed: only since "2h" (ago), 0:00, friday, a date.')
@click.option("--yes", is_flag=True, help="With --failed: do not ask before running several jobs again.")
@click.option("--cascade", is_flag=True, help="Also jobs that were cancelled because one of these failed.")
@option_in("")(
    "--set",
    "sets",
    also=("--with",),
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the jobs. May be repeated.",
)
@click.pass_obj
def requeue(
    root: str,
    /,
    failed: bool,
    since: str | None,
    yes: bool,
    cascade: bool,
    sets: tuple[str, ...],
    dry_run: bool,
    **picks: Any,
) -> int:
    """Run ended jobs again, or stop running jobs and start them over.

    Every earlier run keeps its directory and output. NAME/RUN submits the file that this run had, as a new job; so does
    `spool rerun`, which has options for its name and directory. For an array that has ended, --failed and the other
    selecting options apply to its tasks. --set takes any key that `spool edit` can change.

    --failed alone means every job that ever failed and is still in done/. It asks before it takes more than the last
    job that failed, or the last array; without a terminal it refuses. Names, --since, --project and --tag say what you
    mean, and --yes takes all.

      spool requeue train --set memory=16G --set time_limit=4h
      spool requeue train/3
      spool requeue --failed --since 1h --cascade
      spool requeue @

    By hand:
      mv done/train.toml queued/     # if it has ended
      mv running/train.toml queued/  # if it is running
    """
    if failed and picks["states"]:
        raise click.UsageError("--failed and --state cannot be combined")
    if since is not None and not failed:
        raise click.UsageError("--since needs --failed")
    if any(run_named(name)[1] is not None for name in picks["names"]):
        return _as_new_jobs(picks, sets, dry_run=dry_run, alone=not (failed or cascade))
    spool, change = opened(root), rewriter(sets, root)
    requests = Requests(spool, this_user())
    from spool.query.selection import UNSUCCESSFUL, cancelled_with, once, unknown_ends

    picks["since_at_ns"] = moment_of("--since", since, time.time_ns())
    names, code = picked_names(spool, REQUEUE.places, picks, UNSUCCESSFUL if failed else None)
    if failed and not (dry_run or yes or since or picks["names"] or picks["project"] or picks["tag"]):
        _ask_about(spool, names)
    for row in unknown_ends(spool) if failed else ():
        tell(f"job {row.name} is left out: {row.reason}; `spool requeue {row.name}` runs it again")
    again: list[str] = []

    def act(name: str) -> Change:
        array = spool.newest_array(name)
        done = requests.requeue(name, change, dry_run=dry_run)
        again.append(name)
        if array is not None and change is None:
            tell(f"{name} has {array.tasks} tasks, and all run again; `spool requeue --failed {name}` takes the failed")
        return done

    code = max(code, REQUEUE.carry_out(spool, once(spool, names, again), act))
    if cascade and again:
        code = max(code, REQUEUE.carry_out(spool, cancelled_with(spool, again), act))
    return code


def _as_new_jobs(picks: Mapping[str, Any], sets: tuple[str, ...], *, dry_run: bool, alone: bool) -> int:
    """Submit the runs that the names of *picks* name; *alone*: nothing else is selected. Raises UsageError."""
    *jobs, run = sorted(picks["names"], key=lambda name: run_named(name)[1] is not None)
    if not alone or any(run_named(job)[1] is None for job in jobs) or any(picks[key] for key in _PICKS[1:-1]):
        raise click.UsageError(f"{run} is a run, which becomes a new job; requeue it by itself")
    given = {"new_name": None, "workdir": None, "hold": False, "sets": sets, "dry_run": dry_run}
    return max(carried_out("rerun", name=name, **given) for name in picks["names"])


def _ask_about(spool: Spool, names: Sequence[str]) -> None:
    """Ask whether *names*, which failed at any time, are to run again. Raises SpoolError if not.

    There is no question if they are one job or the tasks of one array.
    """
    from spool.core.arrays import array_of

    arrays = {array_of(name) for name in names}
    if len(names) < 2 or (len(arrays) == 1 and spool.newest_array(*arrays) is not None):
        return
    shown = some_of(names, _MOST_SHOWN)
    if not sys.stdin.isatty() or not sys.stderr.isatty():
        remedy = "add --since 1h, names or --tag, or --yes for all of them"
        why = f"several jobs failed, at any time ({shown}), and there is no terminal to ask at"
        raise UsageError(cannot("requeue", f"{len(names)} failed jobs", why, remedy=remedy))
    if not click.confirm(f"Run {len(names)} failed jobs again: {shown}?", err=True):
        raise SpoolError("nothing was requeued; --since 1h takes only what failed in the last hour")


def rewriter(pairs: Sequence[str], root: str) -> Callable[[str, bytes], bytes] | None:
    """Return the function that changes a job's file by the keys given with `--set`; None without any."""
    if not pairs:
        return None
    changes = joboptions.keys_of(joboptions.stated(pairs))

    def rewritten(name: str, text: bytes) -> bytes:
        from spool.formats import jobfile

        return joboptions.checked(root, name, jobfile.edited(text, changes, name=name), changes, joboptions.SET)

    return rewritten


@SUSPEND.command(click.option("--reason", default="", metavar="TEXT", help="The reason; shown by `spool ls`."))
def suspend(requests: Requests, name: str, reason: str, *, dry_run: bool) -> Change:
    """Pause running jobs where they are, until `spool continue`.

    All processes of the job stop (SIGSTOP), and so does the clock of its time limit. The job keeps its CPUs, memory and
    GPUs: no other job gets them. `spool hold` frees them, but the job starts over later. For an array, the tasks that
    run now are suspended.

      spool suspend train
      spool suspend --project vision --reason 'demo until 16:00'

    By hand: touch running/train.toml.suspended
    """
    return requests.suspend(name, reason, dry_run=dry_run)


@CONTINUE.command()
def go_on(requests: Requests, name: str, *, dry_run: bool) -> Change:
    """Continue suspended jobs.

      spool continue train
      spool continue --user anna

    By hand: rm running/train.toml.suspended
    """
    return requests.go_on(name, dry_run=dry_run)


@click.command(cls=Verb)
@click.option("--reason", default="", metavar="TEXT", help="The reason; written to the file `paused`.")
@click.pass_obj
def pause(root: str, reason: str) -> int:
    """Stop starting jobs until `spool resume`.

    Running jobs continue, and you can still submit jobs.

    By hand: touch paused
    """
    new = Requests(made(root), this_user()).pause(reason)
    render.say("paused: no job starts until `spool resume`" if new else "already paused")
    return 0


@click.command(cls=Verb)
@click.pass_obj
def resume(root: str) -> int:
    """Start jobs again after `spool pause`.

    By hand: rm paused
    """
    spool = opened(root)
    was = Requests(spool, this_user()).resume()
    render.say("resumed: jobs start again" if was else "not paused")
    ensure_dispatcher(spool.root)
    return 0


_SIGNALS = {each.name.removeprefix("SIG"): each for each in signal.Signals}


class _SignalVerb(Verb):
    """A verb whose first word may be written as for kill(1): -USR1, -9."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remove the dash from a signal."""
        first = args[0].upper() if args else ""
        named = re.fullmatch(r"-(SIG)?[A-Z0-9]+", first) and first.removeprefix("-").removeprefix("SIG") in _SIGNALS
        if named or re.fullmatch(r"-[0-9]{1,2}", first):
            args = [first[1:], *args[1:]]
        return super().parse_args(ctx, args)


@click.command("signal", cls=_SignalVerb)
@click.argument("signal_name", metavar="SIGNAL")
@picking(RUNNING)
@click.option("--to", type=click.Choice(("main", "all", "shell")), help="Which processes. Default: as the job says.")
@click.option("--shell", is_flag=True, help="The same as --to shell.")
@click.pass_obj
def send(root: str, /, signal_name: str, to: SignalTo, shell: bool, dry_run: bool, **picks: Any) -> int:
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
    names, code = picked_names(spool, (RUNNING,), picks)

    def act(name: str) -> str:
        return _signalled(spool, name, number, to="shell" if shell else to, dry_run=dry_run)

    from spool.query.selection import running_tasks

    return max(code, for_each(running_tasks(spool, names), act))


def _number(text: str, names: tuple[str, ...]) -> signal.Signals:
    name = text.upper().removeprefix("SIG")
    found = _SIGNALS.get(name)
    if found is None and re.fullmatch("[0-9]{1,3}", text) and int(text) in set(_SIGNALS.values()):
        found = signal.Signals(int(text))
    if found is None:
        last = names[-1].upper().removeprefix("SIG") if names else ""
        remedy = f"write `spool signal {last} {text}`" if last in _SIGNALS else "`kill -l` lists the signals"
        remedy = remedy if names else "it comes first, as in `spool signal USR1 NAME`"
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
    handle = Executors(LocalProcesses(spool.root)).adopt(grant.executor, name, run, jid)
    if handle.liveness() is Liveness.ELSEWHERE:
        raise SpoolError(cannot(*what, f"it runs on {jid.host}", remedy="run this command there"))
    if dry_run:
        return f"{name} would get {word}"
    told = handle.signal(word, to or (spec.signal_to if spec is not None else None))
    if not told:
        raise SpoolError(cannot(*what, "it has no process that can be signalled"))
    later = "; it takes effect when the job is resumed" if suspended and number is not signal.SIGKILL else ""
    return f"{name}: {word} sent to {told} process{'' if told == 1 else 'es'}{later}"
