"""Tables to files that other tools and papers read."""
