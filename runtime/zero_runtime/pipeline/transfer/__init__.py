"""What stages send each other and where micro-batches and results come from."""
