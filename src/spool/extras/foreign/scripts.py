"""Scripts for other schedulers, as `cli.scripts` asks for them: their shell, their options, and their surroundings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from spool.cli import fastsubmit, joboptions
from spool.cli.render import tell
from spool.cli.submission import MAX_HEAD_BYTES, OPTIONS, SHELLS, Asked, ScriptText, head_lines
from spool.client import submit as submitting
from spool.client.draft import Exports
from spool.core.errors import InvalidJob, InvalidValue, UsageError, cannot
from spool.core.reasons import count_of
from spool.extras.foreign import lines
from spool.extras.foreign.lines import Directive
from spool.extras.foreign.options import NoEquivalent, dependencies
from spool.extras.foreign.surroundings import ScriptNeeds, output_path
from spool.store.glance import config_if


class ForeignScripts:
    """Reads scripts for other schedulers, for jobs of one spool: the `cli.scripts.OtherScripts` of this capability."""

    def __init__(self, root: str) -> None:
        self._root = root

    def is_line(self, line: str) -> bool:
        """Whether *line* of a script is for another scheduler that reads it."""
        return lines.is_line(line)

    def shell(self, script: bytes, own: bytes, what: str, asked: Asked) -> str | None:
        """Return the shell that runs a script instead of what its *own* `#!` line says; None if that one does.

        PBS, Grid Engine and others take the shell of `-S`, even if the script's own line names another shell, and
        without either the login shell.
        """
        head = [line for _, line in head_lines(script)]
        shell = next(filter(None, map(lines.interpreter, head)), None)
        if shell is None and (own or not any(map(lines.is_line_of_a_shell, head))):
            return None
        if own and shell is not None:
            before = os.path.basename(own.split()[-1].decode(errors="replace"))
            if before == os.path.basename(shell) or not {before, os.path.basename(shell)} <= SHELLS:
                return None
        if shell is not None and not os.access(shell, os.X_OK):
            from shutil import which

            shell = which(os.path.basename(shell)) or shell
        if shell is None:
            shell = _login_shell()
            tell(f"{what}: it has no `#!` line; {shell} runs it, as the other scheduler would")
        elif asked.verbose:
            tell(f"{what}: {shell} runs it, as its -S says")
        return shell

    def values(self, script: bytes, what: str, asked: Asked, own: joboptions.Values) -> joboptions.Values:
        """Return the options in the lines of a script, with its *own* ones, which come first. Raises UsageError."""
        if asked.ignore_directives:
            ignored = [number for number, line in head_lines(script) if lines.is_line(line)]
            if ignored:
                tell(f"{what}: the lines for another scheduler are ignored, from line {ignored[0]} on")
            return own
        found = list(_directives(script, what))
        _check_unread(script, what, refused=not found and not own)
        if not found:
            return own
        values = self._carried_over(found, what, asked, own)
        if "name" in values and b"singleton" not in script:  # such a job is not submitted beside another
            values["job_name"] = values.pop("name")
        both = {"env": [*values["env"], *own.get("env", [])]} if values.get("env") else {}
        return {**values, **own, **both}

    def _carried_over(
        self, found: Sequence[Directive], what: str, asked: Asked, own: joboptions.Values
    ) -> joboptions.Values:
        """Return what the lines state that nothing else does, and tell of what is lost. Raises UsageError."""
        values: joboptions.Values = {}
        stated = asked.keys | own.keys()
        errors: list[str] = []
        notes, told = 0, False
        limited = asked.limited or "time_limit" in own
        for one in lines.convert(found, limited=limited, sends_to=self._sends_to):
            if one.key == "notify.to" and one.key in stated:
                continue
            if one.lost is not None and one.lost.matters and one.key not in stated:
                errors.append(f"line {one.directive.line}: {one.directive}: {one.lost}")
                continue
            keys, _, _ = fastsubmit.read(one.words, OPTIONS)
            if keys and keys.keys() <= stated - {"env"}:
                continue
            if one.lost is None or one.key not in stated:
                if asked.verbose or not one.is_note:
                    told = True
                    tell(f"{what}: {one}")
                else:
                    notes += 1
            for key, texts in keys.items():
                values.setdefault(key, []).extend(texts)
        if errors:
            remedy = "--ignore-directives ignores all lines for other schedulers"
            raise UsageError(cannot("carry over", f"the options of {what}", "; ".join(errors), remedy=remedy))
        if notes:
            tell(f"{what}: {count_of(notes, 'more note' if told else 'note')} on lines for another scheduler: -v")
        return values

    def _sends_to(self, address: str) -> bool:
        """Whether a job can have messages sent to *address*."""
        from spool.formats import jobfile  # imported here, because few scripts have such lines
        from spool.formats.config import Config
        from spool.query.foresight import doubts_of_parts

        try:
            spec = jobfile.parse(jobfile.dump({"command": "true", "notify": address}), name="a")
        except InvalidJob:  # also where nothing sends messages
            return False
        return not any(doubts_of_parts(spec, config_if(self._root, b"notifier", b"contacts") or Config()))

    def adapted(self, values: joboptions.Values) -> joboptions.Values:
        """Return *values* without sbatch's `--dependency=singleton`, unless a job has that name."""
        needed = values.get("depends_on", [])
        if "singleton" not in needed or submitting.ever_used(self._root, "singleton"):
            return values
        tell("--dependency=singleton is not needed here: jobs of one name run one at a time")
        return {**values, "depends_on": [text for text in needed if text != "singleton"]}

    def surround(
        self, source: ScriptText, name: str, given: dict[str, object], exported: Exports, freely: bool
    ) -> None:
        """Add what a script or command for another scheduler looks for in its job. *freely*: without `--export`."""
        if not self._is_for_slurm(given):
            head = head_lines(source.text.encode(errors="replace"))
            read = [line for _, line in head] if source.is_script and not source.ignores_lines else []
            tasks = lines.tasks_of([one for line in read for one in lines.directives(0, line)])
            found = ScriptNeeds(source.text, name, tasks, given)
            found.find(exported)
            if source.is_script:
                found.find_functions(exported, freely=freely)
            for why in found.told:
                tell(f"{source.what}: {why}")
            own = given.get("env", {})
            if found.env and isinstance(own, dict):
                given["env"] = {**found.env, **own}
            if found.stdout:
                given["stdout"] = found.stdout
        for key in given.keys() & {"stdout", "stderr"}:
            given[key] = output_path(str(given[key]), name, given)

    def _is_for_slurm(self, given: Mapping[str, object]) -> bool:
        """Whether the job will be one of Slurm, which gives it the variables itself."""
        config = config_if(self._root, b"executor")
        return given.get("executor", config.executor if config is not None else None) == "slurm"


