"""Collectives over all ranks that consist of collectives along the axes of a grid (the block ``communication``)."""
