"""Sections of the output of ``report``, ``align`` and ``doctor``."""
