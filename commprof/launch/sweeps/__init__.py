"""Sweeps: many runs of one program, each with its own config."""
