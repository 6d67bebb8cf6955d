"""Stored answers about runs: the index, summaries, files of hosts, and caches."""
