"""The one module that writes to the disk.

Every change of a spool is one of the primitives of :class:`Disk`, and each primitive either happened or did not; so a
test can interrupt the program before each of them in turn. The composite operations below keep one promise: an
interruption leaves the old text or the new, never half of one.
"""

from __future__ import annotations

import errno
import os
import stat
import time

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_OPEN_TRIES = 2


_REMEDIES = {
    errno.EACCES: "give yourself access to it with chmod(1) or chown(1)",
    errno.EPERM: "give yourself access to it with chmod(1) or chown(1)",
    errno.EROFS: "mount the file system for writing",
    errno.EIO: "check the disk; `dmesg` says more",
    errno.ESTALE: "mount the network file system again",
    errno.ENOSPC: "free up space on the disk",
    errno.EDQUOT: "free up space in your quota",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
    errno.ENFILE: "close files of other programs",
    errno.ENOMEM: "free memory",
    errno.EAGAIN: "end processes, or raise their limit (`ulimit -u`)",
    errno.ENAMETOOLONG: "use a shorter path for the spool",
    errno.ENOENT: "restore what was removed",
}
_IN_THE_WAY = "move what is in the way somewhere else"
_KINDS = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOTEMPTY, errno.ENXIO, errno.ESPIPE)

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
# Not supported by the kernel (before 3.15), the file system (NFS, some FUSE ones) or a system call filter. A filter may
# return EPERM; if the file really must not be moved, the other method fails with that as well.
_CANNOT = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})


class SpoolTrouble(OSError):  # noqa: N818  (like the errors of core/errors.py)
    """An error with a file that belongs to the spool as a whole: its journal, its history, its events."""


