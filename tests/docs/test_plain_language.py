"""What people read is plain: a list of phrases that nobody says today, and what to say in their place."""

from __future__ import annotations

import ast
import gc
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click
import pytest

from spool.cli.group import VERBS
from spool.cli.group import spool as program
from support import ROOT

# What is scanned: Python files (their strings, docstrings and comments) and pages, all below a folder. A path is
# added here once it passes.
SCANNED = (
    "README.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks",
    "contrib",
    "docs",
    "examples",
    "src",
)

# A regular expression (a space stands for any white space, case does not matter) -> what to say instead.
PHRASES: dict[str, str] = {
    # Archaic or legal.
    r"whosoever|whatsoever|whomever|\bwhoever\b": "who, whom; 'if you …', 'anyone who …'",
    r"\b(?:thereof|thereto|thereupon|therefrom|therewith|hereby|herewith|hence|whence|thence)\b": "of it, so",
    r"\blest\b": "so that … not",
    r"\bshall\b": "must, will, should",
    r"\bnought\b|\baught\b|\bnay\b|\bupon\b": "nothing, anything, no, on",
    r"of its own accord|of their own accord": "by itself, automatically",
    r"\bin the place of\b|\bin the stead of\b": "instead of",
    r"\bat naught\b|\bcome to naught\b": "fail",
    r"\bsave for\b|\bbut for the fact\b": "except for",
    r"\boneself\b": "yourself, itself",
    r"\bto and fro\b": "back and forth",
    r"\bnigh\b|\bamidst\b|\bwhilst\b|\bamongst\b": "near, amid, while, among",
    # Translated.
    r"\bwho\b[^.;:]{0,40}\bof which\b": "split the sentence",
    r"(?<!one\s)(?<!each\s)(?<!all\s)(?<!regardless\s)\bof which\b": "split the sentence, or 'whose', 'that … has'",
    r"\b(?:is|are|was|were) to be (?!seen)\w+": "'must be …', 'needs to be …', or an imperative",
    r"\bso many (?!that)": "a number; 'N', 'this many', 'FACTOR'",
    r"\bso long (?!that)": "'this long', 'while', 'a duration'",
    r"\bso much (?!that)": "'this much', an amount",
    r"\bput(?:s|ting)? right\b|\bputs? it right\b": "fix",
    r"\bmended?\b|\bmends\b|\bmending\b": "fix, fixed",
    r"\bfor people\b": "free text; 'human-readable'",
    r"\bnothing says\b|\bnobody says\b": "'… is not set', 'specify …'",
    r"\bnone (?:wait|run|runs|waits|lives|live|is there)\b": "'not running', 'no active jobs'",
    r"\bno dispatcher lives\b|\ba dispatcher lives\b|\bif none lives\b|dispatcher that lives": "is running",
    r"\bthere is no (?:verb|option|command|key)\b": "unknown command, unknown option",
    r"\bit is said\b|\bis said so\b|\bis told so\b": "the message says",
    r"\bas it stands\b|\bas they stand\b": "as is, unchanged",
    r"\bwhere one stands\b|\bwhere we stand\b": "the current directory",
    r"\ball that there is\b|\bwhat there is to\b": "everything",
    r"\bin vain\b": "without result; 'fails'",
    r"\ba short while ago\b|\bfor a while yet\b": "recently, for now",
    r"\bby and by\b|\blittle by little\b": "gradually",
    r"\bwhat is more\b|\bto wit\b|\bnamely\b": "that is; or nothing",
    r"\bmuch the same\b": "similar",
    r"\bhas to do with\b": "concerns, relates to",
    r"\bgoes without\b|\bdo without\b": "lacks, does not need",
    r"\bhow it is called\b|\bhow they are called\b": "what it is called, its name",
    r"\bas to what\b|\bas to which\b": "about what",
    r"\bin case that\b": "if",
    r"\bnot but\b|\bnone but\b|\bnothing but\b|\bno other than\b": "only",
    r"\bso as not to\b": "to avoid …ing",
    r"\bbe it\b|\bwere it\b|\bhad it been\b": "whether, if it were",
    r"\bto be had\b": "available",
    r"\bparted by\b": "separated by",
    r"\bpassed over\b|\bpasses over\b": "skipped, ignored",
    r"\bis at an end\b|\bcomes to an end\b": "ends",
    r"\bgiven leave\b|\bgive leave\b": "allow",
    r"\bmay well be that\b": "may be",
    r"\bno crash (?:loses|starts)\b": "a crash never loses …",
    r"\bsay(?:s|ing)? no to\b|\bcan say no\b|\bhas said no\b": "veto",
    r"\bhow they are proved\b|\bproved gone\b": "how spool establishes them; known to be gone",
    r"\btakes? what (?:it|they) likes?\b": "uses without limit",
    r"\bhow far (?:jobs|they) say\b": "progress",
    r"\bneeds \S+ alone\b|\bis \S+'s alone\b": "unshared, in exclusive use by",
}

# Of the source, whose docstrings and comments name the subject and the noun of the field: what does not pass yet.
NOT_YET = {
    "src/spool/cli/submit.py",
    "src/spool/cli/surroundings.py",
    "src/spool/extras/machine/arbiter.py",
    "src/spool/extras/machine/protocol.py",
    "src/spool/query/foresight.py",
    "src/spool/query/shared.py",
}

