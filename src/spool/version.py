"""The version of spool."""

__version__ = "0.1.0"
