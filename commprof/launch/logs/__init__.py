"""NCCL's log through one job: what is asked for, collected and counted."""
