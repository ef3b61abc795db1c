"""Observe, plan, carry out, write down: the service that runs the jobs."""
