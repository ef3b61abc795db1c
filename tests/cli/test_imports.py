"""What commands import: most of their time is that."""

from __future__ import annotations

from pathlib import Path

import pytest

from calling import spawned

MOST = {"ls": 57, "stats": 31, "show a": 68, "why a": 85}
"""How many modules of ours a command may import; a lower number is taken down here.

No dispatcher runs, so that lists make the rows of jobs themselves as one would; they load nothing of the machine.
"""


@pytest.mark.parametrize("words", MOST)
def test_a_command_imports_what_it_shows(spool_root: Path, words: str) -> None:
    """A list needs no planner, sums over the history need no jobs, and no command needs what it does not show."""
    (spool_root / "config.toml").write_text("autostart = false\n")
    (spool_root / "held" / "a.toml").write_text('command = "true"\n')
    code = (
        "import sys; from spool.cli.main import run;"
        f"code = run({words.split()!r});"
        "print(*(name for name in sys.modules if name.startswith('spool')), file=sys.stderr); sys.exit(code)"
    )
    done = spawned(program=("-c", code), check=True)
    assert len(done.stderr.splitlines()[-1].split()) <= MOST[words], done.stderr
