"""Questions to tables. ``commprof.analysis.api`` is the only module that others import."""
