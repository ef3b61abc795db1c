"""submitit's jobs through spool: `submitit.AutoExecutor(folder, cluster="spool")`."""

from spool_submitit.environment import SpoolJobEnvironment
from spool_submitit.executor import SpoolExecutor
from spool_submitit.job import SpoolJob

__all__ = ["SpoolExecutor", "SpoolJob", "SpoolJobEnvironment"]
