"""NCCL's log of a job: how it is requested, collected and counted."""
