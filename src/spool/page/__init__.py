"""The status page: one HTML file that shows the spool, written by the listeners' process, opened without a server."""
