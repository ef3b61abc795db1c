"""The checks of `spool doctor`, and their fixes: unlike the queries of `query`, a check may write to the spool."""
