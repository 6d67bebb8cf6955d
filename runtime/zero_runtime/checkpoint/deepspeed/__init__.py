"""Checkpoints that DeepSpeed wrote, read as they are, and checkpoints written for DeepSpeed to read.

Nothing in a file is run: torch reads it with ``weights_only=True``, and the few classes of DeepSpeed's own that such files
name become objects without methods (:mod:`zero_runtime.checkpoint.deepspeed.objects`).
"""
