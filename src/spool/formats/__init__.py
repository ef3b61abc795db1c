"""Text to values and back: job files, configuration, records, the wrapper."""