def in_our_words(text: str) -> list[str] | None:
    """Return sbatch's `afterok:a:b,afterany:c` in the words of `--depends-on`; None for another text.

    Raises InvalidValue.
    """
    if not text.startswith("after"):
        return None
    try:
        return dependencies(text, numbers=True)[1::2]
    except NoEquivalent as error:
        raise InvalidValue(f"cannot use --depends-on {text}: {error}") from None


def _directives(script: bytes, what: str) -> Iterator[Directive]:
    """Yield the options for other schedulers: those in the head; for gflow, which reads the whole file, all."""
    head = dict(head_lines(script))
    text = script[:MAX_HEAD_BYTES].decode(errors="surrogateescape")
    for number, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")
        if number not in head and lines.is_line(line) and not lines.is_line(line, late=True):
            tell(f"{what}: line {number}: this line comes after the first command and is ignored: {line.strip()}")
            continue
        try:
            yield from lines.directives(number, line)
        except ValueError as error:
            raise UsageError(
                cannot("read", what, f"{str(error).lower()} in {line!r}", where=f"line {number}")
            ) from None


def _check_unread(script: bytes, what: str, *, refused: bool) -> None:
    """Tell about lines for a scheduler whose lines are not read here, or raise UsageError if nothing else is read."""
    unread = [(number, line, system) for number, line in head_lines(script) if (system := lines.unread_system(line))]
    if not unread:
        return
    number, line, system = unread[0]
    more = f" and {count_of(len(unread) - 1, 'more line')}" if len(unread) > 1 else ""
    why = f"line {number}: `{line}`{more} for {system} {'are' if more else 'is'} not read"
    if refused:
        remedy = "write `#SPOOL --cpus 8 --gpus 1 --time-limit 2h` for what they say, or give --ignore-directives"
        raise UsageError(cannot("carry over", f"the options of {what}", why, remedy=remedy))
    tell(f"{what}: {why}")


def _login_shell() -> str:
    from pwd import getpwuid

    try:
        shell = getpwuid(os.getuid()).pw_shell
    except KeyError:
        shell = ""
    return shell if os.path.basename(shell) in SHELLS else "/bin/sh"
