"""The manual pages and the pages of reference, generated from the help of the verbs and the tables of keys.

`python -m spool.cli.manpages --write` writes the manual pages to docs/man of the current checkout, where the wheel
takes them from, and the pages docs/COMMANDS.md and docs/KEYS.md of the site. Run it after a change of a help text or of
a key. `python -m spool.cli.manpages submit` prints one; users have `spool man submit`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

import click

from spool.cli import group, main
from spool.cli.group import SECTIONS, VERBS, by_section
from spool.core import errors
from spool.formats import schema
from spool.version import __version__

_FILES = {
    "job": "the keys of a job file",
    "config": "the keys of a spool's configuration",
    "reservation": "the keys of a reservation",
    "machine": "the keys of the configuration of a shared machine",
}
_PLACES = {
    "job": "queued/NAME.toml, held/NAME.toml, running/NAME.toml, done/NAME.toml in the spool",
    "config": "config.toml in the spool",
    "reservation": "reservations/NAME.toml in the spool",
    "machine": "/etc/spool/machine.toml; machine.toml in the directory of `spool machine serve DIR`",
}

_VERBS = {
    "job": ("submit", "check", "edit"),
    "config": ("check", "doctor"),
    "reservation": ("reserve", "check"),
    "machine": ("machine", "check"),
}

_EXAMPLES = {
    "job": """command = ["python", "train.py", "--epochs", "40"]
workdir = "~/project"
gpus = 1
memory = "16G"
time_limit = "4h"
signal = "USR1@60s"

[retry]
max = 2
on = ["failed", "timeout"]""",
    "config": """max_running = 8
memory_reserve = "10%"

[defaults]
time_limit = "1d"

