"""Which code a directory has, whatever its repository would like to run."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from spool.extras.capture.code import (
    CUT,
    MOST_UNTRACKED,
    NONE,
    WHOLE,
    Code,
    GitError,
    code_at,
    code_in_words,
    interpreter_of,
    program_of,
)

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(where: Path, *words: str) -> str:
    """Run git as a user does."""
    author = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return subprocess.run(
        ["git", *words], cwd=where, env={**os.environ, **author}, check=True, capture_output=True, text=True
    ).stdout.strip()


def asked(where: Path, most: int = 1 << 20) -> tuple[Code, bytes]:
    """Look at *where* as the worker does."""
    return code_at(str(where), time.monotonic() + 20, most)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Give a work tree with one commit."""
    path = tmp_path / "tree"
    (path / "sub").mkdir(parents=True)
    git(path, "init", "-q", "-b", "main")
    (path / "a").write_text("one\n")
    (path / "sub" / "b").write_bytes(b"\0binary\xff")
    git(path, "add", ".")
    git(path, "commit", "-qm", "one")
    return path


def test_a_clean_tree_is_its_commit(tree: Path) -> None:
    """The branch is known too, from a directory below the top."""
    code, diff = asked(tree / "sub")
    assert (code.top, code.branch) == (str(tree), "main")
    assert (code.commit, code.changed, code.diff, diff) == (git(tree, "rev-parse", "HEAD"), 0, None, b"")
    git(tree, "checkout", "-q", "--detach")
    assert asked(tree)[0].branch is None


def applied(tree: Path) -> Path:
    """Return a clone of the tree with its changes, as the worker sees them."""
    patch, clone = tree.parent / "patch", tree.parent / "clone"
    patch.write_bytes(asked(tree)[1])
    git(tree.parent, "clone", "-q", str(tree), str(clone))
    git(clone, "apply", str(patch))
    return clone


def test_the_diff_makes_the_tree_again(tree: Path) -> None:
    """Changed, staged, removed and binary files come back; untracked ones are named."""
    (tree / "a").write_text("two\n")
    (tree / "sub" / "b").write_bytes(b"\0other\xfe")
    (tree / "staged").write_text("new\n")
    git(tree, "add", "staged")
    (tree / "new file").write_text("x")
    code, _ = asked(tree)
    assert (code.changed, code.diff, code.untracked, code.untracked_count) == (3, WHOLE, ("new file",), 1)
    clone = applied(tree)
    for name in ("a", "sub/b", "staged"):
        assert (clone / name).read_bytes() == (tree / name).read_bytes()


def test_the_diff_can_be_applied_whatever_the_user_likes_to_see(tree: Path) -> None:
    """Settings of the repository, or the user, such as less context and other prefixes, make no other patch."""
    (tree / "a").write_text("".join(f"{number}\n" for number in range(30)))
    git(tree, "commit", "-qam", "two")
    (tree / "a").write_text("".join(f"{number}\n" for number in range(31) if number not in (3, 20)))
    settings = {"diff.context": "0", "diff.noprefix": "true", "color.ui": "always", "diff.interHunkContext": "9"}
    for key, value in settings.items():
        git(tree, "config", key, value)
    assert (applied(tree) / "a").read_bytes() == (tree / "a").read_bytes()


def test_a_large_diff_is_cut_and_said(tree: Path) -> None:
    """Its first bytes are kept."""
    (tree / "a").write_text("line\n" * 100_000)
    code, diff = asked(tree, 1000)
    assert (code.diff, code.diff_bytes, len(diff)) == (CUT, 1000, 1000)


def test_many_untracked_files_are_counted(tree: Path) -> None:
    """The first are named."""
    for number in range(MOST_UNTRACKED + 50):
        (tree / f"u{number:04}").touch()
    code, _ = asked(tree)
    assert (len(code.untracked), code.untracked_count) == (MOST_UNTRACKED, MOST_UNTRACKED + 50)


