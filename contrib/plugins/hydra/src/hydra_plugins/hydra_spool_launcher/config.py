"""The configuration of the launcher, and its name. Every Hydra program imports this, so it imports nothing of spool."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore


@dataclass
class SpoolLauncherConf:
    """The launcher `spool`. Except for `root`, `name` and `more`, the keys are those of spool's job files."""

    _target_: str = "hydra_plugins.hydra_spool_launcher.spool_launcher.SpoolLauncher"

    # The directory of the spool. Default: $SPOOL_DIR, else ~/.spool.
    root: str | None = None
    # The jobs of a sweep are NAME-1_0, NAME-1_1 and so on, those of the next one NAME-2_0.
    name: str = "${hydra.job.name}"

    # What each job gets.
    cpus: int = 1
    memory: str | None = None
    gpus: int = 0
    gpu_memory: str | None = None
    gpu_type: str | None = None
    time_limit: str | None = None
    env: dict[str, str] = field(default_factory=dict)

    # When it runs, and how many at once.
    priority: int | None = None
    max_running: int | None = None
    retry: dict[str, Any] = field(default_factory=dict)

    # What it is filed under.
    project: str | None = None
    tags: list[str] = field(default_factory=list)
    comment: str | None = None

    # Any other key of a job file: `+hydra.launcher.more.gpu_idle=30m`.
    more: dict[str, Any] = field(default_factory=dict)


ConfigStore.instance().store(
    group="hydra/launcher", name="spool", node=SpoolLauncherConf, provider="hydra_spool_launcher"
)
