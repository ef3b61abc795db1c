"""What the project shows the world: one version everywhere, its packages, its forms and its workflows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from spool import __version__
from spool.cli import group
from support import ROOT
from test_readme import read

yaml = pytest.importorskip("yaml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GITHUB = ROOT / ".github"
CONDA = ROOT / "contrib" / "packaging" / "conda" / "meta.yaml"
FLAKE = ROOT / "contrib" / "packaging" / "flake.nix"
needs_checkout = pytest.mark.skipif(not GITHUB.exists() or not (ROOT / ".ci").exists(), reason="no checkout")


def load(path: Path) -> Any:
    """Return what a YAML file holds."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@needs_checkout
@pytest.mark.parametrize(("tag", "code"), [(f"v{__version__}", 0), (f"v{__version__}.1", 1), (__version__, 1)])
def test_a_tag_is_released_only_if_it_is_the_version_everywhere(tag: str, code: int) -> None:
    """The version of the source, the newest dated section of CHANGELOG.md and CITATION.cff are one."""
    done = subprocess.run([sys.executable, ROOT / ".ci" / "released", tag], capture_output=True, text=True, check=False)
    assert (done.returncode, bool(done.stderr)) == (code, bool(code)), done.stderr


def test_the_citation_describes_the_project() -> None:
    """It has the keys that its format requires, and the words of pyproject.toml."""
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert citation["abstract"].rstrip(".") == PROJECT["description"]
    assert citation["license"] == PROJECT["license"]
    assert set(citation["keywords"]) <= set(PROJECT["keywords"])


def test_the_conda_recipe_has_the_version_and_the_libraries_of_the_project() -> None:
    """A library that is added or given another range is changed there too."""
    recipe = load(CONDA)
    assert recipe["package"] == {"name": PROJECT["name"], "version": __version__}
    asked = {line.replace(" ", "") for line in recipe["requirements"]["run"]}
    assert asked == {*PROJECT["dependencies"], f"python{PROJECT['requires-python']}"}
    (entry,) = recipe["build"]["entry_points"]
    assert entry.split(" = ") == ["spool", PROJECT["scripts"]["spool"]]


def test_the_flake_has_the_version_and_the_libraries_of_the_project() -> None:
    """With `textual`, for `spool top`."""
    text = FLAKE.read_text(encoding="utf-8")
    assert f'version = "{__version__}";' in text
    (listed,) = re.findall(r"dependencies = with pkgs\.python3Packages; \[(.*?)\]", text, re.DOTALL)
    names = {re.split(r"[<>=]", line)[0] for line in PROJECT["dependencies"]}
    assert set(listed.split()) == {*names, "textual"}
    assert text.count("{") == text.count("}")


def test_the_hook_of_pre_commit_calls_the_program() -> None:
    """Its entry is a call that `spool` understands, with files behind it."""
    (hook,) = load(ROOT / ".pre-commit-hooks.yaml")
    assert {"id", "name", "entry", "language"} <= hook.keys()
    read(group.spool, [*hook["entry"].split(), "pyproject.toml"])


@needs_checkout
def test_the_forge_runs_the_checks_of_a_developer() -> None:
    """The workflow of a change calls .ci/run, and has nothing of its own that could differ from it."""
    (job,) = load(GITHUB / "workflows" / "ci.yml")["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]


@needs_checkout
def test_a_release_needs_no_secret_and_builds_what_was_checked() -> None:
    """Only the job that publishes has an identity; wheels for two processors and an sdist come before it."""
    text = (GITHUB / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert not re.search(r"secrets\.|password|token(?!:| to keep)", text)
    jobs = yaml.safe_load(text)["jobs"]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert set(jobs["publish"]["needs"]) == {"wheel", "sdist"}
    assert {jobs[name]["needs"] for name in ("wheel", "sdist")} == {"version"}
    processors = {each["processor"] for each in jobs["wheel"]["strategy"]["matrix"]["include"]}
    assert processors == {"x86_64", "aarch64"}
    for name in re.findall(r"(?:^|[\s/])(\.ci/\w+)", text):
        assert (ROOT / name).exists(), name


@needs_checkout
def test_the_form_of_a_report_asks_for_what_a_maintainer_needs() -> None:
    """The job file, the metadir and `spool doctor` are required."""
    form = load(GITHUB / "ISSUE_TEMPLATE" / "bug.yml")
    required = {part["id"] for part in form["body"] if part.get("validations", {}).get("required")}
    assert {"job", "metadir", "doctor"} <= required
    for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml"):
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= load(path).keys()
