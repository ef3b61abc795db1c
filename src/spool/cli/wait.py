"""`spool wait`, `log` and `attach`: stay with jobs until they end, and show or follow their output or terminal."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import closing, suppress

import click

from spool.cli import render
from spool.cli.group import SpelledOption, Verb, name_argument, named, names_argument, one_job, opened, own, value_of
from spool.cli.render import tell
from spool.client.output import Stream, output_paths, outputs, read_output, run_of
from spool.client.requests import Requests
from spool.client.waiting import POLL_S, End, Follower, Waiter
from spool.core.arrays import array_of
from spool.core.errors import ExitCode, SpoolError, SpoolUnusable, cannot
from spool.core.layout import HELD, JOBS, LOCAL_EXECUTORS, QUEUED, RUNNING, natural, without_here
from spool.core.lifecycle import Verdict
from spool.core.model import ALIVE, BAD, OUTCOMES, SECOND_NS, State
from spool.core.units import parse_duration
from spool.store.ownership import this_user
from spool.store.spool import Spool

_TURN_S = 0.25  # how often to look for holds and to refresh the bar
_BAR_AFTER_NS = 500_000_000  # no bar for jobs that end at once
_BAR_EVERY_NS = 1_000_000_000
_PLAN_EVERY_NS = 30_000_000_000


def code_of(outcome: State, exit_code: int | None) -> int:
    """Return the exit code for a job that ended with *outcome*; a failed one's is its own."""
    if outcome is State.FAILED and exit_code:
        return exit_code
    return OUTCOMES[outcome].exit_code if outcome in OUTCOMES else int(ExitCode.INVALID_FILE)


def told(end: End) -> str:
    """Return how a job ended as one line."""
    return (
        end.reason if end.outcome is State.INVALID else f"job {end.name}: {render.with_reason(end.outcome, end.reason)}"
    )


class HoldNotices:
    """Reports each hold of an awaited job once, with the reason: otherwise the wait looks like a hang."""

    def __init__(self, spool: Spool, say: Callable[[str], None] = tell) -> None:
        self._spool = spool
        self._say = say
        self._told: set[str] = set()

    def see(self, held: Set[str]) -> None:
        """Report on stderr that the jobs *held* are held, each that the last call did not have."""
        new, self._told = held - self._told, set(held)
        for name in sorted(new, key=natural):
            why = ""
            with suppress(OSError):  # it has just been released
                why = self._spool.hold_reason(name, os.stat(self._spool.layout.job_file(HELD, name)).st_mtime_ns)
            self._say(f"job {name} is held{f': {why}' if why else ''}; `spool release {name}` lets it start")


class _Bar:
    """Shows the jobs' progress on a terminal, and the expected end of the last one."""

    def __init__(self, spool: Spool, names: Sequence[str]) -> None:
        self._line = render.StatusLine()
        self._spool = spool
        self._names = names
        self._after_ns = time.monotonic_ns() + _BAR_AFTER_NS
        self._end_at_ns: int | None = None  # by a plan that may be a while old
        self._plan_after_ns = 0

    def step(self) -> None:
        """Refresh, if due."""
        begun = time.monotonic_ns()
        if not self._line.lively or begun < self._after_ns:
            return
        with suppress(OSError, SpoolError):  # the wait itself reports reading errors
            self._draw(time.time_ns())
        now = time.monotonic_ns()
        self._after_ns = now + max(_BAR_EVERY_NS, 20 * (now - begun))

    def tell(self, message: str) -> None:
        """Print a message on stderr without the bar in between."""
        self._line.clear()
        tell(message)

    def close(self) -> None:
        """Remove the bar."""
        self._line.clear()

    def _draw(self, now_ns: int) -> None:
        from spool.query.listing import awaited  # imported here: it imports half of the program

        rows = awaited(self._spool, self._names)
        left = self._left([row.name for row in rows if not row.state.ended], now_ns)
        if len(rows) == 1:
            (row,) = rows
            since = f"for {render.duration(row.time_ns(now_ns))}" if row.time_ns(now_ns) is not None else ""
            said = " ".join(filter(None, (row.state.value.replace("_", " "), since)))
            why = row.reason if row.state in (State.QUEUED, State.HELD, State.SUBMITTED) else ""
            self._line.draw(", ".join(filter(None, (f"{row.name}: {said}", row.progress, *left, why))))
            return
        states = [row.state for row in rows]
        ended, submitted = sum(state.ended for state in states), states.count(State.SUBMITTED)
        words = [f"{ended} of {len(rows)} done", f"{sum(state in ALIVE for state in states)} running"]
        words += [f"{submitted} submitted"] if submitted else []
        words += [f"{bad} not finished"] if (bad := sum(state in BAD for state in states)) else []
        self._line.draw(", ".join([*words, *left]), part=ended / max(1, len(rows)))

    def _left(self, names: Sequence[str], now_ns: int) -> list[str]:
        """Return when the last of *names* is expected to end, as far as that is known."""
        if now_ns >= self._plan_after_ns:
            from spool.query.listing import expected_end

            begun = time.monotonic_ns()
            self._end_at_ns = expected_end(self._spool, names, now_ns)
            self._plan_after_ns = now_ns + max(_PLAN_EVERY_NS, 100 * (time.monotonic_ns() - begun))
        left_ns = (self._end_at_ns or 0) - now_ns
        return [f"ends in about {render.duration(left_ns)}"] if left_ns > 0 else []


