"""The command `spool simulate`, and what it prints."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import click
from msgspec import Struct
from msgspec.structs import replace

from spool.cli import render
from spool.cli.group import Verb, json_option, opened, value_of
from spool.cli.publicjson import plain
from spool.cli.render import tell
from spool.client.submit import is_spool
from spool.core.errors import UsageError, cannot
from spool.core.model import SECOND_NS, Machine, Policy, Request
from spool.core.reasons import count_of
from spool.core.units import parse_size, show_size
from spool.extras.simulate.simulation import (
    Figures,
    Outcome,
    SimulatedJob,
    SimulatedPolicy,
    WaitSummary,
    figures,
    grouped,
    simulate,
)
from spool.extras.simulate.workload import NO_LIMIT_BYTES, fitting, imagined_gpus, imagined_machine, of_file, of_history
from spool.formats.config import Config
from spool.store.edited import Settings
from spool.store.spool import Spool

_TELL_EVERY = 100  # jobs between two steps of the progress bar
_FEW = 5  # users of the table
_SPARED = ("longest wait", "CPU", "median wait")  # columns left out on a narrow terminal, the last first
_Told = tuple[str, Callable[[WaitSummary], str]]
_WAITS: tuple[_Told, ...] = (
    ("mean wait", lambda each: render.duration(each.mean_wait_ns)),
    ("median wait", lambda each: render.duration(each.median_wait_ns)),
    ("99% wait", lambda each: render.duration(each.wait_99_ns)),
    ("longest wait", lambda each: render.duration(each.longest_wait_ns)),
    ("slowdown", lambda each: render.ratio(each.mean_bounded_slowdown)),
    ("CPU", lambda each: render.percent(each.utilisation)),
    ("GPU", lambda each: render.percent(each.gpu_utilisation)),
)


class PolicyResult(Struct, frozen=True):
    """One policy's schedule. `seconds` is the duration of the simulation.

    Users are in the order of their share of the machine, and sizes from small to large.
    """

    policy: SimulatedPolicy
    figures: Figures
    sizes: Mapping[str, WaitSummary]
    users: Mapping[str, WaitSummary]
    seconds: float


@click.command(cls=Verb)
@click.argument("trace", required=False, type=click.Path())
@click.option(
    "--cpus", type=click.IntRange(1), metavar="N", help="CPUs. Default: those of the trace, or of this machine."
)
@click.option("--memory", metavar="SIZE", help="Memory. Default for a trace: not counted.")
@click.option("--gpus", default="0", metavar="N", help="GPUs, such as 8, or 4x4090:24G,2xH100:80G. Default: none.")
@click.option("--policy", default="fifo,easy,spool", show_default=True, metavar="NAME,...", help="Policies to compare.")
@json_option
@click.pass_obj
def command(root: str, /, trace: str | None, as_json: bool, policy: str, **size: Any) -> int:
    """Simulate a workload on an imaginary machine and compare policies.

    TRACE is a file in the Standard Workload Format (.swf, .swf.gz), as in the Parallel Workloads Archive, or a CSV with
    a header (submit, run_time, cpus, gpus, gpu_type, gpu_min_memory, memory, time_limit, user, name); without it, the
    runs of this spool's own history come again. The real planner decides, with the configuration of the spool; nothing
    is started. The policies:

      fifo         first come, first served, no overtaking
      skip         like fifo, but a job that fits may overtake
      easy         like fifo, with backfilling that does not delay the first
      sjf          shortest job first, with the same backfilling
      multifactor  by fair share and age as in Slurm, with the same backfilling
      lxf          largest expansion factor first: the longest wait for its size
      spool        as this spool is configured

    SLOWDOWN is the mean bounded slowdown: (wait + run time) / run time, counting run times below 10s as 10s. CPU is
    the share of CPUs in use from the first submission to the last end. 99% WAIT is the wait that 99 of 100 jobs did
    not exceed.

      spool simulate --gpus 8
      spool simulate lublin_256.swf --cpus 128 --policy easy,spool
    """
    disciplines = _disciplines(policy)
    memory_bytes = value_of("--memory", size["memory"], parse_size) if size["memory"] is not None else None
    spool = opened(root) if trace is None else Spool(root) if is_spool(root) else None
    config = Settings(spool.root).config if spool is not None else Config()
    workload = of_file(trace) if trace is not None else of_history(opened(root))
    for warning in workload.warnings:
        tell(warning)
    gpus = value_of("--gpus", size["gpus"], lambda text: imagined_gpus(text, workload.coming))
    machine = imagined_machine(workload, size["cpus"], memory_bytes, gpus)
    machine = replace(machine, resources=config.resources)
    # gpu.use of the real machine does not apply to imaginary GPUs.
    rules = replace(config.policy, gpu_use=None)
    coming = fitting(workload, machine, rules)
    if not coming:
        raise UsageError(cannot("simulate", workload.source, f"none of its jobs fits {_in_words(machine)}"))
    done = []
    for each in disciplines:
        with nullcontext() if as_json else render.progress(f"simulating {each.value}") as told:
            done.append(_simulated(coming, machine, rules, each, told))
    about = {
        "source": workload.source,
        "jobs": len(coming),
        "never_fit": len(workload.coming) - len(coming),
        "incomplete": workload.incomplete,
        "limits_stated": sum(each.spec.time_limit_ns is not None for each in coming),
    }
    if as_json:
        _print_json(about, machine, done)
    else:
        _print(about, machine, done)
    return 0


def _disciplines(text: str) -> list[SimulatedPolicy]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    known = {each.value: each for each in SimulatedPolicy}
    there_are = f"the policies are {', '.join(known)}"
    if wrong := [word for word in words if word not in known]:
        raise UsageError(cannot("simulate", f"policy {wrong[0]!r}", there_are))
    if not words:
        raise UsageError(f"cannot simulate: --policy is empty; {there_are}")
    return list(dict.fromkeys(known[word] for word in words))


def _simulated(
    coming: Sequence[SimulatedJob],
    machine: Machine,
    policy: Policy,
    discipline: SimulatedPolicy,
    told: Callable[[int, int], None] | None,
) -> PolicyResult:
    """Return the schedule of one policy. *told* is called now and then with the number of finished jobs."""
    begun = time.perf_counter()
    outcomes: list[Outcome] = []
    for outcome in simulate(coming, machine, policy, discipline):
        outcomes.append(outcome)
        if told is not None and len(outcomes) % _TELL_EVERY == 0:
            told(len(outcomes), len(coming))
    seconds = time.perf_counter() - begun
    cpus, gpus = machine.cpus, len(machine.gpus)
    sizes = grouped(outcomes, lambda each: _size(each.job.spec.request), cpus, gpus)
    users = grouped(outcomes, lambda each: each.job.user, cpus, gpus)

    def part(user: str) -> float:
        return max(users[user].utilisation or 0.0, users[user].gpu_utilisation or 0.0)

    return PolicyResult(
        discipline,
        figures(outcomes, cpus, gpus),
        sizes={_size_in_words(*size): found for size, found in sorted(sizes.items())},
        users={user: users[user] for user in sorted(users, key=lambda user: (-part(user), user))},
        seconds=seconds,
    )


def _size(request: Request) -> tuple[bool, int, str]:
    """Return the size class of a request: whether it is by GPUs, its largest request, and the kind of GPU."""
    if not request.gpus:
        return False, 1 << -(-(max(request.cpus, 1) - 1).bit_length() // 2) * 2, ""
    least = request.gpu_min_memory_bytes
    kind = (" or ".join(request.gpu_types), "" if least is None else f"of {show_size(least)}")
    return True, 1 << (request.gpus - 1).bit_length(), " ".join(filter(None, kind))


def _size_in_words(of_gpus: bool, most: int, gpu_kind: str) -> str:
    least = most // (2 if of_gpus else 4) + 1
    unit = "GPU" if of_gpus else "CPU"
    number = f"{least}-{most} {unit}s" if least < most else count_of(most, unit)
    return f"{number}, {gpu_kind}" if gpu_kind else number


def _in_words(machine: Machine) -> str:
    parts = [count_of(machine.cpus, "CPU")]
    if machine.memory_bytes < NO_LIMIT_BYTES:
        parts.append(render.size(machine.memory_bytes) + " of memory")
    if machine.gpus:
        kinds = Counter(gpu.name for gpu in machine.gpus)
        types = f" ({', '.join(f'{number} {name}' for name, number in kinds.items())})" if len(kinds) > 1 else ""
        parts.append(count_of(len(machine.gpus), "GPU") + types)
    return ", ".join(parts)


def _print(about: Mapping[str, Any], machine: Machine, done: Sequence[PolicyResult]) -> None:
    why = {"never_fit": "never fit", "incomplete": "did not run"}
    left = [f"{about[key]} {words}" for key, words in why.items() if about[key]]
    left_out = f" (left out: {', '.join(left)})" if left else ""
    render.say(f"{about['source']}: {count_of(about['jobs'], 'job')} on {_in_words(machine)}{left_out}")
    render.say(f"time limits: {about['limits_stated']} of {about['jobs']} jobs state one")
    render.say()
    waits = [each for each in _WAITS if each[0] != "GPU" or machine.gpus]
    columns = [render.Column("POLICY"), *(render.Column(each.policy, right=True) for each in done)]
    rows = [["jobs", *(str(each.figures.jobs) for each in done)]]
    rows += [[name, *(text(each.figures) for each in done)] for name, text in waits]
    rows.append(["makespan", *(render.duration(each.figures.makespan_ns) for each in done)])
    rows.append(["took", *(render.duration(int(each.seconds * SECOND_NS)) for each in done)])
    render.table(columns, rows)
    for each in done:
        if each.figures.preemptions:
            times = count_of(each.figures.preemptions, "preemption")
            render.say(f"{each.policy}: {times}, {render.percent(each.figures.repeated)} of the work done again")
        if each.figures.left:
            render.say(f"{each.policy}: {count_of(each.figures.left, 'job')} never started")
    _groups("SIZE", {each.policy: each.sizes for each in done}, done[0].sizes, waits)
    users = list(done[0].users)
    _groups("USER", {each.policy: each.users for each in done}, users[:_FEW], waits)
    if len(users) > _FEW:
        render.say(f"{len(users) - _FEW} more users: --json has all")


def _groups(
    title: str,
    found: Mapping[SimulatedPolicy, Mapping[str, WaitSummary]],
    names: Iterable[str],
    told: Sequence[_Told],
) -> None:
    """Print a table with a row for each group under each policy, with as many figures as fit the terminal."""
    columns = [render.Column(title, cut="middle"), render.Column("JOBS", right=True), render.Column("POLICY")]
    for name, _ in told:
        drop = _SPARED.index(name) + 1 if name in _SPARED else 0
        columns.append(render.Column(name.removesuffix(" wait").upper(), right=True, drop=drop))
    rows = []
    for name in names:
        for at, (policy, groups) in enumerate(found.items()):
            first = [name, str(groups[name].jobs)] if at == 0 else ["", ""]
            rows.append([*first, policy.value, *(text(groups[name]) for _, text in told)])
    render.say()
    render.table(columns, rows)


def _print_json(about: Mapping[str, Any], machine: Machine, done: Sequence[PolicyResult]) -> None:
    memory = machine.memory_bytes if machine.memory_bytes < NO_LIMIT_BYTES else None

    def listed(word: str, groups: Mapping[str, WaitSummary]) -> list[dict[str, object]]:
        return [{word: name, **plain(summary)} for name, summary in groups.items()]

    render.as_json(
        {
            **about,
            "machine": {"cpus": machine.cpus, "memory_bytes": memory, "gpus": len(machine.gpus)},
            "policies": [
                {
                    "policy": each.policy,
                    **plain(each.figures),
                    "seconds": round(each.seconds, 3),
                    "sizes": listed("size", each.sizes),
                    "users": listed("user", each.users),
                }
                for each in done
            ],
        }
    )
