"""`spool simulate`: how policies would schedule a trace, or this spool's own history, on an imaginary machine."""
