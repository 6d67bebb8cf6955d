"""The optimizer step over whole parameters and over shards of them."""
