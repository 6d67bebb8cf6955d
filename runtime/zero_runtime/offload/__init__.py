"""Offload: optimizer states and parameters in host memory or in files while they are not in use."""
