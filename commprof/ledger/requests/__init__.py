"""The requested level: what the config or the wrappers of a run request in each step."""
