"""Optimizer states and parameters that live in host memory or in files while nobody works on them."""
