"""Reading TOML never hurts, and every refusal names its line."""

from __future__ import annotations

import re
import tomllib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spool.core.errors import InvalidFile
from spool.formats import toml
from spool.formats.toml import key_lines, line_of

HOSTILE = {
    "latin-1": 'command = "ü"\n'.encode("latin-1"),
    "utf-16": 'command = "x"\n'.encode("utf-16"),
    "nested lists": b"a = " + b"[" * 100_000,
    "nested lists that are closed": b"a = " + b"[" * 100_000 + b"]" * 100_000,
    "nested tables": b"a = " + b"{a=" * 100_000,
    "nested tables that are closed": b"a = " + b"{a=" * 100_000 + b"1" + b"}" * 100_000,
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


def test_a_byte_order_mark_and_dots_outside_keys_are_no_mistake() -> None:
    """Editors of other systems write one, which is taken off; texts, numbers and comments may have any dots."""
    dots = ".".join(["a"] * 200)
    text = f"\ufeffa = \"{dots}\" # {dots}\r\nb = '''{dots}'''\nc = [{', '.join(['0.5'] * 200)}]\n"
    assert toml.read(text.encode(), "x") == {"a": dots, "b": dots, "c": [0.5] * 200}


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


SOURCE = """gpus = 3
depends_on = { all = ["x"], "any" = [
  "y" ] }
[[list]]
k = 1
[[list]]
k = 2
[a.b.c]
"\\u0064" = 1
"""
LINES: list[tuple[toml.Path, int | None]] = [
    *((("gpu",), None), (("depends_on", "any", 0), 3), (("depends_on", "any", 5), 2), (("list", 1, "k"), 7)),
    *((("a", "b"), 8), (("a", "b", "c", "d"), 9), (("a", "x"), 8)),
]


@pytest.mark.parametrize(("path", "line"), LINES)
def test_the_line_of_what_is_not_there_is_that_of_what_it_would_be_in(path: toml.Path, line: int | None) -> None:
    """A missing key has the line of its table, an element that is not there that of its list."""
    assert line_of(key_lines(SOURCE), path) == line


def test_lines_are_looked_for_as_far_as_a_handwritten_file_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk through a source ends after so many words; what it has found until then counts."""
    text = "".join(f"k{at} = 1\n" for at in range(1000))
    assert len(key_lines(text)) == 1000
    monkeypatch.setattr(toml, "MAX_TOKENS", 40)
    assert len(key_lines(text)) == 10


@example("a=[}")
@example("a=[{]}")
@given(st.text(st.sampled_from(list("ab=[]{}\"'#.,\n\\ 1")), max_size=40))
def test_looking_for_lines_never_fails(text: str) -> None:
    """Of valid text it finds every key."""
    try:
        document = toml.read(text.encode(), "x")
    except InvalidFile:
        return
    lines = key_lines(text)
    for key in document:
        assert (key,) in lines


class Written:
    """A source that is written piece by piece, each key and each element of a list noted with its line."""

    def __init__(self) -> None:
        self.text = ""
        self.lines: dict[toml.Path, int] = {}
        self.keys = 0
        self.last: dict[toml.Path, int] = {}

    def write(self, text: str) -> None:
        self.text += text

    def note(self, path: toml.Path) -> None:
        self.lines.setdefault(path, self.text.count("\n") + 1)

    def new(self) -> str:
        self.keys += 1
        return f"k{self.keys}"

    def is_last(self, path: toml.Path) -> bool:
        return all(part == self.last[path[:at]] for at, part in enumerate(path) if isinstance(part, int))


_CODE = [
    "memroy = 1",
    "[memroy]",
    "[[ $# -gt 1 ]]",
    "${#a[@]} {",
    "#",
    '"',
    '""',
    "'",
    "''",
    "b = ]",
    "\u00e9\u2028",
    "",
]
_PLAIN = ["1", "true", "-0.5e3", "1979-05-27 07:32:00Z", '"a # b = [["', "'[{'", '"\\"]"', "'\\'", '""', "''", '"\\\\"']
_GAPS = ["", " ", "\n", ' # ], [ "\n\t', "\n\n# '\n"]
_choose = st.sampled_from


def _text(draw: st.DrawFn) -> str:
    body = "\n".join(draw(st.lists(_choose(_CODE), max_size=6)))
    if draw(st.booleans()):
        body = re.sub("'+", "'", body)
        return f"'''{body}\n{draw(_choose(['', chr(39), chr(39) * 2]))}'''"
    body = draw(_choose([body, body + '\\"""', body + "\\\\", body + "\\\n \n"]))
    return f'"""{body} {draw(_choose(["", chr(34), chr(34) * 2]))}"""'


def _value(draw: st.DrawFn, source: Written, path: toml.Path, depth: int = 0) -> None:
    kind = draw(_choose(["plain", "text", "list", "table"] if depth < 3 else ["plain", "text"]))
    if kind == "list":
        source.write("[" + draw(_choose(_GAPS)))
        for index in range(draw(st.integers(0, 3))):
            source.note((*path, index))
            _value(draw, source, (*path, index), depth + 1)
            source.write(draw(_choose(_GAPS)) + "," + draw(_choose(_GAPS)))
        source.write("]")
    elif kind == "table":
        source.write("{ ")
        for index in range(draw(st.integers(0, 3))):
            source.write(", " if index else "")
            _pair(draw, source, path, depth + 1)
        source.write(" }")
    else:
        source.write(_text(draw) if kind == "text" else draw(_choose(_PLAIN)))


def _key(draw: st.DrawFn, source: Written, path: toml.Path, name: str) -> toml.Path:
    source.note((*path, name))
    source.write(draw(_choose([name, f'"{name}"', f"'{name}'", f'"\\u{ord(name[0]):04x}{name[1:]}"'])))
    return (*path, name)


def _pair(draw: st.DrawFn, source: Written, path: toml.Path, depth: int = 0) -> None:
    for _ in range(draw(st.integers(0, 2))):
        path = _key(draw, source, path, source.new())
        source.write(draw(_choose([".", " . "])))
    path = _key(draw, source, path, source.new())
    source.write(draw(_choose(["=", " = "])))
    _value(draw, source, path, depth)


def _header(draw: st.DrawFn, source: Written) -> toml.Path:
    """Begin a table: a new one, or the next one of a list of tables, or one in the last of these."""
    many = draw(st.booleans())
    source.write("[[" if many else "[")
    # A list of tables in an entry that another has followed cannot be reached any more.
    reached = sorted(path for path in source.last if len(path) < 4 and source.is_last(path))
    listed = draw(_choose(reached) | st.none()) if reached else None
    path: toml.Path = ()
    for part in listed or ():
        if isinstance(part, str):
            path = _key(draw, source, path, part)
            source.write(".")
        else:
            path = (*path, part)
    if listed is not None:
        path = (*path, source.last[listed])
    if many:
        again = [path_[-1] for path_ in source.last if path_[:-1] == path]
        name = draw(_choose([*again, source.new()]))
        path = _key(draw, source, path, str(name))
        source.last[path] = source.last.get(path, -1) + 1
        path = (*path, source.last[path])
        source.note(path)
    else:
        path = _key(draw, source, path, source.new())
    source.write("]]\n" if many else "]\n")
    return path


@st.composite
def _sources(draw: st.DrawFn) -> Written:
    source = Written()
    path: toml.Path = ()
    for _ in range(draw(st.integers(0, 8))):
        if draw(_choose([False, False, True])):
            path = _header(draw, source)
        else:
            source.write(draw(_choose(["", "\n", "  ", '# memroy = [ """\n', "\t\n"])))
            _pair(draw, source, path)
            source.write(draw(_choose(["\n", "  # ' memroy = 1\n", "\t\n"])))
    return source


@given(_sources())
def test_of_every_key_the_line_is_found(source: Written) -> None:
    """Whatever stands around it: texts that look like keys and brackets, comments, lists of tables in each other."""
    document = tomllib.loads(source.text)
    assert toml.read(source.text.encode(), "x") == document
    assert key_lines(source.text) == source.lines


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
    if next(toml._forbidden(document), None) is None:
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
