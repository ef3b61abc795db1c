"""Tables in a pipe."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spool.cli.render import Column, aligned
from spool.core.errors import shown

COLUMNS = [Column("NAME"), Column("N", right=True), Column("LONG TITLE"), Column("END")]


@given(st.lists(st.tuples(*[st.text(max_size=4)] * 4), max_size=4), st.booleans())
def test_a_table_is_padded_cell_by_cell(rows: list[tuple[str, ...]], last_right: bool) -> None:
    """Each cell is made safe and has the width of its column, but for the last; lines end without spaces."""
    columns = [*COLUMNS[:-1], Column("END", right=last_right)]
    lines = [[column.title for column in columns], *([shown(cell) for cell in row] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(4)]
    expected = ""
    for line in lines:
        first, second, third, last = line
        cells = [first.ljust(widths[0]), second.rjust(widths[1]), third.ljust(widths[2])]
        expected += "  ".join([*cells, last.rjust(widths[3]) if last_right else last]).rstrip() + "\n"
    assert aligned(columns, rows) == expected
