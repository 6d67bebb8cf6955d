"""Predict other settings of the layers of experts of a recorded run."""
