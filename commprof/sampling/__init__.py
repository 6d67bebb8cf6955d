"""Beside the training, in processes of their own: samplers, and what a job that hangs is waiting for."""
