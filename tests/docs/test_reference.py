"""The generated page of reference."""

from __future__ import annotations

import os
import subprocess
import sys

from support import ROOT, WHOLE


@WHOLE
def test_the_page_of_keys_is_that_of_the_program() -> None:
    """`.ci/reference` has been run after the last change of a key."""
    words = [sys.executable, str(ROOT / ".ci" / "reference"), "--check"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
