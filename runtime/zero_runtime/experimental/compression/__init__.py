"""Compression of gradients and parameters: codecs, residuals of error feedback, and the compressed messages."""
