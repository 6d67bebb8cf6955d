"""A model as a sequence of layers: how it is built and divided among stages."""
