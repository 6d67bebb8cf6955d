"""Parses the logs that NCCL writes with NCCL_DEBUG into tables of operations, communicators, topology and tuning."""
