"""Stored answers: the index, summaries, files of hosts, and caches."""
