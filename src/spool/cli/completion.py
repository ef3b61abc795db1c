"""`spool completion`: print a shell completion script; and the answers to that script.

The script passes the line up to the cursor, and each line of the answer is a kind (`plain`, `file` or `dir`), a word
and its meaning, separated by tabs. The words of options and arguments are in one table, by name, so that verbs need
not specify them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import click
from click.shell_completion import CompletionItem, ShellComplete, add_completion_class, split_arg_string

from spool.cli.group import Verb
from spool.cli.joboptions import OPTIONS
from spool.client.submit import default_root
from spool.core import layout
from spool.core.errors import SpoolError
from spool.core.layout import DONE, HELD, QUEUED, RUNNING, natural
from spool.core.model import State
from spool.formats.capabilities import loaded
from spool.store.tolerant import TolerantSpool

_MOST = 500  # longer lists of completions are useless

_BASH = r"""
# in ~/.bashrc:  eval "$(spool completion bash)"
_spool_complete() {
    local kind word line=${COMP_LINE:0:COMP_POINT}
    COMPREPLY=()
    while IFS=$'\t' read -r kind word _; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                COMPREPLY+=("$word")
                [[ $word == *[=:] ]] && compopt -o nospace
                ;;
        esac
    done < <(COMP_WORDS=$line COMP_CWORD=$2 _SPOOL_COMPLETE=bash_complete "${1/#\~/$HOME}" 2> /dev/null)
}
complete -o nosort -F _spool_complete spool 2> /dev/null || complete -F _spool_complete spool
"""

_ZSH = r"""
#compdef spool
# in ~/.zshrc, after compinit if that is called there:  eval "$(spool completion zsh)"
_spool() {
    local line
    local -a parts words_only open_words described
    local -a lines=("${(@f)$(COMP_WORDS="${(j: :)words[1,CURRENT-1]} $PREFIX" _SPOOL_COMPLETE=zsh_complete \
        ${(Q)~words[1]} 2> /dev/null)}")
    [[ $PREFIX == --*=* ]] && compset -P 1 '*='
    for line in $lines; do
        parts=("${(@ps:\t:)line}")
        case $parts[1] in
            dir) _path_files -/ ;;
            file) _files ;;
            plain)
                if [[ -n $parts[3] ]]; then
                    described+=("${parts[2]//:/\\:}:$parts[3]")
                elif [[ $parts[2] == *[=:] ]]; then
                    open_words+=("$parts[2]")
                else
                    words_only+=("$parts[2]")
                fi
                ;;
        esac
    done
    (( $#described )) && _describe -V spool described
    (( $#words_only )) && compadd -V spool -a words_only
    (( $#open_words )) && compadd -S '' -V spool -a open_words
    return 0
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _spool "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
    compdef _spool spool
fi
"""

_FISH = r"""
# in ~/.config/fish/completions/spool.fish
function __spool_complete
    for line in (env COMP_WORDS=(commandline -cp | string collect) _SPOOL_COMPLETE=fish_complete spool 2> /dev/null)
        set -l parts (string split \t -- $line)
        switch $parts[1]
            case dir
                __fish_complete_directories (commandline -ct)
            case file
                __fish_complete_path (commandline -ct)
            case plain
                string join \t -- $parts[2..]
        end
    end
end
complete --command spool --no-files --arguments "(__spool_complete)"
"""


@click.command(cls=Verb)
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]))
def command(shell: str) -> int:
    """Print a completion script for a shell. It completes commands, options and their values, and job names.

    In ~/.bashrc, in ~/.zshrc, and once for fish:
      eval "$(spool completion bash)"
      eval "$(spool completion zsh)"
      spool completion fish > ~/.config/fish/completions/spool.fish
    """
    sys.stdout.write(_SHELLS[shell].source_template.lstrip("\n"))
    return 0


class _Completion(ShellComplete):
    """Answers our own scripts."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words after the program's name, and the typed part of the word at the cursor."""
        line = os.environ.get("COMP_WORDS", "")
        words = split_arg_string(line)
        typed = words.pop() if words and not re.search(r"(?<!\\)\s\Z", line) else ""
        return words[1:], typed

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """Return the possible words; none if the spool cannot be read."""
        _offer(self.cli, args)
        name, equals, _ = incomplete.partition("=")
        head = name + equals if equals and incomplete.startswith("--") else ""
        try:
            found = super().get_completions(args, incomplete)
        except (OSError, SpoolError):
            return []
        return [CompletionItem(self.shown(head, item.value, incomplete), item.type, item.help) for item in found]

    def shown(self, head: str, word: str, incomplete: str) -> str:
        """Return *word*, preceded by *head* (`--option=`), in the form that the shell puts in place of *incomplete*."""
        return head + word

    def format_completion(self, item: CompletionItem) -> str:
        """Return an item as a line of the answer."""
        return "\t".join([item.type, item.value, " ".join((item.help or "").split())]).rstrip("\t")


class _Bash(_Completion):
    name = "bash"
    source_template = _BASH

    def shown(self, head: str, word: str, incomplete: str) -> str:
        """Strip the part that bash takes for an earlier word (it splits words at = and :), and quote the rest."""
        whole, current = head + word, os.environ.get("COMP_CWORD", "")
        before = incomplete.removesuffix(current) if incomplete.endswith(current) else ""
        return re.sub(r"([^\w@%+=:,./~-])", r"\\\1", whole.removeprefix(before))


class _Zsh(_Completion):
    name = "zsh"
    source_template = _ZSH

    def shown(self, head: str, word: str, incomplete: str) -> str:
        """Return *word* alone: the script has passed the option to the shell."""
        return word


class _Fish(_Completion):
    name = "fish"
    source_template = _FISH


_SHELLS: dict[str, type[_Completion]] = {cls.name: cls for cls in (_Bash, _Zsh, _Fish)}


def answer_shells() -> None:
    """Let click answer our scripts instead of its own."""
    for cls in _SHELLS.values():
        add_completion_class(cls)


def _offered(find: _Words | str, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return the possible values that begin with *incomplete*, of an option or argument whose values are in a table."""
    if isinstance(find, str):
        return [CompletionItem(incomplete, type=find)]
    spool = TolerantSpool(ctx.find_root().params.get("root") or default_root())
    words = [word for word in find(ctx, spool, incomplete) if word.startswith(incomplete)]
    return [CompletionItem(word) for word in words[:_MOST]]


def _offer(command: click.Command, words: Sequence[str]) -> None:
    """Let the options and arguments of a command, and of its subcommands among *words*, offer the tables' values."""
    for parameter in command.params:
        find = (_ARGUMENTS if isinstance(parameter, click.Argument) else _OPTIONS).get(parameter.name or "")
        if find is not None and not isinstance(parameter.type, click.Choice):
            parameter.shell_complete = partial(_offered, find)  # type: ignore[method-assign]
    if isinstance(command, click.Group):
        found = (command.get_command(click.Context(command), word) for word in dict.fromkeys(words))
        for each in filter(None, found):
            _offer(each, words)


_Words = Callable[[click.Context, TolerantSpool, str], Iterable[str]]


def _fixed(words: Iterable[str]) -> _Words:
    return lambda ctx, spool, typed: words


def _listed(find: _Words) -> _Words:
    """Return *find* for an option that takes several words separated by commas; no word is offered twice."""

    def words(ctx: click.Context, spool: TolerantSpool, typed: str) -> list[str]:
        before, comma, last = typed.rpartition(",")
        return [f"{before}{comma}{word}" for word in find(ctx, spool, last) if word not in before.split(",")]

    return words


_PLACES = {
    "attach": (RUNNING,),
    "cancel": (QUEUED, HELD, RUNNING),
    "continue": (RUNNING,),
    "edit": (QUEUED, HELD, RUNNING),
    "hold": (QUEUED, RUNNING),
    "release": (HELD,),
    "requeue": (DONE, RUNNING),
    "signal": (RUNNING,),
    "suspend": (RUNNING,),
    "wait": (QUEUED, HELD, RUNNING),
    "why": (QUEUED, HELD),
}
"""The folders of the jobs that a verb applies to; all, if a verb is not listed."""

_OF_RUNS = ("log", "seff")
"""The verbs for jobs that have run."""


def _jobs(ctx: click.Context, spool: TolerantSpool, typed: str) -> list[str]:
    """Return the names that the verb of *ctx* can use."""
    verb = ctx.command_path.split()[1:]
    if verb[:1] == ["reserve"]:
        return [] if verb[1:] == ["create"] else sorted(spool.names(layout.RESERVATIONS), key=natural)
    if verb and verb[0] in _OF_RUNS:
        return sorted(spool.jobs_with_runs(), key=natural)
    places = _PLACES.get(verb[0] if verb else "", layout.PLACES)
    given = ctx.params.get("names") or ()
    names = {name for place in places for name in spool.names(place) if name.startswith(typed)}
    return sorted(names.difference(given), key=natural)


def _dependencies(ctx: click.Context, spool: TolerantSpool, typed: str) -> list[str]:
    """Return the names of jobs, and before a colon the required kinds of end."""
    kind, colon, rest = typed.partition(":")
    named = _listed(lambda ctx, spool, last: [n for place in layout.PLACES for n in spool.names(place)])
    words = sorted(dict.fromkeys(named(ctx, spool, rest if colon else typed)), key=natural)
    kinds = () if colon or "," in typed else ("any:", "ended:", "failed:", "each:")
    return [*kinds, *(f"{kind}:{word}" if colon else word for word in words)]


def _gpu_types(ctx: click.Context, spool: TolerantSpool, typed: str) -> list[str]:
    from spool.query.rows import last_view

    view, _ = last_view(spool, 0)
    known = {gpu.name for gpu in view.machine.gpus if gpu.name} if view is not None and view.machine else ()
    return [*sorted(known), "auto"]


def _labels(key: str) -> _Words:
    """Find the values of *key* ("user", "project" or "tags") among the active jobs and those that ended last."""

    def words(ctx: click.Context, spool: TolerantSpool, typed: str) -> list[str]:
        from spool.query.jobs import JobLister

        found = (getattr(row, key) for row in JobLister(spool).listing(recent=_MOST).rows)
        labels = {label for value in found for label in (value if isinstance(value, tuple) else (value or "",))}
        return sorted(labels - {""}, key=natural)

    return words


def _signals(ctx: click.Context, spool: TolerantSpool, typed: str) -> Iterable[str]:
    from spool.formats.values import WARNING_SIGNALS

    return [f"{name}{'@60s' if ctx.info_name in ('submit', 'run', 'edit') else ''}" for name in WARNING_SIGNALS]


def _exports(ctx: click.Context, spool: TolerantSpool, typed: str) -> list[str]:
    from spool.client.draft import may_go

    return ["ALL", "NONE", *sorted(filter(may_go, os.environ))]


def _variables(ctx: click.Context, spool: TolerantSpool, typed: str) -> list[str]:
    return [name for name in _exports(ctx, spool, typed)[2:] for name in (name, f"{name}=")]


_KEYS = sorted({option.key for option in OPTIONS})

_ARGUMENTS: Mapping[str, _Words | str] = {
    "signal_name": _signals,
    "directory": "dir",
    "files": "file",
    "name": _jobs,
    "names": _jobs,
    "words": "file",
}
_OPTIONS: Mapping[str, _Words | str] = {
    **{option.word: _fixed(option.words) for option in OPTIONS if option.words and not option.value},
    **dict.fromkeys(("files", "output", "plot", "rows", "shell", "stderr", "stdout"), "file"),
    **dict.fromkeys(("root", "workdir"), "dir"),
    "columns": _listed(lambda ctx, spool, typed: loaded("spool.cli.ls:COLUMNS")),
    "depends_on": _dependencies,
    "env": _variables,
    "export": _listed(_exports),
    "gpu_type": _listed(_gpu_types),
    "sets": _fixed([f"{key}=" for key in _KEYS]),
    "policy": _listed(_fixed(("fifo", "easy", "spool"))),
    "project": _labels("project"),
    "signal": _signals,
    "states": _listed(_fixed(State)),
    "tag": _labels("tags"),
    "tags": _listed(_labels("tags")),
    "unset": _fixed(_KEYS),
    "user": _labels("user"),
}
"""The possible values of an argument or option of that name, in any verb: words, files or directories."""
