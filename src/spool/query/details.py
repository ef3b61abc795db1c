"""All about one job and its runs: for `spool show`; and what they used of what they asked for: for `spool seff`."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from spool.client.output import last_words_of, outputs, run_of
from spool.core import layout
from spool.core.arrays import Tasks
from spool.core.errors import InvalidRecord, NoSuchJob, cannot
from spool.core.layout import LOCAL_EXECUTORS, engine_of
from spool.core.lifecycle import Verdict
from spool.core.model import (
    FIRST_BYTES,
    NOT_SUSPENDED,
    OUTCOMES,
    Grant,
    Jid,
    JobDefaults,
    Policy,
    Result,
    Sized,
    Spec,
    State,
    Stop,
    Suspension,
)
from spool.core.runtimes import Expected
from spool.core.sizes import Efficiency, MeasuredRun, Summary, efficiency, summary
from spool.formats import jobfile
from spool.formats.capabilities import contributed, engine_title
from spool.formats.config import Config
from spool.formats.run_records import ArrayRecord, RunFiles
from spool.query.jobs import JobLister, row_to_come
from spool.query.listing import ArrayTasks, tasks_of, with_outlook
from spool.query.look import Look
from spool.query.rows import JobRow, tasks_in, with_metrics, with_what_it_tells
from spool.state.past import past_of
from spool.store.arrays import array_outcome
from spool.store.edited import Settings
from spool.store.reading import is_too_long
from spool.store.spool import Spool

FAILURES = frozenset(state for state, each in OUTCOMES.items() if each.tone == "bad") - {State.UNSCHEDULABLE}
"""The outcomes that the output of a run may explain."""


class RunDetails(Struct, frozen=True):
    """One start of the job: its record, so far if it goes on, and what a record does not say.

    `state` is None for a metadir that was withdrawn before its run began.
    """

    record: Result
    state: State | None
    reason: str
    metadir: str
    stdout: str
    stderr: str | None
    engine_id: str | None  # the id of the run in an engine
    pid: int | None
    grant: Grant | None
    stop: Stop | None
    progress: str = ""  # its reported progress, while it runs
    suspension: Suspension = NOT_SUSPENDED
    gpu_idle_ns: int | None = None  # how long its GPUs have all been idle, while it runs
    parts: dict[str, Any] = {}  # what capabilities have recorded of it, by their names

    def ran_ns(self, now_ns: int) -> int | None:
        """Return its run time without suspensions, so far or in all; None if it has not begun."""
        record = self.record
        if record.started_at_ns is None:
            return None
        until_ns = record.ended_at_ns or now_ns
        return max(0, until_ns - record.started_at_ns - self.suspension.total_ns(until_ns))


class OtherFile(Struct, frozen=True):
    """A second file of the name, which waits for the run to end, or is held beside it."""

    row: JobRow
    path: str
    file: str | None


class JobDetails(Struct, frozen=True):
    """One job. `file` is the file of `row`, `problem` the content of the `.error` file of a waiting job."""

    name: str
    row: JobRow
    places: tuple[str, ...]
    path: str | None
    file: str | None
    defaults: str  # what the configuration adds to the file, as TOML: now, or at the start of its run; "" if nothing
    problem: str | None
    runs: tuple[RunDetails, ...]
    dispatcher: bool
    at_ns: int
    others: tuple[OtherFile, ...] = ()
    expected_run_ns: int | None = None  # None: it has ended, or is an array
    expected: str = ""  # … in words, with its source
    requests: str = ""  # the memory that its next run requests and why, if its file leaves that to spool
    tasks: ArrayTasks = ArrayTasks(())  # of an expanded array
    to_expand: int = 0  # the tasks of one that is not
    last_lines: tuple[str, ...] = ()  # of the output of the newest shown run, if it failed


def job_details(spool: Spool, name: str, run: int | None = None) -> JobDetails:
    """Return everything about job *name*, or only its run *run*. Raises NoSuchJob."""
    places = spool.places(name)
    runs = spool.runs(name)
    to_come = row_to_come(spool, name) if not places and not runs else None
    if not places and not runs and to_come is None:
        raise spool.no_such_job("show", f"job {name}", name)
    if run is not None:
        run_of(spool, name, run, verb="show")
    lister = JobLister(spool)
    listed = lister.listing(only=lambda other: other == name)
    found = with_what_it_tells(spool, [*listed.rows] or filter(None, (to_come,)))
    place = found[0].place if found else next(iter(places), None)
    place = place if place in places else None
    text = spool.job_text(place, name) if place is not None else None
    shown = tuple(_run(spool, lister.files(name, each), lister, found) for each in runs if run is None or each == run)
    if place is None and not found:
        last = shown[-1]
        reason = "; ".join(filter(None, (last.reason, "its file is gone")))
        found = [JobRow(name=name, state=last.state or State.CANCELLED, run=last.record.run, reason=reason)]
    if not found:
        raise NoSuchJob(cannot("show", f"job {name}", f"the file with its name in {place}/ is not a regular file"))
    config = Settings(spool.root).config
    defaults = _defaults(spool, lister, found[0], config)
    expected, sized = _expected(spool, place, found[0], defaults, config.policy)
    tasks = tasks_of(spool, name) or ArrayTasks(())
    to_expand = tasks_in(spool, name) if not tasks.rows and not found[0].state.ended else None
    (row,) = with_outlook(spool, with_metrics(spool, found[:1]), lister.at_ns, served=listed.serves)
    if sized is not None:
        row = replace(row, memory_bytes=sized.request.memory_bytes)
    return JobDetails(
        name=name,
        row=row,
        places=tuple(places),
        path=spool.layout.job_file(place, name) if place is not None else None,
        file=_text(text),
        defaults=jobfile.from_defaults(defaults, text) if text is not None and not is_too_long(text) else "",
        problem=spool.problem_text(name),
        runs=shown,
        dispatcher=lister.dispatcher,
        at_ns=lister.at_ns,
        others=tuple(_other(spool, row) for row in found[1:]),
        expected_run_ns=expected.ns if expected is not None else None,
        expected=expected.words(name, found[0].user or "") if expected is not None else "",
        requests=sized.why if sized is not None else "",
        tasks=tasks,
        to_expand=to_expand.count if to_expand is not None else 0,
        last_lines=_last_lines(spool, name, shown),
    )


def why_never_begun(spool: Spool, name: str, run: int | None = None) -> str:
    """Return why a job has not begun, or ended before it did, so that it has no output; "" if it has begun."""
    newest = spool.latest_run(name)
    run = newest if run is None else run
    if run is not None:
        result = spool.result(name, run)
        if result is None or result.outcome is State.FINISHED or spool.array(name, run) is not None:
            return ""
        if failure := spool.failure(name, run):
            return f"it could not start: {failure}"
        if result.started_at_ns is not None or result.exit_code is not None:
            return ""
        return f"it never started: {result.reason or result.outcome}"
    row = JobLister(spool).row(name)
    if row is None:
        return ""
    if row.state.ended:
        return f"it never started: {row.reason or row.state}"
    said = row.reason or ("nothing is in its way" if row.state is State.QUEUED else "")
    if said.startswith(row.state):
        return f"it has not run yet: {said}"
    return f"it has not run yet: {row.state}{f', {said}' if said else ''}"


def _last_lines(spool: Spool, name: str, runs: Sequence[RunDetails]) -> tuple[str, ...]:
    """Return the last lines of the newest of *runs* if it failed; the tasks of an array have outputs of their own."""
    if not runs or runs[-1].state not in FAILURES or spool.array(name, runs[-1].record.run) is not None:
        return ()
    return last_words_of(spool, name, runs[-1].record.run)


def _defaults(spool: Spool, lister: JobLister, row: JobRow, config: Config) -> JobDefaults:
    """Return what completes the file of a job: now, with what hooks set in it, or at the start of its run."""
    if row.place not in (layout.QUEUED, layout.HELD) and row.run is not None:
        return spool.defaults(row.name, row.run)
    return Look(spool, config, lister.at_ns).defaults(row.place or layout.QUEUED, row.name)


def _expected(
    spool: Spool, place: str | None, row: JobRow, defaults: JobDefaults, policy: Policy
) -> tuple[Expected | None, Sized | None]:
    """Return the run time and, while it waits, the request that are expected of a job, as far as known."""
    if row.state.ended or place is None:
        return None, None
    runs = place == layout.RUNNING
    spec = spool.spec_in_force(row.name, row.run) if runs and row.run is not None else None
    spec = spec or spool.job_spec(place, row.name, defaults)
    if spec is None or row.state is State.INVALID:
        return None, None
    sized = None
    if spec.is_sized and not runs:
        from spool.query.snapshot import next_request  # few jobs need it

        sized = next_request(spool, row.name, row.user or "", spec)
    if spec.is_array:
        return None, sized
    past = past_of(spool, time.time_ns(), policy)
    return past.run_times.expected(row.user or "", row.name, spec), sized


def _other(spool: Spool, row: JobRow) -> OtherFile:
    place = row.place or layout.QUEUED
    text = spool.job_text(place, row.name)
    path = spool.layout.job_file(place, row.name)
    return OtherFile(row, path, _text(text))


def _text(text: bytes | None) -> str | None:
    """Return the text of a job file for display, or that it is too long."""
    if is_too_long(text):
        return "# longer than 1 MiB, the most that a job file may have: it is not read"
    return None if text is None else text.decode("utf-8", "replace")


def _run(spool: Spool, files: RunFiles, lister: JobLister, rows: Sequence[JobRow]) -> RunDetails:
    """Return a run by its files; one that goes on as it is in the list, whose *rows* are those of its job."""
    name, run, grant, array = files.name, files.run, files.grant, files.array
    known = spool.known_end_of(files)
    result: Result | None = None if isinstance(known, InvalidRecord) else known
    found = lister.shown(files, filed=result is not None)
    state, reason, progress = found.state, found.reason, ""
    suspension = Suspension(result.suspended_ns) if result is not None else found.suspension
    if files.proof.verdict is Verdict.VOID and files.refusal:
        reason = f"{reason}: {files.refusal}"
    if result is not None:
        ended = result if array is None else array_outcome(spool, result)
        state, reason = ended.outcome, ended.reason
    elif isinstance(known, InvalidRecord):
        state, reason, found = State.INVALID, str(known), replace(found, end=None)
    elif (row := next((row for row in rows if row.run == run), None)) is not None:
        state, reason, progress = row.state, row.reason, row.progress
    record, where = result or found.end or files.so_far, outputs(spool, name, run)
    metadir = spool.layout.metadir(name, run)
    watch = lister.gpu_watch(name, run) if result is None and grant is not None and grant.grant.gpu_uuids else None
    return RunDetails(
        replace(record, gpu_use=watch.known) if watch is not None else record,
        state,
        reason,
        metadir,
        stdout=where.stdout or os.path.join(metadir, layout.JOB_LOG),
        stderr=where.stderr,
        engine_id=engine[2] if (engine := spool.engine(name, run)) is not None else None,
        pid=getattr(files.jid, "pid", None),
        grant=grant.grant if grant is not None else None,
        stop=files.stop,
        progress=progress,
        suspension=suspension,
        gpu_idle_ns=watch.idle_ns if watch is not None and state is State.RUNNING else None,
        parts={each.name: read(spool, name, run) for each, read in contributed("record")},
    )


class RunEfficiency(Struct, frozen=True):
    """One run. `memory_now_bytes` is for a run that is still running on this machine."""

    used: MeasuredRun
    compared: Efficiency
    runs: tuple[int, ...]  # all runs of the job
    memory_now_bytes: int | None = None
    auto: str = ""  # what `memory = "auto"` would request next, and why


class ArrayEfficiency(Struct, frozen=True):
    """All tasks of an array."""

    job: str
    summary: Summary


def compare(spool: Spool, name: str, run: int | None = None) -> RunEfficiency | ArrayEfficiency:
    """Compare request and use of a job's newest run, of *run*, or of an array's tasks. Raises NoSuchJob if none ran."""
    runs = spool.runs(name)
    if run is not None and run not in runs:
        result = spool.account_of(name, run, None)  # its metadir may be removed
        if result is not None:
            return _of_result(result, None, (*runs, run))
    if run is None and spool.latest_run(name) is None:
        last = next((known for known in spool.accounts_since(None) if known.job == name), None)
        if last is not None:
            return _of_result(last, None, (last.run,))
        if spool.places(name):
            why, remedy = "it has not run yet", f"`spool why {name}` says why"
            raise NoSuchJob(cannot("compare", f"job {name}", why, remedy=remedy))
    newest = run_of(spool, name, run, verb="compare")
    array = spool.array(name, newest)
    if array is not None:
        return ArrayEfficiency(name, _of_tasks(spool, array))
    return _of_run(spool, name, newest, tuple(runs))


def _of_result(result: Result, spec: Spec | None, runs: tuple[int, ...]) -> RunEfficiency:
    used = _run_of(result, spec)
    return RunEfficiency(used, efficiency(used), tuple(sorted(set(runs))))


def _run_of(result: Result, spec: Spec | None) -> MeasuredRun:
    ran_ns = None
    if result.started_at_ns is not None and result.ended_at_ns is not None:
        ran_ns = result.ended_at_ns - result.started_at_ns - result.suspended_ns
    return MeasuredRun(
        result,
        time_limit_ns=spec.time_limit_ns if spec is not None else None,
        run_time_ns=ran_ns if ran_ns is None or ran_ns >= 0 else None,  # the clock was set
        started=result.started_at_ns is not None,
        measured_by=engine_title(engine) if (engine := engine_of(result.executor)) is not None else "",
    )


def _of_run(spool: Spool, name: str, run: int, runs: tuple[int, ...]) -> RunEfficiency:
    lister = JobLister(spool)
    spec, files = spool.spec(name, run), lister.files(name, run)
    result = spool.known_end_of(files)
    if isinstance(result, InvalidRecord):
        raise result
    if result is not None:
        return replace(_of_result(result, spec, runs), auto=_as_auto(spool, result) if run == max(runs) else "")
    grant, proof, began_ns, now_ns = files.grant, files.proof, files.began_ns, lister.at_ns
    if grant is None or proof.verdict is Verdict.VOID:
        raise NoSuchJob(cannot("compare", f"run {run} of job {name}", "it never started"))
    found = lister.shown(files)
    if found.end is not None:  # not recorded yet
        return _of_result(replace(found.end, executor=None), spec, runs)
    # Its engine's measurements come with its end.
    record = replace(files.so_far, outcome=found.state or State.STARTING, executor=None)
    if grant.grant.gpu_count and (watch := lister.gpu_watch(name, run)) is not None:
        record = replace(record, gpu_use=watch.known)
    used = MeasuredRun(record, time_limit_ns=spec.time_limit_ns if spec is not None else None)
    if proof.verdict is Verdict.UNREACHABLE and grant.executor not in LOCAL_EXECUTORS and began_ns is not None:
        used = replace(used, run_time_ns=max(0, now_ns - began_ns))  # on an engine, which reports nothing more
    if proof.verdict in (Verdict.ENDED, Verdict.UNREACHABLE) or began_ns is None:
        # To be filed by a dispatcher, which determines its end; or far away.
        return RunEfficiency(used, efficiency(used), runs)
    from spool.machine import processes  # few jobs need it

    jid = files.jid if isinstance(files.jid, Jid) else None
    family = processes.family(processes.Sought(name, run, spool.root, jid))
    used = replace(
        used,
        record=replace(record, cpu_time_ns=processes.cpu_time_ns(family.values()) if family else None),
        run_time_ns=max(0, now_ns - began_ns - files.suspension.total_ns(now_ns)),
    )
    return RunEfficiency(used, efficiency(used), runs, processes.pss_bytes(family) or None)


def _as_auto(spool: Spool, result: Result) -> str:
    """Return what the next run of a job would request with `memory = "auto"`, after *result*, its newest.

    "" if no run has shown that.
    """
    from spool.query.snapshot import next_request  # `show` needs it for few jobs

    request = result.request
    if not request.memory_auto:
        request = replace(request, memory_bytes=FIRST_BYTES, memory_auto=True)
    spec = Spec("true", request=request, executor=result.executor, project=result.project)
    found = next_request(spool, result.job, result.user or "", spec)
    return "" if found is None or not found.learnt else found.why


def _of_tasks(spool: Spool, array: ArrayRecord) -> Summary:
    """Summarise the tasks: most from the history, which is a single file, the others from their own records."""
    spec = spool.spec(array.job, array.run)
    names = set(Tasks(array.job, spec).names()) if spec is not None else set()
    found = _ended_tasks(spool, names, array.expanded_at_ns)
    # Of a task that has begun again since, the newest run counts.
    over = (result for result in found.values() if spool.latest_run(result.job) in (None, result.run))
    runs = [_run_of(result, spec) for result in over]
    for name in names - {run.record.job for run in runs}:
        newest = spool.latest_run(name)
        if newest is not None:
            try:
                runs.append(_of_run(spool, name, newest, ()).used)
            except NoSuchJob:  # withdrawn at this moment
                continue
    return summary(runs, max(0, len(names) - len(runs)))


def _ended_tasks(spool: Spool, names: Collection[str], since_ns: int | None) -> dict[str, Result]:
    """Return the result of the newest run of each of these jobs that has ended since *since_ns*."""
    found: dict[str, Result] = {}
    for result in spool.accounts_since(since_ns):
        if result.job in names and (since_ns is None or (result.ended_at_ns or since_ns) >= since_ns):
            found.setdefault(result.job, result)
            if len(found) == len(names):
                break
    return found
