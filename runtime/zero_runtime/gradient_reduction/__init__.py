"""From the gradients of a backward pass to reduced shards of them (stages 0 to 2)."""
