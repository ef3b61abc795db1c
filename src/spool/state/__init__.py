"""The jobs, runs and arrays of one spool: the model for decisions and explanations."""
