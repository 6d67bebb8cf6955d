"""Compares the levels with each other: attribution, orders, splits, and the result in rows and sentences."""