class Disk:
    """The primitives, and operations composed of them. *staging* is a directory of the same file system."""

    def __init__(self, staging: str, *, hidden: bool = False) -> None:
        """With *hidden*, staged files have names that begin with a dot, which spool ignores in any directory."""
        self.staging = staging
        self._dot = "." if hidden else ""
        self._serial = 0
        self._pid = os.getpid()

    # Primitives: a crash can fall before or after each of them.

    def create(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Create the file *path* with *data*; FileExistsError if there is one. A crash may leave it short."""
        fd = os.open(path, _CREATE, mode)
        try:
            _write_all(fd, data)
        except OSError:  # no room for the text; an empty file would have another meaning
            _forget(path)
            raise
        finally:
            os.close(fd)

    def fill(self, path: str, data: bytes) -> None:
        """Write *data* into the file *path*, which is empty. A crash may leave it short."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            _write_all(fd, data)
        finally:
            os.close(fd)

    def append(self, fd: int, data: bytes) -> None:
        """Append *data* to an open log: all of it, or nothing if the disk is full.

        A crash may leave a last line that is short.
        """
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except OSError:
                os.ftruncate(fd, os.fstat(fd).st_size - (len(data) - len(view)))
                raise

    def overwrite(self, path: str, data: bytes) -> None:
        """Overwrite the file *path* with *data* within its blocks, which needs no space. A crash may mix the two."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            _write_all(fd, data)
            os.ftruncate(fd, len(data))
        finally:
            os.close(fd)

    def rename(self, old: str, new: str, old_at: int | None = None, new_at: int | None = None) -> None:
        """Rename *old* to *new*, replacing a file of that name; each is relative to the directory in its `_at`."""
        os.rename(old, new, src_dir_fd=old_at, dst_dir_fd=new_at)

    def rename_new(self, old: str, new: str) -> bool:
        """Rename *old* to *new* in one step; FileExistsError if *new* exists. False: the file system cannot."""
        return renameat2(old, new, _RENAME_NOREPLACE)

    def exchange(self, one: str, other: str) -> bool:
        """Swap the names of two files in one step; FileNotFoundError if one is gone. False: the file system cannot."""
        return renameat2(one, other, _RENAME_EXCHANGE)

    def link(self, old: str, new: str) -> None:
        """Give *old* a second name; FileExistsError if *new* exists."""
        os.link(old, new, follow_symlinks=False)

    def unlink(self, path: str, at: int | None = None) -> None:
        """Remove the name *path*, relative to the directory *at*; FileNotFoundError if it is gone already."""
        os.unlink(path, dir_fd=at)

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        """Create a directory; FileExistsError if there is one."""
        os.mkdir(path, mode)

    def rmdir(self, path: str, at: int | None = None) -> None:
        """Remove an empty directory, relative to the directory *at*."""
        os.rmdir(path, dir_fd=at)

    def chmod(self, path: str, mode: int) -> None:
        """Set the permissions of *path*, whatever the umask."""
        os.chmod(path, mode)

    def sync_file(self, path: str) -> None:
        """Wait until the file's content is on the disk."""
        _sync(path, os.O_RDONLY)

    def sync_directory(self, path: str) -> None:
        """Wait until the names in the directory *path* are on the disk."""
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def sync_log(self, fd: int) -> None:
        """Wait until everything appended to an open log is on the disk."""
        os.fdatasync(fd)

    # Composites.

    def staged(self, data: bytes, *, durable: bool = False, mode: int = 0o600) -> str:
        """Write *data* to a new file in the staging directory and return its path."""
        while True:
            path = self._fresh()
            try:
                self.create(path, data)
            except FileExistsError:  # left behind by an earlier process of this pid
                continue
            except FileNotFoundError:
                if not self.ensure_staging():
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.staging) from None
                continue
            except NotADirectoryError:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.staging) from None
            except OSError:
                _forget(path)
                raise
            if mode != 0o600:
                self.chmod(path, mode)
            if durable:
                try:
                    self.sync_file(path)
                except OSError:
                    _forget(path)
                    raise
            return path

    def put(self, path: str, data: bytes, *, durable: bool = False, mode: int = 0o600) -> None:
        """Replace the content of *path* by *data* atomically."""
        staged = self.staged(data, durable=durable, mode=mode)
        try:
            self.rename(staged, path)
        except OSError:
            _forget(staged)
            raise
        if durable:
            self.sync_directory(os.path.dirname(path))

    def put_beside(self, path: str, data: bytes, mode: int) -> None:
        """Like `put`, for a file outside of the spool with a single writer: staged beside it, readable by *mode*."""
        directory, name = os.path.split(path)
        staged = f"{directory}/.{name}.new"
        self.discard(staged)
        self.create(staged, data, mode)
        try:
            os.chmod(staged, mode)  # whatever the umask
            self.rename(staged, path)
        except OSError:
            _forget(staged)
            raise

    def publish(self, path: str, data: bytes, *, durable: bool = False) -> None:
        """Create *path* atomically; FileExistsError, and nothing changed, if it exists."""
        staged = self.staged(data, durable=durable)
        try:
            self.link(staged, path)
        finally:
            self.unlink(staged)
        if durable:
            self.sync_directory(os.path.dirname(path))

    def move(self, old: str, new: str) -> None:
        """Move a file without replacing one; FileExistsError if *new* exists, FileNotFoundError if *old* is gone.

        If the file system cannot do that in one step, it is a link and an unlink. If interrupted between the two, the
        file has both names, and the next dispatcher recognises it by its inode.
        """
        if self.rename_new(old, new):
            return
        try:
            self.link(old, new)
        except PermissionError:
            # The kernel does not let a user link another user's file that he may not write (fs.protected_hardlinks).
            if os.path.lexists(new):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new) from None
            self.rename(old, new)
            return
        self.drop(old, new)

    def drop(self, path: str, other: str) -> bool:
        """Remove the name *path* if it is a second name of the file *other*; return whether it was.

        A file that replaces it meanwhile stays: what is moved aside is checked before its removal.
        """
        aside = self._fresh()
        try:
            found, kept = os.lstat(path), os.lstat(other)
            if not os.path.samestat(found, kept):
                return False
            self.rename(path, aside)
        except FileNotFoundError:
            return False
        if os.path.samestat(os.lstat(aside), kept):
            return self.discard(aside)
        try:
            self.move(aside, path)
        except FileExistsError:  # and another process has put a third file there
            self.rename(aside, f"{path}.{time.time_ns()}")
        return False

    def discard(self, path: str, at: int | None = None) -> bool:
        """Remove a name if it exists; return whether it did."""
        try:
            self.unlink(path, at)
        except FileNotFoundError:
            return False
        return True

    def ensure_directory(self, path: str) -> bool:
        """Create a directory unless it exists; return whether it was created."""
        try:
            self.mkdir(path)
        except FileExistsError:
            return False
        return True

    def ensure_twin(self, path: str, of: str) -> None:
        """Create the directory *path*, unless it exists, with the permissions of the directory *of*."""
        if self.ensure_directory(path):
            os.chmod(path, stat.S_IMODE(os.stat(of).st_mode))  # whatever the umask

    def ensure_staging(self) -> bool:
        """Create the staging directory if it is missing (FORMAT 1.8); return whether there is one now."""
        if not os.path.isdir(self.staging):
            self.ensure_directory(self.staging)
        return os.path.isdir(self.staging)

    def remove_tree(self, path: str, at: int | None = None) -> None:
        """Remove *path*, if it exists, with its whole content; links are removed, never followed.

        If something cannot be removed, it stays, the rest goes all the same, and the first error is raised.
        """
        first: OSError | None = None
        for error in self.removing(path, at):
            first = first or error
        if first is not None:
            raise first

    def removing(self, path: str, at: int | None = None) -> Iterator[OSError | None]:
        """Remove *path* as `remove_tree` does, one change a step: yield None, or the error that keeps a file.

        It may be stopped between two steps. Each name is removed relative to its open parent directory, so nothing
        outside is removed, even if a directory is swapped for a link meanwhile.
        """
        found = walk(path, at)
        stays = 0  # the depth of an entry that could not be removed, and keeps its parents
        while True:
            try:
                one = next(found, None)
            except OSError as error:  # the walk cannot continue from here
                yield error
                return
            if one is None:
                return
            if one.is_directory and stays == one.depth + 1:
                stays = one.depth
                continue
            told: OSError | None = None
            try:
                (self.rmdir if one.is_directory else self.unlink)(one.name, one.at)
            except FileNotFoundError:
                pass
            except OSError as failed:
                why = one.error or failed
                stays = one.depth
                told = OSError(why.errno, why.strerror, one.path)
            yield told

    def sync_directories(self, paths: Iterable[str]) -> None:
        """Sync each of *paths*; missing ones are skipped."""
        for path in paths:
            try:
                self.sync_directory(path)
            except FileNotFoundError:
                continue

    def _fresh(self) -> str:
        self._serial += 1
        return f"{self.staging}/{self._dot}{self._pid}.{self._serial}"


