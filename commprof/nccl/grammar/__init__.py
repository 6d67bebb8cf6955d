"""Parses single lines in all forms that NCCL 2.4 to 2.30 prints."""
