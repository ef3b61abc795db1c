"""Schemas and tables of keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from spool.core.model import JOB_WORDS, ArrayTask, Dependencies, Limits, Policy, Request, Retry, Spec, State
from spool.core.units import format_duration
from spool.formats import capabilities, config, jobfile, keys, schema, toml
from spool.formats.capabilities import REQUIRED, KeyTable
from spool.formats.jobfile import FORMAT
from spool.formats.schema import Documented
from support import ROOT, WHOLE


@WHOLE
@pytest.mark.parametrize("kind", schema.KINDS)
def test_the_shipped_schema_is_up_to_date(kind: str) -> None:
    """Run `python -m spool.formats.schema --write` after changing a key."""
    folder = resources.files("spool").joinpath(schema.FOLDERS.get(kind, "formats"))
    shipped = folder.joinpath(f"{kind}.schema.json").read_text(encoding="utf-8")
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
    """Editors underline an unknown key and a missing command, as spool will; every outcome can be told of."""
    assert {state for state in State if state.ended} < set(JOB_WORDS)
    made = schema.schema("job")
    assert made["required"] == ["command"]
    assert made["additionalProperties"] is False
    assert set(made["properties"]) == {key.name for key in FORMAT.table.keys}
    assert made["properties"]["executor"]["examples"] == list(capabilities.executors())  # packages offer others
    assert all(table["additionalProperties"] is False for table in made["$defs"].values())


def test_the_generator_prints_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m spool.formats.schema` is the tool behind the shipped files and the pages."""
    assert schema.main(["job"]) == 0
    assert json.loads(capsys.readouterr().out)["title"]
    assert schema.main(["config", "--table"]) == 0
    assert "| `quotas.users.NAME.max_running_jobs` |" in capsys.readouterr().out
    assert schema.main([]) == 2
    assert schema.main(["job", "--x"]) == 2


@WHOLE
def test_one_command_writes_what_is_made_of_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--write` puts the schemas into a checkout, and copies of them beside its examples."""
    places = {kind: f"src/spool/{schema.FOLDERS.get(kind, 'formats')}" for kind in schema.KINDS}
    for folder in places.values():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path)
    assert schema.main(["--write"]) == 0
    for kind in schema.KINDS:
        assert (tmp_path / places[kind] / f"{kind}.schema.json").read_text(encoding="utf-8") == schema.render(kind)
        copy = tmp_path / f"examples/{kind}.schema.json"
        if copy.exists():
            assert copy.read_text(encoding="utf-8") == schema.render(kind)
            assert (ROOT / "examples" / copy.name).read_text(encoding="utf-8") == schema.render(kind)


def _stated(format_: Documented, table: KeyTable) -> dict[str, Any]:
    """Return a file that states each default of *table*."""
    return {
        key.name: _stated(format_, key.table) if key.table is not None and not key.many else default
        for key in table.keys
        if (default := format_.default_of(key)) is not None and default is not REQUIRED
    }


def test_the_defaults_on_the_pages_are_those_of_the_model() -> None:
    """To state the default of a key, as the pages have it, is to leave the key out."""
    stated = _stated(Documented(config.FORMAT), config.CONFIG)
    assert stated["kill_grace"] == format_duration(config.Config().kill_grace_ns)
    assert replace(config.parse(toml.write(stated)), parts=()) == config.Config()
    for kind in (kind for _, kinds in capabilities.contributed("files") for kind in kinds):
        assert kind.parse(toml.write(_stated(Documented(kind.format), kind.format.table))) == kind.parse(b"")
    short = {"command": "x", "retry": {}}
    job = Documented(FORMAT)
    retry = _stated(job, keys.RETRY)
    assert retry["on"] == ("failed",)
    long = {"command": "x", **_stated(job, keys.JOB), "retry": retry}
    assert replace(jobfile.parse(toml.write(long), name="a"), parts=()) == jobfile.parse(toml.write(short), name="a")
    assert jobfile.parse(b'command = "x"', name="a") == Spec(command="x")


def _filled(table: KeyTable, part: str = "") -> Iterator[tuple[str, str]]:
    """Yield each part of the model that *table* fills, with the field."""
    for key in table.keys:
        path = key.target if "." in key.target else f"{part}.{key.target}".lstrip(".")
        into, _, field = path.rpartition(".")
        if key.table is None or key.many:
            yield into, field
        else:
            yield from _filled(key.table, path)


JOB_PARTS = {"": Spec, "request": Request, "retry": Retry, "task": ArrayTask, "depends_on": Dependencies}
CONFIG_PARTS = {
    "": config.Config,
    "policy": Policy,
    "gpu": config.GpuConfig,
    "gc": config.RetentionPolicy,
    "policy.default_user_limits": Limits,
    "policy.default_project_limits": Limits,
}
# Keys that become other fields; and the fields that come of these, are fixed, of an option, or the simulator's.
NO_FIELDS = {"start_after", "on_dependency_failure"}
NO_KEYS = {"start_after_ns", "start_delay_ns", "cancel_on_dependency_failure", "advice", "parts"}
NO_KEYS |= {"max_runs", "defaults_text", "promotes", "protects", "guess_budget", "strict_order"}
NO_KEYS |= {"memory_auto", "gpu_memory_auto"}


@pytest.mark.parametrize(
    ("column", "table", "parts"), [("job", keys.JOB, JOB_PARTS), ("config", config.CONFIG, CONFIG_PARTS)]
)
def test_keys_and_fields_of_the_model_are_the_same(column: str, table: KeyTable, parts: dict[str, type]) -> None:
    """What a row of the core fills is a field of the model, and each field is filled by a row."""
    others = {key for part in capabilities.parts(column).values() for key in part.keys}
    own = KeyTable(table.name, table.about, *(key for key in table.keys if key not in others))
    filled = {(part, field) for part, field in _filled(own) if field not in NO_FIELDS}
    known = {(part, field) for part, model in parts.items() for field in model.__struct_fields__}
    made = {tuple(part.rpartition(".")[::2]) for part in parts}
    assert filled == {(part, field) for part, field in known - made if field not in NO_KEYS}