class TreeEntry:
    """An entry that `walk` yields. Valid until the next one."""

    __slots__ = ("_levels", "at", "depth", "error", "is_directory", "name")

    def __init__(self, name: str, at: int, levels: list[_Level], error: OSError | None, *, is_directory: bool) -> None:
        self.name = name
        self.at = at  # its parent directory, open
        self.depth = len(levels)  # 1 for the root of the walk
        self.is_directory = is_directory
        self.error = error  # why this directory cannot be read
        self._levels = levels

    @property
    def path(self) -> str:
        """Its path, for messages."""
        return "/".join([*(level.name for level in self._levels[: self.depth]), self.name])


class _Level:
    """A directory on the way down from the parent of the walk's root."""

    __slots__ = ("below", "identity", "name")

    def __init__(self, name: str, identity: tuple[int, int], below: list[tuple[str, bool]]) -> None:
        self.name = name
        self.identity = identity
        self.below = below  # names still to visit, and whether each may be a directory


def walk(path: str, at: int | None = None) -> Iterator[TreeEntry]:
    """Yield *path*, relative to the directory *at*, and everything in it; a directory comes after its content.

    No swap of files leads out of it: links are not followed, other file systems not entered, and the way up must lead
    where the way down came from, or OSError. At most two descriptors are open, at any depth.
    """
    folder, name = os.path.split(path)
    try:
        here = open_directory(folder or ".", at)
    except FileNotFoundError:
        return
    try:
        levels = [_Level(folder, _identity(here), [(name, True)])]
        while True:
            level = levels[-1]
            if not level.below:
                levels.pop()
                if not levels:
                    return
                below, here = here, os.open("..", _DIRECTORY, dir_fd=here)
                os.close(below)
                found = TreeEntry(level.name, here, levels, None, is_directory=True)
                if _identity(here) != levels[-1].identity:
                    raise OSError(errno.ESTALE, "someone has moved it in the meantime", found.path)
                yield found
                continue
            name, enter = level.below.pop()
            error = None
            if enter:
                try:
                    fd, names = _looked_into(name, here, level.identity[0])
                except OSError as failed:
                    # A link or a file may have replaced it: then that is the entry.
                    enter = failed.errno not in (errno.ENOTDIR, errno.ELOOP)
                    error = failed if enter else None
                else:
                    os.close(here)
                    here = fd
                    levels.append(_Level(name, _identity(here), names))
                    continue
            yield TreeEntry(name, here, levels, error, is_directory=enter)
    finally:
        os.close(here)


