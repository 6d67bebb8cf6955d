"""The files of a checkpoint: how they are written and read."""
