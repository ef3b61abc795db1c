"""`spool doctor`: diagnose problems."""

from __future__ import annotations

import sys

import click

from spool.cli import render
from spool.cli.group import Verb, json_option
from spool.doctor import Finding, Level, examine
from spool.store.ownership import check_owner

_INDENT = " " * 6
_STYLES = {Level.OK: "32", Level.WARN: "33", Level.FAIL: "31;1"}


@click.command(cls=Verb)
@click.option("--fix", is_flag=True, help="Fix what can be fixed safely.")
@click.option("-q", "--quiet", is_flag=True, help="Show only problems.")
@json_option
@click.pass_obj
def command(root: str, /, fix: bool, quiet: bool, as_json: bool) -> int:
    """Diagnose problems with this spool and this machine.

    Prints one line per check, with what to do. The exit code is 1 if something must be fixed.
    """
    if fix:
        check_owner(root)
    findings: list[Finding] = []
    for finding in examine(root, fix=fix):
        findings.append(finding)
        if not as_json and not (quiet and finding.level is Level.OK):
            _print(finding)
    if as_json:
        render.as_json({"spool": root, "checks": findings})
    return int(any(finding.level is Level.FAIL and not finding.fixed for finding in findings))


def _print(finding: Finding) -> None:
    word = finding.level.value.ljust(4)
    if render.lively(sys.stdout):
        word = f"\x1b[{_STYLES[finding.level]}m{word}\x1b[0m"
    line = f"{finding.check}: {finding.text}"
    if finding.fixed:
        line += " (fixed)"
    elif finding.remedy:
        line += f" -> {finding.remedy}"
    for part in render.beside(line, len(_INDENT)):
        render.say(part, drawn=f"{word}  ", at_once=True)
        word = _INDENT[2:]
