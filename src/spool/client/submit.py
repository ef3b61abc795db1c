"""Creating a spool and putting job files into it: everything that a submission needs, and no other imports.

A submission takes a few hundredths of a second, and imports would take most of that.
"""

from __future__ import annotations

import errno
import os

from spool.core import layout
from spool.core.layout import HELD, QUEUED, RUNNING, Layout
from spool.store.disk import Disk, owner_of, remedy_for

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterable

README_TEXT = """\
This directory is a spool: the whole interface of the job scheduler `spool`.
A job is a TOML file, and its directory is its state.

    queued/NAME.toml        waiting. Drop, edit and delete files here at will.
    held/NAME.toml          held. `mv` a file here to hold it, and back to queued/ to release it.
    running/NAME.toml       running. Delete it to cancel the job; move it to queued/ to stop and restart it.
    done/NAME.toml          ended, with any outcome. Move it to queued/ to run it again.
    jobs/NAME/RUN/          one run of a job: its output is `log`, its outcome `result.toml`.
    reservations/NAME.toml  GPU reservations.
    calls/NAME              the Python function that a job calls.
    config.toml             limits and preferences; read again when it changes.
    paused                  while this file exists, no job starts.
    history.jsonl           one line for each ended run.
    state.json              what the dispatcher last saw, and why each job waits; never read back.

The smallest job, and the program that runs it (keep it running, or let cron start it with --once):

    echo 'command = "echo hello"' > .tmp/hello && mv .tmp/hello queued/hello.toml
    spool dispatch

Write into .tmp/ first and `mv` from there, so that a file appears complete. An invalid file stays where it is, and
NAME.toml.error beside it says what is wrong. `spool --help` lists the commands.
"""


def default_root() -> str:
    """Return the default spool: `$SPOOL_DIR`, or `~/.spool`."""
    return root_at(os.environ.get("SPOOL_DIR") or "~/.spool")


def root_at(path: str) -> str:
    """Return *path* as the absolute path of a spool. Raises SpoolUnusable where the current directory was removed.

    A `~` expands: neither a shell, in `--spool=~/other`, nor a crontab does that.
    """
    try:
        return os.path.abspath(os.path.expanduser(path))
    except FileNotFoundError:
        from spool.core.errors import SpoolUnusable, cannot

        why = "the current directory no longer exists"
        raise SpoolUnusable(cannot("use", f"the spool {path}", why, remedy="give an absolute path")) from None


def literal(path: str) -> str:
    """Return *path* as a job file must spell it to mean exactly that, with any dollar signs escaped (FORMAT 3.5)."""
    return path.replace("$", "$$")


def is_spool(root: str) -> bool:
    """Whether there is a spool at *root*."""
    return os.path.isdir(f"{root}/{QUEUED}")


def was_spool(root: str) -> bool:
    """Whether there is a spool at *root*, even a damaged one."""
    return os.path.lexists(f"{root}/{QUEUED}") or os.path.lexists(f"{root}/{layout.LOCK}")


def is_ours(root: str) -> bool:
    """Whether the spool at *root* is this user's; true if there is none yet."""
    return owner_of(root) in (None, os.geteuid())


def make_spool(root: str) -> bool:
    """Create the missing parts of the spool at *root*, mode 0700; return whether there was no spool.

    Raises OSError with the failing `filename`, and SpoolUnusable. Existing parts stay unchanged. The new names are on
    the disk when this returns. A directory with other files and no part of a spool is refused: a spool's directories
    would get lost among them.
    """
    made = not was_spool(root)
    if not is_ours(root):
        from spool.store.ownership import check_owner

        check_owner(root)
    place = Layout(os.path.realpath(root))
    if made and _is_of_others(place.root):
        from spool.core.errors import SpoolUnusable, cannot

        why, remedy = "the directory has other files in it", "name an empty or a new directory"
        raise SpoolUnusable(cannot("make", "a spool", why, where=root, remedy=remedy))
    os.makedirs(os.path.dirname(place.root), exist_ok=True)
    disk = Disk(place.at(layout.STAGING))
    changed = disk.ensure_directory(place.root)
    for name in layout.DIRECTORIES:
        changed = disk.ensure_directory(place.at(name)) or changed
        if not os.path.isdir(place.at(name)):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place.at(name))
    if not os.path.lexists(place.at(layout.README)):
        disk.put(place.at(layout.README), README_TEXT.encode())
        changed = True
    if changed:
        disk.sync_directories((place.root, os.path.dirname(place.root)))
    return made


