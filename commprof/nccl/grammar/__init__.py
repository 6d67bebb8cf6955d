"""The forms of the lines that NCCL prints, from 2.4 to 2.30, and what each says."""
