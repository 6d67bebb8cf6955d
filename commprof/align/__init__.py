"""Align records with NCCL log lines, and the records of all ranks about the same collective."""
