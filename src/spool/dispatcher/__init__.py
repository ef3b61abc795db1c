"""Wake, look, decide, act: the process that runs the jobs."""
