"""Reading TOML never hurts, and every refusal names its line."""

from __future__ import annotations

import gc
import re
import tomllib

import pytest
import tomli
from hypothesis import example, given
from hypothesis import strategies as st

from spool.core.errors import InvalidFile
from spool.formats import toml
from spool.formats.toml import find_lines

HOSTILE = {
    "latin-1": 'command = "ü"\n'.encode("latin-1"),
    "utf-16": 'command = "x"\n'.encode("utf-16"),
    "nested lists": b"a = " + b"[" * 100_000,
    "nested lists that are closed": b"a = " + b"[" * 100_000 + b"]" * 100_000,
    "nested tables": b"a = " + b"{a=" * 100_000,
    "nested tables that are closed": b"a = " + b"{a=" * 100_000 + b"1" + b"}" * 100_000,
    "tables of many dots in tables": b"a = " + b"{a.a.a.a.a.a.a.a.a=" * 30 + b"1" + b"}" * 30,
    "deep here and there": b"a = [1]\n" * 3 + b"b = [" + b"[[], {a=" * 17 + b"1" + b"}]" * 17 + b"]\n",
    "not a number": b"a = nan\n",
    "infinity": b"a = -inf\n",
    "overflow": b"a = 1e999\n",
    "huge integer": b"a = 100000000000000000000000\n",
    "5,000 digits": b"a = " + b"1" * 5000 + b"\n",
    "hexadecimal": b"a = 0x" + b"f" * 5000 + b"\n",
    "NUL by escape": b'a = "x\\u0000y"\n',
    "NUL in a key": b'"a\\u0000" = 1\n',
    "NUL": b"a = 1\n\0",
    "control character": b'a = "\x01"\n',
    "too large": b"#" * (toml.MAX_BYTES + 1),
    "dots": b"a" + b".a" * 400_000 + b" = 1\n",
    "open string": b'a = "x\n',
    "twice": b"a = 1\na = 2\n",
    "half a key": b"comm",
    "carriage return": b"a = 1\rb = 2",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_input_raises_one_kind_of_error(data: bytes) -> None:
    """Whatever the parser makes of it, what comes out is InvalidFile, at once."""
    with pytest.raises(InvalidFile) as error:
        toml.read(data, "job x")
    assert len(error.value.problems) == 1
    assert "\n" not in str(error.value)


def test_only_lists_and_tables_are_nested() -> None:
    """Brackets in texts and comments count for nothing, nor do those that are closed."""
    shell = "if [[ $# -gt ${#a[@]} ]]; then f() { [ x; }; case {([ in" * 99
    quoted = f"a = {'[' * 32}{']' * 32}\nb = '{shell}' # {shell}\nc = [{'[], ' * 99}]\n"
    text = f'{quoted}d = """\n# "" {shell}"""""\ne = \'\'\'\n\'{shell} \'\'\'\'\'\n'
    assert toml.read(text.encode(), "x") == tomllib.loads(text)
    assert toml.read(toml.write({"script": f"# {shell}\n" * 20}), "x") == {"script": f"# {shell}\n" * 20}


@pytest.mark.parametrize("opening", ["[[", "{a = [", "[{a.b = ", "{'[' = {\"}\" = "])
def test_what_is_nested_too_deeply_is_refused_with_its_line(opening: str) -> None:
    """Also where the parser takes it, however the brackets alternate and whatever stands around them."""
    closing = "".join({"[": "]", "{": "}"}.get(mark, "") for mark in reversed(re.sub("(['\"]).*?\\1", "", opening)))
    text = f"a = '[['\nb = 2\nc = {opening * 17}1{closing * 17}\nd = [1]\n"
    tomllib.loads(text)
    with pytest.raises(InvalidFile, match="on line 3: lists and tables are nested more than 32 deep"):
        toml.read(text.encode(), "x")


@pytest.mark.parametrize(("part", "dot"), [("a", "."), ('"."', " . "), ("'b'", "\t.")])
@pytest.mark.parametrize("around", ["{} = 1", "  [{}]", "[[ {} ]]", "x = {{ {} = 1 }}"])
def test_a_key_of_many_parts_never_reaches_the_parser(
    monkeypatch: pytest.MonkeyPatch, part: str, dot: str, around: str
) -> None:
    """The parser needs quadratic time for it; its line is named, wherever the key stands and however it is quoted."""
    monkeypatch.setattr(tomli, "loads", lambda text: pytest.fail("the parser was asked"))
    with pytest.raises(InvalidFile, match="on line 2: a key has more than 1,000 parts"):
        toml.read(f"\n{around.format(dot.join([part] * 1001))}".encode(), "x")


def test_no_garbage_is_collected_while_a_large_file_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser makes none, and to look for it again and again took most of the time of a file with many tables."""
    enabled: list[bool] = []

    def parsed(text: str) -> dict[str, object]:
        enabled.append(gc.isenabled())
        if "oops" in text:
            raise ValueError
        return {}

    monkeypatch.setattr(tomli, "loads", parsed)
    toml.read(b"a = 1\n", "x")
    toml.read(b"#" * (1 << 17), "x")
    with pytest.raises(InvalidFile):
        toml.read(b"oops" * (1 << 17), "x")
    assert enabled == [True, False, False]
    assert gc.isenabled()


def test_a_byte_order_mark_and_dots_outside_keys_are_no_mistake() -> None:
    """Editors of other systems write one, which is taken off; texts, numbers and comments may have any dots."""
    dots = ".".join(["a"] * 999)
    text = f"\ufeffa = \"{dots}\" # {dots}\r\nb = '''{dots}'''\nc = [{', '.join(['0.5'] * 1999)}]\n"
    assert toml.read(text.encode(), "x") == {"a": dots, "b": dots, "c": [0.5] * 1999}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"a = 1\nb = \n", 2),
        (b"a = 1\n\n\nb = nan\n", 4),
        (b"a = 1\n[b]\nc = { d = [1,\n 99999999999999999999999] }\n", 4),
        (b'a = 1\nb = """x', 2),
        (b"a = 1\nb = '\xff'\n", 2),
        (b"a = [1,\n2\n", 2),
    ],
)
def test_a_refusal_names_its_line(data: bytes, line: int) -> None:
    """Syntax, encoding and values alike: the problem knows the line, and the message says it."""
    with pytest.raises(InvalidFile) as error:
        toml.read(data, "x")
    assert error.value.problems[0].line == line
    assert f"line {line}" in error.value.problems[0].message


