"""What is known of the jobs, runs and arrays of one spool: the model that decides and explains."""
