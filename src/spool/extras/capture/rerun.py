"""`spool rerun`: an earlier run once more, as a new job, in the same place or exactly as its code was."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any

import click

from spool.cli.group import JobArgument, Verb, own
from spool.cli.render import say, say_text, tell
from spool.cli.submission import check_free, checked_name, publish, tell_doubts
from spool.client.draft import Draft, escaped, next_name, placeholders
from spool.client.submit import literal
from spool.core import layout
from spool.core.errors import NoSuchJob, SpoolError, cannot
from spool.extras.capture.code import GitError, git, interpreter_of, sources_in
from spool.extras.capture.diff import run_named
from spool.extras.capture.record import CUT, DIFF, NONE, Capture, Code, capture_of
from spool.formats import jobfile, toml
from spool.formats.capabilities import one_run_keys
from spool.store.disk import Disk
from spool.store.spool import Spool

_WITHIN_S = 600.0  # for a checkout
_TEXTS = ("command", "script", "stdout", "stderr", "setup", "prolog", "epilog", "workdir", "env", "matrix", "rows")


@click.command(cls=Verb)
@click.argument("name", cls=JobArgument, metavar="NAME[/RUN]")
@click.option("--exact", is_flag=True, help="In a work tree of its own, with the commit and the changes of that run.")
@click.option("--name", "new_name", metavar="NAME", help="The name of the new job. Default: NAME-2, NAME-3, …")
@click.option("--hold", is_flag=True, help="Submit the job held: it does not start until `spool release`.")
@click.option("--dry-run", is_flag=True, help="Print the job file, and change nothing.")
@click.pass_obj
def command(root: str, /, name: str, exact: bool, new_name: str | None, hold: bool, dry_run: bool) -> int:
    """Submit an earlier run again, as a new job.

    The new job has the file that the run began with, whatever became of the job since. Without RUN it is the newest
    run. `spool requeue` runs the job itself again, with its present file.

    With --exact it runs in `worktrees/NAME` in the spool: a git work tree with the commit that the run began with and
    its uncommitted changes, from `[capture]` in the configuration. Paths into the old tree lead to the new one. What
    git does not track is not there, except the virtual environment of the old tree, by a link. `spool gc` removes the
    work tree with the job.

      spool rerun train/3
      spool rerun train/3 --exact

    By hand: cp jobs/train/3/job.toml queued/train-2.toml
    """
    spool = own(root)
    job, run = run_named(spool, name)
    run = spool.latest_run(job) if run is None else run
    text = spool.record(job, run, layout.SPEC_COPY) if run is not None else None
    if run is None or text is None:
        if not spool.runs(job) and not spool.places(job):
            raise spool.no_such_job("run", f"{name} again", job)
        why = "there is no such run, or its records were removed"
        raise NoSuchJob(cannot("run", f"{name} again", why if spool.runs(job) else "it has not run yet"))
    new = checked_name(new_name or next_name(root, job))
    if bound := one_run_keys(text):
        keys = toml.read(text, "a job file")
        text = jobfile.dump({key: value for key, value in keys.items() if key not in bound})
        tell(f"{new} is without {', '.join(bound)}, which only one run can have")
    if not exact:
        _submit(root, new, text, hold=hold, dry_run=dry_run)
        return 0
    capture = _usable(spool, job, run)
    code = capture.code
    assert code is not None
    tree = f"{spool.root}/{layout.WORKTREES}/{new}"
    moved = _moved(text, spool.record(job, run, layout.DEFAULTS), code, tree)
    if not dry_run:
        check_free(root, new, can_replace=False)
        _make(spool, job, run, code, tree)
    try:
        moved = _with_packages(moved, capture, code, tree, make=not dry_run)
        _submit(root, new, jobfile.dump(moved), hold=hold, dry_run=dry_run)
    except BaseException:
        if not dry_run:
            _remove(code, tree)
        raise
    _tell_doubts(capture, code)
    return 0


def _submit(root: str, name: str, text: bytes, *, hold: bool, dry_run: bool) -> None:
    draft = Draft(name, {}, held=hold, text=text)
    draft.check(root)
    if dry_run:
        say_text(text.decode("utf-8", "replace"))
        return
    check_free(root, name, can_replace=False)
    tell_doubts(root, [draft], strict=False)
    publish(root, [draft], held=hold, replace=False)
    say(name, at_once=True)


def _usable(spool: Spool, job: str, run: int) -> Capture:
    """Return the capture of a run if its tree can be made again. Raises SpoolError."""
    capture = capture_of(spool, job, run) or Capture()
    remedy = None
    if (code := capture.code) is None:
        why = capture.problem or "its code was not captured"
        remedy = None if capture.problem else "`[capture] git = true` in config.toml captures later runs"
    elif code.commit is None:
        why = "its tree had no commit yet"
    elif code.diff == CUT:
        why = f"its uncommitted changes were cut at {code.diff_bytes} bytes"
        remedy = "`[capture] diff` in config.toml keeps more of later runs"
    elif code.diff == NONE:
        why, remedy = (
            "its uncommitted changes were not kept",
            "`[capture] diff` in config.toml keeps those of later runs",
        )
    elif code.submodules:
        why = "its tree has submodules, which a work tree of its own does not get"
    elif not os.path.isdir(code.top):
        why = f"its tree {code.top} is gone"
    else:
        return capture
    raise SpoolError(cannot("run", f"{job}/{run} again exactly", why, remedy=remedy))


def _make(spool: Spool, job: str, run: int, code: Code, tree: str) -> None:
    """Make the work tree. Raises SpoolError, and leaves nothing then."""
    what, commit = f"{job}/{run} again exactly", str(code.commit)
    patch = spool.layout.record(job, run, DIFF)
    if code.diff is not None:
        kept = b""
        with suppress(OSError), open(patch, "rb") as file:
            kept = file.read()
        if sha256(kept).hexdigest() != code.diff_hash:
            raise SpoolError(
                cannot("run", what, "the patch with its uncommitted changes was changed or removed", where=patch)
            )
    until = time.monotonic() + _WITHIN_S
    try:
        git(["cat-file", "-e", f"{commit}^{{commit}}"], code.top, until)
    except GitError:
        remedy = f"fetch it: git -C {code.top} fetch --all"
        raise SpoolError(
            cannot("run", what, f"the commit {commit[:12]} is gone", where=code.top, remedy=remedy)
        ) from None
    disk = Disk(spool.layout.at(layout.STAGING))
    disk.ensure_directory(spool.layout.at(layout.WORKTREES))
    try:
        disk.mkdir(tree, 0o755)
    except FileExistsError:
        why = "the work tree of an earlier job of that name is there"
        remedy = "give another name with --name, or remove that job with `spool gc`"
        raise SpoolError(cannot("run", what, why, where=tree, remedy=remedy)) from None
    try:
        # Forced: git may still know one of that name, which was removed with its job.
        git(["worktree", "add", "--force", "--detach", tree, commit], code.top, until)
        if code.diff is not None:
            git(["apply", "--whitespace=nowarn", patch], tree, until)
        if not _is_below(f"{tree}/{code.prefix}", tree):
            raise SpoolError(cannot("run", what, f"{code.prefix} leads out of it by a link", where=tree))
        os.makedirs(f"{tree}/{code.prefix}", exist_ok=True)  # git tracks no empty directory
    except BaseException as error:
        _remove(code, tree)
        if not isinstance(error, GitError | OSError):
            raise
        raise SpoolError(cannot("run", what, str(error), where=tree)) from None


def _is_below(path: str, tree: str) -> bool:
    """Whether *path* is in *tree* also after the links on its way, which a commit may have in it."""
    real = os.path.realpath(tree)
    return os.path.commonpath((real, os.path.realpath(path))) == real


def _remove(code: Code, tree: str) -> None:
    with suppress(GitError):
        git(["worktree", "remove", "--force", tree], code.top, time.monotonic() + _WITHIN_S)
    with suppress(OSError):  # git knew nothing of it yet
        os.rmdir(tree)


def _moved(text: bytes, defaults: bytes | None, code: Code, tree: str) -> dict[str, Any]:
    """Return the keys of a job file and the defaults of its run, with the new tree in all paths into the old one."""
    keys = toml.read(text, "a job file")
    for key, value in toml.read(defaults or b"", "the defaults of a run").items():
        if key == "env":
            keys["env"] = {**value, **keys.get("env", {})}
        else:
            keys.setdefault(key, value)
    known = placeholders(keys)
    new_tree = escaped(literal(tree), known)
    workdir = keys.get("workdir")
    swap = _swapper({code.top, *_other_names(workdir, code)}, tree)
    for key in _TEXTS:
        if key in keys:
            keys[key] = _each(keys[key], swap)
    if isinstance(container := keys.get("container"), Mapping):  # its image may be a file that git does not track
        keys["container"] = {key: value if key == "image" else _each(value, swap) for key, value in container.items()}
    if keys.get("workdir") == workdir:  # it is spelled in another way, or the home directory
        keys["workdir"] = f"{new_tree}/{escaped(literal(code.prefix), known)}".rstrip("/")
    return keys


def _other_names(workdir: object, code: Code) -> set[str]:
    """Return the other names by which a job file may know the old tree: by a link, and from the home directory."""
    found = set()
    if isinstance(workdir, str) and workdir.startswith("/") and workdir.endswith(code.prefix):
        name = workdir[: len(workdir) - len(code.prefix)].rstrip("/")
        if name and os.path.realpath(name) == os.path.realpath(code.top):
            found.add(name)
    home = os.path.expanduser("~")
    inside = os.path.relpath(code.top, os.path.realpath(home))
    if inside.partition("/")[0] not in (".", ".."):
        found |= {f"{each}/{inside}" for each in (home, "~", "$HOME", "${HOME}")}
    return found


def _swapper(old: set[str], new: str) -> Callable[[str], str]:
    """Return what replaces each of *old* by *new*, also after an option as in `-I/tree`, and as in `file:///tree`."""
    names = "|".join(sorted(map(re.escape, old), key=len, reverse=True))
    pattern = re.compile(
        rf"(?:(?<=://)|(?<![A-Za-z0-9._/-]))(-[A-Za-z])?(?:{names})(?![A-Za-z0-9._-])((?:/[A-Za-z0-9._-]*)*)"
    )

    def swapped(match: re.Match[str]) -> str:
        leads_out = os.path.normpath(f".{match[2]}").startswith("..")  # a path beside the old tree stays
        return match[0] if leads_out else f"{match[1] or ''}{new}{match[2]}"

    return lambda text: pattern.sub(swapped, text)


def _each(value: object, swap: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return swap(value)
    if isinstance(value, Mapping):
        return {key: _each(each, swap) for key, each in value.items()}
    return [_each(each, swap) for each in value] if isinstance(value, list) else value


def _with_packages(keys: dict[str, Any], capture: Capture, code: Code, tree: str, *, make: bool) -> dict[str, Any]:
    """Give the new tree the virtual environment of the old one, and its own sources instead of editable installs."""
    python = capture.interpreter
    prefix = python.prefix if python is not None else ""
    inside = prefix or f"{code.top}/.venv"
    if inside.startswith(f"{code.top}/") and os.path.isdir(inside):
        link = f"{tree}/{inside.removeprefix(f'{code.top}/')}"
        above = os.path.dirname(link)
        if make and not os.path.lexists(link) and os.path.isdir(above) and _is_below(above, tree):
            os.symlink(inside, link)
    sources = [f"{tree}{path.removeprefix(code.top)}" for path in sources_in(inside, code.top)]
    if sources:
        env = dict(keys.get("env", {}))
        env["PYTHONPATH"] = ":".join(filter(None, (*sources, env.get("PYTHONPATH", ""))))
        keys["env"] = env
    return keys


def _tell_doubts(capture: Capture, code: Code) -> None:
    """Say what may differ all the same."""
    if code.untracked_count:
        more = f" and {code.untracked_count - 3} more" if code.untracked_count > 3 else ""
        tell(f"not in the new work tree, because git did not track it: {', '.join(code.untracked[:3])}{more}")
    if (python := capture.interpreter) is not None:
        now = interpreter_of([python.path], "/", {})
        if now is None:
            tell(f"the run's Python {python.path} is gone")
        elif (now.version, now.packages) != (python.version, python.packages):
            tell(f"the packages of {python.path} have changed since: `spool diff` says how, once the new run has begun")
