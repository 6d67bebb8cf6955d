"""What torch's wrappers send: DDP, FSDP 1 and 2, ZeroRedundancyOptimizer."""