def until_ended(root: str, names: Sequence[str], *, first: bool = False, timeout_ns: int | None = None) -> int:
    """Wait for all jobs, or with *first* for one of them; report how they ended, and return the exit code."""
    spool = Spool.open(root)
    bar = _Bar(spool, names)
    try:
        waiter = Waiter(spool)
        codes: dict[str, int] = {}
        for name, error in waiter.add(names).items():
            tell(str(error))
            codes[name] = int(ExitCode.NO_SUCH_JOB)
        notices = HoldNotices(spool, bar.tell)
        until = math.inf if timeout_ns is None else time.monotonic() + timeout_ns / SECOND_NS
        warned = False
        turn_s = 0.0  # holds are told and the bar is drawn before the first wait
        while waiter and not (first and codes):
            left_s = max(0.0, until - time.monotonic())
            for end in sorted(waiter.wait(min(left_s, turn_s)), key=lambda end: names.index(end.name)):
                codes[end.name] = _told(end, bar.tell)
                if first:
                    return codes[end.name]
            notices.see(waiter.held)
            if waiter and left_s == 0:
                bar.tell(f"timed out waiting for {', '.join(sorted(waiter.names, key=names.index)[:5])}")
                return OUTCOMES[State.TIMEOUT].exit_code
            if not warned and waiter.is_unserved:
                warned = True
                bar.tell("no dispatcher is running, so no job starts: run `spool dispatch`")
            bar.step()
            turn_s = _TURN_S
        return next((codes[name] for name in names if codes.get(name)), 0)
    except KeyboardInterrupt:
        bar.tell("interrupted: no job was cancelled; `spool cancel` does that")
        raise
    finally:
        bar.close()


def _told(end: End, say: Callable[[str], None]) -> int:
    """Report on stderr how a job ended, unless it finished, and return its exit code."""
    if end.outcome is not State.FINISHED:
        say(told(end))
    return code_of(end.outcome, end.exit_code)


def followed(spool: Spool, job: str, before: int | None, *, quiet: bool) -> int:
    """Return the exit code of a job, followed to its end, or INTERRUPTED after a second Ctrl-C."""
    follower, notices = Follower(spool, (job,), after=before or 0), HoldNotices(spool)
    interrupts: list[int] = []
    ends = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, lambda number, _: interrupts.append(number)) for number in ends}
    cancelled = False
    end: End | None = None
    try:
        for piece in follower.pieces():
            if interrupts and not cancelled:
                cancelled = True
                _cancel(spool, job)
            if len(interrupts) > 1:
                tell(f"exiting; job {job} is being stopped")
                return int(ExitCode.INTERRUPTED)
            if isinstance(piece, End):
                end = piece
            elif piece is None:
                sys.stdout.flush()
                if not quiet:
                    notices.see(follower.waiter.held)
                time.sleep(POLL_S)
            elif piece.data:
                out = sys.stderr if piece.stream is Stream.ERR else sys.stdout
                out.buffer.write(piece.data)
                out.flush()
            elif piece.run > 1 and not quiet:
                tell(f"job {job}: run {piece.run}")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        follower.close()
    assert end is not None
    return _told(end, tell if not quiet else lambda _: None)


