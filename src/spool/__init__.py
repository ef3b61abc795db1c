"""spool: a job scheduler whose only interface is a directory.

The public names are listed here; the rest is internal. Each name is imported on first use.
"""

_HOMES = {
    "AsyncClient": "spool.python.asynchronous",
    "Cancelled": "spool.python.results",
    "Change": "spool.client.requests",
    "ChangeKind": "spool.client.requests",
    "Client": "spool.python.client",
    "End": "spool.client.waiting",
    "Executor": "spool.python.executor",
    "Explanation": "spool.query.explain",
    "Future": "spool.python.executor",
    "GpuList": "spool.query.machine",
    "InvalidConfig": "spool.core.errors",
    "InvalidFile": "spool.core.errors",
    "InvalidJob": "spool.core.errors",
    "InvalidRecord": "spool.core.errors",
    "InvalidValue": "spool.core.errors",
    "Job": "spool.python.job",
    "JobFailed": "spool.python.results",
    "JobFilter": "spool.query.jobs",
    "JobList": "spool.query.jobs",
    "JobRow": "spool.query.rows",
    "Lost": "spool.python.results",
    "NoSuchJob": "spool.core.errors",
    "NotAllSubmitted": "spool.core.errors",
    "OutOfMemory": "spool.python.results",
    "Preview": "spool.query.explain",
    "RemoteError": "spool.python.results",
    "RunDetails": "spool.query.details",
    "RunFilter": "spool.core.accounting",
    "SpoolError": "spool.core.errors",
    "SpoolUnusable": "spool.core.errors",
    "State": "spool.core.model",
    "Statistics": "spool.core.accounting",
    "TimedOut": "spool.python.results",
    "UsageError": "spool.core.errors",
    "WaitedJobs": "spool.python.waiting",
    "__version__": "spool.version",
    "as_completed": "spool.python.waiting",
    "job": "spool.python.client",
    "wait_all": "spool.python.waiting",
    "wait_any": "spool.python.waiting",
}
__all__ = [
    "AsyncClient",
    "Cancelled",
    "Change",
    "ChangeKind",
    "Client",
    "End",
    "Executor",
    "Explanation",
    "Future",
    "GpuList",
    "InvalidConfig",
    "InvalidFile",
    "InvalidJob",
    "InvalidRecord",
    "InvalidValue",
    "Job",
    "JobFailed",
    "JobFilter",
    "JobList",
    "JobRow",
    "Lost",
    "NoSuchJob",
    "NotAllSubmitted",
    "OutOfMemory",
    "Preview",
    "RemoteError",
    "RunDetails",
    "RunFilter",
    "SpoolError",
    "SpoolUnusable",
    "State",
    "Statistics",
    "TimedOut",
    "UsageError",
    "WaitedJobs",
    "as_completed",
    "job",
    "wait_all",
    "wait_any",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use: `import spool` alone costs nothing."""
    from importlib import import_module

    home = _HOMES.get(name)
    if home is None and not name.startswith("_"):
        from spool.formats.capabilities import capabilities

        home = next((each.public[name] for each in capabilities() if name in each.public), None)
    if home is None:
        raise AttributeError(f"module 'spool' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, "__version__"]
