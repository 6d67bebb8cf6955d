"""Predict the step time of a recorded run with other settings, from its compute times and the times of its messages."""
