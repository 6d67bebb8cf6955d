"""Browsing of runs, records and alignments: listings, pages, the timeline, notebooks."""
