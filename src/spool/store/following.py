"""Following the output of a job: of one run, or of all its runs until it has ended."""

from __future__ import annotations

from collections.abc import Iterator

from spool.core import layout
from spool.store.awaiting import Awaited, End
from spool.store.gathering import Gathering
from spool.store.spool import Spool
from spool.store.tails import Piece, Stream, Tail, outputs


class Follower:
    """Reads the output of a job from a run on; of an array that of its tasks, each once it has ended.

    `awaited` is what the job does, `end` how it ended, once that is known.
    """

    def __init__(
        self,
        spool: Spool,
        name: str,
        *,
        run: int | None = None,
        only: bool = False,
        after: int | None = None,
        lines: int | None = None,
    ) -> None:
        self._spool = spool
        self._name = name
        self.awaited = Awaited(spool, name)
        self._only = only  # that run, and none that may follow
        self._after = after or 0  # only runs later than this one
        self._lines = lines
        self._run: int | None = None
        self._tails: dict[Stream, Tail] = {}
        self._tasks: Gathering | None = None
        self.end: End | None = None
        if run is not None:
            self._begin(run)

    def pieces(self) -> Iterator[Piece | None]:
        """Yield what there is, and None where nothing is new: time to wait a little. Ends with the job, or the run."""
        if self._run is not None:
            yield Piece(self._run, Stream.OUT, b"")
        while True:
            self.end = self.awaited.look()
            newest = self._spool.latest_run(self._name)
            if newest is not None and newest <= self._after:
                newest = None
            if self._run is None and newest is not None:
                first = min(run for run in self._spool.runs(self._name) if run > self._after)
                self._begin(first)
                yield Piece(first, Stream.OUT, b"")
            over = self.end is not None or self._run_is_over(newest)
            yield from self._drained()
            if over and self._run is not None and newest is not None and newest > self._run and not self._only:
                self._begin(min(run for run in self._spool.runs(self._name) if run > self._run))
                yield Piece(self._run, Stream.OUT, b"")
                continue
            if self.end is not None or (over and self._only):
                return
            yield None

    def _run_is_over(self, newest: int | None) -> bool:
        if self._run is None:
            return False
        return (newest is not None and newest > self._run) or (
            self._spool.record(self._name, self._run, layout.RESULT) is not None
        )

    def _begin(self, run: int) -> None:
        if self._spool.array(self._name, run) is not None:
            self._run, self._tasks = run, Gathering(self._spool, self._name, run, lines=self._lines)
            return
        where = outputs(self._spool, self._name, run)
        paths = {Stream.OUT: where.stdout, Stream.ERR: where.stderr}
        for stream, path in paths.items():
            tail = self._tails.get(stream)
            if tail is not None and tail.path == path:
                continue  # appended to by run after run: go on where we are
            if tail is not None:
                self._tails.pop(stream).close()
            if path is not None:
                self._tails[stream] = Tail(path)
                if self._lines is not None and self._run is None:
                    self._tails[stream].skip_to_last(self._lines)
        self._run = run

    def _drained(self) -> Iterator[Piece]:
        assert self._run is not None or not self._tails
        if self._tasks is not None:
            yield from self._tasks.ended(last=self.end is not None)
        for stream, tail in self._tails.items():
            while data := tail.read():
                yield Piece(self._run or 0, stream, data)

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails.values():
            tail.close()
        if self._tasks is not None:
            self._tasks.close()