def _cancel(spool: Spool, job: str) -> None:
    tell(f"cancelling job {job} (Ctrl-C again to exit at once)")
    try:
        Requests(spool, this_user()).cancel(job, "interrupted")
    except SpoolUnusable as error:  # the spool of another user who accepts jobs
        tell(str(error))
    except SpoolError:
        return  # it has just ended


@click.command(cls=Verb)
@names_argument(places=(QUEUED, HELD, RUNNING))
@click.option(
    "--all",
    "wait_for_all",
    is_flag=True,
    help="Wait for all to end; without names, for all jobs that are waiting or running now.",
)
@click.option("--any", "wait_for_any", is_flag=True, help="Wait for one of them to end.")
@click.option("--timeout", metavar="TIME", help="Wait at most this long, then exit with 124.")
@click.pass_obj
def command(root: str, names: tuple[str, ...], wait_for_all: bool, wait_for_any: bool, timeout: str | None) -> int:
    """Wait for jobs to end, and exit with their code.

    The exit code is 0 if all finished, otherwise that of the first named job that did not: its own code if it failed,
    124 for a time limit, 125 lost, 130 cancelled, 137 out of memory, 143 preempted, 75 unschedulable, 4 an invalid
    file, 3 no such job.

      spool wait train && echo trained
      spool wait 'sweep_*' --timeout 2h
      spool wait --all

    On a terminal a line shows how many have ended, and when the last is expected to end.

    If a named job is held, a message says so and why, and the command keeps waiting.

    By hand:
      until [ -e done/train.toml ]; do sleep 1; done
      cat jobs/train/1/result.toml
    """
    if wait_for_all and wait_for_any:
        raise click.UsageError("--all and --any cannot be combined")
    if not names and not wait_for_all:
        raise click.UsageError("missing argument 'NAME...', or --all for all waiting and running jobs")
    spool = opened(root)
    timeout_ns = value_of("--timeout", timeout, parse_duration) if timeout is not None else None
    wanted = named(spool, names) if names else sorted({*spool.names(QUEUED), *spool.names(RUNNING)}, key=natural)
    return until_ended(spool.root, wanted, first=wait_for_any, timeout_ns=timeout_ns)


_DRAWN_OVER = re.compile(rb"[^\r\n]*\r+(?=[^\r\n])")
_LONGEST = 1 << 16  # a longer line is cut: a progress bar is one line as long as it goes on


@click.command(cls=Verb)
@names_argument(places=(JOBS,), required=True)
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the jobs have ended, retries included.")
@click.option("--run", "run", type=int, metavar="N", help="The run to show. Default: the newest.")
@click.option("--stderr", "errors", is_flag=True, help="Show the error output, if it has a separate file.")
@click.option(
    "-n",
    "--lines",
    cls=SpelledOption,
    also=("--tail",),
    type=click.IntRange(0),
    metavar="N",
    help="Only the last N lines of each job.",
)
@click.option("--path", "only_path", is_flag=True, help="Print the path of the output instead.")
@click.pass_obj
def log(
    root: str, names: tuple[str, ...], follow: bool, run: int | None, errors: bool, lines: int | None, only_path: bool
) -> int:
    """Show or follow the output of jobs.

      spool log train -n 20
      spool log -f train      follows it through retries until the job has ended
      spool log -f a b 'c*'   follows several: their names are before the lines
      spool log sweep         the output of each task of an array, under its name

    By hand: cat jobs/train/1/log   or   tail -f jobs/train/1/log
    """
    spool = opened(root)
    jobs = _once(spool, named(spool, names))
    stream = Stream.ERR if errors else Stream.OUT
    if follow and not only_path:
        for name in jobs:
            if run is not None or spool.latest_run(name) is not None:
                its_run = _run_of(spool, name, run)
                _check_written_elsewhere(spool, name, its_run, stream)
                _tell_if_silent(spool, name, its_run)
        _follow(Follower(spool, jobs, only=run, lines=lines), jobs, stream)
        for name in jobs if not errors else ():
            _tell_of_errors(spool, name, run)
        return 0
    code = 0
    for at, name in enumerate(jobs):
        try:
            its_run = _run_of(spool, name, run)
            if only_path:
                for path in output_paths(spool, name, its_run, stream):
                    render.say(path)
            else:
                head = [""] * (at > 0) + [f"==> {name} <=="] if len(jobs) > 1 else []
                _show(_output(spool, name, its_run, stream, lines), head)
                if not errors:
                    _tell_of_errors(spool, name, run)
                _tell_if_silent(spool, name, its_run)
        except SpoolError as error:  # the others have output
            if len(jobs) == 1:
                raise
            sys.stdout.flush()
            tell(str(error))
            code = int(error.exit_code)
    return code


