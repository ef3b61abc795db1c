"""Turns on a shared machine: grants leases to the users' dispatchers. It opens no file of a user and starts nothing."""
