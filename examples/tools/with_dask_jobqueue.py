"""Many short tasks of dask: the workers are jobs. `cluster.adapt(maximum_jobs=8)` asks for them while there is work."""

import os

from dask.distributed import Client
from dask_jobqueue import SLURMCluster
from dask_jobqueue.slurm import SLURMJob


class SpoolJob(SLURMJob):
    """A worker that `spool submit` starts, by a script with `#SBATCH` lines."""

    submit_command = "spool submit"
    cancel_command = "spool cancel"
    job_id_regexp = r"(?P<job_id>\S+)"

    def __init__(self, scheduler=None, name=None, **options):
        super().__init__(scheduler, name, **{**options, "job_name": f"{name}-{os.getpid()}"})


class SpoolCluster(SLURMCluster):
    """Workers that are jobs; `job_extra_directives=["--gpus=1"]` asks for more."""

    job_cls = SpoolJob


with SpoolCluster(cores=1, memory="1GB", walltime="01:00:00") as cluster, Client(cluster) as client:
    cluster.scale(jobs=2)
    client.wait_for_workers(2)
    print("squares", client.gather(client.map(lambda n: n * n, range(4))))  # squares [0, 1, 4, 9]
