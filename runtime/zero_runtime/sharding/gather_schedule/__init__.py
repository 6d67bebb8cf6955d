"""Decides when parameters are gathered, prefetched and released (stage 3)."""
