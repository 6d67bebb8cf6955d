"""The storage of shards of parameters: on the device, in host memory or in files (stage 3)."""