_SILENT_S = 5.0  # after which a running job without output is told of


def _once(spool: Spool, names: Sequence[str]) -> list[str]:
    """Return *names* without the tasks of arrays that are among them: an array's output is that of its tasks."""
    newest = {name: spool.latest_run(name) for name in names} if len(names) > 1 else {}
    arrays = {name for name, run in newest.items() if run is not None and spool.array(name, run) is not None}
    return [name for name in names if array_of(name) not in arrays or not name.rpartition("_")[2].isdigit()]


def _output(spool: Spool, name: str, run: int, stream: Stream, lines: int | None) -> Iterator[bytes]:
    """Return the output of a run so far. Raises SpoolError with the reason if there can be none."""
    from spool.query.details import why_never_begun  # takes as long to import as all else here

    why = why_never_begun(spool, name, run)
    if why and not os.path.exists(outputs(spool, name, run).stdout or ""):
        raise _no_output(name, why, f"`spool show {name}` says more")
    _check_written_elsewhere(spool, name, run, stream)
    found = read_output(spool, name, run, stream, lines=lines)
    return found if lines is None or sys.stdout.isatty() else _as_drawn_last(found)


def _check_written_elsewhere(spool: Spool, name: str, run: int, stream: Stream) -> None:
    """Raise SpoolError if an output is the file that it would be written to: it would grow for ever."""
    for path in output_paths(spool, name, run, stream):
        with suppress(OSError, ValueError):
            to = os.fstat(sys.stdout.fileno())
            if stat.S_ISREG(to.st_mode) and os.path.samestat(os.stat(path), to):
                raise _no_output(name, "it would be written to itself", "write it to another file, or to a pipe")


