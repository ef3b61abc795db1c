"""What capabilities contribute to the core, which knows none of them: the types, and finding those that are there.

A capability is one folder of `spool.extras`, or a package outside, that can be deleted without a change elsewhere. What
it contributes is named by texts "module:attribute", which are imported when they are used, so that a command loads only
what it needs. Packages offer theirs by entry points of the group `spool.capabilities`. These are looked up only for a
word that is not known without them, because the search costs more than a submission.

It imports next to nothing, so that `spool submit` starts quickly: the tables of keys are elsewhere.
"""

from __future__ import annotations

import os
import sys

from spool.core.layout import LOCAL_EXECUTORS

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any, dataclass_transform

    from spool.core.model import Spec
else:

    def dataclass_transform(**_):
        """Return what leaves a class as it is."""
        return lambda made: made


MOST = 1_000_000
"""The largest count in any file."""

MAX_INDEX = 9_999_999
"""The largest index of an array."""

REQUIRED = object()
"""The default of a required key."""

OF_ITS_FIELD = object()
"""The default of a key that has the default of its field in the model."""


@dataclass_transform(eq_default=False)
class Row:
    """A row of a table: its columns are the annotated names of its class; one with a value there may be left out.

    A Struct would be the same, but for the time that its import takes.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        """Fill the columns, in their order or by name. Raises TypeError for an unknown one, and without one."""
        columns = type(self).__annotations__
        named |= zip(columns, given, strict=False)
        missing = [name for name in columns if name not in named and not hasattr(self, name)]
        if missing or len(given) > len(columns) or not named.keys() <= columns.keys():
            unknown = [*(named.keys() - columns.keys()), *given[len(columns) :]]
            raise TypeError(f"{type(self).__name__}: missing columns {missing}, unknown ones {unknown}")
        self.__dict__.update(named)


class Key(Row):
    """One key: its name, the kind of its value, its meaning as the docs state it, and further properties.

    * `default`: as written in the file; None: no default. By default that of its field, if that is not empty.
    * `field`: of the model; with a dot from its root, without one within the table's part. By default the key's name,
          plus the unit for a size or duration.
    * `option`: its spelling on the command line; `help` if that differs from the docs. `shortcuts` are flags that
          stand for one value each: the spelling, the value, the help.
    * `also`: how other tools spell the option; accepted, but not listed in the help. Without an `option` too.
    * `words`: the allowed ones. `least`, `most`: its bounds. `examples`: for editors.
    * `needs`: another key, and why this one is meaningless without it.
    * `array_only`: for the array file only, not for its tasks.
    * `in_defaults`: it may also stand in `[defaults]` of config.toml.
    * `many`: "list" for a list of such tables, "named" for a table of them by names that the user chooses.
    * `internal`: only spool writes it, so the page of keys leaves it out. `rare`: only `--help all` lists its options.
    """

    name: str
    value: str | KeyTable
    about: str
    default: object = OF_ITS_FIELD
    field: str = ""
    option: str = ""
    also: str = ""
    help: str = ""
    shortcuts: tuple[tuple[str, str, str], ...] = ()
    words: tuple[str, ...] = ()
    least: float | None = None
    most: int = MOST
    examples: Sequence[Any] = ()
    needs: str = ""
    array_only: bool = False
    in_defaults: bool = False
    many: str = ""
    internal: bool = False
    rare: bool = False

    @property
    def table(self) -> KeyTable | None:
        """The table that is its value."""
        return None if isinstance(self.value, str) else self.value

    @property
    def kind(self) -> str:
        """The kind of its value."""
        return self.value if isinstance(self.value, str) else self.value.name

    @property
    def target(self) -> str:
        """The field of the model, stated or by default."""
        return self.field or self.name + _UNITS.get(self.kind, "")


class KeyTable:
    """The keys of a file, or of a table in it. A value that is not a table stands for the key *short*.

    *gone*: keys of the file that have no effect any more, `NAME` or `TABLE.NAME`, each with what to do.
    """

    def __init__(
        self, name: str, about: str, *keys: Key, short: Key | None = None, gone: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.about = about
        self.keys = keys
        self.short = short
        self.gone = gone or {}


_UNITS = {"size": "_bytes", "duration": "_ns", "timeout": "_ns"}


class Part:
    """A capability's part of a file: its keys, behind the key *after*, and in *reader* what reads their values.

    *reader* names the `PartReader` as "module:attribute". A key that is no table has a `field` with a dot, such as
    "metrics.path", so that its value is found with the others of its part. Each states its `default`.

    *excludes* are keys of the file that one with its keys cannot have, each with the reason. Defaults do not add them.
    *once*: why only one run can have its keys; such a job is not queued again, and copies of it are without.
    *gone*: as in a `KeyTable`.
    """

    def __init__(
        self,
        *keys: Key,
        after: str,
        reader: str,
        excludes: Mapping[str, str] | None = None,
        once: str = "",
        gone: Mapping[str, str] | None = None,
    ) -> None:
        self.keys = keys
        self.after = after
        self.reader = reader
        self.excludes = excludes or {}
        self.once = once
        self.gone = gone or {}

    @property
    def names(self) -> frozenset[str]:
        """The names of its keys."""
        return frozenset(key.name for key in self.keys)

    @property
    def kinds(self) -> set[str]:
        """The kinds of values that its keys have, those in their tables too."""
        return set(_kinds(self.keys))


def _kinds(keys: Iterable[Key]) -> Iterator[str]:
    for key in keys:
        if key.table is None:
            yield key.kind
        else:
            yield from _kinds(key.table.keys)


class ContributedVerb(Row):
    """A verb of the command line: its section in the help, where its click command is, and its line of help.

    It stands behind the verb *after*, or last in its section.
    """

    section: str
    command: str
    about: str
    after: str = ""


class EngineOffer(Row):
    """An engine that a capability offers: a place elsewhere where jobs run whose `executor` has its name.

    Each text but the first and the last names "module:attribute"; "" offers nothing.

    * `title`: its usual name for users.
    * `executor`: `(name, Callable[[], Config], LockedSpool | None) -> executors.base.Executor`.
    * `check`: `(Reading) -> None`: adds the problems of a job file that names it.
    * `shortcut`: the help of an option `--NAME`, which stands for `--executor NAME`; "" if there is none.
    """

    title: str
    executor: str
    check: str = ""
    shortcut: str = ""


class OtherWay(Row):
    """Another way of `spool run`, with an option of its own.

    * `option`: its spelling; `help`, `text`: its line of help, and what the verb's help says of it.
    * `runs`: `(root, Asked, *, quiet, strict, replaces) -> int`: takes the place of the verb; the exit code.
    """

    option: str
    help: str
    text: str
    runs: str


class GpuVendor(Row):
    """GPUs that NVML does not list, which are asked for beside it where they may be.

    * `name`: the vendor, as in `Gpu.vendor`; the names of its GPUs begin with it, for `gpu_type`.
    * `signs`: paths, or variables of the environment as "$NAME". Nothing of this is loaded unless one of them exists.
    * `source`: a class; its `beside(Sample) -> Sample` adds the GPUs to an answer of NVML (`machine.nvml`).
    * `visible`: `(Grant, Mapping) -> Mapping`: the variables by which a run sees its GPUs and no others, to be
      changed in those that it has.
    * `tool`: the vendor's command that shows them.
    * `on_the_bus`: the vendor's number on the PCI bus, the classes of its cards, and the library that lists them.
    """

    name: str
    signs: tuple[str, ...]
    source: str
    visible: str
    tool: str
    on_the_bus: tuple[str, tuple[str, ...], str]


class Capability(Row):
    """What one capability contributes. Each text names "module:attribute"; "" contributes nothing.

    * `job`: a `Part` of the job file: its keys, and how their values become `Spec.parts[name]`.
    * `config`: likewise of config.toml, for `Config.parts[name]`.
    * `only_here`: why a job of an engine elsewhere cannot have its keys, and what to do; `{}` is the engine's name.
    * `only_elsewhere`: why a job of this machine cannot have its keys; `{}` is the name of its executor.
    * `engines`: the engines that it offers, by the names that `executor` has in job files.
    * `running`: what lists say of a running job that has its keys, if there is nothing else to say.
    * `by_others`: whether processes of such a run may be started by others than its wrapper, as those of a daemon are.
    * `problem`: `(Spec) -> str | None`: why a job that has its keys cannot start on this machine; None if it can.
    * `doubts`: `(Spec, Config) -> Iterable[str]`: what of its keys in a job will not work; told at submission.
    * `launch`: `(Spec, Assignments, ActiveRun) -> Assignments`: changes what is written for the wrapper of such a run.
    * `starts`: `(Launch, LocalProcesses) -> LocalRun | None`: starts such a run, not its executor; None: not now.
      Its wrapper is no child of the dispatcher, and enters none of its control groups.
    * `files`: a tuple of `formats.validation.FileKind`: the files that are its own, for `spool check` and the schemas.
    * `leases`: the class of the `dispatcher.leases.Leases` by which a dispatcher starts jobs on a shared machine.
    * `sharing`: `(directory, owner, uid, now_ns) -> query.shared.MachineSharing`: what the users of one have of it.
    * `steps`: `(Context) -> dispatcher.context.Steps`: its steps of a pass; with a `config` only once that has a value.
    * `record`: `(Spool, str, int) -> Struct | None`: what it has recorded of a run of a job, in `RunDetails.parts`;
      `PUBLIC` of its class has the names that `--json` prints.
    * `listener`: the class of a `Listener`, whose kind is the capability's name; it runs once `listens`,
      `(Config) -> bool`, or without that its part of the configuration has a value, or if `for_jobs` a job asks for it.
    * `verbs`: its verbs, by name.
    * `way`: an `OtherWay` of `spool run`.
    * `charts`: what draws the charts of verbs, a `cli.charts.Charts`.
    * `told`: `(RunDetails) -> Iterable[tuple[str, str]]`: its lines of `spool show`, title and text.
    * `on_info`: `(MachineSharing, now_ns) -> None`: prints the other users of a shared machine for `spool info`.
    * `gpus`: the `GpuVendor` whose GPUs it finds.
    * `value`: `(Spool, str, End) -> Any`: what the function of a job that has ended returned; raises what it raised.
    * `scripts`: the class of a `cli.scripts.OtherScripts`, which reads scripts for other schedulers.
    * `dependencies`: `(str) -> Sequence[str] | None`: a text of `--depends-on` in words of ours; None if it is not in
      those of another scheduler.
    * `answers`: `(str, str | None) -> str | None`: what to write instead of an option of another tool, and its value.
    * `checks`: a tuple of `doctor.checks.Check` of the machine.
    * `public`: the names that `spool` itself offers -> their modules.
    """

    name: str
    about: str
    job: str = ""
    config: str = ""
    only_here: str = ""
    running: str = ""
    only_elsewhere: str = ""
    engines: Mapping[str, EngineOffer] = {}
    by_others: bool = False
    problem: str = ""
    doubts: str = ""
    launch: str = ""
    starts: str = ""
    files: str = ""
    leases: str = ""
    sharing: str = ""
    steps: str = ""
    record: str = ""
    listener: str = ""
    listens: str = ""
    for_jobs: bool = False
    verbs: Mapping[str, ContributedVerb] = {}
    way: str = ""
    charts: str = ""
    told: str = ""
    on_info: str = ""
    gpus: GpuVendor | None = None
    value: str = ""
    scripts: str = ""
    dependencies: str = ""
    answers: str = ""
    checks: str = ""
    public: Mapping[str, str] = {}


GROUP = "spool.capabilities"
"""The entry point group of capabilities."""

_EXTRAS = "spool.extras"  # by name, because what is above is not known here
_here: tuple[Capability, ...] | None = None
_outside: tuple[Capability, ...] | None = None


def capabilities() -> tuple[Capability, ...]:
    """Return the capabilities of `spool.extras` that are there, and those of packages once they were searched."""
    global _here
    if _here is None:
        try:
            extras = _imported(_EXTRAS)
        except ImportError:
            extras = None
        folder = os.path.dirname(getattr(extras, "__file__", None) or "")
        table = getattr(extras, "TABLE", ())  # all of it may be deleted
        _here = tuple([each for each in table if os.path.isfile(f"{folder}/{each.name}/__init__.py")])
    return _here + (_outside or ())


def search(*, again: bool = False) -> bool:
    """Look for capabilities of installed packages; return whether there are any. Broken ones are left out.

    The search is made once, or *again* because a package may have been installed since.
    """
    global _outside
    if _outside is None or again:
        found = []
        try:
            for entry in _imported("importlib.metadata").entry_points(group=GROUP) if is_offered(GROUP) else ():
                try:
                    found.append(entry.load())
                except (Exception, SystemExit) as error:  # foreign code
                    sys.stderr.write(f"spool: {entry.value}: {type(error).__name__}: {error}\n")
        except (ImportError, OSError, ValueError):  # the packages cannot be searched now
            return bool(_outside)
        _outside = tuple(found)
    return bool(_outside)


def is_offered(group: str) -> bool:
    """Whether a distribution that this process can import has an entry point of that group.

    The files are read directly, since `importlib.metadata` costs as much as a pass or two.
    """
    for place in sys.path:
        try:
            names = os.listdir(place or ".")
        except OSError:
            continue
        for name in names:
            stated = f"{place or '.'}/{name}/entry_points.txt"
            if name.endswith((".dist-info", ".egg-info")) and _names_group(stated, f"[{group}]".encode()):
                return True
    return False


def _names_group(path: str, header: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return any(line.strip() == header for line in file)
    except OSError:
        return False


def engines() -> dict[str, EngineOffer]:
    """Return the engines that are offered, by their names, as far as packages were searched."""
    return {name: offer for capability in capabilities() for name, offer in capability.engines.items()}


def engine_offer(name: str) -> EngineOffer | None:
    """Return the engine of that name, which may be of an installed package; None: there is none."""
    return engines().get(name) or (engines().get(name) if search(again=True) else None)


def engine_title(executor: str) -> str:
    """Return the usual name of an engine; an unknown one, such as one that is not installed, keeps its own word."""
    offer = engines().get(executor)
    return offer.title if offer is not None else executor


def is_of_a_package(name: str) -> bool:
    """Whether the engine of that name is of an installed package."""
    return any(name in capability.engines for capability in _outside or ())


def executors() -> tuple[str, ...]:
    """Return the names of all executors, as far as packages were searched."""
    return (*LOCAL_EXECUTORS, *engines())


def loaded(target: str) -> Any:
    """Return the object that a text "module:attribute" names. Raises ImportError."""
    module, _, attribute = target.partition(":")
    return getattr(_imported(module), attribute)


def _imported(module: str) -> Any:
    __import__(module)  # importlib takes long to import
    return sys.modules[module]


def contributed(column: str) -> Iterator[tuple[Capability, Any]]:
    """Yield each capability that has something in that column, such as "checks", with the object named there."""
    for capability in capabilities():
        if target := getattr(capability, column):
            yield capability, loaded(target)


def only(column: str) -> Any | None:
    """Return the object of the one capability that has something in that column; None if there is none."""
    return next((found for _, found in contributed(column)), None)


def used_by(spec: Spec) -> list[Capability]:
    """Return the capabilities whose keys a job has."""
    return [each for each in capabilities() if spec.part(each.name) is not None] if spec.parts else []


def one_run_keys(data: bytes) -> dict[str, str]:
    """Return the keys of the job file *data* that only one run can have, each with the reason."""
    bound = {name: part.once for part in parts("job").values() if part.once for name in part.names}
    if not any(name.encode() in data for name in bound):
        return {}  # nearly always, so few files are parsed for this
    from spool.core.errors import InvalidFile
    from spool.formats import toml

    try:
        stated = toml.read(data, "the job file")
    except InvalidFile:
        return {}
    return {name: why for name, why in bound.items() if name in stated}


def parts(column: str) -> dict[str, Part]:
    """Return the parts of one kind of file, "job" or "config", by the names of their capabilities."""
    return {capability.name: part for capability, part in contributed(column)}


def with_parts(column: str, keys: tuple[Key, ...]) -> tuple[Key, ...]:
    """Return *keys* with those of the capabilities behind the keys after which they stand."""
    merged = list(keys)
    for part in parts(column).values():
        at = next((index for index, key in enumerate(merged, 1) if key.name == part.after), None)
        if at is not None and part.keys[0] not in merged:
            merged[at:at] = part.keys
    return tuple(merged)
