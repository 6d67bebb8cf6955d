"""What ranks send that share a model: pipelines, tensors, sequences."""
