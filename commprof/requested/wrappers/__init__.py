"""The messages of torch's wrappers: DDP, FSDP 1 and 2, and ZeroRedundancyOptimizer."""
