"""The training engine: passes, steps, data, checkpoints and reports of one model."""
