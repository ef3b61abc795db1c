"""The disk: the one place that writes, and the spool as seen and as changed."""
