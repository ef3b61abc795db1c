"""Functions: calls of Python functions are jobs, behind the interface of `concurrent.futures`."""
