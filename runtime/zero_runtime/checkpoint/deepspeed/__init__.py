"""Reads checkpoints that DeepSpeed wrote, and writes universal folders that DeepSpeed loads.

No code in a file is run, because torch reads the file with ``weights_only=True``. The few DeepSpeed classes
that such files name become objects without methods (:mod:`zero_runtime.checkpoint.deepspeed.objects`).
"""
