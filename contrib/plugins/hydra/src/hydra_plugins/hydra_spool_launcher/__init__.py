"""Hydra's launcher for spool: `hydra/launcher=spool`."""

__version__ = "0.1.0"
