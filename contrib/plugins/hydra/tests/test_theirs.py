"""Hydra's own tests of launchers, with this one."""

from __future__ import annotations

import pytest
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite


@pytest.mark.parametrize(("launcher_name", "overrides"), [("spool", [])])
class TestLauncher(LauncherTestSuite):
    """What every launcher does with a sweep."""


@pytest.mark.parametrize(
    ("launcher_name", "overrides"), [("spool", ["hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2"])]
)
class TestBatches(BatchedSweeperTestSuite):
    """What it does with one batch after the other."""


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({}, ["-m", "hydra/launcher=spool", "hydra/hydra_logging=disabled", "hydra/job_logging=disabled"])],
)
class TestPrograms(IntegrationTestSuite):
    """What programs find that run under it."""
