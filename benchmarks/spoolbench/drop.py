"""Job files, and many of them put into a spool; also a program: drop.py ROOT COUNT PREFIX COMMAND..."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def job_text(command: list[str], **keys: Any) -> str:
    """Return a job file."""
    lines = [f"command = {json.dumps(command)}", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def drop(root: str, count: int, prefix: str, command: list[str], *, numbered: bool = False, **keys: Any) -> None:
    """Put *count* job files into `queued/`, each whole, as `mv` from `.tmp/` does.

    *numbered*: no two are alike, as the number of the job is the last argument of its command.
    """
    staged, text = f"{root}/.tmp/{prefix}drop", job_text(command, **keys)
    for number in range(count):
        with open(staged, "w") as file:
            file.write(job_text([*command, str(number)], **keys) if numbered else text)
        os.rename(staged, f"{root}/queued/{prefix}{number}.toml")


if __name__ == "__main__":
    drop(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:], workdir="/")
