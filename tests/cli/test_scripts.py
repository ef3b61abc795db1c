"""Scripts that are submitted: captured as they are, run by their first line, refused where nothing would run them."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from calling import Command


def keys_of(spool: Command, *words: object) -> dict[str, Any]:
    """Return the keys of the job file that a submission would write."""
    said = spool("submit", "--dry-run", "--export", "NONE", *words)
    assert said.code == 0, said.err
    return tomllib.loads(said.out)


def written(path: Path, text: str | bytes, mode: int = 0o644) -> Path:
    """Write a script."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


AWKWARD = [
    "#!/bin/sh\nprintf 'a\\r\\n' \"$1\"\n",
    "#!/bin/sh\necho '''a''' \"\"\"b\"\"\" \\\n  c\n",
    "#!/bin/sh\necho no newline at the end '",
    "#!/bin/sh\n\n\n\techo \u00e9 \u2028 \x7f\n\n",
    "#!/bin/sh",
]


@pytest.mark.parametrize("text", AWKWARD)
@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_a_script_is_captured_byte_for_byte(spool: Command, tmp_path: Path, text: str, mode: int) -> None:
    """Quotes, backslashes and odd letters stand in the job file as in the script, with the arguments beside them."""
    script = written(tmp_path / "a.sh", text, mode)
    keys = keys_of(spool, script, "x y", "--lr=1")
    assert (keys["script"], keys["command"]) == (text, [str(script), "x y", "--lr=1"])


def test_a_long_script_full_of_brackets_is_a_script(spool: Command, tmp_path: Path) -> None:
    """What a shell opens and never closes, `$#` and `[[` among it, is text, on every Python that spool runs on."""
    lines = [f'if [ $# -gt {n} ]; then a+=("${{#a[@]}}" "[["); fi # {{' for n in range(40)]
    script = written(tmp_path / "a.sh", "#!/bin/bash\n" + "\n".join(lines) + "\nexit 0\n")
    assert keys_of(spool, script)["script"] == script.read_text()


def test_a_captured_script_is_good_to_read(spool: Command, tmp_path: Path) -> None:
    """Its lines are lines of the job file, with nothing escaped, before the tables."""
    script = written(tmp_path / "a.sh", "#!/bin/sh\nprintf 'a\\n' \"$1\"\n")
    said = spool("submit", "--dry-run", "--export", "NONE", "--env", "A=1", script)
    assert "script = '''\n" + script.read_text() + "'''\n\n[env]\n" in said.out


def test_no_capture_runs_a_script_by_its_path(spool: Command, tmp_path: Path) -> None:
    """On the command line and in the script; a file that is not executable is given to its interpreter."""
    script = written(tmp_path / "a.sh", "#!/bin/bash -x\n#SPOOL --no-capture\ntrue\n")
    keys = keys_of(spool, script, "x")
    assert (keys["command"], "script" in keys) == (["/bin/bash", "-x", str(script), "x"], False)
    assert "script" in keys_of(spool, "--capture", script)
    script = written(tmp_path / "b.sh", "#!/bin/sh\n", 0o755)
    keys = keys_of(spool, "--no-capture", script)
    assert (keys["command"], "script" in keys) == ([str(script)], False)


def test_a_program_is_run_by_its_path(spool: Command, tmp_path: Path) -> None:
    """A file that is no text cannot be captured and need not be."""
    program = written(tmp_path / "prog", b"\x7fELF\0\0", 0o755)
    assert keys_of(spool, program, "x")["command"] == [str(program), "x"]
    program.chmod(0o644)
    assert spool("submit", program).code == 2


@pytest.mark.parametrize(
    ("name", "text", "mode", "hints"),
    [
        ("train.py", "print(1)\n", 0o644, ("-- python3 train.py", "#!/usr/bin/env python3")),
        ("train.py", "print(1)\n", 0o755, ("-- python3 train.py", "#!/usr/bin/env python3")),
        ("a.sh", "echo\n", 0o755, ("-- sh a.sh", "#!/bin/sh")),
        ("fit.R", "1\n", 0o644, ("-- Rscript fit.R", "#!/usr/bin/env Rscript")),
        ("o'k", "", 0o644, ("-- sh 'o'\"'\"'k'",)),
        ("bom.sh", "\ufeff#!/bin/sh\n", 0o644, ("not at the very beginning", "a byte order mark: `sed -i")),
        ("late.sh", "\n#!/bin/sh\n", 0o644, ("not at the very beginning",)),
        ("crlf.sh", "#!/bin/sh\r\ntrue\r\n", 0o755, ("Windows line endings", "sed -i")),
        ("none.sh", "#! \ntrue\n", 0o755, ("names no interpreter",)),
    ],
)
def test_a_script_that_nothing_would_run_is_refused(
    spool: Command,
    spool_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
    mode: int,
    hints: tuple[str, ...],
) -> None:
    """Without a `#!` line it is not given to a shell by guess; the error has the ways out."""
    monkeypatch.chdir(spool_root.parent)
    written(Path(name), text, mode)
    for verb in ("submit", "run"):
        said = spool(verb, name)
        assert said.code == 2
        assert [hint for hint in hints if hint not in said.err] == [], said.err
    assert os.listdir(spool_root / "queued") == []


def test_a_python_script_finds_what_lies_beside_it(
    spool: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is where it imports from, before the caller's PYTHONPATH; a shell's script needs none."""
    for line in ("/usr/bin/env python3", "/usr/bin/python3.11 -u"):
        script = written(tmp_path / "a.py", f"#!{line}\nimport b\n")
        assert keys_of(spool, script)["env"] == {"PYTHONPATH": str(tmp_path)}
        assert keys_of(spool, "-e", "PYTHONPATH=/x", script)["env"] == {"PYTHONPATH": f"{tmp_path}:/x"}
        assert "env" not in keys_of(spool, "--no-capture", script)
        monkeypatch.setenv("PYTHONPATH", "/opt/lib")
        assert keys_of(spool, "--export", "PYTHONPATH", script)["env"] == {"PYTHONPATH": f"{tmp_path}:/opt/lib"}
    assert "env" not in keys_of(spool, written(tmp_path / "a.sh", "#!/bin/sh\n"))


def test_a_script_can_ask_to_be_held(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """`#SPOOL --hold` does what the option does."""
    spool("submit", "-n", "a", written(tmp_path / "a.sh", "#!/bin/sh\n#SPOOL --hold --cpus 2\n"))
    assert os.listdir(spool_root / "held") == ["a.toml"]
    assert os.listdir(spool_root / "queued") == []


def test_a_job_file_is_no_script(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """Without -f it is submitted as with it; with options or arguments it is refused."""
    file = written(tmp_path / "a.toml", b"# mine\ncommand = 'true'\n", 0o755)
    assert spool("submit", file).out == "a\n"
    assert (spool_root / "queued" / "a.toml").read_bytes() == file.read_bytes()
    assert spool("submit", "-n", "b", file).out == "b\n"
    for words in (("--cpus", "2", file), (file, "x")):
        said = spool("submit", *words)
        assert said.code == 2
        assert f"spool submit -f {file}" in said.err
    assert spool("submit", written(tmp_path / "bad.toml", "comand = 1\n")).code == 4
