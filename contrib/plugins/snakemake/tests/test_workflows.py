"""Snakemake's own tests of an executor, on a spool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import snakemake.common.tests
from snakemake.settings.types import RemoteExecutionSettings
from spool import Client, InvalidJob, Job

from snakemake_executor_plugin_spool import ExecutorSettings, _spool


@pytest.mark.usefixtures("spool")
class TestWorkflows(snakemake.common.tests.TestWorkflowsLocalStorageBase):
    """Its simple workflow, and the one with groups."""

    __test__ = True

    def get_executor(self) -> str:
        """Name the plugin."""
        return "spool"

    def get_executor_settings(self) -> ExecutorSettings:
        """Leave each option as it is."""
        return ExecutorSettings()

    def test_what_is_ready_is_one_batch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The three groups that are ready at once reach the spool by one call."""
        sizes: list[int] = []

        def counted(client: Client, jobs: Sequence[_spool.Keys]) -> list[Job | InvalidJob]:
            sizes.append(len(jobs))
            return submit(client, jobs)

        submit = _spool.submit
        monkeypatch.setattr(_spool, "submit", counted)
        self.run_workflow("groups", tmp_path)
        assert sizes == [3, 1]

    def test_the_pace_of_polling_commands_does_not_matter(self, tmp_path: Path) -> None:
        """A pause of an hour between two looks at a cluster does not delay a workflow."""
        hourly = RemoteExecutionSettings(seconds_between_status_checks=3600)
        self.get_remote_execution_settings = lambda: hourly
        self.run_workflow("simple", tmp_path)
