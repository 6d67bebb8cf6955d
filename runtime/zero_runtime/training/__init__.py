"""The engine around one model: passes, steps, data, and what it reports."""
