"""Predict the memory of a rank in addition to its states: the activations and the peak."""
