"""What may run a job, by name. A module of its own, for the quick way to submit has no time to import more."""

EXECUTORS = ("process", "tmux", "slurm")
"""What a job file and the configuration may name; of these `spool.executors` has those that there are."""
