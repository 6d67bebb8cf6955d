"""One recorded process: its options, its files, its threads and its limits."""
