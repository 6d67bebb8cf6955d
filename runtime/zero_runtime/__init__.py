"""zero_runtime: a ZeRO runtime driven by DeepSpeed's API and configuration files."""
