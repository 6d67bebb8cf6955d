"""DeepSpeed's names for optimizers, parameters, tensors and losses."""
