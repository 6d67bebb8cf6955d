"""DeepSpeed's names for torch.distributed, process groups, topologies and logs."""
