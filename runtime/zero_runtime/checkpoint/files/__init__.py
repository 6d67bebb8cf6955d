"""The files of a checkpoint, and how they are written and read."""
