"""What this machine can do, measured: ``python -m zero_runtime.bench``."""
