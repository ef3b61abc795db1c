"""renameat2(2) with RENAME_NOREPLACE, which the standard library does not offer."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1

# The kernel (before 3.15), the file system (NFS, some of FUSE) or a filter of system calls does not know it. A filter
# may say so by EPERM; where nobody may move the file, that will be said of the other way as well.
_CANNOT = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})


def rename_new(old: str, new: str) -> bool:
    """Rename *old* to *new* in one step; FileExistsError if *new* exists. False: it cannot be done here."""
    function = _renameat2()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), _RENAME_NOREPLACE) == 0:
        return True
    error = ctypes.get_errno()
    if error in _CANNOT:
        return False
    raise OSError(error, os.strerror(error), new if error == errno.EEXIST else old)


@cache
def _renameat2() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # another C library, or an old one
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function
