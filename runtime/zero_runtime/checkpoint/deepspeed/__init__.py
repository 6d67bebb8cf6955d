"""Reads checkpoints that DeepSpeed wrote, and writes universal folders that DeepSpeed loads.

No code in a file is run: torch reads it with ``weights_only=True``, and the few DeepSpeed classes that such files name
become objects without methods (:mod:`zero_runtime.checkpoint.deepspeed.objects`).
"""