def test_a_tree_without_a_commit_and_no_tree_at_all(tmp_path: Path) -> None:
    """The first has no commit; the others say why, and so does a bare repository."""
    git(tmp_path, "init", "-q", "empty")
    (tmp_path / "empty" / "x").touch()
    git(tmp_path / "empty", "add", "x")
    code, diff = asked(tmp_path / "empty")
    assert (code.commit, code.changed, code.diff, diff) == (None, 1, NONE, b"")
    git(tmp_path, "init", "-q", "--bare", "bare")
    (tmp_path / "plain").mkdir()
    for name, words in (("bare", "bare|work tree"), ("plain", "not a git repository"), ("gone", "No such file")):
        with pytest.raises(GitError, match=words):
            asked(tmp_path / name)


def test_a_repository_runs_no_program_of_its_own(tree: Path, program: Path, tmp_path: Path) -> None:
    """No monitor, hook, text conversion or external diff, and nothing of a repository inside the tree."""
    for key in ("core.fsmonitor", "diff.external", "diff.evil.textconv", "diff.evil.command", "core.pager"):
        git(tree, "config", key, str(program))
    (tree / ".gitattributes").write_text("* diff=evil\n")
    for hook in ("post-index-change", "post-checkout", "pre-commit"):
        shutil.copy(program, tree / ".git" / "hooks" / hook)
    (tree / "a").write_text("two\n")
    code, diff = asked(tree)
    assert (code.changed, b"+two" in diff) == (1, True)
    inner = tree / "inner"
    git(tmp_path, "init", "-q", "--bare", str(inner))
    git(inner, "config", "core.fsmonitor", str(program))
    git(inner, "config", "core.worktree", str(tree))
    git(inner, "config", "core.bare", "false")
    with pytest.raises(GitError):
        asked(inner)
    assert not program.with_name("ran").exists()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Give a program that leaves a trace and passes its input on."""
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\necho $0 $* >> {tmp_path}/ran\nexec cat\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("where", ["config", "included", "worktree"])
@pytest.mark.parametrize("key", ["clean", "process", "smudge"])
def test_no_filter_that_a_repository_names_runs(tree: Path, program: Path, where: str, key: str) -> None:
    """Whatever file of it names one, required or not; the changes of the file are seen all the same."""
    (tree / ".git" / "info").mkdir(exist_ok=True)
    (tree / ".git" / "info" / "attributes").write_text("a filter=evil.x\nb filter=evil.x\n")
    if where == "included":
        git(tree, "config", "include.path", "more")
        file = ["--file", ".git/more"]
    else:
        git(tree, "config", "extensions.worktreeConfig", "true")
        file = ["--worktree"] if where == "worktree" else []
    git(tree, "config", *file, f"filter.evil.x.{key}", str(program))
    git(tree, "config", *file, "filter.evil.x.required", "true")
    (tree / "a").write_text("two\n")
    code, diff = asked(tree)
    assert (code.changed, b"+two" in diff) == (1, True)
    assert not program.with_name("ran").exists()


def test_a_filter_that_cannot_be_overridden_is_refused(tree: Path, program: Path) -> None:
    """Its name has a sign by which git would end it."""
    (tree / ".gitattributes").write_text("a filter=b=c\n")
    git(tree, "config", "filter.b=c.clean", str(program))
    (tree / "a").write_text("two\n")
    with pytest.raises(GitError, match="="):
        asked(tree)
    assert not program.with_name("ran").exists()


def test_the_users_own_filter_runs(tree: Path, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `git status`, also where the repository has another one of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    git(tree, "config", "--global", "filter.own.clean", "tr a-z A-Z")
    git(tree, "config", "filter.own.clean", str(program))
    (tree / ".git" / "info" / "attributes").write_text("a filter=own\n")
    (tree / "a").write_text("two\n")
    assert b"+TWO" in asked(tree)[1]
    assert not program.with_name("ran").exists()


def test_nothing_that_a_partial_clone_lacks_is_fetched(tree: Path, program: Path) -> None:
    """Neither the program at the other end nor one of the transport starts."""
    blob = git(tree, "rev-parse", "HEAD:a")
    settings = {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.url": str(tree.parent / "none"),
        "remote.origin.promisor": "true",
        "remote.origin.uploadpack": str(program),
        "protocol.allow": "always",
        "protocol.file.allow": "always",
        "protocol.ext.allow": "always",
    }
    for key, value in settings.items():
        git(tree, "config", key, value)
    (tree / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    (tree / "a").write_text("two\n")
    for url in (settings["remote.origin.url"], f"ext::{program} x", "ssh://nowhere/x"):
        git(tree, "config", "remote.origin.url", url)
        git(tree, "config", "core.sshCommand", str(program))
        with pytest.raises(GitError):
            asked(tree)
    assert not program.with_name("ran").exists()


def test_git_is_not_taken_from_the_directory_that_is_looked_at(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty entry of PATH would mean it."""
    trap = tree / "git"
    trap.write_text("#!/bin/sh\ntouch ran\n")
    trap.chmod(0o755)
    monkeypatch.setenv("PATH", f":.:{os.environ['PATH']}")
    assert asked(tree)[0].untracked == ("git",)


