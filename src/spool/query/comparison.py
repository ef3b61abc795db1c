"""What one run, or the tasks of an array, used of what they asked for: for `spool seff`."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct
from msgspec.structs import replace

from spool.core.arrays import Tasks
from spool.core.efficiency import Efficiency, MeasuredRun, Summary, efficiency, summary
from spool.core.errors import InvalidRecord, NoSuchJob, cannot
from spool.core.layout import LOCAL_EXECUTORS, engine_of
from spool.core.lifecycle import Verdict
from spool.core.model import FIRST_BYTES, Jid, Result, Spec, State
from spool.formats.capabilities import engine_title
from spool.formats.run_records import ArrayRecord
from spool.machine import processes
from spool.query.jobs import JobLister
from spool.query.snapshot import next_request
from spool.store.spool import Spool


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
        has = f"its runs are {', '.join(map(str, runs))}" if runs else "it has not run yet"
        raise NoSuchJob(cannot("compare", f"run {run} of job {name}", has))
    newest = run if run is not None else spool.latest_run(name)
    if newest is None:
        last = next((known for known in spool.accounts_since(None) if known.job == name), None)
        if last is not None:
            return _of_result(last, None, (last.run,))
        if not spool.places(name):
            raise spool.no_such_job("compare", f"job {name}", name)
        raise NoSuchJob(cannot("compare", f"job {name}", "it has not run yet", remedy=f"`spool why {name}` says why"))
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
    runs = [_run_of(result, spec) for result in found.values() if not _goes_on(spool, result)]
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


def _goes_on(spool: Spool, result: Result) -> bool:
    """Whether another run of the task has begun since."""
    return spool.latest_run(result.job) not in (None, result.run)
