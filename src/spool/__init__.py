"""spool: a job scheduler whose only interface is a directory.

The public names are listed here; the rest is internal. Each name is imported on first use.
"""

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "spool.python.asynchronous",
    "Change": "spool.client.requests",
    "ChangeKind": "spool.client.requests",
    "Client": "spool.python.client",
    "End": "spool.client.waiting",
    "Explanation": "spool.query.explain",
    "GpuList": "spool.query.machine",
    "InvalidConfig": "spool.core.errors",
    "InvalidFile": "spool.core.errors",
    "InvalidJob": "spool.core.errors",
    "InvalidRecord": "spool.core.errors",
    "InvalidValue": "spool.core.errors",
    "Job": "spool.python.client",
    "JobFilter": "spool.query.rows",
    "JobList": "spool.query.rows",
    "JobRow": "spool.query.rows",
    "NoSuchJob": "spool.core.errors",
    "NotAllSubmitted": "spool.core.errors",
    "Preview": "spool.query.explain",
    "RunDetails": "spool.query.details",
    "RunFilter": "spool.core.accounting",
    "SpoolError": "spool.core.errors",
    "SpoolUnusable": "spool.core.errors",
    "State": "spool.core.model",
    "Statistics": "spool.core.accounting",
    "UsageError": "spool.core.errors",
    "WaitedJobs": "spool.python.client",
    "as_completed": "spool.python.client",
    "job": "spool.python.client",
    "wait_all": "spool.python.client",
    "wait_any": "spool.python.client",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: `import spool` alone costs nothing."""
    if name == "__all__":
        return [each for each in __dir__() if each != "__version__"]
    home = _HOMES.get(name)
    if home is None and not name.startswith("_"):
        home = _contributed().get(name)
    if home is None:
        raise AttributeError(f"module 'spool' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)


def _contributed() -> dict[str, str]:
    from spool.formats.capabilities import capabilities

    return {name: home for each in capabilities() for name, home in each.public.items()}


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*_HOMES, *_contributed(), "__version__"])
