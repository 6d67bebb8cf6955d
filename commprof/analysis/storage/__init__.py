"""Answers that are evaluated once and stored: the index, summaries, files of hosts, caches."""
