"""Stragglers: arrivals, lateness, slow paths, and the verdict on them."""
