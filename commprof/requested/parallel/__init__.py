"""The messages of ranks that share a model by pipeline, tensor or sequence parallelism."""
