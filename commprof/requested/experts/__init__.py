"""Expert parallelism as in DeepSpeed's ``MoE`` layer: groups of ranks, capacity, and messages that carry tokens."""
