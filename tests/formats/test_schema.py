"""Schemas and tables of keys."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from spool.core.model import State
from spool.core.names import EXECUTORS
from spool.formats import schema
from spool.formats.jobfile import FORMAT
from spool.formats.values import NOTIFY_EVENTS


@pytest.mark.parametrize("kind", schema.KINDS)
def test_the_shipped_schema_is_up_to_date(kind: str) -> None:
    """Run `python -m spool.formats.schema KIND > src/spool/formats/KIND.schema.json` after changing a key."""
    shipped = resources.files("spool.formats").joinpath(f"{kind}.schema.json").read_text(encoding="utf-8")
    assert shipped == schema.render(kind)


@pytest.mark.parametrize("kind", schema.KINDS)
def test_every_key_is_described(kind: str) -> None:
    """A key without a word about it would be a hole in the documentation."""
    rows = [row.split(" | ") for row in schema.table(kind).splitlines()[2:]]
    assert rows
    for row in rows:
        assert len(row) == 4
        assert row[1].strip()
        assert row[3].rstrip(" |")


def test_the_schema_of_a_job_is_strict() -> None:
    """Editors underline an unknown key and a missing command, as spool itself will."""
    made = schema.schema("job")
    assert made["required"] == ["command"]
    assert made["additionalProperties"] is False
    assert set(made["properties"]) == set(FORMAT.struct.__struct_fields__)
    assert made["properties"]["executor"]["enum"] == list(EXECUTORS)
    assert all(table["additionalProperties"] is False for table in made["$defs"].values())


def test_every_outcome_can_be_notified_of() -> None:
    """The events are the outcomes and what happens on the way there."""
    assert {state for state in State if state.ended} < set(NOTIFY_EVENTS)


def test_the_generator_prints_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m spool.formats.schema` is the tool behind the shipped files and the pages."""
    assert schema.main(["job"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "a job file of spool"
    assert schema.main(["config", "--table"]) == 0
    assert "| `quotas.users.NAME.max_running_jobs` |" in capsys.readouterr().out
    assert schema.main([]) == 2
    assert schema.main(["job", "--x"]) == 2
