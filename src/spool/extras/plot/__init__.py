"""`spool plot`: pictures of runs, and the charts of other verbs."""

from __future__ import annotations

from spool.extras.plot import pictures

__all__ = ["pictures"]
