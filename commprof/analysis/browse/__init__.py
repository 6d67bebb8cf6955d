"""Single records, alignments and runs as people look at them: listings, pages, the timeline, notebooks."""
