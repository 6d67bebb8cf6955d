"""Modules to browse runs, records and alignments: listings, pages, the timeline, notebooks."""
