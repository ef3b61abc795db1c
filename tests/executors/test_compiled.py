"""The compiled wrapper as a file: how it is built, and when it is used."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spool.executors import compiled
from wrapper_runs import needs_compiler


def _script(path: Path, text: str, mode: int = 0o755) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return str(path)


@pytest.fixture
def right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a program that names the source which is there."""
    source = tmp_path / "source.c"
    source.write_text("int main(void) { return 0; }\n")
    monkeypatch.setattr(compiled, "SOURCE", str(source))
    return _script(tmp_path / "right", f"echo {compiled.NAME} {compiled.digest()}")


@needs_compiler
def test_a_built_program_is_found_and_the_same_source_makes_the_same_bytes(tmp_path: Path) -> None:
    """It names its source, takes the place of a broken one, and nothing else is left where it was built.

    The folder, the time and the flags of the caller's environment leave no trace in it.
    """
    found = []
    for name in ("one", "another-with-a-longer-name"):
        (tmp_path / name).mkdir()
        program = _script(tmp_path / name / compiled.NAME, "exit 1")
        assert compiled.find(program).broken
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CFLAGS", f"-g -DNAME={name}")
            built = compiled.build(str(tmp_path / name))
        assert os.listdir(tmp_path / name) == [compiled.NAME]
        assert compiled.find(built.path) == compiled.FoundWrapper(program)
        found.append(Path(program).read_bytes())
    assert found[0] == found[1]
    if os.uname().machine in ("x86_64", "aarch64"):
        assert built.platforms == f"manylinux_2_17_{os.uname().machine}.musllinux_1_1_{os.uname().machine}"
        assert b"ld-" not in found[0], "it asks for a loader"


@needs_compiler
def test_it_goes_with_the_c_library_too(tmp_path: Path) -> None:
    """A wheel with that is for machines like this one; without, for every Linux of its processor."""
    with_library = compiled.build(str(tmp_path), alone=False)
    assert with_library.platforms == f"linux_{os.uname().machine}"
    assert compiled.find(with_library.path).path == with_library.path


@pytest.mark.usefixtures("right")
def test_without_a_compiler_the_reason_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does a compiler that fails; neither leaves anything behind, and an older program stays."""
    older = tmp_path / compiled.NAME
    older.touch()
    monkeypatch.setenv("CC", "/nonexistent/cc -O2")
    with pytest.raises(compiled.NotBuiltError, match=r"^the C compiler /nonexistent/cc cannot be run: No such file"):
        compiled.build(str(tmp_path))
    monkeypatch.setenv("CC", _script(tmp_path / "broken", "echo 'wrapper.c: too new' >&2; exit 1"))
    with pytest.raises(compiled.NotBuiltError, match=r"^wrapper.c: too new$"):
        compiled.build(str(tmp_path))
    monkeypatch.setenv("CC", "cc '")
    with pytest.raises(compiled.NotBuiltError, match="quotation"):
        compiled.build(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["broken", "right", "source.c", compiled.NAME]


def test_a_program_that_is_not_there_is_no_trouble(tmp_path: Path) -> None:
    """Without a compiler at the installation there is none."""
    found = compiled.find(str(tmp_path / "none"))
    assert (found.path, found.broken) == (None, False)
    assert found.why


def test_a_program_that_cannot_be_used_is_broken(tmp_path: Path, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another processor, not executable, failing, silent, or of another source: `sh` it is, with the reason."""
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(11) + b"\x16\x00" + bytes(44))  # a big machine of IBM's
    foreign.chmod(0o755)
    cases = {
        str(foreign): "is not for this machine: Exec format error",
        _script(tmp_path / "plain", "exit 0", 0o644): "may not be executed",
        _script(tmp_path / "failing", "exit 3"): "does not work here: exit code 3",
        _script(tmp_path / "dying", "kill -ILL $$"): "does not work here: exit code -4",
        _script(tmp_path / "other", f"echo {compiled.NAME} 0123"): "was built from another version of its source",
    }
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    cases[str(tmp_path / "dangling")] = "is not for this machine: No such file or directory"
    for path, why in cases.items():
        found = compiled.find(path)
        assert (found.path, found.why, found.broken) == (None, f"{path} {why}", True)
        assert found.remedy
    with monkeypatch.context() as hurried:
        hurried.setattr(compiled, "_TRY_S", 0.1)
        assert compiled.find(_script(tmp_path / "silent", "exec sleep 1000")).broken
    assert compiled.find(right).path == right


def test_a_machine_without_room_is_asked_again(right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork that was refused says nothing about the program; what a try has found out is kept."""
    real, tries = subprocess.run, list[list[str]]()

    def run(words: list[str], **how: Any) -> subprocess.CompletedProcess[bytes]:
        tries.append(words)
        if len(tries) == 1:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return real(words, **how)

    monkeypatch.setattr(subprocess, "run", run)
    found = compiled.find(right)
    assert (found.path, found.broken) == (None, True)
    assert str(right) in found.why
    assert [compiled.find(right).path for _ in range(3)] == [right] * 3
    assert len(tries) == 2
