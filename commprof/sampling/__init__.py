"""Samplers, and the diagnosis of hung jobs, outside of the training processes."""