[quotas.default_user]
max_running_gpus = 2""",
    "reservation": '''gpus = 2
user = "anna"
start = 2026-01-31T09:00:00+01:00
duration = "4h"''',
    "machine": '''users = ["@lab"]

[quotas.default_user]
max_running_gpus = 2

[[reservations]]
name = "course"
user = "nobody"
gpus = 1
start = 2026-01-31T09:00:00+01:00
duration = "4h"''',
}

_WIDTH = 100  # cells of a line in a generated page


def pages() -> dict[str, str]:
    """Return the text of each page by its path below docs/man."""
    found = {"man1/spool.1": _program()}
    for verb in VERBS:
        found[f"man1/spool-{verb}.1"] = _verb(verb)
    for kind in _FILES:
        found[f"man5/spool-{kind}.5"] = _file(kind)
    return found


def page(topic: str, section: str = "") -> str | None:
    """Return the page of a topic, such as `submit`, `spool-submit` or `job`, of any section or this one; else None."""
    name = topic.removeprefix("spool-")
    for path, text in pages().items():
        folder, _, file = path.partition("/")
        if folder.endswith(section) and file.removeprefix("spool-").rpartition(".")[0] == name:
            return text
    return None


def topics() -> list[str]:
    """Return the topics that have a page."""
    return ["spool", *VERBS, *(kind for kind in _FILES if kind not in VERBS)]


def references() -> dict[str, str]:
    """Return the text of each generated page of the documentation by its path below docs."""
    return {"COMMANDS.md": _commands(), "KEYS.md": _keys()}


def _commands() -> str:
    lines = [
        "# Commands",
        "",
        "What `spool COMMAND --help` prints. The manual pages say the same: `spool man COMMAND`.",
    ]
    lines += ["", "| command | |", "|---|---|"]
    lines += [f"| [{verb}](#spool-{verb}) | {about} |" for _, verbs in SECTIONS for verb, about in verbs.items()]
    parent = _of_program()
    for verb in VERBS:
        command = group.spool.get_command(parent, verb)
        assert command is not None
        ctx = _of_help(command, verb, parent)
        parts = list(command.commands.items()) if isinstance(command, click.Group) else []
        helps = [command.get_help(ctx), *(part.get_help(_of_help(part, name, ctx)) for name, part in parts)]
        lines += ["", f"## spool {verb}", "", "```text", "\n\n\n".join(helps), "```"]
    return _text(lines)


def _of_help(command: click.Command, name: str, parent: click.Context) -> click.Context:
    settings = {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    return click.Context(command, info_name=name, parent=parent, **settings)


def _keys() -> str:
    lines = ["# Keys", "", "The keys of each kind of file. [FORMAT.md](FORMAT.md) says what they mean together."]
    for kind, about in _FILES.items():
        lines += ["", f"## {_PLACES[kind].partition(',')[0].partition(' in ')[0]}: {about}", ""]
        lines += [f"Manual page: `spool man 5 {kind}`.", "", schema.table(kind).rstrip()]
    return _text(lines)


def _program() -> str:
    ctx = _of_program()
    lines = [*_head("spool", 1, "a job scheduler for one machine; jobs are files"), *_synopsis(ctx)]
    lines += [".SH DESCRIPTION", *_prose(group.spool.help or ""), ".SH OPTIONS", *_options(ctx)]
    for title, verbs in SECTIONS:
        lines += [f".SH {_plain(title.upper())}"]
        for verb, about in verbs.items():
            lines += [".TP", f".BR spool\\-{verb} (1)", _plain(about)]
    lines += [".SH FILES", *_prose(group.spool.epilog or "")]
    lines += [".SH ENVIRONMENT", ".TP", ".B SPOOL_DIR", "The spool to use. Default:", ".IR \\(ti/.spool ."]
    lines += [".SH EXIT STATUS", *_exit_codes()]
    return _text([*lines, ".SH SEE ALSO", *_see([f"spool-{kind}(5)" for kind in _FILES])])


def _of_program() -> click.Context:
    return click.Context(group.spool, info_name="spool", **group.spool.context_settings)


def _verb(verb: str) -> str:
    parent = _of_program()
    command = group.spool.get_command(parent, verb)
    assert command is not None
    ctx = click.Context(command, info_name=verb, parent=parent)
    parts = list(command.commands.items()) if isinstance(command, click.Group) else []
    inner = [click.Context(part, info_name=name, parent=ctx) for name, part in parts]
    lines = [*_head(f"spool-{verb}", 1, _phrase(VERBS[verb]))]
    lines += _synopsis(*(inner or [ctx]))
    lines += [".SH DESCRIPTION", *_prose(command.help or "")]
    for part in inner:
        lines += [f".SH {_plain(part.command_path.removeprefix('spool ').upper())}", *_prose(part.command.help or "")]
        lines += _options(part)
    if not inner:
        lines += [".SH OPTIONS", *_options(ctx)]
    return _text([*lines, ".SH SEE ALSO", *_see(["spool(1)", *(f"spool-{kind}(5)" for kind in _FILES)])])


def _file(kind: str) -> str:
    table = schema.KINDS[kind][1].table
    lines = [*_head(f"spool-{kind}", 5, _FILES[kind]), ".SH SYNOPSIS", _plain(_PLACES[kind])]
    lines += [".SH DESCRIPTION", *_prose(table.about), ".SH KEYS"]
    for name, type_, default, about in schema.rows(kind):
        said = ", ".join(filter(None, (type_, default if default in ("", "required") else f"default {default}")))
        lines += [".TP", f"{_marked(name)} ({_marked(said)})", _marked(about)]
    lines += [".SH EXAMPLE", ".nf", *map(_plain, _EXAMPLES[kind].splitlines()), ".fi"]
    return _text([*lines, ".SH SEE ALSO", *_see(["spool(1)", *(f"spool-{verb}(1)" for verb in _VERBS[kind])])])


def _head(name: str, section: int, about: str) -> list[str]:
    title = f'.TH {_plain(name.upper())} {section} "" "spool {__version__}" "spool manual"'
    return [title, ".SH NAME", f"{_plain(name)} \\- {_plain(about)}"]


def _phrase(sentence: str) -> str:
    """Return a sentence in the form of the NAME section."""
    return sentence[:1].lower() + sentence[1:].rstrip(".")


def _synopsis(*contexts: click.Context) -> Iterator[str]:
    yield ".SH SYNOPSIS"
    for at, ctx in enumerate(contexts):
        if at:
            yield ".br"
        yield f"\\fB{_plain(ctx.command_path)}\\fR {_plain(' '.join(ctx.command.collect_usage_pieces(ctx)))}"


def _options(ctx: click.Context) -> Iterator[str]:
    """Yield the options, under the titles of their sections if they have any."""
    sections = by_section(ctx)
    for title, records in sections.items():
        if len(sections) > 1:
            yield f".SS {_plain(title)}"
        for flags, about in records:
            yield from (".TP", f"\\fB{_plain(flags)}\\fR", _plain(about))


def _prose(text: str) -> Iterator[str]:
    """Yield paragraphs of a help; those with click's mark stay unchanged."""
    for at, paragraph in enumerate(text.split("\n\n")):
        if at:
            yield ".PP"
        if paragraph.startswith("\b\n"):
            yield ".nf"
            yield from map(_plain, paragraph.removeprefix("\b\n").splitlines())
            yield ".fi"
        else:
            yield _marked(" ".join(paragraph.split()))


