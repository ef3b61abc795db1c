"""The command: measure what was asked for, engine after engine within each round, and show one table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import Any

from spoolbench import table
from spoolbench.accounting import accounting, collecting
from spoolbench.calls import calls
from spoolbench.depth import depth
from spoolbench.engines import load, spool_command, unusable, variants
from spoolbench.figures import FIGURES, SMOKE, Samples, Size
from spoolbench.floor import floors
from spoolbench.many import many
from spoolbench.planner import planner
from spoolbench.soak import soak
from spoolbench.tools import MissingError, Scratch
from spoolbench.turns import turns

_ALONE = {"many": many, "depth": depth, "accounting": accounting, "gc": collecting, "soak": soak, "turns": turns}
"""Of spool, in a spool of their own."""
_OF_ENGINES = FIGURES | {"calls": calls}
GROUPS = (*_OF_ENGINES, *_ALONE, "planner")
_ONCE = {"idle", "calls"}  # of these one round says enough


def main(arguments: list[str]) -> int:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    size = replace(SMOKE if options.smoke else Size(), **dict(options.size))
    groups = options.only or GROUPS
    results: dict[str, Samples] = {}
    before = table.machine()
    scratch = None
    failed = 0
    try:
        scratch = Scratch(options.dir)
        command = spool_command(options.spool)
        engines = load(options.peers, options.peer, scratch, command)
        more, failed = _usable([*variants(scratch, command), *floors(scratch)], groups)
        engines[1:1] = more
        results = {engine.name: {} for engine in engines}
        for group in groups:
            if group in _OF_ENGINES:
                rounds = 1 if group in _ONCE else size.rounds
                for _ in range(rounds):
                    for engine in engines:
                        if group in _groups(engine):
                            failed += not _measure(results, group, _OF_ENGINES[group], engine, scratch, size)
            elif group in _ALONE:
                failed += not _measure(results, group, _ALONE[group], engines[0], scratch, size)
            else:
                print(group, file=sys.stderr, flush=True)
                _add(results["spool"], planner(size))
    except MissingError as missing:
        print(f"cannot measure: {missing}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        failed += 1
    finally:
        if scratch is not None:
            scratch.close()
    about = {"before": before, "after": table.machine(), "size": {f.name: getattr(size, f.name) for f in fields(size)}}
    print(table.markdown(results) if options.markdown else table.render(results))
    loads = f"load {before['load']} before and {about['after']['load']} after"
    print(f"\nmedian (min..max); {before['cores']} cores, Python {before['python']}, {loads}")
    if options.smoke:
        print("a smoke run: the counts are not those of the titles, and the figures mean nothing")
    print(f"kept in {table.keep(results, about)}")
    return 1 if failed else 0


def _groups(engine: Any) -> frozenset[str]:
    """Return what is measured of *engine*. The calls of peers are not counted."""
    return getattr(engine, "groups", frozenset(_OF_ENGINES if getattr(engine, "ours", False) else FIGURES))


def _usable(engines: Sequence[Any], groups: Collection[str]) -> tuple[list[Any], int]:
    """Return those of our own *engines* that *groups* measure, and how many others of them do not work here."""
    wanted = [engine for engine in engines if not _groups(engine).isdisjoint(groups)]
    problems = {engine.name: unusable(engine) for engine in wanted}
    for name, problem in problems.items():
        if problem is not None:
            print(f"left out {name}: {problem}", file=sys.stderr)
    return [engine for engine in wanted if problems[engine.name] is None], sum(map(bool, problems.values()))


def _measure(results: dict[str, Samples], group: str, figure: Any, engine: Any, scratch: Scratch, size: Size) -> bool:
    print(group, engine.name, file=sys.stderr, flush=True)
    try:
        _add(results[engine.name], figure(engine, scratch, size))
    except (TimeoutError, RuntimeError, OSError) as error:
        print(f"{group} {engine.name}: {error}", file=sys.stderr)
        return not getattr(engine, "ours", False)  # a peer that cannot is no failure of ours
    return True


def _add(results: Samples, more: Samples) -> None:
    for key, values in more.items():
        results.setdefault(key, []).extend(values)


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    kinds = {field.name: type(getattr(Size(), field.name)) for field in fields(Size)}
    if name not in kinds:
        raise argparse.ArgumentTypeError(f"there is no {name}; there are {', '.join(kinds)}")
    return name, kinds[name](value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/run", description="Measure spool, and its peers beside it.")
    parser.add_argument("--smoke", action="store_true", help="tiny counts: whether it works, in seconds")
    parser.add_argument("--only", action="append", choices=GROUPS, metavar="NAME", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--peers", metavar="DIR", help="a directory with peers.py and perflib.py: measure them too")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME", help="of the peers, only this one")
    parser.add_argument("--spool", metavar="COMMAND", help="how spool is called; default: the one of this Python")
    parser.add_argument("--dir", metavar="DIR", help="where spools are made; default: the temporary directory")
    parser.add_argument("--size", action="append", default=[], type=_setting, metavar="KEY=N", help="another count")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page")
    return parser
