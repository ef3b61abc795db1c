"""The text of job files: what it says, and the `.error` file beside one that says nothing that can be used."""

from __future__ import annotations

from contextlib import suppress

from spool.core.model import Spec
from spool.dispatcher.confinement import Confinement, Thing
from spool.formats import jobfile
from spool.machine.host import why_not_expanded
from spool.store.config import Settings
from spool.store.locked_spool import LockedSpool

_SAY = "say what is wrong with"
_SAME_TEXT = 512  # different texts that are remembered: many jobs often have one
_SHORT_TEXT = 1 << 14  # bytes: a longer one is not, for all of them must fit into memory


class Texts:
    """Reads job files for a look."""

    def __init__(self, spool: LockedSpool, settings: Settings, confinement: Confinement) -> None:
        self._spool = spool
        self._settings = settings
        self._confinement = confinement
        self._parsed: dict[bytes, Spec] = {}
        self._unsaid: dict[tuple[str, str], str | None] = {}  # complaints that could not be written, or taken away

    def parse(self, name: str, data: bytes) -> Spec:
        """Return what the file of job *name* says, with the configuration's values where it says nothing.

        Raises InvalidJob.
        """
        spec = self._parsed.get(data)
        if spec is None:
            grace_ns = self._settings.config.kill_grace_ns
            spec = jobfile.parse(data, name=name, default_kill_grace_ns=grace_ns, why_no_path=why_not_expanded)
            # Of the same text under another name the same is true, but for what refers to the name.
            if spec.depends_on is None and not spec.is_array and len(data) <= _SHORT_TEXT:
                if len(self._parsed) >= _SAME_TEXT:
                    self._parsed.clear()
                self._parsed[data] = spec
        return spec

    def forget(self) -> None:
        """Read every text anew: the configuration has changed."""
        self._parsed.clear()

    def complain(self, place: str, name: str, text: str) -> None:
        """Say what is wrong with a job file, in the `.error` file beside it."""
        self._say(place, name, text)

    def withdraw_complaint(self, place: str, name: str) -> None:
        """Take the `.error` file beside a job file away; a directory of that name is none of ours."""
        self._say(place, name, None)

    def say_again(self) -> None:
        """Try again what could not be said, or taken back."""
        for (place, name), text in list(self._unsaid.items()):
            if not self._confinement.pauses(Thing.of_job(name), _SAY):
                self._say(place, name, text)

    def _say(self, place: str, name: str, text: str | None) -> None:
        path = self._spool.layout.error_file(place, name)
        with self._confinement.of(Thing.of_job(name), _SAY) as piece:
            if text is not None:
                self._spool.complain(path, text)
            else:
                with suppress(IsADirectoryError):
                    self._spool.disk.discard(path)
        if piece.failed:
            self._unsaid[place, name] = text
        else:
            self._unsaid.pop((place, name), None)
