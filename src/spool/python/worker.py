"""What runs a call of a Python function, under the name that job files of spool 0.1 have for it."""

from __future__ import annotations

import sys

from spool.formats.capabilities import loaded

if __name__ == "__main__":
    sys.exit(loaded("spool.extras.functions.calls:main")(sys.argv[1:]))