def _exit_codes() -> Iterator[str]:
    """Yield the tables of exit codes, of errors and of jobs, with the sentences between."""
    of_errors, of_jobs = (errors.__doc__ or "").split("\n\n")[1], (main.__doc__ or "").split("\n\n")[2:]
    for at, paragraph in enumerate([of_errors, *of_jobs]):
        rows = re.findall(r"^\| (.+?) \| (.+?) \|", paragraph, re.MULTILINE)
        if not rows:
            yield from ([".PP"] if at else [])
            yield _marked(" ".join(paragraph.split()))
        for left, right in rows[1:]:
            yield from (".TP", f"\\fB{_marked(left)}\\fR", _marked(right))


def _see(names: Iterable[str]) -> Iterator[str]:
    listed = list(names)
    for at, name in enumerate(listed, start=1):
        page, _, section = name.partition("(")
        yield f".BR {_plain(page)} ({section}{',' if at < len(listed) else ''}"


def _marked(text: str) -> str:
    """Return *text*, which is Markdown, as a line of roff."""
    parts = re.split(r"`([^`]+)`|\*\*([^*]+)\*\*", text)
    return "".join(_plain(part) if at % 3 == 0 else f"\\fB{_plain(part)}\\fR" for at, part in enumerate(parts) if part)


def _plain(text: str) -> str:
    """Return *text* escaped for roff."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("^", "\\(ha").replace("~", "\\(ti")
    text = re.sub(r"[^\x00-\x7f]", lambda found: f"\\[u{ord(found[0]):04X}]", text).replace("`", "\\(ga")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def write(checkout: str) -> None:
    """Write all pages to a *checkout* of the project, and remove the manual pages of removed verbs."""
    made = pages()
    for folder in ("man1", "man5"):
        where = os.path.join(checkout, "docs", "man", folder)
        os.makedirs(where, exist_ok=True)
        for name in os.listdir(where):
            if f"{folder}/{name}" not in made:
                os.unlink(os.path.join(where, name))
    for path, text in made.items():
        with open(os.path.join(checkout, "docs", "man", path), "w", encoding="utf-8") as file:
            file.write(text)
    for name, text in references().items():
        with open(os.path.join(checkout, "docs", name), "w", encoding="utf-8") as file:
            file.write(text)


def run(arguments: Sequence[str]) -> int:
    """Print the page named, such as `submit` or `job`; or `--write` all of them."""
    if list(arguments) == ["--write"]:
        write(".")
        return 0
    text = page(arguments[0]) if len(arguments) == 1 else None
    if text is None:
        sys.stderr.write("usage: python -m spool.cli.manpages PAGE | --write\n")
        return 2
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
