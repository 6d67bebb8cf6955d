"""Collectives over all ranks, composed of collectives along the axes of a grid of ranks (the block ``communication``)."""
