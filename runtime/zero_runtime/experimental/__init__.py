"""Experimental parts: topology-aware collectives, compression, 1-bit optimizers and bounded delay.

Their rules differ from the rest of zero_runtime: traffic and results may change with any release, and losses may differ
from DeepSpeed's by design (docs/deepspeed-differences.md says how). Each is off unless its configuration key is set.
Outside this package, only the code that reads the configuration and assembles the engine depends on these parts.
"""
