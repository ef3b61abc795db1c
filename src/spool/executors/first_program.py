"""The first program of a wrapper that is a shell: it sets up its process, then becomes the wrapper.

Run as a script, by path, with only the standard library, because each millisecond of it delays a start:

* `first_program.py - SCRIPT [told]`: where there is no compiled wrapper. It makes this process the child subreaper of
  the run, which a shell cannot do.
* `first_program.py LAUNCH SCRIPT`: in a terminal. LAUNCH is a file with what the wrapper inherits; it is removed as
  soon as it is read.

In a terminal it leaves a viewer beside the wrapper: a process that belongs to no run and copies the run's outputs to
the terminal. So the terminal shows them, and the outputs contain nothing of the terminal.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import select
import signal
import stat
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
_SHELL = "/bin/sh"
_REFUSED, _GOES_BACK = "refused", 75  # as in the wrapper
_TO_VIEWER, _FROM_VIEWER = 6, 7  # of the wrapper: by the first it announces its end, on the second it waits
_BLOCK = 1 << 16
_BEHIND = 1 << 20  # a viewer further behind skips the output that could not have been read
_SHORTEST_MS, _LONGEST_MS = 20, 500
_LAST_S = 1.0  # how long the end may wait for a terminal that accepts no more output


def main(launch: str, script: str, *arguments: str) -> None:
    """Become the wrapper *script*, as the file *launch* says; "-": as this process is."""
    if launch == "-":
        with open("/proc/self/environ", "rb") as file:  # Python may have added LC_CTYPE to its own
            given = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0") if entry)
        become_wrapper([script, *arguments], given, "")
    with open(launch, encoding="ascii") as file:
        told = json.load(file)
    os.unlink(launch)
    step = "start the viewer of its terminal"
    try:
        leave_viewer(told["outputs"])
        if cpus := set(told.get("cpus", ())):
            step = f"give it CPUs {','.join(map(str, sorted(cpus)))}"
            os.sched_setaffinity(0, cpus)
            if os.sched_getaffinity(0) != cpus:
                raise OSError(errno.EINVAL, "not all of them can be used")
    except OSError as error:
        # Nothing has begun, and nothing will: the job keeps waiting, as if the wrapper itself had been refused a
        # process.
        with open(os.path.join(os.path.dirname(script), _REFUSED), "w", encoding="utf-8") as record:
            record.write(f"cannot {step}: {error.strerror}\n")
        raise SystemExit(_GOES_BACK) from None
    os.umask(told["umask"])
    for number, limits in told["limits"].items():
        try:
            resource.setrlimit(int(number), tuple(limits))
        except (OSError, ValueError):  # the server has lower limits, and they cannot be raised
            continue
    environment = told["environment"]
    if "TERM" in os.environ:
        environment["TERM"] = os.environ["TERM"]
    become_wrapper([script], environment, told["program"])


def become_wrapper(words: list[str], environment: dict[str, str] | dict[bytes, bytes], program: str) -> None:
    """Turn into the wrapper *words*, the parent of what its run abandons; *program* is the compiled wrapper, if any."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if os.access(program, os.X_OK):
        os.execve(program, [program, "run", *words], environment)  # noqa: S606  # to become a program is what this is for
    import ctypes  # imported here: it takes half as long as the rest

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    os.execve(_SHELL, [_SHELL, *words], environment)  # noqa: S606


def leave_viewer(paths: list[str]) -> None:
    """Start the viewer, in its own session and not as a child. It ends with this process. Raises OSError."""
    outputs = [Output(path) for path in paths]
    wrapper, to_viewer = os.pipe()
    from_viewer, shown = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(to_viewer)
        os.close(from_viewer)
        os.setsid()
        try:
            grandchild = os.fork()
        except OSError as error:
            os._exit(error.errno or 1)
        if grandchild == 0:
            try:
                # Opened anew: non-blocking writes are then not set for the wrapper's own stdin as well.
                terminal = os.open(os.ttyname(0), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
                nothing = os.open(os.devnull, os.O_RDWR)
                for fd in range(3):  # an orphan whose stdout is a run's log would be taken for a part of the run
                    os.dup2(nothing, fd)
                Viewer(outputs, terminal, wrapper).show()
            except OSError:  # the terminal is gone
                os._exit(1)
        os._exit(0)
    number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number > 0:
        raise OSError(number, os.strerror(number))
    os.close(wrapper)
    os.close(shown)
    ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (to_viewer, from_viewer)]  # out of the way
    os.close(to_viewer)
    os.close(from_viewer)
    for fd, number in zip(ends, (_TO_VIEWER, _FROM_VIEWER), strict=True):
        os.dup2(fd, number)


class Output:
    """A growing file, from its end at this moment."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None
        self._at = 0
        try:
            self._at = os.stat(path).st_size
        except OSError:  # not there yet
            return

    def read(self) -> bytes:
        """Return new content, at most some of it. Only regular files are ever read."""
        if self._fd is None:
            try:
                fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            except OSError:
                return b""
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                return b""
            self._fd = fd
        size = os.fstat(self._fd).st_size
        note = b""
        if size < self._at:
            self._at = 0  # it was truncated, and starts over
        if size - self._at > _BEHIND:
            passed_over = size - _BLOCK - self._at
            self._at += passed_over
            note = b"\n[%d bytes are not shown here]\n" % passed_over
        data = os.pread(self._fd, _BLOCK, self._at)
        self._at += len(data)
        return note + data


class Viewer:
    """Copies *outputs* to *terminal* until the other end of the pipe *wrapper* is closed, and everything is shown."""

    def __init__(self, outputs: list[Output], terminal: int, wrapper: int) -> None:
        self._outputs = outputs
        self._terminal = terminal
        self._ended = select.poll()
        self._ended.register(wrapper, select.POLLIN)
        self._until: float | None = None  # monotonic deadline, once the wrapper has ended

    def show(self) -> None:
        """Copy until the end. Raises OSError if the terminal is gone, or accepts no output while the wrapper waits."""
        pause_ms = _SHORTEST_MS
        while True:
            over = self._over(pause_ms)
            new = [data for output in self._outputs if (data := output.read())]
            for data in new:
                self._put(memoryview(data))
            if over and not new:
                return
            pause_ms = 0 if new else max(_SHORTEST_MS, min(2 * pause_ms, _LONGEST_MS))

    def _over(self, pause_ms: int) -> bool:
        if self._until is None and self._ended.poll(pause_ms):
            self._until = time.monotonic() + _LAST_S
        return self._until is not None

    def _put(self, rest: memoryview) -> None:
        takes = select.poll()
        takes.register(self._terminal, select.POLLOUT)
        while rest:
            try:
                rest = rest[os.write(self._terminal, rest) :]
            except BlockingIOError:
                takes.poll(_LONGEST_MS)
            if self._over(0) and time.monotonic() > (self._until or 0):
                raise TimeoutError


if __name__ == "__main__":
    main(*sys.argv[1:])