# A regular expression as in PHRASES -> what to say instead, in a docstring or a comment of the source.
UNNAMED: dict[str, str] = {
    r"(?<![^\0])(?:learn |know |take note|take in |have )": "say what it does: 'Record that …', 'Let …'",
    r"\bsomebody\b|\beverybody\b|\banybody\b": "the noun: a process, a user, a listener, another dispatcher",
    r"\bnobody (?:else|asks|says|knows|reads|waits|can|may|is|has)\b": "the noun: 'no process', 'is unknown'",
    r"\bfor who\b|\bby who\b|\bwho (?:asks|reads|ends|comes|hangs|forks)\b": "the noun: 'for a caller that …'",
    r"\bnone of our(?:s| business)\b|(?<!there\s)\bis no (?:run|file|job|array|regular)\b": "'is not …', 'is ignored'",
    r"\bwhat (?:there is|was said|it says|is said)\b": "the noun: the content, the message, the resources",
}
Patterns = Mapping[re.Pattern[str], str]


def compiled(phrases: Mapping[str, str]) -> Patterns:
    """Return the expressions of a list, in which a space stands for any white space, also in a comment."""
    spaced = {phrase.replace(" ", r"\s+(?:\#\s*)?"): instead for phrase, instead in phrases.items()}
    return {re.compile(phrase, re.IGNORECASE): instead for phrase, instead in spaced.items()}


PLAIN, NAMING = compiled(PHRASES), compiled(UNNAMED)


def texts(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield what people read in a Python file with its line: string literals (an f-string whole) and comments."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(
                    value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else "{}"
                    for value in node.values
                ),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value
    begun, comment = 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            begun, comment = begun or token.start[0], f"{comment}{token.string}\n"
        elif token.type != tokenize.NL and comment:
            yield begun, comment
            begun, comment = 0, ""
    if comment:
        yield begun, comment


def told(pieces: list[tuple[int, str]], tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield which of the texts of a Python file are docstrings or comments, without what a comment begins with."""
    doc = {
        node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    for line, text in pieces:
        if line in doc or text.startswith("#"):
            yield line, re.sub(r"\A\W+", "", text)


def found_in(where: str, pieces: Iterable[tuple[int, str]], patterns: Patterns = PLAIN) -> Iterator[str]:
    """Yield what is wrong with texts that begin at a line: the place, the phrase, and what to say instead."""
    pieces = list(pieces)
    whole = "\0".join(text for _, text in pieces)
    for pattern, instead in patterns.items():
        if not pattern.search(whole):
            continue  # nor is it in a part
        for line, text in pieces:
            for match in pattern.finditer(text):
                phrase = " ".join(match.group().split())
                at = line + text.count("\n", 0, match.start())
                yield f"{where}:{at}: {phrase!r} → {instead}"


def files(scanned: str) -> Iterator[Path]:
    """Yield a scanned file, or those in a scanned folder."""
    path = ROOT / scanned
    if path.is_file():
        yield path
    for suffix in ("py", "sh", "md", "toml"):
        yield from sorted(path.rglob(f"*.{suffix}"))


@pytest.mark.parametrize("scanned", SCANNED)
def test_texts_are_plain(scanned: str) -> None:
    """No string or page has a phrase of the first list, and no docstring or comment of the source one of either."""
    found: list[str] = []
    gc.disable()  # it would go over the syntax trees many times
    for path in files(scanned):
        source, where = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        if path.suffix != ".py":
            found += found_in(where, [(1, source)])
            continue
        tree = ast.parse(source)
        pieces = list(texts(source, tree))
        found += found_in(where, pieces)
        if scanned == "src" and where not in NOT_YET and not where.startswith("src/spool/testing/"):
            found += found_in(where, told(pieces, tree), NAMING)
    gc.enable()
    assert list(files(scanned)), f"nothing to read at {scanned}"
    assert not found, "\n".join(["say it plainly:", *found])


def test_help_is_plain() -> None:
    """The help of a command, with the text of every option, has no phrase of the list."""
    context = click.Context(program, info_name="spool")
    for verb in VERBS:
        command = program.get_command(context, verb)
        assert command is not None
        page = command.get_help(click.Context(command, info_name=f"spool {verb}", parent=context))
        assert not list(found_in(f"spool {verb} --help", [(1, page)]))


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("each wait is so many times the one before", "a number"),
        ("none wait\nor run", "no active jobs"),
        ("# it was passed\n# over", "skipped"),
    ],
)
def test_a_phrase_is_found_across_lines(text: str, instead: str) -> None:
    """A phrase is found where it is broken over two lines, in a comment too, and the message says what to write."""
    assert any(instead in said for said in found_in("here", [(1, text)]))


def test_place_of_a_phrase_is_its_line() -> None:
    """The message names the line of the phrase, not the one where its text begins."""
    source = '"""One.\n\nTwo shall fail.\n"""\nx = f"{1} shall {2}"\n# fine\n# but this shall not\n'
    said = found_in("a.py", texts(source, ast.parse(source)))
    assert sorted(place.split(": ")[0] for place in said) == ["a.py:3", "a.py:5", "a.py:7"]
