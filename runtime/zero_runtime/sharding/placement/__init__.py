"""Where shards of parameters are kept: on the device, in host memory or in files (stage 3)."""
