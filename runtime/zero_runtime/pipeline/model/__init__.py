"""A model as a sequence of layers, its construction, and its partition into stages."""
