"""The messages of ranks that share a model: pipelines, tensors, sequences."""