def _as_drawn_last(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield lines without what a carriage return had drawn over: of a progress bar only the last state."""
    rest = b""
    for piece in pieces:
        text = _DRAWN_OVER.sub(b"", rest + piece)
        end = text.rfind(b"\n") + 1
        rest = text[end:]
        if end:
            yield text[:end]
    yield rest


def _show(pieces: Iterator[bytes], head: Sequence[str]) -> None:
    """Print *pieces* behind the lines of *head*, after which a last line always ends: another job's may follow."""
    data, last = next(pieces, b""), b"\n"  # first: it may fail
    for line in head:
        render.say(line)
    sys.stdout.flush()
    while data:
        sys.stdout.buffer.write(data)
        last, data = data, next(pieces, b"")
    if head and not last.endswith(b"\n"):
        sys.stdout.buffer.write(b"\n")


def _tell_of_errors(spool: Spool, name: str, run: int | None) -> None:
    """Say where the error output is, if there is some in a separate file."""
    run = spool.latest_run(name) if run is None else run
    if run is None:
        return
    try:
        path = next(filter(_has_text, output_paths(spool, name, run, Stream.ERR)), None)
    except SpoolError:  # it has no separate file
        return
    if path is not None:
        sys.stdout.flush()
        is_array = spool.array(name, run) is not None
        what = "the error output of its tasks is in files such as" if is_array else "its error output is in"
        tell(f"{what} {path}; `spool log --stderr {name}` shows it")


def _tell_if_silent(spool: Spool, name: str, run: int) -> None:
    """Tell a person what may keep the output of a running job back, if there is none after a while."""
    with suppress(OSError):
        log = os.stat(outputs(spool, name, run).stdout or "")
        if log.st_size or time.time() < log.st_mtime + _SILENT_S or RUNNING not in spool.places(name):
            return
        if sys.stderr.isatty() and run == spool.latest_run(name):
            tell(
                f"{name} has written nothing yet; Python and others hold output back where none is a terminal: use "
                "`python -u`, PYTHONUNBUFFERED=1 or `stdbuf -oL`"
            )


def _has_text(path: str) -> bool:
    try:
        return os.path.getsize(path) > 0
    except OSError:
        return False


def _run_of(spool: Spool, name: str, run: int | None) -> int:
    """Return the selected run. Raises SpoolError, with the reason for a job that has not started."""
    from spool.query.details import why_never_begun

    if run is None and spool.latest_run(name) is None and (why := why_never_begun(spool, name)):
        raise _no_output(name, why, f"`spool why {name}` says more, -f waits for it")
    return run_of(spool, name, run)


def _no_output(name: str, why: str, remedy: str) -> SpoolError:
    return SpoolError(cannot("show", f"the output of job {name}", why, remedy=remedy))


def _follow(follower: Follower, names: Sequence[str], stream: Stream) -> None:
    """Print the output of *names* as it appears; of several jobs line by line, each line after the name of its job."""
    unended = defaultdict[str, bytes](bytes)  # by job, the line that it has begun
    write = sys.stdout.buffer.write

    def write_lines(name: str, data: bytes) -> None:
        *lines, unended[name] = data.split(b"\n")
        write(b"".join(b"%s: %s\n" % (name.encode(), line) for line in lines))

    with closing(follower):
        for piece in follower.pieces():
            if piece is None:
                sys.stdout.flush()
                time.sleep(POLL_S)
            elif isinstance(piece, End):
                if unended[piece.name]:
                    write_lines(piece.name, unended[piece.name] + b"\n")
                if piece.outcome is not State.FINISHED:
                    sys.stdout.flush()
                    tell(told(piece))
            elif not piece.data:
                if unended[piece.job]:  # of the run before
                    write_lines(piece.job, unended[piece.job] + b"\n")
                tell(f"job {piece.job}: run {piece.run}")
            elif piece.stream is stream and len(names) == 1:
                write(piece.data)
            elif piece.stream is stream:
                write_lines(piece.job, unended[piece.job] + piece.data)
                if len(unended[piece.job]) > _LONGEST:
                    write_lines(piece.job, unended[piece.job] + b"\n")
    for name, line in unended.items():  # of a run that has ended before its job
        if line:
            write_lines(name, line + b"\n")
    sys.stdout.flush()


@click.command("attach", cls=Verb)
@name_argument(places=(RUNNING,))
@click.option("-r", "--read-only", is_flag=True, help="Read-only: the job does not receive what you type.")
@click.option("--run", type=int, metavar="N", help="The run to show. Default: the newest.")
@click.option("--dry-run", is_flag=True, help="Print the command instead of executing it.")
@click.pass_obj
def attach(root: str, name: str, read_only: bool, run: int | None, dry_run: bool) -> int:
    """Attach to the terminal of a running job, to watch it and to type its input.

    Ctrl-B D detaches; the job continues. Only jobs submitted with --tmux have a terminal. It closes when the job ends,
    unless the job has keep_session = true. For a job in Slurm this opens a shell on its node, beside the job.

      spool submit --tmux --name ask -- python ask.py
      spool attach ask

    By hand: tmux -S ~/.spool/.tmux attach -t =ask/1
    """
    spool = opened(root) if read_only or dry_run else own(root)
    name = one_job(spool, name)
    argv = attach_command(spool, name, run, read_only=read_only)
    if dry_run:
        render.say(shlex.join(argv))
        return 0
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        remedy = f"`spool log -f {name}` needs no terminal"
        raise SpoolError(cannot("attach to", f"job {name}", "this is not a terminal", remedy=remedy))
    return subprocess.run(argv, env=without_here(os.environ), check=False).returncode


def attach_command(spool: Spool, name: str, run: int | None = None, *, read_only: bool = False) -> tuple[str, ...]:
    """Return the command to execute, for the newest run if none is given. Raises SpoolError if there is no terminal."""
    from spool.executors import by_name

    run = run_of(spool, name, run, verb="attach to")
    grant = spool.grant(name, run)
    if grant is None:
        raise SpoolError(cannot("attach to", f"job {name}", f"run {run} was never started"))
    try:
        if grant.executor not in LOCAL_EXECUTORS:
            _check_lives(spool, name, run)  # the session of an ended run is not kept for later
        return by_name(grant.executor).attach(spool.root, name, run, read_only=read_only)
    except SpoolError:
        _check_lives(spool, name, run)
        raise
    except ImportError as error:
        why = f"the Python package {error.name} is not installed"
        raise SpoolError(cannot("attach to", f"job {name}", why)) from error


def _check_lives(spool: Spool, name: str, run: int) -> None:
    from spool.machine.processes import MachineProber

    proof = spool.load(name, run, MachineProber()).proof
    if proof.verdict is Verdict.ENDED:
        why, remedy = f"run {run} has ended ({proof.outcome})", f"`spool log {name}` shows its output"
        raise SpoolError(cannot("attach to", f"job {name}", why, remedy=remedy)) from None
