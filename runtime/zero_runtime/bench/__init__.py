"""Benchmarks of this machine's collectives and disks: ``python -m zero_runtime.bench``."""
