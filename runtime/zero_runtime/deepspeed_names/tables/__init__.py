"""The tables of DeepSpeed's names: which object of zero_runtime is behind each, or why it is refused."""
