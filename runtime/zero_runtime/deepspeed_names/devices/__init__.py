"""DeepSpeed's names for accelerators, streams, timers and compiled operators."""
