"""Jobs as tables: in a notebook, and of pandas."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

import spool
from spool.store.spool import Spool


class _Cells(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.others: list[str] = []
        self._within = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag not in ("table", "thead", "tbody", "p"):
            self.others.append(tag)

    def handle_data(self, data: str) -> None:
        self.rows[-1][-1] += data


def test_a_list_of_jobs_shows_itself_in_a_notebook(client: spool.Client, spool_root: Path) -> None:
    """Columns that are empty are left out, and no text of a job becomes markup."""
    client.submit("true", name="a", memory="1G", held=True)
    sweep = client.sweep("true", matrix={"lr": ["<script>"]}, name="s", held=True)
    head, *rows = _Cells(client.jobs()._repr_html_()).rows
    assert head == ["name", "state", "CPUs", "memory", "time", "reason"]
    assert [row[:2] for row in rows] == [["a", "held"], ["s", "held"]]
    shown = _Cells(sweep._repr_html_())
    assert shown.others == []
    assert shown.rows[1][0] == "s"
    row = spool.JobRow(name="a", state=spool.State.HELD, reason="<b>&", parameters=(("lr", "<script>"),))
    escaped = _Cells(replace(client.jobs(), rows=(row,))._repr_html_())
    assert escaped.others == []
    assert escaped.rows[1] == ["a", "held", "lr=<script>", "<b>&"]
    (spool_root / "held" / "a.toml").unlink()
    a = spool.Job(Spool(client.root), "a")
    assert "no job of that name" in a._repr_html_()


def test_a_list_of_jobs_is_a_table_of_pandas(client: spool.Client) -> None:
    """One row for each, instants as times, a column for each parameter; what is unknown is missing."""
    pandas = pytest.importorskip("pandas")
    client.submit("true", name="a", cpus=2, resources={})
    client.submit("true", name="b", held=True)
    table = client.jobs().to_dataframe().set_index("name")
    assert sorted(table.index) == ["a", "b"]
    assert table.state["a"] == "queued"
    assert table.cpus["a"] == 2
    assert table.submitted_at["a"] <= pandas.Timestamp.now("UTC")
    assert pandas.isna(table.ended_at["a"])
    assert client.jobs(spool.JobFilter(names=("none",))).to_dataframe().empty


def test_without_pandas_an_error_says_so(client: spool.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what to do."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(spool.SpoolError, match="pandas is not installed; `pip install pandas`"):
        client.jobs().to_dataframe()
