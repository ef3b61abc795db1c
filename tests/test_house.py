"""The rules of the house, read off the source itself: who may import whom, what a module may hold, what is named."""

from __future__ import annotations

import ast
import gc
import inspect
import re
import subprocess
import sys
import threading
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from spool.core.model import Policy, Result, Spec
from spool.formats.config import Config, GpuConfig, RetentionPolicy
from support import ROOT, WHOLE, is_whole

SOURCE = ROOT / "src" / "spool"

# Folder of src/spool -> the folders that it may import beside itself (docs/ARCHITECTURE.md, "Layers").
LAYERS: dict[str, set[str]] = {
    layer: set(below.split())
    for layer, below in {
        "core": "",
        "formats": "core",
        "store": "formats core",
        "machine": "formats core",
        "executors": "machine formats core",
        "listeners": "machine store formats core",
        "client": "store formats core",
        "state": "executors machine store formats core",
        "query": "client state executors listeners machine store formats core",
        "dispatcher": "client state executors listeners machine store formats core",
        "doctor": "query client executors listeners machine store formats core",
        "cli": "dispatcher doctor query client executors listeners machine store formats core",
        "extras": "python cli dispatcher doctor query client state executors listeners machine store formats core",
        "python": "query client machine store formats core",
        "testing": "formats core",
    }.items()
}

# Values and pure functions; nothing that has a clock, a disk, a process or an environment.
# The values of datetime, whose clock is looked for by name below; fnmatchcase, which asks nobody for the case of file
# names; and `Random(seed)` only, as the own functions of random share a hidden state.
CORE_STDLIB = {
    *("__future__", "abc", "array", "bisect", "collections", "contextlib", "copy", "datetime", "difflib", "enum"),
    *("errno", "fnmatch", "fractions", "functools", "hashlib", "heapq", "itertools", "math", "operator", "random"),
    *("re", "string", "typing"),
}

# Third-party name -> the one folder or module that imports it; verbs of extras have click and rich too.
HOMES = {
    "click": "cli",
    "filelock": "store/lock.py",
    "jinja2": "extras/page/document.py",
    "libtmux": "executors/tmux.py",
    "msgspec": "formats",
    "psutil": "machine",
    "pynvml": "machine/nvml.py",
    "rich": "cli",
    "tomli": "formats/toml.py",
    "tomli_w": "formats/toml.py",
    "tomlkit": "formats",
    "watchdog": "dispatcher/wakeup.py",
}
VALUES = {"msgspec.Struct", "msgspec.field", "msgspec.structs"}  # what the values of all layers are made of
ABROAD = {
    ("extras/notify/sending.py", "apprise"): "an extra that only those who want to be told of things need",
    ("extras/functions/calls.py", "cloudpickle"): "an extra for functions that no module has",
    ("extras/top/app.py", "textual"): "an extra that one verb needs: the screen of `spool top`",
    ("extras/top/widgets.py", "textual"): "likewise: what that screen is made of",
    ("testing/engine_claims.py", "pytest"): "the claims are tests, which packages with an engine of their own run",
    ("query/rows.py", "pandas"): "for programs that have it: a list of jobs as its table",
    ("python/client.py", "tqdm"): "for programs that have it: its bar instead of a line",
    ("machine/nvml.py", "msgspec"): "the answers of a helper process, which only the process that started it reads",
    ("store/locked_spool.py", "msgspec"): "one table of numbers as JSON, which is nobody's format but its own",
}

# The documented modules of the packages that have others beside them.
DOORS = {
    "filelock": {"filelock"},
    "libtmux": {"libtmux", "libtmux.exc"},
    "psutil": {"psutil"},
    "watchdog": {"watchdog.events", "watchdog.observers.api"},
}

# Folder -> how many lines of Python it may have. Who raises a number says in the same commit what shrank instead.
BUDGET = {
    "": 100,
    "cli": 7125,
    "client": 2625,
    "core": 7800,
    "dispatcher": 7750,
    "doctor": 550,
    "executors": 2100,
    "extras": 370,
    "extras/amd": 250,
    "extras/capture": 950,
    "extras/containers": 300,
    "extras/engines": 1700,
    "extras/foreign": 1150,
    "extras/functions": 1100,
    "extras/here": 500,
    "extras/machine": 2850,
    "extras/metrics": 350,
    "extras/notify": 850,
    "extras/page": 400,
    "extras/plot": 450,
    "extras/simulate": 950,
    "extras/top": 1150,
    "formats": 5400,
    "listeners": 1000,
    "machine": 2900,
    "python": 900,
    "query": 4200,
    "state": 2000,
    "store": 3750,
    "testing": 450,
}
SLACK = 200  # a folder that has shrunk by more keeps that: its number goes down