def _looked_into(name: str, at: int, device: int) -> tuple[int, list[tuple[str, bool]]]:
    """Open a directory and list it. Raises OSError if it is on another file system, or has no way up."""
    fd = open_directory(name, at)
    try:
        if os.fstat(fd).st_dev != device:
            raise OSError(errno.EXDEV, "another file system is mounted there")
        os.stat("..", dir_fd=fd)
        with os.scandir(fd) as entries:
            return fd, [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except BaseException:
        os.close(fd)
        raise


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def open_directory(path: str, at: int | None = None) -> int:
    """Open a directory, relative to *at*, and return the descriptor; OSError for a link to one."""
    return os.open(path, _DIRECTORY, dir_fd=at)


class of_the_spool:  # noqa: N801  (used like a function, as in `contextlib`, which takes long to import)
    """Raise every OSError of the block as a SpoolTrouble with *path*."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End the block."""
        if isinstance(error, OSError) and not isinstance(error, SpoolTrouble):
            raise SpoolTrouble(error.errno, error.strerror or str(error), self._path) from error


def status_of(path: str) -> os.stat_result | None:
    """Return the status of *path* itself, None if it does not exist. Raises OSError if that is unknown."""
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def owner_of(path: str) -> int | None:
    """Return the owner of the directory that *path* leads to, None if there is none."""
    try:
        return os.stat(path).st_uid
    except (FileNotFoundError, NotADirectoryError):
        return None


def open_if_there(path: str, opener: Callable[[str], int]) -> int | None:
    """Return *opener* of *path*, None if it does not exist.

    A file created after it was found missing is opened, too. Raises FileNotFoundError for a link that leads nowhere,
    and OSError for an existing file that cannot be opened.
    """
    for _ in range(_OPEN_TRIES):
        try:
            return opener(path)
        except FileNotFoundError:
            status = status_of(path)
            if status is None:
                return None
            if stat.S_ISLNK(status.st_mode):
                raise
    raise OSError(errno.ESTALE, "it exists but cannot be opened", path)


def read_file(
    path: str, limit: int = 1 << 24, check: Callable[[os.stat_result], str] = lambda status: ""
) -> bytes | None:
    """Return the content of a file, None if it does not exist. Never blocks.

    Raises OSError if it cannot be read, is not a regular file, or if *check*, given its status, returns why it must not
    count. A link is followed.
    """
    fd = open_if_there(path, lambda path: os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if fd is None:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EEXIST, "it is not a regular file")
        if why := check(status):
            raise PermissionError(errno.EPERM, why)
        parts = []
        at_once = min(max(status.st_size + 1, 4096), 1 << 26)  # in one read, which avoids a copy
        while limit > 0 and (part := os.read(fd, min(limit, at_once))):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(fd)


def is_yet_to_be_made(root: str) -> bool:
    """Whether there is nothing at *root*, or an empty directory, so that the first submission makes a spool there."""
    try:
        return not os.listdir(root)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def remedy_for(error: OSError) -> str:
    """Return what the user can do about an error of the file system."""
    return _REMEDIES.get(error.errno or 0, _IN_THE_WAY if error.errno in _KINDS else "check that file")


def same_file(one: str, other: str) -> bool:
    """Whether two names belong to one file. Raises OSError if that is unknown."""
    status = status_of(one)
    return status is not None and is_name_of(status, other)


def is_name_of(status: os.stat_result, path: str) -> bool:
    """Whether *path* is a name of the file with *status*. Raises OSError if that is unknown."""
    found = status_of(path)
    return found is not None and os.path.samestat(status, found)


def open_log(path: str) -> int:
    """Open a log of the spool, to append to it, and return the descriptor. Raises SpoolTrouble."""
    with of_the_spool(path):
        fd = os.open(path, _APPEND | os.O_NONBLOCK, 0o600)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise SpoolTrouble(errno.EEXIST, "it is not a regular file", path)


def disk_is_full(error: OSError) -> bool:
    """Whether *error* means that the disk or a quota is full."""
    from spool.core.errors import NO_ROOM  # imported here, because `spool submit` starts faster without it

    return error.errno in NO_ROOM


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync(path: str, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(fd)


def _forget(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def renameat2(old: str, new: str, flags: int) -> bool:
    """Give a file another name, as the system call does; False if that cannot be done here."""
    function = _renameat2()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) == 0:
        return True
    import ctypes

    error = ctypes.get_errno()
    if error in _CANNOT:
        return False
    of_new = flags == _RENAME_EXCHANGE or error == errno.EEXIST
    raise OSError(error, os.strerror(error), new if of_new else old)


_renameat2s: list[Callable[[int, bytes, int, bytes, int], int] | None] = []  # functools would slow each submission


def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    """Return renameat2(2), which the standard library lacks; None if the C library lacks it, too."""
    if not _renameat2s:
        import ctypes  # imported here: a submission renames nothing

        try:
            function = ctypes.CDLL(None, use_errno=True).renameat2
            function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
            function.restype = ctypes.c_int
        except (OSError, AttributeError):  # another C library, or an old one
            function = None
        _renameat2s.append(function)
    return _renameat2s[0]
