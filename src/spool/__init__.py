"""spool: a job scheduler whose only interface is a directory."""

__version__ = "0.1.0"
