"""The NCCL log of a job: requests the log from NCCL, collects it, and counts its bytes and lines."""
