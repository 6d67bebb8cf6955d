"""Expert parallelism as DeepSpeed's ``MoE`` layer has it: groups of ranks, capacity, and the messages of tokens."""
