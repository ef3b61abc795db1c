"""A spool for all tests, whose jobs can import what the tests submit."""

from __future__ import annotations

import os
from pathlib import Path

from served_spool import _served, root

__all__ = ["_served", "root"]

os.environ["PYTHONPATH"] = str(Path(__file__).parent)