MAX_LINES = 800  # beyond that, look again whether the module still hides one decision
MAX_FUNCTION = 60  # lines
MAX_PARAMETERS = 5  # without `self`
MIN_MODULE = 150  # lines of a module that only one other imports

# Exceptions to the rules below, each with its reason: LAYER.CLASS.FUNCTION, LAYER: TARGET, or the path of a module.
MANY_PARAMETERS: dict[str, str] = {
    "core.DependencyResolver.__init__": "what a name does stands in that many places",
    "core.FreeResources.__init__": "all facts of one instant; tests give those that they need",
    "formats.job_environment": "a job finds that much in its environment",
    "state.SchedulerState.view": "what the table does not know itself; all by keyword",
}
SMALL_MODULES: dict[str, str] = {
    "cli/main.py": "the program, which its script starts",
    "python/worker.py": "what job files of spool 0.1 start",
}
SAME_NAMES: dict[str, str] = {
    "Executor": "the public one, as `concurrent.futures` calls it, and what a job's `executor` names"
}
OF_OTHERS: dict[str, str] = {
    "dispatcher: self.memory.open": "what the journal remembers, which recovery completes before there is a state"
}
CHILDREN_WITH_MAKERS: dict[str, str] = {
    "ClusterRun takes ClusterEngine": "a handle on one run asks its back end, which has one answer for all",
    "LocalRun takes LocalProcesses": "a handle on one run asks its back end, which walks over the processes of all",
}

WRITES = {"store/disk.py": "the one place"}
ACTS = {"subprocess", "multiprocessing", "shutil", "tempfile", "spool.store.disk.Disk", "spool.store.locked_spool"}
# What query/ takes from modules that also write or start processes.
LOOKS = {
    "spool.client.autostart.is_starting": "whether a dispatcher was started moments ago",
    "spool.client.autostart.outlook": "what will start the next dispatcher",
    "spool.store.arrays.array_outcome": "how the tasks of an array ended",
    "spool.store.arrays.still_to_issue": "those that have no job yet",
    "spool.store.arrays.task_names": "which there are",
    "spool.store.disk.remedy_for": "a text",
    "spool.store.disk.status_of": "it looks",
}
SAYS = {
    "executors/compiled.py": "run by itself it builds the wrapper, and says where it is",
    "cli/render.py": "tell, say, tables, JSON",
    "cli/fastsubmit.py": "the name of a job that it has submitted, without importing the rest",
    "cli/completion.py": "a script for a shell",
    "extras/functions/calls.py": "the log of a call, whose process loads little",
}

# Put together here, so that this file does not hold the words that it looks for.
_PLACES = [f"(?<![\\w.$}}*]){re.escape('/' + name + '/')}" for name in ("work", "root", "farm")]
_HOSTS = [re.escape(".".join(host)) for host in (("pypi", "org"), ("pythonhosted", "org"), ("deb", "debian", "org"))]
FORBIDDEN = re.compile("|".join([*_PLACES, *_HOSTS]))


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Keep the syntax trees for this module alone, and collect no garbage: it would go over all of them, many times."""
    gc.disable()
    yield
    for cached in (modules, functions, imported_by, project_files, text_of):
        cached.cache_clear()
    gc.enable()


@dataclass(frozen=True)
class Module:
    """One module of the package: its path below src/spool, its text and its syntax tree, parsed and walked once."""

    path: str
    text: str
    tree: ast.Module

    @property
    def layer(self) -> str:
        return self.path.split("/")[0] if "/" in self.path else ""

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def calls(self) -> tuple[ast.Call, ...]:
        """All calls."""
        return tuple(node for node in self.nodes if isinstance(node, ast.Call))

    @cached_property
    def classes(self) -> tuple[ast.ClassDef, ...]:
        """All classes, wherever they stand."""
        return tuple(node for node in self.nodes if isinstance(node, ast.ClassDef))

    @cached_property
    def assigned(self) -> tuple[ast.expr, ...]:
        """All targets of assignments."""
        return tuple(target for node in self.nodes for target in _targets(node))

    @cached_property
    def imports(self) -> tuple[tuple[str, int], ...]:
        """Every imported module as an absolute dotted name, with its line, lazy and typing-only ones too."""
        return tuple(self._imports())

    def _imports(self) -> Iterator[tuple[str, int]]:
        package = ["spool", *self.path.split("/")[:-1]]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                name = ".".join([*base, *filter(None, [node.module])])
                if name != "msgspec":
                    yield name, node.lineno
                if name in ("spool", "msgspec"):  # `from spool import core`
                    yield from ((f"{name}.{alias.name}", node.lineno) for alias in node.names)
            elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
                argument = node.args[0] if node.args else None
                if isinstance(argument, ast.Constant):
                    yield str(argument.value), node.lineno

    @cached_property
    def names(self) -> frozenset[str]:
        """`spool.core.model.Job` for `from spool.core.model import Job`: the name may be a module's or in one."""
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_module(node.value):
                found.add(node.value)  # of a table of plugs
        return frozenset(found)


