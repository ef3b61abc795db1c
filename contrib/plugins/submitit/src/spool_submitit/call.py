"""What a job runs: `python -P -m spool_submitit.call FOLDER PATH…` makes the call of submitit in FOLDER.

PATH… are the directories of the caller's own modules. They are searched behind the standard library, where a module of
the same name cannot stand for one of it, and before what is installed, as in the caller.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence

from submitit.core.submission import submitit_main


def own_path() -> list[str]:
    """Return the directories in which this process finds modules beside the standard library and what is installed."""
    places = {os.path.realpath(place) for place in (sys.prefix, sys.base_prefix, sysconfig.get_path("purelib"))}
    found = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
    return [each for each in found if not any(f"{os.path.realpath(each)}/".startswith(f"{at}/") for at in places)]


def take(path: Sequence[str]) -> None:
    """Search *path* behind the standard library."""
    library = os.path.dirname(os.__file__)
    end = 1 + max((at for at, each in enumerate(sys.path) if each in (library, f"{library}/lib-dynload")), default=-1)
    sys.path[end:end] = path


if __name__ == "__main__":
    take(sys.argv[2:])
    del sys.argv[2:]
    submitit_main()
