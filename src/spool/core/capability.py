"""What a capability contributes to the core, which knows none of them: the type, and nothing of its loading.

A capability is one folder of `spool.extras`, or a package outside, that can be deleted without a change elsewhere. What
it contributes is named here by texts "module:attribute", which `formats.capabilities` imports when they are used, so
that a command loads only what it needs.
"""

from __future__ import annotations

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, dataclass_transform
else:

    def dataclass_transform(**_):
        """Return what leaves a class as it is."""
        return lambda made: made


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
    * `executor`: `(name, Callable[[], Config], Home | None) -> executors.base.Executor`.
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
    * `alone`: a key whose option, given without a value, means this way too, and what its help says of that.
    * `runs`: `(root, Asked, *, quiet, strict, replaces) -> int`: takes the place of the verb; the exit code.
    """

    option: str
    help: str
    text: str
    runs: str
    alone: tuple[str, str]


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

    * `job`: a `formats.capabilities.Part` of the job file: its keys, and how their values become `Spec.parts[name]`.
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
