"""What an installation gets: the wheel, with and without a C compiler, from a checkout and from an sdist."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from spool.executors import compiled
from support import ROOT
from wrapper_runs import needs_compiler

pytest.importorskip("hatchling")
needs_source = pytest.mark.skipif(not os.path.exists(compiled.SOURCE), reason="nothing to compile")
_PROGRAM = f"spool/executors/{compiled.NAME}"


def _build(kind: str, source: Path, into: Path, **environment: str) -> tuple[Path, str]:
    """Return what was built, and what was said on stderr."""
    into.mkdir()
    words = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
    done = subprocess.run(words, cwd=source, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = into.iterdir()
    return built, done.stderr


@needs_compiler
def test_a_wheel_has_the_program_and_is_the_same_again_from_an_sdist(tmp_path: Path) -> None:
    """It is executable, the tag names its processor, and an unpacked sdist makes the same wheel, byte for byte."""
    wheel, _ = _build("wheel", ROOT, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        assert stat.S_IMODE(archive.getinfo(_PROGRAM).external_attr >> 16) == 0o755
        assert archive.getinfo("spool/executors/wrapper.c").file_size
        archive.extractall(tmp_path / "there")
    program = tmp_path / "there" / _PROGRAM
    program.chmod(0o755)  # as installers do
    assert compiled.find(str(program)).path == str(program)
    assert wheel.name.endswith(f"-py3-none-{compiled.build(str(tmp_path)).platforms}.whl")
    sdist, _ = _build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        assert not [name for name in archive.getnames() if name.endswith(compiled.NAME)]
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
        archive.extractall(tmp_path / "source", **safely)
    (source,) = (tmp_path / "source").iterdir()
    again, _ = _build("wheel", source, tmp_path / "again")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


@needs_source
@pytest.mark.parametrize("how", [{"CC": "/nonexistent/cc"}, {"SPOOL_NO_WRAPPER": "1"}])
def test_without_a_compiler_the_wheel_is_for_every_machine(tmp_path: Path, how: dict[str, str]) -> None:
    """It holds no program, even if the checkout has one, and the build says why instead of failing."""
    wheel, said = _build("wheel", ROOT, tmp_path / "wheel", **how)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert _PROGRAM not in zipfile.ZipFile(wheel).namelist()
    assert "spool will start jobs with /bin/sh: its wrapper was not compiled: " in said
    assert next(iter(how.values())) in said or next(iter(how)) in said


@needs_compiler
def test_an_editable_installation_builds_the_program_beside_its_source(tmp_path: Path) -> None:
    """One that is built without a compiler takes an older program away, which may be of another source."""
    shutil.copytree(ROOT, tmp_path / "checkout", ignore=shutil.ignore_patterns(".*", "tests", compiled.NAME))
    shutil.copy(ROOT / ".gitignore", tmp_path / "checkout")
    checkout = tmp_path / "checkout"
    words = [sys.executable, "-c", "from hatchling.build import build_editable; build_editable('dist')"]
    for compiler, there in (("cc", True), ("/nonexistent/cc", False)):
        subprocess.run(words, cwd=checkout, env=os.environ | {"CC": compiler}, check=True, capture_output=True)
        assert (checkout / "src" / _PROGRAM).exists() == there
