"""Programs of accelerate, transformers, TRL, PEFT and Lightning on DeepSpeed, and the cases in which each program runs.

The same program runs with DeepSpeed itself (``tools/record_engine_programs.py``, which records the results) and with
zero_runtime. Tests compare the results of zero_runtime with the recorded results.
"""
