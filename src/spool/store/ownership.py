"""The owner of a spool, and the users whose files count in it (FORMAT 16).

A dispatcher executes files as its own user, so it serves only that user's spools, and a file is an order only if that
user, or a user in the configuration, has written it. The owner of a file is read from its open descriptor, never by its
name, which may belong to another file a moment later.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from grp import getgrgid, getgrnam

from spool.core.errors import InvalidConfig, SpoolUnusable, cannot
from spool.core.model import SOMEONE_WHO
from spool.core.reasons import some_of
from spool.store.disk import open_directory, owner_of

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
_EVERYONE = "everyone"


@lru_cache(maxsize=256)
def name_of(uid: int) -> str:
    """Return the login name of *uid*, its number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def this_user() -> str:
    """Return the login name of the user that runs this process."""
    return name_of(os.getuid())


def check_owner(root: str) -> None:
    """Raise SpoolUnusable if there is a spool at *root* of another user: only its owner may change it."""
    uid = owner_of(root)
    if uid is not None and uid != os.geteuid():
        raise not_ours(root, uid)


def not_ours(root: str, uid: int, why: str = "") -> SpoolUnusable:
    """Return the error for a spool of another user, *uid*. *why*: more of the reason."""
    who = name_of(uid)
    user = f"'#{uid}'" if who == str(uid) else who
    reason = why or f"it belongs to {who}, and so only {who} can change it"
    return SpoolUnusable(
        cannot("use", "spool", reason, where=root, remedy=f"run it as {who}: `sudo -u {user} spool …`")
    )


def check_accepted(root: str, configuration: Callable[[], bytes]) -> None:
    """Raise SpoolUnusable unless the *configuration* of another user's spool at *root* accepts files of this user."""
    uid, me = owner_of(root), os.geteuid()
    if uid is None or uid == me:
        return
    from spool.formats import config  # imported here: a user of his own spool does not need it

    whose = f"it belongs to {name_of(uid)}"
    try:
        accepted = config.parse(configuration()).accept_from
    except (OSError, InvalidConfig) as error:
        told = error.strerror if isinstance(error, OSError) else "it is not valid"
        raise not_ours(root, uid, f"{whose}, and whom that accepts is unknown: config.toml: {told}") from None
    if not is_accepted(me, accepted):
        raise not_ours(root, uid, f"{whose}, and `accept_from` in its config.toml does not name {name_of(me)}")


def mode_for(uid: int | None, gid: int) -> int:
    """Return the least permissions with which the user *uid* can read a file of the group *gid*."""
    return 0o640 if uid is not None and gid in groups_of(uid) else 0o644


def is_accepted(uid: int, accept_from: Sequence[str]) -> bool:
    """Whether *accept_from*, a list of user names and `@group`, includes the user *uid*."""
    name = name_of(uid)
    if name in accept_from or str(uid) in accept_from:
        return True
    groups = {gid for word in accept_from if word.startswith("@") and (gid := _gid_of(word[1:])) is not None}
    return bool(groups) and not groups.isdisjoint(groups_of(uid))


def groups_of(uid: int) -> frozenset[int]:
    """Return the groups of the user *uid*; none for a number without an account."""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return frozenset()
    return frozenset((account.pw_gid, *os.getgrouplist(account.pw_name, account.pw_gid)))


def unknown_in(accept_from: Sequence[str]) -> list[str]:
    """Return a message for each user or group of *accept_from* that this machine does not know."""
    found = []
    for word in accept_from:
        if word.startswith("@"):
            if _gid_of(word[1:]) is None:
                found.append(f"accept_from: there is no group {word[1:]!r}")
        elif not word.isdecimal():
            try:
                pwd.getpwnam(word)
            except KeyError:
                found.append(f"accept_from: there is no user {word!r}")
    return found


def _gid_of(name: str) -> int | None:
    try:
        return int(name) if name.isdecimal() else getgrnam(name).gr_gid
    except KeyError:
        return None


