"""`spool plot`: pictures of runs, and the charts of other verbs."""
