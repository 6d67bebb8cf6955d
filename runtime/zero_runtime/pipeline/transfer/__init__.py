"""Messages between stages, and the sources of micro-batches and results."""
