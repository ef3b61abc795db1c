"""spool: a job scheduler whose only interface is a directory.

The public names are listed here; the rest is internal. Each name is imported on first use.
"""

_HOMES = {
    "Change": "spool.client.requests",
    "Client": "spool.python.client",
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
    """Import a public name on first use: `import spool` alone costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'spool' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
