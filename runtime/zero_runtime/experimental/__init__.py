"""Experimental parts: topology-aware collectives, compression, 1-bit optimizers and bounded delay.

The rules for these parts differ from the rest of zero_runtime. Traffic and results may change with any
release. Losses may differ from DeepSpeed's by design (docs/deepspeed-differences.md describes how). Each part
is off unless its configuration key is set. Outside this package, only the code that reads the configuration
and assembles the engine depends on these parts.
"""
