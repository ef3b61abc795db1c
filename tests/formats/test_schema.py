"""Schemas, tables of keys and #SPOOL lines."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from spool.core.errors import UsageError
from spool.core.model import State
from spool.core.names import EXECUTORS
from spool.formats import directives, schema
from spool.formats.job_schema import JobFile
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
    assert set(made["properties"]) == set(JobFile.__struct_fields__)
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


SCRIPT = b"""#!/bin/sh
# Trains the small model.
#SPOOL --gpus 1 --time-limit 2h
##SPOOL --gpus 8

#SPOOL\t--group "night runs"   # the slow ones
#SPOOL
#SPOOLED --no
  # indented
set -e
#SPOOL --too-late
"""


def test_spool_lines_are_read_from_the_head_of_a_script() -> None:
    """The comments before the first command, and no others; `##SPOOL` switches one off."""
    words = ["--gpus", "1", "--time-limit", "2h", "--group", "night runs"]
    assert directives.words(SCRIPT, "train.sh") == words
    assert directives.words(SCRIPT.replace(b"\n", b"\r\n"), "train.sh") == words
    assert directives.late_lines(SCRIPT) == [11]


@pytest.mark.parametrize(
    "script", [b"", b"\n", b"\x7fELF\x02\x01\x01\0\0\n#SPOOL --gpus 1\n", b"echo\n#SPOOL --gpus 1"]
)
def test_a_script_without_a_head_has_no_options(script: bytes) -> None:
    """Nor has a program that is no text."""
    assert directives.words(script, "x") == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'#SPOOL --group "night', "line 2: no closing quotation"),
        (b"#SPOOL gpus 1", "line 2: 'gpus' is not an option"),
        (b"#SPOOL --group a\0b", "line 2: it has a NUL"),
    ],
)
def test_a_wrong_spool_line_is_told_with_its_number(line: bytes, why: str) -> None:
    """The error names the script and the line."""
    with pytest.raises(UsageError) as error:
        directives.words(b"#!/bin/sh\n" + line + b"\n", "train.sh")
    assert str(error.value).startswith(f"cannot read the #SPOOL lines of train.sh: {why}")
