"""From a configuration to an engine, and from a command line to ranks."""
