"""The optimizer step, over whole parameters (stage 0) and over shards of parameters (stages 1 to 3)."""
