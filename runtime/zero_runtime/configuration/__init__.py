"""The keys of a DeepSpeed configuration: the valid values of each key, its effect, and refused combinations."""
