"""NCCL's own log: lines to records, communicators."""
