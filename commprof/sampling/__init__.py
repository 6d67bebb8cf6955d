"""Samplers and the diagnosis of hung jobs. Both run outside of the training processes."""
