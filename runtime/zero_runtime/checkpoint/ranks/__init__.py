"""Checkpoints with parts that several ranks or stages saved. Loading merges the parts or splits them again."""
