"""How fast spool is: figures taken from outside, at depth, and of the planner alone; and how good its schedules are."""

import os
import sys

try:
    import spool  # noqa: F401  # is it installed for this Python?
except ImportError:
    _source = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "src")
    sys.path.append(_source)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _source]))
