"""The keys of a DeepSpeed config: what each may be, what becomes of it, and which go together."""
