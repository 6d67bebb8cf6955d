"""The rows of a log's tables, and what the log lacks."""