@cache
def modules() -> tuple[Module, ...]:
    """Return every module of the package."""
    paths = sorted(SOURCE.rglob("*.py"))
    return tuple(Module(path.relative_to(SOURCE).as_posix(), text_of(path), tree_of(path)) for path in paths)


def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(text_of(path))


@cache
def text_of(path: Path) -> str:
    """Return what a file holds, nothing if that is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@cache
def project_files() -> tuple[Path, ...]:
    """Return the files of the project: what git tracks or would, or, without git, all that is not a product."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        folders = ("src", "tests", "docs", "contrib", "examples", "benchmarks")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
        paths += ROOT.glob("*.*")
        return tuple(sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts))
    return tuple(path for name in sorted(filter(None, listed.split("\0"))) if (path := ROOT / name).is_file())


def _called(node: ast.Call) -> str:
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


@cache
def functions() -> tuple[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, ast.AST], ...]:
    """Return every function with the node that it stands in, named LAYER.CLASS.FUNCTION."""
    found = []

    def walk(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*names, child.name)
                if not isinstance(child, ast.ClassDef):
                    found.append((".".join(inner), child, node))
            walk(child, inner)

    for module in modules():
        # Verbs are all called `command`.
        own = module.path.removesuffix(".py").replace("/", ".") if _is_verb(module) else module.layer
        walk(module.tree, (own,))
    return tuple(found)


@cache
def imported_by() -> dict[str, set[str]]:
    """Return the path of each module -> the paths of those that import it, lazily and for types too."""
    paths = {_dotted(module.path): module.path for module in modules()}
    importers: dict[str, set[str]] = {path: set() for path in paths.values()}
    for module in modules():
        for name in module.names:
            target = paths.get(name) or paths.get(name.rpartition(".")[0])
            if target is not None and target != module.path:
                importers[target].add(module.path)
    return importers


def _is_module(text: str) -> bool:
    """Whether a text names a module; `spool.service` is a unit of systemd."""
    return text.startswith("spool.") and (ROOT / "src" / f"{text.replace('.', '/')}.py").exists()


def _dotted(path: str) -> str:
    return ".".join(["spool", *path.removesuffix(".py").split("/")]).removesuffix(".__init__")


def _is_verb(module: Module) -> bool:
    """Whether the module is one or more commands of the command line, which are found by their names."""
    found = [node for node in module.tree.body if isinstance(node, ast.FunctionDef)]
    return module.layer in ("cli", "extras") and any(_is_command(function) for function in found)


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, parent: ast.AST) -> int:
    """Count the parameters of a function, without `self` or `cls`."""
    arguments = function.args
    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in function.decorator_list)
    return count - (isinstance(parent, ast.ClassDef) and not static)


def _is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    calls = [mark.func for mark in function.decorator_list if isinstance(mark, ast.Call)]
    return any(isinstance(call, ast.Attribute) and call.attr in ("command", "option") for call in calls)


def _unlisted(found: Iterable[str], exceptions: dict[str, str]) -> list[str]:
    """Return what breaks a rule and is no exception to it; and the exceptions that break it no more."""
    names = set(found)
    stale = set(exceptions) - names if is_whole() else set()
    return sorted(names - set(exceptions)) + [f"{name} is no exception any more" for name in sorted(stale)]


