"""`spool doctor`: find out what is wrong."""

from __future__ import annotations

import sys

import click

from spool.cli import render
from spool.cli.common import json_option
from spool.cli.group import Verb
from spool.query.doctor import Finding, Level, examine

_STYLES = {Level.OK: "32", Level.WARN: "33", Level.FAIL: "31;1"}


@click.command(cls=Verb)
@click.option("--fix", is_flag=True, help="Put right what can be put right without a risk.")
@click.option("-q", "--quiet", is_flag=True, help="Only what is wrong.")
@json_option
@click.pass_obj
def command(root: str, fix: bool, quiet: bool, as_json: bool) -> int:
    """Find out what is wrong with this spool and this machine.

    One line for each check, with what to do. Exits with 1 if something must be mended.
    """
    findings: list[Finding] = []
    for finding in examine(root, fix=fix):
        findings.append(finding)
        if not as_json and not (quiet and finding.level is Level.OK):
            _print(finding)
    if as_json:
        render.as_json({"version": 1, "spool": root, "checks": findings})
    return int(any(finding.level is Level.FAIL and not finding.fixed for finding in findings))


def _print(finding: Finding) -> None:
    word = finding.level.value.ljust(4)
    if sys.stdout.isatty():
        word = f"\x1b[{_STYLES[finding.level]}m{word}\x1b[0m"
    line = f"  {finding.check}: {finding.text}"
    if finding.fixed:
        line += " (mended)"
    elif finding.remedy:
        line += f" -> {finding.remedy}"
    render.say(line, drawn=word, at_once=True)