class Ownership:
    """The users whose files count in the spool at *root*: its owner, and those in *accept_from*."""

    def __init__(self, root: str, accept_from: Callable[[], Sequence[str]]) -> None:
        self._root = root
        self._accept_from = accept_from
        self._owner: int | None = None  # not known yet; a spool with another owner is another spool

    @property
    def owner(self) -> int | None:
        """The owner of the spool, None if there is none."""
        if self._owner is None:
            self._owner = owner_of(self._root)
        return self._owner

    def why_not(self, file: os.stat_result, place: str, filename: str) -> str:
        """Return why a *file*, opened by its name in the directory *place*, is not an order; "" if it is one.

        An order is a file that only the owner of the spool, or a user in the configuration, can have written.
        """
        owner = self.owner
        if owner is None:
            return ""  # the following check reports a missing spool
        if file.st_uid == owner and file.st_nlink == 1 and not file.st_mode & _OTHERS_WRITE:
            return ""
        if file.st_uid != owner and not is_accepted(file.st_uid, self._accept_from()):
            whose, mine = name_of(file.st_uid), name_of(owner)
            remedy = f'remove it, or name "{whose}" in `accept_from` of config.toml'
            theirs = some_of([mine, *self._accept_from()])
            return f"it belongs to {whose}, and this spool runs files of {theirs} only; {remedy}"
        where = _Place(self._root, place, filename)
        others = _other_writers(file, file.st_uid) if where.is_open else ""
        if others == _EVERYONE:
            return f"{others} can write to it, so its author is unknown; `chmod go-w` it"
        group = f"@{_group(file.st_gid)}"
        if others and group not in self._accept_from():
            remedy = f'`chmod g-w` it, or name "{group}" in `accept_from` of config.toml'
            return f"{others} can write to it, so its author is unknown; {remedy}"
        if file.st_nlink > 1 and (where.others_write or where.inode != file.st_ino):
            return f"it has a second name elsewhere, and others can write to {place}/; put a copy there"
        return ""


def why_not_obeyed(root: str, status: os.stat_result) -> str:
    """Return why the configuration or a hook does not count, given its descriptor's *status*; "" if it does.

    Only the owner of the spool and root may configure a dispatcher and its hooks, as with `StrictModes` of sshd.
    """
    owner = owner_of(root)
    if owner is None:
        return ""
    if status.st_uid not in (owner, 0):
        return f"it belongs to {name_of(status.st_uid)}"
    others = _other_writers(status, owner) if status.st_mode & _OTHERS_WRITE and _is_open(root) else ""
    return others and f"{others} can write to it"


def others_write(root: str, place: str = "") -> bool:
    """Whether users other than root and the owner of the spool at *root* can put files into its directory *place*."""
    return _Place(root, place, "").others_write


def why_replaceable(root: str) -> str:
    """Return which directory above the spool lets other users replace the spool, and how; "" if none does."""
    owner, path = owner_of(root), os.path.dirname(os.path.realpath(root))
    while owner is not None:
        status = os.stat(path)
        if status.st_uid not in (owner, 0):
            return f"{path} belongs to {name_of(status.st_uid)}, who can replace your spool by another one"
        if not status.st_mode & stat.S_ISVTX and _other_writers(status, owner):
            return f"others can write to {path}, and so can replace your spool by another one"
        if path == "/":
            break
        path = os.path.dirname(path)
    return ""


def mover(root: str, place: str) -> str:
    """Return the possible mover of a file in *place*: the owner of the spool, if no other user could."""
    owner = owner_of(root)
    return f"{SOMEONE_WHO}{place}/" if owner is None or others_write(root, place) else name_of(owner)


def cancelled_by_mover(root: str, place: str) -> str:
    """Return why a job ended whose file was moved from *place* to `done/` before it started."""
    return f"cancelled by {mover(root, place)} before it started"


def is_private(gid: int, uid: int) -> bool:
    """Whether the group *gid* is private: it has the name of the user *uid*, and no other member."""
    try:
        group = getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name_of(uid) and {*group.gr_mem} <= {group.gr_name}


def _group(gid: int) -> str:
    try:
        return getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _is_open(root: str) -> bool:
    """Whether other users can enter the directory of the spool."""
    return bool(os.stat(root).st_mode & _OTHERS_ENTER)


class _Place:
    """A directory of a spool as seen by one look at its descriptor, and the file with a given name there."""

    __slots__ = ("inode", "is_open", "others_write")

    def __init__(self, root: str, place: str, filename: str) -> None:
        self.inode: int | None = None
        self.is_open = self.others_write = True  # assumed if it cannot be read
        with suppress(OSError):
            fd = open_directory(f"{root}/{place}" if place else root)
            try:
                here = os.fstat(fd)
                above = os.stat("..", dir_fd=fd) if place else here
                owner = os.stat(root).st_uid
                if filename:
                    self.inode = os.stat(filename, dir_fd=fd, follow_symlinks=False).st_ino
            finally:
                os.close(fd)
            entered = bool(above.st_mode & _OTHERS_ENTER)
            self.is_open = entered and bool(here.st_mode & _OTHERS_ENTER)
            foreign = here.st_uid != owner or above.st_uid != owner
            self.others_write = foreign or (entered and any(_other_writers(each, owner) for each in (here, above)))


def _other_writers(status: os.stat_result, owner: int) -> str:
    """Return which others than its *owner* can write to a file or a directory, "" if none can."""
    if status.st_mode & stat.S_IWOTH:
        return _EVERYONE
    is_shared = status.st_mode & stat.S_IWGRP and not is_private(status.st_gid, owner)
    return f"its group {_group(status.st_gid)}" if is_shared else ""