def test_no_function_is_longer_than_a_screen() -> None:
    """A function has at most 60 lines."""
    assert [name for name, function, _ in functions() if _length(function) > MAX_FUNCTION] == []


def test_no_function_asks_for_more_than_five_things() -> None:
    """A function has at most five parameters, or is listed with the reason.

    A command has one for each option.
    """
    wide = {
        name
        for name, function, parent in functions()
        if _parameters(function, parent) > MAX_PARAMETERS and not _is_command(function)
    }
    assert _unlisted(wide, MANY_PARAMETERS) == []


@WHOLE
def test_a_module_is_shared_or_deep_or_a_plug() -> None:
    """A module has two importers, or 150 lines, or is a plug: a verb, an executor, a listener, of a capability.

    Or it says what a plug has to be, by a protocol: extras can be deleted.
    """
    importers = imported_by()
    named = re.compile(r'"spool\.([a-z_.]+):\w+"')
    plugs = {f"{name.replace('.', '/')}.py" for module in modules() for name in named.findall(module.text)}
    small = {
        module.path
        for module in modules()
        if module.text.count("\n") < MIN_MODULE
        and len(importers[module.path]) < 2
        and not module.path.endswith(("__init__.py", "__main__.py"))
        and not _is_verb(module)
        and module.path not in plugs
        and "(Protocol):" not in module.text
        and not any(path.endswith("/__init__.py") for path in importers[module.path])  # where the plugs are named
    }
    assert _unlisted(small, SMALL_MODULES) == []


def test_a_class_name_exists_once() -> None:
    """Whoever searches for a class finds one."""
    defined = Counter(node.name for module in modules() for node in module.classes)
    exceptions = SAME_NAMES if (SOURCE / "extras" / "functions").exists() else {}
    assert _unlisted([name for name, times in defined.items() if times > 1], exceptions) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """There is no import circle, neither of lazy imports nor of those for types."""
    TopologicalSorter(imported_by()).prepare()  # the CycleError names one


def test_state_is_changed_by_its_owner() -> None:
    """Nobody assigns `a.b.c = …`: whoever has a part calls a method of it."""
    deep = [
        f"{module.path}: {ast.unparse(target)}"
        for module in modules()
        for target in module.assigned
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute)
    ]
    assert deep == []


