"""The optimizer step: over whole parameters (stage 0) and over shards of them (stages 1 to 3)."""
