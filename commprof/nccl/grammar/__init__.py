"""The forms of the lines that NCCL 2.4 to 2.30 prints, and their meanings."""