def test_nothing_is_written(tree: Path) -> None:
    """Not even the index, which git would refresh."""
    os.utime(tree / "a", (1, 1))
    before = (tree / ".git" / "index").read_bytes()
    asked(tree)
    assert (tree / ".git" / "index").read_bytes() == before
    assert not (tree / ".git" / "index.lock").exists()


def test_a_git_that_hangs_is_ended(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as it may, and no longer; a flood of words on stderr stops nothing."""
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nhead -c 1000000 /dev/zero >&2\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    begun = time.monotonic()
    with pytest.raises(GitError, match="took too long"):
        code_at(str(tree), begun + 0.3, 100)
    assert time.monotonic() - begun < 10


def test_variables_of_the_caller_point_git_nowhere_else(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher that was started by a hook of git has them."""
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    assert asked(tree)[0].commit is not None


# The interpreter, and its packages.


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """Give what a virtual environment looks like; its python must not run."""
    path = tmp_path / "venv"
    site = path / "lib" / "python3.11" / "site-packages"
    (path / "bin").mkdir(parents=True)
    site.mkdir(parents=True)
    python = path / "bin" / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    python.chmod(0o755)
    (path / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.7\n")
    for name in ("numpy-2.1.0.dist-info", "My_Package-1.0.dist-info", "old-0.1-py3.11.egg-info", "numpy"):
        (site / name).mkdir()
    return path


@pytest.mark.parametrize("by", ["command", "relative", "PATH", "VIRTUAL_ENV", "assignment"])
def test_the_interpreter_of_a_command(venv: Path, tmp_path: Path, by: str) -> None:
    """By its path, by the first in PATH, by the environment that is active: never by running it."""
    words, environment = {
        "command": ([f"{venv}/bin/python", "x.py"], {}),
        "relative": (["venv/bin/python"], {}),
        "PATH": (["python", "x.py"], {"PATH": f"relative:/nowhere:{venv}/bin:/usr/bin"}),
        "VIRTUAL_ENV": (["./train.sh"], {"VIRTUAL_ENV": str(venv), "PATH": "/usr/bin"}),
        "assignment": (["A=1", "python", "-u"], {"PATH": f"{venv}/bin"}),
    }[by]
    found = interpreter_of(program_of(words), str(tmp_path), environment)
    assert (found.path, found.version) == (f"{venv}/bin/python", "3.11.7")
    assert found.packages == ("My-Package 1.0", "numpy 2.1.0", "old 0.1")
    assert not (tmp_path / "ran").exists()


def test_no_interpreter_is_none(tmp_path: Path) -> None:
    """Neither is one that is not there."""
    assert interpreter_of("", str(tmp_path), {}) is None
    assert interpreter_of("venv/bin/python", str(tmp_path), {"PATH": "/nowhere"}) is None


@pytest.mark.parametrize(("diff", "kept"), [(WHOLE, ""), (CUT, ", diff cut"), (NONE, ", diff not kept")])
def test_a_diff_that_is_not_whole_is_told(diff: str, kept: str) -> None:
    """Who looks at a run knows that the code cannot be made again from it."""
    assert code_in_words(Code("/", commit="3f2a1bc9d0e15", changed=2, diff=diff)) == (
        f"3f2a1bc9d0e1, 2 files changed{kept}"
    )
