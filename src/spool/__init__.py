"""spool: a job scheduler whose only interface is a directory.

What a program may use is named here; the rest is internal. Each name is imported when it is first used.
"""

_HOMES = {
    "Change": "spool.client.requests",
    "Client": "spool.api",
    "End": "spool.client.waiting",
    "Explanation": "spool.query.explain",
    "InvalidJob": "spool.core.errors",
    "JobFilter": "spool.query.jobs",
    "JobList": "spool.query.jobs",
    "JobRow": "spool.query.jobs",
    "NoSuchJob": "spool.core.errors",
    "SpoolError": "spool.core.errors",
    "SpoolUnusable": "spool.core.errors",
    "State": "spool.core.model",
    "__version__": "spool.version",
}
__all__ = [
    "Change",
    "Client",
    "End",
    "Explanation",
    "InvalidJob",
    "JobFilter",
    "JobList",
    "JobRow",
    "NoSuchJob",
    "SpoolError",
    "SpoolUnusable",
    "State",
]


def __getattr__(name: str) -> object:
    """Import what is public when it is asked for: `import spool` alone costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'spool' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
