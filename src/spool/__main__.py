"""`python -m spool` is `spool`."""

from __future__ import annotations

from spool.cli.main import main

if __name__ == "__main__":
    main()
