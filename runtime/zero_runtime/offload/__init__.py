"""Offload: optimizer states and parameters are in host memory or in files while they are not in use."""