def test_what_the_state_owns_is_changed_in_the_state() -> None:
    """No module outside `state/` assigns to a field of a job, a run, an array or the table, or to an entry of one."""
    fields = {
        field.target.id
        for module in modules()
        if module.layer == "state"
        for made in module.classes
        for field in made.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    assert {"queued", "held_since_ns", "attempts", "unsettled", "phase"} <= fields
    found = [
        f"{module.layer}: {ast.unparse(part)}"
        for module in modules()
        if module.layer != "state" and any(name.startswith("spool.state.") for name, _ in module.imports)
        for target in module.assigned
        for part in [target.value if isinstance(target, ast.Subscript) else target]
        if isinstance(part, ast.Attribute) and part.attr in fields
        if not (isinstance(part.value, ast.Name) and part.value.id == "self")
    ]
    assert _unlisted(found, OF_OTHERS) == []


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement assigns to, also inside of tuples."""
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
        targets = [node.target]
    elif isinstance(node, ast.With):
        targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
    else:
        return
    for target in targets:
        yield from (part for part in ast.walk(target) if isinstance(getattr(part, "ctx", None), ast.Store | ast.Del))


def test_no_component_takes_its_maker() -> None:
    """What a class makes is given neither the maker (`Part(self)`) nor a parameter of the maker's type."""
    classes = [node for module in modules() for node in module.classes]
    named = defaultdict(list)
    for node in classes:
        named[node.name].append(node)
    wrong = set()
    for maker in classes:
        for call in ast.walk(maker):
            if not isinstance(call, ast.Call) or _called(call) == maker.name:
                continue
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            gives_itself = any(isinstance(value, ast.Name) and value.id == "self" for value in given)
            for made in named[_called(call)]:
                if gives_itself or maker.name in _constructor_types(made):
                    wrong.add(f"{made.name} takes {maker.name}")
    assert _unlisted(wrong, CHILDREN_WITH_MAKERS) == []


def _constructor_types(made: ast.ClassDef) -> Iterator[str]:
    """Yield each name in the annotations of a class's constructor, or of its fields."""
    for node in made.body:
        if isinstance(node, ast.AnnAssign):
            annotations: list[ast.expr | None] = [node.annotation]
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            arguments = node.args
            annotations = [a.annotation for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
        else:
            continue
        for annotation in annotations:
            if annotation is not None:
                yield from (name.id for name in ast.walk(annotation) if isinstance(name, ast.Name))


def test_arrows_go_down_only() -> None:
    """A module imports its own folder and the folders below it, and nothing above, lazily or for types either."""
    wrong = [
        f"{module.path}:{line} imports {name}"
        for module in modules()
        if module.layer
        for name, line in module.imports
        if name.startswith("spool.") and (other := name.split(".")[1]) in LAYERS
        if other not in LAYERS[module.layer] | {module.layer}
    ]
    assert not wrong


def test_no_capability_needs_another() -> None:
    """A folder of extras imports and names no other, so that each can be deleted alone. Modules beside them stay."""
    named = re.compile(r"\bspool\.extras\.([a-z]+)")
    wrong = [
        f"{module.path} names {other}"
        for module in modules()
        if module.layer == "extras" and "/" in module.path.removeprefix("extras/")
        for other in named.findall(module.text)
        if other != module.path.split("/")[1] and not (SOURCE / "extras" / f"{other}.py").exists()
    ]
    assert not wrong


# Capability -> what only its folder speaks of.
WORDS = {
    "amd": r"\bamd\b|rocm",
    "capture": r"(?<!no-)capture",
    "containers": r"podman|docker|apptainer",
    "engines": r"slurm|sbatch|qsub|\bsge\b|grid engine",
    "foreign": r"gflow|\bpbs\b|\blsf\b",
    "functions": r"cloudpickle",
    "here": r"run --here",
    "machine": r"arbiter|machine\.toml",
    "metrics": r"prometheus",
    "notify": r"apprise|sendmail",
    "page": r"status.page|jinja",
    "plot": r"matplotlib|\bsvg\b",
    "simulate": r"simulat|\bswf\b",
    "top": r"textual\b",
}
# Capability -> why modules of the core speak of it all the same, and which.
SPOKEN_OF: dict[str, tuple[str, str]] = {
    "engines": ("variables that a script expects", "query/foresight"),
    "foreign": ("variables that a script expects", "query/foresight"),
    "machine": (
        "whether a machine is shared decides every start, so the gate and its view stay",
        "core/model core/reasons core/scheduler formats/config formats/run_records formats/state dispatcher/leases"
        " dispatcher/loop dispatcher/planner state/run state/world query/explain query/foresight query/shared"
        " query/snapshot",
    ),
    "simulate": (
        "decisions that only a simulation asks for are taken by the same function",
        "core/model core/forecast core/priority core/scheduler",
    ),
}


def test_the_core_speaks_of_no_capability() -> None:
    """No module below the commands has a word that belongs to a capability, or it is listed with the reason."""
    floors = ("core", "formats", "store", "dispatcher", "state", "query", "client")
    found = {
        capability: {
            module.path.removesuffix(".py")
            for module in modules()
            if module.layer in floors and re.search(pattern, module.text, re.IGNORECASE)
        }
        for capability, pattern in WORDS.items()
    }
    listed = {capability: set(SPOKEN_OF.get(capability, ("", ""))[1].split()) for capability in WORDS}
    assert found == listed


@WHOLE
def test_every_folder_is_a_layer() -> None:
    """A folder beside the known ones would stand outside of the arrows."""
    assert {module.layer for module in modules()} - {""} == set(LAYERS)


def test_core_never_touches_the_world() -> None:
    """core/ imports itself, `Struct`, and pure parts of the standard library: no clock, disk, process, environment."""
    wrong = [
        f"{module.path}:{line} imports {name}"
        for module in modules()
        if module.layer == "core"
        for name, line in module.imports
        if name.split(".")[0] not in CORE_STDLIB | {"spool"} and name not in VALUES
    ]
    assert not wrong


def test_core_asks_no_clock_and_no_hidden_state() -> None:
    """In core/ nothing calls now(), today(), open(), or a function of the module random but its class Random."""
    wrong = []
    core = [module for module in modules() if module.layer == "core"]
    for path, node in ((module.path, node) for module in core for node in module.calls):
        name = _called(node)
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        of_random = isinstance(owner, ast.Name) and owner.id == "random"
        of_datetime = isinstance(owner, ast.Name) and owner.id in ("datetime", "date")
        if (
            (of_random and name != "Random")
            or (of_datetime and name in ("now", "today", "utcnow"))
            or (owner is None and name in ("open", "input", "print", "exec", "eval"))
        ):
            wrong.append(f"{path}:{node.lineno} calls {ast.unparse(node.func)}")
    assert not wrong


def test_each_third_party_name_is_imported_in_one_place() -> None:
    """Click is in cli/, what reads and writes by msgspec in formats/; each exception has its reason and is needed."""
    wrong, used = [], set()
    for module in modules():
        for name, line in module.imports:
            top = name.split(".")[0]
            if top == "spool" or top in sys.stdlib_module_names or name in VALUES:
                continue
            home = HOMES.get(top)
            if home is not None and (module.path == home or module.path.startswith(home + "/")):
                continue
            if module.layer == "extras" and home in ("cli", "formats"):
                continue  # it has verbs and files of its own
            if (module.path, top) in ABROAD:
                used.add((module.path, top))
                continue
            wrong.append(f"{module.path}:{line} imports {top}; its place is {home}")
    assert not wrong
    assert {(path, name) for path, name in ABROAD if (SOURCE / path).exists()} == used  # extras can be deleted


def _of_a_library(name: str) -> bool:
    top = name.split(".")[0]
    return top in HOMES or any(top == package for _, package in ABROAD)


def _library_names(module: Module) -> set[str]:
    """Return the names under which a module has something of a third-party package."""
    return {
        alias.asname or alias.name.split(".")[0]
        for node in module.nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if _of_a_library(getattr(node, "module", None) or alias.name)
    }


def test_third_party_packages_are_used_by_their_public_doors() -> None:
    """Nothing private of a package is imported or read, nothing in it is assigned to, and each module is documented."""
    wrong = set()
    for module in modules():
        doors = {name for name, _ in module.imports if name.split(".")[0] in DOORS}
        wrong |= {f"{module.path} imports {name}" for name in doors if name not in DOORS[name.split(".")[0]]}
        theirs = _library_names(module)
        wrong |= {f"{module.path} imports {name}" for name in theirs if _is_private(name)}
        targets = [target for target in module.assigned if isinstance(target, ast.Attribute)]
        wrong |= {f"{module.path} sets {ast.unparse(part)}" for part in targets if _root(part) in theirs}
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and _root(node) in theirs:
                wrong.add(f"{module.path} reads {ast.unparse(node)}")
    assert sorted(wrong) == []


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _root(node: ast.expr) -> str:
    """Return the name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_no_class_takes_over_a_private_part_of_a_library() -> None:
    """What a class that inherits from a package calls `_name`, no class of the package calls so too."""
    wrong = []
    for module in modules():
        theirs = _library_names(module)
        for node in module.tree.body:
            if not isinstance(node, ast.ClassDef) or not any(_root(_plain(base)) in theirs for base in node.bases):
                continue
            made = getattr(import_module("spool." + module.path.removesuffix(".py").replace("/", ".")), node.name)
            bases = [base for base in made.__mro__ if _of_a_library(base.__module__) or base is threading.Thread]
            private = {name for base in bases for name in _private_names(base)}
            ours = set(_PRIVATE_NAME.findall(ast.unparse(node)))
            wrong += [f"{module.path}: {node.name} has its own {name}" for name in sorted(ours & private)]
    assert not wrong


_PRIVATE_NAME = re.compile(r"(?:\bself\.|\bdef )(_[a-z]\w*)")


def _private_names(base: type) -> set[str]:
    try:
        return set(_PRIVATE_NAME.findall(inspect.getsource(base)))
    except (OSError, TypeError):  # it was compiled
        return {name for name in vars(base) if _is_private(name)}


def _plain(base: ast.expr) -> ast.expr:
    return base.value if isinstance(base, ast.Subscript) else base


@WHOLE
def test_every_dependency_is_used_and_every_package_used_is_a_dependency() -> None:
    """What pyproject.toml asks users to install is what the source imports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules_of = {"nvidia-ml-py": "pynvml", "tomli-w": "tomli_w"}
    declared = {re.split(r"[<>=~!\[ ;]", line)[0] for line in project["dependencies"]}
    assert {modules_of.get(name, name) for name in declared} == set(HOMES)
    imported = {name.split(".")[0] for module in modules() for name, _ in module.imports}
    assert set(HOMES) - imported == set()


def test_no_folder_grows_unnoticed() -> None:
    """Each folder has at most the lines of its budget, and not many fewer, so that none comes back unseen."""
    lines: Counter[str] = Counter()
    for module in modules():
        folders = module.path.split("/")[:-1]
        lines["/".join(folders[: 2 if folders[:1] == ["extras"] else 1])] += module.text.count("\n")
    over = {folder: number for folder, number in lines.items() if number > BUDGET.get(folder, 0)}
    assert over == {}, "more lines than BUDGET has"
    loose = {folder: number for folder, number in lines.items() if number < BUDGET[folder] - SLACK}
    assert loose == {}, "take the numbers of BUDGET down to these"


def test_no_module_hides_more_than_one_decision() -> None:
    """A module of more than 800 lines probably holds two things that change for different reasons."""
    assert {module.path: n for module in modules() if (n := module.text.count("\n")) > MAX_LINES} == {}


def test_values_are_structs() -> None:
    """No module imports `dataclasses`: it takes longer than all the rest of a short command, and its classes too."""
    assert [module.path for module in modules() for name, _ in module.imports if name == "dataclasses"] == []


_WAYS = ("print", "click.echo", "sys.stdout.write", "sys.stderr.write", "click.secho")


def test_the_commands_print_through_two_functions() -> None:
    """In verbs only `say` and `tell`, which escape controls, print; the bytes of a log go out as they are.

    What is below returns values, logs, or says which file it prints to.
    """
    wrong = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        if module.path not in SAYS
        for node in module.calls
        for way in [ast.unparse(node.func)]
        if (way == "print" and "file" not in {keyword.arg for keyword in node.keywords})
        or (module.layer in ("cli", "extras") and way in _WAYS)
    ]
    assert not wrong


def test_only_the_store_writes_the_spool() -> None:
    """Below the dispatcher, the calls that change a directory's names stand in store/disk.py and nowhere else."""
    below = ("core", "formats", "store", "machine", "state", "client", "query", "doctor")
    changes = {"rename", "replace", "link", "symlink", "unlink", "remove", "rmdir", "rmtree"}
    wrong = [
        f"{module.path}:{node.lineno} calls {ast.unparse(node.func)}"
        for module in modules()
        if module.layer in below and module.path not in WRITES
        for node in module.calls
        if isinstance(node.func, ast.Attribute) and node.func.attr in changes
        if isinstance(node.func.value, ast.Name) and node.func.value.id in ("os", "shutil")
    ]
    assert not wrong


def test_query_only_reads() -> None:
    """query/ takes nothing that writes or starts a process: of a module that does, only the names listed with why."""

    def is_in(name: str, modules: set[str]) -> bool:
        return name in modules or name.rpartition(".")[0] in modules

    acting = {_dotted(module.path) for module in modules() if any(is_in(name, ACTS) for name in module.names)}
    acting |= {*ACTS, "spool.store.disk"}
    taken = {name for module in modules() if module.layer == "query" for name in module.names}
    assert _unlisted((name for name in taken if is_in(name, acting)), LOOKS) == []
    changes = {"chmod", "chown", "kill", "killpg", "link", "makedirs", "mkdir", "truncate", "utime", "write"}
    wrong = [
        f"{module.path}:{node.lineno} calls {ast.unparse(node.func)}"
        for module in modules()
        if module.layer == "query"
        for node in module.calls
        if (_called(node) in changes and ast.unparse(node.func).startswith("os."))
        or (_called(node) == "open" and ast.unparse(node.func) == "open" and not _reads(node))
    ]
    assert not wrong


def _reads(call: ast.Call) -> bool:
    """Whether a call of `open` states no mode that writes."""
    modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    return all(isinstance(mode, ast.Constant) and not set(str(mode.value)) & set("wax+") for mode in modes)


def test_tests_of_core_need_no_disk() -> None:
    """No test in tests/core asks for a temporary directory or a spool: values in, values out."""
    fixtures = {"tmp_path", "tmp_path_factory", "tmpdir", "spool_root", "monkeypatch"}
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sorted((ROOT / "tests" / "core").rglob("*.py"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and {argument.arg for argument in node.args.args} & fixtures
    ]
    assert not wrong


def test_no_file_names_a_machine_or_a_registry() -> None:
    """The project holds no path of the machine that it was written on and no package registry's host."""
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in project_files()
        if FORBIDDEN.search(text_of(path))
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert not wrong


def _pages() -> list[Path]:
    return [path for path in project_files() if path.suffix == ".md"]


def test_the_end_of_a_run_states_each_field_of_its_result() -> None:
    """Each field of a result is stated where results are made: one left out would be empty in every list."""
    makers = [module for module in modules() if module.path in ("dispatcher/finalizer.py", "core/lifecycle.py")]
    calls = [node for module in makers for node in module.calls]
    stated = {word.arg for call in calls if _called(call) in ("Result", "replace") for word in call.keywords}
    assert set(Result.__struct_fields__) - stated == {"recorded_at_ns"}  # the history adds it to a late line


def test_every_key_of_a_file_is_used() -> None:
    """A field of a job or of the configuration that nothing reads would be a key that does nothing."""
    read = {
        node.attr
        for module in modules()
        if module.layer != "testing"
        for node in module.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    kinds = (Spec, Policy, Config, GpuConfig, RetentionPolicy)
    assert [f"{kind.__name__}.{name}" for kind in kinds for name in kind.__struct_fields__ if name not in read] == []


def test_every_link_between_pages_leads_somewhere() -> None:
    """Each relative link of a Markdown page names a file or folder of the project."""
    wrong = []
    for page in _pages():
        text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path = target.split("#")[0]
            if path and "://" not in path and not path.startswith("mailto:") and not (page.parent / path).exists():
                wrong.append(f"{page.relative_to(ROOT)} -> {target}")
    assert not wrong


@WHOLE
def test_every_file_that_a_page_names_exists() -> None:
    """A path of the project in backticks, on any page, is one that is there."""
    path = re.compile(r"`((?:src|docs|tests|examples|contrib|benchmarks|\.ci)/[\w./-]*\w/?)`")
    wrong = [
        f"{page.relative_to(ROOT)} names {name}"
        for page in _pages()
        for name in path.findall(text_of(page))
        if not (ROOT / name).exists()
    ]
    assert not wrong


def test_every_page_that_the_source_cites_exists() -> None:
    """A comment that says docs/FORMAT.md sends its reader to a page that is there."""
    if not (ROOT / "docs").is_dir():
        pytest.skip("this copy of the project is without its docs/")
    cited = {
        (match, path.relative_to(ROOT).as_posix())
        for path in project_files()
        if path.suffix in (".py", ".sh", ".toml", ".service", ".c")
        for match in re.findall(r"\bdocs/[A-Z]+\.md", text_of(path))
    }
    assert sorted((page, by) for page, by in cited if not (ROOT / page).exists()) == []


# A module of another user in the directory where a program happens to run would run as whoever started it.
STARTED_ELSEWHERE: dict[str, str] = {
    "src/spool/cli/demo.py": "the commands of the demonstration, in a directory of its own"
}


def _command(node: ast.AST) -> list[str]:
    """Return the words of a command that begins with an interpreter, as far as the source says them; else none."""
    words = [
        each.value if isinstance(each, ast.Constant) and isinstance(each.value, str) else f"<{ast.unparse(each)}>"
        for each in getattr(node, "elts", ())
    ]
    is_python = words and words[0].strip("<*>") in ("sys.executable", "self.python", "python") and "<" in words[0]
    has_option = any(word.startswith("-") for word in words[1:3])
    runs_module = "-m" in words[1:4] and not words[0].startswith("-")
    return words if len(words) > 1 and (is_python or runs_module) and (has_option or not is_python) else []


def test_every_python_that_is_started_imports_nothing_from_the_current_directory() -> None:
    """Each command that begins with an interpreter says -P or -I, in spool and in its capabilities."""
    found: dict[str, list[list[str]]] = defaultdict(list)
    for path in sorted([*SOURCE.rglob("*.py"), *(ROOT / "contrib").glob("**/src/**/*.py")]):
        if "testing" not in path.parts:
            found[str(path.relative_to(ROOT))] += filter(None, map(_command, ast.walk(tree_of(path))))
    bare = {path: words for path, all_of in found.items() for words in all_of if not {"-P", "-I"} & set(words[:4])}
    assert bare.keys() == STARTED_ELSEWHERE.keys(), bare
    assert sum(map(len, found.values())) > 8
