"""The requested level: what the config or the wrappers of a run ask for in each step."""
