"""What `spool doctor` tries, finds and fixes: unlike the answers of `query`, a check may write to the spool."""
