"""Programs of accelerate, transformers, TRL, PEFT and Lightning on DeepSpeed, each with the cases that it is run with.

The same program runs with DeepSpeed itself (``tools/record_engine_programs.py``, which notes what came of it) and with
zero_runtime, whose results the tests hold to those.
"""