def _is_of_others(path: str) -> bool:
    """Whether the directory *path* has files, none of which is a spool's."""
    try:
        found = {*os.listdir(path)} - {"lost+found"}
    except (FileNotFoundError, NotADirectoryError):
        return False
    return bool(found) and found.isdisjoint((*layout.DIRECTORIES, layout.CONFIG, layout.STATE, layout.HISTORY))


def ensure_spool(root: str) -> bool:
    """Do `make_spool` for a command. Raises SpoolUnusable."""
    try:
        return make_spool(root)
    except OSError as error:
        from spool.core.errors import SpoolUnusable, cannot

        at = error.filename or root
        why = error.strerror or str(error)
        raise SpoolUnusable(cannot("make", "a spool", why, where=at, remedy=remedy_for(error))) from None


def where_taken(root: str, name: str) -> str | None:
    """Return the state directory that has a waiting, held or running job *name*, None if the name is free."""
    place = Layout(root)
    return next((at for at in (QUEUED, HELD, RUNNING) if os.path.lexists(place.job_file(at, name))), None)


def ever_used(root: str, name: str) -> bool:
    """Whether a job of that name has a file or a run in the spool."""
    place = Layout(root)
    files = (place.job_file(at, name) for at in layout.PLACES)
    return os.path.lexists(place.runs(name)) or any(map(os.path.lexists, files))


def submit(root: str, jobs: Iterable[tuple[str, bytes]], *, held: bool = False, replace: bool = False) -> None:
    """Put each (name, text) of *jobs* into `queued/`, or `held/`: complete, and on disk when this returns.

    Raises FileExistsError, with the conflicting `filename`, if a job of that name waits or is held; *replace* replaces
    that one. A running or ended job does not conflict here; `where_taken` reports a running one. Jobs put before the
    error stay.

    `cp job.toml .tmp/ && mv .tmp/job.toml queued/` does the same, without the sync.

    For the spool of another user, raises SpoolUnusable unless that user accepts and can read the jobs.
    """
    place = Layout(root)
    into, other = (HELD, QUEUED) if held else (QUEUED, HELD)
    ours = is_ours(root)
    if not ours:
        check_submitter(root)
    # Staged under a hidden name in their final directory: the others are writable for the owner alone.
    disk = Disk(place.at(layout.STAGING)) if ours else Disk(place.at(into), hidden=True)
    touched = set()
    try:
        for name, text in jobs:
            path, beside = place.job_file(into, name), place.job_file(other, name)
            taken = next(filter(os.path.lexists, (beside, path)), None)
            if taken is not None and not (
                replace and (ours or (taken == path and os.lstat(path).st_uid == os.geteuid()))
            ):
                raise FileExistsError(errno.EEXIST, "a job of that name exists", taken)
            staged = disk.staged(text, durable=True)
            try:
                if not ours:
                    _let_owner_read(disk, staged, name, place)
                if replace:
                    disk.rename(staged, path)
                elif ours:
                    disk.link(staged, path)
                else:
                    disk.move(staged, path)
            except FileExistsError as error:
                error.filename = path
                raise
            finally:
                disk.discard(staged)
            touched.add(into)
            if replace and ours and disk.discard(beside):
                touched.add(other)
    finally:
        try:
            # One sync for all of them: syncs make a submission slow.
            disk.sync_directories(place.at(at) for at in touched)
        except PermissionError:  # write permission for another user's directory need not include listing it
            if ours:
                raise


def check_submitter(root: str) -> None:
    """Raise SpoolUnusable if the spool at *root* is another user's who does not accept job files of this one."""
    if is_ours(root):
        return
    from spool.store.glance import read_config
    from spool.store.ownership import check_accepted

    check_accepted(root, lambda: read_config(root) or b"")


def _let_owner_read(disk: Disk, staged: str, name: str, place: Layout) -> None:
    """Let the owner of a spool, and few others, read the file of a job. Raises SpoolUnusable if that is impossible."""
    from spool.core.errors import SpoolUnusable, cannot
    from spool.store.ownership import mode_for, name_of

    owner = owner_of(place.root)
    mode = mode_for(owner, os.lstat(staged).st_gid)
    disk.chmod(staged, mode)
    if os.lstat(staged).st_mode & 0o777 != mode:
        why, remedy = f"{name_of(owner or 0)} could not read its file", "the file system keeps no permissions"
        raise SpoolUnusable(cannot("submit", f"job {name}", why, where=disk.staging, remedy=remedy))
