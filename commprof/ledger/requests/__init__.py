"""The requested level: the messages that the config or the wrappers of a run request in each step."""
