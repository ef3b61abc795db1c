"""A spool on a HyperQueue, which is a fake: the real `hq` is in no package that the tests could install."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from extras.engines import fake_hq
from served import Served
from spool.testing.engine_claims import Site


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the directory of a server, with `hq` in the PATH."""
    directory, programs = tmp_path / "server", tmp_path / "programs"
    directory.mkdir()
    programs.mkdir()
    program = programs / "hq"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_hq.__file__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return directory


@pytest.fixture
def engine_site(server: Path, tmp_path: Path) -> Iterator[Site]:
    """Give a spool on it; the test starts the dispatcher."""

    def cancel(job: str) -> None:
        subprocess.run(["hq", "--output-mode=json", f"--server-dir={server}", "job", "cancel", job], check=True)

    with Served(tmp_path / "spool", executor="hq") as spool:
        settings = f'autostart = false\ndisk_floor = "0M"\n[hq]\npoll = "1s"\nserver_dir = "{server}"\n'
        (spool.root / "config.toml").write_text(settings)
        yield Site(
            spool,
            "hq",
            cancel,
            refused={"executor_options": ["--no-such-option=1"]},
            silence=(server / "away").touch,
            speak=(server / "away").unlink,
            fill=(server / "full").touch,
            drain=(server / "full").unlink,
        )
