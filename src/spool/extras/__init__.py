"""What spool can do beyond its core, each capability in a folder of its own."""
