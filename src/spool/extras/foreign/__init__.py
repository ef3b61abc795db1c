"""Scripts for other schedulers: the options in their lines, and what they look for in their jobs."""
