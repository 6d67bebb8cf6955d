"""Parses NCCL_DEBUG logs into tables of operations, communicators, topology and tuning."""
