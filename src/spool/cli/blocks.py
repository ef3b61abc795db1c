"""Pictures for a terminal, of block characters: a curve is a row, a stretch of time a column."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*%#"


def curve(values: Sequence[float], highest: float) -> str:
    """Return *values* as one row, each as high as its part of *highest*. What is not nothing is seen."""
    levels = _EIGHTHS if can_draw() else _ASCII
    row = []
    for value in values:
        part = value / highest if highest > 0 else 0.0
        level = min(max(round(part * 8), 1 if value > 0 else 0), 8)
        row.append(levels[level])
    return "".join(row)


def can_draw() -> bool:
    """Whether what reads our output can be sent block characters."""
    try:
        _EIGHTHS.encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True
