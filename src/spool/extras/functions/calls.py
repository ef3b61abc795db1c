"""The two files of a call of a Python function: what is called, and what came back (FORMAT 18); and what its job runs.

Each has a line of JSON and then pickles. Loading a pickle can run any program, so a file is read only if this user
alone can have written it: the spool, its directories down to the file and the file itself are this user's, none is a
link, and no other user can write to them. Each is complete before it has its name.

The job of a call is `python -m spool.extras.functions.calls NAME`. Each call waits for the imports of this module.
"""

from __future__ import annotations

import json
import os
import pickle
import stat
import sys
import time
from contextlib import suppress

from spool.core.errors import InvalidRecord, SpoolError, SpoolUnusable, cannot
from spool.core.layout import CALL, CALLS, FUNCTION, JOBS, RETURN, Layout
from spool.store.disk import Disk, SpoolTrouble, disk_is_full

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, BinaryIO

VERSION = 1
_MOST_HEADER = 64 << 20
_MOST_INSIDE = 1 << 20  # bytes of a function; a longer one is a file that several calls share
_IN_CALL = {"python": list, "path": list, "list": bool, "sizes": list}  # what each header has
_IN_RETURN = {"error": (dict, type(None)), "size": int}
_LIBRARY = os.path.dirname(os.__file__)
_PAUSE_S = 1.0  # between attempts to write on a full disk: the wrapper's (FORMAT 12.3)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


# The call.


