"""Fewer bytes for gradients and parameters: pure codecs, what is left over, and the messages that carry both."""
