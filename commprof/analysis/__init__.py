"""Answers about runs, from their tables. ``commprof.analysis.api`` is the only module that others import."""