SOURCE = '''# a comment with a = 1
command = [   # first
  "a",
  "b = 2",
]
"quoted key" = 1
text = """
gpus = 3
"""
depends_on = { all = ["x"], "any" = [
  "y" ] }
[retry]
max = 1
on.x = 2
rows = [
  # one
  { a = 1 },

  { a = [
    2,
    """
]
""",
  ] },
]
[[list]]
k = 1
[[list]]
k = 2
[a.b.c]
"\\u0064" = 1
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("command",), 2),
        (("command", 1), 4),
        (("quoted key",), 6),
        (("text",), 7),
        (("gpus",), None),
        (("depends_on", "all"), 10),
        (("depends_on", "any", 0), 11),
        (("depends_on", "any", 5), 10),
        (("retry",), 12),
        (("retry", "max"), 13),
        (("retry", "on", "x"), 14),
        (("retry", "rows", 0, "a"), 17),
        (("retry", "rows", 1), 19),
        (("retry", "rows", 1, "a", 1), 21),
        (("list", 1, "k"), 29),
        (("a", "b"), 30),
        (("a", "b", "c", "d"), 31),
        (("a", "x"), 30),
        (("command", "length"), 2),
    ],
)
def test_the_line_of_any_key_is_found(path: tuple[str | int, ...], line: int | None) -> None:
    """Tables, dotted and quoted keys, inline tables, lists of several lines; text that looks like a key is none."""
    tomllib.loads(SOURCE)
    assert find_lines(SOURCE, [path]).get(path) == line


def test_many_lines_are_found_at_once_and_none_is_looked_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key has its own line; in a source that takes too long to search, only the first ones have theirs."""
    text = "".join(f"k{at} = 1\n" for at in range(1000))
    wanted = [(f"k{at}",) for at in range(0, 1000, 10)]
    lines = find_lines(text, wanted)
    assert list(lines.values()) == list(range(1, 1001, 10))
    monkeypatch.setattr(toml, "_MOST_SEARCHED", 3 * len(text))
    some = find_lines(text, wanted).items()
    assert some < lines.items()


_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
_values = st.recursive(
    _texts | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(_texts, _values, max_size=5))
def test_what_is_written_reads_back(document: dict[str, object]) -> None:
    """Writing loses nothing, also texts of several lines and carriage returns."""
    assert toml.read(toml.write(document), "x") == document


_digits = st.from_regex(r"[0-9](_?[0-9]){0,24}", fullmatch=True) | st.integers(300, 400).map(lambda n: "7" * n)
_numbers = st.one_of(
    st.tuples(st.sampled_from(["", "+", "-"]), _digits, st.sampled_from(["", ".0", ".7_7"]), _digits).map("".join),
    st.tuples(_digits, st.sampled_from(["e", "E", ".0e", ".1E+", "e-", "e+"]), st.integers(0, 400).map(str)).map(
        "".join
    ),
    st.tuples(st.sampled_from(["0x", "0o", "0b"]), st.from_regex(r"[01](_?[01]){0,70}", fullmatch=True)).map("".join),
    st.integers(-(1 << 70), 1 << 70).flatmap(
        lambda n: st.sampled_from([str(n), hex(abs(n)), oct(abs(n)), bin(abs(n))])
    ),
    st.text(st.sampled_from("0123456789_+-.eExobinfatABF"), min_size=1, max_size=24),
    st.floats().map(repr),
)
_pieces = [*"ab0e'é\t", "\\u0000", "\\U00000000", "\\t", "\\n", "\\\\"]
_quoted = st.lists(st.sampled_from(_pieces), max_size=6).map(lambda pieces: f'"{"".join(pieces)}"')
_written = st.recursive(
    _numbers | _quoted,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda values: f"[{', '.join(values)}]")
        | st.tuples(_quoted, inner).map(lambda pair: f"{{ {pair[0]} = {pair[1]} }}")
    ),
    max_leaves=4,
)


@example("a", "9223372036854775808")
@example("a", "1e309")
@example("a", "0b" + "1" * 64)
@example("a", "0o1777777777777777777777")
@example("a", "1" * 309 + ".0")
@example('"\\u0000"', "1")
@given(st.just("a") | _quoted, _written)
def test_no_value_that_is_refused_escapes_the_quick_look(key: str, written: str) -> None:
    """Whatever a thorough look refuses is refused, however it is written; all else is read."""
    text = f"{key} = {written}\n"
    try:
        document = tomllib.loads(text)
    except ValueError:
        return
    if toml._find_bad(document) is None:
        assert toml.read(text.encode(), "x") == document
    else:
        with pytest.raises(InvalidFile):
            toml.read(text.encode(), "x")


@given(st.text(max_size=30))
def test_a_quoted_text_reads_back(text: str) -> None:
    """Any text can be quoted on one line; only what UTF-8 cannot hold is replaced, and NUL is as everywhere refused."""
    line = toml.quote(text)
    assert "\n" not in line
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert tomllib.loads(f"a = {line}") == {"a": expected}


def test_texts_of_several_lines_are_written_on_several_lines() -> None:
    """A script in a job file stays readable."""
    assert toml.write({"command": "set -e\nmake\n"}) == b'command = """\nset -e\nmake\n"""\n'
    assert toml.read(toml.write({"command": "a\r\nb"}), "x") == {"command": "a\r\nb"}


def test_values_in_messages_are_short() -> None:
    """An error message shows what stands in the file, cut to one line."""
    assert toml.show("x" * 100) == '"' + "x" * 55 + '..."'
    assert [toml.show(value) for value in (True, 3, 0.5, [1], {"a": 1}, 10**30)] == [
        "true",
        "3",
        "0.5",
        "a list",
        "a table",
        "a huge number",
    ]