def render(function: Callable[..., Any], parts: Sequence[Any], *, is_list: bool = False) -> tuple[bytes, bytes]:
    """Return the file of a call, and that of its function, empty if the first has it.

    *parts* has the (args, kwargs) of each task, or with *is_list* a list of those. Raises SpoolError naming what cannot
    be pickled.
    """
    dumps = _pickler(function)
    body = [_dumped(dumps, function, "the function", function)]
    body += [_dumped(dumps, part, "the arguments", function) for part in parts]
    header = {
        "version": VERSION,
        "function": name_of(function),
        "python": list(sys.version_info[:3]),
        "path": [os.path.abspath(entry) for entry in sys.path],
        "own": _own_for_standard(),
        "list": is_list,
        "apart": len(body[0]) > _MOST_INSIDE,
        "sizes": [len(part) for part in body],
    }
    apart = body.pop(0) if header["apart"] else b""
    return b"".join((json.dumps(header).encode(), b"\n", *body)), apart


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages, of what it wraps for `functools.partial`."""
    while hasattr(function, "func"):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def publish(root: str, name: str, text: bytes, function: bytes = b"", like: str = "") -> str:
    """Put the file of a call into `calls/`, and return its path. Raises FileExistsError if the name has one.

    *function* is beside it unless it is empty; the function of the call with the path *like* is the same one.
    """
    directory = Layout(root).at(CALLS)
    path, disk = f"{directory}/{name}", Disk(directory, hidden=True)  # which makes the directory
    disk.publish(path, text)
    if function:
        try:
            if like:
                with suppress(OSError):  # that call is gone
                    disk.link(f"{like}{FUNCTION}", f"{path}{FUNCTION}")
                    return path
            disk.publish(f"{path}{FUNCTION}", function)
        except BaseException:
            disk.discard(path)
            raise
    return path


def check_spool(root: str) -> None:
    """Raise SpoolUnusable if nothing that a call returns could be loaded, because others can write there."""
    for parts in ((), (CALLS,), (JOBS,)):
        with suppress(FileNotFoundError):
            os.close(_open_own(root, parts, "use", "the spool", stat.S_ISDIR))


def load(root: str, name: str, index: int) -> Callable[[], Any]:
    """Return the call of a job, or of the task number *index* of an array.

    A task that makes several calls returns a list. Raises SpoolError: there is none, it is not this user's, another
    version of Python wrote it. What its pickles raise goes through.
    """
    try:
        header, file = _opened(root, (CALLS, name), "run", "the call", _IN_CALL)
    except FileNotFoundError:
        why = "it is not there; it goes with its job (`spool gc`), or was removed"
        raise SpoolError(cannot("run", "the call", why, where=f"{root}/{CALLS}/{name}")) from None
    with file:
        wrote = tuple(header["python"])
        if wrote[:2] != sys.version_info[:2]:
            here = ".".join(map(str, sys.version_info[:3]))
            why = f"the worker is Python {here}, and the call is of Python {'.'.join(map(str, wrote))}"
            raise SpoolError(cannot("run", "the call", why, remedy="submit it again with this Python"))
        _take_path(header["path"], header.get("own", ()))
        sizes = header["sizes"]
        if not 0 <= index < len(sizes) - 1:
            raise SpoolError(cannot("run", "the call", f"it has {len(sizes) - 1} tasks, and no number {index}"))
        if header.get("apart"):
            with os.fdopen(_open_own(root, (CALLS, f"{name}{FUNCTION}"), "run", "the call"), "rb") as apart:
                data = apart.read()
        else:
            data = file.read(sizes[0])
        function = pickle.loads(_exactly(data, sizes[0]))  # noqa: S301  (this user's own: _open_own)
        file.seek(sum(sizes[1 : index + 1]), os.SEEK_CUR)
        part = pickle.loads(_exactly(file.read(sizes[index + 1]), sizes[index + 1]))  # noqa: S301

    def call() -> Any:
        done = [function(*args, **kwargs) for args, kwargs in (part if header["list"] else [part])]
        return done if header["list"] else done[0]

    return call


def is_list(root: str, name: str) -> bool:
    """Whether each task of an array makes several calls. Raises SpoolError as `load` does."""
    header, file = _opened(root, (CALLS, name), "read", "the call", _IN_CALL)
    file.close()
    return bool(header["list"])


# The return.


def leave_value(metadir: str, value: Any) -> None:
    """Leave what a call has returned in its metadir. Raises SpoolError if it cannot be pickled, and OSError.

    Computing it may have taken days: on a full disk it waits until there is room.
    """
    try:
        payload = _pickled(value)
    except Exception as error:
        raise SpoolError(
            cannot("return", f"a {type(value).__name__}", f"it cannot be pickled: {_told(error)}")
        ) from error
    _leave(metadir, payload, None)


def leave_error(metadir: str, error: BaseException, trace: str) -> None:
    """Leave what a call has raised; only its text, if it does not survive pickling. Raises OSError."""
    kind = type(error)
    said = {"type": f"{kind.__module__}.{kind.__qualname__}", "text": str(error), "traceback": trace}
    try:
        payload = _pickled(error)
        pickle.loads(payload)  # noqa: S301  (the pickle of a moment ago: many an exception cannot be made again)
    except Exception:
        payload = b""
    _leave(metadir, payload, said)


def _leave(metadir: str, payload: bytes, error: dict[str, str] | None) -> None:
    header = {"version": VERSION, "error": error, "size": len(payload)}
    data = json.dumps(header).encode() + b"\n" + payload
    disk, is_said = Disk(metadir, hidden=True), False
    while True:
        try:
            return disk.put(f"{metadir}/{RETURN}", data)
        except OSError as full:
            if not disk_is_full(full):
                raise
            if not is_said:
                print(f"spool: the disk is full: {metadir}/{RETURN} waits for room", file=sys.stderr, flush=True)
            is_said = True
        time.sleep(_PAUSE_S)


def read_return(root: str, name: str, run: int) -> tuple[bytes, dict[str, str] | None] | None:
    """Return what a run of a call has left, None if there is nothing.

    It is a value or an exception, still as a pickle; and the exception in words, its type and its traceback, None for
    a value. Raises SpoolUnusable if another user could have written it, and InvalidRecord if it is damaged.
    """
    parts = (JOBS, name, str(run), RETURN)
    try:
        header, file = _opened(root, parts, "use", "what the call returned", _IN_RETURN)
    except FileNotFoundError:
        return None
    with file:
        return _exactly(file.read(), header["size"]), header["error"]


# Pickles.


def _pickled(thing: object) -> bytes:
    """Return the pickle of what a call leaves. cloudpickle, whose import takes long, is for what needs it."""
    try:
        return pickle.dumps(thing)
    except Exception:
        return _pickler()(thing)


def _pickler(function: Callable[..., Any] | None = None) -> Callable[[object], bytes]:
    """Return cloudpickle's `dumps`, or that of the language's own library if it suffices."""
    try:
        import cloudpickle
    except ImportError:
        if function is not None and (getattr(function, "__module__", None) == "__main__" or "<" in name_of(function)):
            why = "it is not in a module that the worker can import"
            remedy = "install cloudpickle (`pip install 'spool-scheduler[python]'`)"
            raise SpoolError(cannot("submit", f"a call of {name_of(function)}", why, remedy=remedy)) from None
        return pickle.dumps
    dumps: Callable[[object], bytes] = cloudpickle.dumps
    return dumps


def _dumped(dumps: Callable[[object], bytes], thing: object, what: str, function: Callable[..., Any]) -> bytes:
    try:
        return dumps(thing)
    except Exception as error:
        name = _culprit(dumps, thing) or what
        why = f"{name} cannot be pickled: {_told(error)}"
        raise SpoolError(cannot("submit", f"a call of {name_of(function)}", why)) from error


def _culprit(dumps: Callable[[object], bytes], part: object) -> str:
    """Return which of the arguments cannot be pickled: "argument 2", "the argument data"; "" if none alone."""
    match part:
        case (tuple() as args, dict() as kwargs):
            named = [(f"argument {at}", each) for at, each in enumerate(args, 1)]
            named += [(f"the argument {key}", each) for key, each in kwargs.items()]
        case list():
            return next(filter(None, (_culprit(dumps, each) for each in part)), "")
        case _:
            return ""
    for name, each in named:
        try:
            dumps(each)
        except Exception:
            return f"{name}, a {type(each).__name__},"
    return ""


def _told(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Files.


def _open_own(
    root: str, parts: tuple[str, ...], verb: str, thing: str, is_right: Callable[[int], bool] = stat.S_ISREG
) -> int:
    """Open a file below *root* that no other user can have written. Raises FileNotFoundError, SpoolUnusable."""
    path = root
    at = os.open(root, _READ & ~os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        _check_own(at, path, verb, thing)
        for number, part in enumerate(parts, 1):
            path = f"{path}/{part}"
            flags = _READ if number == len(parts) else _READ | os.O_DIRECTORY
            try:
                below = os.open(part, flags, dir_fd=at)
            except (FileNotFoundError, SpoolTrouble):
                raise
            except OSError as error:
                raise SpoolUnusable(cannot(verb, thing, error.strerror or str(error), where=path)) from None
            os.close(at)
            at = below
            _check_own(at, path, verb, thing)
        if not is_right(os.fstat(at).st_mode):
            raise SpoolUnusable(cannot(verb, thing, "it is not a regular file", where=path))
    except BaseException:
        os.close(at)
        raise
    return at


def _check_own(fd: int, path: str, verb: str, thing: str) -> None:
    """Raise SpoolUnusable if another user owns an open file, or can write to it."""
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        why = f"it is a pickle of uid {status.st_uid}, and loading it would run that user's code"
        raise SpoolUnusable(cannot(verb, thing, why, where=path))
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = "other users can write to it, and loading a pickle runs what is in it"
        raise SpoolUnusable(cannot(verb, thing, why, where=path, remedy=f"chmod go-w {path}"))


def _opened(
    root: str, parts: tuple[str, ...], verb: str, thing: str, keys: dict[str, Any]
) -> tuple[dict[str, Any], BinaryIO]:
    """Open a call or a return as `_open_own` does, and return its first line and what follows it.

    Raises InvalidRecord, also if one of *keys* is not there.
    """
    file, where = os.fdopen(_open_own(root, parts, verb, thing), "rb"), "/".join((root, *parts))
    try:
        header = dict(json.loads(file.readline(_MOST_HEADER)))
        version = header["version"]
        is_whole = version != VERSION or all(isinstance(header[key], kind) for key, kind in keys.items())
    except (ValueError, TypeError, KeyError):
        is_whole = False
    if is_whole and version == VERSION:
        return header, file
    file.close()
    why = f"it is of version {version}, and this spool reads {VERSION}" if is_whole else "its first line is damaged"
    raise InvalidRecord(cannot("read", "a call", why, where=where))


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise InvalidRecord(cannot("read", "a call", f"it has {len(data)} bytes, and should have {size}"))
    return data


def _own_for_standard() -> list[str]:
    """Return the modules imported here that have the name of one of the standard library, and are not that one."""
    library = f"{_LIBRARY}/"
    files = ((name, getattr(sys.modules.get(name), "__file__", None)) for name in sys.stdlib_module_names)
    return [name for name, file in files if isinstance(file, str) and not file.startswith(library)]


def _take_path(entries: list[str], own: Iterable[str]) -> None:
    """Let the worker find the caller's modules, in the caller's order, behind the standard library.

    Before it, a `json.py` of another user in a directory that is only there for the function would be imported. The
    modules *own*, which the caller has instead of the library's, are imported at once.
    """
    before = sys.path[:]
    sys.path[:] = entries
    for name in own:
        if name not in sys.modules:
            __import__(name)
    end = 1 + max((at for at, entry in enumerate(before) if entry in (_LIBRARY, f"{_LIBRARY}/lib-dynload")), default=-1)
    sys.path[:] = dict.fromkeys((*before[:end], *entries, *before[end:]))


# The job.


def main(arguments: list[str]) -> int:
    """Make the call in `calls/NAME`, and return the exit code of its job: 0, or 1 after an exception."""
    [name] = arguments
    root, metadir, pid = os.environ["SPOOL_DIR"], os.environ["SPOOL_METADIR"], os.getpid()
    with suppress(OSError):  # a record of what ran, which nothing needs
        os.link(f"{root}/{CALLS}/{name}", f"{metadir}/{CALL}")
    try:
        value = load(root, name, int(os.environ.get("SPOOL_ARRAY_INDEX", "0")))()
        if os.getpid() == pid:  # else a child that the function has forked and not ended
            leave_value(metadir, value)
    except BaseException as error:
        if os.getpid() != pid:
            raise
        trace = _trace(error)
        sys.stdout.flush()
        print(trace, end="", file=sys.stderr)
        leave_error(metadir, error, trace)
        return 1
    return 0


def _trace(error: BaseException) -> str:
    """Return the traceback from the function on, without the frames of spool."""
    if isinstance(error, SpoolError):
        return f"spool: {error}\n"
    import traceback  # here, because most calls raise nothing

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
